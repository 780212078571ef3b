//! The fabric's half of a connected queue pair.

use std::fmt;

use crate::{FabricError, Immediate, Look, QueuePairStats, RemoteRange, SlotKey, WorkRequest};

/// The fabric's half of a connected queue pair; [`QueuePair`](crate::QueuePair) is the user's half. Both share a
/// [`QueuePairCore`](crate::QueuePairCore), on which the fabric reports completions, arrivals and failure.
pub trait Link: Send + Sync + fmt::Debug + 'static {
    /// Takes one operation whose slot is already reserved, in posting order. Never blocks. A failure is
    /// reported on the core like any completion. The send queue has room for all its
    /// [pieces](WorkRequest::pieces).
    fn submit(&self, key: SlotKey, request: &WorkRequest);

    /// Posts a write of a few bytes, or a bare notification, that is complete when this returns: the bytes were copied, it
    /// takes no slot, and nothing is reported of it. It is posted after all that was submitted before. `None` if the
    /// fabric has no such writes, or no room for one now.
    ///
    /// # Errors
    /// The write cannot be posted; nothing was.
    fn submit_inline(
        &self,
        _bytes: &[u8],
        _remote: Option<&RemoteRange>,
        _immediate: Option<Immediate>,
    ) -> Option<Result<(), FabricError>> {
        None
    }

    /// Makes progress on behalf of a task that awaits an operation. Cheap when there is nothing to do; never blocks. It may be
    /// called while an arrival is [delivered](crate::QueuePairCore::deliver), so it only tries a lock that is held there.
    fn drive(&self);

    /// Looks for work of the peer's, and does a bounded part of what it finds: about 256 KiB. If more is left, the
    /// [driver](crate::Driver) is woken for it. Cheap when there is nothing to do; waits neither for the peer nor for a lock
    /// that is held for long. Called many times in a row while looking pays off, by the driver and by a task that awaits
    /// something of the peer's. A fabric whose driver has no looks leaves this out.
    fn look(&self) -> Look {
        Look::Idle
    }

    /// Whether [`look`](Self::look) can find nothing as long as it is called, as where the peer needs this very CPU.
    fn looks_in_vain(&self) -> bool {
        false
    }

    /// Begins the orderly close: outstanding operations end, and further accesses of the peer are refused. When that
    /// is done, and nothing of the peer can touch local memory any more, the fabric calls
    /// [`QueuePairCore::mark_drained`](crate::QueuePairCore::mark_drained). Called once; also after a failure.
    fn start_close(&self);

    /// If the operation was submitted and cannot be posted yet, it fails with
    /// [`FabricError::Busy`](crate::FabricError::Busy), and is never posted. For callers that have another way.
    fn withdraw(&self, _key: SlotKey) {}

    /// The queue pair's counters. `counted` are those of the core; a link whose operations are counted elsewhere replaces them.
    fn stats(&self, counted: QueuePairStats) -> QueuePairStats {
        counted
    }

    /// Releases threads of this process that the peer blocks inside a call of this link, where a peer can. Never blocks.
    fn free_threads(&self) {}
}

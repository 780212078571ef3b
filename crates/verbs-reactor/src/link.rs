//! The fabric's half of a connected queue pair.

use std::fmt;

use crate::{QueuePairStats, SlotKey, WorkRequest};

/// The fabric's half of a connected queue pair; [`QueuePair`](crate::QueuePair) is the user's half. Both share a
/// [`QueuePairCore`](crate::QueuePairCore), on which the fabric reports completions, arrivals and failure.
pub trait Link: Send + Sync + fmt::Debug + 'static {
    /// Takes one operation whose slot is already reserved, in posting order. Never blocks. A failure is
    /// reported on the core like any completion. The send queue has room for all its
    /// [pieces](WorkRequest::pieces).
    fn submit(&self, key: SlotKey, request: &WorkRequest);

    /// Makes progress on behalf of a task that awaits an operation. Cheap when there is nothing to do; never blocks.
    fn drive(&self);

    /// Looks a little longer, until `is_there`, on behalf of a task that awaits an arrival. Called after
    /// [`drive`](Self::drive). Does nothing unless the fabric has found that looking pays off now, because other tasks of
    /// this thread wait meanwhile.
    fn look(&self, _is_there: &dyn Fn() -> bool) {}

    /// Looks a little for work, on behalf of a task that awaits something of the peer's, and does what it finds. True if
    /// there was any. Does nothing unless the fabric has found that looking pays off now. Waits for no lock that is held
    /// for long.
    fn help(&self) -> bool {
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

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

    /// Makes progress on behalf of whoever awaits: cheap when there is nothing to do, never blocks.
    fn drive(&self);

    /// Looks a little longer, until `is_there`, on behalf of whoever awaits an arrival, after [`drive`](Self::drive). Does
    /// nothing unless the fabric has found that looking pays off now: other tasks of this thread wait meanwhile.
    fn look(&self, _is_there: &dyn Fn() -> bool) {}

    /// Looks a little for work, on behalf of a task that awaits something of the peer's, and does what it finds; whether
    /// there was any. Does nothing unless the fabric has found that looking pays off now, and waits for no lock that is
    /// held for long.
    fn help(&self) -> bool {
        false
    }

    /// Begins the orderly end: outstanding operations end, the peer's further accesses are refused. When that
    /// is done, and nothing of the peer can touch local memory any more, the fabric calls
    /// [`QueuePairCore::mark_drained`](crate::QueuePairCore::mark_drained). Called once; also after a failure.
    fn start_close(&self);

    /// If the operation was submitted and cannot be posted yet, it fails with
    /// [`FabricError::Busy`](crate::FabricError::Busy), and is never posted. For callers that have another way.
    fn withdraw(&self, _key: SlotKey) {}

    /// The queue pair's counters, for a link whose operations are counted elsewhere. `counted` is what the core has counted.
    fn stats(&self, counted: QueuePairStats) -> QueuePairStats {
        counted
    }

    /// Lets threads go that the peer holds inside a call of this link, if it has a way to do that. Never blocks.
    fn free_threads(&self) {}
}

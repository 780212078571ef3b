//! The fabric's half of a connected queue pair.

use std::{fmt, mem, sync::Arc};

use tensorwire_memory::Buf;

use crate::{
    Board, Catalogue, Effort, FabricError, Immediate, Look, PeerCatalogue, QueuePairStats, RemoteRange,
    SlotKey, WorkRequest,
};

/// The fabric's half of a connected queue pair; [`QueuePair`](crate::QueuePair) is the user's half. Both share a
/// [`QueuePairCore`](crate::QueuePairCore), on which the fabric reports completions, arrivals and failure.
pub trait Link: Send + Sync + fmt::Debug + 'static {
    /// Takes one operation whose slot is already reserved, in posting order. Never blocks. A failure is reported on
    /// the core like any completion. The caller has checked that the send queue has room for all
    /// [pieces](WorkRequest::pieces).
    fn submit(&self, key: SlotKey, request: &WorkRequest);

    /// Posts a write of a few bytes, or a notification alone, that is complete when this returns. The bytes were
    /// copied, the write takes no slot, and no completion is reported: the fabric
    /// [counts](crate::QueuePairCore::count_sent) it. It is posted after everything that was submitted before. `None`
    /// if the fabric does not support such writes, or has no room now.
    ///
    /// # Errors
    /// The write cannot be posted, and nothing was posted.
    fn submit_inline(
        &self,
        _bytes: &[u8],
        _remote: Option<&RemoteRange>,
        _immediate: Option<Immediate>,
    ) -> Option<Result<(), FabricError>> {
        None
    }

    /// Makes progress: passes on completions and arrivals, and does a bounded part of the peer's work, about 256 KiB. If more
    /// is left, this wakes the [driver](crate::Driver). `effort` says what the call is for. Cheap when there is nothing to do.
    ///
    /// Waits neither for the peer nor for a lock that is held for long. It may be called while an arrival is
    /// [delivered](crate::QueuePairCore::deliver), so it must only try a lock that is held there.
    fn progress(&self, _effort: Effort) -> Look {
        Look::Idle
    }

    /// From now on posts may wait for a [`release`](Self::release), so that they are sent together. Calls are counted.
    fn hold(&self) {}

    /// Ends one [`hold`](Self::hold). After the last, the waiting posts are sent: now if `at_once`, otherwise with the
    /// next post, or by the driver.
    fn release(&self, _at_once: bool) {}

    /// Begins the orderly close: outstanding operations end, and further accesses by the peer are refused. When that
    /// is done, and the peer cannot access local memory any more, the fabric calls
    /// [`QueuePairCore::mark_drained`](crate::QueuePairCore::mark_drained). Called once, also after a failure.
    fn start_close(&self);

    /// Fails the operation with [`FabricError::Busy`] if it was submitted and cannot be posted yet; then it is never
    /// posted. For callers that have an alternative.
    fn withdraw(&self, _key: SlotKey) {}

    /// The queue pair's counters, and what waits for an acknowledgement. `counted` are the core's counters. A link whose
    /// operations are counted elsewhere replaces them. Never blocks.
    fn stats(&self, counted: QueuePairStats) -> QueuePairStats {
        counted
    }

    /// The operations that only a fabric that maps memory between processes has.
    fn shared_memory(&self) -> Option<&dyn SharedMemory> {
        None
    }
}

/// Further operations of a link whose fabric maps memory between two processes of one host.
pub trait SharedMemory: fmt::Debug {
    /// The catalogue of this side.
    fn catalogue(&self) -> Option<Arc<dyn Catalogue>> {
        None
    }

    /// The peer's catalogue. It belongs to this connection: nothing is found in it once the connection is over.
    fn peer_catalogue(&self) -> Option<Arc<dyn PeerCatalogue>> {
        None
    }

    /// The boards of this side and of the peer.
    fn board(&self) -> Option<Arc<dyn Board>> {
        None
    }

    /// Lets the peer map the memory of `bytes`, if it lies in a block that can be shared. Never blocks.
    fn share(&self, _bytes: &Buf) {}

    /// Whether the peer last ran on this CPU. Then it can do nothing before it gets the CPU, so a poller yields the CPU first.
    fn peer_is_here(&self) -> bool {
        false
    }

    /// Releases threads of this process that a hostile peer blocks inside a call of the link. For a connection that is about
    /// to end: such a thread may hold locks that ending needs. [`Link::start_close`] does this too. Never blocks.
    fn free_threads(&self) {}
}

/// See [`SharedMemory::peer_is_here`].
pub(crate) fn peer_is_here(link: &dyn Link) -> bool {
    link.shared_memory().is_some_and(SharedMemory::peer_is_here)
}

/// Posts of a queue pair may wait while this guard lives, and are sent together when it is dropped.
#[derive(Debug)]
#[must_use = "posts leave together while this lives"]
pub struct Together<'queue_pair>(&'queue_pair dyn Link);

impl<'queue_pair> Together<'queue_pair> {
    pub(crate) fn new(link: &'queue_pair dyn Link) -> Self {
        link.hold();
        Self(link)
    }

    /// Ends the wait without sending: the posts are sent with the next post, or soon by the driver.
    pub fn leave(self) {
        mem::ManuallyDrop::new(self).0.release(false);
    }
}

impl Drop for Together<'_> {
    fn drop(&mut self) {
        self.0.release(true);
    }
}

/// The catalogue of this side, as one connection offers it to its peer.
#[derive(Debug, Clone)]
pub struct OfferedCatalogue {
    catalogue: Arc<dyn Catalogue>,
    link: Arc<dyn Link>,
}

impl OfferedCatalogue {
    pub(crate) fn new(catalogue: Arc<dyn Catalogue>, link: Arc<dyn Link>) -> Self {
        Self { catalogue, link }
    }

    /// The catalogue, which all connections of the domain share.
    pub fn catalogue(&self) -> &Arc<dyn Catalogue> {
        &self.catalogue
    }

    /// Lets the peer map the memory of `bytes`, so that it can read contents there. Does nothing if that is not
    /// possible now.
    pub fn share(&self, bytes: &Buf) {
        self.link.shared_memory().into_iter().for_each(|memory| memory.share(bytes));
    }
}

//! The fabric's half of a connected queue pair.

use std::{fmt, mem, sync::Arc, time::Duration};

use tensorwire_memory::Buf;

use crate::{
    Arrival, Board, Catalogue, FabricError, Immediate, Look, PeerCatalogue, QueuePairStats, RemoteRange,
    SlotKey, WorkRequest,
};

/// Something that waits for an acknowledgement of the peer's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unacknowledged {
    /// The bytes that the peer's host has acknowledged so far.
    pub acknowledged: u64,
    /// How long the peer's host has sent nothing, if only that matters: the system probes a connection that is idle, or whose peer
    /// accepts no data now. `None` while data are unacknowledged.
    pub silence: Option<Duration>,
}

/// The fabric's half of a connected queue pair; [`QueuePair`](crate::QueuePair) is the user's half. Both share a
/// [`QueuePairCore`](crate::QueuePairCore), on which the fabric reports completions, arrivals and failure.
pub trait Link: Send + Sync + fmt::Debug + 'static {
    /// Takes one operation whose slot is already reserved, in posting order. Never blocks. A failure is reported on
    /// the core like any completion. The caller has checked that the send queue has room for all
    /// [pieces](WorkRequest::pieces).
    fn submit(&self, key: SlotKey, request: &WorkRequest);

    /// Posts a write of a few bytes, or a notification alone, that is complete when this returns. The bytes were
    /// copied, the write takes no slot, and no completion is reported: the fabric
    /// [counts](crate::QueuePairCore::count_sent) it. It is posted behind everything that was submitted before. `None` if the fabric does not support such writes, or has no room now.
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

    /// Makes progress on behalf of a task that awaits an operation. Cheap when there is nothing to do; never blocks.
    /// It may be called while an arrival is [delivered](crate::QueuePairCore::deliver), so it must only try a lock
    /// that is held there.
    fn drive(&self);

    /// As [`drive`](Self::drive), for the task that awaits the next arrival: gives it that arrival in `next`, if it finds
    /// it. See [`QueuePairCore::deliver_to_task`](crate::QueuePairCore::deliver_to_task).
    fn drive_for(&self, _next: &mut Option<Arrival>) {
        self.drive();
    }

    /// From now on posts may wait for a [`release`](Self::release), so that they leave together. Calls are counted.
    fn hold(&self) {}

    /// Ends one [`hold`](Self::hold). After the last, what waits is sent.
    fn release(&self) {}

    /// As [`release`](Self::release), but what waits may also leave with what is posted next. The driver sends it
    /// otherwise.
    fn release_to_driver(&self) {
        self.release();
    }

    /// Looks for work from the peer, and does a bounded part of it: about 256 KiB. If more is left, this wakes the
    /// [driver](crate::Driver). Cheap when there is nothing to do. Waits neither for the peer nor for a lock that is
    /// held for long. Called many times in a row while polling pays off, by the driver and by tasks that await the
    /// peer. A fabric whose driver does not poll need not implement this.
    fn look(&self) -> Look {
        Look::Idle
    }

    /// As [`look`](Self::look), for the task that awaits the next arrival: gives it that arrival in `next`, if it finds
    /// it, and finds no other for it then.
    fn look_for(&self, _next: &mut Option<Arrival>) -> Look {
        self.look()
    }

    /// Whether polling by [`look`](Self::look) cannot succeed now.
    fn looks_in_vain(&self) -> bool {
        false
    }

    /// Whether the peer last ran on this CPU. Then it can do nothing before it gets the CPU, so who looks gives it up first.
    fn peer_is_here(&self) -> bool {
        false
    }

    /// Begins the orderly close: outstanding operations end, and further accesses by the peer are refused. When that
    /// is done, and the peer cannot access local memory any more, the fabric calls
    /// [`QueuePairCore::mark_drained`](crate::QueuePairCore::mark_drained). Called once, also after a failure.
    fn start_close(&self);

    /// Fails the operation with [`FabricError::Busy`] if it was submitted and cannot be
    /// posted yet; it is then never posted. For callers that have an alternative.
    fn withdraw(&self, _key: SlotKey) {}

    /// The queue pair's counters. `counted` are the core's counters. A link whose operations are counted elsewhere
    /// replaces them.
    fn stats(&self, counted: QueuePairStats) -> QueuePairStats {
        counted
    }

    /// See [`QueuePair::unacknowledged`](crate::QueuePair::unacknowledged). Never blocks.
    fn unacknowledged(&self) -> Option<Unacknowledged> {
        None
    }

    /// Releases threads of this process that the peer blocks inside a call of this link, if the fabric allows a peer
    /// to do so. Never blocks.
    fn free_threads(&self) {}

    /// The catalogue of this side, if the fabric has them.
    fn catalogue(&self) -> Option<Arc<dyn Catalogue>> {
        None
    }

    /// The peer's catalogue, if the fabric has them.
    fn peer_catalogue(&self) -> Option<Arc<dyn PeerCatalogue>> {
        None
    }

    /// The boards of this side and of the peer, if the fabric has them.
    fn board(&self) -> Option<Arc<dyn Board>> {
        None
    }

    /// Lets the peer map the memory of `bytes`, if it lies in a block that can be shared. Never blocks.
    fn share(&self, _bytes: &Buf) {}
}

/// Posts of a queue pair may wait while this lives, and leave together when it is dropped.
#[derive(Debug)]
#[must_use = "posts leave together while this lives"]
pub struct Together<'queue_pair>(&'queue_pair dyn Link);

impl<'queue_pair> Together<'queue_pair> {
    pub(crate) fn new(link: &'queue_pair dyn Link) -> Self {
        link.hold();
        Self(link)
    }

    /// Ends it without sending: what was posted leaves with what is posted next, or soon.
    pub fn leave(self) {
        mem::ManuallyDrop::new(self).0.release_to_driver();
    }
}

impl Drop for Together<'_> {
    fn drop(&mut self) {
        self.0.release();
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

    /// Lets the peer map the memory of `bytes`, so that it can read contents that lie there. Does nothing if that is not
    /// possible now.
    pub fn share(&self, bytes: &Buf) {
        self.link.share(bytes);
    }
}

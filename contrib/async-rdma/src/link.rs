//! The fabric's half of a queue pair: the queue of posted frames that have no slot yet.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tensorwire_memory::{Block, Buf};
use tokio::sync::Notify;
use tensorwire_fabric::{
    FabricError, Link, Piece, QueuePair, QueuePairConfig, QueuePairCore, RegionTable, SlotKey, WorkRequest,
};

use crate::{
    fabric::{CAPABILITIES, KIND},
    frame::{Frame, NOWHERE, PAYLOAD},
};

/// A frame that is yet to be sent.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) frame: Frame,
    pub(crate) payload: Buf,
    /// The operation that ends with this frame, and its bytes.
    pub(crate) ends: Option<(SlotKey, u64)>,
}

#[derive(Debug, Default)]
struct Queue {
    outgoing: VecDeque<Outgoing>,
    closing: bool,
    /// No more frames are accepted.
    over: bool,
}

/// The user's half posts frames to this, and the pump takes them. `Debug` shows no frames, because they carry keys.
pub(crate) struct AsyncRdmaLink {
    pub(crate) core: Arc<QueuePairCore>,
    table: Arc<RegionTable>,
    queue: Mutex<Queue>,
    wake: Notify,
}

impl fmt::Debug for AsyncRdmaLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncRdmaLink").field("core", &self.core).finish_non_exhaustive()
    }
}

impl AsyncRdmaLink {
    pub(crate) fn new(table: Arc<RegionTable>, config: QueuePairConfig) -> (Arc<Self>, QueuePair) {
        let core = Arc::new(QueuePairCore::new(KIND, config, CAPABILITIES));
        let link = Arc::new(Self { core: core.clone(), table, queue: Mutex::default(), wake: Notify::new() });
        (link.clone(), QueuePair::new(core, link))
    }

    /// The next frame to send.
    pub(crate) fn next(&self) -> Option<Outgoing> {
        self.lock().outgoing.pop_front()
    }

    /// Whether the user closes.
    pub(crate) fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// Waits until a frame was posted, or the user closes.
    ///
    /// # Cancel safety
    /// Cancel-safe: a change without a waiting call ends the next call at once.
    pub(crate) async fn changed(&self) {
        self.wake.notified().await;
    }

    /// Ends the connection: no more frames of the peer are accepted, and all outstanding operations fail.
    pub(crate) fn end(&self, error: &FabricError) {
        let dropped = {
            let mut queue = self.lock();
            queue.over = true;
            std::mem::take(&mut queue.outgoing)
        };
        drop(dropped);
        self.core.fail(error);
        self.core.mark_drained();
    }

    /// The checks that a NIC makes on the sender's side, for the whole operation before any part is sent.
    fn resolve(&self, key: SlotKey, request: &WorkRequest) -> Result<Vec<Outgoing>, FabricError> {
        let total = request.length();
        // Every segment is checked as a whole, and then split to fit the slots.
        for piece in request.pieces(u64::MAX) {
            self.check(&piece)?;
        }
        let mut frames = Vec::new();
        for piece in request.pieces(PAYLOAD as u64) {
            frames.push(self.outgoing(piece, key, total)?);
        }
        if frames.is_empty() { Err(request.unsupported(KIND)) } else { Ok(frames) }
    }

    fn check(&self, piece: &Piece) -> Result<u32, FabricError> {
        self.table.check_local(KIND, piece.local.block().map(Block::id))?;
        let region = self.core.remote_regions().aim(piece.local.len() as u64, piece.remote.as_ref())?;
        Ok(region.map_or(0, |region| region.key))
    }

    fn outgoing(&self, piece: Piece, slot: SlotKey, total: u64) -> Result<Outgoing, FabricError> {
        let key = self.check(&piece)?;
        // A write of no bytes names no region.
        let range = piece.remote.filter(|_| !piece.local.is_empty()).unwrap_or(NOWHERE);
        let frame = Frame::Part { range, key, total, immediate: piece.immediate };
        Ok(Outgoing { frame, payload: piece.local, ends: piece.is_last.then_some((slot, total)) })
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link for AsyncRdmaLink {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        let frames = match self.resolve(key, request) {
            Ok(frames) => frames,
            Err(error) => return self.core.complete(key, 0, Err(error)),
        };
        {
            let mut queue = self.lock();
            if queue.over {
                drop(queue);
                let failure = self.core.failure().unwrap_or(FabricError::Closed);
                return self.core.complete(key, 0, Err(failure));
            }
            queue.outgoing.extend(frames);
        }
        self.wake.notify_one();
    }

    fn start_close(&self) {
        self.lock().closing = true;
        self.wake.notify_one();
    }
}

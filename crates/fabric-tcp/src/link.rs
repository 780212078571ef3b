//! One connection: both halves, and how it ends.
//!
//! A connection ends in three steps, whichever side begins: the receiver stops, so that the peer cannot access memory
//! any more; every outstanding operation ends; a farewell (a goodbye, or a refusal with its reason) is sent after the
//! current frame. The driver then waits for some time until the peer has received it.

use std::{
    fmt,
    sync::{
        Arc, TryLockError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
};

use futures::task::AtomicWaker;
use tensorwire_fabric::{
    Capabilities, Effort, FabricError, FabricKind, Immediate, Link, Look, Piece, QueuePair, QueuePairConfig,
    QueuePairCore, QueuePairStats, ReadDestination, ReadPart, RegionTable, RemoteRange, SlotKey, WorkRequest,
};
use tensorwire_memory::Block;
use tensorwire_testpoints::sync::Mutex;
use tokio::io::unix::AsyncFd;

use crate::{
    closing::Closing,
    frame::{Ending, Key},
    gathering::Queued,
    outgoing::{Outgoing, Part, on_the_wire},
    protection::Stream,
    reads::{Read, Reads},
    receiver::{Ground, Received, Receiver},
    sender::{End, NotPosted, SMALL_BYTES_MAX, Sender, Sent},
    socket::Socket,
};

/// The fabric's half of a queue pair. `Debug` shows no frames, because they carry keys.
pub(super) struct TcpLink {
    core: Arc<QueuePairCore>,
    table: Arc<RegionTable>,
    socket: AsyncFd<Socket>,
    sender: Sender,
    reads: Reads,
    receiver: Mutex<Receiver>,
    closing: Closing,
    /// An [`EndState`].
    end: AtomicU8,
    /// [`Receiver::finds`] as of the latest turn.
    finds: AtomicU64,
    /// Whether there may be bytes from the kernel, buffered by the socket or the receiver, which no readiness announces.
    holds_bytes: AtomicBool,
    /// Whether the driver's latest turn found the socket empty, and armed.
    rests: AtomicBool,
    driver: AtomicWaker,
}

impl fmt::Debug for TcpLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sending, end) = (self.sending(), self.end_state());
        f.debug_struct("TcpLink").field("sending", &sending).field("end", &end).finish_non_exhaustive()
    }
}

impl TcpLink {
    /// A queue pair without a driver.
    pub(super) fn new(
        table: Arc<RegionTable>,
        config: QueuePairConfig,
        capabilities: Capabilities,
        stream: Stream,
    ) -> Result<(Arc<Self>, QueuePair), FabricError> {
        let fail = |error| FabricError::device(FabricKind::TCP, "registering the stream", error);
        let socket = Socket::new(stream).map_err(fail)?;
        // SAFETY: a `Socket` owns its descriptor, answers with no other, and closes it only when dropped.
        let socket = unsafe { AsyncFd::register(socket) };
        let socket = socket.map_err(|refused| fail(refused.into()))?;
        let core = Arc::new(QueuePairCore::new(FabricKind::TCP, config, capabilities));
        // A handshake may have taken bytes that follow it.
        let holds_bytes = AtomicBool::new(!socket.get_ref().short_reads_drain());
        let link = Arc::new(Self {
            core: core.clone(),
            table,
            socket,
            sender: Sender::new(config.send_depth),
            reads: Reads::default(),
            receiver: Mutex::new(Receiver::new()),
            closing: Closing::default(),
            end: AtomicU8::new(EndState::Open as u8),
            finds: AtomicU64::new(0),
            holds_bytes,
            rests: AtomicBool::new(false),
            driver: AtomicWaker::new(),
        });
        Ok((link.clone(), QueuePair::new(core, link)))
    }
}

/// For the driver.
impl TcpLink {
    pub(super) fn socket(&self) -> &AsyncFd<Socket> {
        &self.socket
    }

    pub(super) fn core(&self) -> &QueuePairCore {
        &self.core
    }

    pub(super) fn waker(&self) -> &AtomicWaker {
        &self.driver
    }

    /// Whether the connection is over, and if so, whether a farewell is still to be sent.
    pub(super) fn end_state(&self) -> EndState {
        EndState::from_bits(self.end.load(Ordering::Acquire))
    }

    /// Whether something must be settled that no readiness of the socket announces.
    pub(super) fn wants_settling(&self) -> bool {
        let open = self.end_state() == EndState::Open;
        open && (self.closing.is_wished() || self.sender.state() == Sent::Broken)
    }

    pub(super) fn sending(&self) -> Sent {
        self.sender.state()
    }

    /// A turn of sending, even if the socket was full. `None` if another task is sending.
    pub(super) fn send_again(&self) -> Option<Sent> {
        self.sender.retry(self.socket.get_ref(), &self.core)
    }

    /// Whether much was sent since the last call.
    pub(super) fn take_long_turn(&self) -> bool {
        self.sender.take_long_turn()
    }

    /// Sends posts that wait for the driver's turn.
    pub(super) fn flush(&self) {
        self.sender.gathering().turn();
        self.sender.flush(self.socket.get_ref(), &self.core, &self.driver);
    }

    /// Called before the driver sleeps.
    pub(super) fn arm(&self) {
        self.sender.gathering().rest();
    }

    /// Records that the driver has found the socket empty, and that the next bytes wake it.
    pub(super) fn rest(&self) {
        self.rests.store(true, Ordering::Relaxed);
    }

    /// One turn of receiving.
    pub(super) fn receive(&self) -> Look {
        let (received, has_found, holds_bytes) = {
            let mut receiver = match self.receiver.try_lock() {
                Ok(receiver) => receiver,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Look::Busy,
            };
            let received = receiver.turn(self.ground());
            let has_found = self.finds.swap(receiver.finds(), Ordering::Relaxed) != receiver.finds();
            (self.heed_broken(&mut receiver, received), has_found, receiver.holds_bytes())
        };
        if has_found {
            self.sender.gathering().turn();
        }
        match received {
            Received::Drained if has_found => Look::Worked,
            Received::Drained => Look::Idle,
            Received::More => {
                self.leave_rest(holds_bytes);
                Look::More
            }
            Received::Stopped => Look::Over,
            Received::Ended(ending) => {
                self.end(ending);
                Look::Over
            }
        }
    }

    fn ground(&self) -> Ground<'_> {
        Ground {
            socket: self.socket.get_ref(),
            table: &self.table,
            core: &self.core,
            sender: &self.sender,
            reads: &self.reads,
            closing: &self.closing,
            driver: &self.driver,
        }
    }

    /// Called when a turn has ended before everything was received. Readiness announces bytes in the kernel. Bytes of
    /// an encrypted stream may be buffered here, and so may bytes that were read ahead, so the driver is woken for
    /// them.
    fn leave_rest(&self, holds_bytes: bool) {
        if holds_bytes || !self.socket.get_ref().short_reads_drain() {
            self.holds_bytes.store(true, Ordering::Release);
            self.driver.wake();
        }
    }

    /// Whether there may be buffered bytes that no readiness announces. The caller must receive them.
    pub(super) fn take_held_bytes(&self) -> bool {
        self.holds_bytes.swap(false, Ordering::AcqRel)
    }

    /// A number that changes whenever any task has received something.
    pub(super) fn finds(&self) -> u64 {
        self.finds.load(Ordering::Relaxed)
    }

    /// If sending has failed, and the peer has sent no reason of its own, the connection ends with the error of
    /// sending.
    fn heed_broken(&self, receiver: &mut Receiver, received: Received) -> Received {
        if !matches!(received, Received::Drained) || self.sender.state() != Sent::Broken {
            return received;
        }
        let Some(error) = self.sender.broken() else { return received };
        receiver.stop();
        Received::Ended(End::silent(error))
    }

    /// Ends everything else after the receiver has stopped. Called once.
    fn end(&self, end: End) {
        let state = if end.farewell.is_some() { EndState::Lingering } else { EndState::Silent };
        self.core.mark_drained();
        self.sender.end(end);
        self.send_again();
        self.end.store(state as u8, Ordering::Release);
        self.driver.wake();
    }

    /// Stops sending, even if a farewell is still queued.
    pub(super) fn cut(&self) {
        if let Some(error) = self.core.failure() {
            self.sender.end(End::silent(error));
            self.send_again();
        }
    }

    /// Ends the connection because the driver is gone and nothing would wake waiting tasks.
    pub(super) fn abandon(&self) {
        self.send();
        let mut receiver = match self.receiver.try_lock() {
            Ok(receiver) => receiver,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The task that has the lock sees this at its next step, or the next task that awaits does.
            Err(TryLockError::WouldBlock) => return self.closing.driver_gone(),
        };
        let stopped = receiver.stop();
        drop(receiver);
        if stopped {
            self.end(Closing::abandoned());
        }
    }
}

/// The progress of ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum EndState {
    /// The connection is up.
    Open,
    /// Over, and a farewell is being sent.
    Lingering,
    /// Over without a farewell.
    Silent,
}

impl EndState {
    fn from_bits(bits: u8) -> Self {
        [Self::Open, Self::Lingering].into_iter().find(|state| *state as u8 == bits).unwrap_or(Self::Silent)
    }
}

impl Link for TcpLink {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        match self.resolve_reads(key, request) {
            Ok(None) => {}
            Ok(Some((first, rest))) => {
                self.reads.post([first].into_iter().chain(rest));
                if self.reads.ask(&self.sender) {
                    self.send();
                }
                return;
            }
            Err(error) => {
                self.core.complete(key, request.length(), Err(error));
                return;
            }
        }
        match self.resolve(key, request) {
            Ok((first, rest)) => match self.sender.post([first].into_iter().chain(rest)) {
                Some(queued) => self.send_posted(queued),
                None => self.core.complete(key, request.length(), Err(self.over())),
            },
            Err(error) => self.core.complete(key, request.length(), Err(error)),
        }
    }

    fn submit_inline(
        &self,
        bytes: &[u8],
        remote: Option<&RemoteRange>,
        immediate: Option<Immediate>,
    ) -> Option<Result<(), FabricError>> {
        if bytes.len() > SMALL_BYTES_MAX {
            return None;
        }
        match self.sender.post_copy(&self.core, bytes, remote, immediate) {
            Ok(queued) => {
                self.send_posted(queued);
                Some(Ok(()))
            }
            Err(NotPosted::Full) => None,
            Err(NotPosted::Over) => Some(Err(self.over())),
            Err(NotPosted::Refused(error)) => Some(Err(error)),
        }
    }

    fn hold(&self) {
        self.sender.gathering().hold();
    }

    fn release(&self, at_once: bool) {
        self.sender.gathering().release();
        if at_once {
            self.sender.flush(self.socket.get_ref(), &self.core, &self.driver);
        } else {
            self.sender.leave(&self.driver);
        }
    }

    fn progress(&self, effort: Effort) -> Look {
        match effort {
            Effort::BeforeSleep => self.drive(),
            // A blocked connection waits for the socket to become writable, which a read does not show.
            Effort::Poll if self.sending() == Sent::Blocked => Look::InVain,
            // Reads the socket without checking readiness.
            Effort::Poll => {
                self.flush();
                self.receive()
            }
        }
    }

    fn stats(&self, counted: QueuePairStats) -> QueuePairStats {
        let mut stats = counted;
        stats.unacknowledged = self.socket.get_ref().unacknowledged();
        stats
    }

    fn start_close(&self) {
        // Held posts, too, because they were posted earlier.
        self.send();
        self.closing.by_user();
        if self.receive() == Look::Busy {
            self.driver.wake();
        }
    }
}

impl TcpLink {
    /// Sends and receives on behalf of a task that is about to sleep.
    fn drive(&self) -> Look {
        // The task that holds posts sends them, and the driver polls afterwards.
        if self.sender.gathering().is_held() {
            return Look::Idle;
        }
        self.flush();
        if self.sender.state() == Sent::More {
            self.send();
        }
        // The task that polls the driver drives the link afterwards. The socket was just empty, and new bytes wake the
        // driver.
        if self.rests.swap(false, Ordering::Relaxed) {
            return Look::Idle;
        }
        // The driver does the rest after a turn: readiness wakes it, or the turn has woken it.
        self.receive()
    }

    fn send(&self) {
        self.sender.send(self.socket.get_ref(), &self.core, &self.driver);
    }

    fn send_posted(&self, queued: Queued) {
        self.sender.send_posted(queued, self.socket.get_ref(), &self.core, &self.driver);
    }

    /// The reason why nothing can be posted.
    fn over(&self) -> FabricError {
        let error = self.core.failure().or_else(|| self.sender.broken());
        error.unwrap_or(FabricError::Closed)
    }

    /// The range and key on the wire of a write of `bytes` bytes.
    fn aim(&self, bytes: u64, remote: Option<&RemoteRange>) -> Result<(RemoteRange, Key), FabricError> {
        let region = self.core.remote_regions().aim(bytes, remote)?;
        Ok(on_the_wire(bytes, remote, region))
    }

    /// The checks of a NIC on its own side, for all pieces before the first is posted. Most writes have one piece,
    /// and then this allocates nothing.
    fn resolve(&self, key: SlotKey, request: &WorkRequest) -> Result<(Outgoing, Vec<Outgoing>), FabricError> {
        let bytes = request.length();
        let mut pieces = request.pieces(self.core.capabilities().piece_bytes_max);
        let part = |piece: Piece| {
            let operation = Part { key, bytes, is_last: piece.is_last };
            let tells = request.immediate().is_some();
            self.resolve_piece(operation, piece, tells)
        };
        let first = pieces.next().ok_or_else(|| request.unsupported(FabricKind::TCP))?;
        Ok((part(first)?, pieces.map(part).collect::<Result<_, _>>()?))
    }

    fn resolve_piece(&self, operation: Part, piece: Piece, tells: bool) -> Result<Outgoing, FabricError> {
        let Piece { local, remote, immediate, is_last } = piece;
        self.table.check_local(FabricKind::TCP, local.block().map(Block::id))?;
        let (range, remote_key) = self.aim(local.len() as u64, remote.as_ref())?;
        let ending = match immediate {
            Some(immediate) => Ending::Immediate(immediate),
            None if tells && !is_last => Ending::Segment,
            None => Ending::Plain,
        };
        Ok(Outgoing::write(operation, local, range, remote_key, ending))
    }

    /// As [`resolve`](Self::resolve), for the parts of a read; `None` for other operations.
    fn resolve_reads(
        &self,
        key: SlotKey,
        request: &WorkRequest,
    ) -> Result<Option<(Read, Vec<Read>)>, FabricError> {
        let mut parts = request.reads();
        let Some(first) = parts.next() else { return Ok(None) };
        let bytes = request.length();
        let part = |part: ReadPart<'_>| {
            self.resolve_read(Part { key, bytes, is_last: part.is_last }, part.remote, part.into)
        };
        Ok(Some((part(first)?, parts.map(part).collect::<Result<_, _>>()?)))
    }

    fn resolve_read(
        &self,
        operation: Part,
        remote: &RemoteRange,
        into: &ReadDestination,
    ) -> Result<Read, FabricError> {
        let bytes = into.length();
        let (range, remote_key) = self.aim(bytes, Some(remote))?;
        let target = into.target()?;
        self.table.check_local(FabricKind::TCP, target.as_ref().map(|(block, _)| block.id()))?;
        Ok(Read { operation, range, remote_key, target: target.map(|(_, target)| target) })
    }
}

//! Posted writes, in order, into the stream.
//!
//! A posted write is sent at once, in the poster's own call, if nothing is queued before it and the socket accepts it,
//! unless it is [gathered](crate::gathering) with others. The connection's task sends the rest, so a dropped future
//! never leaves half a frame.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    mem,
    sync::{
        MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering, fence},
    },
};

use futures::task::AtomicWaker;
use tensorwire_fabric::{FabricError, Immediate, LatestRegions, QueuePairCore, RemoteRange};
use tensorwire_memory::copy::{CopyReason, copy_bytes};
use tensorwire_testpoints::sync::Mutex;

use crate::{
    frame::{Ending, Frame, HEADER_BYTES, Header, READS_MAX, WriteFrame},
    gathering::{Gathering, Next, Queued},
    outgoing::{FRAME_BYTES, Outgoing, Pieces, on_the_wire},
    socket::{Socket, loss},
};

/// The most payload bytes of one turn: more would block a runtime's thread too long.
const TURN_BYTES: usize = 1 << 20;

/// A turn that sends as much is long.
const LONG_TURN_BYTES: usize = 64 << 10;

/// The most payload bytes of one system call. The kernel handles most acknowledgements that arrive during a call only
/// at its end, so a long call sends what fits into the congestion window at its beginning, and the rest after
/// everything is copied.
const CALL_BYTES: usize = 256 << 10;

/// The most frames of one system call.
const TURN_FRAMES: usize = 16;

/// Maximum number of turns that one thread takes in a row while other threads post.
const TURNS_MAX: u32 = 16;

/// The most bytes of small writes, headers included, that are copied and not yet with the kernel.
const COPIED_BYTES_MAX: usize = 64 << 10;

/// Maximum size of each of the two spare buffers for copied writes that an idle connection holds.
const SPARE_BYTES_MAX: usize = 8 << 10;

/// The most bytes of a write that may be copied.
pub(super) const SMALL_BYTES_MAX: usize = 4 << 10;

/// The state of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Sent {
    /// Everything posted is with the kernel, records included.
    Idle,
    /// More is ready to be sent. Other tasks get a turn first.
    More,
    /// The socket is full. The connection's task continues when it is writable.
    Blocked,
    /// The stream accepts nothing any more; see [`Sender::broken`].
    Broken,
    /// Everything is with the kernel, including the farewell.
    Finished,
}

impl Sent {
    const ALL: [Self; 5] = [Self::Idle, Self::More, Self::Blocked, Self::Broken, Self::Finished];
}

/// The sending half of a connection.
#[derive(Debug)]
pub(super) struct Sender {
    posted: Mutex<Posted>,
    stream: Mutex<Sending>,
    /// A [`Sent`], written only by the task that has locked the stream.
    state: AtomicU8,
    /// Answers that are not completely with the kernel.
    answers: AtomicU32,
    /// Bytes of copied writes that are not completely with the kernel.
    copied: AtomicUsize,
    /// Whether there may be posts, or an end, that no sending task has taken.
    has_news: AtomicBool,
    /// Whether a long turn has sent since [`take_long_turn`](Self::take_long_turn).
    was_long: AtomicBool,
    gathering: Gathering,
}

/// Why a write was not posted.
#[derive(Debug)]
pub(super) enum NotPosted {
    /// It names no memory of the peer.
    Refused(FabricError),
    /// There is no room for a copy now.
    Full,
    /// Nothing can be posted any more.
    Over,
}

#[derive(Debug, Default)]
struct Posted {
    writes: VecDeque<Outgoing>,
    /// The size of `writes`.
    queued: Queued,
    /// Memory for copied writes.
    spare: Vec<u8>,
    /// Regions of the peer that copied writes used last.
    latest: LatestRegions,
    /// Whether nothing can be posted any more.
    over: bool,
    /// The end that the task which sends has not handled yet.
    end: Option<End>,
    broken: Option<FabricError>,
}

/// How a connection ends.
#[derive(Debug, Clone)]
pub(super) struct End {
    /// The error of this side's operations.
    pub(super) error: FabricError,
    /// The last frame for the peer; `None` if the stream is down, or the peer has ended it.
    pub(super) farewell: Option<Frame>,
}

/// The state of the task that sends, behind the lock of the stream.
#[derive(Debug)]
enum Sending {
    Open {
        queue: VecDeque<Outgoing>,
        /// Bytes of the front write's encoded form that are with the kernel.
        position: u64,
        /// Memory that copied writes no longer use.
        spare: Vec<u8>,
    },
    /// Finishes the current frame, so that the peer can parse the farewell after it, and sends the farewell.
    Closing { under_way: Option<(Outgoing, u64)>, error: FabricError, farewell: Header, farewell_sent: usize },
    /// Nothing is sent any more.
    Over(Sent),
}

impl Sender {
    pub(super) fn new(depth: u32) -> Self {
        let posted = Posted { writes: VecDeque::with_capacity(depth as usize), ..Posted::default() };
        let queue = VecDeque::with_capacity(depth as usize);
        let stream = Sending::Open { queue, position: 0, spare: Vec::new() };
        Self {
            posted: Mutex::new(posted),
            stream: Mutex::new(stream),
            state: AtomicU8::new(Sent::Idle as u8),
            answers: AtomicU32::new(0),
            copied: AtomicUsize::new(0),
            has_news: AtomicBool::new(false),
            was_long: AtomicBool::new(false),
            gathering: Gathering::default(),
        }
    }

    /// Queues all of `writes`, whose number the slots' weights bound. Returns the size of what no task has begun to
    /// send. After the end it queues none and returns `None`.
    pub(super) fn post(&self, writes: impl IntoIterator<Item = Outgoing>) -> Option<Queued> {
        let mut posted = self.posted();
        if posted.over {
            return None;
        }
        let mut bytes = 0;
        posted.writes.extend(writes.into_iter().inspect(|write| bytes += write.length()));
        Some(self.note(&mut posted, bytes))
    }

    /// As [`post`](Self::post), for a small write whose bytes are copied, so that it is complete.
    pub(super) fn post_copy(
        &self,
        core: &QueuePairCore,
        body: &[u8],
        remote: Option<&RemoteRange>,
        immediate: Option<Immediate>,
    ) -> Result<Queued, NotPosted> {
        let (bytes, length) = (HEADER_BYTES + body.len(), body.len() as u64);
        let mut posted = self.posted();
        let region = posted.latest.aim(core.remote_regions(), length, remote).map_err(NotPosted::Refused)?;
        if posted.over {
            return Err(NotPosted::Over);
        }
        if self.copied.load(Ordering::Relaxed) + bytes > COPIED_BYTES_MAX {
            return Err(NotPosted::Full);
        }
        self.copied.fetch_add(bytes, Ordering::Relaxed);
        let (range, key) = on_the_wire(length, remote, region);
        let ending = immediate.map_or(Ending::Plain, Ending::Immediate);
        let header = Frame::Write(WriteFrame { range, key, length, ending }).encode();
        if posted.writes.back_mut().and_then(Outgoing::copies).is_none() {
            let copies = mem::take(&mut posted.spare);
            posted.writes.push_back(Outgoing::copied(copies));
        }
        if let Some(copies) = posted.writes.back_mut().and_then(Outgoing::copies) {
            append(copies, &header, body);
        }
        core.count_inline(length);
        Ok(self.note(&mut posted, length))
    }

    /// Records a post of so many bytes.
    fn note(&self, posted: &mut Posted, bytes: u64) -> Queued {
        posted.queued.posts += 1;
        posted.queued.bytes += bytes;
        self.has_news.store(true, Ordering::SeqCst);
        posted.queued
    }

    /// Queues the answer to a read. Returns `false` if the peer has more reads outstanding than it may.
    pub(super) fn answer(&self, answer: Outgoing) -> bool {
        let allowed = self.answers.fetch_add(1, Ordering::Relaxed) < READS_MAX;
        if allowed {
            let _after_the_end = self.post([answer]);
        }
        allowed
    }

    /// Ends the connection for this side, once a task [retries](Self::retry): writes that are with the kernel complete,
    /// and then all others fail, whichever task sends meanwhile. A later end without a farewell replaces an earlier one
    /// with it.
    pub(super) fn end(&self, end: End) {
        let mut posted = self.posted();
        posted.over = true;
        posted.end = Some(end);
        self.has_news.store(true, Ordering::SeqCst);
    }

    /// How posts share system calls.
    pub(super) fn gathering(&self) -> &Gathering {
        &self.gathering
    }

    /// Sends the latest of the posts that are `queued`, now or with others.
    pub(super) fn send_posted(
        &self,
        queued: Queued,
        socket: &Socket,
        core: &QueuePairCore,
        driver: &AtomicWaker,
    ) {
        // As in `pump`: the task that holds posts checks for them after it has released them.
        fence(Ordering::SeqCst);
        match self.gathering.next(queued) {
            Next::Send => self.send(socket, core, driver),
            Next::WakeDriver => driver.wake(),
            Next::Nothing => {}
        }
    }

    /// Sends the posts that wait for others, unless more will follow.
    pub(super) fn flush(&self, socket: &Socket, core: &QueuePairCore, driver: &AtomicWaker) {
        if self.finds_news() && !self.gathering.is_held() {
            self.send(socket, core, driver);
        }
    }

    /// Leaves waiting posts to the driver, or to the next task that sends.
    pub(super) fn leave(&self, driver: &AtomicWaker) {
        if self.finds_news() {
            driver.wake();
        }
    }

    /// Whether there is something to send, for the task that has released the posts.
    fn finds_news(&self) -> bool {
        // Pairs with the fence in `send_posted`.
        fence(Ordering::SeqCst);
        self.has_news.load(Ordering::SeqCst)
    }

    /// One turn of sending. Wakes the driver if something is left.
    pub(super) fn send(&self, socket: &Socket, core: &QueuePairCore, driver: &AtomicWaker) {
        match self.pump(socket, core) {
            None | Some(Sent::Idle) => {}
            Some(Sent::More | Sent::Blocked | Sent::Broken | Sent::Finished) => driver.wake(),
        }
    }

    /// The state of sending after the last turn.
    pub(super) fn state(&self) -> Sent {
        let state = self.state.load(Ordering::Acquire);
        Sent::ALL.into_iter().find(|known| *known as u8 == state).unwrap_or(Sent::Broken)
    }

    /// Whether a turn since the last call has sent [much](LONG_TURN_BYTES).
    pub(super) fn take_long_turn(&self) -> bool {
        self.was_long.load(Ordering::Relaxed) && self.was_long.swap(false, Ordering::Relaxed)
    }

    /// Why the stream accepts nothing any more.
    pub(super) fn broken(&self) -> Option<FabricError> {
        self.posted().broken.clone()
    }

    /// One turn of sending. Returns the state afterwards. `None` if there is nothing to do for the caller: the socket
    /// is full, and [`retry`](Self::retry) follows when it is writable; or another task is sending, and sees what was
    /// posted before this call.
    fn pump(&self, socket: &Socket, core: &QueuePairCore) -> Option<Sent> {
        // Pairs with the fence in `retry`. A poster may find the stream locked or blocked, and the task that has
        // locked it checks for posts after its turn: at least one of them sees the other.
        fence(Ordering::SeqCst);
        if self.state() == Sent::Blocked { None } else { self.retry(socket, core) }
    }

    /// As [`pump`](Self::pump), even if the socket was full. `None` if another task is sending.
    pub(super) fn retry(&self, socket: &Socket, core: &QueuePairCore) -> Option<Sent> {
        let mut turns = 0;
        loop {
            turns += 1;
            let sent = {
                let mut stream = match self.stream.try_lock() {
                    Ok(stream) => stream,
                    Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                    Err(TryLockError::WouldBlock) => return None,
                };
                let sent = match self.step(&mut stream, socket, core) {
                    // Other threads post as fast as this one sends, and this one has other work to do.
                    Sent::Idle if turns >= TURNS_MAX => Sent::More,
                    sent => sent,
                };
                self.state.store(sent as u8, Ordering::Release);
                sent
            };
            fence(Ordering::SeqCst);
            if !self.has_news.load(Ordering::SeqCst) {
                return Some(sent);
            }
            let posted = self.posted();
            let news = sent == Sent::Idle && !posted.writes.is_empty();
            if !news && posted.end.is_none() {
                return Some(sent);
            }
        }
    }

    /// Takes the posts, and passes as much to the kernel as one turn allows.
    fn step(&self, stream: &mut Sending, socket: &Socket, core: &QueuePairCore) -> Sent {
        self.take_posted(stream, core);
        let mut turn = Sends { socket, core, sender: self, left: TURN_BYTES };
        let result = match stream {
            Sending::Open { queue, position, spare } => turn.send_writes(queue, position, spare),
            Sending::Closing { under_way, error, farewell, farewell_sent } => {
                turn.send_farewell(under_way, error, farewell, farewell_sent)
            }
            Sending::Over(sent) => return *sent,
        };
        if TURN_BYTES - turn.left >= LONG_TURN_BYTES {
            self.was_long.store(true, Ordering::Relaxed);
        }
        match result {
            Ok(Sent::Finished) => {
                socket.shutdown(std::net::Shutdown::Write);
                *stream = Sending::Over(Sent::Finished);
                Sent::Finished
            }
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::Blocked,
            Err(error) => {
                self.breaks(stream, core, loss("sendmsg", error));
                Sent::Broken
            }
        }
    }

    /// Records that the stream accepts nothing any more. Outstanding operations stay outstanding until the end: the
    /// peer may have sent a more precise reason.
    fn breaks(&self, stream: &mut Sending, core: &QueuePairCore, error: FabricError) {
        if let Sending::Closing { error, .. } = std::mem::replace(stream, Sending::Over(Sent::Broken)) {
            core.fail(&error);
        }
        let mut posted = self.posted();
        posted.over = true;
        posted.broken = Some(error);
    }

    fn take_posted(&self, stream: &mut Sending, core: &QueuePairCore) {
        if !self.has_news.load(Ordering::SeqCst) {
            return;
        }
        let mut posted = self.posted();
        self.has_news.store(false, Ordering::SeqCst);
        posted.queued = Queued::default();
        let mut late = VecDeque::new();
        match stream {
            Sending::Open { queue, spare, .. } => {
                queue.append(&mut posted.writes);
                if posted.spare.capacity() == 0 {
                    posted.spare = mem::take(spare);
                }
            }
            Sending::Closing { .. } | Sending::Over(_) => late = std::mem::take(&mut posted.writes),
        }
        let end = posted.end.take();
        let broken = posted.broken.clone();
        // Buffers return to their pool, and wakers run, outside the lock.
        drop(posted);
        drop(late);
        if let Some(mut end) = end {
            if let Some(reason) = broken.filter(|_| end.is_end_of_file()) {
                // The half that sees a reset first gets its error. The other half sees only an end of file.
                end.error = reason;
            }
            take_end(stream, core, end);
        }
    }

    fn posted(&self) -> MutexGuard<'_, Posted> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn append(copies: &mut Vec<u8>, header: &Header, body: &[u8]) {
    copies.extend_from_slice(header);
    let at = copies.len();
    copies.resize(at + body.len(), 0);
    copy_bytes(&mut copies[at..], body, CopyReason::TcpSmall);
}

/// Fails all writes that are not with the kernel, except for a partly sent frame that a farewell must follow.
fn take_end(stream: &mut Sending, core: &QueuePairCore, end: End) {
    let End { error, farewell } = end;
    let over = match stream {
        Sending::Over(sent) => *sent,
        Sending::Open { .. } | Sending::Closing { .. } => Sent::Finished,
    };
    let (mut queue, position) = match std::mem::replace(stream, Sending::Over(over)) {
        Sending::Open { queue, position, .. } => (queue, position),
        Sending::Closing { .. } | Sending::Over(_) => (VecDeque::new(), 0),
    };
    let farewell = farewell.filter(|_| over == Sent::Finished);
    let must_finish = farewell.is_some() && !position.is_multiple_of(FRAME_BYTES);
    let under_way = if must_finish { queue.pop_front().map(|write| (write, position)) } else { None };
    let kept = under_way.as_ref().and_then(|(front, _)| front.operation()).map(|operation| operation.key);
    let others: Vec<_> = queue.into_iter().filter_map(|outgoing| outgoing.operation()).collect();
    // Their buffers are released before they complete. Those of the partly sent frame are not.
    for operation in others.into_iter().filter(|operation| Some(operation.key) != kept) {
        core.complete(operation.key, operation.bytes, Err(error.clone()));
    }
    core.fail_arrivals(&error);
    if under_way.is_none() {
        core.fail(&error);
    }
    if let Some(farewell) = farewell {
        *stream = Sending::Closing { under_way, error, farewell: farewell.encode(), farewell_sent: 0 };
    }
}

/// A bounded amount of sending.
struct Sends<'link> {
    socket: &'link Socket,
    core: &'link QueuePairCore,
    sender: &'link Sender,
    /// Bytes that may still be sent in this turn.
    left: usize,
}

impl Sends<'_> {
    fn send_writes(
        &mut self,
        queue: &mut VecDeque<Outgoing>,
        position: &mut u64,
        spare: &mut Vec<u8>,
    ) -> io::Result<Sent> {
        while !queue.is_empty() {
            if self.left == 0 {
                return Ok(Sent::More);
            }
            let sent = self.send_gathered(queue, *position)?;
            self.left = self.left.saturating_sub(sent);
            self.complete(queue, position, spare, sent as u64);
        }
        self.socket.flush()?;
        Ok(Sent::Idle)
    }

    /// Sends several frames of several writes by one system call.
    fn send_gathered(&self, queue: &VecDeque<Outgoing>, position: u64) -> io::Result<usize> {
        let mut headers = [([0; HEADER_BYTES], 0); TURN_FRAMES];
        let mut bodies = [&[] as &[u8]; TURN_FRAMES];
        let (mut frames, mut left) = (0, self.left.min(CALL_BYTES));
        for piece in Pieces::new(queue, position).take(TURN_FRAMES) {
            let body = &piece.body[..piece.body.len().min(left)];
            headers[frames] = (piece.header, piece.header_sent);
            bodies[frames] = body;
            frames += 1;
            left -= body.len();
            if body.len() < piece.body.len() || left == 0 {
                break;
            }
        }
        let mut slices = [IoSlice::new(&[]); 2 * TURN_FRAMES];
        let mut filled = 0;
        let pairs = headers[..frames].iter().zip(bodies);
        for slice in pairs.flat_map(|((header, sent), body)| [&header[*sent..], body]) {
            if !slice.is_empty() {
                slices[filled] = IoSlice::new(slice);
                filled += 1;
            }
        }
        self.socket.send(&slices[..filled])
    }

    /// Advances by `sent` bytes, and completes the writes that are completely sent.
    fn complete(
        &self,
        queue: &mut VecDeque<Outgoing>,
        position: &mut u64,
        spare: &mut Vec<u8>,
        mut sent: u64,
    ) {
        while let Some(front) = queue.front() {
            let missing = front.encoded_length() - *position;
            if sent < missing {
                *position += sent;
                return;
            }
            sent -= missing;
            *position = 0;
            if let Some(mut front) = queue.pop_front() {
                let ended = front.operation().filter(|operation| operation.is_last);
                if front.is_answer() {
                    self.sender.answers.fetch_sub(1, Ordering::Relaxed);
                }
                if let Some(copies) = front.copies() {
                    self.sender.copied.fetch_sub(copies.len(), Ordering::Relaxed);
                    if copies.capacity() <= SPARE_BYTES_MAX {
                        copies.clear();
                        *spare = mem::take(copies);
                    }
                }
                // Dropped before the completion, which means that these bytes are no longer needed.
                drop(front);
                if let Some(operation) = ended {
                    self.core.complete(operation.key, operation.bytes, Ok(()));
                }
            }
        }
    }

    fn send_farewell(
        &self,
        under_way: &mut Option<(Outgoing, u64)>,
        error: &FabricError,
        farewell: &Header,
        farewell_sent: &mut usize,
    ) -> io::Result<Sent> {
        while let Some((write, position)) = under_way {
            let piece = write.piece(*position);
            let header = IoSlice::new(&piece.header[piece.header_sent..]);
            let sent = self.socket.send(&[header, IoSlice::new(piece.body)])?;
            let frame_ends = sent == piece.length();
            *position += sent as u64;
            if frame_ends && let Some((write, position)) = under_way.take() {
                let operation = write.operation();
                let is_whole = position == write.encoded_length();
                drop(write);
                if let Some(operation) = operation {
                    let whole = is_whole && operation.is_last;
                    let result = if whole { Ok(()) } else { Err(error.clone()) };
                    self.core.complete(operation.key, operation.bytes, result);
                }
                self.core.fail(error);
            }
        }
        while *farewell_sent < HEADER_BYTES {
            *farewell_sent += self.socket.send(&[IoSlice::new(&farewell[*farewell_sent..])])?;
        }
        self.socket.finish()?;
        Ok(Sent::Finished)
    }
}

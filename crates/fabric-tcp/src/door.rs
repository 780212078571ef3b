//! The door of a port: limits connections whose peers have not proven themselves.
//!
//! A stranger is a connection whose peer has not proven itself. A port admits a limited number of them. One more evicts
//! another, so that peers that connect and send nothing cannot keep honest ones out. Each stranger has a grace period
//! in which it is not evicted, so that a storm of honest peers does not evict its own; newer connections wait in the
//! kernel's queue meanwhile. The first to be evicted is a stranger that is leaving, then one that has sent nothing,
//! then one of the [`Visit`] with most strangers: the one that has made least progress, and of equals the oldest. So
//! connections of one kind do not evict those of the other. If descriptors run short, strangers are evicted at once,
//! and fewer are allowed for some time. While many peers are refused for what they send, others are admitted at the
//! rate of refusals.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::task::AtomicWaker;
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tensorwire_memory::Limit;
use tokio::{
    io::ReadBuf,
    net::{TcpListener, TcpStream},
    sync::Notify,
};

use crate::{
    congestion::Congestion,
    strangers::{StrangerLimit, connection_waits},
};

/// The number of connections that the kernel queues until they are accepted, so that a storm of peers waits instead
/// of being dropped and retrying a second later. The kernel's own limit, `net.core.somaxconn`, may be lower.
const BACKLOG: i32 = 1024;

/// The pause after the operating system refused a new connection, if no stranger can be evicted for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The shortest interval between two log lines about failed accepts.
const COMPLAINT: Duration = Duration::from_secs(10);

/// How long a peer may take to disconnect after its session was ended.
const LEAVING: Duration = Duration::from_secs(2);

/// The minimum time that a connection has to show its purpose, however many newer ones arrive.
const ARRIVING_GRACE: Duration = Duration::from_millis(50);

/// The minimum time that a connection with an open session has to prove itself.
const ATTACHED_GRACE: Duration = Duration::from_millis(500);

/// Listens on the first of `addresses` that can be bound, with a long queue. Accepted streams inherit `congestion` from
/// their first packet on.
///
/// # Errors
/// Those of the operating system.
pub fn listen(addresses: &[SocketAddr], congestion: &Congestion) -> io::Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::bind(addresses)?;
    // Listens again, with a longer queue than the standard library requests.
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    congestion.choose(&listener);
    Ok(listener)
}

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Visit {
    /// A control session.
    Session,
    /// A data connection of the tcp fabric.
    Data,
}

/// Counters of a port's door.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DoorStats {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections that were closed because they did not show their purpose in time.
    pub timed_out: u64,
    /// Connections that were closed because newer ones arrived while too many had not proven themselves.
    pub evicted: u64,
}

/// Accepts connections, and limits how many of them stay open before their peers have proven themselves.
pub struct Door {
    arrival_limit: Duration,
    clock: Arc<dyn Runtime>,
    strangers: Mutex<VecDeque<Arc<Stranger>>>,
    limit: Mutex<StrangerLimit>,
    /// Notified when a stranger has gone, or is about to go.
    changed: Notify,
    /// When a failed accept was last logged.
    complained: Mutex<Option<Duration>>,
    accepted: AtomicU64,
    timed_out: AtomicU64,
    evicted: AtomicU64,
}

impl Door {
    /// A door that admits at most `strangers_max` connections, and at least one, whose peers have not proven
    /// themselves. Each may take `arrival_limit` to show its purpose. `clock` measures time and sleeps.
    pub fn new(strangers_max: usize, arrival_limit: Duration, clock: Arc<dyn Runtime>) -> Arc<Self> {
        Arc::new(Self {
            arrival_limit,
            clock,
            strangers: Mutex::default(),
            limit: Mutex::new(StrangerLimit::new(strangers_max)),
            changed: Notify::new(),
            complained: Mutex::default(),
            accepted: AtomicU64::new(0),
            timed_out: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        })
    }

    /// The counters so far.
    pub fn stats(&self) -> DoorStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DoorStats {
            accepted: read(&self.accepted),
            timed_out: read(&self.timed_out),
            evicted: read(&self.evicted),
        }
    }

    /// The next connection, as soon as there is room for it. Must be awaited on a tokio runtime with IO enabled.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn accept(self: &Arc<Self>, listener: &TcpListener) -> Newcomer {
        loop {
            self.room().await;
            match listener.accept().await {
                Ok((stream, peer)) => match stream.local_addr() {
                    Ok(own) => return self.enter(stream, own, peer),
                    Err(error) => log!(DEBUG, %error, "closed a connection that has no local address"),
                },
                Err(error) => self.recover(listener, &error).await,
            }
        }
    }

    /// Called after accepting failed. If the connection failed before it was accepted, the next may be accepted at
    /// once. If descriptors ran out and a connection waits, evicts strangers. Otherwise pauses.
    async fn recover(&self, listener: &TcpListener, error: &io::Error) {
        if is_the_peers_fault(error) {
            return;
        }
        let is_short = Limit::of_files(error).is_some();
        // Without a free descriptor, accepting fails with the same error whether a connection waits or not.
        if is_short && !connection_waits(listener.as_fd()) {
            return self.clock.sleep(ACCEPT_PAUSE).await;
        }
        self.complain(error);
        if !is_short {
            return self.clock.sleep(ACCEPT_PAUSE).await;
        }
        self.out_of_descriptors(ACCEPT_PAUSE).await;
    }

    fn complain(&self, error: &io::Error) {
        let now = self.clock.now();
        let mut complained = self.complained.lock().unwrap_or_else(PoisonError::into_inner);
        if complained.is_none_or(|then| now.saturating_sub(then) >= COMPLAINT) {
            *complained = Some(now);
            log!(WARN, %error, "cannot accept a connection, trying again; is the limit on open files too low?");
        }
    }

    /// Waits until one more stranger may enter.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    async fn room(&self) {
        loop {
            // Notified of changes from here on, even before its first poll.
            let changed = self.changed.notified();
            let wait = self.wait();
            if wait.is_zero() {
                return;
            }
            let _ = timeout(&*self.clock, wait, changed).await;
        }
    }

    /// How long no further connection is accepted.
    fn wait(&self) -> Duration {
        let (now, strangers) = (self.clock.now(), self.lock());
        self.limit().wait(strangers.iter().map(|stranger| stranger.grace(now)), now)
    }

    /// The process has no descriptor for a waiting connection: evicts strangers whose grace period is over at once.
    /// Waits until one has gone, for at most `pause`.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    async fn out_of_descriptors(&self, pause: Duration) {
        let changed = self.changed.notified();
        self.give_up_descriptors();
        let _ = timeout(&*self.clock, pause, changed).await;
    }

    fn give_up_descriptors(&self) {
        let (now, mut strangers) = (self.clock.now(), self.lock());
        self.limit().out_of_descriptors(strangers.len(), now);
        self.make_room(&mut strangers, now);
    }

    /// Admits `stream` as a stranger, and evicts another if there are too many.
    fn enter(self: &Arc<Self>, stream: TcpStream, own: SocketAddr, peer: SocketAddr) -> Newcomer {
        count(&self.accepted);
        let now = self.clock.now();
        let stranger = Stranger::new(self, own, peer, now);
        let mut strangers = self.lock();
        self.limit().accepted(stream.as_raw_fd(), strangers.len(), now);
        self.make_room(&mut strangers, now);
        strangers.push_back(stranger.clone());
        let timer = Some(self.clock.sleep(self.arrival_limit));
        let presence = Presence { stranger, timer, leaving: false, was_held_back: false };
        Newcomer(Some((stream, presence)))
    }

    /// Evicts strangers until there is room for one more, as far as their grace period is over or there are too many.
    fn make_room(&self, strangers: &mut VecDeque<Arc<Stranger>>, now: Duration) {
        // Two locks in one expression would be held together.
        let most = self.limit().most();
        let most_now = self.limit().most_now(now);
        while strangers.len() >= most_now {
            let oldest = if strangers.len() >= most { Some(0) } else { None };
            let index = least_deserving(strangers, now).or(oldest);
            let Some(pushed) = index.and_then(|index| strangers.remove(index)) else { return };
            log!(DEBUG, peer = %pushed.peer.ip(), "too many unauthenticated connections: closed the least promising one");
            count(&self.evicted);
            pushed.evict();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Stranger>>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Must be locked after the strangers, if both are locked.
    fn limit(&self) -> MutexGuard<'_, StrangerLimit> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a peer sent something and did not prove itself.
    fn refused(&self) {
        self.limit().refused(self.clock.now());
    }

    fn forget(&self, stranger: &Stranger) {
        self.lock().retain(|other| !std::ptr::eq(&**other, stranger));
        self.changed.notify_waiters();
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn is_the_peers_fault(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}

/// The index of the stranger to evict, of `strangers` from the oldest on: of those whose grace period is over the one
/// with the least merit, and the oldest of these.
fn least_deserving(strangers: &VecDeque<Arc<Stranger>>, now: Duration) -> Option<usize> {
    let visits = |visit| strangers.iter().filter(|stranger| stranger.received() == visit).count();
    let (sessions, data) = (visits(received::SESSION), visits(received::DATA));
    let is_crowded = |visit| match visit {
        received::SESSION => sessions >= data,
        received::DATA => data >= sessions,
        _ => true,
    };
    let over = strangers.iter().enumerate().filter(|(_, stranger)| stranger.grace(now).is_zero());
    over.min_by_key(|(_, stranger)| stranger.merit(is_crowded)).map(|(index, _)| index)
}

/// The stage of a connection. It only moves forward.
///
/// ```text
/// ARRIVING ──attach──▶ ATTACHED ──leave──▶ LEAVING
///     └──────────────evict─┴──────────────────┴──▶ EVICTED
/// ```
mod stage {
    pub(super) const ARRIVING: u8 = 0;
    pub(super) const ATTACHED: u8 = 1;
    pub(super) const LEAVING: u8 = 2;
    pub(super) const EVICTED: u8 = 3;
}

/// What a connection's peer has sent so far. It only increases.
mod received {
    pub(super) const NOTHING: u8 = 0;
    /// Anything, including the end of the stream.
    pub(super) const SOMETHING: u8 = 1;
    /// The beginning of a control session.
    pub(super) const SESSION: u8 = 2;
    /// The beginning of a data connection.
    pub(super) const DATA: u8 = 3;
}

/// One connection, as the door sees it.
pub struct Stranger {
    door: Arc<Door>,
    own: SocketAddr,
    peer: SocketAddr,
    /// When it was accepted, by the door's clock.
    since: Duration,
    stage: AtomicU8,
    received: AtomicU8,
    is_admitted: AtomicBool,
    waker: AtomicWaker,
}

impl Stranger {
    fn new(door: &Arc<Door>, own: SocketAddr, peer: SocketAddr, since: Duration) -> Arc<Self> {
        Arc::new(Self {
            door: door.clone(),
            own,
            peer,
            since,
            stage: AtomicU8::new(stage::ARRIVING),
            received: AtomicU8::new(received::NOTHING),
            is_admitted: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        })
    }

    /// The local address that it was accepted on.
    pub fn own_address(&self) -> SocketAddr {
        self.own
    }

    /// The address of the peer.
    pub fn peer_address(&self) -> SocketAddr {
        self.peer
    }

    /// Records the purpose of the connection, once that is known.
    pub fn note(&self, visit: Visit) {
        let received = match visit {
            Visit::Session => received::SESSION,
            Visit::Data => received::DATA,
        };
        self.received.fetch_max(received, Ordering::AcqRel);
    }

    /// Records that its session is open. Returns false if it has or had one.
    pub fn attach(&self) -> bool {
        self.note(Visit::Session);
        let attached = self.advance(stage::ATTACHED);
        self.waker.wake();
        attached
    }

    /// Records that the peer has proven itself. It is no stranger any more.
    pub fn admit(&self) {
        self.is_admitted.store(true, Ordering::Release);
        self.waker.wake();
        self.door.forget(self);
    }

    /// Whether the peer has proven itself.
    pub fn is_admitted(&self) -> bool {
        self.is_admitted.load(Ordering::Acquire)
    }

    /// Records that the session is over. The peer gets some time to disconnect.
    pub fn leave(&self) {
        if self.advance(stage::LEAVING) && !self.is_admitted() {
            self.door.refused();
        }
        self.waker.wake();
        self.door.changed.notify_waiters();
    }

    /// Whether the connection has at most shown its purpose.
    pub fn is_arriving(&self) -> bool {
        self.stage() == stage::ARRIVING
    }

    /// Whether the connection was evicted.
    pub fn is_evicted(&self) -> bool {
        self.stage() == stage::EVICTED
    }

    fn evict(&self) {
        self.advance(stage::EVICTED);
        self.waker.wake();
    }

    /// The rest of its grace period.
    fn grace(&self, now: Duration) -> Duration {
        let grace = match self.stage() {
            stage::ARRIVING => ARRIVING_GRACE,
            stage::ATTACHED => ATTACHED_GRACE,
            _ => Duration::ZERO,
        };
        grace.saturating_sub(now.saturating_sub(self.since))
    }

    /// The stranger with the least merit is evicted first.
    fn merit(&self, is_crowded: impl Fn(u8) -> bool) -> u8 {
        let how_far = match (self.stage(), self.received()) {
            (stage::ATTACHED, _) => 3,
            (stage::ARRIVING, received::NOTHING) => return 1,
            (stage::ARRIVING, _) => 2,
            _ => return 0,
        };
        if is_crowded(self.received()) { how_far } else { how_far + 2 }
    }

    fn stage(&self) -> u8 {
        self.stage.load(Ordering::Acquire)
    }

    fn received(&self) -> u8 {
        self.received.load(Ordering::Acquire)
    }

    /// Moves to a later stage. Returns false if that stage or a later one was reached before.
    fn advance(&self, to: u8) -> bool {
        self.stage.fetch_max(to, Ordering::AcqRel) < to
    }

    /// Records that its connection has ended. That counts as a refusal if its peer had sent something and the
    /// connection ended before the peer proved itself, or if the peer had sent the maximum. It does not count if the
    /// connection was evicted, timed out or sent nothing. One that was leaving has been counted already.
    fn gone(&self, was_held_back: bool) {
        let before = self.stage.fetch_max(stage::EVICTED, Ordering::AcqRel);
        self.door.forget(self);
        if self.is_admitted() {
            return;
        }
        let has_sent = self.received() != received::NOTHING;
        if has_sent && before < stage::LEAVING || was_held_back && before != stage::LEAVING {
            self.door.refused();
        }
    }
}

impl fmt::Debug for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stranger")
            .field("peer", &self.peer)
            .field("stage", &self.stage())
            .finish_non_exhaustive()
    }
}

/// A connection's handle on its stranger. Dropping it removes the stranger from the door.
pub struct Presence {
    stranger: Arc<Stranger>,
    timer: Option<BoxFuture<'static, ()>>,
    leaving: bool,
    was_held_back: bool,
}

impl Presence {
    /// The connection, as the door sees it.
    pub fn stranger(&self) -> &Arc<Stranger> {
        &self.stranger
    }

    /// Records that the peer has sent the maximum that a peer may send before it proves itself. If it never proves
    /// itself, that counts as a refusal.
    pub fn hold_back(&mut self) {
        self.was_held_back = true;
    }

    /// Whether [`hold_back`](Self::hold_back) was called, and the peer has not proven itself.
    pub fn is_held_back(&self) -> bool {
        self.was_held_back && !self.stranger.is_admitted()
    }

    /// Fails once the connection has been evicted or has timed out. The polling task is woken when that changes.
    ///
    /// # Errors
    /// `ConnectionAborted` or `TimedOut`: the caller must drop the connection.
    pub fn poll_cut(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        self.stranger.waker.register(context.waker());
        let stage = self.stranger.stage();
        match stage {
            stage::ARRIVING => {}
            stage::ATTACHED => self.timer = None,
            stage::LEAVING if self.leaving => {}
            stage::LEAVING => {
                self.leaving = true;
                self.timer = Some(self.stranger.door.clock.sleep(LEAVING));
            }
            _ => return Err(io::ErrorKind::ConnectionAborted.into()),
        }
        let Some(timer) = &mut self.timer else { return Ok(()) };
        if timer.as_mut().poll(context).is_pending() {
            return Ok(());
        }
        if stage == stage::ARRIVING {
            count(&self.stranger.door.timed_out);
        }
        self.stranger.evict();
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Awaits `future`. `None` if the connection is evicted or times out first.
    ///
    /// # Cancel safety
    /// As cancel-safe as `future`.
    pub async fn unless_cut<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        std::future::poll_fn(|context| match self.poll_cut(context) {
            Ok(()) => future.as_mut().poll(context).map(Some),
            Err(_) => Poll::Ready(None),
        })
        .await
    }
}

impl fmt::Debug for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Presence").field("stranger", &self.stranger).finish_non_exhaustive()
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.stranger.gone(self.was_held_back);
    }
}

/// A connection that has sent nothing yet. It is a future of the [`Guest`] that it becomes with its peer's first
/// byte, and of `None` if it is evicted or ends before. Until then it costs a descriptor and a timer.
#[derive(Debug)]
pub struct Newcomer(Option<(TcpStream, Presence)>);

/// A connection whose peer has sent its first byte.
#[derive(Debug)]
pub struct Guest {
    /// The connection. Nothing has been read from it.
    pub stream: TcpStream,
    /// Its handle at the door.
    pub presence: Presence,
    /// The first byte of the stream, which was only peeked.
    pub first: u8,
}

impl Future for Newcomer {
    type Output = Option<Guest>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some((stream, presence)) = &mut self.0 else { return Poll::Ready(None) };
        if presence.poll_cut(context).is_err() {
            self.0 = None;
            return Poll::Ready(None);
        }
        // Readiness is not enough: a new stream can be ready with nothing to read.
        let mut byte = [0; 1];
        let peeked = ready!(stream.poll_peek(context, &mut ReadBuf::new(&mut byte)));
        let Some((stream, presence)) = self.0.take() else { return Poll::Ready(None) };
        presence.stranger.received.fetch_max(received::SOMETHING, Ordering::AcqRel);
        if !matches!(peeked, Ok(1..)) {
            return Poll::Ready(None);
        }
        // The first messages are small, and the peer awaits them.
        let _ = stream.set_nodelay(true);
        Poll::Ready(Some(Guest { stream, presence, first: byte[0] }))
    }
}

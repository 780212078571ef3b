//! The door: which connections are let in before their peer has proven anything.
//!
//! A stranger is a connection whose peer has not passed the handshake. At most `limit` of them are kept; one
//! more pushes out another, so that peers who connect and say nothing cannot keep honest ones away: one that is leaving,
//! else the oldest that has opened no session, else the oldest. Each has a moment in which it is not pushed out, so that a
//! storm of honest peers does not push out its own: newer ones wait in the kernel's queue meanwhile. A
//! connection must also open its session, or show the token of a route, in time. One connection carries one session, or
//! the calls of one route. Nobody is served before they have said something, and while many have to be refused for what they say
//! the door lets others in at the pace of refusals.

use std::{
    collections::VecDeque,
    fmt, io,
    net::IpAddr,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::task::AtomicWaker;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::{Notify, watch},
};
use tonic::transport::server::Connected;

use verbs_reactor::{RefusalPace, Runtime};

use super::{
    recv_tensor::GrpcRoute,
    wire::{Security, Wire},
    within,
};
use crate::{control::ProvenPeer, log_quota::LogQuota};

/// How long the peer may take to hang up after its session has ended.
const LEAVING: Duration = Duration::from_secs(2);

/// For how long at least a connection may open its session, however many newer ones come.
const ARRIVING_GRACE: Duration = Duration::from_millis(50);

/// For how long at least one that has opened it may prove itself.
const ATTACHED_GRACE: Duration = Duration::from_millis(500);

/// Which part of the strangers may be pushed out at once after a wait.
const AT_ONCE_SHARE: usize = 8;

/// The strangers of one plane.
#[derive(Debug)]
pub(super) struct Door {
    limit: usize,
    arrival_limit: Duration,
    clock: Arc<dyn Runtime>,
    pub(super) log: LogQuota,
    security: Security,
    strangers: Mutex<VecDeque<Arc<Guest>>>,
    refusals: Mutex<RefusalPace>,
    /// One has gone, or is about to.
    changed: Notify,
}

impl Door {
    pub(super) fn new(
        limit: usize,
        arrival_limit: Duration,
        clock: Arc<dyn Runtime>,
        security: Security,
    ) -> Arc<Self> {
        let (limit, log) = (limit.max(1), LogQuota::new(clock.clone()));
        let (strangers, refusals, changed) = (Mutex::default(), Mutex::default(), Notify::new());
        Arc::new(Self { limit, arrival_limit, clock, log, security, strangers, refusals, changed })
    }

    /// Waits until one more stranger may enter.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(super) async fn room(&self) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let wait = self.grace().max(self.pace().wait(self.clock.now()));
            if wait.is_zero() {
                return;
            }
            let _ = within(wait, changed).await;
        }
    }

    /// How long no stranger may be pushed out yet; zero where there is room.
    ///
    /// Where the door must wait it waits until several may be, so that a flood wakes this process for every few of its
    /// connections instead of for each.
    fn grace(&self) -> Duration {
        let strangers = self.lock();
        if strangers.len() < self.limit {
            return Duration::ZERO;
        }
        let now = self.clock.now();
        let mut graces: Vec<Duration> = strangers.iter().map(|guest| guest.grace(now)).collect();
        graces.sort_unstable();
        match graces.first() {
            None | Some(&Duration::ZERO) => Duration::ZERO,
            Some(_) => graces[graces.len().div_ceil(AT_ONCE_SHARE) - 1],
        }
    }

    /// Lets `stream` in as a stranger, and pushes another out if there are too many.
    pub(super) fn enter(self: &Arc<Self>, stream: TcpStream, host: IpAddr) -> Newcomer {
        let now = self.clock.now();
        let guest = Guest::new(self, host, now);
        let mut strangers = self.lock();
        let is_full = strangers.len() >= self.limit;
        let pushed = if is_full { least_deserving(&strangers, now) } else { None };
        let pushed = pushed.and_then(|place| strangers.remove(place));
        strangers.push_back(guest.clone());
        drop(strangers);
        if let Some(pushed) = pushed {
            tracing::debug!(peer = %pushed.host, "too many unauthenticated peers: one is dropped");
            pushed.evict();
        }
        let timer = Some(timer(self.arrival_limit));
        let presence = Presence { guest, timer, leaving: false, has_spoken: false };
        Newcomer(Some((stream, presence)))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Guest>>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pace(&self) -> MutexGuard<'_, RefusalPace> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One who has said something did not prove itself.
    fn refused(&self) {
        self.pace().refused(self.clock.now());
    }

    fn forget(&self, guest: &Guest) {
        self.lock().retain(|other| !std::ptr::eq(&**other, guest));
        self.changed.notify_waiters();
    }
}

/// Which of the strangers, oldest first, is to make room: of those whose grace is over the one that has come least far, and
/// the oldest of these; where there is none, the oldest.
fn least_deserving(strangers: &VecDeque<Arc<Guest>>, now: Duration) -> Option<usize> {
    let over = strangers.iter().enumerate().filter(|(_, guest)| guest.grace(now).is_zero());
    let least = over.min_by_key(|(_, guest)| guest.merit()).map(|(place, _)| place);
    least.or(if strangers.is_empty() { None } else { Some(0) })
}

/// Where a connection is in its life. It only moves forward.
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

/// One connection, as the door sees it.
pub(super) struct Guest {
    door: Arc<Door>,
    host: IpAddr,
    /// When it came, by the door's clock.
    since: Duration,
    stage: AtomicU8,
    admitted: watch::Sender<bool>,
    waker: AtomicWaker,
    /// A session is being opened.
    is_attaching: AtomicBool,
    /// Whose tensors it carries, if it carries tensors.
    route: OnceLock<Weak<GrpcRoute>>,
    /// What its peer has proven by TLS.
    proven: OnceLock<Arc<ProvenPeer>>,
}

impl Guest {
    fn new(door: &Arc<Door>, host: IpAddr, since: Duration) -> Arc<Self> {
        Arc::new(Self {
            door: door.clone(),
            host,
            since,
            stage: AtomicU8::new(stage::ARRIVING),
            admitted: watch::Sender::new(false),
            waker: AtomicWaker::new(),
            is_attaching: AtomicBool::new(false),
            route: OnceLock::new(),
            proven: OnceLock::new(),
        })
    }

    /// What its peer has proven by TLS; known before its first request is.
    pub(super) fn proven(&self) -> Option<&Arc<ProvenPeer>> {
        self.proven.get()
    }

    /// How long it may not be pushed out yet.
    fn grace(&self, now: Duration) -> Duration {
        let grace = match self.stage.load(Ordering::Acquire) {
            stage::ARRIVING => ARRIVING_GRACE,
            stage::ATTACHED => ATTACHED_GRACE,
            _ => Duration::ZERO,
        };
        grace.saturating_sub(now.saturating_sub(self.since))
    }

    /// The less, the sooner it is pushed out.
    fn merit(&self) -> u8 {
        match self.stage.load(Ordering::Acquire) {
            stage::ATTACHED => 2,
            stage::ARRIVING => 1,
            _ => 0,
        }
    }

    /// The peer's host.
    pub(super) fn host(&self) -> IpAddr {
        self.host
    }

    /// Opens the connection's session. False if it has or had one.
    pub(super) fn attach(&self) -> bool {
        let attached = self.advance(stage::ATTACHED);
        self.waker.wake();
        attached
    }

    /// Announces that its session is about to be opened. False if that was done before.
    pub(super) fn begin_attach(&self) -> bool {
        !self.is_attaching.swap(true, Ordering::AcqRel)
    }

    /// Carries calls of `route`, whose token it has shown. False if it carries something else, or the route has too
    /// many connections.
    pub(super) fn carry(self: &Arc<Self>, route: &Arc<GrpcRoute>) -> bool {
        let carries = |known: &Weak<GrpcRoute>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(route));
        if let Some(known) = self.route.get() {
            return carries(known);
        }
        if !self.begin_attach() || !route.admit(self) || self.route.set(Arc::downgrade(route)).is_err() {
            return false;
        }
        self.attach();
        self.admit();
        true
    }

    /// It has shown no token that is known: it has a moment to leave, unless it carries something.
    pub(super) fn turn_away(&self) {
        if self.stage.load(Ordering::Acquire) == stage::ARRIVING {
            self.leave();
        }
    }

    /// The peer has proven itself: it is no stranger any more.
    pub(super) fn admit(&self) {
        self.admitted.send_replace(true);
        self.door.forget(self);
    }

    /// Waits until [`admit`](Self::admit) was called. Cancel-safe.
    pub(super) async fn admission(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.admitted.subscribe().wait_for(|admitted| *admitted).await;
    }

    /// The session has ended: the peer has a moment to hang up.
    pub(super) fn leave(&self) {
        if self.advance(stage::LEAVING) && !*self.admitted.borrow() {
            self.door.refused();
        }
        self.waker.wake();
        self.door.changed.notify_waiters();
    }

    /// Whether the connection was cut.
    pub(super) fn is_evicted(&self) -> bool {
        self.stage.load(Ordering::Acquire) == stage::EVICTED
    }

    fn evict(&self) {
        self.advance(stage::EVICTED);
        self.waker.wake();
    }

    /// Moves to a later stage; false if this stage or a later one was reached before.
    fn advance(&self, to: u8) -> bool {
        self.stage.fetch_max(to, Ordering::AcqRel) < to
    }

    /// Its connection has ended. Whoever hung up, or was hung up on, before it proved itself was refused; whoever was pushed out
    /// or had no time left, or said nothing, was not, and one that was leaving has been counted.
    fn gone(&self, has_spoken: bool) {
        let was_welcome = *self.admitted.borrow();
        let before = self.stage.fetch_max(stage::EVICTED, Ordering::AcqRel);
        if has_spoken && !was_welcome && before < stage::LEAVING {
            self.door.refused();
        }
        self.door.forget(self);
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guest").field("host", &self.host).field("stage", &self.stage).finish_non_exhaustive()
    }
}

/// The end of a guest that its connection holds: the door forgets it with the connection.
struct Presence {
    guest: Arc<Guest>,
    timer: Option<Pin<Box<tokio::time::Sleep>>>,
    leaving: bool,
    /// Its peer has sent something, be it the end.
    has_spoken: bool,
}

impl Presence {
    /// Fails once the connection has been cut or its time is over. Wakes who polls when that changes.
    fn poll_cut(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        self.guest.waker.register(context.waker());
        match self.guest.stage.load(Ordering::Acquire) {
            stage::ARRIVING => {}
            stage::ATTACHED => self.timer = None,
            stage::LEAVING if self.leaving => {}
            stage::LEAVING => {
                self.leaving = true;
                self.timer = Some(timer(LEAVING));
            }
            _ => return Err(io::ErrorKind::ConnectionAborted.into()),
        }
        let Some(timer) = &mut self.timer else { return Ok(()) };
        if timer.as_mut().poll(context).is_pending() {
            return Ok(());
        }
        self.guest.evict();
        Err(io::ErrorKind::TimedOut.into())
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.guest.gone(self.has_spoken);
        if let Some(route) = self.guest.route.get().and_then(Weak::upgrade) {
            route.guest_gone(&self.guest);
        }
    }
}

/// A connection that has said nothing yet. It becomes a guest's stream with its peer's first byte, and nothing once it was
/// cut: until then it costs a descriptor and a timer, and no server that would greet somebody silent.
pub(super) struct Newcomer(Option<(TcpStream, Presence)>);

impl Future for Newcomer {
    type Output = Option<GuestStream>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some((stream, presence)) = &mut self.0 else { return Poll::Ready(None) };
        if presence.poll_cut(context).is_err() {
            self.0 = None;
            return Poll::Ready(None);
        }
        // Being told that it is ready does not do: new streams were, with nothing to read. What is wrong with a stream is told
        // to who reads it.
        let mut byte = [0; 1];
        let _either = ready!(stream.poll_peek(context, &mut ReadBuf::new(&mut byte)));
        Poll::Ready(self.0.take().map(|(stream, mut presence)| {
            presence.has_spoken = true;
            // Small frames, each awaited by somebody.
            let _ = stream.set_nodelay(true);
            let stream = Wire::accept(stream, &presence.guest.door.security);
            GuestStream { stream, presence }
        }))
    }
}

/// A connection that the door can cut.
pub(super) struct GuestStream {
    stream: Wire,
    presence: Presence,
}

impl GuestStream {
    fn poll_cut(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        self.presence.poll_cut(context)
    }

    /// Tells what the TLS handshake has come to.
    fn note<T>(&self, polled: &Poll<io::Result<T>>) {
        let guest = &self.presence.guest;
        if matches!(polled, Poll::Ready(Err(_)))
            && guest.stage.load(Ordering::Acquire) == stage::ARRIVING
            && let Some(why) = self.stream.trouble().text()
            && let Some(left_out) = guest.door.log.line(&guest.host.to_string())
        {
            tracing::warn!(peer = %guest.host, why, left_out, "a control connection was refused");
        }
        if guest.proven.get().is_none()
            && let Some(proven) = self.stream.proven()
        {
            let _ = guest.proven.set(proven.clone());
        }
    }
}

impl Connected for GuestStream {
    type ConnectInfo = Arc<Guest>;

    fn connect_info(&self) -> Arc<Guest> {
        self.presence.guest.clone()
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.poll_cut(context)?;
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        this.note(&read);
        read
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.poll_cut(context)?;
        Pin::new(&mut this.stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.poll_cut(context)?;
        Pin::new(&mut this.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[allow(clippy::disallowed_methods)] // the plane owns its runtime, and time on a socket is real time
fn timer(limit: Duration) -> Pin<Box<tokio::time::Sleep>> {
    Box::pin(tokio::time::sleep(limit))
}

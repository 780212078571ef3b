//! The data listener of one domain: accepts, greets, and hands each stream to the end it was meant for.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{
    StreamExt,
    channel::oneshot,
    future::{AbortHandle, Abortable},
    stream::FuturesUnordered,
};
use tokio::net::{TcpListener, TcpStream};

use super::{
    TcpConfig,
    fabric::remedy,
    handshake::{HELLO_BYTES, Hello, Token, VERSION, encode_welcome},
    protection::{Protection, Stream},
    socket::{prefer_cubic, set_backlog},
};
use crate::{BoxFuture, Elapsed, FabricError, FabricKind, RefusalPace, Runtime, timeout};

/// How long accepting rests when the process is out of descriptors or memory.
const ACCEPT_REST: Duration = Duration::from_millis(20);

/// Streams that the kernel holds until they are accepted, so that a storm of peers waits instead of being dropped and trying
/// again a second later.
const BACKLOG: i32 = 1024;

/// How often at most it is logged that accepting fails.
const COMPLAINT: Duration = Duration::from_secs(10);

/// For how long at least a stream may say who it is, however many newer ones come: they wait in the kernel's queue
/// meanwhile. Without it, a burst would push out a peer between its connect and its first bytes.
const GRACE: Duration = Duration::from_millis(20);

/// Which part of those who have not said who they are may be pushed out at once after a wait.
const AT_ONCE_SHARE: usize = 8;

/// What the data listeners of one fabric saw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Streams accepted.
    pub accepted: u64,
    /// Streams handed to the end that had issued their token.
    pub handed_over: u64,
    /// Streams closed because their token was never issued, or already used.
    pub bad_tokens: u64,
    /// Streams closed because their first bytes were no hello of this version.
    pub malformed: u64,
    /// Streams closed because the hello did not come in time.
    pub timed_out: u64,
    /// Streams closed because newer ones came while too many were waiting for their hello.
    pub evicted: u64,
    /// Streams closed because they were to be encrypted, and their other end did not speak TLS or showed no certificate
    /// that is trusted.
    pub not_trusted: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    accepted: AtomicU64,
    handed_over: AtomicU64,
    bad_tokens: AtomicU64,
    malformed: AtomicU64,
    timed_out: AtomicU64,
    evicted: AtomicU64,
    not_trusted: AtomicU64,
}

impl Counters {
    pub(super) fn stats(&self) -> ListenerStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ListenerStats {
            accepted: read(&self.accepted),
            handed_over: read(&self.handed_over),
            bad_tokens: read(&self.bad_tokens),
            malformed: read(&self.malformed),
            timed_out: read(&self.timed_out),
            evicted: read(&self.evicted),
            not_trusted: read(&self.not_trusted),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Counts a stream whose peer is refused for what it said.
fn refuse(counter: &AtomicU64) -> bool {
    count(counter);
    true
}

/// A stream that showed the right token.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) stream: Stream,
    pub(super) nonce: Token,
}

/// Listens as long as it, or a ticket of it, lives.
#[derive(Debug)]
pub(super) struct Listener {
    address: SocketAddr,
    tickets: Arc<Tickets>,
    /// Ends the task when dropped.
    _stop: oneshot::Sender<()>,
}

impl Listener {
    /// # Errors
    /// [`FabricError::Device`] naming the call that the system refused, [`FabricError::Limit`] the limit behind it.
    pub(super) fn start(
        runtime: &Arc<dyn Runtime>,
        config: &TcpConfig,
        counters: &Arc<Counters>,
        protection: &Protection,
    ) -> Result<Arc<Self>, FabricError> {
        let fail = |call| {
            move |error: io::Error| match remedy(&error) {
                Some(remedy) => {
                    FabricError::refused(FabricKind::Tcp, call, &error, format!("{error}; {remedy}"))
                }
                None => FabricError::device(FabricKind::Tcp, call, error),
            }
        };
        let socket = std::net::TcpListener::bind((config.bind, 0)).map_err(fail("bind"))?;
        set_backlog(&socket, BACKLOG).map_err(fail("listen"))?;
        socket.set_nonblocking(true).map_err(fail("set_nonblocking"))?;
        let address = socket.local_addr().map_err(fail("getsockname"))?;
        if config.bind.is_loopback() {
            // Accepted streams inherit it, and from their first packet on.
            prefer_cubic(&socket);
        }
        let tickets = Arc::new(Tickets::default());
        let (stop, stopped) = oneshot::channel();
        let reception = Reception {
            runtime: runtime.clone(),
            counters: counters.clone(),
            tickets: tickets.clone(),
            protection: protection.clone(),
            hello_limit: config.handshake_limit,
            pending_max: config.pending_handshakes_max.max(1),
            order: VecDeque::new(),
            next: 0,
            refusals: RefusalPace::default(),
            complained: None,
        };
        runtime.spawn("tcp listener", Box::pin(reception.run(socket, stopped)));
        Ok(Arc::new(Self { address, tickets, _stop: stop }))
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A place for one stream.
    pub(super) fn issue(self: &Arc<Self>, token: Token) -> Ticket {
        let (sender, visitor) = oneshot::channel();
        let number = self.tickets.add(Issued { token, sender });
        Ticket { listener: self.clone(), number, visitor }
    }
}

/// The right to receive one stream; withdrawn on drop.
#[derive(Debug)]
pub(super) struct Ticket {
    listener: Arc<Listener>,
    number: u64,
    visitor: oneshot::Receiver<Visitor>,
}

impl Ticket {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The stream that showed this ticket's token; `None` if the listener ended.
    ///
    /// # Cancel safety
    /// Cancel-safe: the stream stays with the ticket.
    pub(super) async fn visitor(&mut self) -> Option<Visitor> {
        (&mut self.visitor).await.ok()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.listener.tickets.withdraw(self.number);
    }
}

#[derive(Debug)]
struct Issued {
    token: Token,
    sender: oneshot::Sender<Visitor>,
}

/// The tickets that no stream has claimed yet.
#[derive(Debug, Default)]
struct Tickets {
    next: AtomicU64,
    issued: Mutex<HashMap<u64, Issued>>,
}

impl Tickets {
    fn add(&self, issued: Issued) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(number, issued);
        number
    }

    fn withdraw(&self, number: u64) {
        let withdrawn = self.lock().remove(&number);
        drop(withdrawn);
    }

    /// Takes the ticket, if the token is its own. A wrong token leaves it for the right one.
    fn claim(&self, number: u64, token: &Token) -> Option<oneshot::Sender<Visitor>> {
        let mut issued = self.lock();
        if !issued.get(&number)?.token.matches(token) {
            return None;
        }
        issued.remove(&number).map(|ticket| ticket.sender)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Issued>> {
        self.issued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handshake under way, since that moment of the runtime.
struct Pending {
    number: u64,
    since: Duration,
    abort: AbortHandle,
}

/// A handshake that has ended.
struct Greeted {
    number: u64,
    /// For what its peer said.
    was_refused: bool,
}

/// The listener's task.
struct Reception {
    runtime: Arc<dyn Runtime>,
    counters: Arc<Counters>,
    tickets: Arc<Tickets>,
    protection: Protection,
    hello_limit: Duration,
    pending_max: usize,
    /// The handshakes under way, oldest first.
    order: VecDeque<Pending>,
    next: u64,
    refusals: RefusalPace,
    /// When it was last logged that accepting fails.
    complained: Option<Duration>,
}

impl Reception {
    async fn run(mut self, socket: std::net::TcpListener, mut stopped: oneshot::Receiver<()>) {
        let socket = match TcpListener::from_std(socket) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::error!(%error, "the tcp data listener cannot start: connections to it will time out");
                return;
            }
        };
        let mut pending: FuturesUnordered<Abortable<BoxFuture<'_, _>>> = FuturesUnordered::new();
        loop {
            let wait = self.grace().max(self.refusals.wait(self.runtime.now()));
            tokio::select! {
                biased;
                _ = &mut stopped => return,
                // An evicted one has left the order already.
                Some(ended) = pending.next() => if let Ok(Greeted { number, was_refused }) = ended {
                    self.order.retain(|known| known.number != number);
                    if was_refused {
                        self.refusals.refused(self.runtime.now());
                    }
                },
                () = self.runtime.sleep(wait), if !wait.is_zero() => {}
                answer = socket.accept(), if wait.is_zero() => match answer {
                    Ok((stream, _)) => pending.push(self.receive(stream)),
                    Err(error) => self.rest(&error).await,
                }
            }
        }
    }

    /// How long no further stream is accepted, because it would push out one that is too young for that.
    ///
    /// Where it must wait, it waits until several may be pushed out, so that a flood wakes this process for every few of
    /// its streams instead of for each.
    fn grace(&self) -> Duration {
        if self.order.len() < self.pending_max {
            return Duration::ZERO;
        }
        let now = self.runtime.now();
        let grace = |place: usize| {
            let since = self.order.get(place).map(|pending| pending.since);
            since.map_or(Duration::ZERO, |since| GRACE.saturating_sub(now.saturating_sub(since)))
        };
        if grace(0).is_zero() {
            return Duration::ZERO;
        }
        grace(self.pending_max.div_ceil(AT_ONCE_SHARE) - 1)
    }

    /// Begins the handshake of a new stream. A flood of silent streams pushes out its own oldest ones, not the
    /// peer that speaks at once.
    fn receive(&mut self, stream: TcpStream) -> Abortable<BoxFuture<'static, Greeted>> {
        count(&self.counters.accepted);
        while self.order.len() >= self.pending_max {
            let Some(oldest) = self.order.pop_front() else { break };
            oldest.abort.abort();
            count(&self.counters.evicted);
        }
        let number = self.next;
        self.next += 1;
        let (abort, registration) = AbortHandle::new_pair();
        self.order.push_back(Pending { number, since: self.runtime.now(), abort });
        let desk = Desk {
            runtime: self.runtime.clone(),
            counters: self.counters.clone(),
            tickets: self.tickets.clone(),
            protection: self.protection.clone(),
            limit: self.hello_limit,
        };
        let greeting = async move {
            let was_refused = desk.greet(stream).await;
            Greeted { number, was_refused }
        };
        Abortable::new(Box::pin(greeting), registration)
    }

    async fn rest(&mut self, error: &io::Error) {
        if [io::ErrorKind::ConnectionAborted, io::ErrorKind::ConnectionReset].contains(&error.kind()) {
            return;
        }
        let now = self.runtime.now();
        if self.complained.is_none_or(|then| now.saturating_sub(then) >= COMPLAINT) {
            self.complained = Some(now);
            tracing::warn!(%error, "accepting a data connection failed; is the limit on open files too low?");
        }
        self.runtime.sleep(ACCEPT_REST).await;
    }
}

/// What one handshake needs.
struct Desk {
    runtime: Arc<dyn Runtime>,
    counters: Arc<Counters>,
    tickets: Arc<Tickets>,
    protection: Protection,
    limit: Duration,
}

impl Desk {
    /// Reads the hello and hands the stream over, or drops it: true if its peer was refused for what it said.
    async fn greet(&self, stream: TcpStream) -> bool {
        let mut bytes = [0; HELLO_BYTES];
        let greeting = async {
            let mut stream = match self.protection.accept(stream).await {
                Ok(stream) => stream,
                Err(why) => {
                    tracing::debug!(why, "a data connection was closed during the TLS handshake");
                    return Err(&self.counters.not_trusted);
                }
            };
            let read = stream.read_exact(&mut bytes).await;
            read.map(|()| stream).map_err(|_| &self.counters.malformed)
        };
        let mut stream = match timeout(&*self.runtime, self.limit, greeting).await {
            Err(Elapsed) => {
                count(&self.counters.timed_out);
                return false;
            }
            Ok(Err(counter)) => return refuse(counter),
            Ok(Ok(stream)) => stream,
        };
        let Some(hello) = Hello::decode(&bytes) else { return refuse(&self.counters.malformed) };
        if hello.version != VERSION {
            // Ours, so that the dialer can name both. It fits the empty send buffer.
            let _ = timeout(&*self.runtime, self.limit, stream.write_all(&encode_welcome())).await;
            return refuse(&self.counters.malformed);
        }
        let Some(place) = self.tickets.claim(hello.ticket, &hello.token) else {
            tracing::debug!("a data connection with a wrong or used token was closed");
            return refuse(&self.counters.bad_tokens);
        };
        if place.send(Visitor { stream, nonce: hello.nonce }).is_ok() {
            count(&self.counters.handed_over);
        }
        false
    }
}

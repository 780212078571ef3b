//! The state of a peer: its sessions, and its connection, which is made on first use.

#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwapOption;
use tensorwire_fabric::{QueuePairStats, Runtime, timeout};
use tensorwire_protocol::{Code, Counters, Key, Status, report::Traffic};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::Notify;

use crate::{
    connection::{
        DataConnection,
        tally::{PeerTally, Tally},
    },
    error::{Lost, WorkerError},
    session::Session,
    values::latch::Latch,
};

/// How long a worker whose Connect was refused, because the peer's connection takes precedence, waits for the peer's
/// Connect before it sends another.
const PEERS_TURN: Duration = Duration::from_millis(50);

/// How long a peer that refused this worker because of its name is not dialled again.
const REFUSAL_PAUSE: Duration = Duration::from_secs(1);

/// The state of a peer. Cheap to clone: all clones are the same. Stays valid when the connection or the peer is
/// restarted.
#[derive(Debug, Clone)]
pub(crate) struct KnownPeer {
    inner: Arc<PeerRecord>,
}

#[derive(Debug)]
struct PeerRecord {
    name: String,
    state: Mutex<PeerState>,
    /// The connection in use, for callers that take no lock. Changed with the link, under the lock.
    in_use: ArcSwapOption<DataConnection>,
    /// The key of a value for the peer and that of a value from it, once users have sent and received by name. Other keys differ
    /// from them only in the edge.
    keys: [OnceLock<Key>; 2],
    /// What its connections have moved, once there was one.
    tally: OnceLock<Arc<PeerTally>>,
    /// Notified when an attempt of the peer has ended.
    accepted: Notify,
}

#[derive(Debug, Default)]
struct PeerState {
    address: Option<String>,
    /// Unproven addresses, each once for every caller that added it.
    hints: Vec<String>,
    /// Open sessions, all with one incarnation of the peer.
    sessions: Vec<Arc<Session>>,
    /// When the peer refused this worker because another one has its name, and the peer's message.
    refused: Option<(Duration, String)>,
    /// The last known incarnation.
    incarnation: Option<u64>,
    /// The last incarnation that was [taken](KnownPeer::take_life).
    taken: Option<u64>,
    not_used: Vec<String>,
    was_connected: bool,
    link: Link,
    /// The last attempt that began.
    begun: AttemptNumber,
    /// The last attempt of this worker.
    own: AttemptNumber,
    /// How many attempts of the peer are under way.
    accepting: usize,
    /// The connection of the peer's newest successful attempt.
    accepted: Option<(AttemptNumber, Arc<DataConnection>)>,
    /// The counters of the last connection that has ended.
    former: (QueuePairStats, Counters),
}

/// The number of a connection attempt, of either worker. One that begins later has a greater number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AttemptNumber(u64);

/// The result of a connection attempt.
pub(crate) type Attempt = Result<Arc<DataConnection>, WorkerError>;

/// The connection for requests. If both workers connect at the same time, the attempt of the worker whose name sorts
/// first takes precedence and the other is refused, so that both use the same connection.
#[derive(Debug, Default)]
enum Link {
    #[default]
    Idle,
    /// An attempt of this worker is under way. There is one at a time, and all callers wait for it.
    Connecting(Latch<Attempt>),
    /// An attempt of the peer is under way, and callers wait for it.
    Accepting(Latch<Attempt>),
    Up {
        attempt: AttemptNumber,
        connection: Arc<DataConnection>,
        /// A Connect of the peer was refused once because of this connection. If the peer sends another, it has lost
        /// its side.
        told: bool,
    },
}

/// The result of [`KnownPeer::replace`].
pub(crate) enum Replaced {
    Done,
    /// Something is under way on the connection in use.
    Busy,
    /// One of the two has ended, or the other is not in use.
    Over,
}

/// The connection of a caller that needs one, or the attempt that will make it.
pub(crate) enum ConnectionOrAttempt {
    Connection(Arc<DataConnection>),
    /// An attempt that began before this call.
    UnderWay(Latch<Attempt>),
    /// A new attempt, which the caller must make.
    Begun(Latch<Attempt>),
}

impl PeerState {
    /// The incarnation of the open session.
    fn life(&self) -> Option<u64> {
        let live = self.sessions.iter().find(|session| !session.is_over());
        live.map(|session| session.peer.incarnation)
    }

    fn begin(&mut self) -> AttemptNumber {
        self.begun.0 += 1;
        self.begun
    }
}

impl Link {
    fn up(attempt: AttemptNumber, connection: &Arc<DataConnection>) -> Self {
        Self::Up { attempt, connection: connection.clone(), told: false }
    }
}

impl KnownPeer {
    pub(crate) fn new(name: &str) -> Self {
        Self::of(name, PeerState::default())
    }

    /// As [`new`](Self::new), with a known address and incarnation.
    pub(crate) fn known(name: &str, address: &str, incarnation: u64) -> Self {
        let (address, incarnation) = (Some(address.to_owned()), Some(incarnation));
        Self::of(name, PeerState { address, incarnation, ..PeerState::default() })
    }

    fn of(name: &str, state: PeerState) -> Self {
        let (name, state) = (name.to_owned(), Mutex::new(state));
        let (in_use, keys, tally) = (ArcSwapOption::empty(), Default::default(), OnceLock::new());
        Self { inner: Arc::new(PeerRecord { name, state, in_use, keys, tally, accepted: Notify::new() }) }
    }

    /// The peer's worker name.
    pub(crate) fn name(&self) -> &str {
        &self.inner.name
    }

    /// A key of a value for the peer, and one of a value from it, once there are some.
    pub(crate) fn keys(&self) -> &[OnceLock<Key>; 2] {
        &self.inner.keys
    }

    /// The counts of its connections. `forgotten` gets them when the peer is forgotten.
    pub(crate) fn tally(&self, forgotten: &Arc<Tally>) -> Arc<PeerTally> {
        self.inner.tally.get_or_init(|| PeerTally::new(forgotten)).clone()
    }

    /// What its connections have moved.
    pub(crate) fn traffic(&self) -> Traffic {
        self.inner.tally.get().map(|tally| tally.traffic()).unwrap_or_default()
    }

    /// The address at which it was dialled, or on which it announced that it listens.
    pub(crate) fn address(&self) -> Option<String> {
        self.lock().address.clone()
    }

    /// Adds an address at which it may listen.
    pub(crate) fn add_hint(&self, address: &str) {
        self.lock().hints.push(address.to_owned());
    }

    /// Removes one hint.
    pub(crate) fn remove_hint(&self, address: &str) {
        let hints = &mut self.lock().hints;
        if let Some(at) = hints.iter().position(|hint| hint == address) {
            hints.swap_remove(at);
        }
    }

    /// The addresses at which it may listen.
    pub(crate) fn hints(&self) -> Vec<String> {
        self.lock().hints.clone()
    }

    /// Its current incarnation, or the last known one; `None` before the first session.
    pub(crate) fn incarnation(&self) -> Option<u64> {
        self.lock().incarnation
    }

    /// Whether both are clones of the same peer.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Whether there is no session, no connection and no hint, and no more than `holders` clones exist.
    pub(crate) fn is_idle(&self, holders: usize) -> bool {
        if Arc::strong_count(&self.inner) > holders {
            return false;
        }
        let state = self.lock();
        let is_up = match &state.link {
            Link::Idle => false,
            Link::Up { connection, .. } => !connection.has_ended(),
            Link::Connecting(_) | Link::Accepting(_) => true,
        };
        !is_up
            && state.hints.is_empty()
            && state.accepting == 0
            && state.sessions.iter().all(|session| session.is_over())
    }

    /// The fabrics that were tried before the one in use, each with the reason why it is not used.
    pub(crate) fn not_used(&self) -> Vec<String> {
        self.lock().not_used.clone()
    }

    /// Records a new connection. Returns whether there was one before.
    pub(crate) fn note_connect(&self) -> bool {
        std::mem::replace(&mut self.lock().was_connected, true)
    }

    pub(crate) fn note_not_used(&self, tried: Vec<String>) {
        self.lock().not_used = tried;
    }

    pub(crate) fn note_address(&self, address: &str) {
        self.lock().address = Some(address.to_owned());
    }

    /// Adds a session with the peer to the others of the same incarnation, unless it is there. If the peer opened it in a new
    /// incarnation, its announced address is stored, because it may have moved.
    ///
    /// # Errors
    /// An open session of another incarnation, which is another worker of the same name.
    pub(crate) fn note_session(&self, session: &Arc<Session>) -> Result<(), Arc<Session>> {
        let mut state = self.lock();
        let incarnation = session.peer.incarnation;
        state.sessions.retain(|known| !known.is_over());
        if let Some(other) = state.sessions.iter().find(|known| known.peer.incarnation != incarnation) {
            return Err(other.clone());
        }
        if !state.sessions.iter().any(|known| Arc::ptr_eq(known, session)) {
            state.sessions.push(session.clone());
        }
        let is_new_life = state.incarnation.replace(incarnation).is_some_and(|known| known != incarnation);
        let listens = session.listen_address();
        if !session.is_dialled() && listens.is_some() && (is_new_life || state.address.is_none()) {
            state.address = listens;
        }
        Ok(())
    }

    /// The incarnation in which the peer is connected, if it is.
    pub(crate) fn life(&self) -> Option<u64> {
        self.lock().life()
    }

    /// Whether the peer is connected, in another incarnation than at the last call that returned true.
    pub(crate) fn take_life(&self) -> bool {
        let mut state = self.lock();
        let life = state.life();
        let is_new = life.is_some() && life != state.taken;
        if is_new {
            state.taken = life;
        }
        is_new
    }

    /// Records that the peer refused this worker because another one has its name.
    pub(crate) fn note_refusal(&self, now: Duration, why: &str) {
        self.lock().refused = Some((now, why.to_owned()));
    }

    /// The peer's message, if it has refused this worker because of its name within [`REFUSAL_PAUSE`].
    pub(crate) fn refusal(&self, now: Duration) -> Option<String> {
        let state = self.lock();
        let (at, why) = state.refused.as_ref()?;
        (now.saturating_sub(*at) < REFUSAL_PAUSE).then(|| why.clone())
    }

    /// Begins an attempt of the peer. `first` if this worker's name sorts first.
    ///
    /// # Errors
    /// This worker's own connection or attempt takes precedence.
    pub(crate) fn begin_accept(&self, first: bool) -> Result<AttemptNumber, Status> {
        self.end_former();
        let mut state = self.lock();
        let counts = match &mut state.link {
            Link::Connecting(_) => first,
            Link::Up { connection, told, .. } if !connection.is_over() => {
                first && !std::mem::replace(told, true)
            }
            Link::Up { .. } | Link::Idle => {
                self.set_link(&mut state, Link::Accepting(Latch::new()));
                false
            }
            Link::Accepting(_) => false,
        };
        if counts {
            return Err(Status::new(
                Code::AlreadyExists,
                "the other worker's connection takes precedence, by the order of the workers' names",
            ));
        }
        state.accepting += 1;
        Ok(state.begin())
    }

    /// Ends an attempt of the peer. Returns the connection that it replaces: the peer has lost its side of that one, or
    /// it would not have connected again.
    #[must_use]
    pub(crate) fn end_accept(
        &self,
        accepted: Option<(AttemptNumber, &Arc<DataConnection>)>,
    ) -> Option<Arc<DataConnection>> {
        let mut state = self.lock();
        state.accepting -= 1;
        let (mut replaced, mut told) = (None, None);
        if let Some((attempt, connection)) = accepted {
            // The peer may have connected again since. A connection of an older attempt, or one that has failed
            // meanwhile, replaces no live one.
            let replaces = |than: AttemptNumber, other: &DataConnection| {
                other.is_over() || (than < attempt && !connection.is_over())
            };
            if state.accepted.as_ref().is_none_or(|(than, other)| replaces(*than, other)) {
                state.accepted = Some((attempt, connection.clone()));
            }
            let link = match &state.link {
                // This worker's own attempt will be refused, and will then find `accepted`.
                Link::Connecting(_) => None,
                Link::Up { attempt: than, connection: up, .. } if !replaces(*than, up) => None,
                _ => Some(Link::up(attempt, connection)),
            };
            match link.map(|link| self.set_link(&mut state, link)) {
                Some(Link::Accepting(latch)) => told = Some((latch, Some(Ok(connection.clone())))),
                Some(Link::Up { connection, .. }) => replaced = Some(connection),
                _ => {}
            }
        } else if state.accepting == 0
            && let Link::Accepting(latch) = &state.link
        {
            // Callers that waited for the peer's attempt make their own.
            told = Some((latch.clone(), None));
            self.set_link(&mut state, Link::Idle);
        }
        drop(state);
        if let Some((latch, ended)) = told {
            latch.set(ended);
        }
        self.inner.accepted.notify_waiters();
        replaced
    }

    /// Waits for the connection that the peer is setting up, after this worker's attempt was refused for it. `None` if
    /// the peer does not begin within [`PEERS_TURN`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(crate) async fn accepted(&self, runtime: &dyn Runtime) -> Option<Arc<DataConnection>> {
        loop {
            // Created before the state is checked, so that no notification in between is missed.
            let ended = self.inner.accepted.notified();
            let under_way = {
                let state = self.lock();
                if let Some((_, connection)) =
                    state.accepted.as_ref().filter(|(_, connection)| !connection.is_over())
                {
                    return Some(connection.clone());
                }
                state.accepting > 0
            };
            if under_way {
                ended.await;
            } else if timeout(runtime, PEERS_TURN, ended).await.is_err() {
                return None;
            }
        }
    }

    /// An open session, if there is one.
    pub(crate) fn live_session(&self) -> Option<Arc<Session>> {
        self.lock().sessions.iter().find(|session| !session.is_over()).cloned()
    }

    /// The connection in use, which may have failed.
    pub(crate) fn connection(&self) -> Option<Arc<DataConnection>> {
        match &self.lock().link {
            Link::Up { connection, .. } => Some(connection.clone()),
            _ => None,
        }
    }

    /// The counters of the connection in use, or of the last one.
    pub(crate) fn figures(&self) -> (QueuePairStats, Counters) {
        match self.connection() {
            Some(connection) => figures(&connection),
            None => self.lock().former,
        }
    }

    /// Drops the references to a connection that has ended, because the peer lives longer, and would hold sockets and mappings open.
    pub(crate) fn let_go(&self, ended: &Arc<DataConnection>) {
        let mut figures = figures(ended);
        figures.0.unacknowledged = None;
        let mut state = self.lock();
        let is_it = |connection: &Arc<DataConnection>| Arc::ptr_eq(connection, ended);
        let accepted = state.accepted.take_if(|(_, accepted)| is_it(accepted));
        let link = match &state.link {
            Link::Up { connection, .. } if is_it(connection) => {
                state.former = figures;
                Some(self.set_link(&mut state, Link::Idle))
            }
            _ => None,
        };
        drop(state);
        // Dropped outside the lock: these may be the last references to the connection.
        drop((accepted, link));
    }

    /// Fails a connection that has broken but not ended yet, so that its lost steps are stored before the next
    /// connection is used.
    fn end_former(&self) {
        let former = self.connection().filter(|connection| connection.is_over() && !connection.has_ended());
        if let Some(former) = former {
            former.fail(&Lost::gone("the connection is over"));
        }
    }

    /// The result of `take` for the connection in use. Takes no lock.
    pub(crate) fn find<T>(&self, take: impl FnOnce(&DataConnection) -> Option<T>) -> Option<T> {
        self.inner.in_use.load().as_deref().and_then(take)
    }

    /// The connection in use, unless it has failed. Takes no lock.
    pub(crate) fn live_connection(&self) -> Option<Arc<DataConnection>> {
        self.inner.in_use.load_full().filter(|connection| !connection.is_over())
    }

    /// Whether `connection` is in use.
    pub(crate) fn uses(&self, connection: &Arc<DataConnection>) -> bool {
        self.live_connection().is_some_and(|in_use| Arc::ptr_eq(&in_use, connection))
    }

    /// Retires `used` and uses `standby` instead, if nothing is under way on `used`. Both happen under one lock, so that a caller that is
    /// refused by a retired connection finds the standby.
    pub(crate) fn replace(&self, used: &Arc<DataConnection>, standby: &Arc<DataConnection>) -> Replaced {
        let mut state = self.lock();
        let attempt = match &state.link {
            Link::Up { attempt, connection, .. } if Arc::ptr_eq(connection, used) => *attempt,
            _ => return Replaced::Over,
        };
        if used.is_over() || standby.is_over() {
            return Replaced::Over;
        }
        if !used.protocol.retire() {
            return Replaced::Busy;
        }
        let former = self.set_link(&mut state, Link::up(attempt, standby));
        drop(state);
        drop(former);
        Replaced::Done
    }

    /// Replaces the link, which is returned so that a connection is not dropped under the lock.
    fn set_link(&self, state: &mut PeerState, link: Link) -> Link {
        let in_use = match &link {
            Link::Up { connection, .. } => Some(connection.clone()),
            _ => None,
        };
        let former = std::mem::replace(&mut state.link, link);
        // `former` still refers to the connection that leaves here.
        self.inner.in_use.store(in_use);
        former
    }

    /// The connection in use, the attempt to wait for, or a new attempt for the caller to make.
    pub(crate) fn connection_or_attempt(&self) -> ConnectionOrAttempt {
        if let Some(connection) = self.live_connection().filter(|connection| connection.is_usable()) {
            return ConnectionOrAttempt::Connection(connection);
        }
        self.end_former();
        let mut state = self.lock();
        match &state.link {
            Link::Up { connection, .. } if !connection.is_over() => {
                return ConnectionOrAttempt::Connection(connection.clone());
            }
            Link::Connecting(attempt) | Link::Accepting(attempt) => {
                return ConnectionOrAttempt::UnderWay(attempt.clone());
            }
            Link::Up { .. } | Link::Idle => {}
        }
        let attempt = Latch::new();
        let former = self.set_link(&mut state, Link::Connecting(attempt.clone()));
        state.own = state.begin();
        let accepted = state.accepted.take();
        drop(state);
        drop((former, accepted));
        ConnectionOrAttempt::Begun(attempt)
    }

    /// Ends an attempt of this worker. Returns the peer's connection instead, if the attempt failed and the peer has
    /// connected in the meantime, or if the peer's attempt began later.
    pub(crate) fn end_attempt(&self, ended: Attempt) -> Attempt {
        let mut state = self.lock();
        let accepted = state.accepted.take().filter(|(_, connection)| !connection.is_over());
        let own = state.own;
        let ended = match (ended, accepted) {
            (Ok(connection), Some((attempt, _))) if attempt < own => Ok((own, connection)),
            (_, Some(accepted)) => Ok(accepted),
            (ended, None) => ended.map(|connection| (own, connection)),
        };
        let link = ended.as_ref().map_or(Link::Idle, |(attempt, connection)| Link::up(*attempt, connection));
        let former = self.set_link(&mut state, link);
        drop(state);
        drop(former);
        ended.map(|(_, connection)| connection)
    }

    fn lock(&self) -> MutexGuard<'_, PeerState> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn figures(connection: &DataConnection) -> (QueuePairStats, Counters) {
    (connection.queue_pair.stats(), connection.protocol.counters())
}

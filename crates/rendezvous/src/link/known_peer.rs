//! What is known of a peer: its sessions and its connection, which is made on first use.

#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use tensorwire_protocol::{Code, Counters, Status};
use tensorwire_testpoints::sync::Mutex;
use tensorwire_verbs_reactor::{QueuePairStats, Runtime, timeout};
use tokio::sync::Notify;

use crate::{
    error::{Lost, WorkerError},
    link::{connection::DataConnection, session::Session},
    values::latch::Latch,
};

/// How long an end whose Connect was refused, because the peer's own counts, waits for that before it asks again.
const PEERS_TURN: Duration = Duration::from_millis(50);

/// How long a peer that refused this worker for its name is not asked again.
const REFUSAL_PAUSE: Duration = Duration::from_secs(1);

/// What is known of a peer. Cheap to clone: all clones are the same. Stays valid over reconnects and restarts of the
/// peer.
#[derive(Debug, Clone)]
pub(crate) struct KnownPeer {
    inner: Arc<PeerRecord>,
}

#[derive(Debug)]
struct PeerRecord {
    name: String,
    state: Mutex<PeerState>,
    /// An attempt of the peer's has ended.
    accepted: Notify,
}

#[derive(Debug, Default)]
struct PeerState {
    address: Option<String>,
    /// All of one life.
    sessions: Vec<Arc<Session>>,
    /// When, and with which words, the peer refused this worker because another one has its name.
    refused: Option<(Duration, String)>,
    /// Its last known life.
    incarnation: Option<u64>,
    not_used: Vec<String>,
    was_connected: bool,
    link: Link,
    /// Attempts of the peer's that are under way.
    accepting: usize,
    /// What the last of them gave.
    accepted: Option<Arc<DataConnection>>,
    /// What the last connection that is over had moved.
    former: (QueuePairStats, Counters),
}

/// How a connection attempt ended.
pub(crate) type Attempt = Result<Arc<DataConnection>, WorkerError>;

/// The one connection that requests go over. When both ends dial at the same moment, the attempt of the worker
/// whose name sorts first counts, and the other's is refused: so both ends use the same one.
#[derive(Debug, Default)]
enum Link {
    #[default]
    Idle,
    /// One attempt of this end at a time; everyone who needs the peer waits for its end.
    Connecting(Latch<Attempt>),
    /// The peer attempts it, and whoever needs it waits for that.
    Accepting(Latch<Attempt>),
    Up {
        connection: Arc<DataConnection>,
        /// The peer was told once that this connection counts. If it asks again, it has lost its end.
        told: bool,
    },
}

/// What there is for somebody who wants a connection.
pub(crate) enum ConnectionOrAttempt {
    Connection(Arc<DataConnection>),
    /// An attempt that began before.
    UnderWay(Latch<Attempt>),
    /// A new attempt, which the caller makes.
    Begun(Latch<Attempt>),
}

impl Link {
    fn up(connection: &Arc<DataConnection>) -> Self {
        Self::Up { connection: connection.clone(), told: false }
    }
}

impl KnownPeer {
    pub(crate) fn new(name: &str) -> Self {
        Self::of(name, PeerState::default())
    }

    /// As [`new`](Self::new), with an address and a life that are known.
    pub(crate) fn known(name: &str, address: &str, incarnation: u64) -> Self {
        let (address, incarnation) = (Some(address.to_owned()), Some(incarnation));
        Self::of(name, PeerState { address, incarnation, ..PeerState::default() })
    }

    fn of(name: &str, state: PeerState) -> Self {
        let (name, state) = (name.to_owned(), Mutex::new(state));
        Self { inner: Arc::new(PeerRecord { name, state, accepted: Notify::new() }) }
    }

    /// The peer's worker name.
    pub(crate) fn name(&self) -> &str {
        &self.inner.name
    }

    /// The address it was dialled at or says that it listens on.
    pub(crate) fn address(&self) -> Option<String> {
        self.lock().address.clone()
    }

    /// The number of its present life, or of the last one that is known; `None` before the first session.
    pub(crate) fn incarnation(&self) -> Option<u64> {
        self.lock().incarnation
    }

    /// Whether this is the same peer.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Whether there is no connection to it, and nobody but `holders` has a handle on it.
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
        !is_up && state.accepting == 0 && state.sessions.iter().all(|session| session.is_over())
    }

    /// The fabrics that were considered before the one in use, and why they were not used.
    pub(crate) fn not_used(&self) -> Vec<String> {
        self.lock().not_used.clone()
    }

    /// One more connection stands. Whether there was one before.
    pub(crate) fn note_connect(&self) -> bool {
        std::mem::replace(&mut self.lock().was_connected, true)
    }

    pub(crate) fn note_not_used(&self, tried: Vec<String>) {
        self.lock().not_used = tried;
    }

    pub(crate) fn note_address(&self, address: &str) {
        self.lock().address = Some(address.to_owned());
    }

    /// A new session with the peer, beside others of this life of it. A peer that opened it in a new life may have
    /// moved, and says where it listens now.
    ///
    /// # Errors
    /// A session of another life, which is not over: that of a worker that goes by the same name.
    pub(crate) fn note_session(&self, session: &Arc<Session>, is_dialled: bool) -> Result<(), Arc<Session>> {
        let mut state = self.lock();
        let incarnation = session.peer.incarnation;
        state.sessions.retain(|known| !known.is_over());
        if let Some(other) = state.sessions.iter().find(|known| known.peer.incarnation != incarnation) {
            return Err(other.clone());
        }
        state.sessions.push(session.clone());
        let is_new_life = state.incarnation.replace(incarnation).is_some_and(|known| known != incarnation);
        let listens = session.listen_address();
        if !is_dialled && listens.is_some() && (is_new_life || state.address.is_none()) {
            state.address = listens;
        }
        Ok(())
    }

    /// The peer refused this worker because another one has its name.
    pub(crate) fn note_refusal(&self, now: Duration, why: &str) {
        self.lock().refused = Some((now, why.to_owned()));
    }

    /// Why the peer is not to be asked again yet, if it refused this worker for its name lately.
    pub(crate) fn refusal(&self, now: Duration) -> Option<String> {
        let state = self.lock();
        let (at, why) = state.refused.as_ref()?;
        (now.saturating_sub(*at) < REFUSAL_PAUSE).then(|| why.clone())
    }

    /// Begins an attempt of the peer's. `first` says whether this end's name sorts first.
    ///
    /// # Errors
    /// This end's own connection, or attempt, counts.
    pub(crate) fn begin_accept(&self, first: bool) -> Result<(), Status> {
        self.end_former();
        let mut state = self.lock();
        let counts = match &mut state.link {
            Link::Connecting(_) => first,
            Link::Up { connection, told } if !connection.is_over() => first && !std::mem::replace(told, true),
            Link::Up { .. } | Link::Idle => {
                state.link = Link::Accepting(Latch::new());
                false
            }
            Link::Accepting(_) => false,
        };
        if counts {
            return Err(Status::new(
                Code::AlreadyExists,
                "this end's connection counts, by the workers' names",
            ));
        }
        state.accepting += 1;
        Ok(())
    }

    /// An attempt of the peer's has ended. Gives the connection that it replaces: one whose other end the peer has
    /// lost, or it would not have asked.
    #[must_use]
    pub(crate) fn end_accept(&self, accepted: Option<&Arc<DataConnection>>) -> Option<Arc<DataConnection>> {
        let mut state = self.lock();
        state.accepting -= 1;
        let (mut replaced, mut told) = (None, None);
        if let Some(connection) = accepted {
            state.accepted = Some(connection.clone());
            let link = match &state.link {
                // The own attempt will be refused, and find it.
                Link::Connecting(_) => None,
                _ => Some(Link::up(connection)),
            };
            match link.map(|link| std::mem::replace(&mut state.link, link)) {
                Some(Link::Accepting(latch)) => told = Some((latch, Some(Ok(connection.clone())))),
                Some(Link::Up { connection, .. }) => replaced = Some(connection),
                _ => {}
            }
        } else if state.accepting == 0
            && let Link::Accepting(latch) = &state.link
        {
            // Whoever waits dials now.
            told = Some((latch.clone(), None));
            state.link = Link::Idle;
        }
        drop(state);
        if let Some((latch, ended)) = told {
            latch.set(ended);
        }
        self.inner.accepted.notify_waiters();
        replaced
    }

    /// The connection that the peer is setting up, after this end's attempt was refused for it; `None` if there is
    /// no sign of it.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(crate) async fn accepted(&self, runtime: &dyn Runtime) -> Option<Arc<DataConnection>> {
        loop {
            // Told of each end from here on, be it before it is polled.
            let ended = self.inner.accepted.notified();
            let under_way = {
                let state = self.lock();
                if let Some(connection) = state.accepted.as_ref().filter(|connection| !connection.is_over()) {
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

    /// The session in use, if it is alive.
    pub(crate) fn live_session(&self) -> Option<Arc<Session>> {
        self.lock().sessions.iter().find(|session| !session.is_over()).cloned()
    }

    /// The connection in use, alive or not.
    pub(crate) fn connection(&self) -> Option<Arc<DataConnection>> {
        match &self.lock().link {
            Link::Up { connection, .. } => Some(connection.clone()),
            _ => None,
        }
    }

    /// What went over the connection in use, or over the last one.
    pub(crate) fn figures(&self) -> (QueuePairStats, Counters) {
        match self.connection() {
            Some(connection) => figures(&connection),
            None => self.lock().former,
        }
    }

    /// Lets go of a connection whose end is noted: a peer is remembered for long, and its sockets and mappings are not to
    /// be.
    pub(crate) fn let_go(&self, ended: &Arc<DataConnection>) {
        let figures = figures(ended);
        let mut state = self.lock();
        let is_it = |connection: &Arc<DataConnection>| Arc::ptr_eq(connection, ended);
        let accepted = state.accepted.take_if(|accepted| is_it(accepted));
        let link = match &state.link {
            Link::Up { connection, .. } if is_it(connection) => {
                state.former = figures;
                Some(std::mem::take(&mut state.link))
            }
            _ => None,
        };
        drop(state);
        // Outside the lock: they may be the last handles on it.
        drop((accepted, link));
    }

    /// Has the end of a connection noted that is over, so that nothing goes on over the next one that it has lost.
    fn end_former(&self) {
        let former = self.connection().filter(|connection| connection.is_over() && !connection.has_ended());
        if let Some(former) = former {
            former.fail(&Lost::gone("the connection is over"));
        }
    }

    fn live_connection(&self) -> Option<Arc<DataConnection>> {
        match &self.lock().link {
            Link::Up { connection, .. } if !connection.is_over() => Some(connection.clone()),
            _ => None,
        }
    }

    /// The connection in use, or the attempt to wait for.
    pub(crate) fn connection_or_attempt(&self) -> ConnectionOrAttempt {
        if let Some(connection) = self.live_connection() {
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
        state.link = Link::Connecting(attempt.clone());
        state.accepted = None;
        ConnectionOrAttempt::Begun(attempt)
    }

    /// What an attempt of this end gave, or the peer's in its place.
    pub(crate) fn end_attempt(&self, ended: Attempt) -> Attempt {
        let mut state = self.lock();
        let accepted = state.accepted.take().filter(|connection| !connection.is_over());
        let ended = ended.or_else(|error| accepted.ok_or(error));
        state.link = ended.as_ref().map_or(Link::Idle, Link::up);
        ended
    }

    fn lock(&self) -> MutexGuard<'_, PeerState> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn figures(connection: &DataConnection) -> (QueuePairStats, Counters) {
    (connection.queue_pair.stats(), connection.protocol.counters())
}

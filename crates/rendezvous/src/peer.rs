//! A peer, connected on first use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::{WorkerError, data::DataConnection, error::Lost, node::Node, session::Session};

/// A handle on a peer. Cheap to clone; stays valid over reconnects and restarts of the peer.
#[derive(Debug, Clone)]
pub struct Peer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    address: Option<String>,
    session: Option<Arc<Session>>,
    link: Link,
}

/// How a connection attempt ended.
type Attempt = Result<Arc<DataConnection>, WorkerError>;

#[derive(Debug, Default)]
enum Link {
    #[default]
    Idle,
    /// One attempt at a time; everyone who needs the peer waits for its end.
    Connecting(watch::Receiver<Option<Attempt>>),
    Up(Arc<DataConnection>),
}

impl Peer {
    pub(crate) fn new(name: &str) -> Self {
        Self { inner: Arc::new(Inner { name: name.to_owned(), state: Mutex::default() }) }
    }

    /// The peer's worker name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The address it was dialled at or says that it listens on.
    pub fn address(&self) -> Option<String> {
        self.lock().address.clone()
    }

    pub(crate) fn note_address(&self, address: &str) {
        self.lock().address = Some(address.to_owned());
    }

    /// A new session with the peer; replaces one that is over.
    pub(crate) fn note_session(&self, session: &Arc<Session>) {
        let mut state = self.lock();
        if state.session.as_ref().is_none_or(|known| known.is_over()) {
            state.session = Some(session.clone());
        }
        if state.address.is_none() {
            state.address.clone_from(&session.peer.listen_address);
        }
    }

    /// A connection that the peer has set up; used unless there is one already.
    pub(crate) fn note_connection(&self, connection: &Arc<DataConnection>) {
        self.end_former();
        let mut state = self.lock();
        let usable = match &state.link {
            Link::Idle => false,
            Link::Connecting(_) => true,
            Link::Up(known) => !known.is_over(),
        };
        if !usable {
            state.link = Link::Up(connection.clone());
        }
    }

    /// The session in use, if it is alive.
    pub(crate) fn live_session(&self) -> Option<Arc<Session>> {
        self.lock().session.clone().filter(|session| !session.is_over())
    }

    /// The connection in use, alive or not.
    pub(crate) fn connection(&self) -> Option<Arc<DataConnection>> {
        match &self.lock().link {
            Link::Up(connection) => Some(connection.clone()),
            _ => None,
        }
    }

    /// A live data connection; connects if there is none.
    ///
    /// # Cancel safety
    /// Cancel-safe: an attempt under way goes on for others.
    pub(crate) async fn connected(&self, node: &Arc<Node>) -> Attempt {
        let mut attempt = match self.link_or_attempt(node) {
            Ok(connection) => return Ok(connection),
            Err(attempt) => attempt,
        };
        let ended = attempt.wait_for(Option::is_some).await.map_err(|_| WorkerError::ShutDown)?;
        ended.clone().unwrap_or(Err(WorkerError::ShutDown))
    }

    /// Has the end of a connection noted that is over, so that nothing goes on over the next one that it has lost.
    fn end_former(&self) {
        let former = self.connection().filter(|connection| connection.is_over() && !connection.has_ended());
        if let Some(former) = former {
            former.fail(&Lost::gone("the connection is over"));
        }
    }

    fn link_or_attempt(
        &self,
        node: &Arc<Node>,
    ) -> Result<Arc<DataConnection>, watch::Receiver<Option<Attempt>>> {
        self.end_former();
        let mut state = self.lock();
        match &state.link {
            Link::Up(connection) if !connection.is_over() => return Ok(connection.clone()),
            Link::Connecting(attempt) => return Err(attempt.clone()),
            Link::Up(_) | Link::Idle => {}
        }
        let (tell, attempt) = watch::channel(None);
        state.link = Link::Connecting(attempt.clone());
        drop(state);
        let (peer, connecting) = (self.clone(), node.clone());
        node.runtime.spawn(
            "connect",
            Box::pin(async move {
                let ended = connecting.connect(&peer).await;
                peer.lock().link = match &ended {
                    Ok(connection) => Link::Up(connection.clone()),
                    Err(_) => Link::Idle,
                };
                let _ = tell.send(Some(ended));
            }),
        );
        Err(attempt)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One spelling per address: without scheme and surrounding space.
pub(crate) fn normalise_address(address: &str) -> String {
    let address = address.trim();
    address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/').to_owned()
}

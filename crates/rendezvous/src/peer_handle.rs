//! A peer, as users hold it.

use crate::{Fetch, FetchMany, List, Worker, peer::KnownPeer};

/// Another worker: what is fetched from it, and whom a step sends to. Cheap to clone. It stays valid over reconnects
/// and restarts of the peer, and keeps the worker that it is of running.
///
/// [`Worker::peer`], [`Worker::peer_at`] and [`Worker::wait_for_peer`] give it. It is connected on first use.
///
/// ```
/// use rendezvous::Worker;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
/// # let server = Worker::builder("ps").start().await?;
/// let client = Worker::client().start().await?;
/// let peer = client.peer_at(server.address()).await?;
/// assert_eq!(peer.name(), server.name());
/// assert_eq!(peer.incarnation(), Some(server.incarnation()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Peer {
    pub(crate) worker: Worker,
    pub(crate) known: KnownPeer,
}

impl Peer {
    pub(crate) fn new(worker: &Worker, known: KnownPeer) -> Self {
        Self { worker: worker.clone(), known }
    }

    /// Its worker name.
    pub fn name(&self) -> &str {
        self.known.name()
    }

    /// The address it was dialled at or says that it listens on.
    pub fn address(&self) -> Option<String> {
        self.known.address()
    }

    /// The number of its present life, or of the last one that is known; `None` before the first session.
    pub fn incarnation(&self) -> Option<u64> {
        self.known.incarnation()
    }

    /// The tensor that the peer has published under `name`. Nothing happens until the fetch is awaited; its methods are
    /// the options. If the peer is the worker itself, the tensor comes without a copy and without a connection.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use rendezvous::{Peer, WorkerError};
    ///
    /// # async fn example(peer: Peer) -> Result<(), WorkerError> {
    /// // What is published now.
    /// let now = peer.fetch("weights").timeout(Duration::from_secs(5)).await?;
    /// // The first version, as soon as it is published.
    /// let mut latest = peer.fetch("weights").wait().versioned().await?;
    /// // Each version once.
    /// loop {
    ///     println!("{:?} is version {}", latest.tensor, latest.version);
    ///     latest = peer.fetch("weights").newer_than(latest.version).versioned().await?;
    /// }
    /// # }
    /// ```
    ///
    /// If the connection breaks, the fetch is made once more within its time, unless the peer was restarted: what it
    /// publishes now may be something else.
    ///
    /// # Errors
    /// Awaiting it gives [`WorkerError::Remote`](crate::WorkerError::Remote) with NOT_FOUND when there is none;
    /// [`WorkerError::PeerLost`](crate::WorkerError::PeerLost), [`WorkerError::NoFabric`](crate::WorkerError::NoFabric),
    /// [`WorkerError::DeadlineExceeded`](crate::WorkerError::DeadlineExceeded) after its [`timeout`](Fetch::timeout).
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost by dropping the future, because the tensor stays published.
    pub fn fetch<'a>(&'a self, name: &'a str) -> Fetch<'a> {
        Fetch::new(self, name)
    }

    /// The tensors that the peer has published under `names`, in their order. All are asked for at once, in as few
    /// messages as they fit ([`Flow::requests_per_message`](crate::Flow::requests_per_message)). Nothing happens until
    /// it is awaited; its methods are the options.
    ///
    /// # Memory
    /// As [`Step::recv_many`](crate::Step::recv_many): what has come stays in the receive pool until the last has.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), for the first name whose fetch fails; the error names it.
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch).
    pub fn fetch_many(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> FetchMany<'_> {
        FetchMany::new(self, names.into_iter().map(|name| name.as_ref().to_owned()).collect())
    }

    /// What the peer has published, sorted by name.
    ///
    /// # Errors
    /// Awaiting it gives [`WorkerError::Control`](crate::WorkerError::Control),
    /// [`WorkerError::PeerLost`](crate::WorkerError::PeerLost),
    /// [`WorkerError::DeadlineExceeded`](crate::WorkerError::DeadlineExceeded).
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub fn list(&self) -> List<'_> {
        List::new(self)
    }
}

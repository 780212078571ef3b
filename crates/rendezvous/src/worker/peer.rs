//! A peer, as users hold it.

use std::pin::pin;

use crate::{
    control::{cluster::ClusterSpec, name::sought},
    error::WorkerError,
    link::{known_peer::KnownPeer, session_setup::Meant},
    worker::Worker,
};

/// Another worker: what is fetched from it, and whom a step sends to. Cheap to clone. It stays valid over reconnects
/// and restarts of the peer, and keeps the worker that it is of running.
///
/// [`Worker::peer`], [`Worker::peer_at`] and [`Worker::wait_for_peer`] give it. It is connected on first use.
///
/// ```
/// use tensorwire_rendezvous::Worker;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire_rendezvous::WorkerError> {
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
}

impl Worker {
    /// The peer called `name`: of the cluster, or one that has connected. Does not connect. The own name gives this
    /// worker itself, whose tensors are fetched without a connection.
    ///
    /// # Errors
    /// [`WorkerError::UnknownWorker`].
    pub fn peer(&self, name: &str) -> Result<Peer, WorkerError> {
        Ok(Peer::new(self, self.node.peer_by_name(&sought(name))?))
    }

    /// The peer that listens on `address` (`host:port`). Asks it for its name unless that is known already, or the
    /// address is this worker's own.
    ///
    /// # Errors
    /// [`WorkerError::Control`] when it cannot be reached or does not share the secret, [`WorkerError::Limit`]
    /// when this process may open no more files, [`WorkerError::NameTaken`] when its name is that of another worker that
    /// is connected and answers.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn peer_at(&self, address: &str) -> Result<Peer, WorkerError> {
        if let Some(peer) = self.node.peer_by_address(address) {
            return Ok(Peer::new(self, peer));
        }
        let (_, known) = self.node.dial(address, Meant::Host).await.map_err(WorkerError::or_limit)?;
        Ok(Peer::new(self, known))
    }

    /// The peer called `name`, as soon as it is connected with this worker: for a service whose clients come by
    /// themselves. Does not connect; waits at most for the worker's default timeout.
    ///
    /// # Errors
    /// [`WorkerError::DeadlineExceeded`], [`WorkerError::ShutDown`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn wait_for_peer(&self, name: &str) -> Result<Peer, WorkerError> {
        let name = &*sought(name);
        let met = async {
            loop {
                let mut more = pin!(self.node.met.notified());
                more.as_mut().enable();
                if let Some(peer) = self.node.met_peer(name) {
                    return Ok(Peer::new(self, peer));
                }
                more.await;
            }
        };
        self.within(self.operations.defaults.limit, || format!("waiting for {name} to connect"), pin!(met))
            .await
    }

    /// Says that the worker `name` listens on `address` (`host:port`): one that is in no cluster, or that has moved. A
    /// connection that stands stays; the next one goes there, or else to where the cluster says.
    ///
    /// A peer that was restarted elsewhere and connects here says itself where it listens.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] for a name or an address that is none, [`WorkerError::Config`] for this worker's own name.
    pub fn set_address(&self, name: &str, address: &str) -> Result<Peer, WorkerError> {
        ClusterSpec::new().worker(name, address).check()?;
        let name = sought(name);
        if name == self.node.name {
            let remedy = "that is this worker itself: name a peer".to_owned();
            return Err(WorkerError::Config { field: "name", value: name, remedy });
        }
        Ok(Peer::new(self, self.node.name_peer(&name, address)?))
    }
}

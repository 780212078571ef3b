//! [`Peer`]: a peer, as users hold it.

use std::{fmt, pin::pin, sync::Arc};

use tensorwire_protocol::Stay;

use crate::{
    connection::{DataConnection, fabric_channel::FabricChannel},
    control::{cluster::ClusterSpec, name::sought},
    error::WorkerError,
    session::{
        known_peer::KnownPeer,
        node::{Node, session_setup::Verify},
    },
    values::end_signal::unless,
    worker::Worker,
};

/// Another worker, to fetch from and to send to. Cheap to clone. It stays valid when the connection or the peer is
/// restarted, and keeps the worker that returned it running.
///
/// Returned by [`Worker::peer`], [`Worker::peer_at`], [`Worker::wait_for_peer`] and [`Worker::discover`]. It is connected on first use.
///
/// ```
/// use tensorwire::Worker;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// # let server = Worker::builder("ps").start().await?;
/// let client = Worker::client().start().await?;
/// let peer = client.peer_at(server.address()).await?;
/// assert_eq!(peer.name(), server.name());
/// assert_eq!(peer.incarnation(), Some(server.incarnation()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Peer {
    pub(crate) worker: Worker,
    pub(crate) known: KnownPeer,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("name", &self.name())
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}

impl Peer {
    /// A connection with the peer, which is not replaced by one over a better fabric until the second value is dropped.
    pub(crate) async fn staying_connection(
        &self,
    ) -> Result<(Arc<DataConnection>, Stay<FabricChannel>), WorkerError> {
        loop {
            let connection = self.worker.node.connected(&self.known).await?;
            // Retired a moment ago: another one is in use.
            if let Some(stay) = connection.stay() {
                return Ok((connection, stay));
            }
        }
    }

    pub(crate) fn new(worker: &Worker, known: KnownPeer) -> Self {
        Self { worker: worker.clone(), known }
    }

    /// Its worker name.
    pub fn name(&self) -> &str {
        self.known.name()
    }

    /// The address at which it was dialled, or its announced listen address.
    pub fn address(&self) -> Option<String> {
        self.known.address()
    }

    /// Connects, unless a connection exists. Other calls connect by themselves. This is for receives whose requests
    /// must be sent in order: without it, the first would wait for the connection, and a later one might overtake it.
    ///
    /// # Errors
    /// [`WorkerError::Control`], [`WorkerError::NoFabric`], [`WorkerError::NoAddress`] and the like, as from a fetch.
    ///
    /// # Cancel safety
    /// Cancel-safe: an attempt under way continues.
    pub async fn connect(&self) -> Result<(), WorkerError> {
        self.worker.check_runs()?;
        if self.known.live_connection().is_none() && self.name() != self.worker.name() {
            self.worker.node.connected(&self.known).await?;
        }
        Ok(())
    }

    /// Its current incarnation, or the last known one; `None` before the first session.
    pub fn incarnation(&self) -> Option<u64> {
        self.known.incarnation()
    }
}

/// An address at which a peer may listen, until this is dropped. Returned by [`Worker::hint_address`].
#[derive(Debug)]
#[must_use = "the address is forgotten when this is dropped"]
pub struct AddressHint {
    peer: Peer,
    address: String,
}

impl Drop for AddressHint {
    fn drop(&mut self) {
        self.peer.worker.node.remove_hint(&self.peer.known, &self.address);
    }
}

impl Worker {
    /// The peer called `name`, if it is in the cluster or has connected. Does not connect. This worker's own name
    /// returns the worker itself, whose tensors are fetched without a connection.
    ///
    /// # Errors
    /// [`WorkerError::UnknownWorker`].
    pub fn peer(&self, name: &str) -> Result<Peer, WorkerError> {
        Ok(Peer::new(self, self.node.peer_by_name(&sought(name))?))
    }

    /// The peer that listens on `address` (`host:port`). Opens a session to learn its name, and waits until the peer serves it,
    /// unless the name is already known or the address is this worker's own.
    ///
    /// # Errors
    /// [`WorkerError::Control`] if it cannot be reached or does not share the secret, [`WorkerError::Limit`] if this
    /// process may open no more files, [`WorkerError::NameTaken`] if another worker of the same name, or of this worker's
    /// name, is connected and answers, [`WorkerError::ShutDown`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn peer_at(&self, address: &str) -> Result<Peer, WorkerError> {
        self.check_runs()?;
        if let Some(peer) = self.node.peer_by_address(address) {
            return Ok(Peer::new(self, peer));
        }
        let (session, known) = self.node.dial(address, Verify::Host).await.map_err(WorkerError::or_limit)?;
        self.node.serves(&session, address).await?;
        Ok(Peer::new(self, known))
    }

    /// Waits until the peer called `name` has connected to this worker, for at most the worker's default timeout. Does
    /// not connect: this is for a service whose clients dial it.
    ///
    /// Each [incarnation](Peer::incarnation) of the peer is returned once, while it is connected. So a service that
    /// calls this in a loop has one conversation with each incarnation of its client, and waits in between.
    ///
    /// # Errors
    /// [`WorkerError::DeadlineExceeded`], [`WorkerError::ShutDown`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn wait_for_peer(&self, name: &str) -> Result<Peer, WorkerError> {
        let name = &*sought(name);
        let met = async {
            let met = self.meets(|node| node.met_peer(name)).await.ok_or(WorkerError::ShutDown)?;
            Ok(Peer::new(self, met))
        };
        let what = || format!("waiting for {name} to connect");
        let hint = "does it run, and does it dial this worker? Each of its lives is returned once";
        self.within(self.operations.defaults.limit, what, hint, pin!(met)).await
    }

    /// The first peer that `find` finds, now or when a session has begun. `None` when this worker shuts down.
    pub(super) async fn meets(&self, mut find: impl FnMut(&Node) -> Option<KnownPeer>) -> Option<KnownPeer> {
        let met = async {
            loop {
                let mut more = pin!(self.node.session_begins());
                more.as_mut().enable();
                if let Some(peer) = find(&self.node) {
                    return peer;
                }
                more.await;
            }
        };
        unless(self.node.closing(), met).await
    }

    /// Sets the address (`host:port`) of the worker `name`, which is not in the cluster or has moved. An open
    /// connection stays; the next one dials this address first, then the address in the cluster.
    ///
    /// This is not needed for a peer that restarts elsewhere and dials this worker: it announces its new address.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] if the name or the address is invalid, [`WorkerError::Config`] for this worker's own
    /// name.
    pub fn set_address(&self, name: &str, address: &str) -> Result<Peer, WorkerError> {
        let name = self.name_of_peer(name, address)?;
        Ok(Peer::new(self, self.node.name_peer(&name, address)?))
    }

    /// The worker `name`, which may listen at `address` (`host:port`). The address comes from a source without proof,
    /// such as a store: this worker dials it after the address that was set or dialled before, and after the address in
    /// the cluster, and it replaces neither. When the returned [`AddressHint`] is dropped, the address is no longer
    /// dialled, and a peer that never had a session is forgotten.
    ///
    /// # Errors
    /// As [`set_address`](Self::set_address).
    #[doc(hidden)]
    pub fn hint_address(&self, name: &str, address: &str) -> Result<(Peer, AddressHint), WorkerError> {
        let name = self.name_of_peer(name, address)?;
        let peer = Peer::new(self, self.node.add_hint(&name, address)?);
        Ok((peer.clone(), AddressHint { peer, address: address.to_owned() }))
    }

    /// Checks the name and the address of a peer. Returns the whole name.
    fn name_of_peer(&self, name: &str, address: &str) -> Result<String, WorkerError> {
        ClusterSpec::new().worker(name, address).check()?;
        let name = sought(name);
        if name == self.node.name() {
            let remedy = "that is this worker itself: use the name of a peer".to_owned();
            return Err(WorkerError::Config { field: "name", value: name, remedy });
        }
        Ok(name)
    }
}

//! A worker: one process of a cluster.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use futures::future::try_join_all;
use memory::{Pool, PoolStats, UserMemory};
use protocol::{Code, Counters, DeviceName, Held, Key, Manner, Scope, Sharing, Status, StepId};
use verbs_reactor::{FabricKind, QueuePairStats, timeout};

use crate::{
    Peer, Published, Tensor, WorkerBuilder, WorkerError,
    data::DataConnection,
    error::{Lost, PeerLoss, TransferName},
    fabric_channel::FabricChannel,
    node::Node,
    receive_into::Target,
    table::{SendRefused, TakenValue},
    values::worker_device,
};

/// How long a shutdown waits for the sessions' goodbyes.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// A worker. Cheap to clone; the last clone's drop begins the shutdown without waiting for it.
#[derive(Debug, Clone)]
pub struct Worker {
    pub(crate) node: Arc<Node>,
    _closer: Arc<Closer>,
}

/// Begins the shutdown when the last handle is gone.
#[derive(Debug)]
struct Closer(Arc<Node>);

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.closing.send_replace(true);
    }
}

/// What is known of a peer now.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Its worker name.
    pub name: String,
    /// Its address, if known.
    pub address: Option<String>,
    /// The fabric in use; `None` while not connected.
    pub transport: Option<FabricKind>,
    /// Its incarnation; `None` before the first session.
    pub incarnation: Option<u64>,
    /// The fabric's counters of the present connection.
    pub fabric: QueuePairStats,
    /// The protocol's counters of the present connection.
    pub counters: Counters,
}

impl Worker {
    /// Settings for a worker called `name`, for instance `/job:ps/replica:0/task:0`.
    pub fn builder(name: &str) -> WorkerBuilder {
        WorkerBuilder::new(name)
    }

    pub(crate) fn new(node: Arc<Node>) -> Self {
        Self { _closer: Arc::new(Closer(node.clone())), node }
    }

    /// This worker's name.
    pub fn name(&self) -> &str {
        &self.node.name
    }

    /// Where peers reach it.
    pub fn address(&self) -> &str {
        &self.node.address
    }

    /// Tells this life of the worker from earlier ones.
    pub fn incarnation(&self) -> u64 {
        self.node.incarnation
    }

    /// Memory for values to publish and send.
    pub fn pool(&self) -> &Pool {
        &self.node.pools.source
    }

    /// The user's own memory, to publish and send from where it lies: join it, then
    /// [`Tensor::shared`](crate::Tensor::shared). A peer that uses shared memory gets a copy, which is made in
    /// [`pool`](Self::pool) each time.
    pub fn user_memory(&self) -> &UserMemory {
        &self.node.pools.user
    }

    /// Memory that peers may write: what received values lie in. [`fetch_into`](Self::fetch_into) and
    /// [`Step::recv_into`] fill a buffer of it without a copy.
    pub fn receive_pool(&self) -> &Pool {
        &self.node.pools.receive
    }

    /// What the memory for received values holds.
    pub fn receive_memory(&self) -> PoolStats {
        self.node.pools.receive.stats()
    }

    /// Publishes `tensor` under `name`, in place of an earlier one; gives its version. Receivers that are being
    /// served keep the tensor they were promised.
    ///
    /// # Errors
    /// [`WorkerError::Config`] when the name is empty or too long.
    pub fn publish(&self, name: &str, tensor: Tensor) -> Result<u64, WorkerError> {
        if name.is_empty() || name.len() > protocol::limits::NAME_BYTES_MAX {
            let remedy = format!("a published name has 1 to {} bytes", protocol::limits::NAME_BYTES_MAX);
            return Err(WorkerError::Config { field: "published name", value: name.to_owned(), remedy });
        }
        Ok(self.node.values.published.publish(name, tensor.remember_checksums()))
    }

    /// Withdraws a published tensor; false if there was none.
    pub fn withdraw(&self, name: &str) -> bool {
        self.node.values.published.withdraw(name)
    }

    /// The peer called `name`: of the cluster, or one that has connected. Does not connect.
    ///
    /// # Errors
    /// [`WorkerError::UnknownWorker`].
    pub fn peer(&self, name: &str) -> Result<Peer, WorkerError> {
        self.node.peer_by_name(name)
    }

    /// The peer that listens on `address` (`host:port`). Asks it for its name unless that is known already.
    ///
    /// # Errors
    /// [`WorkerError::Control`] when it cannot be reached or does not share the secret, [`WorkerError::Limit`]
    /// when this process may open no more files.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn peer_at(&self, address: &str) -> Result<Peer, WorkerError> {
        if let Some(peer) = self.node.peer_by_address(address) {
            return Ok(peer);
        }
        Ok(self.node.dial(address).await.map_err(WorkerError::or_limit)?.1)
    }

    /// What `peer` has published, sorted by name.
    ///
    /// # Errors
    /// [`WorkerError::Control`], [`WorkerError::PeerLost`], [`WorkerError::DeadlineExceeded`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn list(&self, peer: &Peer) -> Result<Vec<Published>, WorkerError> {
        self.list_pages(peer, false).await
    }

    /// As [`list`](Self::list), with the XXH3-64 of each tensor's bytes, which the peer computes now.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn list_with_checksums(&self, peer: &Peer) -> Result<Vec<Published>, WorkerError> {
        self.list_pages(peer, true).await
    }

    /// The tensor that `peer` has published under `name`.
    ///
    /// # Errors
    /// [`WorkerError::Remote`] with NOT_FOUND when there is none; [`WorkerError::PeerLost`],
    /// [`WorkerError::NoFabric`], [`WorkerError::DeadlineExceeded`] after the worker's default timeout.
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost by dropping the future, because the tensor stays published.
    pub async fn fetch(&self, peer: &Peer, name: &str) -> Result<Tensor, WorkerError> {
        self.fetch_timeout(peer, name, self.node.limit).await
    }

    /// As [`fetch`](Self::fetch), within `limit`.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch).
    pub async fn fetch_timeout(
        &self,
        peer: &Peer,
        name: &str,
        limit: Duration,
    ) -> Result<Tensor, WorkerError> {
        self.fetch_within(peer, name, self.node.sharing.into(), limit).await
    }

    /// As [`fetch`](Self::fetch), with this [`Sharing`] instead of the worker's
    /// ([`WorkerBuilder::sharing`]).
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch).
    pub async fn fetch_as(&self, peer: &Peer, name: &str, sharing: Sharing) -> Result<Tensor, WorkerError> {
        self.fetch_within(peer, name, sharing.into(), self.node.limit).await
    }

    async fn fetch_within(
        &self,
        peer: &Peer,
        name: &str,
        manner: Manner,
        limit: Duration,
    ) -> Result<Tensor, WorkerError> {
        if name.len() > protocol::limits::NAME_BYTES_MAX {
            let remedy = format!("a published name has at most {} bytes", protocol::limits::NAME_BYTES_MAX);
            return Err(WorkerError::Config { field: "published name", value: name.to_owned(), remedy });
        }
        let transfer = TransferName { peer: peer.name().to_owned(), key: name.to_owned(), step: None };
        let fetched =
            async { peer.connected(&self.node).await?.receive(Scope::Published, &transfer, manner).await };
        self.within(limit, || format!("fetching {transfer}"), pin!(fetched)).await
    }

    /// The tensors that `peer` has published under `names`, in their order. All are asked for at once, in as few
    /// messages as they fit ([`WorkerBuilder::requests_per_message`]).
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), for the first name whose fetch fails; the error names it.
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch).
    pub async fn fetch_many<S: AsRef<str>>(
        &self,
        peer: &Peer,
        names: &[S],
    ) -> Result<Vec<Tensor>, WorkerError> {
        let (began, limit) = (self.node.runtime.now(), self.node.limit);
        // First, so that the requests find each other.
        let what = || format!("connecting to {}", peer.name());
        self.within(limit, what, pin!(peer.connected(&self.node))).await?;
        let left = limit.saturating_sub(self.node.runtime.now() - began);
        let manner = Manner { sharing: self.node.sharing, together: true };
        try_join_all(names.iter().map(|name| self.fetch_within(peer, name.as_ref(), manner, left))).await
    }

    /// The key of `edge` from `source_device` to `destination_device`
    /// (`/job:ps/replica:0/task:0/device:CPU:0`). Of a device of this worker it names this incarnation; of a
    /// peer's, the incarnation is filled in when the key is used, so the key stays valid over restarts.
    ///
    /// # Errors
    /// [`WorkerError::BadKey`].
    pub fn key(&self, source_device: &str, destination_device: &str, edge: &str) -> Result<Key, WorkerError> {
        let own = self.is_own(&parse_device(source_device)?)?;
        let incarnation = if own { self.node.incarnation } else { 0 };
        let key = Key::builder().source(source_device).incarnation(incarnation);
        let key = key.destination(destination_device).edge(edge).build();
        key.map_err(|error| WorkerError::BadKey {
            key: format!("{source_device};{destination_device};{edge}"),
            problem: error.to_string(),
        })
    }

    /// The step with this number, made on first use here or by a peer's request.
    pub fn step(&self, id: i64) -> Step {
        Step { worker: self.clone(), id: StepId(id) }
    }

    /// Ends a step: its pending receives get ABORTED, its unreceived values are dropped, and a late request for
    /// it is answered with ABORTED.
    pub fn cleanup(&self, step: i64) {
        self.node.values.steps.cleanup(StepId(step));
        self.node.values.lost.forget(StepId(step));
        self.discard(StepId(step));
    }

    /// What was received for a step and not handed out goes back.
    fn discard(&self, step: StepId) {
        for connection in self.node.all_peers().iter().filter_map(Peer::connection) {
            connection.protocol.discard(step);
        }
    }

    /// All known peers, sorted by name, with the fabric each uses.
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.node.all_peers().iter().map(info).collect()
    }

    /// Ends everything in order: peers are told, transfers end, connections close, the address is free again.
    ///
    /// # Cancel safety
    /// Cancel-safe: the shutdown goes on; calling again waits for the same end.
    pub async fn shutdown(&self) {
        self.node.closing.send_replace(true);
        self.node.values.steps.abort_all(&Status::new(Code::Aborted, "Shutdown"));
        // Each session says goodbye and closes its connections; one whose peer does not listen is not waited for.
        let _ = timeout(&*self.node.runtime, SHUTDOWN, self.node.sessions_over()).await;
        for peer in self.node.all_peers() {
            if let Some(connection) = peer.connection() {
                connection.close(&Lost::shut_down_here()).await;
            }
        }
        self.node.control.close().await;
    }

    fn is_own(&self, device: &DeviceName) -> Result<bool, WorkerError> {
        let me = worker_device(&self.node.name);
        let me = me
            .map_err(|status| WorkerError::BadKey { key: self.node.name.clone(), problem: status.message })?;
        Ok(device.is_same_address_space(&me))
    }

    async fn list_pages(&self, peer: &Peer, with_checksums: bool) -> Result<Vec<Published>, WorkerError> {
        let session = self.node.session(peer).await?;
        let lost = |_| {
            let Lost { loss, detail } = session.lost();
            let transfer = TransferName { peer: peer.name().to_owned(), key: "list".to_owned(), step: None };
            WorkerError::PeerLost { transfer: Box::new(transfer), transport: "control plane", loss, detail }
        };
        let pages = async {
            let mut all: Vec<Published> = Vec::new();
            loop {
                let (request, page) = session.ask_list().map_err(lost)?;
                let after = all.last().map(|entry| entry.name.clone());
                let ask =
                    protocol::wire::control::ControlFrame::ListRequest { request, after, with_checksums };
                session.send(ask).await?;
                let page = page.await.map_err(|_| lost(String::new()))?;
                let more = page.more && !page.entries.is_empty();
                all.extend(page.entries.into_iter().map(|entry| Published {
                    name: entry.name,
                    metadata: entry.metadata,
                    version: entry.version,
                    checksum: entry.checksum,
                }));
                if !more {
                    return Ok(all);
                }
            }
        };
        let what = || format!("listing what {} has published", peer.name());
        self.within(self.node.limit, what, pin!(pages)).await
    }

    /// Takes the operation pinned: a future that is handed on by value is kept at every stage.
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        what: impl Fn() -> String,
        operation: Pin<&mut (impl Future<Output = Result<T, WorkerError>> + ?Sized)>,
    ) -> Result<T, WorkerError> {
        if self.node.is_closing() {
            return Err(WorkerError::ShutDown);
        }
        let ended = timeout(&*self.node.runtime, limit, operation).await;
        ended.unwrap_or_else(|_| Err(WorkerError::DeadlineExceeded { what: what(), limit }))
    }
}

fn info(peer: &Peer) -> PeerInfo {
    let connection = peer.connection();
    let live = connection.as_ref().filter(|connection| !connection.is_over());
    PeerInfo {
        name: peer.name().to_owned(),
        address: peer.address(),
        transport: live.map(|connection| connection.kind),
        incarnation: peer.live_session().map(|session| session.peer.incarnation),
        fabric: connection.as_ref().map(|connection| connection.queue_pair.stats()).unwrap_or_default(),
        counters: connection.as_ref().map(|connection| connection.protocol.counters()).unwrap_or_default(),
    }
}

fn parse_device(text: &str) -> Result<DeviceName, WorkerError> {
    let parsed = text.parse::<DeviceName>();
    parsed.map_err(|error| WorkerError::BadKey { key: text.to_owned(), problem: error.to_string() })
}

/// One step of this worker: sends and receives of different steps never mix.
#[derive(Debug, Clone)]
pub struct Step {
    pub(crate) worker: Worker,
    pub(crate) id: StepId,
}

impl Step {
    /// Its number.
    pub fn id(&self) -> i64 {
        self.id.0
    }

    /// Makes `tensor` available under `key`, whose source must be a device of this worker. Never waits: the
    /// value stays here until its receiver asks.
    ///
    /// # Errors
    /// [`WorkerError::BadKey`] when the source is elsewhere, [`WorkerError::TableFull`],
    /// [`WorkerError::Aborted`].
    pub fn send(&self, key: &Key, tensor: Tensor) -> Result<(), WorkerError> {
        if !self.worker.is_own(key.source_device())? {
            let problem = format!(
                "its source is not a device of {}; send on the worker that has it",
                self.worker.name()
            );
            return Err(WorkerError::BadKey { key: key.to_string(), problem });
        }
        let values = &self.worker.node.values;
        let receiver = if values.lost.is_empty() { None } else { key.destination_device().worker() };
        if let Some(status) = receiver.and_then(|receiver| values.lost.status(self.id, &receiver)) {
            return Err(self.aborted(status));
        }
        let steps = &values.steps;
        let step = steps.step(self.id).map_err(|status| self.aborted(status))?;
        steps.send(&step, &key.table_key(), tensor.remember_checksums()).map_err(|refused| match refused {
            SendRefused::Full { waiting } => WorkerError::TableFull { waiting },
            SendRefused::Aborted(status) => self.aborted(status),
        })
    }

    /// The next value under `key`, from the worker of its source device; from this worker's own table, without
    /// a copy, when that is itself.
    ///
    /// # Errors
    /// [`WorkerError::Remote`] with the sender's status, [`WorkerError::PeerLost`], [`WorkerError::Aborted`],
    /// [`WorkerError::DeadlineExceeded`] after the worker's default timeout.
    ///
    /// # Cancel safety
    /// Cancel-safe: in a loop around `select!`, nothing is lost, doubled or out of order. Dropping the future gives
    /// the receive up: the sender is told, and a value that it has not written yet stays there in its place. One
    /// that is being written is kept here, in the receive's own memory, for the next receive of the key; that waits
    /// until it is known which of the two it is. Of several receives of a key that are outstanding at once when one
    /// of them is dropped, any may get the value. Kept values end with the step.
    ///
    /// If the connection breaks while values of the step are under way, the step is over with this peer at both
    /// ends, for good: later receives fail with [`WorkerError::PeerLost`] too.
    pub async fn recv(&self, key: &Key) -> Result<Tensor, WorkerError> {
        self.recv_timeout(key, self.worker.node.limit).await
    }

    /// As [`recv`](Self::recv), within `limit`.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv).
    pub async fn recv_timeout(&self, key: &Key, limit: Duration) -> Result<Tensor, WorkerError> {
        self.receive_within(key, self.worker.node.sharing.into(), limit).await
    }

    /// As [`recv`](Self::recv), with this [`Sharing`] instead of the worker's ([`WorkerBuilder::sharing`]).
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv). A value that is kept for the next receive of its key is what that one gets, view or copy.
    pub async fn recv_as(&self, key: &Key, sharing: Sharing) -> Result<Tensor, WorkerError> {
        self.receive_within(key, sharing.into(), self.worker.node.limit).await
    }

    async fn receive_within(
        &self,
        key: &Key,
        manner: Manner,
        limit: Duration,
    ) -> Result<Tensor, WorkerError> {
        let what = || format!("receiving `{key}` of step {}", self.id.0);
        let received = pin!(async { self.receive_held(key, Receiving::As(manner)).await?.into_tensor() });
        self.worker.within(limit, what, received).await
    }

    /// The next value under each of `keys`, in their order. All are asked for at once, each worker in as few messages as
    /// its keys fit ([`WorkerBuilder::requests_per_message`]); they may come from different workers, and a key may occur
    /// more than once.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for the first key whose receive fails; the error names it. Values of other keys that
    /// have come are kept for the next receives of these.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv): a value that has come for one of the keys is not lost when the future is dropped.
    pub async fn recv_many(&self, keys: &[Key]) -> Result<Vec<Tensor>, WorkerError> {
        let what = || format!("receiving {} keys of step {}", keys.len(), self.id.0);
        let held = pin!(async {
            // First, so that the requests find each other.
            for source in keys.iter().filter_map(|key| key.source_device().worker()) {
                if source != self.worker.name() {
                    self.worker.peer(&source)?.connected(&self.worker.node).await?;
                }
            }
            let manner = Manner { sharing: self.worker.node.sharing, together: true };
            try_join_all(keys.iter().map(|key| self.receive_held(key, Receiving::As(manner)))).await
        });
        let held = self.worker.within(self.worker.node.limit, what, held).await?;
        held.into_iter().map(HeldTensor::into_tensor).collect()
    }

    /// Ends the step here with `status`: pending and later receives and sends fail with it. Receives of this step
    /// that peers have posted here get it as the sender's answer; those posted from here are given up, and their
    /// senders told.
    pub fn abort(&self, status: &Status) {
        if let Ok(step) = self.worker.node.values.steps.step(self.id) {
            step.abort(status);
        }
        self.worker.discard(self.id);
    }

    pub(crate) async fn receive_held(
        &self,
        key: &Key,
        how: Receiving<'_>,
    ) -> Result<HeldTensor, WorkerError> {
        if self.worker.is_own(key.source_device())? {
            let step = self.worker.node.values.steps.step(self.id).map_err(|status| self.aborted(status))?;
            let taken = step.take(&key.table_key()).await.map_err(|status| self.aborted(status))?;
            return Ok(HeldTensor::Own(Some(taken)));
        }
        let here = self.worker.node.values.steps.watch(self.id).map_err(|status| self.aborted(status))?;
        let received = here.or_aborted(pin!(self.receive_from_peer(key, how))).await;
        received.map_err(|status| self.aborted(status))?.map(HeldTensor::Peers)
    }

    async fn receive_from_peer(
        &self,
        key: &Key,
        how: Receiving<'_>,
    ) -> Result<Held<FabricChannel>, WorkerError> {
        let source = key.source_device().worker().ok_or_else(|| WorkerError::BadKey {
            key: key.to_string(),
            problem: "its source names no worker: give job, replica and task".to_owned(),
        })?;
        let peer = self.worker.peer(&source)?;
        let connection = peer.connected(&self.worker.node).await?;
        let incarnation = match key.incarnation() {
            0 => peer.live_session().map_or(0, |session| session.peer.incarnation),
            named => named,
        };
        let key = key.with_incarnation(incarnation).to_string();
        let transfer = TransferName { peer: peer.name().to_owned(), key, step: Some(self.id.0) };
        if let Some(detail) = self.worker.node.values.lost.why(self.id, peer.name()) {
            let (loss, transport) = (PeerLoss::StepBroken, connection.kind.name());
            return Err(WorkerError::PeerLost { transfer: Box::new(transfer), transport, loss, detail });
        }
        let scope = Scope::Step(self.id);
        match how {
            Receiving::As(manner) => connection.receive_held(scope, &transfer, manner).await,
            Receiving::Into(target) => connection.receive_into(scope, &transfer, target).await,
        }
    }

    fn aborted(&self, status: Status) -> WorkerError {
        WorkerError::Aborted { step: self.id.0, status }
    }
}

/// How a value is received.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Receiving<'target> {
    /// As a tensor.
    As(Manner),
    /// Into the user's buffer.
    Into(&'target Target),
}

/// A value that is not handed out yet. Dropping it gives it to the next receive of its key.
pub(crate) enum HeldTensor {
    /// Of this worker's own table.
    Own(Option<TakenValue>),
    /// Of a peer.
    Peers(Held<FabricChannel>),
}

impl HeldTensor {
    fn into_tensor(mut self) -> Result<Tensor, WorkerError> {
        let gone = || WorkerError::InvalidTensor { problem: "the value was handed out before".to_owned() };
        match &mut self {
            Self::Own(taken) => taken.take().map(|taken| taken.tensor).ok_or_else(gone),
            Self::Peers(held) => DataConnection::tensor(held.take().ok_or_else(gone)?),
        }
    }
}

impl Drop for HeldTensor {
    fn drop(&mut self) {
        if let Self::Own(taken) = self
            && let Some(taken) = taken.take()
        {
            taken.put_back();
        }
    }
}

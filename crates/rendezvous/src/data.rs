//! One data connection: a queue pair with the protocol on it, and the tasks that drive it.

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use futures::future::{Either, select};
use memory::Buf;
use protocol::{
    Checksums, Code, Connection, Held, Manner, Metadata, Received, Scope, Sharing, Status, TransferError,
    wire::control::Parameters,
};
use tokio::sync::{Notify, watch};
use tracing::Instrument as _;
use verbs_reactor::{Arrival, FabricError, FabricKind, LossCause, QueuePair, Runtime, timeout};

use crate::{
    Tensor, WorkerError,
    announce::Announcer,
    control::handshake::Introduction,
    destinations::ReceiveAllocator,
    error::{Lost, TransferName},
    fabric_channel::FabricChannel,
    held_posts::HeldPosts,
    lent::Lent,
    meter::{Meter, receive_span, send_span},
    published::Version,
    receive_into::{Target, TargetAllocator},
    ring::OwnRing,
    step::handed_out,
    values::{PeerValues, SharedValues},
};

/// How long the reason of a peer that closed its end may take. A peer that gives none, because it has no memory for a
/// message, holds up what is under way for as long; the next transfer connects again at once.
pub(crate) const REASON: Duration = Duration::from_millis(500);

/// A connection that tensors move over.
#[derive(Debug)]
pub(crate) struct DataConnection {
    pub(crate) kind: FabricKind,
    /// The life of the peer that it leads to.
    pub(crate) peer_incarnation: u64,
    pub(crate) queue_pair: QueuePair,
    pub(crate) protocol: Arc<Connection<FabricChannel>>,
    pub(crate) announcer: Arc<Announcer>,
    allocator: ReceiveAllocator,
    ring: Arc<OwnRing>,
    held: Arc<HeldPosts>,
    values: Arc<PeerValues>,
    pub(crate) meter: Arc<Meter>,
    /// The first reason, once it is over.
    lost: OnceLock<Lost>,
    /// Told when that is known.
    told: Notify,
    /// What it may have lost is noted.
    over: watch::Sender<bool>,
    /// Locked while that is noted; true once it is.
    ended: Mutex<bool>,
}

impl DataConnection {
    pub(crate) fn new(
        channel: FabricChannel,
        (own, peers): (Parameters, Parameters),
        allocator: ReceiveAllocator,
        peer: &Introduction,
        values: &SharedValues,
        meter: Arc<Meter>,
    ) -> Arc<Self> {
        let queue_pair = channel.queue_pair.clone();
        let (ring, held) = (channel.own_ring.clone(), channel.held.clone());
        Arc::new(Self {
            kind: queue_pair.kind(),
            peer_incarnation: peer.incarnation,
            queue_pair,
            protocol: Connection::new(channel, own, peers),
            announcer: allocator.announcer.clone(),
            allocator,
            ring,
            held,
            values: Arc::new(PeerValues::new(values, &peer.worker, meter.clone())),
            meter,
            lost: OnceLock::new(),
            told: Notify::new(),
            over: watch::Sender::new(false),
            ended: Mutex::new(false),
        })
    }

    /// Whether it can carry no more transfers.
    pub(crate) fn is_over(&self) -> bool {
        self.lost.get().is_some() || self.queue_pair.failure().is_some()
    }

    /// Starts the tasks: arrivals, and the messages owed to the peer.
    pub(crate) fn start(self: &Arc<Self>, runtime: &Arc<dyn Runtime>) {
        let (connection, spawner) = (self.clone(), runtime.clone());
        runtime.spawn("arrivals", Box::pin(async move { connection.run(&spawner).await }));
        let held = self.held.clone().post_when_possible(self.queue_pair.clone());
        runtime.spawn("held posts", Box::pin(held));
        runtime.spawn("owed messages", Box::pin(self.clone().send_owed()));
    }

    /// Sends what is owed until the protocol has failed, be it by itself (no memory for a message): then the queue
    /// pair is closed, so that the next transfer gets a new connection.
    async fn send_owed(self: Arc<Self>) {
        self.protocol.clone().housekeeping().await;
        self.queue_pair.close().await;
    }

    /// Takes arrivals until the connection is over, then gives everything back.
    async fn run(self: Arc<Self>, runtime: &Arc<dyn Runtime>) {
        let why = self.take_arrivals(runtime).await;
        tracing::debug!(peer = %self.values.peer, transport = %self.kind, why = why.detail, "data connection over");
        self.fail(&why);
        if !self.is_ended_by_peer() {
            self.announcer.tell_end(&why.detail).await;
        }
        self.queue_pair.close().await;
        self.held.wake();
        self.protocol.drain().into_iter().for_each(Lent::end_drained);
        self.ring.end();
        self.allocator.enclosure.end();
    }

    /// Whether the peer knows of the end, because the fabric has said so.
    fn is_ended_by_peer(&self) -> bool {
        self.queue_pair.failure().as_ref().is_some_and(is_close)
    }

    async fn take_arrivals(&self, runtime: &Arc<dyn Runtime>) -> Lost {
        loop {
            let taken = match self.queue_pair.next_arrival().await {
                Ok(Arrival::Immediate { immediate, length }) => {
                    self.protocol.on_immediate(immediate.0, length)
                }
                Ok(Arrival::Loan { immediate, buffer }) => {
                    let length = buffer.len() as u64;
                    self.protocol.on_loan(immediate.0, length, Lent::view(buffer)).map(|()| None)
                }
                Ok(other) => {
                    return Lost::misbehaved(format!(
                        "an arrival of a kind this version does not know: {other:?}"
                    ));
                }
                Err(error) if is_peers_doing(&error) => return self.why_closed(error.into(), runtime).await,
                Err(error) => return error.into(),
            };
            match taken {
                Ok(None) => {}
                Ok(Some(requests)) => {
                    for request in requests {
                        let step = match request.scope {
                            Scope::Step(step) => Some(step.0),
                            _ => None,
                        };
                        let span = send_span(&self.values.peer, &request.key, step, self.kind);
                        let response = self.protocol.respond(request, &self.values);
                        runtime.spawn("respond", Box::pin(response.instrument(span)));
                    }
                }
                Err(misbehaved) => {
                    if let Some(left_out) = self.meter.log.line(&self.values.peer) {
                        let peer = &self.values.peer;
                        tracing::warn!(%peer, %misbehaved, left_out, "closing the connection of a misbehaving peer");
                    }
                    return Lost::misbehaved(format!("the peer broke the protocol: {misbehaved}"));
                }
            }
        }
    }

    /// The peer closed its end, or gave it up. It says why over the control connection, which may be the slower of the two; if
    /// nothing comes, what was `seen` is the reason.
    async fn why_closed(&self, seen: Lost, runtime: &Arc<dyn Runtime>) -> Lost {
        let _ = timeout(&**runtime, REASON, self.told.notified()).await;
        self.lost.get().cloned().unwrap_or(seen)
    }

    /// The peer has said why it will close this connection. Nothing new goes over it.
    pub(crate) fn expect_end(&self, why: &Lost) {
        self.end_for(why);
    }

    /// Notes `why` unless another reason came before. The one that counts.
    fn end_for(&self, why: &Lost) -> &Lost {
        let why = self.lost.get_or_init(|| why.clone());
        self.told.notify_one();
        why
    }

    /// Waits until its end is known.
    pub(crate) async fn until_end(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.over.subscribe().wait_for(|is_over| *is_over).await;
    }

    /// Whether its end is known here, and what it may have lost is noted.
    pub(crate) fn has_ended(&self) -> bool {
        *self.over.borrow()
    }

    /// Ends every transfer of this connection. The queue pair is closed by the arrivals task, which notices.
    ///
    /// Steps whose values may be lost are over with this peer before another connection can carry them on.
    pub(crate) fn fail(&self, why: &Lost) {
        let why = self.end_for(why);
        // A thread that a hostile peer holds may hold the protocol's lock.
        self.queue_pair.free_threads();
        self.protocol.fail(&why.detail);
        self.announcer.fail(&why.detail);
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if !*ended {
            *ended = true;
            self.meter.lost(why.loss);
            let steps = self.protocol.steps_under_way();
            self.values.values.lose(&self.values.peer, &steps, &why.detail);
            self.over.send_replace(true);
        }
    }

    /// Begins the end of a connection that is not needed any more: the arrivals task sees the queue pair close
    /// and gives everything back.
    pub(crate) async fn close(&self, why: &Lost) {
        self.fail(why);
        self.queue_pair.close().await;
    }

    /// Receives one value; with its version, if `scope` asks for that.
    pub(crate) async fn receive(
        &self,
        scope: Scope,
        name: &TransferName,
        manner: Manner,
    ) -> Result<(Tensor, Option<Version>), WorkerError> {
        let received = self.received(scope, name, manner).await?;
        let version = self.version(&received);
        Ok((Self::tensor(received)?, version))
    }

    /// The version that a value came with.
    pub(crate) fn version(&self, received: &Received<Lent>) -> Option<Version> {
        received.version.map(|number| Version { incarnation: self.peer_incarnation, number })
    }

    /// Views are asked for only where the fabric can lend, and of peers that are trusted not to change them.
    async fn received(
        &self,
        scope: Scope,
        name: &TransferName,
        manner: Manner,
    ) -> Result<Received<Lent>, WorkerError> {
        let may_view = self.queue_pair.capabilities().lend && !self.allocator.enclosure.is_bouncing();
        let sharing = if may_view { manner.sharing } else { Sharing::Copy };
        let manner = Manner { sharing, ..manner };
        let span = receive_span(name, self.kind);
        let receive = self.protocol.receive_with(scope, &name.key, &self.allocator, manner);
        let received = receive.instrument(span.clone()).await;
        let received = received.map_err(|error| self.transfer_error(name, error));
        self.meter.ended(&span, received.as_ref().map(|received| received.metadata.byte_length));
        received
    }

    /// Receives one of several values that are wanted together: it is not lost if the others do not come.
    pub(crate) async fn receive_held(
        &self,
        scope: Scope,
        name: &TransferName,
        manner: Manner,
    ) -> Result<Held<FabricChannel>, WorkerError> {
        let received = self.received(scope, name, manner).await?;
        Ok(self.protocol.hold(received))
    }

    /// Receives one value into `target` if that is possible; [`Target::fill`] does the rest.
    pub(crate) async fn receive_into(
        &self,
        scope: Scope,
        name: &TransferName,
        target: &Target,
    ) -> Result<Held<FabricChannel>, WorkerError> {
        let is_validated = self.protocol.agreed().validation.is_on();
        let allocator = TargetAllocator { receive: &self.allocator, target, is_validated };
        let span = receive_span(name, self.kind);
        let receive = self.protocol.receive_with(scope, &name.key, &allocator, Manner::default());
        let received = receive.instrument(span.clone()).await.map_err(|error| {
            let mismatch = match &error {
                TransferError::Local(status) if status.code == Code::InvalidArgument => target.mismatch(name),
                _ => None,
            };
            mismatch.unwrap_or_else(|| self.transfer_error(name, error))
        });
        self.meter.ended(&span, received.as_ref().map(|received| received.metadata.byte_length));
        received.map(|received| self.protocol.hold(received))
    }

    /// The value as a tensor that shares its bytes with what is held.
    pub(crate) fn shared_tensor(held: &mut Held<FabricChannel>) -> Result<Tensor, WorkerError> {
        let received = held.get_mut().ok_or_else(handed_out)?;
        let bytes = received.lent.take().map(Lent::received).transpose()?;
        received.lent = bytes.clone().map(Lent::view);
        Ok(received_tensor(received.metadata.clone(), bytes, received.checksums.clone()))
    }

    pub(crate) fn tensor(received: Received<Lent>) -> Result<Tensor, WorkerError> {
        let Received { metadata, lent, checksums, .. } = received;
        Ok(received_tensor(metadata, lent.map(Lent::received).transpose()?, checksums))
    }

    fn lost_error(&self, transfer: Box<TransferName>, seen: String) -> WorkerError {
        let Lost { loss, detail } = self.lost.get().cloned().unwrap_or_else(|| Lost::gone(seen));
        WorkerError::PeerLost { transfer, transport: self.kind.name(), loss, detail }
    }

    fn transfer_error(&self, name: &TransferName, error: TransferError) -> WorkerError {
        let transfer = Box::new(name.clone());
        match error {
            TransferError::Remote(status) => WorkerError::Remote { transfer, status },
            TransferError::Local(status) if status.code == Code::ResourceExhausted => {
                WorkerError::Local { transfer, status }
            }
            TransferError::KeyTooLong { .. } | TransferError::StashFull { .. } => {
                let status = Status::new(Code::ResourceExhausted, error.to_string());
                WorkerError::Local { transfer, status }
            }
            TransferError::Corrupted { validation, sent, received, damage } => {
                let transport = self.kind.name();
                WorkerError::Corrupted { transfer, transport, validation, sent, received, damage }
            }
            other => self.lost_error(transfer, other.to_string()),
        }
    }
}

fn received_tensor(metadata: Metadata, bytes: Option<Buf>, checksums: Option<Arc<Checksums>>) -> Tensor {
    // Memory lent for several known shapes is as large as the largest.
    let length = usize::try_from(metadata.byte_length).unwrap_or(usize::MAX);
    let bytes = bytes.filter(|_| length > 0).and_then(|bytes| bytes.slice(0..length));
    Tensor::received(metadata, bytes.unwrap_or_else(Buf::empty), checksums)
}

/// Whether the peer ended the connection, in order or because it can't go on: it says why.
fn is_peers_doing(error: &FabricError) -> bool {
    is_close(error) || matches!(error, FabricError::PeerLost { cause: LossCause::Reset, .. })
}

/// Whether the peer ended the connection in order.
fn is_close(error: &FabricError) -> bool {
    matches!(error, FabricError::PeerLost { cause: LossCause::ClosedByPeer, .. })
}

/// Waits for `future` unless `stop` turns true first, or its sender is gone.
pub(crate) async fn unless<T>(
    mut stop: tokio::sync::watch::Receiver<bool>,
    future: impl Future<Output = T>,
) -> Option<T> {
    let stopped = std::pin::pin!(stop.wait_for(|stop| *stop));
    match select(std::pin::pin!(future), stopped).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

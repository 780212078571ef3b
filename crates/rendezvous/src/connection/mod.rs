//! One data connection: a queue pair with the protocol on it, the task that drives it, and the answers to the peer's requests.

mod answers;
mod call_turns;
mod calls;
pub(crate) mod catalogue;
pub(crate) mod driver;
pub(crate) mod entries;
pub(crate) mod fabric_channel;
mod gathering;
pub(crate) mod mailbox;
pub(crate) mod meter;
mod paging;
pub(crate) mod peer_values;
pub(crate) mod pieces;
mod refusals;
mod sent_pages;
mod slices;
mod subscribed_values;
pub(crate) mod subscribing;
pub(crate) mod tally;
#[cfg(test)]
mod tests;

use std::{
    future::Future,
    sync::{Arc, OnceLock, PoisonError},
    time::Duration,
};

use tensorwire_fabric::{
    BoxFuture, FabricError, FabricKind, LossCause, PeerCatalogue, QueuePair, Runtime, SharedMemory, timeout,
};
use tensorwire_memory::{Buf, BufMut};
use tensorwire_protocol::{
    Agreed, Allocator, Checksums, Code, Connection, Metadata, ReceiveOptions, Received, ReceivedGuard, Rings,
    Scope, Sharing, Status, TransferError, limits::PAGE_WRITES_MAX, wire::control::Parameters,
};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::{Notify, Semaphore, watch};
use tracing::Instrument as _;

use crate::{
    connection::{
        answers::PeerAnswers,
        call_turns::CallTurns,
        driver::{Arrivals, Driver, Work},
        entries::Entries,
        fabric_channel::FabricChannel,
        gathering::Gathering,
        meter::{Meter, receive_span},
        peer_values::PeerValues,
        refusals::Refusals,
    },
    control::handshake::Introduction,
    error::{Lost, PeerLoss, Transfer, TransferName, WorkerError},
    peer_memory::{
        announcer::Announcer,
        destinations::{Expected, ExpectingAllocator, ReceiveAllocator},
        lent::Lent,
        target::{Target, TargetAllocator},
    },
    values::{SharedValues, arenas::Outgoing, published::Version, tensor::Tensor},
};

/// How long to wait for the reason of a peer that closed the connection. A peer without memory for a message sends
/// none; then transfers under way fail only after this time. The next transfer reconnects at once.
pub(crate) const REASON: Duration = Duration::from_millis(500);

/// Errors of passed deadlines name a stall of this length. A shorter one may be a slow path.
const STALL_MIN: Duration = Duration::from_millis(500);

/// A connection for tensors: a queue pair with the protocol, its memory and its counters.
///
/// It ends in three stages. It is **over** once there is a reason why it ends: it accepts no more transfers, and those in progress
/// go on. It has **ended** once they have failed and the steps whose values may be lost are stored. It is **closed** once its queue
/// pair is, which releases all memory.
#[derive(Debug)]
pub(crate) struct DataConnection {
    pub(crate) kind: FabricKind,
    /// The peer's incarnation.
    pub(crate) peer_incarnation: u64,
    /// The peer's address, for error messages.
    peer_at: String,
    pub(crate) queue_pair: QueuePair,
    /// The peer's catalogue, if the fabric has them.
    catalogue: Option<Arc<dyn PeerCatalogue>>,
    pub(crate) protocol: Arc<Connection<FabricChannel>>,
    pub(crate) announcer: Arc<Announcer>,
    allocator: ReceiveAllocator,
    /// What the connection's task polls.
    pub(crate) entries: Arc<Entries<Work>>,
    /// The peer has broken the protocol: the task ends the connection for this, and arrivals are ignored.
    pub(crate) broken: OnceLock<Lost>,
    pub(crate) values: Arc<PeerValues>,
    pub(crate) meter: Arc<Meter>,
    /// The first reason why it ends. It is over when this is set.
    lost: OnceLock<Lost>,
    /// Notified when `lost` is set.
    reason_known: Notify,
    /// Whether the peer has retired it: the peer uses another connection, and answers requests.
    retired_by_peer: watch::Sender<bool>,
    /// Whether it has ended. Locked while the steps are stored whose values may be lost.
    ended: watch::Sender<bool>,
    stall: Mutex<Stall>,
    /// A turn for each write of pages that may be under way.
    page_writes: Semaphore,
    /// Pages of writes that are under way, although the connection is over. `None` once it is closed.
    kept: Mutex<Option<Vec<Outgoing>>>,
}

/// How long the peer's host has acknowledged nothing, although something waits for it.
#[derive(Debug, Default)]
struct Stall {
    /// What it had acknowledged at the last look, if something waited then.
    acknowledged: Option<u64>,
    time: Duration,
}

impl DataConnection {
    pub(crate) fn new(
        channel: FabricChannel,
        rings: Rings<Lent>,
        (own, peers): (Parameters, Parameters),
        allocator: ReceiveAllocator,
        (peer, peer_at): (&Introduction, String),
        (values, runtime): (&SharedValues, &Arc<dyn Runtime>),
        meter: Arc<Meter>,
    ) -> Arc<Self> {
        let queue_pair = channel.queue_pair.clone();
        let entries = Entries::new();
        let answers = PeerAnswers { queue_pair: queue_pair.clone(), entries: entries.clone() };
        let ways = (Arc::new(answers) as _, queue_pair.catalogue());
        let gathering = Gathering::new(channel.import.pool.clone());
        let requests_max = Agreed::of(&own, &peers).requests_max;
        let refusals = Refusals::new(runtime.clone(), requests_max);
        let call_turns = CallTurns::new(requests_max, values.calls.room(&peer.worker));
        let turns = (refusals, gathering, call_turns);
        Arc::new_cyclic(|connection| Self {
            kind: queue_pair.kind(),
            peer_incarnation: peer.incarnation,
            peer_at,
            catalogue: queue_pair.shared_memory().and_then(SharedMemory::peer_catalogue),
            queue_pair,
            protocol: Connection::new(channel, rings, own, peers),
            announcer: allocator.announcer.clone(),
            allocator,
            entries,
            broken: OnceLock::new(),
            values: Arc::new(PeerValues::new(
                values,
                &peer.worker,
                meter.clone(),
                ways,
                turns,
                connection.clone(),
            )),
            meter,
            lost: OnceLock::new(),
            reason_known: Notify::new(),
            retired_by_peer: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            stall: Mutex::default(),
            page_writes: Semaphore::new(PAGE_WRITES_MAX),
            kept: Mutex::new(Some(Vec::new())),
        })
    }

    /// Whether it accepts no more transfers.
    pub(crate) fn is_over(&self) -> bool {
        self.lost.get().is_some() || self.queue_pair.has_failed()
    }

    /// Whether new transfers may use it: it is neither over, nor retired by this side.
    pub(crate) fn is_usable(&self) -> bool {
        !self.is_over() && !self.protocol.is_retired()
    }

    /// Its number in the session.
    pub(crate) fn number(&self) -> u32 {
        self.announcer.connection()
    }

    /// The peer has retired the connection.
    pub(crate) fn note_retired(&self) {
        self.protocol.peer_retired();
        self.retired_by_peer.send_replace(true);
    }

    /// Waits until the peer has retired the connection.
    pub(crate) async fn retired_by_peer(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.retired_by_peer.subscribe().wait_for(|is_retired| *is_retired).await;
    }

    /// Whether it is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.queue_pair.capabilities().encrypted
    }

    /// Counts the connection in the metrics; `is_again` if it is not the first with its peer.
    pub(crate) fn count_connect(&self, is_again: bool) {
        self.meter.connected(is_again, self.is_encrypted());
    }

    /// Starts the connection's task, which drives its queue pair with `fabric`. Arrivals go to the protocol from here on.
    pub(crate) fn start(self: &Arc<Self>, fabric: BoxFuture<'static, ()>, runtime: &Arc<dyn Runtime>) {
        self.queue_pair.set_sink(Arc::new(Arrivals(Arc::downgrade(self))));
        runtime.spawn("connection", Box::pin(Driver::new(self.clone(), fabric, runtime.clone())));
    }

    /// Runs the protocol's housekeeping until the protocol fails, for instance because there is no memory for a
    /// message. Then closes the queue pair, so that the next transfer uses a new connection.
    pub(crate) async fn keep_house(self: Arc<Self>) {
        self.protocol.clone().housekeeping().await;
        self.queue_pair.close().await;
    }

    /// Ends the connection after the last arrival: `Ok` for a reason of this side, `Err` if the fabric has failed.
    /// Releases all memory.
    pub(crate) async fn end(self: Arc<Self>, why: Result<Lost, FabricError>, runtime: Arc<dyn Runtime>) {
        let why = match why {
            Ok(lost) => lost,
            Err(error) if is_peers_doing(&error) => self.why_closed(error.into(), &runtime).await,
            Err(error) => error.into(),
        };
        log!(DEBUG, peer = %self.values.peer, transport = %self.kind, why = why.detail, "data connection ended");
        self.fail(&why);
        if !self.is_ended_by_peer() && !self.is_shut_down() {
            self.announcer.send_end(&why).await;
        }
        self.queue_pair.close().await;
        self.protocol.drain().into_iter().for_each(Lent::end_drained);
        self.release_kept();
        self.allocator.enclosure.end();
    }

    /// Whether the fabric reported that the peer closed the connection.
    fn is_ended_by_peer(&self) -> bool {
        self.queue_pair.failure().as_ref().is_some_and(is_close)
    }

    /// Whether this worker is shutting down. Then its goodbye gives the reason. A `Disconnected` frame before it would
    /// look like a loss to the peer.
    fn is_shut_down(&self) -> bool {
        self.lost.get().is_some_and(|lost| lost.loss == PeerLoss::ShutDownHere)
    }

    /// The peer closed, dropped or refused the connection. Its reason arrives on the control session, possibly later. If none
    /// arrives within [`REASON`], `seen` is the reason.
    async fn why_closed(&self, seen: Lost, runtime: &Arc<dyn Runtime>) -> Lost {
        let _ = timeout(&**runtime, REASON, self.reason_known.notified()).await;
        self.lost.get().cloned().unwrap_or(seen)
    }

    /// Called by the watch of the session once in each `step`. Ends the connection if the peer's host has acknowledged nothing for
    /// `bound`. Data count in steps, as the peer's silence does. A single unanswered probe counts only if the next look finds it, too.
    pub(crate) fn watch_path(&self, step: Duration, bound: Duration) {
        let waiting = self.queue_pair.stats().unacknowledged;
        let acknowledged = waiting.map(|waiting| waiting.acknowledged);
        let time = {
            let mut stall = self.stall.lock().unwrap_or_else(PoisonError::into_inner);
            stall.time = match waiting {
                Some(waiting) if stall.acknowledged == acknowledged => {
                    waiting.silence.unwrap_or(stall.time + step)
                }
                _ => Duration::ZERO,
            };
            stall.acknowledged = acknowledged;
            stall.time
        };
        if time >= bound {
            self.fail(&Lost::new(PeerLoss::Unreachable, self.stalled(time)));
        }
    }

    fn stalled(&self, time: Duration) -> String {
        let (peer, kind, time) = (&self.values.peer, self.kind, time.as_millis());
        format!(
            "the data connection with {peer} over {kind} has stalled: nothing was acknowledged for {time} ms"
        )
    }

    /// How long the peer's host has acknowledged nothing, if it has not and something waits for it.
    pub(crate) fn stalled_for(&self) -> Option<Duration> {
        let time = self.stall.lock().unwrap_or_else(PoisonError::into_inner).time;
        (time > Duration::ZERO).then_some(time)
    }

    /// Describes the path if it has stalled for long enough to be named.
    pub(crate) fn stall(&self) -> Option<String> {
        let time = self.stall.lock().unwrap_or_else(PoisonError::into_inner).time;
        (time >= STALL_MIN).then(|| self.stalled(time))
    }

    /// The connection is over because of `why`, unless it is already. Returns the reason. New transfers use another connection.
    pub(crate) fn set_over(&self, why: &Lost) -> &Lost {
        let why = self.lost.get_or_init(|| why.clone());
        self.reason_known.notify_one();
        why
    }

    /// Waits until the connection has ended and its lost steps are stored.
    pub(crate) async fn until_end(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.ended.subscribe().wait_for(|has_ended| *has_ended).await;
    }

    /// Whether the connection has ended and its lost steps are stored.
    pub(crate) fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }

    /// Fails every transfer of this connection. The connection's task then closes the queue pair.
    ///
    /// Steps whose values may be lost are ended with this peer before another connection can be used for them.
    pub(crate) fn fail(&self, why: &Lost) {
        let why = self.set_over(why);
        // First: a thread that a hostile peer blocks inside the fabric may own the protocol's lock.
        self.queue_pair.shared_memory().into_iter().for_each(SharedMemory::free_threads);
        self.protocol.fail(&why.detail);
        self.announcer.fail(&why.detail);
        self.ended.send_if_modified(|has_ended| {
            let is_first = !std::mem::replace(has_ended, true);
            if is_first {
                self.meter.over(why.loss);
                let steps = self.protocol.steps_under_way();
                self.values.values.lose(&self.values.peer, &steps, &why.detail);
            }
            is_first
        });
    }

    /// Closes a connection. Its task notices that the queue pair is closed, and releases all memory.
    pub(crate) async fn close(&self, why: &Lost) {
        self.fail(why);
        self.queue_pair.close().await;
    }

    /// Receives one value, with its version if `scope` requests it. Its arguments stay with the caller, as those of all that a
    /// receive passes through, because otherwise the future of every receive has them several times.
    pub(crate) fn receive<'a>(
        &'a self,
        scope: &'a Scope,
        name: &'a Transfer<'a>,
        options: &'a ReceiveOptions,
    ) -> impl Future<Output = Result<(Tensor, Option<Version>), WorkerError>> + 'a {
        self.received((scope, name), &self.allocator, options, |received| {
            let version = self.version(&received);
            Ok((Self::tensor(received)?, version))
        })
    }

    /// The version of a received value.
    pub(crate) fn version(&self, received: &Received<Lent>) -> Option<Version> {
        received.version.map(|number| Version { incarnation: self.peer_incarnation, number })
    }

    /// Whether values can be views of the peer's memory.
    pub(crate) fn may_view(&self) -> bool {
        self.queue_pair.capabilities().lend && !self.allocator.enclosure.is_bouncing()
    }

    /// Whether contents are validated when they have arrived.
    pub(crate) fn is_validated(&self) -> bool {
        self.protocol.agreed().validation.is_on()
    }

    /// Receives what `hand_out` makes of the value. Requests a view only if the fabric supports it and the peer is trusted not to
    /// change the memory.
    async fn received<T>(
        &self,
        (scope, name): (&Scope, &Transfer<'_>),
        allocator: &impl Allocator<Lent = Lent>,
        options: &ReceiveOptions,
        hand_out: impl FnOnce(Received<Lent>) -> Result<T, WorkerError>,
    ) -> Result<T, WorkerError> {
        let sharing = if self.may_view() { options.sharing } else { Sharing::Copy };
        let options = ReceiveOptions { sharing, ..*options };
        let span = receive_span(*name, self.kind);
        let received = if span.is_disabled() {
            self.protocol.receive_with(*scope, name.key, allocator, options).await
        } else {
            let receive = self.protocol.receive_with(*scope, name.key, allocator, options);
            Box::pin(receive.instrument(span.clone())).await
        };
        match received {
            Ok(received) => {
                self.meter.ended(&span, Ok(received.metadata.byte_length));
                hand_out(received)
            }
            Err(error) => {
                let error = self.transfer_error(*name, error);
                self.meter.ended(&span, Err(&error));
                Err(error)
            }
        }
    }

    /// Receives one of several values. It is not lost if the others fail.
    pub(crate) fn receive_held<'a>(
        &'a self,
        scope: &'a Scope,
        name: &'a Transfer<'a>,
        options: &'a ReceiveOptions,
    ) -> impl Future<Output = Result<ReceivedGuard<FabricChannel>, WorkerError>> + 'a {
        self.received((scope, name), &self.allocator, options, |received| Ok(self.protocol.hold(received)))
    }

    /// Receives a value that has the metadata `expected` if the peer is honest. Memory is allocated for no other.
    ///
    /// # Errors
    /// [`WorkerError::Local`] with INVALID_ARGUMENT for a value of other metadata.
    pub(crate) async fn receive_expected(
        &self,
        (scope, name): (&Scope, &Transfer<'_>),
        expected: Metadata,
        options: &ReceiveOptions,
    ) -> Result<Tensor, WorkerError> {
        let (receive, expected) = (&self.allocator, Expected::These(Arc::new([expected])));
        let allocator = ExpectingAllocator { receive, expected, arguments: None };
        let tensor = self.received((scope, name), &allocator, options, Self::tensor).await?;
        let checked = allocator.accepts(tensor.metadata());
        checked.map_err(|status| WorkerError::Local { transfer: name.name(), status })?;
        Ok(tensor)
    }

    /// Receives one value directly into `target` if possible. [`Target::fill`] completes it.
    pub(crate) async fn receive_into(
        &self,
        scope: &Scope,
        name: &Transfer<'_>,
        target: &Target,
    ) -> Result<ReceivedGuard<FabricChannel>, WorkerError> {
        let allocator =
            TargetAllocator { receive: &self.allocator, target, is_validated: self.is_validated() };
        let span = receive_span(*name, self.kind);
        let receive = self.protocol.receive_with(*scope, name.key, &allocator, ReceiveOptions::default());
        let received = receive.instrument(span.clone()).await.map_err(|error| {
            let mismatch = match &error {
                TransferError::Local(status) if status.code == Code::InvalidArgument => {
                    target.mismatch(*name)
                }
                _ => None,
            };
            mismatch.unwrap_or_else(|| self.transfer_error(*name, error))
        });
        self.meter.ended(&span, received.as_ref().map(|received| received.metadata.byte_length));
        received.map(|received| self.protocol.hold(received))
    }

    /// As [`receive_expected`](Self::receive_expected), into `buffer`, which is long enough. Returns the buffer.
    pub(crate) async fn receive_expected_into(
        &self,
        (scope, name): (&Scope, &Transfer<'_>),
        expected: Metadata,
        buffer: BufMut,
    ) -> Result<BufMut, WorkerError> {
        let target = Target::expecting(expected, buffer);
        let mut held = self.receive_into(scope, name, &target).await?;
        let (_, buffer) = target.fill(*name, &mut held, &self.allocator.pool).await?;
        Ok(buffer)
    }

    /// The value as a tensor that shares the bytes of `held`.
    pub(crate) fn shared_tensor(held: &mut ReceivedGuard<FabricChannel>) -> Result<Tensor, WorkerError> {
        let received = held.get_mut().ok_or_else(WorkerError::handed_out)?;
        let bytes = received.lent.take().map(Lent::received).transpose()?;
        received.lent = bytes.clone().map(Lent::view);
        Ok(received_tensor(received.metadata.clone(), bytes, received.checksums.clone()))
    }

    pub(crate) fn tensor(received: Received<Lent>) -> Result<Tensor, WorkerError> {
        let Received { metadata, lent, checksums, .. } = received;
        Ok(received_tensor(metadata, lent.map(Lent::received).transpose()?, checksums))
    }

    pub(crate) fn lost_error(&self, transfer: Box<TransferName>, seen: String) -> WorkerError {
        let Lost { loss, detail } = self.lost.get().cloned().unwrap_or_else(|| Lost::gone(seen));
        if loss == PeerLoss::ShutDownHere {
            return WorkerError::ShutDown;
        }
        let (address, transport) = (self.peer_at.clone(), self.kind.name());
        WorkerError::PeerLost { transfer, address, transport, loss, detail }
    }

    fn transfer_error(&self, name: Transfer<'_>, error: TransferError) -> WorkerError {
        let transfer = name.name();
        match error {
            TransferError::Remote(status) => WorkerError::Remote { transfer, status },
            TransferError::Local(status)
                if matches!(status.code, Code::ResourceExhausted | Code::InvalidArgument) =>
            {
                WorkerError::Local { transfer, status }
            }
            TransferError::KeyTooLong { .. } | TransferError::StashFull { .. } => {
                let status = Status::new(Code::ResourceExhausted, error.to_string());
                WorkerError::Local { transfer, status }
            }
            TransferError::KeyActive { .. } => {
                let status = Status::new(Code::InvalidArgument, error.to_string());
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
    // A buffer for a key with several known shapes is as large as the largest of them.
    let length = usize::try_from(metadata.byte_length).unwrap_or(usize::MAX);
    let bytes = match bytes {
        Some(bytes) if bytes.len() == length => Some(bytes),
        Some(bytes) if length > 0 => bytes.slice(0..length),
        _ => None,
    };
    Tensor::received(metadata, bytes.unwrap_or_else(Buf::empty), checksums)
}

/// Whether the peer ended the connection, in order, by a reset or by a refusal. Then its reason may follow. A refusal
/// need not be for a broken rule: of a killed process, the kernel destroys the newest objects first, so that memory
/// regions may end before the queue pair, and the NIC refuses what is under way.
fn is_peers_doing(error: &FabricError) -> bool {
    is_close(error)
        || matches!(
            error,
            FabricError::PeerLost { cause: LossCause::Reset, .. } | FabricError::RemoteRefused { .. }
        )
}

/// Whether the peer ended the connection in order.
fn is_close(error: &FabricError) -> bool {
    matches!(error, FabricError::PeerLost { cause: LossCause::ClosedByPeer, .. })
}

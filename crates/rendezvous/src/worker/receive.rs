//! Receives and sends of a step, as users write them.

use std::{borrow::Cow, future::IntoFuture, pin::pin, time::Duration};

use futures::future::try_join_all;
use tensorwire_memory::BufMut;
use tensorwire_protocol::{DataType, Key, Manner, Sharing};
use tensorwire_verbs_reactor::BoxFuture;

use crate::{
    error::{TransferName, WorkerError},
    values::{
        arguments::{Delivered, RecvArgs},
        tensor::Tensor,
    },
    worker::{
        metrics::Timed,
        peer::Peer,
        receive_into::{Filled, ReceiveIntoError},
        result_form::{AsDelivered, AsTensor, IntoBuffer},
        step::{HeldTensor, Receiving, Step},
    },
};

/// A receive of one value, made by [`Step::recv`] and [`StepFrom::recv`]. Nothing happens until it is awaited.
///
/// Awaiting it gives the [`Tensor`]; after [`into_buffer`](Self::into_buffer) a [`Filled`], after [`with`](Self::with)
/// a [`Delivered`].
#[derive(Debug)]
#[must_use = "nothing is received until it is awaited"]
pub struct Recv<'a, As = AsTensor> {
    step: &'a Step,
    key: Result<Cow<'a, Key>, WorkerError>,
    limit: Duration,
    sharing: Sharing,
    gives: As,
}

impl<'a> Recv<'a> {
    fn new(step: &'a Step, key: Result<Cow<'a, Key>, WorkerError>) -> Self {
        let (limit, sharing) =
            (step.worker.operations.defaults.limit, step.worker.operations.defaults.sharing);
        Self { step, key, limit, sharing, gives: AsTensor::new() }
    }

    /// Into `buffer`, which must be long enough. The bytes land there without a copy if the buffer is of
    /// [`Worker::receive_pool`](crate::Worker::receive_pool), and the value is not so small that it travels inside a
    /// message; else with one copy.
    ///
    /// The buffer is owned, because the peer may write it for longer than the future lives:
    ///
    /// ```
    /// # use {tensorwire_memory::BufMut, tensorwire_protocol::Key, tensorwire_rendezvous::Step};
    /// async fn receive(step: &Step, key: &Key, buffer: BufMut) {
    ///     let _ = step.recv(key).into_buffer(buffer).await;
    /// }
    /// ```
    ///
    /// A borrowed one is refused by the compiler:
    ///
    /// ```compile_fail,E0308
    /// # use {tensorwire_memory::BufMut, tensorwire_protocol::Key, tensorwire_rendezvous::Step};
    /// async fn receive(step: &Step, key: &Key, buffer: &mut [u8]) {
    ///     let _ = step.recv(key).into_buffer(buffer).await;
    /// }
    /// ```
    ///
    /// The buffer that comes back is the one given, except in one case: the value may be that of another receive of the
    /// key that was given up meanwhile. Then it comes in that one's memory, and the buffer goes back to its pool.
    ///
    /// # Errors
    /// As [`Step::recv`], and [`WorkerError::Mismatch`] for a value that does not fit, which the next receive of the key
    /// gets. The buffer comes back with the error, unless the peer may still write it.
    ///
    /// # Cancel safety
    /// As [`Step::recv`]. The buffer goes back to its pool once the peer can't write it any more and no value is kept in
    /// it.
    pub fn into_buffer(self, buffer: BufMut) -> Recv<'a, IntoBuffer> {
        self.giving(IntoBuffer::new(buffer))
    }

    /// With more to say: where the value is wanted, and a token that ends the receive while it waits. A value that is
    /// there wins over a token that was cancelled before. From a sender on this worker the value comes with what that
    /// said; from another worker with blank [`SendArgs`](crate::SendArgs).
    ///
    /// A value that is wanted on another kind of memory than it is on is copied by the device contexts of the two ends
    /// ([`DeviceContext`](crate::DeviceContext)).
    ///
    /// ```
    /// use tensorwire_rendezvous::{CancellationToken, RecvArgs, Worker, WorkerError};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), WorkerError> {
    /// let worker = Worker::builder("a").start().await?;
    /// let key = worker.key("a", "a", "never sent")?;
    ///
    /// let token = CancellationToken::new();
    /// let args = RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() };
    /// token.cancel();
    /// let received = worker.step(1).recv(&key).with(args).await;
    /// assert!(matches!(received, Err(WorkerError::Cancelled { .. })));
    /// # worker.shutdown().await;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Step::recv`]; [`WorkerError::Cancelled`], derived, when the token gets cancelled while the receive waits, or
    /// was cancelled before and the sender has no value; [`WorkerError::Local`] when the value can't be copied to where
    /// it is wanted, which the next receive of the key gets then.
    ///
    /// # Cancel safety
    /// As [`Step::recv`], also while the value is copied.
    pub fn with(self, args: RecvArgs) -> Recv<'a, AsDelivered> {
        self.giving(AsDelivered { args })
    }
}

impl<'a, As> Recv<'a, As> {
    /// The longest that it may take, connecting included, instead of the worker's
    /// [`timeout`](crate::WorkerBuilder::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Whether a view is wanted or a copy, instead of the worker's [`sharing`](crate::WorkerBuilder::sharing). A buffer
    /// is always filled. A value that is kept for the next receive of its key is what that one gets, view or copy.
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    fn giving<Other>(self, gives: Other) -> Recv<'a, Other> {
        let Self { step, key, limit, sharing, .. } = self;
        Recv { step, key, limit, sharing, gives }
    }
}

impl Recv<'_, IntoBuffer> {
    /// Refuses a value whose elements are of another type. Without it any that is not too long is taken;
    /// [`Filled::metadata`] tells its type.
    pub fn dtype(mut self, dtype: DataType) -> Self {
        self.gives.dtype = Some(dtype);
        self
    }
}

impl<'a> IntoFuture for Recv<'a> {
    type Output = Result<Tensor, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { step, key, limit, sharing, .. } = self;
        Box::pin(async move { step.receive_within(&*key?, sharing.into(), limit).await })
    }
}

impl<'a> IntoFuture for Recv<'a, AsDelivered> {
    type Output = Result<Delivered, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { step, key, limit, sharing, gives } = self;
        Box::pin(async move { step.receive_with(&*key?, sharing.into(), limit, gives.args).await })
    }
}

impl<'a> IntoFuture for Recv<'a, IntoBuffer> {
    type Output = Result<Filled, ReceiveIntoError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { step, key, limit, gives, .. } = self;
        Box::pin(async move {
            match key {
                Ok(key) => receive_into(step, &key, limit, gives).await,
                Err(error) => Err(gives.given_back(error)),
            }
        })
    }
}

async fn receive_into(
    step: &Step,
    key: &Key,
    limit: Duration,
    into: IntoBuffer,
) -> Result<Filled, ReceiveIntoError> {
    let target = into.target();
    let what = || format!("receiving `{key}` of step {}", step.id.0);
    let received = pin!(async {
        let peer = key.source_device().worker().unwrap_or_default();
        let transfer = TransferName { peer, key: key.to_string(), step: Some(step.id.0) };
        let pool = &step.worker.node.pools.receive;
        let mut held = step.receive_held(key, Receiving::Into(&target)).await?;
        let (metadata, buffer) = held.fill(&target, &transfer, pool).await?;
        Ok(Filled { metadata, buffer, version: None })
    });
    let filled = step.worker.timed(Timed::Recv, limit, what, received).await;
    filled.map_err(|error| ReceiveIntoError { error, buffer: target.take() })
}

/// A receive of several values, made by [`Step::recv_many`] and [`StepFrom::recv_many`]. Nothing happens until it is
/// awaited; that gives the tensors in the order of their keys.
#[derive(Debug)]
#[must_use = "nothing is received until it is awaited"]
pub struct RecvMany<'a> {
    step: &'a Step,
    keys: Result<Cow<'a, [Key]>, WorkerError>,
    limit: Duration,
    sharing: Sharing,
}

impl<'a> RecvMany<'a> {
    fn new(step: &'a Step, keys: Result<Cow<'a, [Key]>, WorkerError>) -> Self {
        Self {
            step,
            keys,
            limit: step.worker.operations.defaults.limit,
            sharing: step.worker.operations.defaults.sharing,
        }
    }

    /// As [`Recv::timeout`], for all of them together.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// As [`Recv::sharing`].
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    async fn run(self) -> Result<Vec<Tensor>, WorkerError> {
        let Self { step, keys, limit, sharing } = self;
        let keys = keys?;
        let what = || format!("receiving {} keys of step {}", keys.len(), step.id.0);
        let held = pin!(async {
            step.connect_sources(keys.iter()).await?;
            let how = Receiving::As(Manner { sharing, together: true });
            try_join_all(keys.iter().map(|key| step.receive_held(key, how))).await
        });
        let held = step.worker.timed(Timed::RecvMany, limit, what, held).await?;
        held.into_iter().map(HeldTensor::into_tensor).collect()
    }
}

impl<'a> IntoFuture for RecvMany<'a> {
    type Output = Result<Vec<Tensor>, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

impl Step {
    /// The next value under `key`, from the worker of its source device; from this worker's own table, without
    /// a copy, when that is itself. Nothing happens until it is awaited; its methods are the options.
    ///
    /// # Errors
    /// Awaiting it gives [`WorkerError::WrongWorker`] when the destination is not a device of this worker;
    /// [`WorkerError::Remote`] with the sender's status, also when the key names another life of it;
    /// [`WorkerError::PeerLost`], [`WorkerError::Aborted`], [`WorkerError::DeadlineExceeded`] after its
    /// [`timeout`](Recv::timeout).
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
    pub fn recv<'a>(&'a self, key: &'a Key) -> Recv<'a> {
        Recv::new(self, Ok(Cow::Borrowed(key)))
    }

    /// The next value under each of `keys`, in their order. All are asked for at once, each worker in as few messages as
    /// its keys fit ([`Flow::requests_per_message`](crate::Flow::requests_per_message)); they may come from different
    /// workers, and a key may occur more than once.
    ///
    /// # Memory
    /// Values that have come stay in the receive pool while the others are waited for. So all that is wanted together at a
    /// time must fit into it ([`Memory::receive_bytes`](crate::Memory::receive_bytes)), with as much beside as
    /// the largest of other values: else some of it may wait for memory until the deadline. A value takes at most twice its
    /// bytes meanwhile.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for the first key whose receive fails; the error names it. Values of other keys that
    /// have come are kept for the next receives of these.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv): a value that has come for one of the keys is not lost when the future is dropped.
    pub fn recv_many<'a>(&'a self, keys: &'a [Key]) -> RecvMany<'a> {
        RecvMany::new(self, Ok(Cow::Borrowed(keys)))
    }

    /// Sends to `peer`, by the names of the two workers and of each value.
    pub fn to<'a>(&'a self, peer: &'a Peer) -> StepTo<'a> {
        StepTo { step: self, peer }
    }

    /// Receives from `peer`, by the names of the two workers and of each value.
    pub fn from<'a>(&'a self, peer: &'a Peer) -> StepFrom<'a> {
        StepFrom { step: self, peer }
    }
}

/// A step and the peer that values are sent to, made by [`Step::to`].
///
/// ```
/// use tensorwire_rendezvous::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire_rendezvous::WorkerError> {
/// let left = Worker::builder("left").start().await?;
/// let right = Worker::builder("right").start().await?;
/// let (to_right, to_left) = (left.peer_at(right.address()).await?, right.peer_at(left.address()).await?);
///
/// let (here, there) = (left.step(1), right.step(1));
/// here.to(&to_right).send("activation", Tensor::from_values(left.pool(), &[], &[0.5f32])?)?;
/// assert_eq!(there.from(&to_left).recv("activation").await?.values::<f32>()?, [0.5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct StepTo<'a> {
    step: &'a Step,
    peer: &'a Peer,
}

impl StepTo<'_> {
    /// Makes `tensor` available to the peer under `name`, as [`Step::send`] does under a whole key. The peer receives it
    /// with [`StepFrom::recv`].
    ///
    /// # Errors
    /// As [`Step::send`]; [`WorkerError::BadKey`] when the name is none.
    pub fn send(self, name: &str, tensor: Tensor) -> Result<(), WorkerError> {
        let worker = &self.step.worker;
        self.step.send(&worker.key(worker.name(), self.peer.name(), name)?, tensor)
    }
}

/// A step and the peer that values are received from, made by [`Step::from`]. [`StepTo`] has an example.
#[derive(Debug, Clone, Copy)]
pub struct StepFrom<'a> {
    step: &'a Step,
    peer: &'a Peer,
}

impl<'a> StepFrom<'a> {
    /// The next value that the peer sends to this worker under `name`, as [`Step::recv`] receives by a whole key.
    ///
    /// # Errors
    /// Awaiting it fails as [`Step::recv`] does; [`WorkerError::BadKey`] when the name is none.
    ///
    /// # Cancel safety
    /// As [`Step::recv`].
    pub fn recv(self, name: &str) -> Recv<'a> {
        Recv::new(self.step, self.key(name).map(Cow::Owned))
    }

    /// The next value under each of `names`, as [`Step::recv_many`] receives by whole keys.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for the first that fails.
    ///
    /// # Cancel safety
    /// As [`Step::recv_many`].
    pub fn recv_many(self, names: impl IntoIterator<Item = impl AsRef<str>>) -> RecvMany<'a> {
        let keys = names.into_iter().map(|name| self.key(name.as_ref())).collect::<Result<Vec<_>, _>>();
        RecvMany::new(self.step, keys.map(Cow::Owned))
    }

    fn key(&self, name: &str) -> Result<Key, WorkerError> {
        let worker = &self.step.worker;
        worker.key(self.peer.name(), worker.name(), name)
    }
}

//! Receives of a step, and sends and receives by the name of a peer.

use std::{
    borrow::Cow,
    future::{IntoFuture, ready},
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::future::try_join_all;
use tensorwire_fabric::BoxFuture;
use tensorwire_memory::BufMut;
use tensorwire_protocol::{Awaiting, DataType, Key, ReceiveOptions, Sharing};

use crate::{
    error::{Transfer, WorkerError},
    values::{
        arguments::{Delivered, RecvArgs},
        tensor::Tensor,
    },
    worker::{
        Worker,
        metrics::Timed,
        peer::Peer,
        receive_into::{Filled, ReceiveIntoError},
        result_form::{AsDelivered, AsTensor, IntoBuffer},
        step::{HeldTensor, Receiving, Step},
    },
};

/// A receive of one value, made by [`Step::recv`] and [`StepFrom::recv`]. Nothing happens until it is awaited.
///
/// Awaiting it returns the [`Tensor`]; after [`into_buffer`](Self::into_buffer) a [`Filled`], after
/// [`with`](Self::with) a [`Delivered`].
#[derive(Debug)]
#[must_use = "nothing is received until it is awaited"]
pub struct Recv<'a, As = AsTensor> {
    step: &'a Step,
    key: Result<Cow<'a, Key>, WorkerError>,
    limit: Duration,
    options: ReceiveOptions,
    gives: As,
}

impl<'a> Recv<'a> {
    fn new(step: &'a Step, key: Result<Cow<'a, Key>, WorkerError>) -> Self {
        let defaults = &step.worker.operations.defaults;
        Self { step, key, limit: defaults.limit, options: defaults.sharing.into(), gives: AsTensor::new() }
    }

    /// Receives into `buffer`, which must be long enough. This takes no copy if the buffer is from
    /// [`Worker::receive_pool`](crate::Worker::receive_pool), or was given to the worker
    /// ([`UserMemory::give`](tensorwire_memory::UserMemory::give)), and the value is too large to travel inside a message;
    /// otherwise it takes one copy.
    ///
    /// The buffer is owned, because the peer may still write it after the future is dropped:
    ///
    /// ```
    /// # use {tensorwire::memory::BufMut, tensorwire::Key, tensorwire::Step};
    /// async fn receive(step: &Step, key: &Key, buffer: BufMut) {
    ///     let _ = step.recv(key).into_buffer(buffer).await;
    /// }
    /// ```
    ///
    /// A borrowed buffer does not compile:
    ///
    /// ```compile_fail,E0308
    /// # use {tensorwire::memory::BufMut, tensorwire::Key, tensorwire::Step};
    /// async fn receive(step: &Step, key: &Key, buffer: &mut [u8]) {
    ///     let _ = step.recv(key).into_buffer(buffer).await;
    /// }
    /// ```
    ///
    /// The returned buffer is the one given, except in one case: the value may have been written for another receive of
    /// the key whose future was dropped. Then the value is returned in the memory of that receive, and the given buffer
    /// returns to its pool.
    ///
    /// # Errors
    /// As [`Step::recv`], and [`WorkerError::Mismatch`] for a value that does not fit; the next receive of the key gets
    /// that value. The error contains the buffer, unless the peer may still write it.
    ///
    /// # Cancel safety
    /// As [`Step::recv`]. The buffer returns to its pool once the peer can no longer write it and the next receive of
    /// the key does not need a value in it.
    pub fn into_buffer(self, buffer: BufMut) -> Recv<'a, IntoBuffer> {
        self.giving(IntoBuffer::new(buffer))
    }

    /// Receives with arguments: the memory in which the value is wanted, and a token that cancels the receive while it
    /// waits. A value that is available takes precedence over a token that is already cancelled. A value from this
    /// worker comes with the arguments of its sender, one from another worker with default
    /// [`SendArgs`](crate::SendArgs).
    ///
    /// If the value is in another kind of memory than it is wanted in, the device contexts of sender and receiver copy
    /// it ([`DeviceContext`](crate::DeviceContext)).
    ///
    /// ```
    /// use tensorwire::{Worker, WorkerError, tensorflow::{CancellationToken, RecvArgs}};
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
    /// As [`Step::recv`]; [`WorkerError::Cancelled`], derived, if the token is cancelled while the receive waits, or
    /// was already cancelled and the sender has no value; [`WorkerError::Local`] if the value cannot be copied to the
    /// memory that it is wanted in. The next receive of the key gets that value.
    ///
    /// # Cancel safety
    /// As [`Step::recv`], also while the value is copied.
    pub fn with(self, args: RecvArgs) -> Recv<'a, AsDelivered> {
        self.giving(AsDelivered { args })
    }
}

impl<'a, As> Recv<'a, As> {
    /// The deadline, including the time to connect. Default: the worker's [`timeout`](crate::WorkerBuilder::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Requests a view or a copy. Default: the worker's [`sharing`](crate::WorkerBuilder::sharing). A buffer is always
    /// filled by a copy. A receive that gets the value of an earlier, dropped receive gets it in the form that the
    /// earlier one requested.
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.options.sharing = sharing;
        self
    }

    /// For a receive that its task polls besides sends or other receives: polling this future never polls the fabric,
    /// which would delay the others. Default: if [`Wait`](tensorwire_fabric::Wait) allows it and no other request is
    /// outstanding, polling the future also polls the fabric for the value.
    pub fn beside(mut self) -> Self {
        self.options.awaiting = Awaiting::Beside;
        self
    }

    fn giving<Other>(self, gives: Other) -> Recv<'a, Other> {
        let Self { step, key, limit, options, .. } = self;
        Recv { step, key, limit, options, gives }
    }
}

impl Recv<'_, IntoBuffer> {
    /// Refuses a value of another element type. By default any type is accepted; [`Filled::metadata`] contains it.
    pub fn dtype(mut self, dtype: DataType) -> Self {
        self.gives.dtype = Some(dtype);
        self
    }
}

impl<'a> IntoFuture for Recv<'a> {
    type Output = Result<Tensor, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { step, key, limit, options, .. } = self;
        match key {
            Ok(Cow::Borrowed(key)) => Box::pin(step.receive_within(key, options, limit)),
            Ok(Cow::Owned(key)) => Box::pin(async move { step.receive_within(&key, options, limit).await }),
            Err(error) => Box::pin(ready(Err(error))),
        }
    }
}

impl<'a> IntoFuture for Recv<'a, AsDelivered> {
    type Output = Result<Delivered, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { step, key, limit, options, gives } = self;
        Box::pin(async move { step.receive_with(&*key?, options, limit, gives.args).await })
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
        let transfer = Transfer { peer: &peer, key: key.as_str(), step: Some(step.id.0) };
        let pool = &step.worker.node.pools().receive;
        let mut held = step.receive_held(key, Receiving::Into(&target)).await?;
        let (metadata, buffer) = held.fill(&target, transfer, pool).await?;
        Ok(Filled { metadata, buffer, version: None })
    });
    let filled = step.worker.timed(Timed::Recv, limit, what, received).await;
    filled.map_err(|error| ReceiveIntoError { error, buffer: target.take() })
}

/// A receive of several values, made by [`Step::recv_many`] and [`StepFrom::recv_many`]. Nothing happens until it is
/// awaited. Awaiting it returns the tensors in the order of their keys.
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

    /// Like [`Recv::timeout`], for all of them together.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Like [`Recv::sharing`].
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
            let how = Receiving::Held(ReceiveOptions { sharing, awaiting: Awaiting::Together });
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
    /// Receives the next value of `key` from the worker of its source device. If that is this worker, the value comes
    /// from its own table without a copy. Nothing happens until the receive is awaited; its methods are the options.
    ///
    /// # Errors
    /// Awaiting it returns [`WorkerError::WrongWorker`] if the destination is not a device of this worker;
    /// [`WorkerError::Remote`] with the sender's status, also if the key names another incarnation of the sender;
    /// [`WorkerError::PeerLost`], [`WorkerError::Aborted`], or [`WorkerError::DeadlineExceeded`] after its
    /// [`timeout`](Recv::timeout).
    ///
    /// # Cancel safety
    /// Cancel-safe: in a loop around `select!`, no value is lost, duplicated or reordered. Dropping the future cancels
    /// the receive at the sender. A value that the sender has not written yet stays at the sender, in order. A value
    /// that is being written is stored here, in the memory of the dropped receive, for the next receive of the key;
    /// that receive waits until it knows which of the two cases applies. If several receives of a key are outstanding
    /// and one is dropped, any of the others may get the value. Stored values are dropped when the step ends.
    ///
    /// If the connection breaks while values of the step are under way, the step has ended between the two workers,
    /// even after a reconnect: later receives also fail with [`WorkerError::PeerLost`].
    pub fn recv<'a>(&'a self, key: &'a Key) -> Recv<'a> {
        Recv::new(self, Ok(Cow::Borrowed(key)))
    }

    /// Receives the next value of each of `keys`. All are requested at once, from each worker in as few messages as
    /// possible ([`Flow::requests_per_message`](crate::Flow::requests_per_message)). The sources may be on different
    /// workers, and a key may occur more than once.
    ///
    /// # Memory
    /// Values that have arrived stay in the receive pool until the last one has. So the pool
    /// ([`Memory::receive_bytes`](crate::Memory::receive_bytes)) must have room for all values that are requested
    /// together at a time, plus the largest other value; otherwise some receives may wait for memory until the
    /// deadline. A value takes at most twice its length.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for the first key whose receive fails; the error names it. Values that have arrived for
    /// other keys are not lost: the next receives of these keys get them.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv): a value that has arrived for one of the keys is not lost when the future is dropped.
    pub fn recv_many<'a>(&'a self, keys: &'a [Key]) -> RecvMany<'a> {
        RecvMany::new(self, Ok(Cow::Borrowed(keys)))
    }

    /// Sends to `peer` by plain names instead of keys.
    pub fn to<'a>(&'a self, peer: &'a Peer) -> StepTo<'a> {
        StepTo { step: self, peer }
    }

    /// Receives from `peer` by plain names instead of keys.
    pub fn from<'a>(&'a self, peer: &'a Peer) -> StepFrom<'a> {
        StepFrom { step: self, peer }
    }
}

/// A step and a peer to send to, made by [`Step::to`].
///
/// ```
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
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
    /// Makes `tensor` available to the peer under `name`, as [`Step::send`] does under a key. The peer receives it with
    /// [`StepFrom::recv`].
    ///
    /// # Errors
    /// As [`Step::send`]; [`WorkerError::BadKey`] if the name is invalid.
    pub fn send(self, name: &str, tensor: Tensor) -> Result<(), WorkerError> {
        let Self { step: Step { worker, .. }, peer } = self;
        let [sent, _] = peer.known.keys();
        let key = key_like(sent, (worker, peer), name, || worker.key(worker.name(), peer.name(), name))?;
        self.step.send(&key, tensor)
    }
}

/// A step and a peer to receive from, made by [`Step::from`]. [`StepTo`] has an example.
#[derive(Debug, Clone, Copy)]
pub struct StepFrom<'a> {
    pub(crate) step: &'a Step,
    peer: &'a Peer,
}

impl<'a> StepFrom<'a> {
    /// Receives the next value that the peer sends to this worker under `name`, as [`Step::recv`] does by a key.
    ///
    /// # Errors
    /// As [`Step::recv`]; [`WorkerError::BadKey`] if the name is invalid.
    ///
    /// # Cancel safety
    /// As [`Step::recv`].
    pub fn recv(self, name: &str) -> Recv<'a> {
        Recv::new(self.step, self.key(name).map(Cow::Owned))
    }

    /// Receives the next value under each of `names`, as [`Step::recv_many`] does by keys.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for the first name whose receive fails.
    ///
    /// # Cancel safety
    /// As [`Step::recv_many`].
    pub fn recv_many(self, names: impl IntoIterator<Item = impl AsRef<str>>) -> RecvMany<'a> {
        let keys = names.into_iter().map(|name| self.key(name.as_ref())).collect::<Result<Vec<_>, _>>();
        RecvMany::new(self.step, keys.map(Cow::Owned))
    }

    pub(crate) fn key(&self, name: &str) -> Result<Key, WorkerError> {
        let Self { step: Step { worker, .. }, peer } = self;
        let [_, received] = peer.known.keys();
        key_like(received, (worker, peer), name, || worker.key(peer.name(), worker.name(), name))
    }
}

/// The key of `name`: derived from an earlier key that is `known`, or made of its parts.
fn key_like(
    known: &OnceLock<Key>,
    (worker, peer): (&Worker, &Peer),
    name: &str,
    of_parts: impl FnOnce() -> Result<Key, WorkerError>,
) -> Result<Key, WorkerError> {
    // A step of one worker may be used with a peer of another.
    let is_of_worker = Arc::ptr_eq(&worker.node, &peer.worker.node);
    if let Some(Ok(key)) = known.get().filter(|_| is_of_worker).map(|known| known.with_edge(name)) {
        return Ok(key);
    }
    let key = of_parts()?;
    if is_of_worker {
        // Another call may have set a key, which serves equally.
        let _ = known.set(key.clone());
    }
    Ok(key)
}

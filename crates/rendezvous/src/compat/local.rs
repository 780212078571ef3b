//! [`LocalRendezvous`]: the rendezvous of one process, without a worker.

use std::{
    fmt,
    future::Future,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project::pin_project;
use tensorwire_fabric::{Runtime, TokioRuntime, timeout};
use tensorwire_protocol::{Code, Key, Status};

use crate::values::{
    arguments::{Delivered, RecvArgs, SendArgs},
    duplicates::DuplicatePolicy,
    table::{CancellableTake, StepQueues},
    tensor::Tensor,
};

/// Settings of a [`LocalRendezvous`].
///
/// ```
/// use tensorwire::{settings::DuplicatePolicy, tensorflow::{LocalConfig, LocalRendezvous}};
///
/// let config = LocalConfig { duplicates: DuplicatePolicy::Report, ..LocalConfig::default() };
/// let rendezvous = LocalRendezvous::with_config(config);
/// ```
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// The meaning of a second send or receive of a key. Default [`DuplicatePolicy::Queue`].
    pub duplicates: DuplicatePolicy,
    /// Maximum number of values that wait for their receivers. A further one is refused with RESOURCE_EXHAUSTED.
    /// Default 1,048,576.
    pub values_max: usize,
    /// The clock for receives with a timeout. Default: the current tokio runtime.
    pub runtime: Option<Arc<dyn Runtime>>,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self { duplicates: DuplicatePolicy::default(), values_max: 1 << 20, runtime: None }
    }
}

/// Matches sends and receives within one process, and never copies a value. Cheap to clone: all clones are the same
/// rendezvous.
///
/// Keys are compared as a whole, including the incarnation. Values of one key are received in the order in which they
/// were sent, unless [`LocalConfig::duplicates`] is changed. There is no order between keys.
///
/// Dropping the last clone ends the rendezvous: pending receives get CANCELLED.
///
/// ```
/// use tensorwire::memory::{Pool, PoolConfig};
/// use tensorwire::Key;
/// use tensorwire::{Tensor, tensorflow::{LocalRendezvous, RecvArgs, SendArgs}};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let cpu = "/job:trainer/replica:0/task:0/device:CPU:0";
/// let key = Key::builder().source(cpu).destination(cpu).edge("loss").build()?;
/// let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("example") })?;
///
/// let rendezvous = LocalRendezvous::new();
/// let received = rendezvous.recv(&key, RecvArgs::default());
/// rendezvous.send(&key, SendArgs::default(), Tensor::from_values(&pool, &[], &[0.5f32])?)?;
/// assert_eq!(received.await?.tensor.values::<f32>()?, [0.5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct LocalRendezvous {
    shared: Arc<SharedRendezvous>,
}

/// Shared by the clones, but not by receives, so that dropping the last clone ends them.
#[derive(Debug)]
struct SharedRendezvous {
    step: Arc<StepQueues>,
    waiting_values: Arc<AtomicUsize>,
    config: LocalConfig,
}

impl Drop for SharedRendezvous {
    fn drop(&mut self) {
        self.step.abort(&Status::new(Code::Cancelled, "the rendezvous was deleted").derived());
    }
}

impl Default for LocalRendezvous {
    fn default() -> Self {
        Self::with_config(LocalConfig::default())
    }
}

impl LocalRendezvous {
    /// With the default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// With these settings.
    pub fn with_config(config: LocalConfig) -> Self {
        let waiting_values = Arc::default();
        let step = Arc::new(StepQueues::new(&waiting_values, config.duplicates));
        Self { shared: Arc::new(SharedRendezvous { step, waiting_values, config }) }
    }

    /// Makes `tensor` available under `key`. The oldest waiting receive of the key gets it before this returns;
    /// otherwise it waits for the next one. Never blocks.
    ///
    /// # Errors
    /// The status of [`abort`](Self::abort); ABORTED for a duplicate; RESOURCE_EXHAUSTED above
    /// [`LocalConfig::values_max`].
    pub fn send(&self, key: &Key, args: SendArgs, tensor: Tensor) -> Result<(), Status> {
        self.send_text(key.as_str(), args, tensor)
    }

    /// Receives the next value of `key`. The receive is queued by this call, not by the first poll.
    ///
    /// # Errors
    /// The status of [`abort`](Self::abort); ABORTED for a duplicate; CANCELLED, derived, if no value is available and
    /// [`RecvArgs::cancellation`] is cancelled.
    ///
    /// # Cancel safety
    /// Cancel-safe: dropping the future cancels the receive. A value that it was already given goes to the next
    /// receive, or returns to its position in the queue.
    pub fn recv(&self, key: &Key, args: RecvArgs) -> Receive {
        let take = self.shared.step.take_unless(key.as_str(), args.cancellation.as_ref());
        Receive { take, args: Some(args) }
    }

    /// As [`recv`](Self::recv), with a deadline. An available value is returned even if `limit` is zero.
    ///
    /// # Errors
    /// As [`recv`](Self::recv); DEADLINE_EXCEEDED; FAILED_PRECONDITION if there is no runtime to measure time.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv). A value that arrives after the deadline goes to the next receive.
    pub async fn recv_timeout(
        &self,
        key: &Key,
        args: RecvArgs,
        limit: Duration,
    ) -> Result<Delivered, Status> {
        self.within(key, limit, self.recv(key, args)).await
    }

    /// Ends this rendezvous: pending and later sends and receives fail with `status`, and values that were not received
    /// are dropped. Of several calls, the status of the first is used.
    pub fn abort(&self, status: &Status) {
        self.shared.step.abort(status);
    }

    /// The status it was aborted with, if it was.
    pub fn aborted(&self) -> Option<Status> {
        self.shared.step.aborted()
    }

    /// The number of values that wait for their receivers.
    pub fn waiting_values(&self) -> usize {
        self.shared.waiting_values.load(Ordering::Relaxed)
    }

    pub(crate) fn step(&self) -> &Arc<StepQueues> {
        &self.shared.step
    }

    /// As [`send`](Self::send), for text that need not be a key.
    pub(crate) fn send_text(&self, key: &str, args: SendArgs, tensor: Tensor) -> Result<(), Status> {
        let (waiting, most) = (self.waiting_values(), self.shared.config.values_max);
        if waiting >= most {
            let message = format!(
                "`{key}`: {waiting} sent values wait for their receivers, and values_max is {most}; receive them, abort, \
                 or allow more"
            );
            return Err(Status::new(Code::ResourceExhausted, message));
        }
        self.shared.step.send(key, args, tensor)
    }

    pub(crate) async fn within<T>(
        &self,
        key: &Key,
        limit: Duration,
        received: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let own = self.shared.config.runtime.clone();
        let runtime = own.or_else(|| Some(Arc::new(TokioRuntime::current()?)));
        let Some(runtime) = runtime else {
            let message = "no clock for a timeout: receive on a tokio runtime, or set LocalConfig::runtime";
            return Err(Status::new(Code::FailedPrecondition, message));
        };
        let ended = timeout(&*runtime, limit, pin!(received)).await;
        ended.unwrap_or_else(|_| {
            let message = format!(
                "receiving `{key}` took longer than {} ms; does anything send this key?",
                limit.as_millis()
            );
            Err(Status::new(Code::DeadlineExceeded, message))
        })
    }
}

/// A pending receive ([`LocalRendezvous::recv`]).
///
/// ```
/// use futures::FutureExt;
/// use tensorwire::Key;
/// use tensorwire::tensorflow::{LocalRendezvous, Receive, RecvArgs};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rendezvous = LocalRendezvous::new();
/// let key = Key::builder().source("/CPU:0").destination("/CPU:0").edge("loss").build()?;
/// let receive: Receive = rendezvous.recv(&key, RecvArgs::default());
/// assert!(receive.now_or_never().is_none());
/// # Ok(())
/// # }
/// ```
#[pin_project]
#[must_use = "dropping it cancels the receive"]
pub struct Receive {
    #[pin]
    take: CancellableTake,
    args: Option<RecvArgs>,
}

impl fmt::Debug for Receive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receive").field("take", &self.take).finish_non_exhaustive()
    }
}

impl Future for Receive {
    type Output = Result<Delivered, Status>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let taken = ready!(this.take.poll(context));
        let recv_args = this.args.take().unwrap_or_default();
        Poll::Ready(taken.map(|taken| {
            let value = taken.value;
            Delivered { tensor: value.tensor, send_args: value.send_args, recv_args }
        }))
    }
}

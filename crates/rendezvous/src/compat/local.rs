//! The rendezvous of one process, without a worker.

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

use tensorwire_protocol::{Code, Key, Status};
use tensorwire_verbs_reactor::{Runtime, TokioRuntime, timeout};

use crate::values::{
    arguments::{Delivered, RecvArgs, SendArgs},
    duplicates::DuplicatePolicy,
    table::{CancellableTake, StepQueues},
    tensor::Tensor,
};

/// Settings of a rendezvous of one process.
///
/// ```
/// use tensorwire_rendezvous::{DuplicatePolicy, LocalConfig, LocalRendezvous};
///
/// let config = LocalConfig { duplicates: DuplicatePolicy::Report, ..LocalConfig::default() };
/// let rendezvous = LocalRendezvous::with_config(config);
/// ```
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// What a second send or receive of one key means. Default [`DuplicatePolicy::Queue`].
    pub duplicates: DuplicatePolicy,
    /// Values that may wait for their receivers; one more is refused with RESOURCE_EXHAUSTED. Default 1 Mi.
    pub values_max: usize,
    /// The clock of receives with a timeout. Default: the tokio runtime that they are called on.
    pub runtime: Option<Arc<dyn Runtime>>,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self { duplicates: DuplicatePolicy::default(), values_max: 1 << 20, runtime: None }
    }
}

/// Where sends and receives of one process meet; never copies a value. Cheap to clone: all clones are the same
/// rendezvous.
///
/// Keys are compared whole, the incarnation with them. Values of one key are received in the order in which they were
/// sent (unless [`LocalConfig::duplicates`] says otherwise); there is no order between keys.
///
/// With the last clone the rendezvous ends: receives that still wait get CANCELLED.
///
/// ```
/// use tensorwire_memory::{Pool, PoolConfig};
/// use tensorwire_protocol::Key;
/// use tensorwire_rendezvous::{LocalRendezvous, RecvArgs, SendArgs, Tensor};
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

/// What the clones share. Receives don't, so that they end with the last clone.
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

    /// Makes `tensor` available under `key`: to the oldest receive that waits for it, which has it when this returns,
    /// or to the next one. Never waits.
    ///
    /// # Errors
    /// The status of [`abort`](Self::abort); ABORTED for a duplicate; RESOURCE_EXHAUSTED above
    /// [`LocalConfig::values_max`].
    pub fn send(&self, key: &Key, args: SendArgs, tensor: Tensor) -> Result<(), Status> {
        self.send_text(key.as_str(), args, tensor)
    }

    /// The next value of `key`. The receive waits in line from this call on, not only from the first poll.
    ///
    /// # Errors
    /// The status of [`abort`](Self::abort); ABORTED for a duplicate; CANCELLED, derived, if it has to wait and
    /// [`RecvArgs::cancellation`] is or gets cancelled.
    ///
    /// # Cancel safety
    /// Cancel-safe: dropping the future gives the receive up. A value that it had already goes back to its place, or to
    /// the next receive.
    pub fn recv(&self, key: &Key, args: RecvArgs) -> Receive {
        let take = self.shared.step.take_unless(key.as_str(), args.cancellation.as_ref());
        Receive { take, args: Some(args) }
    }

    /// As [`recv`](Self::recv), within `limit`. A value that is there is given also if `limit` is zero.
    ///
    /// # Errors
    /// As [`recv`](Self::recv); DEADLINE_EXCEEDED; FAILED_PRECONDITION without a runtime to measure time with.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv). A value that comes when the time has run out is for the next receive.
    pub async fn recv_timeout(
        &self,
        key: &Key,
        args: RecvArgs,
        limit: Duration,
    ) -> Result<Delivered, Status> {
        self.within(key, limit, self.recv(key, args)).await
    }

    /// Ends this rendezvous: receives that wait fail with `status`, values that nobody has received are dropped, and
    /// later sends and receives fail with `status` too. The first status stays.
    pub fn abort(&self, status: &Status) {
        self.shared.step.abort(status);
    }

    /// The status it was aborted with, if it was.
    pub fn aborted(&self) -> Option<Status> {
        self.shared.step.aborted()
    }

    /// Values that wait for their receivers.
    pub fn waiting_values(&self) -> usize {
        self.shared.waiting_values.load(Ordering::Relaxed)
    }

    pub(crate) fn step(&self) -> &Arc<StepQueues> {
        &self.shared.step
    }

    /// As [`send`](Self::send), for what is no key.
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

/// A receive that is under way ([`LocalRendezvous::recv`]).
///
/// ```
/// use futures::FutureExt;
/// use tensorwire_protocol::Key;
/// use tensorwire_rendezvous::{LocalRendezvous, Receive, RecvArgs};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rendezvous = LocalRendezvous::new();
/// let key = Key::builder().source("/CPU:0").destination("/CPU:0").edge("loss").build()?;
/// let receive: Receive = rendezvous.recv(&key, RecvArgs::default());
/// assert!(receive.now_or_never().is_none());
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it gives the receive up"]
pub struct Receive {
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

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let taken = ready!(Pin::new(&mut self.take).poll(context));
        let recv_args = self.args.take().unwrap_or_default();
        Poll::Ready(taken.map(|taken| {
            let value = taken.value;
            Delivered { tensor: value.tensor, send_args: value.send_args, recv_args }
        }))
    }
}

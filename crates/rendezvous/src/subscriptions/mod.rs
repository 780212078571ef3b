//! Subscriptions: the values that a peer has under one name, each as soon as there is one.
//!
//! A subscriber lends its peer memory for the next values before there are any. So the peer writes a value when it has it, without being
//! asked: one write and one message for each value, and a message that lends further memory for several.
//!
//! [`Peer::subscribe`](crate::Peer::subscribe) subscribes to the versions of a published tensor, and
//! [`StepFrom::subscribe`](crate::StepFrom::subscribe) to the values that are sent in a step.
//!
//! ```
//! use tensorwire::{Tensor, Worker, subscriptions::Policy};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tensorwire::WorkerError> {
//! let camera = Worker::builder("camera").start().await?;
//! let viewer = Worker::client().start().await?;
//! let peer = viewer.peer_at(camera.address()).await?;
//!
//! let mut frames = peer.subscribe("frame").policy(Policy::Every);
//! let publish = async {
//!     for number in 0..10u8 {
//!         let frame = Tensor::from_values(camera.pool(), &[4], &[number; 4])?;
//!         camera.publish_in_turn("frame", frame).await?;
//!     }
//!     Ok::<_, tensorwire::WorkerError>(())
//! };
//! let view = async {
//!     let first = frames.next().await.expect("it has no end")?;
//!     println!("{:?} is version {:?}", first.tensor, first.version);
//!     Ok::<_, tensorwire::WorkerError>(())
//! };
//! tokio::try_join!(publish, view)?;
//! # Ok(())
//! # }
//! ```

mod link;

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{FutureExt as _, Stream, StreamExt, stream::Next};
use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::{Key, Sharing, limits::SUBSCRIPTION_VALUES_MAX};

use self::link::{Link, Place, Source};
pub use crate::sets::Policy;
use crate::{
    error::WorkerError,
    sets::publisher_loss::Pause,
    values::{published::Version, tensor::Tensor},
    worker::{peer::Peer, receive::StepFrom},
};

/// How many values a peer may send ahead, unless [`Subscription::ahead`] says otherwise.
const AHEAD: u8 = 2;

impl Peer {
    /// Subscribes to the tensor that the peer publishes under `name`: a stream of its versions, beginning with the one that is published
    /// now, or with the first one. Nothing is sent until the stream is polled; its methods are the options.
    ///
    /// Between two versions the tensor may change its element type and shape, and may grow. While it is withdrawn the stream returns
    /// nothing.
    pub fn subscribe(&self, name: &str) -> Subscription {
        let source = Source::Published { peer: self.clone(), name: Arc::from(name) };
        Subscription::new(source, self.worker.operations.defaults.sharing)
    }
}

impl StepFrom<'_> {
    /// Subscribes to the values that the peer sends to this worker under `name` in this step: a stream of them, in order. It returns an
    /// error and ends when the step does, here or at the peer, or when the connection breaks.
    ///
    /// Values that the peer has sent ahead when the subscription is dropped go to the next receives under the name, as if these had
    /// requested them.
    pub fn subscribe(self, name: &str) -> Subscription {
        let sharing = self.step.worker.operations.defaults.sharing;
        let key = self.key(name).map(Arc::new);
        Subscription::new(Source::Step { step: self.step.observed(), key: Box::new(key) }, sharing)
    }
}

/// A value of a subscription.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Update {
    /// The value.
    pub tensor: Tensor,
    /// The version; `None` for a value of a step.
    pub version: Option<Version>,
    /// How many values were left out between this one and the one before, or since the publisher was restarted or has withdrawn the tensor.
    /// 0 for the first one. With [`Policy::Every`] it is not 0 only after [`WorkerError::Superseded`].
    pub dropped: u64,
}

/// A subscription to the values of a peer, made by [`Peer::subscribe`] or [`StepFrom::subscribe`]: a [`Stream`] of [`Update`]s.
///
/// With [`Policy::Latest`], the default, the peer takes its newest value whenever it may send one, and leaves out the others; it may do so
/// [`ahead`](Self::ahead) times before the program takes a value. With [`Policy::Every`] no value is left out: values of a step wait at the
/// peer, and [`publish_in_turn`](crate::Worker::publish_in_turn) waits for the subscriber. If the tensor is published otherwise while the
/// subscriber lacks a version, or the connection breaks, the stream returns [`WorkerError::Superseded`] where versions are missing, and
/// goes on.
///
/// # Errors
/// A lost peer that publishes is asked again, after pauses of 50 ms to 2 s, for as long as the stream is polled; the stream returns nothing
/// meanwhile, and one line is logged. After its restart the versions begin anew. The stream ends after [`WorkerError::ShutDown`], after
/// an invalid option, and, for values of a step, after any error but [`WorkerError::Corrupted`].
///
/// # Memory
/// The peer may write [`ahead`](Self::ahead) buffers of the receive pool, each as large as the value for which they were requested. A value
/// is the caller's for as long as it likes: another buffer takes the place of its memory. Such buffers use half of the pool at most, except
/// for one that a value waits for.
#[must_use = "nothing is received until the stream is polled"]
pub struct Subscription {
    /// `None` while `step` has it.
    place: Option<Place>,
    step: Option<BoxFuture<'static, (Place, Result<Update, WorkerError>)>>,
    /// Returned before anything else.
    next: Option<Update>,
    is_over: bool,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Subscription {
    fn new(source: Source, sharing: Sharing) -> Self {
        let place = Place {
            source,
            policy: Policy::default(),
            ahead: AHEAD,
            sharing,
            link: Link::None,
            held: None,
            before: 0,
            pause: Pause::default(),
        };
        Self { place: Some(place), step: None, next: None, is_over: false }
    }

    /// Whether every value is wanted, or the newest one. Default: [`Policy::Latest`]. Applies until the stream is polled.
    pub fn policy(self, policy: Policy) -> Self {
        self.with(|place| place.policy = policy)
    }

    /// How many values the peer may send ahead: 1 to 64. Default: 2. Applies until the stream is polled.
    pub fn ahead(self, values: u8) -> Self {
        self.with(|place| place.ahead = values)
    }

    /// Requests views of the peer's memory, or copies. Default: the worker's [`sharing`](crate::WorkerBuilder::sharing). Applies until the
    /// stream is polled.
    pub fn sharing(self, sharing: Sharing) -> Self {
        self.with(|place| place.sharing = sharing)
    }

    fn with(mut self, set: impl FnOnce(&mut Place)) -> Self {
        if let Some(place) = &mut self.place {
            set(place);
        }
        self
    }

    /// The next value, as from the stream. `None` when the stream is over.
    ///
    /// # Errors
    /// See [`Subscription`].
    ///
    /// # Cancel safety
    /// Cancel-safe: the next call goes on.
    #[allow(clippy::should_implement_trait)] // streams have this method through `StreamExt`
    pub fn next(&mut self) -> Next<'_, Self> {
        StreamExt::next(self)
    }
}

impl Stream for Subscription {
    type Item = Result<Update, WorkerError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(next) = this.next.take() {
            return Poll::Ready(Some(Ok(next)));
        }
        if this.is_over {
            return Poll::Ready(None);
        }
        if let Some(place) = this.place.take() {
            this.step = Some(place.next().boxed());
        }
        let Some(step) = &mut this.step else { return Poll::Ready(None) };
        let Poll::Ready((place, update)) = step.poll_unpin(context) else { return Poll::Pending };
        this.step = None;
        this.is_over = update.as_ref().is_err_and(|error| place.ends_with(error));
        let gap = update.as_ref().ok().and_then(|update| place.gap_before(update));
        this.place = Some(place);
        Poll::Ready(Some(match (gap, update) {
            (Some(gap), Ok(update)) => {
                this.next = Some(update);
                Err(gap)
            }
            (_, update) => update,
        }))
    }
}

/// Checks the options.
fn check_ahead(values: u8) -> Result<(), WorkerError> {
    if (1..=SUBSCRIPTION_VALUES_MAX).contains(&values) {
        return Ok(());
    }
    let remedy = format!("values that a peer may send ahead are 1 to {SUBSCRIPTION_VALUES_MAX}");
    Err(WorkerError::Config { field: "ahead", value: values.to_string(), remedy })
}

/// The key of a step, or why there is none.
type StepKey = Box<Result<Arc<Key>, WorkerError>>;

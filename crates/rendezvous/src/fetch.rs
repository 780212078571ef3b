//! Fetching published tensors.

mod attempt;
mod into;
mod many;

use std::{
    fmt,
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use protocol::{Manner, Scope, Sharing, Wanted};
use verbs_reactor::BoxFuture;

pub use self::{
    into::FetchInto,
    many::{FetchMany, FetchManyVersioned},
};
use crate::{Peer, Tensor, Version, Worker, WorkerError, error::TransferName};

/// A tensor, and which publication it is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Fetched {
    /// The tensor.
    pub tensor: Tensor,
    /// Its version: that of exactly this tensor.
    pub version: Version,
}

/// How a fetch is made.
#[derive(Debug, Clone, Copy)]
struct Settings {
    limit: Duration,
    sharing: Sharing,
    wanted: Option<Wanted>,
}

impl Settings {
    fn of(worker: &Worker) -> Self {
        Self { limit: worker.node.limit, sharing: worker.node.sharing, wanted: None }
    }

    fn scope(&self) -> Scope {
        self.wanted.map_or(Scope::Published, Scope::Versioned)
    }

    fn versioned(&mut self) {
        self.wanted.get_or_insert(Wanted::Now);
    }

    fn newer_than(&mut self, version: Option<Version>) {
        let Version { incarnation, number } = version.unwrap_or(Version { incarnation: 0, number: 0 });
        self.wanted = Some(Wanted::NewerThan { incarnation, version: number });
    }
}

fn transfer(peer: &Peer, name: &str) -> Result<TransferName, WorkerError> {
    check_name(name)?;
    Ok(TransferName { peer: peer.name().to_owned(), key: name.to_owned(), step: None })
}

/// Whether something can be published under `name`.
pub(crate) fn check_name(name: &str) -> Result<(), WorkerError> {
    let most = protocol::limits::NAME_BYTES_MAX;
    if (1..=most).contains(&name.len()) {
        return Ok(());
    }
    let remedy = format!("a published name has 1 to {most} bytes");
    Err(WorkerError::Config { field: "published name", value: name.to_owned(), remedy })
}

/// The version is there: the protocol refuses peers that do not tell it.
fn fetched((tensor, version): (Tensor, Option<Version>)) -> Result<Fetched, WorkerError> {
    let untold = || WorkerError::InvalidTensor { problem: "it came without its version".to_owned() };
    Ok(Fetched { tensor, version: version.ok_or_else(untold)? })
}

/// A future that begins when it is polled, so that it can be described until then.
struct Running<'a, T>(Option<BoxFuture<'a, T>>);

impl<'a, T> Running<'a, T> {
    fn poll(&mut self, context: &mut Context<'_>, begin: impl FnOnce() -> BoxFuture<'a, T>) -> Poll<T> {
        self.0.get_or_insert_with(begin).as_mut().poll(context)
    }
}

impl<T> fmt::Debug for Running<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Begun" } else { "NotBegun" })
    }
}

/// A fetch of one published tensor, made by [`Worker::fetch`]. Awaiting it gives the [`Tensor`]; with
/// [`versioned`](Self::versioned), [`Fetched`].
///
/// ```
/// use std::time::Duration;
///
/// use rendezvous::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
/// # let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// let limit = Duration::from_secs(5);
/// let fetched = client.fetch(&peer, "w").timeout(limit).versioned().await?;
/// // Newer than what is here, whenever there is one.
/// let next = client.fetch(&peer, "w").newer_than(fetched.version);
/// server.publish("w", Tensor::from_values(server.pool(), &[1], &[9u8])?)?;
/// assert_eq!(next.await?.values::<u8>()?, [9]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is fetched until it is awaited"]
pub struct Fetch<'a> {
    worker: &'a Worker,
    peer: &'a Peer,
    name: &'a str,
    settings: Settings,
    running: Running<'a, Result<(Tensor, Option<Version>), WorkerError>>,
}

impl<'a> Fetch<'a> {
    /// The longest that it may take, connecting included, instead of the worker's
    /// [`timeout`](crate::WorkerBuilder::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.settings.limit = limit;
        self
    }

    /// Whether a view is wanted or a copy, instead of the worker's [`sharing`](crate::WorkerBuilder::sharing).
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.settings.sharing = sharing;
        self
    }

    /// Waits until something is published under the name, instead of failing at once with NOT_FOUND.
    ///
    /// A wait counts among the requests that may be outstanding at the peer
    /// ([`requests_max`](crate::WorkerBuilder::requests_max)). It ends with the tensor, the timeout, the connection, or
    /// the peer's shutdown.
    pub fn wait(mut self) -> Self {
        self.settings.newer_than(None);
        self
    }

    /// Waits for a newer version than this: a later publication of the same life of the peer, or any of another life. As
    /// [`wait`](Self::wait), and ends with NOT_FOUND when the tensor is withdrawn meanwhile.
    pub fn newer_than(mut self, version: Version) -> Self {
        self.settings.newer_than(Some(version));
        self
    }

    /// Gives the version too, of exactly the tensor that comes. Costs one message more.
    pub fn versioned(mut self) -> FetchVersioned<'a> {
        self.settings.versioned();
        FetchVersioned(self)
    }

    fn poll_both(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(Tensor, Option<Version>), WorkerError>> {
        let Self { worker, peer, name, settings, running } = self;
        running.poll(context, || Box::pin(run(worker, peer, name, *settings)))
    }
}

async fn run(
    worker: &Worker,
    peer: &Peer,
    name: &str,
    settings: Settings,
) -> Result<(Tensor, Option<Version>), WorkerError> {
    let transfer = transfer(peer, name)?;
    let manner = Manner { sharing: settings.sharing, together: false };
    let fetched = pin!(worker.fetch_one(peer, &transfer, settings.scope(), manner));
    worker.within(settings.limit, || format!("fetching {transfer}"), fetched).await
}

impl Future for Fetch<'_> {
    type Output = Result<Tensor, WorkerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_both(context).map_ok(|(tensor, _)| tensor)
    }
}

/// A [`Fetch`] that gives the version too.
#[derive(Debug)]
#[must_use = "nothing is fetched until it is awaited"]
pub struct FetchVersioned<'a>(Fetch<'a>);

impl FetchVersioned<'_> {
    /// As [`Fetch::timeout`].
    pub fn timeout(self, limit: Duration) -> Self {
        Self(self.0.timeout(limit))
    }

    /// As [`Fetch::sharing`].
    pub fn sharing(self, sharing: Sharing) -> Self {
        Self(self.0.sharing(sharing))
    }

    /// As [`Fetch::wait`].
    pub fn wait(self) -> Self {
        Self(self.0.wait())
    }

    /// As [`Fetch::newer_than`].
    pub fn newer_than(self, version: Version) -> Self {
        Self(self.0.newer_than(version))
    }
}

impl Future for FetchVersioned<'_> {
    type Output = Result<Fetched, WorkerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(ready!(self.0.poll_both(context)).and_then(fetched))
    }
}

impl Worker {
    /// The tensor that `peer` has published under `name`. Nothing happens until it is awaited; its methods say how.
    ///
    /// ```no_run
    /// # async fn example(worker: rendezvous::Worker, peer: rendezvous::Peer) -> Result<(), rendezvous::WorkerError> {
    /// let weights = worker.fetch(&peer, "weights").await?;
    /// // As soon as somebody publishes it; with its version.
    /// let mut latest = worker.fetch(&peer, "weights").wait().versioned().await?;
    /// // Each version once.
    /// loop {
    ///     println!("{:?} is version {}", latest.tensor, latest.version);
    ///     latest = worker.fetch(&peer, "weights").newer_than(latest.version).versioned().await?;
    /// }
    /// # }
    /// ```
    ///
    /// If the connection breaks, the fetch is made once more within its time, unless the peer was restarted: what it
    /// publishes now may be something else.
    ///
    /// # Errors
    /// Awaiting it gives [`WorkerError::Remote`] with NOT_FOUND when there is none; [`WorkerError::PeerLost`],
    /// [`WorkerError::NoFabric`], [`WorkerError::DeadlineExceeded`] after its [`timeout`](Fetch::timeout).
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost by dropping the future, because the tensor stays published.
    pub fn fetch<'a>(&'a self, peer: &'a Peer, name: &'a str) -> Fetch<'a> {
        Fetch { worker: self, peer, name, settings: Settings::of(self), running: Running(None) }
    }
}

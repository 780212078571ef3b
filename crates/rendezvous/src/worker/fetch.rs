//! Fetching published tensors.

pub(crate) mod attempt;
mod many;
mod remote_tensor;
pub(crate) mod slice;

use std::{future::IntoFuture, pin::pin, time::Duration};

use tensorwire_fabric::BoxFuture;
use tensorwire_memory::BufMut;
use tensorwire_protocol::{DataType, ReceiveOptions, Scope, Sharing, Wanted};

pub use self::{many::FetchMany, remote_tensor::RemoteTensor};
use crate::{
    error::{Transfer, WorkerError},
    values::{
        published::{Version, check_published},
        tensor::Tensor,
    },
    worker::{
        Worker,
        metrics::Timed,
        peer::Peer,
        receive_into::{Filled, ReceiveIntoError},
        result_form::{AsTensor, AsVersioned, IntoBuffer},
    },
};

/// A fetched tensor and its version.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Fetched {
    /// The tensor.
    pub tensor: Tensor,
    /// The version of this tensor.
    pub version: Version,
}

/// The options of a fetch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub(super) limit: Duration,
    pub(super) sharing: Sharing,
    pub(super) scope: Scope,
}

impl Settings {
    fn of(worker: &Worker) -> Self {
        Self {
            limit: worker.operations.defaults.limit,
            sharing: worker.operations.defaults.sharing,
            scope: Scope::Published,
        }
    }

    /// Whether the fetch may wait for a publication.
    fn waits(&self) -> bool {
        matches!(self.scope, Scope::Versioned(Wanted::NewerThan { .. }))
    }

    /// Whether the fetch waits for a tensor of this version, if the version is known.
    fn is_met_by(&self, version: Option<Version>) -> bool {
        let is_met_by = |Version { incarnation, number }| match self.scope {
            Scope::Versioned(wanted) => wanted.is_met_by(incarnation, number),
            _ => true,
        };
        version.is_some_and(is_met_by)
    }

    fn versioned(&mut self) {
        if self.scope == Scope::Published {
            self.scope = Scope::Versioned(Wanted::Now);
        }
    }

    fn newer_than(&mut self, version: Option<Version>) {
        let Version { incarnation, number } = version.unwrap_or(Version { incarnation: 0, number: 0 });
        self.scope = Scope::Versioned(Wanted::NewerThan { incarnation, version: number });
    }
}

fn transfer<'a>(peer: &'a Peer, name: &'a str) -> Result<Transfer<'a>, WorkerError> {
    check_published(name)?;
    Ok(Transfer { peer: peer.name(), key: name, step: None })
}

/// Returns the tensor with its version, which is present because the protocol refuses a peer that does not send it.
fn fetched((tensor, version): (Tensor, Option<Version>)) -> Result<Fetched, WorkerError> {
    let missing = || WorkerError::InvalidTensor { problem: "it came without its version".to_owned() };
    Ok(Fetched { tensor, version: version.ok_or_else(missing)? })
}

/// A fetch of one published tensor, made by [`Peer::fetch`]. Nothing is fetched until it is awaited.
///
/// Awaiting it returns the [`Tensor`]; after [`versioned`](Self::versioned) a [`Fetched`], after
/// [`into_buffer`](Self::into_buffer) a [`Filled`].
///
/// ```
/// use std::time::Duration;
///
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// # let server = Worker::builder("ps").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::client().start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// let limit = Duration::from_secs(5);
/// let fetched = peer.fetch("w").timeout(limit).versioned().await?;
/// // The next newer version, as soon as it is published.
/// let next = peer.fetch("w").newer_than(fetched.version);
/// server.publish("w", Tensor::from_values(server.pool(), &[1], &[9u8])?)?;
/// assert_eq!(next.await?.values::<u8>()?, [9]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is fetched until it is awaited"]
pub struct Fetch<'a, As = AsTensor> {
    peer: &'a Peer,
    name: &'a str,
    settings: Settings,
    gives: As,
}

impl<'a> Fetch<'a> {
    pub(crate) fn new(peer: &'a Peer, name: &'a str) -> Self {
        Self { peer, name, settings: Settings::of(&peer.worker), gives: AsTensor::new() }
    }

    /// Returns the version of the tensor, too. Costs one more message.
    pub fn versioned(mut self) -> Fetch<'a, AsVersioned> {
        self.settings.versioned();
        self.giving(AsVersioned { _private: () })
    }

    /// Receives into `buffer`, which must be long enough. This takes no copy if the buffer is from
    /// [`Worker::receive_pool`], or was given to the worker ([`UserMemory::give`](tensorwire_memory::UserMemory::give)), and
    /// the tensor is too large to travel inside a message; otherwise it takes one copy.
    ///
    /// The returned buffer is the one given, except in one case: if the connection broke and the fetch was repeated,
    /// the peer may still be able to write the given buffer. Then the tensor is returned in other memory, and the given
    /// buffer returns to its pool when the peer can no longer write it.
    ///
    /// # Errors
    /// As [`Peer::fetch`], and [`WorkerError::Mismatch`] for a tensor that does not fit. The error contains the buffer,
    /// unless the peer may still write it.
    ///
    /// # Cancel safety
    /// As [`Peer::fetch`]. The buffer returns to its pool once the peer can no longer write it.
    pub fn into_buffer(self, buffer: BufMut) -> Fetch<'a, IntoBuffer> {
        self.giving(IntoBuffer::new(buffer))
    }
}

impl<'a, As> Fetch<'a, As> {
    /// The deadline, including the time to connect. Default: the worker's [`timeout`](crate::WorkerBuilder::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.settings.limit = limit;
        self
    }

    /// Requests a view or a copy. Default: the worker's [`sharing`](crate::WorkerBuilder::sharing). A buffer is always
    /// filled by a copy.
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.settings.sharing = sharing;
        self
    }

    /// Waits until a tensor is published under the name, instead of failing at once with NOT_FOUND.
    ///
    /// A wait counts towards the requests that may be outstanding at the peer
    /// ([`Flow::requests_max`](crate::Flow::requests_max)). It ends with the tensor, the timeout, the loss of the
    /// connection, or the peer's shutdown.
    pub fn wait(mut self) -> Self {
        self.settings.newer_than(None);
        self
    }

    /// Waits for a version newer than `version`: a later one of the same incarnation of the peer, or any of another
    /// incarnation. Behaves like [`wait`](Self::wait), and also ends with NOT_FOUND when the tensor is withdrawn while
    /// this waits.
    pub fn newer_than(mut self, version: Version) -> Self {
        self.settings.newer_than(Some(version));
        self
    }

    fn giving<Other>(self, gives: Other) -> Fetch<'a, Other> {
        Fetch { peer: self.peer, name: self.name, settings: self.settings, gives }
    }
}

impl Fetch<'_, IntoBuffer> {
    /// Refuses a tensor of another element type. By default any type is accepted; [`Filled::metadata`] contains it.
    pub fn dtype(mut self, dtype: DataType) -> Self {
        self.gives.dtype = Some(dtype);
        self
    }

    /// Returns the version in [`Filled::version`].
    pub fn versioned(mut self) -> Self {
        self.settings.versioned();
        self
    }
}

impl Peer {
    /// Fetches the tensor that the peer has published under `name`. Nothing is sent until the fetch is awaited; its
    /// methods are the options. If the peer is the worker itself, the tensor is returned without a copy and without a
    /// connection.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use tensorwire::{Peer, WorkerError};
    ///
    /// # async fn example(peer: Peer) -> Result<(), WorkerError> {
    /// // What is published now.
    /// let now = peer.fetch("weights").timeout(Duration::from_secs(5)).await?;
    /// // The first version, as soon as it is published.
    /// let mut latest = peer.fetch("weights").wait().versioned().await?;
    /// // Each version once.
    /// loop {
    ///     println!("{:?} is version {}", latest.tensor, latest.version);
    ///     latest = peer.fetch("weights").newer_than(latest.version).versioned().await?;
    /// }
    /// # }
    /// ```
    ///
    /// If the connection breaks, the fetch is repeated once within its deadline, unless the peer has restarted: it may
    /// publish other content now.
    ///
    /// # Errors
    /// Awaiting it returns [`WorkerError::Remote`] with NOT_FOUND if nothing is published under the name,
    /// [`WorkerError::PeerLost`], [`WorkerError::NoFabric`], or [`WorkerError::DeadlineExceeded`] after its
    /// [`timeout`](Fetch::timeout).
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost by dropping the future, because the tensor stays published.
    pub fn fetch<'a>(&'a self, name: &'a str) -> Fetch<'a> {
        Fetch::new(self, name)
    }

    /// Fetches the tensors that the peer has published under `names`. All are requested at once, in as few messages as
    /// possible ([`Flow::requests_per_message`](crate::Flow::requests_per_message)). Nothing is sent until the fetch is
    /// awaited; its methods are the options.
    ///
    /// # Memory
    /// As [`Step::recv_many`](crate::Step::recv_many): tensors that have arrived stay in the receive pool until the
    /// last one has.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), for the first name whose fetch fails; the error names it.
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch).
    pub fn fetch_many(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> FetchMany<'_> {
        FetchMany::new(self, names.into_iter().map(|name| name.as_ref().to_owned()).collect())
    }
}

/// Borrows its arguments, because otherwise the future of every fetch would contain them several times.
pub(super) async fn run(
    peer: &Peer,
    transfer: &Transfer<'_>,
    settings: &Settings,
) -> Result<(Tensor, Option<Version>), WorkerError> {
    let worker = &peer.worker;
    // A task that fetches in a loop must yield to others, as if it had waited for the peer.
    tokio::task::coop::consume_budget().await;
    let at_once = || peer.known.find(|link| link.take_at_once(settings.scope, *transfer, settings.sharing));
    if let Some(found) = worker.timed_at_once(Timed::Fetch, at_once) {
        return Ok(found);
    }
    let options = settings.sharing.into();
    let fetched = pin!(worker.fetch_one(&peer.known, transfer, &settings.scope, &options));
    worker.timed(Timed::Fetch, settings.limit, || format!("fetching {transfer}"), fetched).await
}

async fn run_into(
    peer: &Peer,
    transfer: Transfer<'_>,
    settings: Settings,
    mut into: IntoBuffer,
) -> Result<Filled, ReceiveIntoError> {
    let worker = &peer.worker;
    tokio::task::coop::consume_budget().await;
    let at_once = || {
        peer.known.find(|link| link.fill_at_once(settings.scope, transfer, (into.dtype, &mut into.buffer)))
    };
    if let Some((metadata, version)) = worker.timed_at_once(Timed::Fetch, at_once) {
        return Ok(Filled { metadata, buffer: into.buffer, version });
    }
    let target = into.target();
    let fetched = async {
        if worker.node.is_own(&peer.known) {
            let (tensor, version) =
                worker.fetch_one(&peer.known, &transfer, &settings.scope, &ReceiveOptions::default()).await?;
            let (metadata, buffer) = target.fill_with(transfer, tensor.metadata(), tensor.bytes()).await?;
            return Ok(Filled {
                metadata,
                buffer,
                version: version.filter(|_| settings.scope != Scope::Published),
            });
        }
        worker.fetch_into(&peer.known, transfer, settings.scope, &target).await
    };
    let what = || format!("fetching {transfer}");
    let filled = worker.timed(Timed::Fetch, settings.limit, what, pin!(fetched)).await;
    filled.map_err(|error| ReceiveIntoError { error, buffer: target.take() })
}

impl<'a> IntoFuture for Fetch<'a> {
    type Output = Result<Tensor, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { peer, name, settings, .. } = self;
        Box::pin(async move {
            let transfer = transfer(peer, name)?;
            run(peer, &transfer, &settings).await.map(|(tensor, _)| tensor)
        })
    }
}

impl<'a> IntoFuture for Fetch<'a, AsVersioned> {
    type Output = Result<Fetched, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { peer, name, settings, .. } = self;
        Box::pin(async move {
            let transfer = transfer(peer, name)?;
            run(peer, &transfer, &settings).await.and_then(fetched)
        })
    }
}

impl<'a> IntoFuture for Fetch<'a, IntoBuffer> {
    type Output = Result<Filled, ReceiveIntoError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { peer, name, settings, gives } = self;
        Box::pin(async move {
            match transfer(peer, name) {
                Ok(transfer) => run_into(peer, transfer, settings, gives).await,
                Err(error) => Err(gives.given_back(error)),
            }
        })
    }
}

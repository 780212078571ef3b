//! Fetching several tensors at once.

use std::{future::IntoFuture, marker::PhantomData, pin::pin, time::Duration};

use futures::future::try_join_all;
use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::{Awaiting, ReceiveOptions, Scope, Sharing, Wanted};

use super::{Fetched, Settings, fetched, transfer};
use crate::{
    connection::DataConnection,
    error::{Transfer, WorkerError},
    values::{published::Version, tensor::Tensor},
    worker::{
        metrics::Timed,
        peer::Peer,
        result_form::{AsTensor, AsVersioned},
    },
};

/// A fetch of several published tensors, made by [`Peer::fetch_many`]. Nothing is fetched until it is awaited.
///
/// Awaiting it returns the tensors in the order of their names; after [`versioned`](Self::versioned) a [`Fetched`] for
/// each.
///
/// ```
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// # let server = Worker::builder("ps").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::client().start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// server.publish("b", Tensor::from_values(server.pool(), &[1], &[5u8])?)?;
/// let both = peer.fetch_many(["w", "b"]).await?;
/// assert_eq!(both[1].values::<u8>()?, [5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is fetched until it is awaited"]
pub struct FetchMany<'a, As = AsTensor> {
    peer: &'a Peer,
    names: Vec<String>,
    settings: Settings,
    gives: PhantomData<As>,
}

/// The present tensor, with its version.
const NOW: Scope = Scope::Versioned(Wanted::Now);

type Editions = Result<Vec<(Tensor, Option<Version>)>, WorkerError>;

impl<'a> FetchMany<'a> {
    pub(crate) fn new(peer: &'a Peer, names: Vec<String>) -> Self {
        Self { peer, names, settings: Settings::of(&peer.worker), gives: PhantomData }
    }

    /// Like [`Fetch::versioned`](super::Fetch::versioned). The tensors are not a snapshot: each is read at a different
    /// moment.
    pub fn versioned(mut self) -> FetchMany<'a, AsVersioned> {
        self.settings.versioned();
        let Self { peer, names, settings, .. } = self;
        FetchMany { peer, names, settings, gives: PhantomData }
    }
}

impl<As> FetchMany<'_, As> {
    /// Like [`Fetch::timeout`](super::Fetch::timeout), for all of them together.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.settings.limit = limit;
        self
    }

    /// Like [`Fetch::sharing`](super::Fetch::sharing).
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.settings.sharing = sharing;
        self
    }

    /// Like [`Fetch::wait`](super::Fetch::wait): waits until all of them are published.
    pub fn wait(mut self) -> Self {
        self.settings.newer_than(None);
        self
    }

    /// Like [`Fetch::newer_than`](super::Fetch::newer_than), for each of them. On one host the fetch may wait only for
    /// the last name, and then read the others: only then does it notice that another name was withdrawn.
    pub fn newer_than(mut self, version: Version) -> Self {
        self.settings.newer_than(Some(version));
        self
    }

    async fn run(self) -> Editions {
        let Self { peer, names, settings, .. } = self;
        let worker = &peer.worker;
        let transfers = names.iter().map(|name| transfer(peer, name));
        let transfers = transfers.collect::<Result<Vec<_>, _>>()?;
        let fetched = pin!(async {
            let is_listed = |transfer: &Transfer<'_>| {
                peer.known.find(|link| link.lists(*transfer).then_some(())).is_some()
            };
            let mut found: Vec<Option<_>> = transfers.iter().map(|_| None).collect();
            let take_at_once = async |found: &mut [Option<_>]| {
                for (&transfer, found) in missing(&transfers, found) {
                    tokio::task::coop::consume_budget().await;
                    let take =
                        |link: &DataConnection| link.take_at_once(settings.scope, transfer, settings.sharing);
                    *found = peer.known.find(take);
                }
            };
            let fetch = async |(transfer, found): (&Transfer<'_>, &mut Option<_>), awaiting, was_listed| {
                let options = ReceiveOptions { sharing: settings.sharing, awaiting };
                let ask = async |scope| worker.fetch_one(&peer.known, transfer, &scope, &options).await;
                // The tensor was withdrawn meanwhile, or is published in memory that only the peer can read: the peer's
                // answer shows which.
                if was_listed && !is_listed(transfer) {
                    *found = Some(ask(NOW).await?).filter(|(_, version)| settings.is_met_by(*version));
                }
                if found.is_none() {
                    *found = Some(ask(settings.scope).await?);
                }
                Ok::<_, WorkerError>(())
            };
            take_at_once(&mut found).await;
            let all_are_listed =
                settings.waits() && missing(&transfers, &mut found).all(|(transfer, _)| is_listed(transfer));
            if all_are_listed && let Some(last) = missing(&transfers, &mut found).last() {
                // A publisher usually publishes in the order of the names, so the others are available with the last.
                fetch(last, Awaiting::Alone, false).await?;
                take_at_once(&mut found).await;
            }
            // Connects first, so that all requests are queued together and share messages.
            if found.iter().any(Option::is_none) && !worker.node.is_own(&peer.known) {
                worker.node.connected(&peer.known).await?;
            }
            let left: Vec<_> = missing(&transfers, &mut found).collect();
            // The message of the last request carries the earlier ones.
            let before_last = left.len().saturating_sub(1);
            let fetches = left.into_iter().enumerate();
            let fetches = fetches.map(|(at, missing)| {
                let awaiting = if at < before_last { Awaiting::Together } else { Awaiting::Alone };
                fetch(missing, awaiting, all_are_listed)
            });
            try_join_all(fetches).await?;
            Ok(found.into_iter().flatten().collect())
        });
        let what = || format!("fetching {} tensors from {}", transfers.len(), peer.name());
        worker.timed(Timed::FetchMany, settings.limit, what, fetched).await
    }
}

/// The tensors that are not found yet.
fn missing<'f, 't, T>(
    transfers: &'f [Transfer<'t>],
    found: &'f mut [Option<T>],
) -> impl DoubleEndedIterator<Item = (&'f Transfer<'t>, &'f mut Option<T>)> {
    transfers.iter().zip(found).filter(|(_, found)| found.is_none())
}

impl<'a> IntoFuture for FetchMany<'a> {
    type Output = Result<Vec<Tensor>, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { Ok(self.run().await?.into_iter().map(|(tensor, _)| tensor).collect()) })
    }
}

impl<'a> IntoFuture for FetchMany<'a, AsVersioned> {
    type Output = Result<Vec<Fetched>, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.run().await?.into_iter().map(fetched).collect() })
    }
}

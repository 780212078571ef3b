//! Fetching several tensors at once.

use std::{
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use super::{Fetched, Running, Settings, fetched, transfer};
use crate::{Peer, Tensor, Version, Worker, WorkerError};
use futures::future::try_join_all;
use protocol::{Manner, Sharing};

/// A fetch of several published tensors, made by [`Worker::fetch_many`]. Awaiting it gives the tensors in the order of
/// their names; with [`versioned`](Self::versioned), [`Fetched`] each.
///
/// ```
/// use rendezvous::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
/// # let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// server.publish("b", Tensor::from_values(server.pool(), &[1], &[5u8])?)?;
/// let both = client.fetch_many(&peer, &["w", "b"]).await?;
/// assert_eq!(both[1].values::<u8>()?, [5]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is fetched until it is awaited"]
pub struct FetchMany<'a, S> {
    worker: &'a Worker,
    peer: &'a Peer,
    names: &'a [S],
    settings: Settings,
    running: Running<'a, Editions>,
}

type Editions = Result<Vec<(Tensor, Option<Version>)>, WorkerError>;

impl<'a, S: AsRef<str> + Sync> FetchMany<'a, S> {
    /// As [`Fetch::timeout`](super::Fetch::timeout), for all of them together.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.settings.limit = limit;
        self
    }

    /// As [`Fetch::sharing`](super::Fetch::sharing).
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.settings.sharing = sharing;
        self
    }

    /// As [`Fetch::wait`](super::Fetch::wait): until all of them are published.
    pub fn wait(mut self) -> Self {
        self.settings.newer_than(None);
        self
    }

    /// As [`Fetch::newer_than`](super::Fetch::newer_than), for each of them.
    pub fn newer_than(mut self, version: Version) -> Self {
        self.settings.newer_than(Some(version));
        self
    }

    /// As [`Fetch::versioned`](super::Fetch::versioned). The versions of several names may be of different moments.
    pub fn versioned(mut self) -> FetchManyVersioned<'a, S> {
        self.settings.versioned();
        FetchManyVersioned(self)
    }

    fn poll_all(&mut self, context: &mut Context<'_>) -> Poll<Editions> {
        let Self { worker, peer, names, settings, running } = self;
        running.poll(context, || Box::pin(run(worker, peer, names, *settings)))
    }
}

async fn run<S: AsRef<str>>(worker: &Worker, peer: &Peer, names: &[S], settings: Settings) -> Editions {
    let transfers = names.iter().map(|name| transfer(peer, name.as_ref()));
    let transfers = transfers.collect::<Result<Vec<_>, _>>()?;
    let manner = Manner { sharing: settings.sharing, together: true };
    let fetched = pin!(async {
        // First, so that the requests find each other.
        peer.connected(&worker.node).await?;
        let fetch = |transfer| worker.fetch_one(peer, transfer, settings.scope(), manner);
        try_join_all(transfers.iter().map(fetch)).await
    });
    let what = || format!("fetching {} tensors from {}", transfers.len(), peer.name());
    worker.within(settings.limit, what, fetched).await
}

impl<S: AsRef<str> + Sync> Future for FetchMany<'_, S> {
    type Output = Result<Vec<Tensor>, WorkerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_all(context).map_ok(|editions| editions.into_iter().map(|(tensor, _)| tensor).collect())
    }
}

/// A [`FetchMany`] that gives the versions too.
#[derive(Debug)]
#[must_use = "nothing is fetched until it is awaited"]
pub struct FetchManyVersioned<'a, S>(FetchMany<'a, S>);

impl<S: AsRef<str> + Sync> FetchManyVersioned<'_, S> {
    /// As [`FetchMany::timeout`].
    pub fn timeout(self, limit: Duration) -> Self {
        Self(self.0.timeout(limit))
    }

    /// As [`FetchMany::sharing`].
    pub fn sharing(self, sharing: Sharing) -> Self {
        Self(self.0.sharing(sharing))
    }

    /// As [`FetchMany::wait`].
    pub fn wait(self) -> Self {
        Self(self.0.wait())
    }

    /// As [`FetchMany::newer_than`].
    pub fn newer_than(self, version: Version) -> Self {
        Self(self.0.newer_than(version))
    }
}

impl<S: AsRef<str> + Sync> Future for FetchManyVersioned<'_, S> {
    type Output = Result<Vec<Fetched>, WorkerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let editions = ready!(self.0.poll_all(context));
        Poll::Ready(editions.and_then(|editions| editions.into_iter().map(fetched).collect()))
    }
}

impl Worker {
    /// The tensors that `peer` has published under `names`, in their order. All are asked for at once, in as few
    /// messages as they fit ([`WorkerBuilder::requests_per_message`](crate::WorkerBuilder::requests_per_message)).
    /// Nothing happens until it is awaited; its methods say how.
    ///
    /// # Memory
    /// As [`Step::recv_many`](crate::Step::recv_many): what has come stays in the receive pool until the last has.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), for the first name whose fetch fails; the error names it.
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch).
    pub fn fetch_many<'a, S: AsRef<str> + Sync>(
        &'a self,
        peer: &'a Peer,
        names: &'a [S],
    ) -> FetchMany<'a, S> {
        FetchMany { worker: self, peer, names, settings: Settings::of(self), running: Running(None) }
    }
}

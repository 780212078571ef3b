//! Fetching into a buffer of the user's.

use std::{
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use super::{Running, Settings, transfer};
use crate::{Filled, Peer, ReceiveIntoError, Version, Worker, receive_into::Target};
use memory::BufMut;
use protocol::DataType;

/// A fetch of one published tensor into a buffer, made by [`Worker::fetch_into`]. Awaiting it gives [`Filled`].
#[derive(Debug)]
#[must_use = "nothing is fetched until it is awaited"]
pub struct FetchInto<'a> {
    worker: &'a Worker,
    peer: &'a Peer,
    name: &'a str,
    target: Arc<Target>,
    settings: Settings,
    running: Running<'a, Result<Filled, ReceiveIntoError>>,
}

impl FetchInto<'_> {
    /// As [`Fetch::timeout`](super::Fetch::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.settings.limit = limit;
        self
    }

    /// As [`Fetch::wait`](super::Fetch::wait); the version is told too.
    pub fn wait(mut self) -> Self {
        self.settings.newer_than(None);
        self
    }

    /// As [`Fetch::newer_than`](super::Fetch::newer_than); the version is told too.
    pub fn newer_than(mut self, version: Version) -> Self {
        self.settings.newer_than(Some(version));
        self
    }

    /// As [`Fetch::versioned`](super::Fetch::versioned): [`Filled::version`] tells it.
    pub fn versioned(mut self) -> Self {
        self.settings.versioned();
        self
    }
}

async fn run(
    worker: &Worker,
    peer: &Peer,
    name: &str,
    target: &Arc<Target>,
    settings: Settings,
) -> Result<Filled, ReceiveIntoError> {
    let fetched = async {
        let transfer = transfer(peer, name)?;
        let (mut held, version) = worker.fetch_held(peer, &transfer, settings.scope(), target).await?;
        let filled = target.fill_held(&transfer, &mut held, &worker.node.pools.receive).await?;
        Ok(Filled { version, ..filled })
    };
    let what = || format!("fetching `{name}` from {}", peer.name());
    let filled = worker.within(settings.limit, what, pin!(fetched)).await;
    filled.map_err(|error| ReceiveIntoError { error, buffer: target.take() })
}

impl Future for FetchInto<'_> {
    type Output = Result<Filled, ReceiveIntoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { worker, peer, name, target, settings, running } = &mut *self;
        running.poll(context, || {
            let (worker, peer, name, target, settings) = (*worker, *peer, *name, target.clone(), *settings);
            Box::pin(async move { run(worker, peer, name, &target, settings).await })
        })
    }
}

impl Worker {
    /// As [`fetch`](Self::fetch), into `buffer`, which must be long enough, of a tensor with elements of type `dtype`.
    /// The bytes land there without a copy if the buffer is of [`receive_pool`](Self::receive_pool), and the tensor is
    /// not so small that it travels inside a message; else with one copy. Nothing happens until it is awaited; its
    /// methods say how.
    ///
    /// The buffer that comes back is the one given, except in one case: if the connection broke and the fetch was made
    /// again, the peer may still be able to write it. Then the tensor comes in other memory, and the buffer goes back to
    /// its pool when the peer no longer can.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), and [`WorkerError::Mismatch`](crate::WorkerError::Mismatch) for a tensor that does not
    /// fit. The buffer comes back with the error, unless the peer may still write it.
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch). The buffer goes back to its pool once the peer can't write it any more.
    pub fn fetch_into<'a>(
        &'a self,
        peer: &'a Peer,
        name: &'a str,
        dtype: DataType,
        buffer: BufMut,
    ) -> FetchInto<'a> {
        let target = Arc::new(Target::new(dtype, buffer));
        FetchInto { worker: self, peer, name, target, settings: Settings::of(self), running: Running(None) }
    }
}

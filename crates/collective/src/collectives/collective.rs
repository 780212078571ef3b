//! [`Collective`]: a call that has its number and is not yet awaited.

use std::{fmt, future::IntoFuture, time::Duration};

use tensorwire_fabric::BoxFuture;

use crate::{
    error::GroupError,
    group::{
        barrier,
        calling::{Calling, Ranks},
    },
};

/// The work of a call.
type Work<T> = Box<dyn for<'call> FnOnce(&'call Calling) -> BoxFuture<'call, Result<T, GroupError>> + Send>;

/// A call of a [`Group`](crate::Group). It has its number, and sends nothing until it is awaited. Dropping it before it is
/// complete ends the group.
#[must_use = "the group is over if a call is not awaited"]
pub struct Collective<T> {
    calling: Calling,
    is_compared_by_work: bool,
    peers: fn(&Calling) -> Ranks,
    work: Work<T>,
}

impl<T> Collective<T> {
    /// A call whose own messages compare it. Its work exchanges messages with `peers`, each of which has this rank among its peers.
    pub(super) fn new(
        calling: Calling,
        peers: fn(&Calling) -> Ranks,
        work: impl for<'call> FnOnce(&'call Calling) -> BoxFuture<'call, Result<T, GroupError>> + Send + 'static,
    ) -> Self {
        Self { calling, is_compared_by_work: false, peers, work: Box::new(work) }
    }

    /// A call in which all ranks meet: `work` begins with the messages of a barrier.
    pub(super) fn meeting_all(
        calling: Calling,
        work: impl for<'call> FnOnce(&'call Calling) -> BoxFuture<'call, Result<T, GroupError>> + Send + 'static,
    ) -> Self {
        Self { is_compared_by_work: true, ..Self::new(calling, barrier::peers, work) }
    }

    /// The time limit, counted from when the call is awaited. Default: the group's [`timeout`](crate::Group::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.calling.set_limit(limit);
        self
    }
}

impl<T> fmt::Debug for Collective<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Collective({})", self.calling.call)
    }
}

impl<T: Send + 'static> IntoFuture for Collective<T> {
    type Output = Result<T, GroupError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { calling, is_compared_by_work, peers, work } = self;
        Box::pin(
            async move { calling.complete(is_compared_by_work, || peers(&calling), work(&calling)).await },
        )
    }
}

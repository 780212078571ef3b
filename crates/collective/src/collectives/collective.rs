//! [`Collective`]: a call that has its number and is not yet awaited.

use std::{fmt, future::IntoFuture, time::Duration};

use tensorwire_fabric::BoxFuture;

use crate::{error::GroupError, group::calling::Calling};

/// The work of a call.
type Work<T> = Box<dyn for<'call> FnOnce(&'call Calling) -> BoxFuture<'call, Result<T, GroupError>> + Send>;

/// A call of a [`Group`](crate::Group). It has its number, and sends nothing until it is awaited. Dropping it before it is
/// complete ends the group.
#[must_use = "the group is over if a call is not awaited"]
pub struct Collective<T> {
    calling: Calling,
    opens_with_neighbours: bool,
    work: Work<T>,
}

impl<T> Collective<T> {
    /// A call that is compared by messages of its own.
    pub(super) fn new(
        calling: Calling,
        work: impl for<'call> FnOnce(&'call Calling) -> BoxFuture<'call, Result<T, GroupError>> + Send + 'static,
    ) -> Self {
        Self { calling, opens_with_neighbours: false, work: Box::new(work) }
    }

    /// A call whose work begins with messages to the next rank and from the previous one.
    pub(super) fn opening_with_neighbours(self) -> Self {
        Self { opens_with_neighbours: true, ..self }
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
        let Self { calling, opens_with_neighbours, work } = self;
        Box::pin(async move { calling.complete(opens_with_neighbours, work(&calling)).await })
    }
}

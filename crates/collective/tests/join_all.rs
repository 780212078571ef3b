//! Several futures at once. The tests of the simulator include this with `#[path]`.

use futures::{
    FutureExt,
    future::{self, BoxFuture, JoinAll},
};

/// [`future::join_all`] over erased futures, so that all callers share the code that polls them: otherwise that is a
/// third of all code of a test binary with many callers.
pub(crate) fn join_all<'all, F: Future + Send + 'all>(
    futures: impl IntoIterator<Item = F>,
) -> JoinAll<BoxFuture<'all, F::Output>> {
    let mut erased = Vec::new();
    for future in futures {
        erased.push(future.boxed());
    }
    future::join_all(erased)
}

//! Running a future until a signal is set.

use std::{future::Future, pin::pin};

use futures::future::{Either, select};
use tokio::sync::watch;

/// The output of `future`, or `None` if `stop` becomes true or its sender is dropped first.
pub(crate) async fn unless<T>(mut stop: watch::Receiver<bool>, future: impl Future<Output = T>) -> Option<T> {
    let stopped = pin!(stop.wait_for(|stop| *stop));
    match select(pin!(future), stopped).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

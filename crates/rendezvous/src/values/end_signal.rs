//! Signals that turn true once, and futures that they end.

use std::{future::Future, pin::pin};

use futures::future::{Either, select};
use tokio::sync::watch;

/// Waits for `future` unless `stop` turns true first, or its sender is gone.
pub(crate) async fn unless<T>(mut stop: watch::Receiver<bool>, future: impl Future<Output = T>) -> Option<T> {
    let stopped = pin!(stop.wait_for(|stop| *stop));
    match select(pin!(future), stopped).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

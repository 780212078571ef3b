//! Runs a test on a runtime of its own, within a time limit.

use std::{future::Future, time::Duration};

use tensorwire_verbs_reactor::{TokioRuntime, timeout};

pub(crate) fn bounded(limit: Duration, test: impl Future<Output = ()>) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio.block_on(async {
        let ended = timeout(&TokioRuntime::current().unwrap(), limit, test).await;
        ended.unwrap_or_else(|_| panic!("the test hangs"));
    });
}

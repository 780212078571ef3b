//! Runs a test on a runtime of its own, within a time limit.

use std::{
    future::Future,
    pin::{Pin, pin},
    time::Duration,
};

use tokio::runtime::{Builder, Runtime};

/// On one thread.
pub(crate) fn bounded(limit: Duration, test: impl Future<Output = ()>) {
    run(&Builder::new_current_thread().enable_all().build().unwrap(), limit, pin!(test));
}

/// On several threads.
#[allow(dead_code)] // one of the binaries that include this has no such tests
pub(crate) fn bounded_on(threads: usize, limit: Duration, test: impl Future<Output = ()>) {
    run(
        &Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap(),
        limit,
        pin!(test),
    );
}

/// Erased, so that all tests share the code that runs them.
fn run(runtime: &Runtime, limit: Duration, test: Pin<&mut dyn Future<Output = ()>>) {
    #[allow(clippy::disallowed_methods)] // the watchdog of a test that runs on tokio itself
    let ended = runtime.block_on(async { tokio::time::timeout(limit, test).await });
    ended.unwrap_or_else(|_| panic!("the test hangs: it is not over after {limit:?}"));
}

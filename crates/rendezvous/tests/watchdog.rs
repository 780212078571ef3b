//! A watchdog for tests that may block their thread. Unit tests include this file, too.

use std::{future::Future, pin::Pin, sync::mpsc, time::Duration};

/// Runs `test` on a thread and a runtime of its own. It fails after a minute, even if it blocks that thread.
pub(crate) fn bounded<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
    run(Box::new(|| Box::pin(test())));
}

/// Erased, so that all tests share the code that runs them.
type Test = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

fn run(test: Test) {
    let (done, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
        done.send(()).unwrap();
    });
    match wait.recv_timeout(Duration::from_secs(60)) {
        Ok(()) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

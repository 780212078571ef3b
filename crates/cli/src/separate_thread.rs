//! Work that reads or writes files: in a thread of its own, because peers are answered meanwhile.

use std::thread;

use tokio::sync::oneshot;

use crate::failure::Failure;

/// Runs `work` in a new thread.
///
/// # Cancel safety
/// The thread continues if the future is dropped.
pub(crate) async fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (end, result) = oneshot::channel();
    // The receiver is gone if the command is about to end.
    thread::Builder::new().spawn(move || end.send(work())).map_err(Failure::Thread)?;
    result.await.unwrap_or(Err(Failure::ThreadGone))
}

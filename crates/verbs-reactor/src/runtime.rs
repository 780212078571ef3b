//! What this project needs of a runtime, so that tokio and the simulator are interchangeable.

use std::{fmt, future::Future, pin::pin, time::Duration};

use futures::future::{Either, select};

/// A boxed, sendable future.
pub type BoxFuture<'a, T> = futures::future::BoxFuture<'a, T>;

/// Spawns tasks, tells the time and gives random numbers.
pub trait Runtime: Send + Sync + fmt::Debug + 'static {
    /// Runs `task` to its end in the background. `name` appears in traces.
    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>);

    /// A future that ends `duration` from now.
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;

    /// Monotonic time since some fixed moment.
    fn now(&self) -> Duration;

    /// A random number; unpredictable for peers outside the simulator.
    fn random(&self) -> u64;
}

/// The time ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the deadline passed")]
pub struct Elapsed;

/// Runs `future` for at most `limit`.
///
/// # Errors
/// [`Elapsed`]; `future` has been dropped then.
///
/// # Cancel safety
/// As cancel-safe as `future`.
pub async fn timeout<F: Future>(
    runtime: &dyn Runtime,
    limit: Duration,
    future: F,
) -> Result<F::Output, Elapsed> {
    match select(pin!(future), runtime.sleep(limit)).await {
        Either::Left((output, _)) => Ok(output),
        Either::Right(((), _)) => Err(Elapsed),
    }
}

/// The tokio runtime that was current when this was made.
#[derive(Debug, Clone)]
pub struct TokioRuntime {
    handle: tokio::runtime::Handle,
    start: std::time::Instant,
}

impl TokioRuntime {
    /// Uses the runtime this is called on; `None` outside one.
    #[allow(clippy::disallowed_methods)] // the one place that reads the clock
    pub fn current() -> Option<Self> {
        let handle = tokio::runtime::Handle::try_current().ok()?;
        Some(Self { handle, start: std::time::Instant::now() })
    }
}

impl Runtime for TokioRuntime {
    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>) {
        tracing::trace!(name, "task spawned");
        self.handle.spawn(task);
    }

    #[allow(clippy::disallowed_methods)] // the one place that sleeps
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration))
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        if getrandom::fill(&mut bytes).is_err() {
            // Without the system's entropy (seccomp, early boot), the hasher's keys are the next best thing.
            use std::hash::{BuildHasher, Hasher};
            return std::collections::hash_map::RandomState::new().build_hasher().finish();
        }
        u64::from_le_bytes(bytes)
    }
}

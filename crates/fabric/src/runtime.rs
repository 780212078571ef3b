//! The operations that this project needs of a runtime. Tokio and the simulator implement them, so they are
//! interchangeable.

use std::{
    fmt,
    future::{Future, poll_fn},
    io, panic,
    pin::pin,
    task::Poll,
    time::Duration,
};

/// A boxed, sendable future.
pub type BoxFuture<'a, T> = futures::future::BoxFuture<'a, T>;

/// Spawns tasks, measures time and gives random numbers.
pub trait Runtime: Send + Sync + fmt::Debug + 'static {
    /// Runs `task` to its end in the background. `name` appears in traces.
    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>);

    /// A future that ends `duration` from now.
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;

    /// Monotonic time since some fixed moment.
    fn now(&self) -> Duration;

    /// A random number. Outside the simulator, peers cannot predict it. Keys, tokens and nonces are made of these
    /// numbers, so each must be as strong as the others: see [`check_random`](Self::check_random).
    fn random(&self) -> u64;

    /// Checks that the operating system gives random numbers, before anything relies on them. A worker does not start
    /// without them.
    ///
    /// # Errors
    /// Those of the operating system.
    fn check_random(&self) -> io::Result<()> {
        Ok(())
    }
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
    let (mut future, mut timer) = (pin!(future), None);
    poll_fn(|context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        // Most calls need no timer.
        let timer = timer.get_or_insert_with(|| runtime.sleep(limit));
        timer.as_mut().poll(context).map(|()| Err(Elapsed))
    })
    .await
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

    /// Checks that the runtime has drivers for sockets and for time.
    ///
    /// # Errors
    /// The missing driver, and the remedy.
    #[allow(clippy::disallowed_methods)] // as in `sleep`
    pub fn check_drivers(&self) -> io::Result<()> {
        let _context = self.handle.enter();
        // Tokio reports a missing driver only by a panic.
        let socket = panic::catch_unwind(|| drop(tokio::net::UnixDatagram::unbound()));
        let timer = panic::catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO)));
        let missing =
            |driver| io::Error::other(format!("its {driver} driver is off: build it with enable_all()"));
        socket.map_err(|_| missing("io"))?;
        timer.map_err(|_| missing("time"))
    }
}

impl Runtime for TokioRuntime {
    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>) {
        log!(TRACE, name, "task spawned");
        self.handle.spawn(task);
    }

    #[allow(clippy::disallowed_methods)] // the one place that sleeps
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        // The caller may be awaited outside of tokio.
        let _context = self.handle.enter();
        Box::pin(tokio::time::sleep(duration))
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn random(&self) -> u64 {
        match getrandom::u64() {
            Ok(number) => number,
            Err(error) => {
                // A source that worked before fails if the process has lost its right to it, for example by a seccomp
                // filter. Any replacement would be a secret that an attacker can guess unnoticed.
                log!(ERROR, %error, "the operating system no longer gives random numbers: aborting this process");
                std::process::abort()
            }
        }
    }

    fn check_random(&self) -> io::Result<()> {
        getrandom::u64().map(drop).map_err(io::Error::other)
    }
}

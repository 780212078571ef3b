//! Time, in tests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use tensorwire_fabric::{BoxFuture, Runtime};

/// A clock that a test sets.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock(Arc<AtomicU64>);

impl Clock {
    pub(crate) fn pass(&self, time: Duration) {
        self.0.fetch_add(u64::try_from(time.as_nanos()).unwrap(), Ordering::Relaxed);
    }
}

impl Runtime for Clock {
    fn spawn(&self, name: &'static str, _: BoxFuture<'static, ()>) {
        panic!("{name} is spawned");
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        let (clock, end) = (self.clone(), self.now() + duration);
        Box::pin(std::future::poll_fn(move |_| match clock.now() >= end {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }))
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    fn random(&self) -> u64 {
        4
    }
}

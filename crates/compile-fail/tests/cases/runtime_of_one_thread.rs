//! All threads that await share one runtime.

use std::{rc::Rc, time::Duration};

use tensorwire_fabric::{BoxFuture, Runtime};

#[derive(Debug)]
struct OfOneThread(Rc<()>);

impl Runtime for OfOneThread {
    fn spawn(&self, _: &'static str, _: BoxFuture<'static, ()>) {}

    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn random(&self) -> u64 {
        0
    }
}

fn main() {}

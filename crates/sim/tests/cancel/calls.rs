//! Cancelled calls.

use std::{
    future::IntoFuture as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tensorwire_fabric::Runtime as _;
use tensorwire_protocol::Status;
use tensorwire_rendezvous::calls::Call;

use super::{
    polled,
    workers::{Two, every_k_beside_fetches},
};

/// What this file cancels.
pub(super) const CASES: [&str; 1] = ["call"];

/// Set while a handler runs.
struct Running(Arc<AtomicBool>);

impl Running {
    fn begin(is_running: &Arc<AtomicBool>) -> Self {
        assert!(!is_running.swap(true, Ordering::Relaxed), "a call ran twice");
        Self(is_running.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[test]
fn s3_a_call_given_up_ends_its_handler_and_leaves_nothing_behind() {
    every_k_beside_fetches("call", &async |two: &Two, polls| {
        let is_running = Arc::new(AtomicBool::new(false));
        let flag = is_running.clone();
        let echo = move |call: Call| {
            let running = Running::begin(&flag);
            async move {
                let _held = running;
                Ok::<_, Status>(call.into_arguments())
            }
        };
        let handling = two.server.handle("echo", echo).unwrap();
        let answer = polled(polls, two.peer.call("echo", two.tensor(5)).into_future()).await;
        drop(handling);
        two.fetches(1).await;
        // The task of the handler drops it when it runs next.
        while is_running.load(Ordering::Relaxed) {
            two.handle.runtime().sleep(Duration::from_millis(1)).await;
        }
        answer.map(|answer| two.handle.verify(5, answer.unwrap()[0].bytes())).is_some()
    });
}

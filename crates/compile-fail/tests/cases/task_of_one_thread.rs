//! A task may continue on another thread.

use std::rc::Rc;

use tensorwire_fabric::{QueuePair, Runtime};

fn spawn(runtime: &dyn Runtime, queue_pair: QueuePair) {
    let own = Rc::new(());
    runtime.spawn("task", Box::pin(async move {
        let _ = queue_pair.next_arrival().await;
        drop(own);
    }));
}

fn main() {}

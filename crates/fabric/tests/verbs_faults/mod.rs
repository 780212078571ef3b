//! Failures of RDMA queue pairs, their calls to the device, and the device's limits. Like the contract over RDMA
//! (`tests/verbs.rs`), these tests need a device, and a plain run leaves them out.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

mod faults;
mod held;
mod limits;
#[cfg(feature = "planted-bugs")]
mod planted;
mod rounds;
mod thrift;

use std::{cell::RefCell, sync::Arc};

use tensorwire_fabric::{Fabric, Runtime, Wait};
use tensorwire_testpoints::counted;
use tensorwire_verbs_reactor::{Rdma, VerbsFabric};

use crate::{contract::Setup, rdma_devices};

const SETUP: Setup = Setup { fabric, peer_address: None };

thread_local! {
    /// The fabrics of the test that runs on this thread: left, right, left of the next pair and so on.
    static MADE: RefCell<Vec<Arc<VerbsFabric>>> = const { RefCell::new(Vec::new()) };
    /// The settings of fabrics that are made from now on.
    static PREPARATION: RefCell<(Rdma, Wait)> = RefCell::default();
}

/// Makes the two ends of a pair one after the other. No retries if no receive is posted: one must always be posted.
fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    let ends = rdma_devices::ends();
    let is_left = MADE.with_borrow(Vec::len).is_multiple_of(2);
    let device = if is_left { ends.left } else { ends.right };
    let (settings, wait) = PREPARATION.with_borrow(Clone::clone);
    let settings = Rdma { device, receiver_retry_count: Some(0), ..settings };
    let fabric = Arc::new(VerbsFabric::open(runtime, &settings).unwrap().with_wait(wait));
    MADE.with_borrow_mut(|made| made.push(fabric.clone()));
    fabric
}

/// Prepares the pairs that this test makes.
fn prepare(settings: Rdma, wait: Wait) {
    PREPARATION.set((settings, wait));
}

/// The calls of this process to its devices so far. If only the left end of a pair writes, these are the left end's
/// calls.
#[derive(Debug, Clone, Copy)]
struct Asked {
    posts: u64,
    requests: u64,
    signals: u64,
    polls: u64,
}

fn asked_so_far() -> Asked {
    Asked {
        posts: counted("doorbells"),
        requests: counted("requests of doorbells"),
        signals: counted("signalled requests of doorbells"),
        polls: counted("polls of completion queues"),
    }
}

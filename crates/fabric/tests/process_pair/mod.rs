//! The contract between two processes: the test and the left side are in this one, the right side is in another.
//!
//! The other process is the test binary again, with a fabric, domains and queue pairs of its own, and the pages of
//! right's pools. The tests use the right side through [`away`], whose half of a queue pair is here and whose device is
//! there: operations are posted there, and events there are reported here. So the tests are the same as those with both
//! sides in one process.
//!
//! Only the test's process knows the grants inside a block. Right grants and exposes whole blocks to the fabric, as an
//! RDMA adapter does, so on every fabric the rules expect only as much as of an adapter.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

mod away;
mod message;
mod other;
mod pages;
mod serve;
mod wire;

use std::{
    cell::RefCell,
    env,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use futures::FutureExt;
use tensorwire_fabric::{Fabric, Runtime};

use crate::contract::{Flavour, Test, bounded, grant_whole_blocks};

use away::AwayFabric;
use other::Other;

/// Set in the other process.
const OTHER: &str = "TENSORWIRE_TEST_OTHER_PROCESS";

/// The two ends of a test.
pub(crate) struct Ends {
    /// Makes the fabric of one side, in the process of that side.
    pub(crate) fabric: fn(Arc<dyn Runtime>, Side) -> Arc<dyn Fabric>,
    /// The name of a test that calls [`run`]. The other process runs this test.
    pub(crate) entrance: &'static str,
}

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// In the test's process.
    Left,
    /// In the other process.
    Right,
}

thread_local! {
    /// The other process of the test that runs on this thread.
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

struct Current {
    ends: &'static Ends,
    other: Arc<Other>,
    has_left: bool,
}

/// Processes between two tests. They are reused because starting one takes longer than many tests.
static IDLE: Mutex<Vec<Arc<Other>>> = Mutex::new(Vec::new());

/// Like [`bounded`], with another process for [`fabric`].
pub(crate) fn run<T, F>(ends: &'static Ends, flavour: Flavour, test: T)
where
    T: FnOnce(Arc<dyn Runtime>) -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    run_erased(ends, flavour, Box::new(|runtime| test(runtime).boxed_local()));
}

fn run_erased(ends: &'static Ends, flavour: Flavour, test: Test) {
    if env::var_os(OTHER).is_some() {
        return serve::serve(ends);
    }
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let other = idle.unwrap_or_else(|| Other::start(ends.entrance));
    let its_other = other.clone();
    let begin = move |runtime| {
        grant_whole_blocks();
        CURRENT.set(Some(Current { ends, other: its_other, has_left: false }));
        test(runtime)
    };
    match catch_unwind(AssertUnwindSafe(|| bounded(flavour, begin))) {
        Ok(()) => {
            other.end_test();
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(other);
        }
        Err(panic) => {
            other.kill();
            resume_unwind(panic);
        }
    }
}

/// Ends the other process of the test that runs on this thread.
pub(crate) fn kill() {
    CURRENT.with_borrow(|current| current.as_ref().expect("a test of `run` runs here").other.kill());
}

/// The first fabric that a test makes is left's. All others are in the other process.
pub(crate) fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    CURRENT.with_borrow_mut(|current| {
        let current = current.as_mut().expect("called by a test of `run`, on its own thread");
        if std::mem::replace(&mut current.has_left, true) {
            Arc::new(AwayFabric::make(current.other.clone()))
        } else {
            (current.ends.fabric)(runtime, Side::Left)
        }
    })
}

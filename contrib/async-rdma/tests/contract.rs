//! The fabric contract over async-rdma. `scripts/rxe-vm/async-rdma` runs this over Soft-RoCE and compares what passes
//! with `contract.txt`.
//!
//! Both ends use the first device, or those named by `TENSORWIRE_TEST_RDMA=LEFT,RIGHT`.

#[path = "../../../crates/verbs-reactor/tests/contract/mod.rs"]
mod contract;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tensorwire_async_rdma::{AsyncRdmaFabric, PathMtu, Settings};
use verbs_reactor::{Fabric, Runtime};

const DEVICES: &str = "TENSORWIRE_TEST_RDMA";

const SETUP: contract::Setup = contract::Setup { fabric, peer_host: None };

macro_rules! needs_a_device {
    ($($module:ident $flavour:ident)*) => {
        $(contract_suite!(
            @attribute [ignore = "runs over async-rdma: use scripts/rxe-vm/async-rdma"],
            $module, $flavour, crate::SETUP, crate::contract::bounded
        );)*
    };
}

needs_a_device!(current_thread CurrentThread two_workers TwoWorkers);

/// The suite makes the two ends of a pair one after the other.
fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let devices = std::env::var(DEVICES).unwrap_or_default();
    let devices: Vec<&str> = devices.split(',').filter(|name| !name.is_empty()).collect();
    let device = match devices.as_slice() {
        [] => None,
        some => Some(some[MADE.fetch_add(1, Ordering::Relaxed) % some.len()].to_owned()),
    };
    Arc::new(AsyncRdmaFabric::new(
        runtime,
        Settings { device, mtu: PathMtu::Bytes4096, ..Settings::default() },
    ))
}

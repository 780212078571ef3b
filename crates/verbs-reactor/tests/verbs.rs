//! The fabric contract over RDMA. A plain run leaves it out, and counts it as skipped; with `--ignored` it runs, and
//! fails where there is no device.
//!
//! Both ends use the first device with an active port, or those named by `TENSORWIRE_TEST_RDMA=LEFT,RIGHT`.
//! `scripts/rxe-vm/contract` runs this over Soft-RoCE.

mod contract;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use verbs_reactor::{
    Fabric, Runtime,
    verbs::{VerbsFabric, VerbsSettings},
};

const DEVICES: &str = "TENSORWIRE_TEST_RDMA";

const SETUP: contract::Setup = contract::Setup { fabric, peer_host: None };

macro_rules! needs_a_device {
    ($($module:ident $flavour:ident)*) => {
        $(contract_suite!(
            @attribute [ignore = "needs an RDMA device: run it with scripts/rxe-vm/contract, or with --ignored where there is one"],
            $module, $flavour, crate::SETUP, crate::contract::bounded
        );)*
    };
}

needs_a_device!(current_thread CurrentThread two_workers TwoWorkers);

/// The suite makes the two ends of a pair one after the other.
#[allow(clippy::unwrap_used)] // a device that is there and can't be opened is a failed test
fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let devices = std::env::var(DEVICES).unwrap_or_default();
    let devices: Vec<&str> = devices.split(',').filter(|name| !name.is_empty()).collect();
    let device = match devices.as_slice() {
        [] => None,
        some => Some(some[MADE.fetch_add(1, Ordering::Relaxed) % some.len()].to_owned()),
    };
    Arc::new(VerbsFabric::open(runtime, &VerbsSettings { device, ..VerbsSettings::default() }).unwrap())
}

//! The fabric contract over RDMA, on machines that have it; elsewhere each rule is skipped and says so.
//!
//! Both ends use the first device with an active port, or those named by `TENSORWIRE_TEST_RDMA=LEFT,RIGHT`.
//! `scripts/rxe-vm/contract` runs this over Soft-RoCE.

mod contract;

use std::{
    io::Write,
    sync::{
        Arc, Once,
        atomic::{AtomicUsize, Ordering},
    },
};

use contract::Flavour;
use verbs_reactor::{
    Fabric, Runtime,
    verbs::{Availability, VerbsFabric, VerbsSettings},
};

const DEVICES: &str = "TENSORWIRE_TEST_RDMA";

const SETUP: contract::Setup = contract::Setup { fabric, peer_host: None };

contract_suite!(@flavour current_thread, CurrentThread, crate::SETUP, crate::where_there_is_a_device);
contract_suite!(@flavour two_workers, TwoWorkers, crate::SETUP, crate::where_there_is_a_device);

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

#[allow(clippy::panic)] // a suite that was asked for and can't run is a failed test
fn where_there_is_a_device<T, F>(flavour: Flavour, test: T)
where
    T: FnOnce(Arc<dyn Runtime>) -> F + Send + 'static,
    F: Future<Output = ()>,
{
    static SAID: Once = Once::new();
    match Availability::probe() {
        Availability::Devices(_) => contract::bounded(flavour, test),
        missing if std::env::var_os(DEVICES).is_some() => panic!("{DEVICES} is set, but: {missing:?}"),
        missing => SAID.call_once(|| {
            // Past the test runner's capture: a skip is never silent.
            let _ =
                writeln!(std::io::stderr(), "SKIPPED, all of this suite: no RDMA device here ({missing:?})");
        }),
    }
}

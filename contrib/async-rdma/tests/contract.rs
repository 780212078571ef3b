//! The fabric contract over async-rdma. `scripts/rxe-vm/async-rdma` runs this over Soft-RoCE and compares the results
//! with `contract.txt`.
//!
//! The environment names the devices of the two ends: see `rdma_devices`.

#[path = "../../../crates/fabric/tests/contract/mod.rs"]
mod contract;
#[path = "../../../crates/fabric/tests/rdma_devices/mod.rs"]
mod rdma_devices;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tensorwire_async_rdma::{AsyncRdmaFabric, PathMtu, Settings};
use tensorwire_fabric::{Fabric, Runtime};

const SETUP: contract::Setup = contract::Setup { fabric, peer_address: None };

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
    let ends = rdma_devices::ends();
    let is_left = MADE.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    let device = if is_left { ends.left } else { ends.right };
    Arc::new(AsyncRdmaFabric::new(
        runtime,
        Settings { device, mtu: PathMtu::Bytes4096, ..Settings::default() },
    ))
}

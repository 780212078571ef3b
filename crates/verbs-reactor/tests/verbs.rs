//! The fabric contract over RDMA. A plain run leaves it out, and counts it as skipped; with `--ignored` it runs, and
//! fails where there is no device.
//!
//! Which devices the two ends use is in the environment: see `rdma_devices`. `scripts/rxe-vm/suite` runs this over
//! Soft-RoCE, with all other tests that need a device.

mod contract;
mod process_pair;
mod rdma_devices;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use verbs_reactor::{
    Fabric, Runtime,
    verbs::{VerbsFabric, VerbsSettings},
};

use process_pair::Side;

/// Both devices in one process.
const SETUP: contract::Setup = contract::Setup { fabric, peer_host: None };

/// Left's device in the test's process, right's in another.
const APART: contract::Setup = contract::Setup { fabric: process_pair::fabric, peer_host: None };
const ENDS: process_pair::Ends =
    process_pair::Ends { fabric: fabric_of, entrance: "two_processes::writes::length_0" };

macro_rules! needs_a_device {
    ($($module:ident $flavour:ident $setup:ident $run:path,)*) => {
        $(contract_suite!(
            @attribute [ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"],
            $module, $flavour, crate::$setup, $run
        );)*
    };
}

// Each flavour takes minutes in the virtual machine: runtimes of one thread are those of the two processes.
needs_a_device! {
    two_workers TwoWorkers SETUP crate::contract::bounded,
    two_processes CurrentThread APART crate::between_processes,
}

fn between_processes<T, F>(flavour: contract::Flavour, test: T)
where
    T: FnOnce(Arc<dyn Runtime>) -> F + Send + 'static,
    F: Future<Output = ()>,
{
    process_pair::run(&ENDS, flavour, test);
}

/// The suite makes the two ends of a pair one after the other.
fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let is_left = MADE.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    fabric_of(runtime, if is_left { Side::Left } else { Side::Right })
}

#[allow(clippy::unwrap_used)] // a device that is there and can't be opened is a failed test
fn fabric_of(runtime: Arc<dyn Runtime>, side: Side) -> Arc<dyn Fabric> {
    let ends = rdma_devices::ends();
    let device = if side == Side::Left { ends.left } else { ends.right };
    // No retries for a receive that is not posted: there must always be one.
    let settings = VerbsSettings { device, receiver_retry_count: Some(0), ..VerbsSettings::default() };
    Arc::new(VerbsFabric::open(runtime, &settings).unwrap())
}

mod environment {
    use super::rdma_devices::{Ends, ends_from};

    fn both(left: &str, right: &str) -> Result<Ends, String> {
        Ok(Ends { left: Some(left.to_owned()), right: Some(right.to_owned()) })
    }

    #[test]
    fn the_devices_of_a_pair_are_read() {
        assert_eq!(ends_from(None, None), Ok(Ends { left: None, right: None }));
        assert_eq!(ends_from(Some("rxe1,rxe2"), None), both("rxe1", "rxe2"));
        assert_eq!(ends_from(Some("rxe1"), None), both("rxe1", "rxe1"));
        assert_eq!(ends_from(None, Some("mlx5_0")), both("mlx5_0", "mlx5_0"));
        assert_eq!(ends_from(Some("rxe1,rxe2"), Some("mlx5_0")), both("rxe1", "rxe2"));
    }

    #[test]
    fn a_pair_that_is_none_is_refused_by_name() {
        for wrong in [",", "rxe1,", ",rxe2", "a,b,c"] {
            let problem = ends_from(Some(wrong), None).unwrap_err();
            assert!(problem.contains("TENSORWIRE_TEST_RDMA") && problem.contains(wrong), "{problem}");
        }
    }
}

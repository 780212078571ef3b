//! The fabric contract over RDMA. A plain run leaves it out, and counts it as skipped; with `--ignored` it runs, and
//! fails where there is no device.
//!
//! The environment names the devices of the two ends: see `rdma_devices`. `scripts/rxe-vm/suite` runs this over
//! Soft-RoCE, with all other tests that need a device.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tensorwire_fabric::{ConnectParams, ConnectionData, Fabric, FabricError, LossCause, Role, Runtime};
use tensorwire_verbs_reactor::{Rdma, VerbsFabric};

use crate::{
    contract::{
        self, Flavour,
        pair::{DEPTHS, Pair},
    },
    process_pair::{self, Side},
    rdma_devices,
};

/// Both devices in one process.
const SETUP: contract::Setup = contract::Setup { fabric, peer_address: None };

/// Left's device is in the test's process, right's in another.
const APART: contract::Setup = contract::Setup { fabric: process_pair::fabric, peer_address: None };
const ENDS: process_pair::Ends =
    process_pair::Ends { fabric: fabric_of, entrance: "verbs::two_processes::writes::length_0" };

macro_rules! needs_a_device {
    ($($module:ident $flavour:ident $setup:ident $run:path,)*) => {
        $(contract_suite!(
            @attribute [ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"],
            $module, $flavour, crate::verbs::$setup, $run
        );)*
    };
}

// Each flavour takes minutes in the virtual machine, so the rules between two processes run with single-threaded
// runtimes only.
needs_a_device! {
    two_workers TwoWorkers SETUP crate::contract::bounded,
    two_processes CurrentThread APART crate::verbs::between_processes,
}

fn between_processes<T, F>(flavour: Flavour, test: T)
where
    T: FnOnce(Arc<dyn Runtime>) -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    process_pair::run(&ENDS, flavour, test);
}

/// The suite makes the two ends of a pair one after the other.
fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let is_left = MADE.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    fabric_of(runtime, if is_left { Side::Left } else { Side::Right })
}

fn fabric_of(runtime: Arc<dyn Runtime>, side: Side) -> Arc<dyn Fabric> {
    let ends = rdma_devices::ends();
    let device = if side == Side::Left { ends.left } else { ends.right };
    // No retries if no receive is posted: one must always be posted.
    let settings = Rdma { device, receiver_retry_count: Some(0), ..Rdma::default() };
    Arc::new(VerbsFabric::open(runtime, &settings).unwrap())
}

/// Only the device's retries detect the death: the peer sends no farewell.
#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_peer_sigkill_ends_a_write_with_the_devices_retries() {
    let test = |runtime: Arc<dyn Runtime>| async move {
        let pair = Pair::new(APART, runtime.clone()).await;
        let grant = pair.grant_right(4096);
        pair.works(&pair.to_right, &pair.to_left).await;
        process_pair::kill();
        let (source, start) = (pair.left.source.filled(4096, 2), runtime.now());
        let lost = pair.step("a write to the dead", pair.to_right.write(source, grant.range)).await;
        let took = runtime.now().saturating_sub(start);
        let is_lost = matches!(lost, Err(FabricError::PeerLost { cause: LossCause::RetryExceeded, .. }));
        assert!(is_lost, "the write ended with {lost:?}");
        assert!(took < Duration::from_secs(10), "noticing took {took:?}");
        pair.step("the close", pair.to_right.close()).await;
    };
    let run = AssertUnwindSafe(|| between_processes(Flavour::CurrentThread, test));
    // The support code fails a test whose other process has ended.
    let message = catch_unwind(run).unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("the other process has ended"), "{message}");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn connecting_to_nobody_or_by_garbage_is_refused_in_time() {
    contract::bounded(Flavour::CurrentThread, |runtime| async move {
        let prepare = |side| {
            let domain = fabric_of(runtime.clone(), side).open_domain().unwrap();
            domain.prepare(DEPTHS).unwrap()
        };
        let (alone, silent) = (prepare(Side::Left), prepare(Side::Right));
        let params =
            |peer, role| ConnectParams { peer, role, peer_address: None, limit: Duration::from_millis(300) };
        let result = alone.connect(params(silent.connection_data(), Role::Acceptor)).await;
        assert!(matches!(result, Err(FabricError::ConnectTimeout { limit_ms: 300, .. })), "{result:?}");
        let garbage = ConnectionData(vec![1, 2, 3]);
        let result = silent.connect(params(garbage, Role::Dialer)).await;
        assert!(matches!(result, Err(FabricError::Connect { .. })), "{result:?}");
    });
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

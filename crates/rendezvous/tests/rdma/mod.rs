//! Workers of tests over any fabric, RDMA devices among them, and the patience that an emulated machine needs.
//!
//! Workers over verbs take turns at the devices that `rdma_devices` names, so that two of them have one each.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test
#![allow(unreachable_pub, dead_code)] // each test binary compiles this as its own module, and uses what it needs

#[path = "../../../verbs-reactor/tests/rdma_devices/mod.rs"]
pub mod rdma_devices;

use std::{
    cell::Cell,
    env,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use rdma_devices::Ends;
use rendezvous::{Worker, WorkerBuilder};
use verbs_reactor::{FabricKind, verbs::Rdma};

/// `limit`, as much longer as `TENSORWIRE_TEST_PATIENCE` says: emulated machines are slow.
pub fn patient(limit: Duration) -> Duration {
    let patience = env::var("TENSORWIRE_TEST_PATIENCE").ok();
    limit * patience.map_or(1, |value| value.parse().expect("TENSORWIRE_TEST_PATIENCE is a number"))
}

/// One of a test's two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Left,
    Right,
}

/// `builder` over `kind`, and nothing else; over verbs by turns at one end and the other.
pub fn over(builder: WorkerBuilder, kind: FabricKind) -> WorkerBuilder {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let is_left = STARTED.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    over_at(builder, kind, if is_left { End::Left } else { End::Right })
}

/// The same at `end`.
pub fn over_at(builder: WorkerBuilder, kind: FabricKind, end: End) -> WorkerBuilder {
    builder.require(kind).rdma(|rdma| *rdma = device_at(end))
}

/// The device at `end`.
pub fn device_at(end: End) -> Rdma {
    let Ends { left, right } = rdma_devices::ends();
    let device = if end == End::Left { left } else { right };
    Rdma { device, ..Rdma::default() }
}

/// All that `worker` knows moves over `kind`.
pub fn assert_moves_over(worker: &Worker, kind: FabricKind) {
    let peers = worker.peers();
    assert!(!peers.is_empty(), "{} has no peer", worker.name());
    for peer in peers {
        assert_eq!(peer.transport, Some(kind), "{} to {}: {:?}", worker.name(), peer.name, peer.not_used);
    }
}

thread_local! {
    static ONLY_VERBS: Cell<bool> = const { Cell::new(false) };
}

/// The fabrics that a test runs on: `usual`, or verbs alone inside [`only_verbs`].
pub fn kinds(usual: &'static [FabricKind]) -> &'static [FabricKind] {
    if ONLY_VERBS.get() { &[FabricKind::VERBS] } else { usual }
}

/// Runs `test`, a test of several fabrics, over verbs.
pub fn only_verbs(test: fn()) {
    ONLY_VERBS.set(true);
    test();
}

/// Runs tests of several fabrics over verbs too, where there is a device.
#[allow(unused_macros)] // as above: not every test binary has such tests
macro_rules! over_verbs {
    ($($test:ident)*) => {
        mod verbs {
            $(
                #[test]
                #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
                fn $test() {
                    crate::rdma::only_verbs(super::$test);
                }
            )*
        }
    };
}
#[allow(unused_imports)]
pub(crate) use over_verbs;

//! Tests of two workers in this process, over each fabric.

#![allow(unreachable_pub)] // each test binary compiles this as its own module

use std::{
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering},
};

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Worker, WorkerBuilder};

use crate::rdma::{End, over_at};

/// `builder` over `kind` alone; over verbs by turns with one device and the other.
pub fn over(builder: WorkerBuilder, kind: FabricKind) -> WorkerBuilder {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let is_left = STARTED.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    over_at(builder, kind, if is_left { End::Left } else { End::Right })
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
macro_rules! over_verbs {
    ($($test:ident)*) => {
        mod verbs {
            $(
                #[test]
                #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
                fn $test() {
                    crate::fabrics::only_verbs(super::$test);
                }
            )*
        }
    };
}
pub(crate) use over_verbs;

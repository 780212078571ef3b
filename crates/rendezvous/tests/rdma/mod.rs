//! Workers of tests over any fabric, RDMA devices among them, and the patience that an emulated machine needs.
//!
//! Tests over verbs are left out of a plain run; with `--ignored` they fail where there is no device. Workers take
//! turns at the devices of `TENSORWIRE_TEST_RDMA=LEFT,RIGHT`, so that two of them have one each; or all use
//! `TENSORWIRE_TEST_DEVICE=NAME`, or the first device with an active port.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test
#![allow(unreachable_pub, dead_code)] // each test binary compiles this as its own module, and uses what it needs

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rendezvous::{Worker, WorkerBuilder};
use verbs_reactor::{
    FabricKind, TokioRuntime,
    verbs::{VerbsFabric, VerbsSettings},
};

/// `limit`, as much longer as `TENSORWIRE_TEST_PATIENCE` says: emulated machines are slow.
pub fn patient(limit: Duration) -> Duration {
    let patience = env::var("TENSORWIRE_TEST_PATIENCE").ok();
    limit * patience.map_or(1, |value| value.parse().expect("TENSORWIRE_TEST_PATIENCE is a number"))
}

/// The device of the worker that starts next.
fn next_device() -> Option<String> {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    if let Ok(devices) = env::var("TENSORWIRE_TEST_RDMA") {
        let devices: Vec<&str> = devices.split(',').filter(|name| !name.is_empty()).collect();
        let turn = STARTED.fetch_add(1, Ordering::Relaxed);
        return turn.checked_rem(devices.len()).map(|turn| devices[turn].to_owned());
    }
    env::var("TENSORWIRE_TEST_DEVICE").ok()
}

/// `builder` over `kind`, and nothing else. Call it inside a tokio runtime.
pub fn over(builder: WorkerBuilder, kind: FabricKind) -> WorkerBuilder {
    if kind != FabricKind::Verbs {
        return builder.require(kind);
    }
    let settings = VerbsSettings { device: next_device(), ..VerbsSettings::default() };
    let runtime = Arc::new(TokioRuntime::current().unwrap());
    builder.local_fabrics(vec![Arc::new(VerbsFabric::open(runtime, &settings).unwrap())])
}

/// All that `worker` knows moves over `kind`.
pub fn assert_moves_over(worker: &Worker, kind: FabricKind) {
    let peers = worker.peers();
    assert!(!peers.is_empty(), "{} has no peer", worker.name());
    for peer in peers {
        assert_eq!(peer.transport, Some(kind), "{} to {}: {:?}", worker.name(), peer.name, peer.not_used);
    }
}

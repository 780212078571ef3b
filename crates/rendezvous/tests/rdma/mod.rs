//! Workers of tests over any fabric, RDMA devices among them, and the patience that an emulated machine needs.
//!
//! Workers over verbs take turns at the devices that `rdma_devices` names, so that two of them have one each.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test
#![allow(unreachable_pub)] // each test binary compiles this as its own module

#[path = "../../../fabric/tests/rdma_devices/mod.rs"]
pub mod rdma_devices;

use std::{env, time::Duration};

use rdma_devices::Ends;
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::WorkerBuilder;
use tensorwire_verbs_reactor::Rdma;

/// `limit` times `TENSORWIRE_TEST_PATIENCE`: emulated machines are slow.
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

/// The blocks in which most tests allocate memory: to make those of 16 MiB, as by default, takes longer than most tests.
const BLOCK_BYTES: usize = 1 << 20;

/// `builder` over `kind`, and nothing else; over verbs at `end`. It allocates memory in small blocks.
pub fn over_at(builder: WorkerBuilder, kind: FabricKind, end: End) -> WorkerBuilder {
    let builder = builder.memory(|memory| memory.block_bytes = BLOCK_BYTES);
    builder.require(kind).rdma(|rdma| *rdma = device_at(end))
}

/// The device at `end`.
pub fn device_at(end: End) -> Rdma {
    let Ends { left, right } = rdma_devices::ends();
    let device = if end == End::Left { left } else { right };
    Rdma { device, ..Rdma::default() }
}

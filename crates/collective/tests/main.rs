//! Groups of workers in one process. A suite is a module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../rendezvous/tests/block_on.rs"]
mod block_on;
mod durations;
mod group;
mod join_all;
mod launch;
mod outside;
mod pair;
#[path = "../../rendezvous/tests/rdma/mod.rs"]
mod rdma;
mod reduction;
#[cfg(any(feature = "redis", feature = "etcd"))]
mod skipped;
#[path = "../../rendezvous/tests/spans.rs"]
mod spans;
mod store;

//! The command `tensorwire` as processes, in one binary: a suite is a module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "../../rendezvous/tests/namespaces/mod.rs"]
mod namespaces;
#[path = "../../fabric/tests/own_network/mod.rs"]
mod own_network;
#[path = "../../fabric/tests/rdma_devices/mod.rs"]
mod rdma_devices;
#[path = "../../collective/tests/skipped.rs"]
mod skipped;

mod bench;
mod config;
mod doctor;
mod exit;
mod files;
mod follow;
mod json;
mod list;
mod loopback;
mod manual;
mod pull;
mod resume;
mod serve_pull;
mod settings;
mod surroundings;
#[cfg(feature = "test-certificates")]
mod tls;
mod top;
mod unmapped;

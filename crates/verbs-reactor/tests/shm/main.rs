//! The shared-memory fabric: under the fabric contract, between processes, and at its front door.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

#[path = "../contract/mod.rs"]
mod contract;
#[path = "../process/mod.rs"]
mod process;

mod handshake;
mod hostile;
mod loans;
mod pieces;
mod processes;
mod reads;
mod stopped;

use std::sync::Arc;

use verbs_reactor::{Fabric, Runtime, shm::ShmFabric};

fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(ShmFabric::new(runtime).unwrap())
}

const SETUP: contract::Setup = contract::Setup { fabric, peer_host: None };

contract_suite!(crate::SETUP);

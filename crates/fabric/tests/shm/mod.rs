//! The shared-memory fabric: the fabric contract, pairs of processes, and the handshake.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

mod handshake;
mod hostile;
mod loans;
mod pieces;
mod processes;
mod reads;
mod stopped;
mod views;

use std::sync::Arc;

use tensorwire_fabric::{Fabric, Runtime};
use tensorwire_fabric_shm::ShmFabric;

use crate::contract::Setup;

fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(ShmFabric::new(runtime).unwrap())
}

const SETUP: Setup = Setup { fabric, peer_address: None };

contract_suite!(crate::shm::SETUP);

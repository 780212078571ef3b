//! The shared-memory fabric under the fabric contract.

use std::sync::Arc;

use verbs_reactor::{Fabric, Runtime, shm::ShmFabric};

mod contract;

#[allow(clippy::unwrap_used)] // a fabric that can't be made is a failed test
fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(ShmFabric::new(runtime).unwrap())
}

const SETUP: contract::Setup = contract::Setup { fabric, peer_host: None };

contract_suite!(crate::SETUP);

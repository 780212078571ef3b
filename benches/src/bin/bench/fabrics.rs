//! The fabrics that a command line selects.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tensorwire::fabric::Runtime;
use tensorwire_fabric::{Fabric, Wait};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_verbs_reactor::{Rdma, VerbsFabric};

use super::error::BenchError;
use crate::arguments::{BenchFabric, WaitChoice};

/// One side's fabric.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct FabricChoice {
    pub(super) fabric: BenchFabric,
    /// How it waits.
    pub(super) wait: WaitChoice,
    /// For verbs; by default the first device that works.
    pub(super) device: Option<String>,
}

/// An open fabric.
#[derive(Debug, Clone)]
pub(super) struct Opened {
    pub(super) fabric: Arc<dyn Fabric>,
    /// The same fabric, if it is verbs.
    pub(super) verbs: Option<Arc<VerbsFabric>>,
}

impl FabricChoice {
    /// Makes the fabric.
    pub(super) fn open(&self, runtime: Arc<dyn Runtime>) -> Result<Opened, BenchError> {
        let wait = policy(self.wait);
        let fabric: Arc<dyn Fabric> = match self.fabric {
            BenchFabric::Shm => Arc::new(ShmFabric::new(runtime)?.with_wait(wait)),
            BenchFabric::Tcp => Arc::new(TcpFabric::new(runtime, TcpConfig::default()).with_wait(wait)),
            BenchFabric::Verbs => {
                let settings = Rdma { device: self.device.clone(), ..Rdma::default() };
                let settings = settings.or(Rdma::from_environment()?);
                let verbs = Arc::new(VerbsFabric::open(runtime, &settings)?.with_wait(wait));
                return Ok(Opened { fabric: verbs.clone(), verbs: Some(verbs) });
            }
        };
        Ok(Opened { fabric, verbs: None })
    }
}

fn policy(wait: WaitChoice) -> Wait {
    match wait {
        WaitChoice::Sleep => Wait::Sleep,
        WaitChoice::Adaptive => Wait::Adaptive,
        WaitChoice::Busy => Wait::Busy,
    }
}

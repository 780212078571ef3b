//! The fabrics as a command line asks for them.

use std::sync::Arc;

use tensorwire::Runtime;
use verbs_reactor::{
    Fabric, Wait,
    shm::ShmFabric,
    tcp::{TcpConfig, TcpFabric},
};

use super::{
    arguments::{BenchFabric, WaitChoice},
    error::BenchError,
};

/// Makes `fabric`, whose ends wait as `wait` says.
pub(super) fn open(
    fabric: BenchFabric,
    wait: WaitChoice,
    runtime: Arc<dyn Runtime>,
) -> Result<Arc<dyn Fabric>, BenchError> {
    let wait = policy(wait);
    Ok(match fabric {
        BenchFabric::Shm => Arc::new(ShmFabric::new(runtime)?.with_wait(wait)),
        BenchFabric::Grpc => return Err(BenchError::Unexpected("gRPC has no queue pairs".to_owned())),
        BenchFabric::Tcp => Arc::new(TcpFabric::new(runtime, TcpConfig::default()).with_wait(wait)),
    })
}

fn policy(wait: WaitChoice) -> Wait {
    match wait {
        WaitChoice::Sleep => Wait::Sleep,
        WaitChoice::Adaptive => Wait::Adaptive,
        WaitChoice::Busy => Wait::Busy,
    }
}

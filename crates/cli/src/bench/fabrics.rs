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

/// Says no to what this build can't do yet.
pub(super) fn check_wait(fabric: BenchFabric, wait: WaitChoice) -> Result<(), BenchError> {
    let value = match (fabric, wait) {
        (BenchFabric::Shm, _) | (_, WaitChoice::Sleep) => return Ok(()),
        (BenchFabric::Tcp, WaitChoice::Adaptive) => "adaptive",
        (BenchFabric::Tcp, WaitChoice::Busy) => "busy",
    };
    let (field, remedy) = ("--wait", "its TCP fabric always sleeps; use --wait sleep, or --fabric shm");
    Err(BenchError::NotInThisBuild { field, value: value.to_owned(), remedy })
}

/// Makes `fabric`, whose ends wait as `wait` says.
pub(super) fn open(
    fabric: BenchFabric,
    wait: WaitChoice,
    runtime: Arc<dyn Runtime>,
) -> Result<Arc<dyn Fabric>, BenchError> {
    check_wait(fabric, wait)?;
    Ok(match fabric {
        BenchFabric::Shm => Arc::new(ShmFabric::new(runtime)?.with_wait(policy(wait))),
        BenchFabric::Tcp => Arc::new(TcpFabric::new(runtime, TcpConfig::default())),
    })
}

fn policy(wait: WaitChoice) -> Wait {
    match wait {
        WaitChoice::Sleep => Wait::Sleep,
        WaitChoice::Adaptive => Wait::Adaptive,
        WaitChoice::Busy => Wait::Busy,
    }
}

//! `tensorwire doctor`: whether RDMA can be used here, and if not, why.

mod cause;
mod devices;
mod finding;
mod judge;
mod proof;
mod report;
#[cfg(test)]
mod tests;

use std::{process::ExitCode, sync::Arc};

use clap::ValueEnum;
use tensorwire::fabric::{Runtime, TokioRuntime};
use tensorwire_fabric::Fabric;
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};

use self::proof::{Proof, prove};
use crate::{
    arguments::{Doctor, FabricName},
    console::Console,
    failure::Failure,
    machine::{Machine, open_fabric},
};

/// The facts from which findings are made.
#[derive(Debug, Clone)]
struct Examination {
    machine: Machine,
    /// The device that the user asks about.
    wanted: Option<String>,
    /// Bytes of memory that workers are going to register.
    pool_bytes: u64,
    /// A write over the chosen device.
    verbs: Result<Proof, String>,
    /// A write over shared memory.
    shm: Result<Proof, String>,
    /// A write over TCP.
    tcp: Result<Proof, String>,
    /// Whether a process can be watched.
    pidfd: Result<(), String>,
}

/// Why no device of `machine` can be opened, with the remedy.
pub(crate) fn obstacle(machine: &Machine) -> Option<String> {
    let finding = judge::obstacle(machine)?;
    let remedy = finding.remedy.as_deref().unwrap_or("run tensorwire doctor for the reason");
    Some(format!("{}; {remedy}", report::sentence(&finding)))
}

/// Examines this machine and prints the findings. The exit status shows whether the fabrics that `arguments` require
/// can be used.
pub(crate) async fn doctor(arguments: &Doctor) -> Result<ExitCode, Failure> {
    let runtime =
        TokioRuntime::current().ok_or_else(|| Failure::Runtime(std::io::ErrorKind::Other.into()))?;
    let seen = examine(arguments, &(Arc::new(runtime) as Arc<dyn Runtime>)).await;
    let findings = judge::findings(&seen);
    let verdict = report::verdict(&seen, &findings);
    let text = match arguments.console {
        Console { json: true, .. } => report::json(&seen, &findings, &verdict)?,
        Console { quiet: true, .. } => report::quiet_text(&findings),
        _ => report::text(&findings, &verdict),
    };
    crate::print(&text)?;
    let is_met = meets(&seen, verdict.usable, &arguments.require);
    Ok(if is_met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether all `required` fabrics can be used; without any, whether one of them can.
fn meets(seen: &Examination, has_rdma: bool, required: &[FabricName]) -> bool {
    let works = |fabric: &FabricName| match fabric {
        FabricName::Shm => seen.shm.is_ok(),
        FabricName::Tcp => seen.tcp.is_ok(),
        FabricName::Verbs => has_rdma,
    };
    if required.is_empty() {
        FabricName::value_variants().iter().any(works)
    } else {
        required.iter().all(works)
    }
}

async fn examine(arguments: &Doctor, runtime: &Arc<dyn Runtime>) -> Examination {
    let machine = Machine::look(arguments.device.as_deref(), runtime.clone());
    let verbs = match &machine.choice {
        Ok(choice) => prove_over(open_fabric(Some(&choice.device), runtime.clone()), runtime).await,
        Err(reason) => Err(reason.clone()),
    };
    let tcp = TcpFabric::new(runtime.clone(), TcpConfig::default());
    Examination {
        machine,
        wanted: arguments.device.clone(),
        pool_bytes: arguments.pool,
        verbs,
        shm: prove_over(ShmFabric::new(runtime.clone()), runtime).await,
        tcp: prove_over(Ok::<_, std::convert::Infallible>(tcp), runtime).await,
        pidfd: pidfd(),
    }
}

async fn prove_over<E: std::fmt::Display>(
    fabric: Result<impl Fabric, E>,
    runtime: &Arc<dyn Runtime>,
) -> Result<Proof, String> {
    let fabric = fabric.map_err(|error| error.to_string())?;
    prove(&fabric, &**runtime).await.map_err(|error| error.to_string())
}

/// Watches this process, for a moment.
fn pidfd() -> Result<(), String> {
    let own = rustix::process::getpid();
    let opened = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty());
    opened.map(drop).map_err(|error| error.to_string())
}

//! `tensorwire devices`: lists RDMA devices.

mod report;

use std::{process::ExitCode, sync::Arc};

use tensorwire::fabric::TokioRuntime;

use crate::{arguments::Devices, failure::Failure, machine::Machine};

/// Lists the devices. The exit status shows whether one of them can be opened.
pub(crate) fn devices(arguments: &Devices) -> Result<ExitCode, Failure> {
    let runtime =
        TokioRuntime::current().ok_or_else(|| Failure::Runtime(std::io::ErrorKind::Other.into()))?;
    let machine = Machine::look(None, Arc::new(runtime));
    let why_none = why_none(&machine);
    let text = if arguments.json {
        report::json(&machine, why_none.as_deref()).map_err(Failure::Json)?
    } else {
        report::text(&machine, why_none.as_deref())
    };
    crate::print(&text)?;
    Ok(if why_none.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Why no device can be opened, with the remedy; `None` if one can.
fn why_none(machine: &Machine) -> Option<String> {
    if machine.devices.iter().any(|device| device.limits.is_some()) {
        return None;
    }
    let unexplained = || "run tensorwire doctor for the reason".to_owned();
    Some(crate::doctor::obstacle(machine).unwrap_or_else(unexplained))
}

#[cfg(test)]
mod tests;

//! `tensorwire devices`: lists RDMA devices.

mod report;

use std::{process::ExitCode, sync::Arc};

use tensorwire::fabric::TokioRuntime;

use crate::{arguments::Devices, console::Console, failure::Failure, machine::Machine};

/// Lists the devices. The exit status shows whether one of them can be opened.
pub(crate) fn devices(arguments: &Devices) -> Result<ExitCode, Failure> {
    let runtime =
        TokioRuntime::current().ok_or_else(|| Failure::Runtime(std::io::ErrorKind::Other.into()))?;
    let machine = Machine::look(None, Arc::new(runtime));
    let why_none = why_none(&machine);
    let text = match (arguments.console, why_none.as_deref()) {
        (Console { json: true, .. }, why_none) => report::json(&machine, why_none)?,
        (Console { quiet: true, .. }, why_none) => why_none.map(report::none).unwrap_or_default(),
        (_, why_none) => report::text(&machine, why_none),
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

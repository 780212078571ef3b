//! Output of devices, as text and as JSON.

use std::fmt::Write;

use indicatif::{BinaryBytes, HumanCount};
use serde::Serialize;

use crate::{
    console::document,
    failure::Failure,
    machine::{Choice, Device, Library, Limits, Machine, NodeAccess, Port},
};

/// Version of the JSON: incremented when a field changes its meaning or is removed.
const VERSION: u32 = 1;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct DevicesJson<'a> {
    version: u32,
    tensorwire: &'static str,
    library: LibraryLine<'a>,
    devices: &'a [Device],
    choice: Option<&'a Choice>,
    why_no_choice: Option<&'a str>,
    why_no_device: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct LibraryLine<'a> {
    found: bool,
    path: Option<&'a str>,
    version: Option<&'a str>,
}

/// For programs: one object.
pub(super) fn json(machine: &Machine, why_none: Option<&str>) -> Result<String, Failure> {
    let path = match &machine.library {
        Library::Found { path, .. } => path.as_deref(),
        Library::Missing { .. } => None,
    };
    let found = matches!(machine.library, Library::Found { .. });
    let report = DevicesJson {
        version: VERSION,
        tensorwire: env!("CARGO_PKG_VERSION"),
        library: LibraryLine { found, path, version: machine.library.version() },
        devices: &machine.devices,
        choice: machine.choice.as_ref().ok(),
        why_no_choice: machine.choice.as_ref().err().map(String::as_str),
        why_no_device: why_none,
    };
    document(&report)
}

/// The last line if no device can be used.
pub(super) fn none(reason: &str) -> String {
    format!("No device can be used: {reason}\n")
}

/// For people: one paragraph for each device, then the one that Tensorwire would use.
pub(super) fn text(machine: &Machine, why_none: Option<&str>) -> String {
    let mut text = String::new();
    for device in &machine.devices {
        text += &paragraph(device, machine.choice.as_ref().ok());
        text.push('\n');
    }
    text += &match (&machine.choice, why_none) {
        (_, Some(reason)) => none(reason),
        (Ok(Choice { device, port, gid_index, gid }), None) => format!(
            "Tensorwire would use {device} port {port}, address {gid} (GID {gid_index}): of the active ports \
             that TENSORWIRE_RDMA_* allow the one with the best address (RoCE v2 with IPv4 or InfiniBand's own, then IPv6, link-local last), the first by \
             name\n"
        ),
        (Err(reason), None) => format!("Tensorwire would use none of them: {reason}\n"),
    };
    text
}

/// Lines with a label in front.
struct Paragraph(String);

impl Paragraph {
    fn line(&mut self, label: &str, parts: &[Option<String>]) {
        let parts: Vec<&str> = parts.iter().flatten().map(String::as_str).collect();
        if !parts.is_empty() {
            // Writing to a string does not fail.
            let _ = writeln!(self.0, "  {label:<9} {}", parts.join(", "));
        }
    }
}

fn labelled(label: &str, value: Option<impl std::fmt::Display>) -> Option<String> {
    value.map(|value| format!("{label} {value}"))
}

fn paragraph(device: &Device, choice: Option<&Choice>) -> String {
    let choice = choice.filter(|choice| choice.device == device.name);
    let mut lines = Paragraph(format!("{}\n", device.name));
    let kind = device.software.then(|| "software".to_owned());
    let (vendor, model) = (labelled("vendor", device.vendor.as_ref()), device.model.clone());
    let firmware = labelled("firmware", device.firmware.as_ref());
    lines.line("driver", &[device.driver.clone(), kind, vendor, model, firmware]);
    lines.line("place", &[labelled("PCI", device.pci.as_ref()), labelled("NUMA node", device.numa_node)]);
    if let Some(node) = &device.node {
        lines.line("file", &[Some(node.path.clone()), Some(node.who_may())]);
    }
    if let Some(limits) = &device.limits {
        limit_lines(&mut lines, limits);
    }
    if let Some(paging) = device.on_demand_paging {
        lines.line("paging", &[Some(format!("on demand: {}", paging.parts()))]);
    }
    lines.line("closed", &[closed(device)]);
    for port in &device.ports {
        port_lines(&mut lines, port, choice.filter(|choice| choice.port == port.number));
    }
    lines.0
}

/// Why the device cannot be opened. If its file may not be used, the library reports only that there is no device.
fn closed(device: &Device) -> Option<String> {
    let refused = device.refused.clone()?;
    let access = device.node.as_ref().map(|node| &node.access);
    Some(match access {
        Some(NodeAccess::Denied) => "this user may not use its file".to_owned(),
        Some(NodeAccess::Forbidden) => "the use of its file is forbidden, though not by its mode".to_owned(),
        Some(NodeAccess::Missing) => "its file is not there".to_owned(),
        Some(NodeAccess::Failed(reason)) => format!("its file cannot be opened: {reason}"),
        Some(NodeAccess::Granted) | None => refused,
    })
}

fn limit_lines(lines: &mut Paragraph, limits: &Limits) {
    let count = |number: u32, what: &str| Some(format!("{} {what}", HumanCount(number.into())));
    lines.line(
        "limits",
        &[
            count(limits.queue_pairs, "queue pairs"),
            count(limits.work_requests, "work requests in each"),
            count(limits.segments, "ranges a request"),
            count(limits.read_segments, "of a read"),
        ],
    );
    lines.line(
        "",
        &[
            count(limits.completion_queues, "completion queues"),
            count(limits.completions, "completions in each"),
        ],
    );
    let bytes = Some(format!("{} in each", region_bytes(limits.region_bytes)));
    lines.line("", &[count(limits.regions, "regions"), bytes]);
}

/// Many drivers report "all".
fn region_bytes(bytes: u64) -> String {
    if bytes >= 1 << 60 { "any size".to_owned() } else { BinaryBytes(bytes).to_string() }
}

fn port_lines(lines: &mut Paragraph, port: &Port, choice: Option<&Choice>) {
    let state = [Some(port.state.clone()), port.physical_state.clone(), Some(port.link_layer.clone())];
    let mut parts = state.to_vec();
    parts.extend([port.rate.clone(), packets(port), port.message_bytes.map(messages)]);
    parts.push(labelled("LID", port.lid.filter(|_| !port.is_ethernet())));
    parts.push(port.interface.as_ref().map(|interface| {
        let state = match interface.up {
            Some(true) => "up",
            Some(false) => "switched off",
            None => "of unknown state",
        };
        let mtu = interface.mtu.map_or_else(String::new, |mtu| format!(", MTU {mtu}"));
        format!("interface {} ({state}{mtu})", interface.name)
    }));
    lines.line(&format!("port {}", port.number), &parts);
    for address in &port.addresses {
        let chosen = choice.filter(|choice| choice.gid_index == address.index).map(|_| "chosen".to_owned());
        let words = format!("{:<10} {}", address.kind.name(), address.gid);
        lines.line(&format!("  GID {}", address.index), &[Some(words), chosen]);
    }
}

fn packets(port: &Port) -> Option<String> {
    match (port.mtu, port.mtu_max) {
        (Some(mtu), Some(most)) => Some(format!("MTU {mtu} of {most}")),
        (mtu, _) => labelled("MTU", mtu),
    }
}

fn messages(bytes: u32) -> String {
    format!("messages up to {}", BinaryBytes(bytes.into()))
}

//! Findings on each device.

use super::{
    cause::{
        ADDRESS_FOUND, ADDRESS_LINK_LOCAL, ADDRESS_MISSING, NODE_DENIED, NODE_FAILED, NODE_FORBIDDEN,
        NODE_MISSING, NODE_USABLE, OPEN_FAILED, PAGING_NONE, PAGING_ON_DEMAND, PORT_ACTIVE, PORT_DOWN,
        PORT_INTERFACE_DOWN, PORT_NO_SUBNET, PORT_NONE, PROVIDER_FOUND, PROVIDER_MISSING,
    },
    finding::Finding,
};
use crate::machine::{Address, AddressKind, Device, Interface, Library, Machine, NodeAccess, Port};

/// The findings on one device. A problem of a device that is not needed is a warning.
pub(super) fn device_findings(machine: &Machine, wanted: Option<&str>, device: &Device) -> Vec<Finding> {
    let mut found = vec![node(device)];
    found.extend(driver(machine, device));
    found.extend(paging(device));
    found.extend(ports(machine, device));
    if !is_needed(machine, wanted, &device.name) {
        found = found.into_iter().map(Finding::at_most_a_warning).collect();
    }
    found
}

/// Whether RDMA depends on this device: it is the chosen or requested device, or there is no such device.
fn is_needed(machine: &Machine, wanted: Option<&str>, name: &str) -> bool {
    match (&machine.choice, wanted) {
        (Ok(choice), _) => choice.device == name,
        (Err(_), Some(wanted)) => wanted == name,
        (Err(_), None) => true,
    }
}

fn node(device: &Device) -> Finding {
    let expected = "/dev/infiniband/uverbs0";
    let Some(node) = &device.node else {
        let message = "the kernel has no file for it: ib_uverbs does not know the device";
        return Finding::new(&NODE_MISSING, message).with("node", expected).of(&device.name);
    };
    let (path, who) = (&node.path, node.who_may());
    let finding = match &node.access {
        NodeAccess::Granted => Finding::new(&NODE_USABLE, format!("this user may use {path} ({who})")),
        NodeAccess::Missing => Finding::new(&NODE_MISSING, format!("there is no {path}")),
        NodeAccess::Denied => Finding::new(&NODE_DENIED, format!("this user may not use {path} ({who})")),
        NodeAccess::Forbidden => Finding::new(
            &NODE_FORBIDDEN,
            format!("the use of {path} is forbidden, though not by its mode ({who})"),
        ),
        NodeAccess::Failed(reason) => {
            Finding::new(&NODE_FAILED, format!("{path} cannot be opened: {reason}"))
        }
    };
    finding.with("node", path).with("device", &device.name).of(&device.name)
}

/// Whether the library has a driver for the device and can open it. No finding if an earlier one explains the failure:
/// without a library, and without a usable file (the library does not list a device without a file).
fn driver(machine: &Machine, device: &Device) -> Option<Finding> {
    let Library::Found { devices, .. } = &machine.library else { return None };
    let access = device.node.as_ref().map(|node| &node.access)?;
    if *access == NodeAccess::Missing {
        return None;
    }
    let finding = match (devices, &device.refused) {
        (Err(reason), _) => Finding::new(&PROVIDER_MISSING, format!("libibverbs lists no devices: {reason}")),
        (Ok(names), _) if !names.contains(&device.name) => {
            Finding::new(&PROVIDER_MISSING, "libibverbs has no driver for it")
        }
        (Ok(_), Some(reason)) if *access == NodeAccess::Granted => Finding::new(&OPEN_FAILED, reason),
        _ => Finding::new(&PROVIDER_FOUND, "libibverbs has a driver for it"),
    };
    Some(finding.with("device", &device.name).of(&device.name))
}

/// Whether users' own memory is locked. No finding on a device that cannot be opened.
fn paging(device: &Device) -> Option<Finding> {
    let paging = device.on_demand_paging?;
    let finding = if paging.used {
        Finding::new(&PAGING_ON_DEMAND, "pages on demand: users' own memory need not be locked")
    } else {
        let message = format!(
            "on-demand paging: {}; users' own memory is locked while it is registered",
            paging.parts()
        );
        Finding::new(&PAGING_NONE, message)
    };
    Some(finding.of(&device.name))
}

/// One usable port is enough: others that are down are warnings.
fn ports(machine: &Machine, device: &Device) -> Vec<Finding> {
    if device.ports.is_empty() {
        let finding = Finding::new(&PORT_NONE, "no ports").with("device", &device.name);
        return vec![finding.of(&device.name)];
    }
    let chosen = machine.choice.as_ref().ok().filter(|choice| choice.device == device.name);
    let one_is_active = device.ports.iter().any(Port::is_active);
    let is_needed = |port: &Port| match chosen {
        Some(choice) => choice.port == port.number,
        None => port.is_active() || !one_is_active,
    };
    let mut found = Vec::new();
    for port in &device.ports {
        let of_port = [Some(state(device, port)), address(device, port)].into_iter().flatten();
        found.extend(of_port.map(|one| if is_needed(port) { one } else { one.at_most_a_warning() }));
    }
    found
}

fn place(device: &Device, port: &Port) -> String {
    format!("{} port {}", device.name, port.number)
}

fn state(device: &Device, port: &Port) -> Finding {
    let Port { state, link_layer, .. } = port;
    let physical = port.physical_state.as_deref().unwrap_or("of unknown physical state");
    let place = place(device, port);
    if port.is_active() {
        let rate = port.rate.as_deref().unwrap_or("of unknown speed");
        return Finding::new(&PORT_ACTIVE, format!("{state}, {physical}, {link_layer}, {rate}")).of(place);
    }
    let finding = match &port.interface {
        Some(Interface { name, up: Some(false), .. }) => {
            let message = format!("{state} ({physical}), its network interface {name} is switched off");
            Finding::new(&PORT_INTERFACE_DOWN, message).with("interface", name)
        }
        _ if !port.is_ethernet() && physical == "LinkUp" => Finding::new(
            &PORT_NO_SUBNET,
            format!("{state} though its link is up: no subnet manager has set it up"),
        ),
        _ => Finding::new(&PORT_DOWN, format!("{state} ({physical})")).with("port", &place),
    };
    finding.of(place)
}

/// A port that is down may have lost its addresses: that makes no separate finding.
fn address(device: &Device, port: &Port) -> Option<Finding> {
    if !port.is_active() {
        return None;
    }
    let wanted = if port.is_ethernet() { AddressKind::RoceV2 } else { AddressKind::InfiniBand };
    let usable: Vec<&Address> = port.addresses.iter().filter(|address| address.kind == wanted).collect();
    let interface = port.interface.as_ref().map_or("INTERFACE", |interface| &interface.name);
    // InfiniBand's own addresses begin with the subnet's prefix, which is link-local unless an administrator sets
    // another.
    let routable = usable.iter().find(|address| !port.is_ethernet() || !address.is_link_local());
    let finding = match (routable, usable.first()) {
        (Some(address), _) => Finding::new(&ADDRESS_FOUND, described(address)),
        (None, Some(address)) => {
            Finding::new(&ADDRESS_LINK_LOCAL, format!("link-local addresses only: {}", described(address)))
        }
        (None, None) => Finding::new(&ADDRESS_MISSING, format!("no {} address", wanted.name())),
    };
    Some(finding.with("interface", interface).of(place(device, port)))
}

fn described(address: &Address) -> String {
    format!("{} {} (GID {})", address.kind.name(), address.gid, address.index)
}

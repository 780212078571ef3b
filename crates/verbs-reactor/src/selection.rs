//! Chooses the device, port and address to use.

use std::fmt;

use super::{
    GidEntry, Names, Port, Rdma, Setting, VerbsError,
    address::{choose, rank},
};

/// The ports of a device, for the choice.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) device: String,
    /// Its ports with their addresses, or the reason why they cannot be listed.
    pub(super) ports: Result<Vec<(Port, Vec<GidEntry>)>, VerbsError>,
}

/// A port that can be used, with its best address or the one that a setting names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) device: String,
    pub(super) port: Port,
    pub(super) source: GidEntry,
}

/// The result of a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) chosen: Candidate,
    /// The other candidates, best first.
    pub(super) others: Vec<Candidate>,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {} ({})", self.device, self.port.number, self.source.gid)
    }
}

impl Selection {
    /// The other candidates, for a log line.
    pub(super) fn others(&self) -> Names {
        Names(self.others.iter().map(ToString::to_string).collect())
    }
}

/// Chooses the port whose address is of the best kind; among equals the device whose name is first in alphabetical
/// order, then the port with the lowest number. Both peers on a host with several devices choose the same port.
pub(super) fn select(seen: &[Seen], settings: &Rdma) -> Result<Selection, VerbsError> {
    let (mut candidates, mut reasons) = (Vec::new(), Vec::new());
    for device in seen {
        match of_device(device, settings) {
            Ok(found) => candidates.extend(found),
            Err(reason) => reasons.push(reason),
        }
    }
    candidates.sort_by_key(|candidate| {
        let Candidate { device, port, source } = candidate;
        (rank(source, port.link).unwrap_or(u8::MAX), device.clone(), port.number)
    });
    let mut candidates = candidates.into_iter();
    match candidates.next() {
        Some(chosen) => Ok(Selection { chosen, others: candidates.collect() }),
        None => Err(none_usable(reasons)),
    }
}

fn none_usable(mut reasons: Vec<VerbsError>) -> VerbsError {
    match reasons.len() {
        0 => VerbsError::UnknownDevice { name: "at all".into(), present: Names(vec![]) },
        1 => reasons.remove(0),
        _ => VerbsError::NoneUsable { reasons: Names(reasons.iter().map(ToString::to_string).collect()) },
    }
}

/// The device's ports that can be used: at least one, or the reason why there is none.
fn of_device(seen: &Seen, settings: &Rdma) -> Result<Vec<Candidate>, VerbsError> {
    let ports = seen.ports.as_ref().map_err(Clone::clone)?;
    let wanted: Vec<_> =
        ports.iter().filter(|(port, _)| settings.port.is_none_or(|number| number == port.number)).collect();
    if let (Some(number), []) = (settings.port, wanted.as_slice()) {
        return Err(unfit(
            seen,
            Setting::Port,
            number,
            format!("the device's ports are 1 to {}", ports.len()),
        ));
    }
    let (mut found, mut reason) = (Vec::new(), None);
    for (port, addresses) in wanted {
        match source(seen, port, addresses, settings) {
            Ok(source) => found.push(Candidate { device: seen.device.clone(), port: *port, source }),
            Err(error) => reason = Some(error),
        }
    }
    match reason {
        Some(reason) if found.is_empty() => Err(reason),
        _ => Ok(found),
    }
}

fn source(seen: &Seen, port: &Port, addresses: &[GidEntry], settings: &Rdma) -> Result<GidEntry, VerbsError> {
    let (device, number) = (seen.device.clone(), port.number);
    if !port.is_active() {
        return Err(VerbsError::PortDown { device, port: number, state: port.state });
    }
    let Some(index) = settings.gid_index else {
        return choose(addresses, port.link).ok_or(VerbsError::NoAddress { device, port: number });
    };
    addresses.iter().find(|entry| entry.index == index).copied().ok_or_else(|| {
        let used = addresses.iter().map(|entry| format!("{} ({})", entry.index, entry.gid)).collect();
        let used = format!("entries of port {number} with an address are: {}", Names(used));
        unfit(seen, Setting::GidIndex, index, used)
    })
}

fn unfit(seen: &Seen, setting: Setting, value: u8, remedy: String) -> VerbsError {
    VerbsError::Unfit { setting, value: value.to_string(), device: seen.device.clone(), remedy }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;
    use crate::{Gid, GidKind, LinkLayer, sys};

    const ACTIVE: u32 = sys::IBV_PORT_ACTIVE;
    const DOWN: u32 = sys::IBV_PORT_DOWN;

    fn port(number: u8, state: u32) -> Port {
        Port { number, state, ..Port::sample(LinkLayer::Ethernet) }
    }

    fn entry(index: u8, address: &str) -> GidEntry {
        let gid = Gid(address.parse::<Ipv6Addr>().unwrap().octets());
        GidEntry { index, gid, kind: GidKind::RoceV2 }
    }

    /// A device whose ports have an IPv4 address at index 1.
    fn device(name: &str, ports: &[(u8, u32)]) -> Seen {
        let table = vec![entry(0, "fe80::1"), entry(1, "::ffff:10.9.0.1")];
        let ports = ports.iter().map(|&(number, state)| (port(number, state), table.clone()));
        Seen { device: name.to_owned(), ports: Ok(ports.collect()) }
    }

    fn chosen(seen: &[Seen], settings: &Rdma) -> (String, u8, u8) {
        let Candidate { device, port, source } = select(seen, settings).unwrap().chosen;
        (device, port.number, source.index)
    }

    fn any() -> Rdma {
        Rdma::default()
    }

    #[test]
    fn of_several_devices_the_first_by_name_is_chosen_and_the_others_are_told() {
        let seen =
            [device("mlx5_1", &[(1, ACTIVE)]), device("mlx5_0", &[(1, DOWN), (2, ACTIVE), (3, ACTIVE)])];
        assert_eq!(chosen(&seen, &any()), ("mlx5_0".into(), 2, 1));
        let others = select(&seen, &any()).unwrap().others().to_string();
        assert_eq!(others, "mlx5_0 port 3 (10.9.0.1), mlx5_1 port 1 (10.9.0.1)");
    }

    #[test]
    fn the_kind_of_address_goes_before_the_name() {
        let table = |addresses: &[&str]| {
            let entries = (0..).zip(addresses).map(|(index, address)| entry(index, address));
            Ok(vec![(port(1, ACTIVE), entries.collect())])
        };
        let local = Seen { device: "a".into(), ports: table(&["fe80::1"]) };
        let global = Seen { device: "b".into(), ports: table(&["fe80::1", "2001:db8::1"]) };
        let ipv4 = Seen { device: "c".into(), ports: table(&["fe80::1", "2001:db8::1", "::ffff:10.0.0.1"]) };
        let all = [local.clone(), global, ipv4];
        assert_eq!(chosen(&all, &any()), ("c".into(), 1, 2));
        assert_eq!(chosen(&all[..2], &any()), ("b".into(), 1, 1));
        assert_eq!(chosen(&[local], &any()), ("a".into(), 1, 0));
    }

    #[test]
    fn devices_that_cannot_be_used_are_passed_over() {
        let refused = VerbsError::NoKernelSupport;
        let seen = [
            Seen { device: "a".into(), ports: Err(refused) },
            Seen { device: "b".into(), ports: Ok(vec![(port(1, ACTIVE), vec![])]) },
            device("c", &[(1, ACTIVE)]),
        ];
        assert_eq!(chosen(&seen, &any()), ("c".into(), 1, 1));
    }

    #[test]
    fn a_named_port_or_address_is_taken_as_it_is() {
        let seen = [device("a", &[(1, ACTIVE)]), device("b", &[(1, ACTIVE), (2, ACTIVE)])];
        let second = Rdma { port: Some(2), ..any() };
        assert_eq!(chosen(&seen, &second), ("b".into(), 2, 1));
        let local = Rdma { gid_index: Some(0), ..any() };
        assert_eq!(chosen(&seen, &local), ("a".into(), 1, 0));
    }

    #[test]
    fn a_port_or_address_that_is_not_there_is_told_which_are() {
        let seen = [device("a", &[(1, ACTIVE)])];
        let error = select(&seen, &Rdma { port: Some(3), ..any() }).unwrap_err().to_string();
        for part in ["device a", "3", "1 to 1", "RDMA_DEVICE_PORT", "TENSORWIRE_RDMA_PORT"] {
            assert!(error.contains(part), "{part} is missing: {error}");
        }
        let error = select(&seen, &Rdma { gid_index: Some(7), ..any() }).unwrap_err().to_string();
        for part in ["device a", "7", "0 (fe80::1), 1 (10.9.0.1)", "RDMA_GID_INDEX"] {
            assert!(error.contains(part), "{part} is missing: {error}");
        }
    }

    #[test]
    fn where_nothing_can_be_used_each_reason_is_told() {
        let down = [device("a", &[(1, DOWN)])];
        assert!(matches!(select(&down, &any()), Err(VerbsError::PortDown { port: 1, .. })));
        let none = [
            device("a", &[(1, DOWN)]),
            Seen { device: "b".into(), ports: Ok(vec![(port(1, ACTIVE), vec![])]) },
        ];
        let error = select(&none, &any()).unwrap_err().to_string();
        assert!(error.contains("device a is not active") && error.contains("device b has no"), "{error}");
        assert!(matches!(select(&[], &any()), Err(VerbsError::UnknownDevice { .. })));
    }
}

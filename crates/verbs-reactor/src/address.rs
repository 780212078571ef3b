//! The addresses of a port: its GID table, and which entry to use.

use std::{fmt, io, mem::MaybeUninit, net::Ipv6Addr};

use super::{Context, LinkLayer, Port, VerbsError, error::refused, sys};

/// A port's address: 16 bytes, for RoCE an IPv6 address or an IPv4 address mapped into one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    fn is_ipv4(self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }

    fn is_link_local(self) -> bool {
        Ipv6Addr::from(self.0).is_unicast_link_local()
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = Ipv6Addr::from(self.0);
        match address.to_ipv4_mapped() {
            Some(address) => address.fmt(f),
            None => address.fmt(f),
        }
    }
}

/// The packet format that an address belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand's own header.
    InfiniBand,
    /// RoCE v1: an Ethernet type of its own, not routable.
    RoceV1,
    /// RoCE v2: UDP over IP.
    RoceV2,
}

/// An entry of a port's address table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidEntry {
    /// Its index in the table.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// Its packet format.
    pub kind: GidKind,
}

impl Context {
    /// The table of `port`, without its empty entries.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub(super) fn addresses(&self, port: &Port) -> Result<Vec<GidEntry>, VerbsError> {
        const CALL: &str = "ibv_query_gid_table";
        // The call lists all ports of the device.
        let room = port.addresses as usize * usize::from(self.limits()?.ports);
        let mut raw = vec![MaybeUninit::<sys::ibv_gid_entry>::zeroed(); room];
        // SAFETY: the context is open while `self` lives, and `raw` has room for that many entries of that size.
        let listed = unsafe {
            self.functions()._ibv_query_gid_table(
                self.raw(),
                raw.as_mut_ptr().cast(),
                raw.len(),
                0,
                size_of::<sys::ibv_gid_entry>(),
            )
        };
        let Some(count) = listed else { return Ok(self.addresses_one_by_one(port)) };
        let Ok(count) = usize::try_from(count) else {
            let errno = i32::try_from(count.unsigned_abs()).unwrap_or(libc::EIO);
            return Err(refused(io::Error::from_raw_os_error(errno), CALL, self.name()));
        };
        // SAFETY: all-zero bytes are a valid entry, so each of them is initialised.
        let entries = raw.iter().take(count).map(|entry| unsafe { entry.assume_init() });
        Ok(entries.filter(|entry| entry.port_num == u32::from(port.number)).filter_map(parse).collect())
    }

    /// For rdma-core before 32, which lists no packet formats: they come from sysfs.
    fn addresses_one_by_one(&self, port: &Port) -> Vec<GidEntry> {
        let table = 0..u8::try_from(port.addresses).unwrap_or(u8::MAX);
        table.filter_map(|index| self.address(port, index)).collect()
    }

    fn address(&self, port: &Port, index: u8) -> Option<GidEntry> {
        let mut answer = MaybeUninit::<sys::ibv_gid>::zeroed();
        // SAFETY: the context is open while `self` lives, and `answer` is writable and as large as an address.
        let result = unsafe {
            self.functions().ibv_query_gid(self.raw(), port.number, i32::from(index), answer.as_mut_ptr())
        };
        // SAFETY: all-zero bytes are a valid address, and so is anything the call wrote.
        let gid = Gid(unsafe { answer.assume_init().raw });
        if result != 0 || gid == Gid([0; 16]) {
            return None;
        }
        let file =
            format!("/sys/class/infiniband/{}/ports/{}/gid_attrs/types/{index}", self.name(), port.number);
        let kind = match (port.link, std::fs::read_to_string(file).ok()?.trim()) {
            (LinkLayer::InfiniBand, _) => GidKind::InfiniBand,
            (_, "RoCE v2") => GidKind::RoceV2,
            _ => GidKind::RoceV1,
        };
        Some(GidEntry { index, gid, kind })
    }
}

fn parse(entry: sys::ibv_gid_entry) -> Option<GidEntry> {
    // SAFETY: every member of the union is 16 plain bytes.
    let gid = Gid(unsafe { entry.gid.raw });
    let kind = match entry.gid_type {
        sys::IBV_GID_TYPE_IB => GidKind::InfiniBand,
        sys::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
        sys::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        _ => return None,
    };
    Some(GidEntry { index: u8::try_from(entry.gid_index).ok()?, gid, kind })
}

/// The best of a port's addresses, if any is used without being named.
pub(super) fn choose(entries: &[GidEntry], link: LinkLayer) -> Option<GidEntry> {
    let ranked = entries.iter().filter_map(|entry| Some((rank(entry, link)?, entry.index, *entry)));
    ranked.min_by_key(|&(rank, index, _)| (rank, index)).map(|(_, _, entry)| entry)
}

/// The rank of an address; 0 is best. `None` for an address that is used only if it is named.
pub(super) fn rank(entry: &GidEntry, link: LinkLayer) -> Option<u8> {
    match (link, entry.kind) {
        (LinkLayer::InfiniBand, GidKind::InfiniBand) => Some(0),
        (LinkLayer::Ethernet, GidKind::RoceV2) if entry.gid.is_ipv4() => Some(0),
        (LinkLayer::Ethernet, GidKind::RoceV2) if !entry.gid.is_link_local() => Some(1),
        (LinkLayer::Ethernet, GidKind::RoceV2) => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u8, address: &str, kind: GidKind) -> GidEntry {
        let gid = Gid(address.parse::<Ipv6Addr>().unwrap().octets());
        GidEntry { index, gid, kind }
    }

    #[test]
    fn a_roce_v2_ipv4_address_is_chosen_before_all_others() {
        let table = [
            entry(0, "fe80::1", GidKind::RoceV2),
            entry(1, "2001:db8::1", GidKind::RoceV2),
            entry(2, "::ffff:10.9.0.1", GidKind::RoceV1),
            entry(3, "::ffff:10.9.0.1", GidKind::RoceV2),
        ];
        assert_eq!(choose(&table, LinkLayer::Ethernet).unwrap().index, 3);
        assert_eq!(choose(&table[..3], LinkLayer::Ethernet).unwrap().index, 1);
        assert_eq!(choose(&table[..1], LinkLayer::Ethernet).unwrap().index, 0);
    }

    #[test]
    fn a_port_without_a_roce_v2_address_has_none_to_choose() {
        let table = [entry(0, "fe80::1", GidKind::RoceV1)];
        assert_eq!(choose(&table, LinkLayer::Ethernet), None);
        assert_eq!(choose(&[], LinkLayer::InfiniBand), None);
    }

    #[test]
    fn mapped_addresses_are_shown_as_ipv4() {
        assert_eq!(entry(0, "::ffff:10.9.0.1", GidKind::RoceV2).gid.to_string(), "10.9.0.1");
    }
}

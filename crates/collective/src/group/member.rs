//! The record of a rank in the store.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::text;
use tensorwire_rendezvous::{Worker, control::host_and_port};

use crate::{error::GroupError, store::Store};

/// The first line of a record. It changes with the format.
const FORMAT: &str = "tensorwire group 2";

/// The most members of a generation that a newcomer accepts.
const MEMBERS_MAX: usize = 1 << 14;

/// What the other ranks read about a rank in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its worker's name.
    pub(crate) worker: String,
    /// Its worker's address.
    pub(crate) address: String,
    pub(crate) incarnation: u64,
    /// A random number of this call of `join` or `rejoin`, so that two calls of one worker differ.
    pub(crate) nonce: u64,
    /// The reach of its shared memory in hexadecimal digits: equal on two workers that can share memory. Empty if it offers none.
    pub(crate) host: String,
}

impl Member {
    /// # Errors
    /// [`GroupError::Argument`] if the worker listens on all addresses, and `store` does not show at which the others reach it, or on
    /// a link-local address.
    pub(crate) fn of(worker: &Worker, store: &dyn Store) -> Result<Self, GroupError> {
        let address = dialable(worker.address(), store.own_address()).ok_or_else(|| GroupError::Argument {
            field: "bind",
            value: worker.address().to_owned(),
            remedy: "the other ranks cannot dial this address, and the store does not show which of this machine's they reach: bind \
                     the worker to that one (a link-local address does not do, since its zone differs between machines)"
                .to_owned(),
        })?;
        let shm = worker.offered_fabrics().into_iter().find(|(kind, _)| *kind == FabricKind::SHM);
        let host = shm.map_or_else(String::new, |(_, reach)| hexadecimal(&reach));
        let (incarnation, nonce) = (worker.incarnation(), worker.runtime().random());
        Ok(Self { worker: worker.name().to_owned(), address, incarnation, nonce, host })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        self.text().into_bytes()
    }

    /// The lines of its record.
    pub(crate) fn text(&self) -> String {
        let Self { worker, address, incarnation, nonce, host } = self;
        format!("{FORMAT}\n{worker}\n{address}\n{incarnation:016x}\n{nonce:016x}\n{host}\n")
    }

    /// Decodes a record. `None` if it is of another version or invalid.
    pub(crate) fn decode(record: &[u8]) -> Option<Self> {
        Self::take(&mut std::str::from_utf8(record).ok()?.split('\n'))
    }

    /// Decodes a member from the next lines.
    pub(crate) fn take<'text>(lines: &mut impl Iterator<Item = &'text str>) -> Option<Self> {
        if lines.next()? != FORMAT {
            return None;
        }
        let (worker, address) = (lines.next()?.to_owned(), lines.next()?.to_owned());
        if text::check_name(&worker).is_err() || host_and_port(&address).is_err() {
            return None;
        }
        let mut number = || u64::from_str_radix(lines.next()?, 16).ok();
        let (incarnation, nonce) = (number()?, number()?);
        let host = lines.next()?.to_owned();
        Some(Self { worker, address, incarnation, nonce, host })
    }

    /// Decodes the members of a generation, which are at least two.
    pub(crate) fn take_all<'text>(lines: impl Iterator<Item = &'text str>) -> Option<Vec<Self>> {
        let (mut lines, mut members) = (lines.peekable(), Vec::new());
        while lines.peek().is_some() && members.len() < MEMBERS_MAX {
            members.push(Self::take(&mut lines)?);
        }
        (members.len() > 1 && lines.peek().is_none()).then_some(members)
    }

    /// Whether it listens on its machine's loopback.
    pub(crate) fn is_on_loopback(&self) -> bool {
        self.address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback())
    }

    /// The host of its address, which the ranks of one machine usually share.
    pub(crate) fn machine(&self) -> &str {
        self.address.rsplit_once(':').map_or(&*self.address, |(host, _)| host)
    }

    /// Name and address, for error messages.
    pub(crate) fn whereabouts(&self) -> String {
        format!("{} at {}", self.worker, self.address)
    }
}

/// The ranks on each host. Ranks are on one host if they reach each other by shared memory. A rank that offers none is on a host of
/// its own. Hosts are in the order of their first ranks, so that they are the same on all ranks.
pub(crate) fn hosts(members: &[Member]) -> Vec<Vec<usize>> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    let mut shared = HashMap::new();
    for (rank, member) in members.iter().enumerate() {
        let next = hosts.len();
        let host = if member.host.is_empty() { next } else { *shared.entry(&member.host).or_insert(next) };
        match hosts.get_mut(host) {
            Some(ranks) => ranks.push(rank),
            None => hosts.push(vec![rank]),
        }
    }
    hosts
}

/// `address` in a form that other ranks can dial: if the worker listens on all addresses of this machine, the one at which the store
/// reaches it. `None` also for a link-local address, whose zone has a meaning on this machine only.
fn dialable(address: &str, own: Option<IpAddr>) -> Option<String> {
    let Ok(bound) = address.parse::<SocketAddr>() else { return Some(address.to_owned()) };
    let host = if bound.ip().is_unspecified() { own?.to_canonical() } else { bound.ip() };
    let is_link_local = matches!(host, IpAddr::V6(host) if host.is_unicast_link_local());
    let can_reach = !is_link_local && (bound.is_ipv6() || host.is_ipv4());
    can_reach.then(|| SocketAddr::new(host, bound.port()).to_string())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(host: &str) -> Member {
        Member {
            worker: "a".to_owned(),
            address: "127.0.0.1:1".to_owned(),
            incarnation: 7,
            nonce: 8,
            host: host.to_owned(),
        }
    }

    #[test]
    fn a_record_survives_its_encoding() {
        assert_eq!(Member::decode(&member("00ff").encode()), Some(member("00ff")));
        assert_eq!(Member::decode(b"tensorwire group 1\na\nb:1\n0\n0\n\n"), None, "of another version");
        assert_eq!(Member::decode(b"tensorwire group 2\na\nb:1\n0\nx\n\n"), None, "no nonce");
        assert_eq!(Member::decode(b"\xff"), None, "no text");
        for (worker, address) in
            [("a\u{1b}[2J", "h:1"), ("a\u{202e}", "h:1"), ("a", "h\u{1b}:1"), ("a", "h"), ("a", "h:x")]
        {
            let hostile = Member { worker: worker.to_owned(), address: address.to_owned(), ..member("") };
            assert_eq!(Member::decode(&hostile.encode()), None, "{hostile:?}");
        }
    }

    #[test]
    fn a_record_never_names_all_addresses() {
        let (v4, v6) = ("10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap());
        let named = [
            ("10.0.0.1:4", Some(v4), Some("10.0.0.1:4")),
            ("node:4", None, Some("node:4")),
            ("0.0.0.0:4", Some(v4), Some("10.0.0.7:4")),
            ("[::]:4", Some(v4), Some("10.0.0.7:4")),
            ("[::]:4", Some("::ffff:10.0.0.7".parse().unwrap()), Some("10.0.0.7:4")),
            ("[::]:4", Some(v6), Some("[fd00::7]:4")),
            ("0.0.0.0:4", Some(v6), None),
            ("0.0.0.0:4", None, None),
            ("[fe80::1%2]:4", Some(v6), None),
            ("[::]:4", Some("fe80::7".parse().unwrap()), None),
        ];
        for (address, own, expected) in named {
            assert_eq!(dialable(address, own).as_deref(), expected, "{address} {own:?}");
        }
    }

    #[test]
    fn a_generation_has_two_members_and_not_too_many() {
        let all = |count: usize| {
            let text = member("").text().repeat(count);
            Member::take_all(text.strip_suffix('\n').unwrap_or_default().split('\n'))
                .map(|members| members.len())
        };
        assert_eq!([1, 2, MEMBERS_MAX, MEMBERS_MAX + 1].map(all), [None, Some(2), Some(MEMBERS_MAX), None]);
    }

    #[test]
    fn members_that_share_memory_are_on_one_host() {
        let of = |reaches: &[&str]| hosts(&reaches.iter().map(|reach| member(reach)).collect::<Vec<_>>());
        assert_eq!(of(&["a", "a"]), [vec![0, 1]]);
        assert_eq!(of(&["b", "a", "b", "", "a", ""]), [vec![0, 2], vec![1, 4], vec![3], vec![5]]);
    }
}

//! The record of a rank in the store.

use std::collections::HashMap;

use tensorwire_rendezvous::Worker;
use tensorwire_verbs_reactor::FabricKind;

/// The first line of a record. It changes with the format.
const FORMAT: &str = "tensorwire group 1";

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
    pub(crate) fn of(worker: &Worker) -> Self {
        let shm = worker.offered_fabrics().into_iter().find(|(kind, _)| *kind == FabricKind::SHM);
        let host = shm.map_or_else(String::new, |(_, reach)| hexadecimal(&reach));
        Self {
            worker: worker.name().to_owned(),
            address: worker.address().to_owned(),
            incarnation: worker.incarnation(),
            nonce: worker.runtime().random(),
            host,
        }
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
        let mut number = || u64::from_str_radix(lines.next()?, 16).ok();
        let (incarnation, nonce) = (number()?, number()?);
        let host = lines.next()?.to_owned();
        Some(Self { worker, address, incarnation, nonce, host })
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
        assert_eq!(Member::decode(b"tensorwire group 0\na\nb\n0\n0\n\n"), None, "of another version");
        assert_eq!(Member::decode(b"tensorwire group 1\na\nb\n0\nx\n\n"), None, "no incarnation");
        assert_eq!(Member::decode(b"\xff"), None, "no text");
    }

    #[test]
    fn members_that_share_memory_are_on_one_host() {
        let of = |reaches: &[&str]| hosts(&reaches.iter().map(|reach| member(reach)).collect::<Vec<_>>());
        assert_eq!(of(&["a", "a"]), [vec![0, 1]]);
        assert_eq!(of(&["b", "a", "b", "", "a", ""]), [vec![0, 2], vec![1, 4], vec![3], vec![5]]);
    }
}

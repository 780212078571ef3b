//! The peers that a worker knows, by name and by the address they were dialled at.

use std::collections::BTreeMap;

use crate::{
    control::cluster::normalise,
    link::{known_peer::KnownPeer, session_counts::Full},
};

/// Bounded: members of the cluster can use ever new names.
#[derive(Debug)]
pub(crate) struct Peers {
    most: usize,
    by_name: BTreeMap<String, NotedPeer>,
    by_address: BTreeMap<String, KnownPeer>,
    noted: u64,
}

#[derive(Debug)]
struct NotedPeer {
    peer: KnownPeer,
    /// Grows with every peer that is noted.
    number: u64,
    /// The user named it: it is of the cluster, or its address was given.
    is_named: bool,
}

impl Peers {
    /// Without any, for at most `most` that nobody named here.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, by_name: BTreeMap::new(), by_address: BTreeMap::new(), noted: 0 }
    }

    /// The peer `name`, noted on first sight. `address` is where it was dialled.
    ///
    /// # Errors
    /// There are as many as may be, and each is in use.
    pub(crate) fn note(
        &mut self,
        name: &str,
        address: Option<&str>,
        is_named: bool,
    ) -> Result<KnownPeer, Full> {
        let peer = match self.by_name.get_mut(name) {
            Some(known) => {
                known.is_named |= is_named;
                known.peer.clone()
            }
            None => self.add(name, is_named)?,
        };
        if let Some(address) = address {
            self.by_address.insert(normalise(address), peer.clone());
            peer.note_address(address);
        }
        Ok(peer)
    }

    fn add(&mut self, name: &str, is_named: bool) -> Result<KnownPeer, Full> {
        let unnamed = self.by_name.values().filter(|known| !known.is_named).count();
        if !is_named && unnamed >= self.most && !self.forget_one() {
            return Err(Full { field: "peers_max", most: self.most });
        }
        let peer = KnownPeer::new(name);
        self.noted += 1;
        let known = NotedPeer { peer: peer.clone(), number: self.noted, is_named };
        self.by_name.insert(name.to_owned(), known);
        Ok(peer)
    }

    /// Forgets the oldest peer that nobody uses; false when there is none.
    fn forget_one(&mut self) -> bool {
        let addresses = |peer: &KnownPeer| self.by_address.values().filter(|other| other.is(peer)).count();
        let idle = |known: &&NotedPeer| !known.is_named && known.peer.is_idle(1 + addresses(&known.peer));
        let oldest = self.by_name.values().filter(idle).min_by_key(|known| known.number);
        let Some(name) = oldest.map(|known| known.peer.name().to_owned()) else { return false };
        self.by_address.retain(|_, peer| peer.name() != name);
        self.by_name.remove(&name);
        true
    }

    /// The peer that was dialled at `address` before.
    pub(crate) fn at(&self, address: &str) -> Option<&KnownPeer> {
        self.by_address.get(&normalise(address))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&KnownPeer> {
        self.by_name.get(name).map(|known| &known.peer)
    }

    /// All of them, sorted by name.
    pub(crate) fn all(&self) -> impl Iterator<Item = &KnownPeer> {
        self.by_name.values().map(|known| &known.peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(peers: &Peers) -> Vec<&str> {
        peers.all().map(KnownPeer::name).collect()
    }

    #[test]
    fn s4_ever_new_names_push_out_those_that_nobody_uses() {
        let mut peers = Peers::new(3);
        let held = peers.note("held", None, false).unwrap();
        for number in 0..50 {
            peers.note(&format!("n{number}"), None, false).unwrap();
        }
        assert_eq!(names(&peers), ["held", "n48", "n49"]);
        // Those that the user named neither count nor go.
        for number in 0..5 {
            peers.note(&format!("own{number}"), Some(&format!("h:{number}")), true).unwrap();
        }
        assert_eq!(peers.all().count(), 8);
        let others = ["n48", "n49"].map(|name| peers.get(name).cloned().unwrap());
        assert_eq!(peers.note("one more", None, false).unwrap_err().field, "peers_max");
        drop(others);
        peers.note("one more", None, false).unwrap();
        assert_eq!(held.name(), "held");
        assert!(peers.get("held").is_some() && peers.get("n48").is_none() && peers.get("own4").is_some());
    }

    #[test]
    fn a_peer_is_found_by_every_address_it_was_dialled_at() {
        let mut peers = Peers::new(1);
        peers.note("a", Some("h:1"), false).unwrap();
        peers.note("a", Some("http://i:2/"), false).unwrap();
        assert_eq!(peers.at("i:2").map(KnownPeer::name), Some("a"));
        assert_eq!(peers.at(" h:1 ").map(KnownPeer::name), Some("a"));
        // Its addresses go with it, and are another's then.
        peers.note("b", Some("h:1"), false).unwrap();
        assert_eq!((names(&peers), peers.at("i:2").is_none()), (vec!["b"], true));
    }
}

//! The peers that a worker knows, by name and by the addresses at which they were dialled.

use std::collections::BTreeMap;

use crate::{
    control::cluster::normalise,
    session::{counts::Full, known_peer::KnownPeer},
};

/// Most addresses of one peer. A service that restarts gets a new one each time from some schedulers.
const ADDRESSES_MAX: usize = 8;

/// The known peers. Their number is limited, because members of a cluster can use new names without end.
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
    /// Grows with every added peer.
    number: u64,
    /// It is in the cluster, or the user has set its address.
    is_named: bool,
}

impl Peers {
    /// Empty, for at most `most` peers that are not in the cluster, whose address the user has not set, and that have no hint.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, by_name: BTreeMap::new(), by_address: BTreeMap::new(), noted: 0 }
    }

    /// The peer `name`, which is added on first use. `address` is the address at which it was dialled.
    ///
    /// # Errors
    /// The maximum is reached, and each peer is in use.
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
            self.note_address(normalise(address), &peer);
            peer.note_address(address);
        }
        Ok(peer)
    }

    /// A peer with too many addresses keeps the new one only: it is dialled again where one of the others is asked for.
    fn note_address(&mut self, address: String, peer: &KnownPeer) {
        let is_new = !self.by_address.contains_key(&address);
        if is_new && self.addresses(peer) >= ADDRESSES_MAX {
            self.by_address.retain(|_, other| !other.is(peer));
        }
        self.by_address.insert(address, peer.clone());
    }

    fn addresses(&self, peer: &KnownPeer) -> usize {
        self.by_address.values().filter(|other| other.is(peer)).count()
    }

    fn add(&mut self, name: &str, is_named: bool) -> Result<KnownPeer, Full> {
        let counts = |known: &&NotedPeer| !known.is_named && known.peer.hints().is_empty();
        let unnamed = self.by_name.values().filter(counts).count();
        if !is_named && unnamed >= self.most && !self.forget_one() {
            return Err(Full { field: "peers_max", most: self.most });
        }
        let peer = KnownPeer::new(name);
        self.noted += 1;
        let known = NotedPeer { peer: peer.clone(), number: self.noted, is_named };
        self.by_name.insert(name.to_owned(), known);
        Ok(peer)
    }

    /// The peer `name`, which may listen at `address`.
    ///
    /// # Errors
    /// As [`note`](Self::note).
    pub(crate) fn add_hint(&mut self, name: &str, address: &str) -> Result<KnownPeer, Full> {
        let peer = self.note(name, None, false)?;
        peer.add_hint(address);
        Ok(peer)
    }

    /// Removes a hint.
    pub(crate) fn remove_hint(&mut self, peer: &KnownPeer, address: &str) {
        peer.remove_hint(address);
        self.forget_unmet(peer);
    }

    /// Removes a peer that was never met, has no hint, and has no user but the caller, which holds one clone.
    pub(crate) fn forget_unmet(&mut self, peer: &KnownPeer) {
        let is_named = self.by_name.get(peer.name()).is_none_or(|known| known.is_named);
        if !is_named && peer.incarnation().is_none() && peer.is_idle(2) {
            self.by_name.remove(peer.name());
        }
    }

    /// Removes the oldest peer that is not in use. False if there is none.
    fn forget_one(&mut self) -> bool {
        let idle =
            |known: &&NotedPeer| !known.is_named && known.peer.is_idle(1 + self.addresses(&known.peer));
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

    /// All peers but those that the user neither named nor uses, that were not dialled, and that are not connected.
    pub(crate) fn present(&self) -> impl Iterator<Item = &KnownPeer> {
        // A dialled peer is in use by its address.
        let present = self.by_name.values().filter(|known| known.is_named || !known.peer.is_idle(1));
        present.map(|known| &known.peer)
    }

    /// All peers, sorted by name.
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
        // Peers that the user named do not count, and are not removed.
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
    fn s4_hints_neither_count_nor_stay_nor_replace_an_address() {
        let mut peers = Peers::new(1);
        peers.note("set", Some("h:1"), true).unwrap();
        let hinted: Vec<_> = (0..5_000).map(|at| peers.add_hint(&format!("n{at}"), "x:1").unwrap()).collect();
        let set = peers.add_hint("set", "x:1").unwrap();
        assert_eq!((set.address().as_deref(), set.hints()), (Some("h:1"), vec!["x:1".to_owned()]));
        assert!(peers.at("x:1").is_none());
        let twice = peers.add_hint("n0", "x:1").unwrap();
        hinted.into_iter().chain([set]).for_each(|peer| peers.remove_hint(&peer, "x:1"));
        assert_eq!(names(&peers), ["n0", "set"], "one is hinted twice, the other set");
        peers.remove_hint(&twice, "x:1");
        assert_eq!(names(&peers), ["set"]);
    }

    #[test]
    fn a_peer_is_found_by_every_address_it_was_dialled_at() {
        let mut peers = Peers::new(1);
        peers.note("a", Some("h:1"), false).unwrap();
        peers.note("a", Some("http://i:2/"), false).unwrap();
        assert_eq!(peers.at("i:2").map(KnownPeer::name), Some("a"));
        assert_eq!(peers.at(" h:1 ").map(KnownPeer::name), Some("a"));
        // Its addresses are removed with it, and another peer may use them.
        peers.note("b", Some("h:1"), false).unwrap();
        assert_eq!((names(&peers), peers.at("i:2").is_none()), (vec!["b"], true));
    }

    #[test]
    fn s4_a_peer_that_is_dialled_at_ever_new_addresses_is_found_by_the_last_ones() {
        let mut peers = Peers::new(2);
        peers.note("other", Some("other:1"), false).unwrap();
        for number in 0..5_000 {
            peers.note("a", Some(&format!("h:{number}")), false).unwrap();
        }
        assert!(peers.by_address.len() <= 1 + ADDRESSES_MAX, "{}", peers.by_address.len());
        assert_eq!(peers.at("h:4999").map(KnownPeer::name), Some("a"));
        assert_eq!(peers.at("other:1").map(KnownPeer::name), Some("other"));
        // Known ones can be dialled again without end.
        let known = peers.by_address.len();
        (0..20).for_each(|_| drop(peers.note("a", Some("h:4999"), false)));
        assert_eq!(peers.by_address.len(), known);
    }
}

//! How many control sessions are served, in all and of each peer.

use std::{collections::BTreeMap, sync::Arc};

use crate::node::Node;

/// The most sessions that may be open at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionCaps {
    pub(crate) in_all: usize,
    pub(crate) of_a_peer: usize,
}

/// Why one more session is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full {
    /// The setting that allows more.
    pub(crate) field: &'static str,
    /// Its value.
    pub(crate) most: usize,
}

impl Full {
    /// What there is no room for with `peer`, and the remedy.
    pub(crate) fn remedy(self, peer: &str) -> String {
        let Self { field, most } = self;
        let what = match field {
            "peers_max" => "other peers are connected or in use".to_owned(),
            "sessions_max" => "sessions are open".to_owned(),
            _ => format!("sessions with {peer} are open"),
        };
        format!("{most} {what}: close some, or allow more with WorkerBuilder::{field}")
    }
}

/// The sessions that are open.
#[derive(Debug, Default)]
pub(crate) struct SessionCounts {
    in_all: usize,
    /// Without those that have none, so that names which come and go take no memory.
    of_peers: BTreeMap<String, usize>,
}

impl SessionCounts {
    pub(crate) fn in_all(&self) -> usize {
        self.in_all
    }

    pub(crate) fn is_none(&self) -> bool {
        self.in_all == 0
    }

    fn add(&mut self, peer: &str, caps: SessionCaps) -> Result<(), Full> {
        let of_peer = self.of_peers.get(peer).copied().unwrap_or(0);
        if of_peer >= caps.of_a_peer {
            return Err(Full { field: "sessions_per_peer_max", most: caps.of_a_peer });
        }
        if self.in_all >= caps.in_all {
            return Err(Full { field: "sessions_max", most: caps.in_all });
        }
        self.in_all += 1;
        self.of_peers.insert(peer.to_owned(), of_peer + 1);
        Ok(())
    }

    fn remove(&mut self, peer: &str) {
        self.in_all -= 1;
        if let Some(of_peer) = self.of_peers.get_mut(peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.of_peers.remove(peer);
            }
        }
    }
}

/// A session that counts as served until this is dropped.
#[derive(Debug)]
pub(crate) struct Served {
    node: Arc<Node>,
    peer: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.node.sessions.send_modify(|counts| counts.remove(&self.peer));
    }
}

impl Node {
    /// Counts one more session with `peer`, unless there are as many as may be.
    pub(crate) fn serve_one(self: &Arc<Self>, peer: &str) -> Result<Served, Full> {
        let mut counted = Ok(());
        self.sessions.send_if_modified(|counts| {
            counted = counts.add(peer, self.session_caps);
            counted.is_ok()
        });
        counted.map(|()| Served { node: self.clone(), peer: peer.to_owned() })
    }

    /// Waits until no session is served.
    pub(crate) async fn sessions_over(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.sessions.subscribe().wait_for(SessionCounts::is_none).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPS: SessionCaps = SessionCaps { in_all: 3, of_a_peer: 2 };

    #[test]
    fn each_cap_is_kept_and_named_and_what_ends_makes_room() {
        let mut counts = SessionCounts::default();
        assert_eq!((counts.add("a", CAPS), counts.add("a", CAPS)), (Ok(()), Ok(())));
        let of_peer = Full { field: "sessions_per_peer_max", most: 2 };
        assert_eq!(counts.add("a", CAPS), Err(of_peer));
        assert_eq!(counts.add("b", CAPS), Ok(()));
        let in_all = Full { field: "sessions_max", most: 3 };
        assert_eq!((counts.add("b", CAPS), counts.add("c", CAPS)), (Err(in_all), Err(in_all)));
        counts.remove("a");
        assert_eq!(counts.add("c", CAPS), Ok(()));
        ["a", "b", "c"].into_iter().for_each(|peer| counts.remove(peer));
        assert!(counts.is_none() && counts.of_peers.is_empty());
    }
}

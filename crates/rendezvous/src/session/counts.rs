//! Counts and limits of open sessions and connections.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::{Semaphore, SemaphorePermit, watch};

/// Maximum numbers of open sessions and connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionCaps {
    pub(crate) in_all: usize,
    pub(crate) of_a_peer: usize,
    /// Data connections that one peer has set up, over all of its sessions.
    pub(crate) connections_of_a_peer: usize,
}

/// The limit that a further session or peer exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full {
    /// The setting.
    pub(crate) field: &'static str,
    /// Its value.
    pub(crate) most: usize,
}

impl Full {
    /// The error text for `peer`.
    pub(crate) fn remedy(self, peer: &str) -> String {
        let Self { field, most } = self;
        let what = match field {
            "peers_max" => "other peers are in use".to_owned(),
            "sessions_max" => "sessions are open".to_owned(),
            _ => format!("sessions with {peer} are open"),
        };
        format!("{most} {what}: close some, or allow more with the setting `{field}`")
    }
}

/// The state shared by all sessions with one peer: its data connections, and a permit to make list pages.
#[derive(Debug)]
pub(crate) struct Connections {
    open: AtomicUsize,
    most: usize,
    listing: Semaphore,
}

/// A counted data connection, until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Connections>);

impl Connections {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { open: AtomicUsize::new(0), most, listing: Semaphore::new(1) })
    }

    /// Waits until no list page is being made for the peer, so that a peer with many sessions gets no more processing
    /// time than one with a single session. Hold the permit while the page is made, not while it is sent.
    pub(crate) async fn listing_turn(&self) -> Option<SemaphorePermit<'_>> {
        self.listing.acquire().await.ok()
    }

    /// How many connections the peer may set up.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Counts a connection that this worker sets up.
    pub(crate) fn count(self: &Arc<Self>) -> Counted {
        self.open.fetch_add(1, Ordering::Relaxed);
        Counted(self.clone())
    }

    /// Counts a connection that the peer sets up, unless the maximum is reached.
    pub(crate) fn count_unless_full(self: &Arc<Self>) -> Option<Counted> {
        let more = |open: usize| (open < self.most).then_some(open + 1);
        let counted = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.is_ok().then(|| Counted(self.clone()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The open sessions and connections of one peer.
#[derive(Debug)]
struct OfPeer {
    sessions: usize,
    connections: Arc<Connections>,
}

/// The open sessions.
#[derive(Debug, Default)]
struct SessionCounts {
    in_all: usize,
    /// Peers without sessions are removed, so that names which are no longer used take no memory.
    of_peers: BTreeMap<String, OfPeer>,
}

impl SessionCounts {
    fn is_none(&self) -> bool {
        self.in_all == 0
    }

    fn add(&mut self, peer: &str, caps: SessionCaps) -> Result<Arc<Connections>, Full> {
        let sessions = self.of_peers.get(peer).map_or(0, |of_peer| of_peer.sessions);
        if sessions >= caps.of_a_peer {
            return Err(Full { field: "sessions_per_peer_max", most: caps.of_a_peer });
        }
        if self.in_all >= caps.in_all {
            return Err(Full { field: "sessions_max", most: caps.in_all });
        }
        self.in_all += 1;
        let new = || OfPeer { sessions: 0, connections: Connections::new(caps.connections_of_a_peer) };
        let of_peer = self.of_peers.entry(peer.to_owned()).or_insert_with(new);
        of_peer.sessions += 1;
        Ok(of_peer.connections.clone())
    }

    fn remove(&mut self, peer: &str) {
        self.in_all -= 1;
        if let Some(of_peer) = self.of_peers.get_mut(peer) {
            of_peer.sessions -= 1;
            if of_peer.sessions == 0 {
                self.of_peers.remove(peer);
            }
        }
    }
}

/// Counts open sessions, and enforces the limits.
#[derive(Debug)]
pub(crate) struct SessionCounter {
    counts: watch::Sender<SessionCounts>,
    caps: SessionCaps,
}

/// A counted session, until this is dropped.
#[derive(Debug)]
pub(crate) struct Served {
    counter: Arc<SessionCounter>,
    peer: String,
    connections: Arc<Connections>,
}

impl Served {
    /// The state shared by all sessions with the peer.
    pub(crate) fn connections(&self) -> Arc<Connections> {
        self.connections.clone()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.counter.counts.send_modify(|counts| counts.remove(&self.peer));
    }
}

impl SessionCounter {
    pub(crate) fn new(caps: SessionCaps) -> Arc<Self> {
        Arc::new(Self { counts: watch::Sender::new(SessionCounts::default()), caps })
    }

    /// Counts a session with `peer`, unless a limit is reached.
    pub(crate) fn serve_one(self: &Arc<Self>, peer: &str) -> Result<Served, Full> {
        let mut counted = None;
        self.counts.send_if_modified(|counts| match counts.add(peer, self.caps) {
            Ok(connections) => {
                let (counter, peer) = (self.clone(), peer.to_owned());
                counted = Some(Ok(Served { counter, peer, connections }));
                true
            }
            Err(full) => {
                counted = Some(Err(full));
                false
            }
        });
        // The closure above is called exactly once.
        counted.unwrap_or(Err(Full { field: "sessions_max", most: self.caps.in_all }))
    }

    /// How many sessions may be open.
    pub(crate) fn most(&self) -> usize {
        self.caps.in_all
    }

    /// The number of open sessions.
    pub(crate) fn in_all(&self) -> usize {
        self.counts.borrow().in_all
    }

    /// Waits until no session is open.
    pub(crate) async fn none_served(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.counts.subscribe().wait_for(SessionCounts::is_none).await;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const CAPS: SessionCaps = SessionCaps { in_all: 3, of_a_peer: 2, connections_of_a_peer: 2 };

    #[test]
    fn each_cap_is_kept_and_named_and_what_ends_makes_room() {
        let mut counts = SessionCounts::default();
        let add = |counts: &mut SessionCounts, peer: &str| counts.add(peer, CAPS).map(drop);
        assert_eq!((add(&mut counts, "a"), add(&mut counts, "a")), (Ok(()), Ok(())));
        let of_peer = Full { field: "sessions_per_peer_max", most: 2 };
        assert_eq!(add(&mut counts, "a"), Err(of_peer));
        assert_eq!(add(&mut counts, "b"), Ok(()));
        let in_all = Full { field: "sessions_max", most: 3 };
        assert_eq!((add(&mut counts, "b"), add(&mut counts, "c")), (Err(in_all), Err(in_all)));
        counts.remove("a");
        assert_eq!(add(&mut counts, "c"), Ok(()));
        ["a", "b", "c"].into_iter().for_each(|peer| counts.remove(peer));
        assert!(counts.is_none() && counts.of_peers.is_empty());
    }

    #[test]
    fn s4_data_connections_of_a_peer_are_counted_over_its_sessions() {
        let mut counts = SessionCounts::default();
        let (one, other) = (counts.add("a", CAPS).unwrap(), counts.add("a", CAPS).unwrap());
        let of_b = counts.add("b", CAPS).unwrap();
        let held = (one.count_unless_full().unwrap(), other.count_unless_full().unwrap());
        assert!(one.count_unless_full().is_none() && other.count_unless_full().is_none());
        assert!(of_b.count_unless_full().is_some());
        // Connections that this worker sets up count, and are never refused.
        let own = one.count();
        drop(held.0);
        assert!(one.count_unless_full().is_none());
        drop(own);
        assert!(one.count_unless_full().is_some());
    }

    #[test]
    fn s6_pages_for_a_peer_are_made_one_at_a_time_over_its_sessions() {
        let mut counts = SessionCounts::default();
        let (one, other) = (counts.add("a", CAPS).unwrap(), counts.add("a", CAPS).unwrap());
        let of_b = counts.add("b", CAPS).unwrap();
        let turn = one.listing_turn().now_or_never().flatten().expect("nobody else is given a list");
        assert!(other.listing_turn().now_or_never().is_none(), "another session has a turn of its own");
        assert!(of_b.listing_turn().now_or_never().flatten().is_some(), "another peer waits for this one");
        drop(turn);
        assert!(other.listing_turn().now_or_never().flatten().is_some());
    }
}

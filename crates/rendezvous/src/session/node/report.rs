//! The report of a worker: what it is, its peers, sets and memory.

use std::cmp::Reverse;

use tensorwire_memory::Pool;
use tensorwire_protocol::{
    limits::{REPORT_PEERS_MAX, REPORT_SETS_MAX},
    report::{PeerReport, PoolReport, SetReport, Traffic, WorkerReport},
};

use crate::{
    peer_memory::{pools::Pools, trust::Trust},
    session::{known_peer::KnownPeer, node::Node},
    values::sets::listing::ListedSet,
};

impl Node {
    /// The report for the peer `reader`, or for this worker's own program. A peer of a worker that does not trust its peers learns of
    /// no other peer, and not how much they move.
    pub(crate) fn report(&self, reader: Option<&str>) -> WorkerReport {
        let tells_all = reader.is_none() || self.settings.trust == Trust::Cluster;
        let mut peers = self.present_peers();
        let all = peers.len();
        peers.retain(|peer| tells_all || reader == Some(peer.name()));
        let (peers, _) = first(peers.iter().map(peer_report).collect(), REPORT_PEERS_MAX, |peer| {
            Reverse(peer.transport.is_some())
        });
        let sets = self.settings.values.sets.list(reader);
        let (sets, sets_left_out) =
            first(sets.into_iter().map(set_report).collect(), REPORT_SETS_MAX, |_| ());
        let mut report = WorkerReport::default();
        self.name().clone_into(&mut report.name);
        self.address().clone_into(&mut report.address);
        report.incarnation = self.incarnation();
        env!("CARGO_PKG_VERSION").clone_into(&mut report.version);
        report.clock = self.settings.runtime.now();
        report.total = tells_all.then(|| self.total());
        report.sessions = tells_all.then(|| self.sessions.in_all() as u64);
        report.peers_left_out = (all - peers.len()) as u64;
        report.peers = peers;
        (report.sets, report.sets_left_out) = (sets, sets_left_out as u64);
        report.pools = if tells_all { pool_reports(&self.settings.pools) } else { Vec::new() };
        report
    }

    /// What all connections have moved.
    fn total(&self) -> Traffic {
        let known = self.all_peers();
        known.iter().fold(self.forgotten.traffic(), |sum, peer| sum.plus(&peer.traffic()))
    }
}

/// The first `most` of `all` in the order of `order`, and how many are left out.
fn first<T, Order: Ord>(mut all: Vec<T>, most: usize, order: impl Fn(&T) -> Order) -> (Vec<T>, usize) {
    all.sort_by_key(order);
    let left_out = all.len().saturating_sub(most);
    all.truncate(most);
    (all, left_out)
}

fn peer_report(peer: &KnownPeer) -> PeerReport {
    let live = peer.live_connection();
    let mut report = PeerReport::default();
    peer.name().clone_into(&mut report.name);
    report.address = peer.address();
    report.traffic = peer.traffic();
    if let Some(live) = live {
        report.transport = Some(live.kind.name().to_owned());
        (report.waiting_at_peer, report.waiting_here) = live.protocol.requests_waiting();
        report.stalled = live.stalled_for();
    }
    report
}

fn set_report(set: ListedSet) -> SetReport {
    let mut report = SetReport::default();
    (report.name, report.version) = (set.name, set.version);
    (report.tensors, report.bytes) = (set.tensors, set.bytes);
    report
}

fn pool_reports(pools: &Pools) -> Vec<PoolReport> {
    pools.named().into_iter().map(|(name, pool)| pool_report(name, pool)).collect()
}

fn pool_report(name: &str, pool: &Pool) -> PoolReport {
    let (stats, mut report) = (pool.stats(), PoolReport::default());
    name.clone_into(&mut report.name);
    (report.block_bytes, report.used_bytes) = (stats.block_bytes, stats.used_bytes);
    (report.leaked_bytes, report.retired_bytes) = (stats.leaked_bytes, stats.retired_bytes);
    report.waiting = stats.waiting as u64;
    report
}

//! Metrics that are read when they are collected.

#[cfg(not(feature = "metrics"))]
use crate::unmetered::{counter, gauge};
#[cfg(feature = "metrics")]
use metrics::{counter, gauge};
use tensorwire_memory::{
    Pool,
    copy::{self, CopyReason},
};

use crate::worker::Worker;

/// The reasons for copies, with their labels.
const REASONS: [(CopyReason, &str); 12] = [
    (CopyReason::Import, "import"),
    (CopyReason::ShmPayload, "shm_payload"),
    (CopyReason::ShmRead, "shm_read"),
    (CopyReason::ShmMessage, "shm_message"),
    (CopyReason::ShmInline, "shm_inline"),
    (CopyReason::Catalogue, "catalogue"),
    (CopyReason::Message, "message"),
    (CopyReason::Local, "local"),
    (CopyReason::Eager, "eager"),
    (CopyReason::Bounce, "bounce"),
    (CopyReason::Decrypted, "decrypted"),
    (CopyReason::TcpSmall, "tcp_small"),
];

impl Worker {
    /// Sets the gauges of this worker's pools, peers and sessions, and the counters of this process's copies, in the
    /// recorder of the `metrics` crate. Call it whenever metrics are collected. The worker has no timer for it, because
    /// that would wake an idle process. Transfers are counted as they happen.
    pub fn record_metrics(&self) {
        let node = &self.node;
        node.pools().named().into_iter().for_each(|(name, pool)| record_pool(node.name(), name, pool));
        let peers = self.peers();
        let connected = peers.iter().filter(|peer| peer.transport.is_some()).count();
        let worker = || node.name().to_owned();
        gauge!("tensorwire_peers", "worker" => worker()).set(peers.len() as f64);
        gauge!("tensorwire_peers_connected", "worker" => worker()).set(connected as f64);
        gauge!("tensorwire_sessions", "worker" => worker()).set(node.sessions().in_all() as f64);
        for (reason, name) in REASONS {
            let copied = copy::count(reason);
            counter!("tensorwire_copies_total", "reason" => name).absolute(copied.calls);
            counter!("tensorwire_copied_bytes_total", "reason" => name).absolute(copied.bytes);
        }
    }
}

fn record_pool(worker: &str, name: &'static str, pool: &Pool) {
    let stats = pool.stats();
    let figures = [
        ("tensorwire_pool_block_bytes", stats.block_bytes),
        ("tensorwire_pool_huge_bytes", stats.huge_bytes),
        ("tensorwire_pool_used_bytes", stats.used_bytes),
        ("tensorwire_pool_leaked_bytes", stats.leaked_bytes),
        ("tensorwire_pool_retired_bytes", stats.retired_bytes),
        ("tensorwire_pool_waiting", stats.waiting as u64),
    ];
    for (figure, value) in figures {
        gauge!(figure, "worker" => worker.to_owned(), "pool" => name).set(value as f64);
    }
}

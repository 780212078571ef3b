//! What a worker reports of itself, to its program and to its peers.

use std::time::Duration;

use crate::Waiting;

/// Values and data connections, counted since the worker was started.
///
/// They are counted at the same places as the metrics `tensorwire_transfers_total`, `tensorwire_bytes_total`, `tensorwire_errors_total`,
/// `tensorwire_connects_total`, `tensorwire_reconnects_total` and `tensorwire_losses_total`, so both agree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Values received.
    pub values_received: u64,
    /// Their bytes.
    pub bytes_received: u64,
    /// Values sent. A value that a neighbour reads out of this worker's catalogue is counted by the neighbour alone.
    pub values_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Receives and fetches that failed.
    pub errors: u64,
    /// Data connections made, by either side.
    pub connects: u64,
    /// Those of them that were not the first with their peer.
    pub reconnects: u64,
    /// Data connections that were lost.
    pub losses: u64,
}

impl Traffic {
    /// How many numbers it has.
    pub(crate) const NUMBERS: usize = 8;

    /// Its numbers, in the order of the fields.
    pub(crate) fn numbers(&self) -> [u64; Self::NUMBERS] {
        let Self { values_received, bytes_received, values_sent, bytes_sent, .. } = *self;
        let Self { errors, connects, reconnects, losses, .. } = *self;
        [values_received, bytes_received, values_sent, bytes_sent, errors, connects, reconnects, losses]
    }

    pub(crate) fn of_numbers(numbers: [u64; Self::NUMBERS]) -> Self {
        let [values_received, bytes_received, values_sent, bytes_sent, errors, connects, reconnects, losses] =
            numbers;
        Self {
            values_received,
            bytes_received,
            values_sent,
            bytes_sent,
            errors,
            connects,
            reconnects,
            losses,
        }
    }

    /// The sum of both. A sum that does not fit is the largest number.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let (one, other) = (self.numbers(), other.numbers());
        Self::of_numbers(std::array::from_fn(|at| one[at].saturating_add(other[at])))
    }
}

/// What a worker reports of one of its peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerReport {
    /// Its worker name.
    pub name: String,
    /// Its address, if known.
    pub address: Option<String>,
    /// The fabric in use; `None` while not connected.
    pub transport: Option<String>,
    /// Values and connections between the two workers.
    pub traffic: Traffic,
    /// Requests of the worker that the peer has not answered.
    pub waiting_at_peer: Waiting,
    /// Requests of the peer that the worker has not answered. A fetch that waits for a newer version is one.
    pub waiting_here: Waiting,
    /// How long the peer's host has acknowledged nothing although something waits for it, if the fabric knows.
    pub stalled: Option<Duration>,
}

/// The newest version of a set of a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetReport {
    /// Its name.
    pub name: String,
    /// The newest version.
    pub version: u64,
    /// The number of tensors of that version.
    pub tensors: u64,
    /// Bytes of its tensors.
    pub bytes: u64,
}

/// The memory of a pool of a worker, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolReport {
    /// `source` (published and sent values), `receive`, `ring` or `message`.
    pub name: String,
    /// Memory taken from the system.
    pub block_bytes: u64,
    /// Memory in use.
    pub used_bytes: u64,
    /// Memory that is never reused because a peer might still write it.
    pub leaked_bytes: u64,
    /// Memory that peers still view after their connection ended.
    pub retired_bytes: u64,
    /// Tasks that wait for memory.
    pub waiting: u64,
}

/// What a worker reports of itself at one moment. A report that came from a peer says what that peer claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerReport {
    /// Its name.
    pub name: String,
    /// The address that peers dial, `host:port`.
    pub address: String,
    /// A random number that changes with each start of the worker.
    pub incarnation: u64,
    /// Its version of Tensorwire.
    pub version: String,
    /// A reading of the worker's monotonic clock, which does not begin at a fixed time. The difference of two reports is the time between
    /// them, so rates need no clock of the reader.
    pub clock: Duration,
    /// The sum over all peers, also those that it has forgotten. `None` if the worker keeps it from the reader.
    pub total: Option<Traffic>,
    /// Control sessions that are open. `None` if the worker keeps it from the reader.
    pub sessions: Option<u64>,
    /// Its peers, those that are connected first, then by name.
    pub peers: Vec<PeerReport>,
    /// Peers that are not in the report, because there are too many, or because the worker does not name them to the reader.
    pub peers_left_out: u64,
    /// Its sets that the reader may read, by name.
    pub sets: Vec<SetReport>,
    /// Sets that the reader may read and that are not in the report, because there are too many.
    pub sets_left_out: u64,
    /// Its pools. Empty if the worker keeps them from the reader.
    pub pools: Vec<PoolReport>,
}

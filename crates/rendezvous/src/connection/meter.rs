//! Metrics and spans of the transfers with one peer. `docs/src/metrics.md` lists the names.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

#[cfg(not(feature = "metrics"))]
use crate::unmetered::{Counter, Label, SharedString, counter};
#[cfg(feature = "metrics")]
use metrics::{Counter, Label, SharedString, counter};
use tensorwire_fabric::FabricKind;
use tracing::Span;

use crate::{
    connection::tally::{PeerTally, add},
    control::name::is_drawn,
    error::{PeerLoss, Transfer, WorkerError},
    log::quota::LogQuota,
};

/// Maximum number of peers with their own label. Further ones share one.
const LABELS_MAX: usize = 1024;

/// The label that further ones share.
const OTHERS: &str = "others";

/// The label that workers share which have another name at each start.
const CLIENTS: &str = "clients";

/// The labels of peers. Their number is limited, because members of a cluster can use new names without end.
#[derive(Debug, Default)]
pub(crate) struct Labels(Mutex<BTreeSet<Arc<str>>>);

impl Labels {
    pub(crate) fn of(&self, peer: &str) -> Arc<str> {
        if is_drawn(peer) {
            return CLIENTS.into();
        }
        let mut labels = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(label) = labels.get(peer) {
            return label.clone();
        }
        if labels.len() >= LABELS_MAX {
            return OTHERS.into();
        }
        let label: Arc<str> = peer.into();
        labels.insert(label.clone());
        label
    }
}

/// Transfers and bytes of one direction.
struct Direction {
    transfers: Counter,
    bytes: Counter,
}

impl Direction {
    fn new(direction: &'static str, peer: &Arc<str>, transport: &'static str) -> Self {
        let labels = vec![
            Label::new("direction", direction),
            Label::new("peer", peer.clone()),
            Label::new("transport", transport),
        ];
        Self {
            transfers: counter!("tensorwire_transfers_total", labels.clone()),
            bytes: counter!("tensorwire_bytes_total", labels),
        }
    }

    fn count(&self, bytes: u64) {
        self.transfers.increment(1);
        self.bytes.increment(bytes);
    }
}

/// Counters of one connection, looked up once. Without a recorder, counting does nothing.
pub(crate) struct Meter {
    peer: Arc<str>,
    transport: &'static str,
    received: Direction,
    sent: Direction,
    tally: Arc<PeerTally>,
    /// Limits the log lines that peers cause.
    pub(crate) log: Arc<LogQuota>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Meter({} over {})", self.peer, self.transport)
    }
}

impl Meter {
    pub(crate) fn new(
        peer: Arc<str>,
        kind: FabricKind,
        tally: Arc<PeerTally>,
        log: &Arc<LogQuota>,
    ) -> Arc<Self> {
        let transport = kind.name();
        let (received, sent) =
            (Direction::new("received", &peer, transport), Direction::new("sent", &peer, transport));
        Arc::new(Self { peer, transport, received, sent, tally, log: log.clone() })
    }

    /// Counts a value that is sent to the peer.
    pub(crate) fn sends(&self, bytes: u64) {
        self.sent.count(bytes);
        self.tally.sent.count(bytes);
        if tracing::span_enabled!(target: "tensorwire", tracing::Level::DEBUG) {
            Span::current().record("bytes", bytes);
        }
    }

    /// Counts a receive that has ended, within `span`.
    pub(crate) fn ended(&self, span: &Span, ended: Result<u64, &WorkerError>) {
        match ended {
            Ok(bytes) => {
                self.received.count(bytes);
                self.tally.received.count(bytes);
                span.record("bytes", bytes);
            }
            Err(error) => self.failed(error),
        }
    }

    fn failed(&self, error: &WorkerError) {
        add(&self.tally.errors, 1);
        let (kind, peer) = (kind(error), SharedString::from(self.peer.clone()));
        counter!("tensorwire_errors_total", "kind" => kind, "peer" => peer, "transport" => self.transport)
            .increment(1);
    }

    /// Counts a new connection; `is_again` if it is not the first with this peer.
    pub(crate) fn connected(&self, is_again: bool, encrypted: bool) {
        add(&self.tally.connects, 1);
        add(&self.tally.reconnects, is_again.into());
        let label = || SharedString::from(self.peer.clone());
        counter!("tensorwire_connects_total", "peer" => label(), "transport" => self.transport).increment(1);
        if encrypted {
            counter!("tensorwire_encrypted_connects_total", "peer" => label(), "transport" => self.transport)
                .increment(1);
        }
        if is_again {
            counter!("tensorwire_reconnects_total", "peer" => label(), "transport" => self.transport)
                .increment(1);
        }
    }

    /// Counts the end of the connection, in order or by a loss.
    pub(crate) fn over(&self, why: PeerLoss) {
        let (kind, peer) = (loss_kind(why), SharedString::from(self.peer.clone()));
        let name = match why {
            PeerLoss::Goodbye | PeerLoss::ShutDownHere => "tensorwire_closes_total",
            _ => {
                add(&self.tally.losses, 1);
                "tensorwire_losses_total"
            }
        };
        counter!(name, "kind" => kind, "peer" => peer, "transport" => self.transport).increment(1);
    }
}

/// The span of a receive. It costs a check of its level if no subscriber wants it.
pub(crate) fn receive_span(name: Transfer<'_>, kind: FabricKind) -> Span {
    tracing::debug_span!(
        target: "tensorwire",
        "receive",
        key = %name.key,
        step = name.step,
        peer = %name.peer,
        transport = kind.name(),
        bytes = tracing::field::Empty,
    )
}

/// The span of an answer.
pub(crate) fn send_span(peer: &str, key: &str, step: Option<i64>, kind: FabricKind) -> Span {
    // The task that reads the request may be inside an unrelated span.
    tracing::debug_span!(
        target: "tensorwire",
        parent: None,
        "send",
        key,
        step,
        peer,
        transport = kind.name(),
        bytes = tracing::field::Empty,
    )
}

fn loss_kind(loss: PeerLoss) -> &'static str {
    match loss {
        PeerLoss::Gone => "gone",
        PeerLoss::Unresponsive => "unresponsive",
        PeerLoss::Unreachable => "unreachable",
        PeerLoss::Goodbye => "goodbye",
        PeerLoss::Misbehaved => "misbehaved",
        PeerLoss::ShutDownHere => "shut_down_here",
        PeerLoss::StepBroken => "step_broken",
        PeerLoss::NameTaken => "name_taken",
    }
}

/// The label of an error.
fn kind(error: &WorkerError) -> &'static str {
    match error {
        WorkerError::Remote { .. } => "remote",
        WorkerError::Local { .. } => "local",
        WorkerError::Mismatch { .. } => "mismatch",
        WorkerError::Corrupted { .. } => "corrupted",
        WorkerError::PeerLost { .. } => "peer_lost",
        WorkerError::Aborted { .. } => "aborted",
        WorkerError::Memory(_) => "memory",
        WorkerError::Fabric(_) => "fabric",
        WorkerError::Control(_) => "control",
        WorkerError::Limit { .. } => "limit",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s4_ever_new_names_share_one_label() {
        let labels = Labels::default();
        for number in 0..LABELS_MAX {
            assert_eq!(&*labels.of(&number.to_string()), number.to_string());
        }
        assert_eq!(&*labels.of("one more"), OTHERS);
        assert_eq!(&*labels.of("7"), "7");
        let labels = Labels::default();
        for number in 0..2 * LABELS_MAX {
            assert_eq!(
                &*labels.of(&format!("/job:client_{number}_9f86d081884c7d65/replica:0/task:0")),
                CLIENTS
            );
        }
        assert_eq!(&*labels.of("/job:ps/replica:0/task:0"), "/job:ps/replica:0/task:0");
    }
}

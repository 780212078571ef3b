//! S3: every operation ends exactly once, and ends badly only for a reason.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    Violation,
    ids::{NodeId, OperationId},
};

/// How an operation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Well.
    Done,
    /// Its own side gave it up.
    Cancelled,
    /// With an error that the scenario expects (not found, aborted, …).
    Refused,
    /// The peer or the way to it was lost. Needs a fault that explains it.
    PeerLost,
    /// The deadline passed. Needs a fault that explains it.
    Deadline,
    /// What came was not what was sent, and was found to be so. Needs a flipped bit that explains it, which explains no
    /// other.
    Corrupted,
}

impl Outcome {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Refused => "refused",
            Self::PeerLost => "peer lost",
            Self::Deadline => "deadline",
            Self::Corrupted => "corrupted",
        }
    }
}

#[derive(Debug)]
pub(crate) struct OpenOperation {
    pub(crate) node: NodeId,
    pub(crate) address: String,
    pub(crate) peer: Option<String>,
    pub(crate) what: String,
    pub(crate) began: Duration,
}

/// What a fault touches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Everything that one address does.
    Address(String),
    /// As `Address`, while its process is stopped.
    Stopped(String),
    /// What two addresses do with each other.
    Between(String, String),
}

impl Reach {
    fn touches(&self, operation: &OpenOperation) -> bool {
        let is_own = |address: &String| *address == operation.address;
        let is_peer = |address: &String| operation.peer.as_ref().is_none_or(|peer| peer == address);
        match self {
            Self::Address(address) | Self::Stopped(address) => is_own(address) || is_peer(address),
            Self::Between(a, b) => is_own(a) && is_peer(b) || is_own(b) && is_peer(a),
        }
    }
}

/// An injected fault, for explaining outcomes.
#[derive(Debug)]
struct Fault {
    reach: Reach,
    /// When it was healed; `None` while it lasts.
    until: Option<Duration>,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    open: BTreeMap<OperationId, OpenOperation>,
    next: u64,
    faults: Vec<Fault>,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) crashes: u64,
    /// Bits that were flipped.
    pub(crate) flips: u64,
    corrupted: u64,
}

impl Ledger {
    pub(crate) fn begin(&mut self, operation: OpenOperation) -> OperationId {
        let id = OperationId(self.next);
        self.next += 1;
        self.open.insert(id, operation);
        id
    }

    /// Ends `id`; `slack` is how long after its healing a fault still explains an outcome.
    pub(crate) fn end(
        &mut self,
        id: OperationId,
        outcome: &Outcome,
        why: Option<String>,
        slack: Duration,
    ) -> Result<(), Violation> {
        let Some(operation) = self.open.remove(&id) else {
            // Its node crashed meanwhile.
            return Ok(());
        };
        match outcome {
            Outcome::Done => self.done += 1,
            _ => self.failed += 1,
        }
        let explained = match outcome {
            Outcome::PeerLost | Outcome::Deadline => self.explains(&operation, slack),
            Outcome::Corrupted => {
                self.corrupted += 1;
                self.corrupted <= self.flips
            }
            _ => true,
        };
        if explained {
            return Ok(());
        }
        let OpenOperation { address, peer, what, began, .. } = operation;
        Err(Violation::Unexplained(format!(
            "{id} `{what}` of {address} with {peer:?}, begun at {began:?}, ended with `{}` without a fault: {}",
            outcome.name(),
            why.unwrap_or_default()
        )))
    }

    fn explains(&self, operation: &OpenOperation, slack: Duration) -> bool {
        self.faults.iter().any(|fault| {
            let recent = fault.until.is_none_or(|until| operation.began <= until + slack);
            recent && fault.reach.touches(operation)
        })
    }

    pub(crate) fn fault(&mut self, reach: Reach, until: Option<Duration>) {
        self.faults.push(Fault { reach, until });
    }

    /// What `reach` names works again.
    pub(crate) fn healed(&mut self, reach: &Reach, at: Duration) {
        let lasting = self.faults.iter_mut().filter(|fault| fault.until.is_none() && fault.reach == *reach);
        lasting.for_each(|fault| fault.until = Some(at));
    }

    /// A crash ends the operations of its node.
    pub(crate) fn forget_node(&mut self, node: NodeId) {
        self.open.retain(|_, operation| operation.node != node);
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// The open operations, for a report.
    pub(crate) fn describe_open(&self) -> String {
        let lines = self.open.iter().take(8).map(|(id, operation)| {
            let OpenOperation { address, peer, what, began, .. } = operation;
            format!("{id} `{what}` of {address} with {peer:?} since {began:?}")
        });
        format!("{} open: {}", self.open.len(), lines.collect::<Vec<_>>().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(peer: &str, began_ms: u64) -> OpenOperation {
        OpenOperation {
            node: NodeId(1),
            address: "a".into(),
            peer: Some(peer.into()),
            what: "test".into(),
            began: Duration::from_millis(began_ms),
        }
    }

    const SLACK: Duration = Duration::from_millis(10);

    fn node(address: &str) -> Reach {
        Reach::Address(address.into())
    }

    #[test]
    fn s3_a_lost_peer_needs_a_fault_of_that_peer() {
        let mut ledger = Ledger::default();
        ledger.fault(node("c"), None);
        let (b, c) = (ledger.begin(operation("b", 1)), ledger.begin(operation("c", 1)));
        assert!(matches!(ledger.end(b, &Outcome::PeerLost, None, SLACK), Err(Violation::Unexplained(_))));
        assert_eq!(ledger.end(c, &Outcome::PeerLost, None, SLACK), Ok(()));
        assert_eq!((ledger.done, ledger.failed), (0, 2));
    }

    #[test]
    fn s3_a_lost_link_explains_only_its_two_ends() {
        let mut ledger = Ledger::default();
        ledger.fault(Reach::Between("b".into(), "a".into()), None);
        let (b, c) = (ledger.begin(operation("b", 1)), ledger.begin(operation("c", 1)));
        assert_eq!(ledger.end(b, &Outcome::Deadline, None, SLACK), Ok(()));
        assert!(matches!(ledger.end(c, &Outcome::Deadline, None, SLACK), Err(Violation::Unexplained(_))));
    }

    #[test]
    fn s3_a_healed_fault_explains_for_a_bounded_time() {
        let mut ledger = Ledger::default();
        ledger.fault(node("b"), None);
        ledger.healed(&node("b"), Duration::from_millis(20));
        let (soon, late) = (ledger.begin(operation("b", 30)), ledger.begin(operation("b", 31)));
        assert_eq!(ledger.end(soon, &Outcome::Deadline, None, SLACK), Ok(()));
        assert!(matches!(ledger.end(late, &Outcome::Deadline, None, SLACK), Err(Violation::Unexplained(_))));
    }

    #[test]
    fn s3_a_flip_explains_one_damaged_content() {
        let mut ledger = Ledger::default();
        let ids = [1, 2].map(|began| ledger.begin(operation("b", began)));
        ledger.flips = 1;
        assert_eq!(ledger.end(ids[0], &Outcome::Corrupted, None, SLACK), Ok(()));
        let second = ledger.end(ids[1], &Outcome::Corrupted, None, SLACK);
        assert!(matches!(second, Err(Violation::Unexplained(_))));
    }

    #[test]
    fn s3_a_crash_ends_the_operations_of_its_node() {
        let mut ledger = Ledger::default();
        ledger.begin(operation("b", 0));
        assert!(ledger.is_open());
        ledger.forget_node(NodeId(1));
        assert!(!ledger.is_open());
    }
}

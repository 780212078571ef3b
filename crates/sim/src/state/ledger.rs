//! S3: every operation ends exactly once, and fails only for a reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Violation,
    ids::{NodeId, OperationId},
};

/// How an operation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OperationResult {
    /// It succeeded.
    Done,
    /// Its own side cancelled it.
    Cancelled,
    /// With an error that the scenario expects (not found, aborted, …).
    Refused,
    /// The peer or the path to it was lost. Needs a fault that explains it.
    PeerLost,
    /// The deadline passed. Needs a fault that explains it.
    Deadline,
    /// A checksum found that the received bytes differ from the sent ones. Needs a flipped bit that explains it; each
    /// flipped bit explains one operation.
    Corrupted,
}

impl OperationResult {
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
    /// The time by which it must end, and the promise that demands it.
    pub(crate) due: Option<(Duration, &'static str)>,
}

/// How long operations may take. Operations of a stopped process have no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// L1: from the end of all faults, for operations in progress then.
    pub after_faults: Duration,
    /// L1: for operations that begin later.
    pub new_work: Duration,
    /// L2: from the death of the peer's process.
    pub after_death: Duration,
}

/// What a fault affects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reach {
    /// All operations of one address.
    Address(String),
    /// As `Address`, while its process is stopped.
    Stopped(String),
    /// Operations between two addresses.
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

/// An injected fault, which explains failures.
#[derive(Debug)]
struct PastFault {
    reach: Reach,
    /// When it was healed; `None` while it lasts.
    until: Option<Duration>,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    open: BTreeMap<OperationId, OpenOperation>,
    next: u64,
    faults: Vec<PastFault>,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) crashes: u64,
    /// Bits that were flipped.
    pub(crate) flips: u64,
    corrupted: u64,
    bounds: Option<Bounds>,
    /// When the liveness phase began.
    healed_at: Option<Duration>,
    /// No operation is due before this time.
    next_due: Option<Duration>,
    /// Addresses of hostile nodes.
    pub(crate) hostile: BTreeSet<String>,
}

impl Ledger {
    pub(crate) fn begin(&mut self, operation: OpenOperation) -> OperationId {
        let id = OperationId(self.next);
        self.next += 1;
        let mut operation = operation;
        operation.due = self.due_of_new(operation.began);
        self.note_due(operation.due);
        self.open.insert(id, operation);
        id
    }

    /// `id` is part of an operation that began earlier.
    pub(crate) fn part_of(&mut self, id: OperationId, began: Duration) {
        if let Some(operation) = self.open.get_mut(&id) {
            operation.began = operation.began.min(began);
        }
    }

    /// Ends `id`. `slack` is how long after its healing a fault still explains a failure.
    pub(crate) fn end(
        &mut self,
        id: OperationId,
        result: &OperationResult,
        why: Option<String>,
        slack: Duration,
    ) -> Result<(), Violation> {
        let Some(operation) = self.open.remove(&id) else {
            // Its node crashed meanwhile.
            return Ok(());
        };
        match result {
            OperationResult::Done => self.done += 1,
            _ => self.failed += 1,
        }
        let explained = match result {
            OperationResult::PeerLost | OperationResult::Deadline => self.explains(&operation, slack),
            OperationResult::Corrupted => {
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
            result.name(),
            why.unwrap_or_default()
        )))
    }

    /// From now on operations have these bounds.
    pub(crate) fn bound(&mut self, bounds: Bounds) {
        self.bounds = Some(bounds);
    }

    pub(crate) fn is_healed(&self) -> bool {
        self.healed_at.is_some()
    }

    /// The last fault has ended: all operations in progress must end. Returns false if the liveness phase had begun
    /// already.
    pub(crate) fn all_must_end(&mut self, now: Duration) -> bool {
        let before = self.healed_at.replace(now);
        let due = self.bounds.map(|bounds| (now + bounds.after_faults, "L1"));
        self.open.values_mut().for_each(|operation| operation.due = due.or(operation.due));
        self.next_due = self.open.values().filter_map(|operation| operation.due).map(|(at, _)| at).min();
        before.is_none()
    }

    fn due_of_new(&self, began: Duration) -> Option<(Duration, &'static str)> {
        let (bounds, healed_at) = self.bounds.zip(self.healed_at)?;
        // Within this time nodes notice earlier losses.
        Some(((began + bounds.new_work).max(healed_at + bounds.after_faults), "L1"))
    }

    fn note_due(&mut self, due: Option<(Duration, &'static str)>) {
        self.next_due = self.next_due.into_iter().chain(due.map(|(at, _)| at)).min();
    }

    /// The process at `address` is dead: operations of others with it must end soon.
    pub(crate) fn death(&mut self, address: &str, now: Duration) {
        let Some(bounds) = self.bounds else { return };
        let due = (now + bounds.after_death, "L2");
        let stopped: Vec<String> = self.stopped().map(str::to_owned).collect();
        let with_it = |operation: &&mut OpenOperation| {
            operation.peer.as_deref() == Some(address) && !stopped.contains(&operation.address)
        };
        let with_it = self.open.values_mut().filter(with_it);
        with_it.for_each(|operation| operation.due = operation.due.or(Some(due)));
        self.note_due(Some(due));
    }

    fn stopped(&self) -> impl Iterator<Item = &str> {
        self.faults.iter().filter(|fault| fault.until.is_none()).filter_map(|fault| match &fault.reach {
            Reach::Stopped(address) => Some(address.as_str()),
            _ => None,
        })
    }

    /// The process at `address` is stopped: operations that it takes part in have no bound.
    pub(crate) fn excuse(&mut self, address: &str) {
        let of_it = |operation: &&mut OpenOperation| {
            operation.address == address || operation.peer.as_deref() == Some(address)
        };
        self.open.values_mut().filter(of_it).for_each(|operation| operation.due = None);
    }

    /// The first operation that should have ended by `now`.
    pub(crate) fn overdue(&mut self, now: Duration) -> Option<Violation> {
        if self.next_due.is_none_or(|due| now <= due) {
            return None;
        }
        let late = |operation: &&OpenOperation| operation.due.is_some_and(|(at, _)| at < now);
        if let Some(operation) = self.open.values().find(late) {
            let OpenOperation { address, peer, what, began, due, .. } = operation;
            let (due, promise) = (*due)?;
            let what = format!(
                "`{what}` of {address} with {peer:?}, begun at {began:?}, had to end by {due:?}, and it is {now:?}"
            );
            return Some(Violation::Late { promise, what });
        }
        self.next_due = self.open.values().filter_map(|operation| operation.due).map(|(at, _)| at).min();
        None
    }

    fn explains(&self, operation: &OpenOperation, slack: Duration) -> bool {
        self.faults.iter().any(|fault| {
            let recent = fault.until.is_none_or(|until| operation.began <= until + slack);
            recent && fault.reach.touches(operation)
        })
    }

    pub(crate) fn fault(&mut self, reach: Reach, until: Option<Duration>) {
        self.faults.push(PastFault { reach, until });
    }

    /// The fault of `reach` has ended.
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

    /// Whether an operation is open in which no hostile node takes part. An operation with a hostile node may wait for
    /// its deadline alone.
    pub(crate) fn is_open_among_honest(&self) -> bool {
        let is_hostile = |operation: &OpenOperation| {
            let ends = [Some(&operation.address), operation.peer.as_ref()];
            ends.into_iter().flatten().any(|address| self.hostile.contains(address))
        };
        self.open.values().any(|operation| !is_hostile(operation))
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
            due: None,
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
        assert!(matches!(
            ledger.end(b, &OperationResult::PeerLost, None, SLACK),
            Err(Violation::Unexplained(_))
        ));
        assert_eq!(ledger.end(c, &OperationResult::PeerLost, None, SLACK), Ok(()));
        assert_eq!((ledger.done, ledger.failed), (0, 2));
    }

    #[test]
    fn s3_what_is_part_of_something_is_explained_by_what_ended_that() {
        let mut ledger = Ledger::default();
        ledger.fault(node("b"), Some(Duration::from_millis(20)));
        let (alone, part) = (ledger.begin(operation("b", 90)), ledger.begin(operation("b", 90)));
        ledger.part_of(part, Duration::from_millis(19));
        assert_eq!(ledger.end(part, &OperationResult::PeerLost, None, SLACK), Ok(()));
        assert!(matches!(
            ledger.end(alone, &OperationResult::PeerLost, None, SLACK),
            Err(Violation::Unexplained(_))
        ));
    }

    #[test]
    fn s3_a_lost_link_explains_only_its_two_ends() {
        let mut ledger = Ledger::default();
        ledger.fault(Reach::Between("b".into(), "a".into()), None);
        let (b, c) = (ledger.begin(operation("b", 1)), ledger.begin(operation("c", 1)));
        assert_eq!(ledger.end(b, &OperationResult::Deadline, None, SLACK), Ok(()));
        assert!(matches!(
            ledger.end(c, &OperationResult::Deadline, None, SLACK),
            Err(Violation::Unexplained(_))
        ));
    }

    #[test]
    fn s3_a_healed_fault_explains_for_a_bounded_time() {
        let mut ledger = Ledger::default();
        ledger.fault(node("b"), None);
        ledger.healed(&node("b"), Duration::from_millis(20));
        let (soon, late) = (ledger.begin(operation("b", 30)), ledger.begin(operation("b", 31)));
        assert_eq!(ledger.end(soon, &OperationResult::Deadline, None, SLACK), Ok(()));
        assert!(matches!(
            ledger.end(late, &OperationResult::Deadline, None, SLACK),
            Err(Violation::Unexplained(_))
        ));
    }

    #[test]
    fn s3_a_flip_explains_one_damaged_content() {
        let mut ledger = Ledger::default();
        let ids = [1, 2].map(|began| ledger.begin(operation("b", began)));
        ledger.flips = 1;
        assert_eq!(ledger.end(ids[0], &OperationResult::Corrupted, None, SLACK), Ok(()));
        let second = ledger.end(ids[1], &OperationResult::Corrupted, None, SLACK);
        assert!(matches!(second, Err(Violation::Unexplained(_))));
    }

    fn bounded() -> Ledger {
        let second = Duration::from_secs(1);
        let mut ledger = Ledger::default();
        ledger.bound(Bounds { after_faults: 10 * second, new_work: 5 * second, after_death: 2 * second });
        ledger
    }

    fn late(ledger: &mut Ledger, at_ms: u64) -> Option<&'static str> {
        match ledger.overdue(Duration::from_millis(at_ms))? {
            Violation::Late { promise, .. } => Some(promise),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn l1_what_is_under_way_when_faults_end_and_what_begins_later_must_end() {
        let mut ledger = bounded();
        ledger.begin(operation("b", 0));
        assert_eq!(late(&mut ledger, 100_000), None);
        assert!(ledger.all_must_end(Duration::from_secs(100)));
        assert_eq!((late(&mut ledger, 110_000), late(&mut ledger, 110_001)), (None, Some("L1")));

        let mut ledger = bounded();
        ledger.all_must_end(Duration::ZERO);
        ledger.begin(operation("b", 1000));
        ledger.begin(operation("b", 20_000));
        assert_eq!((late(&mut ledger, 10_000), late(&mut ledger, 10_001)), (None, Some("L1")));
        ledger.open.pop_first();
        assert_eq!((late(&mut ledger, 25_000), late(&mut ledger, 25_001)), (None, Some("L1")));
    }

    #[test]
    fn l2_what_is_done_with_a_dead_peer_must_end_unless_its_own_process_is_stopped() {
        let mut ledger = bounded();
        ledger.begin(operation("c", 0));
        ledger.death("b", Duration::ZERO);
        assert_eq!(late(&mut ledger, 3000), None);
        ledger.begin(operation("b", 0));
        ledger.death("b", Duration::from_secs(3));
        assert_eq!((late(&mut ledger, 5000), late(&mut ledger, 5001)), (None, Some("L2")));
        ledger.excuse("a");
        assert_eq!(late(&mut ledger, 6000), None);
        ledger.begin(operation("b", 6000));
        ledger.fault(Reach::Stopped("a".into()), None);
        ledger.death("b", Duration::from_secs(6));
        assert_eq!(late(&mut ledger, 9000), None);
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

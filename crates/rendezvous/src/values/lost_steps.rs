//! Steps whose values a broken connection may have lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tensorwire_protocol::{Code, Status, StepId};
use tensorwire_testpoints::sync::Mutex;

use crate::error::BROKEN;

/// Maximum number of pairs of step and peer that are stored. A new one replaces the oldest.
const LOST_MAX: usize = 65_536;

/// Maximum number for one peer. A new one replaces the peer's oldest, so that a peer cannot displace those of others.
const LOST_OF_A_PEER_MAX: usize = 16_384;

/// Steps that have ended between this worker and one of its peers, because a connection broke while values of them were
/// under way and it is unknown which arrived. With other peers the steps continue.
#[derive(Debug, Default)]
pub(crate) struct LostSteps {
    any: AtomicBool,
    state: Mutex<LostIndex>,
}

/// By peer, the number of the entry and the reason.
type OverWith = BTreeMap<Arc<str>, (u64, Arc<str>)>;

#[derive(Debug, Default)]
struct LostIndex {
    steps: BTreeMap<StepId, OverWith>,
    /// All entries, oldest first.
    order: BTreeMap<u64, (StepId, Arc<str>)>,
    /// The entries of each peer, oldest first.
    of_peers: BTreeMap<Arc<str>, BTreeSet<u64>>,
    noted: u64,
}

impl LostIndex {
    fn note(&mut self, step: StepId, peer: &str, why: &Arc<str>) {
        if self.steps.get(&step).is_some_and(|peers| peers.contains_key(peer)) {
            return;
        }
        let known = self.of_peers.get_key_value(peer).map(|(peer, _)| peer.clone());
        let peer = known.unwrap_or_else(|| peer.into());
        self.noted += 1;
        self.steps.entry(step).or_default().insert(peer.clone(), (self.noted, why.clone()));
        self.order.insert(self.noted, (step, peer.clone()));
        let of_peer = self.of_peers.entry(peer).or_default();
        of_peer.insert(self.noted);
        let own = if of_peer.len() > LOST_OF_A_PEER_MAX { of_peer.first().copied() } else { None };
        own.into_iter().for_each(|oldest| self.forget(oldest));
        let oldest = self.order.first_key_value().map(|(number, _)| *number);
        oldest.filter(|_| self.order.len() > LOST_MAX).into_iter().for_each(|oldest| self.forget(oldest));
    }

    fn forget(&mut self, number: u64) {
        let Some((step, peer)) = self.order.remove(&number) else { return };
        if let Some(peers) = self.steps.get_mut(&step) {
            peers.remove(&peer);
            if peers.is_empty() {
                self.steps.remove(&step);
            }
        }
        if let Some(of_peer) = self.of_peers.get_mut(&peer) {
            of_peer.remove(&number);
            if of_peer.is_empty() {
                self.of_peers.remove(&peer);
            }
        }
    }
}

impl LostSteps {
    /// Records that `steps` have ended with `peer`, and the reason.
    pub(crate) fn note(&self, steps: &[StepId], peer: &str, why: &str) {
        if steps.is_empty() || tensorwire_testpoints::planted!("a step continues after its connection broke")
        {
            return;
        }
        let why: Arc<str> = why.into();
        let mut state = self.lock();
        steps.iter().for_each(|&step| state.note(step, peer, &why));
        self.any.store(true, Ordering::Release);
    }

    /// The reason why `step` has ended with `peer`; `None` if it has not.
    pub(crate) fn why(&self, step: StepId, peer: &str) -> Option<String> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let why = self.lock().steps.get(&step)?.get(peer)?.1.clone();
        Some(format!(
            "a connection broke while values of step {} were under way, and which of them arrived is \
             unknown ({why})",
            step.0
        ))
    }

    /// Like [`why`](Self::why), as a status to send to the peer.
    pub(crate) fn status(&self, step: StepId, peer: &str) -> Option<Status> {
        let status = |message| Status { code: Code::Aborted, message, details: BROKEN.to_vec() };
        self.why(step, peer).map(status)
    }

    /// Whether no step is stored. Cheaper than a lookup.
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Removes a step that was cleaned up.
    pub(crate) fn forget(&self, step: StepId) {
        if self.is_empty() {
            return;
        }
        let mut state = self.lock();
        let numbers =
            state.steps.get(&step).into_iter().flat_map(BTreeMap::values).map(|(number, _)| *number);
        for number in numbers.collect::<Vec<_>>() {
            state.forget(number);
        }
        self.any.store(!state.steps.is_empty(), Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, LostIndex> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerError;

    #[test]
    fn a_step_is_lost_with_one_peer_until_it_is_finished() {
        let lost = LostSteps::default();
        assert_eq!(lost.why(StepId(1), "a"), None);
        lost.note(&[StepId(1)], "a", "the cable");
        lost.note(&[StepId(1)], "a", "something later");
        assert!(lost.why(StepId(1), "a").is_some_and(|why| why.contains("the cable")));
        assert_eq!((lost.why(StepId(1), "b"), lost.why(StepId(2), "a")), (None, None));
        let is_broken = |status| WorkerError::Aborted { step: 1, status }.is_step_broken();
        assert!(
            lost.status(StepId(1), "a").is_some_and(is_broken),
            "it is told apart from a step that was aborted"
        );
        assert!(!is_broken(Status::new(Code::Aborted, "enough")));
        lost.forget(StepId(1));
        assert!(lost.is_empty() && lost.why(StepId(1), "a").is_none());
    }

    fn is_lost(lost: &LostSteps, step: i64, peer: &str) -> bool {
        lost.why(StepId(step), peer).is_some()
    }

    #[test]
    fn s4_a_peer_pushes_out_its_own_steps_alone() {
        let lost = LostSteps::default();
        lost.note(&[StepId(7)], "other", "x");
        let many: Vec<StepId> = (0..LOST_OF_A_PEER_MAX as i64 + 1).map(StepId).collect();
        lost.note(&many, "a", "x");
        assert!(!is_lost(&lost, 0, "a") && is_lost(&lost, 1, "a") && is_lost(&lost, 7, "other"));
        many.into_iter().for_each(|step| lost.forget(step));
        assert!(lost.is_empty());
        let state = lost.lock();
        assert!(state.order.is_empty() && state.of_peers.is_empty() && state.steps.is_empty());
    }

    #[test]
    fn s4_only_so_many_are_remembered_of_ever_new_peers() {
        let lost = LostSteps::default();
        for peer in 0..=LOST_MAX {
            lost.note(&[StepId(1)], &peer.to_string(), "x");
        }
        assert!(!is_lost(&lost, 1, "0") && is_lost(&lost, 1, "1") && is_lost(&lost, 1, "65536"));
        let state = lost.lock();
        assert_eq!((state.order.len(), state.of_peers.len()), (LOST_MAX, LOST_MAX));
    }
}

//! Steps whose values a broken connection may have lost.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use protocol::{Code, Status, StepId};

/// Steps that are remembered; the oldest is forgotten for a new one.
const LOST_MAX: usize = 65_536;

/// Steps that are over between this worker and one of its peers: a connection broke while values of them were under
/// way, and whether those arrived is unknown. Everything else of the steps goes on.
#[derive(Debug, Default)]
pub(crate) struct LostSteps {
    any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    steps: BTreeMap<StepId, BTreeMap<String, String>>,
    order: VecDeque<StepId>,
}

impl LostSteps {
    /// Notes that `step` is over with `peer`, and why.
    pub(crate) fn note(&self, step: StepId, peer: &str, why: &str) {
        if testpoints::planted!("a step whose connection broke goes on") {
            return;
        }
        let mut state = self.lock();
        if !state.steps.contains_key(&step) {
            state.order.push_back(step);
        }
        state.steps.entry(step).or_default().entry(peer.to_owned()).or_insert_with(|| why.to_owned());
        while state.order.len() > LOST_MAX {
            let Some(oldest) = state.order.pop_front() else { break };
            state.steps.remove(&oldest);
        }
        self.any.store(true, Ordering::Release);
    }

    /// Why `step` is over with `peer`, if it is.
    pub(crate) fn why(&self, step: StepId, peer: &str) -> Option<String> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let why = self.lock().steps.get(&step)?.get(peer)?.clone();
        Some(format!(
            "a connection broke while values of step {} were under way, and which of them arrived is \
             unknown ({why})",
            step.0
        ))
    }

    /// As [`why`](Self::why), as it travels.
    pub(crate) fn status(&self, step: StepId, peer: &str) -> Option<Status> {
        self.why(step, peer).map(|why| Status::new(Code::Aborted, why))
    }

    /// Whether there is nothing to look up.
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// The step is finished.
    pub(crate) fn forget(&self, step: StepId) {
        if self.is_empty() {
            return;
        }
        let mut state = self.lock();
        if state.steps.remove(&step).is_some() {
            state.order.retain(|other| *other != step);
        }
        self.any.store(!state.steps.is_empty(), Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_lost_with_one_peer_until_it_is_finished() {
        let lost = LostSteps::default();
        assert_eq!(lost.why(StepId(1), "a"), None);
        lost.note(StepId(1), "a", "the cable");
        lost.note(StepId(1), "a", "something later");
        assert!(lost.why(StepId(1), "a").is_some_and(|why| why.contains("the cable")));
        assert_eq!((lost.why(StepId(1), "b"), lost.why(StepId(2), "a")), (None, None));
        lost.forget(StepId(1));
        assert!(lost.is_empty() && lost.why(StepId(1), "a").is_none());
    }

    #[test]
    fn s4_only_so_many_are_remembered() {
        let lost = LostSteps::default();
        for step in 0..=LOST_MAX as i64 {
            lost.note(StepId(step), "a", "x");
        }
        assert_eq!(lost.why(StepId(0), "a"), None);
        assert!(lost.why(StepId(1), "a").is_some());
    }
}

//! Operations on all requests, or on those of a step.

use std::task::Waker;

use super::{
    Landed, Requests,
    entry::{RequestEntry, RequestPhase},
};
use crate::{RequestIndex, StepId};

impl<L> Requests<L> {
    /// Passes on the contents of a receive of a step that was given up. Most have none.
    pub(super) fn hold_contents(&mut self, index: RequestIndex) -> [Option<Waker>; 2] {
        let entry = self.entry(index).filter(|entry| entry.given.is_some() || entry.reply.is_some());
        let Some(entry) = entry else { return [None, None] };
        let Some(step_key) = entry.step_key_to_keep() else { return [None, None] };
        let (given, content) = (entry.given.take(), entry.take_content());
        [given, content].map(|landed| self.stash_or_give(step_key.clone(), landed?))
    }

    /// The content of another receive that was assigned to this one, if any.
    pub(crate) fn take_given(&mut self, index: RequestIndex) -> Option<Landed<L>> {
        self.entry(index)?.given.take()
    }

    /// Whether another receive's content was assigned to this one.
    pub(crate) fn is_given(&mut self, index: RequestIndex) -> bool {
        self.entry(index).is_some_and(|entry| entry.given.is_some())
    }

    /// Whether a value was announced to a receive that has not ended.
    pub(crate) fn is_transferring(&self) -> bool {
        let entries = self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        let is_announced = |phase: &RequestPhase| {
            matches!(
                phase,
                RequestPhase::Described | RequestPhase::Promised { .. } | RequestPhase::ReAsked { .. }
            )
        };
        entries.filter(|entry| entry.is_awaited).any(|entry| is_announced(&entry.phase))
    }

    /// The step is over: contents that no receive awaits are dropped.
    pub(crate) fn discard(&mut self, step: StepId) {
        let entries = self.slots.iter_mut().filter_map(|slot| slot.entry.as_mut());
        let of_step = |entry: &&mut RequestEntry<L>| {
            entry.step_key.as_ref().is_some_and(|step_key| step_key.step == step)
        };
        entries.filter(of_step).for_each(|entry| entry.is_discarded = true);
    }

    /// Steps that have a request under way here, or a content that was not returned yet: one that waits for its receive, or is
    /// [held](crate::ReceivedGuard).
    pub(crate) fn steps(&self) -> impl Iterator<Item = StepId> {
        let entries = self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        let sent =
            entries.filter(|entry| !matches!(entry.phase, RequestPhase::Unsent) && !entry.is_discarded);
        sent.filter_map(|entry| entry.step_key.as_ref())
            .map(|step_key| step_key.step)
            .chain(self.stash.steps())
            .chain(self.held.iter().copied())
    }

    /// A content of `step` is held by who awaits others with it. Room in the stash is reserved for it.
    pub(crate) fn hold(&mut self, step: StepId) {
        self.held.push(step);
        self.stash.reserve(self.slots.len() - self.free.len() + self.held.len());
    }

    /// It is held no longer.
    pub(crate) fn let_go(&mut self, step: StepId) {
        if let Some(at) = self.held.iter().rposition(|held| *held == step) {
            self.held.swap_remove(at);
        }
    }

    pub(crate) fn take_kept_of(&mut self, step: StepId) -> Option<Landed<L>> {
        self.stash.take_of_step(step)
    }
}

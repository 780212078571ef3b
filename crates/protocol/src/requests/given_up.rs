//! Receives that were given up: their CANCEL, their memory, and contents that came for them.

use std::task::Waker;

use super::{
    Landed, Requests, StepKey,
    entry::{Cancel, RequestEntry, RequestPhase},
};
use crate::{LentEnd, RequestIndex, StepId, after::After};

impl<L> Requests<L> {
    /// The receive future was dropped. Queues its CANCEL and its memory, and holds a content that has come; allocates nothing
    /// unless it was a subscription.
    pub(crate) fn release(&mut self, index: RequestIndex, after: &mut After<L>) {
        let Some(entry) = self.entry(index) else { return };
        entry.is_awaited = false;
        after.drop(entry.waker.take());
        if tensorwire_testpoints::planted!("a receive's memory is freed while the peer may write it") {
            entry.end.get_or_insert(LentEnd::CancelAck);
        }
        after.wake(self.hold_contents(index).into_iter().flatten());
        after.wake(self.leave_subscription(index));
        let Some(entry) = self.entry(index) else { return };
        entry.reply = None;
        let was_returning = entry.is_returning;
        entry.is_returning = entry.has_unwanted();
        let is_returning = entry.is_returning && !was_returning;
        let is_owed = !matches!(entry.phase, RequestPhase::Unsent | RequestPhase::Answered);
        if is_owed {
            entry.cancel = Cancel::Owed;
            entry.is_unresolved = entry.step_key.is_some();
            self.unresolved += usize::from(entry.step_key.is_some());
        }
        self.queue_released(index.slot(), is_returning, is_owed);
        self.free_finished(index.slot());
    }

    /// Passes the contents of a receive of a step that was given up to the next receives of its key. Usually there are none.
    pub(super) fn hold_contents(&mut self, index: RequestIndex) -> [Option<Waker>; 2] {
        let entry = self.entry(index).filter(|entry| entry.given.is_some() || entry.reply.is_some());
        let Some(entry) = entry else { return [None, None] };
        let Some(step_key) = entry.step_key_to_stash() else { return [None, None] };
        let (given, content) = (entry.given.take(), entry.take_content());
        [given, content].map(|landed| self.stash_or_give(step_key.clone(), landed?))
    }

    /// Gives a content of a receive that was given up to the oldest receive of its key, or holds it for the next one.
    /// Returns the waker to call; allocates nothing.
    pub(crate) fn stash_or_give(&mut self, step_key: StepKey, landed: Landed<L>) -> Option<Waker> {
        let entries = self.slots.iter_mut().filter_map(|slot| slot.entry.as_mut());
        let waits =
            |entry: &&mut RequestEntry<L>| entry.may_be_given() && entry.step_key.as_ref() == Some(&step_key);
        if let Some(oldest) = entries.filter(waits).min_by_key(|entry| entry.number) {
            return oldest.give(landed);
        }
        let next = self.stash.first_in_line(&step_key);
        self.stash.put(step_key, landed);
        next
    }

    fn queue_released(&mut self, slot: usize, is_returning: bool, is_owed: bool) {
        if is_returning {
            self.returns.push_back(slot as u32);
        }
        if is_owed {
            self.cancels.push_back(slot as u32);
        }
    }

    pub(crate) fn has_returns(&self) -> bool {
        !self.returns.is_empty()
    }

    /// The next memory to take back.
    pub(crate) fn next_return(&mut self) -> Option<(L, LentEnd)> {
        while let Some(slot) = self.returns.pop_front() {
            let entry = self.slots.get_mut(slot as usize).and_then(|slot| slot.entry.as_mut());
            let (returned, has_more) = entry.map_or((None, false), |entry| {
                let returned = entry.take_unwanted();
                entry.is_returning = entry.has_unwanted();
                (returned, entry.is_returning)
            });
            if has_more {
                self.returns.push_back(slot);
            }
            self.free_finished(slot as usize);
            if returned.is_some() {
                return returned;
            }
        }
        None
    }

    pub(crate) fn has_cancels(&self) -> bool {
        !self.cancels.is_empty()
    }

    /// The next request to cancel. Requests that were answered meanwhile are skipped.
    pub(crate) fn next_cancel(&mut self) -> Option<RequestIndex> {
        while let Some(&slot) = self.cancels.front() {
            let at = self.slots.get_mut(slot as usize)?;
            if let Some(entry) = &mut at.entry {
                if !matches!(entry.phase, RequestPhase::Answered) {
                    return Some(RequestIndex::new(slot, at.generation));
                }
                entry.cancel = Cancel::None;
            }
            self.cancels.pop_front();
            self.free_finished(slot as usize);
        }
        None
    }

    /// The CANCEL that [`next_cancel`](Self::next_cancel) named is being posted.
    pub(crate) fn cancel_posted(&mut self, index: RequestIndex) {
        self.cancels.pop_front();
        if let Some(entry) = self.entry(index) {
            entry.cancel = Cancel::Sent;
        }
    }

    /// The step is over: contents that no receive awaits are dropped.
    pub(crate) fn discard(&mut self, step: StepId) {
        let entries = self.slots.iter_mut().filter_map(|slot| slot.entry.as_mut());
        let of_step = |entry: &&mut RequestEntry<L>| {
            entry.step_key.as_ref().is_some_and(|step_key| step_key.step == step)
        };
        entries.filter(of_step).for_each(|entry| entry.is_discarded = true);
    }

    pub(crate) fn take_stashed_of(&mut self, step: StepId) -> Option<Landed<L>> {
        self.stash.take_of_step(step)
    }

    /// A receive that awaits several contents holds one content of `step`. The stash has reserved room for it.
    pub(crate) fn hold(&mut self, step: StepId) {
        self.held.push(step);
        self.stash.reserve(self.slots.len() - self.free.len() + self.held.len());
    }

    /// The content is no longer held.
    pub(crate) fn let_go(&mut self, step: StepId) {
        if let Some(at) = self.held.iter().rposition(|held| *held == step) {
            self.held.swap_remove(at);
        }
    }

    /// After the connection's end: the next memory to take back, including contents that were held.
    pub(crate) fn next_unwanted(&mut self) -> Option<(L, LentEnd)> {
        let returned = self.next_return();
        returned.or_else(|| std::iter::from_fn(|| self.stash.take_any()).find_map(Landed::returned))
    }

    /// Takes all memory that a peer might have written, and all contents that no receive awaits.
    pub(crate) fn drain(&mut self) -> Vec<L> {
        let entries = self.slots.iter_mut().filter_map(|slot| slot.entry.as_mut());
        let over = entries.filter(|entry| !entry.is_awaited || entry.end.is_none());
        let lent = over.flat_map(|entry| {
            let given = if entry.is_awaited { None } else { entry.given.take() };
            let subscribed = entry.subscribed.as_mut().map(|subscribed| subscribed.drain(entry.is_awaited));
            let lent = [given.and_then(|landed| landed.content.lent()), entry.lent.take()];
            lent.into_iter().flatten().chain(subscribed.into_iter().flatten())
        });
        lent.chain(std::iter::from_fn(|| self.stash.take_any()).filter_map(|landed| landed.content.lent()))
            .collect()
    }
}

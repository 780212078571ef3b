//! Receives that are under way at the calling end, and values of those that were given up.

use std::collections::{BTreeMap, VecDeque};

use protocol::StepId;

use super::Arrived;

/// What a receive is for.
pub(super) type StepKey = (StepId, String);

/// By step and key. Only what is under way or kept has an entry.
#[derive(Debug, Default)]
pub(super) struct Kept {
    entries: BTreeMap<StepKey, Entry>,
    next_order: u64,
}

#[derive(Debug, Default)]
struct Entry {
    /// Receives that are awaited.
    outstanding: usize,
    /// Receives that were given up, and of which it is not known whether they had their value.
    unresolved: usize,
    /// In the order of the calls that brought them, which is that of the sender's queue.
    values: VecDeque<(u64, Arrived)>,
}

impl Entry {
    fn is_unused(&self) -> bool {
        self.outstanding == 0 && self.unresolved == 0 && self.values.is_empty()
    }
}

/// What a receive is to do.
#[derive(Debug)]
pub(super) enum Begin {
    /// Send its request; this is its place among all.
    Ask(u64),
    /// Take this value, which is here already, and its place.
    Take(u64, Arrived),
    /// Wait until something changes: it is not known whether an earlier receive had its value.
    Wait,
}

impl Kept {
    /// Begins a receive.
    pub(super) fn begin(&mut self, key: &StepKey) -> Begin {
        if let Some((order, value)) = self.take(key) {
            return Begin::Take(order, value);
        }
        if self.entries.get(key).is_some_and(|entry| entry.unresolved > 0) {
            return Begin::Wait;
        }
        self.entries.entry(key.clone()).or_default().outstanding += 1;
        self.next_order += 1;
        Begin::Ask(self.next_order)
    }

    /// Whether a receive of the key was begun and has neither ended nor been discarded with its step.
    pub(super) fn is_awaited(&self, key: &StepKey) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.outstanding > 0)
    }

    /// Whether nothing is awaited, and nothing that was given up is unknown.
    pub(super) fn is_idle(&self) -> bool {
        self.entries.values().all(|entry| entry.outstanding == 0 && entry.unresolved == 0)
    }

    /// The next value that is here already.
    pub(super) fn take(&mut self, key: &StepKey) -> Option<(u64, Arrived)> {
        let value = self.entries.get_mut(key)?.values.pop_front();
        self.forget_unused(key);
        value
    }

    /// A receive has ended.
    pub(super) fn end(&mut self, key: &StepKey) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.outstanding = entry.outstanding.saturating_sub(1);
        }
        self.forget_unused(key);
    }

    /// A receive whose request was sent is given up.
    pub(super) fn give_up(&mut self, key: &StepKey) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.outstanding = entry.outstanding.saturating_sub(1);
            entry.unresolved += 1;
        }
    }

    /// It is known what became of a receive that was given up. Gives back a value that nobody wants any more.
    pub(super) fn resolve(&mut self, key: &StepKey, order: u64, value: Option<Arrived>) -> Option<Arrived> {
        let Some(entry) = self.entries.get_mut(key) else { return value };
        entry.unresolved = entry.unresolved.saturating_sub(1);
        value.into_iter().for_each(|value| entry.keep(order, value));
        self.forget_unused(key);
        None
    }

    /// A value that was handed out and not used goes back to its place.
    pub(super) fn put_back(&mut self, key: &StepKey, order: u64, value: Arrived) {
        self.entries.entry(key.clone()).or_default().keep(order, value);
    }

    /// The step is over. Gives what was kept for it.
    pub(super) fn discard(&mut self, step: StepId) -> Vec<Arrived> {
        let keys: Vec<StepKey> = self.entries.keys().filter(|(of, _)| *of == step).cloned().collect();
        let entries = keys.iter().filter_map(|key| self.entries.remove(key));
        entries.flat_map(|entry| entry.values).map(|(_, value)| value).collect()
    }

    /// Everything ends. Gives the steps of which something was asked and not consumed, and what was kept.
    pub(super) fn end_all(&mut self) -> (Vec<StepId>, Vec<Arrived>) {
        let entries = std::mem::take(&mut self.entries);
        let mut steps: Vec<StepId> = entries.keys().map(|(step, _)| *step).collect();
        steps.dedup();
        (steps, entries.into_values().flat_map(|entry| entry.values).map(|(_, value)| value).collect())
    }

    fn forget_unused(&mut self, key: &StepKey) {
        if self.entries.get(key).is_some_and(Entry::is_unused) {
            self.entries.remove(key);
        }
    }
}

impl Entry {
    fn keep(&mut self, order: u64, value: Arrived) {
        let place = self.values.partition_point(|(other, _)| *other < order);
        self.values.insert(place, (order, value));
    }
}

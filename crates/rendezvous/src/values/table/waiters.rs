//! Receivers that wait, in one block of memory: a receive takes a place there, not an allocation of its own.

use std::{mem, task::Waker};

use tokio_util::sync::CancellationToken;

use super::Value;

/// Where a receiver is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaiterIndex(usize);

/// The receivers of one step.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    entries: Vec<WaiterEntry>,
    free: Option<WaiterIndex>,
}

/// The receivers of one key that wait, oldest first. Its links are in [`Waiters`].
#[derive(Debug, Default)]
pub(super) struct WaiterLine {
    first: Option<WaiterIndex>,
    last: Option<WaiterIndex>,
}

impl WaiterLine {
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

/// What is at a place.
#[derive(Debug)]
pub(super) enum WaiterEntry {
    Free {
        next: Option<WaiterIndex>,
    },
    /// A receiver in its key's line.
    Waiting(Waiter),
    /// Its token was cancelled before a value came, so it was passed over.
    Cancelled {
        _dropped_unlocked: Waiter,
    },
    /// It has not looked yet.
    Given(Value),
    /// With the step.
    Aborted,
}

/// What a receiver needs while it waits. Dropping it may run foreign code, so it is dropped outside the table's lock.
#[derive(Debug)]
pub(super) struct Waiter {
    before: Option<WaiterIndex>,
    after: Option<WaiterIndex>,
    waker: Option<Waker>,
    token: Option<CancellationToken>,
}

/// A receiver's look at its place.
#[derive(Debug)]
pub(super) enum Look {
    /// With the waker that was replaced.
    Waits(Option<Waker>),
    /// Its waiting ended so, and the place is free.
    Ended(WaiterEntry),
}

impl Waiters {
    /// Adds a receiver at the end of `line`.
    pub(super) fn join(&mut self, line: &mut WaiterLine, token: Option<CancellationToken>) -> WaiterIndex {
        let entry = WaiterEntry::Waiting(Waiter { before: line.last, after: None, waker: None, token });
        let place = self.free.unwrap_or(WaiterIndex(self.entries.len()));
        match self.replace(place, entry) {
            Ok(WaiterEntry::Free { next }) => self.free = next,
            Ok(_) => self.free = None,
            Err(entry) => self.entries.push(entry),
        }
        match line.last {
            Some(last) => self.link(last, |waiting| waiting.after = Some(place)),
            None => line.first = Some(place),
        }
        line.last = Some(place);
        place
    }

    /// The oldest receiver in `line` that still wants a value. Those before it whose token was cancelled leave the line.
    pub(super) fn oldest(&mut self, line: &mut WaiterLine) -> Option<WaiterIndex> {
        while let Some(first) = line.first {
            match self.waiting(first) {
                Some(Waiter { token: Some(token), after, .. }) if token.is_cancelled() => {
                    line.first = *after;
                    match line.first {
                        Some(next) => self.link(next, |waiting| waiting.before = None),
                        None => line.last = None,
                    }
                    self.mark_cancelled(first);
                }
                _ => return Some(first),
            }
        }
        None
    }

    /// Ends the waiting of the first receiver in `line`. Gives what is to be woken outside the lock.
    #[must_use]
    pub(super) fn end_first(&mut self, line: &mut WaiterLine, ended: WaiterEntry) -> Option<Waiter> {
        let place = line.first?;
        let Ok(WaiterEntry::Waiting(waiting)) = self.replace(place, ended) else {
            line.first = None;
            return None;
        };
        self.unlink(line, &waiting);
        Some(waiting)
    }

    /// What became of the receiver at `place`; `waker` is woken when that changes.
    pub(super) fn look(&mut self, place: WaiterIndex, waker: &Waker) -> Look {
        if let Some(waiting) = self.waiting(place) {
            let is_known = waiting.waker.as_ref().is_some_and(|known| known.will_wake(waker));
            return Look::Waits(if is_known { None } else { waiting.waker.replace(waker.clone()) });
        }
        Look::Ended(self.vacate(place))
    }

    /// Removes the receiver at `place`, of the key whose line is `line`. Gives what was there, to be dropped outside the
    /// lock.
    #[must_use]
    pub(super) fn leave(&mut self, line: Option<&mut WaiterLine>, place: WaiterIndex) -> WaiterEntry {
        let left = self.vacate(place);
        if let (Some(line), WaiterEntry::Waiting(waiting)) = (line, &left) {
            self.unlink(line, waiting);
        }
        left
    }

    fn waiting(&mut self, place: WaiterIndex) -> Option<&mut Waiter> {
        match self.entries.get_mut(place.0)? {
            WaiterEntry::Waiting(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// Gives `entry` back if there is no such place.
    fn replace(&mut self, place: WaiterIndex, entry: WaiterEntry) -> Result<WaiterEntry, WaiterEntry> {
        match self.entries.get_mut(place.0) {
            Some(old) => Ok(mem::replace(old, entry)),
            None => Err(entry),
        }
    }

    fn mark_cancelled(&mut self, place: WaiterIndex) {
        if let Some(entry) = self.entries.get_mut(place.0) {
            *entry = match mem::replace(entry, WaiterEntry::Aborted) {
                WaiterEntry::Waiting(waiting) => WaiterEntry::Cancelled { _dropped_unlocked: waiting },
                other => other,
            };
        }
    }

    fn vacate(&mut self, place: WaiterIndex) -> WaiterEntry {
        match self.replace(place, WaiterEntry::Free { next: self.free }) {
            Ok(left) => {
                self.free = Some(place);
                left
            }
            Err(_) => WaiterEntry::Aborted,
        }
    }

    fn link(&mut self, place: WaiterIndex, change: impl FnOnce(&mut Waiter)) {
        if let Some(waiting) = self.waiting(place) {
            change(waiting);
        }
    }

    fn unlink(&mut self, line: &mut WaiterLine, gone: &Waiter) {
        match gone.before {
            Some(before) => self.link(before, |waiting| waiting.after = gone.after),
            None => line.first = gone.after,
        }
        match gone.after {
            Some(after) => self.link(after, |waiting| waiting.before = gone.before),
            None => line.last = gone.before,
        }
    }
}

impl Waiter {
    /// Tells the receiver's task. Outside the lock.
    pub(super) fn wake(self) {
        if let Some(waker) = self.waker {
            waker.wake();
        }
    }
}

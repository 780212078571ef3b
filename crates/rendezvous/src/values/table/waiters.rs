//! Waiting tasks, as linked lists in one vector, so that a receive needs no separate allocation.

use std::{mem, task::Waker};

use tokio_util::sync::CancellationToken;

/// The index of a receiver's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaiterIndex(usize);

/// The tasks of one step that wait for values, or with `T = ()` for its end.
#[derive(Debug)]
pub(super) struct Waiters<T> {
    entries: Vec<WaiterEntry<T>>,
    free: Option<WaiterIndex>,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: None }
    }
}

/// The waiting receivers of one key, oldest first. The links are in [`Waiters`].
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

/// An entry of the vector.
#[derive(Debug)]
pub(super) enum WaiterEntry<T> {
    Free {
        next: Option<WaiterIndex>,
    },
    /// A receiver that waits in the line of its key.
    Waiting(Waiter),
    /// The receiver's token was cancelled before a value arrived.
    Cancelled {
        _dropped_unlocked: Waiter,
    },
    /// The receiver was given a value and has not been polled since.
    Given(T),
    /// The step was aborted.
    Aborted,
}

/// The state of a waiting receiver. It is dropped outside the table's lock, because this may run foreign code.
#[derive(Debug)]
pub(super) struct Waiter {
    before: Option<WaiterIndex>,
    after: Option<WaiterIndex>,
    waker: Option<Waker>,
    token: Option<CancellationToken>,
}

/// The result of polling a receiver.
#[derive(Debug)]
pub(super) enum Look<T> {
    /// It still waits. Contains the replaced waker, to be dropped outside the lock.
    Waits(Option<Waker>),
    /// The wait has ended with this entry, which is free now.
    Ended(WaiterEntry<T>),
}

impl<T> Waiters<T> {
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

    /// The oldest receiver in `line` whose token is not cancelled. Those before it are removed from the line.
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

    /// Ends the wait of the first receiver in `line`. Returns it, to be woken outside the lock.
    #[must_use]
    pub(super) fn end_first(&mut self, line: &mut WaiterLine, ended: WaiterEntry<T>) -> Option<Waiter> {
        let place = line.first?;
        let Ok(WaiterEntry::Waiting(waiting)) = self.replace(place, ended) else {
            line.first = None;
            return None;
        };
        self.unlink(line, &waiting);
        Some(waiting)
    }

    /// The state of the receiver `place`. If it waits, `waker` is stored.
    pub(super) fn look(&mut self, place: WaiterIndex, waker: &Waker) -> Look<T> {
        if let Some(waiting) = self.waiting(place) {
            let is_known = waiting.waker.as_ref().is_some_and(|known| known.will_wake(waker));
            return Look::Waits(if is_known { None } else { waiting.waker.replace(waker.clone()) });
        }
        Look::Ended(self.vacate(place))
    }

    /// Removes the receiver `place` from `line`, the line of its key. Returns its entry, to be dropped outside the
    /// lock.
    #[must_use]
    pub(super) fn leave(&mut self, line: Option<&mut WaiterLine>, place: WaiterIndex) -> WaiterEntry<T> {
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

    /// Replaces an entry and returns the old one. If the index is out of range, `entry` is returned as the error.
    fn replace(
        &mut self,
        place: WaiterIndex,
        entry: WaiterEntry<T>,
    ) -> Result<WaiterEntry<T>, WaiterEntry<T>> {
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

    fn vacate(&mut self, place: WaiterIndex) -> WaiterEntry<T> {
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
    /// Wakes the receiver's task. Called outside the lock.
    pub(super) fn wake(self) {
        if let Some(waker) = self.waker {
            waker.wake();
        }
    }
}

//! Receivers that wait, in one block of memory: a receive takes a place there, not an allocation of its own.

use std::{mem, task::Waker};

use tokio_util::sync::CancellationToken;

use super::Value;

/// Where a receiver is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place(usize);

/// The receivers of one step.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    entries: Vec<Entry>,
    free: Option<Place>,
}

/// The receivers of one key that wait, oldest first. Its links are in [`Waiters`].
#[derive(Debug, Default)]
pub(super) struct Line {
    first: Option<Place>,
    last: Option<Place>,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

/// What is at a place.
#[derive(Debug)]
pub(super) enum Entry {
    Free {
        next: Option<Place>,
    },
    /// A receiver in its key's line.
    Waiting(Waiting),
    /// Its token was cancelled before a value came, so it was passed over.
    Cancelled {
        _dropped_unlocked: Waiting,
    },
    /// It has not looked yet.
    Given(Value),
    /// With the step.
    Aborted,
}

/// What a receiver needs while it waits. Dropping it may run foreign code, so it is dropped outside the table's lock.
#[derive(Debug)]
pub(super) struct Waiting {
    before: Option<Place>,
    after: Option<Place>,
    waker: Option<Waker>,
    token: Option<CancellationToken>,
}

/// A receiver's look at its place.
#[derive(Debug)]
pub(super) enum Look {
    /// With the waker that was replaced.
    Waits(Option<Waker>),
    /// Its waiting ended so, and the place is free.
    Ended(Entry),
}

impl Waiters {
    /// Adds a receiver at the end of `line`.
    pub(super) fn join(&mut self, line: &mut Line, token: Option<CancellationToken>) -> Place {
        let entry = Entry::Waiting(Waiting { before: line.last, after: None, waker: None, token });
        let place = self.free.unwrap_or(Place(self.entries.len()));
        match self.replace(place, entry) {
            Ok(Entry::Free { next }) => self.free = next,
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
    pub(super) fn oldest(&mut self, line: &mut Line) -> Option<Place> {
        while let Some(first) = line.first {
            match self.waiting(first) {
                Some(Waiting { token: Some(token), after, .. }) if token.is_cancelled() => {
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
    pub(super) fn end_first(&mut self, line: &mut Line, ended: Entry) -> Option<Waiting> {
        let place = line.first?;
        let Ok(Entry::Waiting(waiting)) = self.replace(place, ended) else {
            line.first = None;
            return None;
        };
        self.unlink(line, &waiting);
        Some(waiting)
    }

    /// What became of the receiver at `place`; `waker` is woken when that changes.
    pub(super) fn look(&mut self, place: Place, waker: &Waker) -> Look {
        if let Some(waiting) = self.waiting(place) {
            let is_known = waiting.waker.as_ref().is_some_and(|known| known.will_wake(waker));
            return Look::Waits(if is_known { None } else { waiting.waker.replace(waker.clone()) });
        }
        Look::Ended(self.vacate(place))
    }

    /// Removes the receiver at `place`, of the key whose line is `line`. Gives what was there, to be dropped outside the
    /// lock.
    #[must_use]
    pub(super) fn leave(&mut self, line: Option<&mut Line>, place: Place) -> Entry {
        let left = self.vacate(place);
        if let (Some(line), Entry::Waiting(waiting)) = (line, &left) {
            self.unlink(line, waiting);
        }
        left
    }

    fn waiting(&mut self, place: Place) -> Option<&mut Waiting> {
        match self.entries.get_mut(place.0)? {
            Entry::Waiting(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// Gives `entry` back if there is no such place.
    fn replace(&mut self, place: Place, entry: Entry) -> Result<Entry, Entry> {
        match self.entries.get_mut(place.0) {
            Some(old) => Ok(mem::replace(old, entry)),
            None => Err(entry),
        }
    }

    fn mark_cancelled(&mut self, place: Place) {
        if let Some(entry) = self.entries.get_mut(place.0) {
            *entry = match mem::replace(entry, Entry::Aborted) {
                Entry::Waiting(waiting) => Entry::Cancelled { _dropped_unlocked: waiting },
                other => other,
            };
        }
    }

    fn vacate(&mut self, place: Place) -> Entry {
        match self.replace(place, Entry::Free { next: self.free }) {
            Ok(left) => {
                self.free = Some(place);
                left
            }
            Err(_) => Entry::Aborted,
        }
    }

    fn link(&mut self, place: Place, change: impl FnOnce(&mut Waiting)) {
        if let Some(waiting) = self.waiting(place) {
            change(waiting);
        }
    }

    fn unlink(&mut self, line: &mut Line, gone: &Waiting) {
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

impl Waiting {
    /// Tells the receiver's task. Outside the lock.
    pub(super) fn wake(self) {
        if let Some(waker) = self.waker {
            waker.wake();
        }
    }
}

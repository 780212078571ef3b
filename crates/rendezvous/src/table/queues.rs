//! The values and receivers of one step, by key. Nothing here wakes or drops what is foreign: the caller does, unlocked.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    task::Waker,
};

use tokio_util::sync::CancellationToken;

use super::{
    Value,
    waiters::{Entry, Line, Look, Place, Waiters, Waiting},
};
use crate::DuplicatePolicy;

/// Every key that is in use.
#[derive(Debug, Default)]
pub(super) struct Queues {
    by_key: BTreeMap<Arc<str>, Queue>,
    waiters: Waiters,
}

/// The values or the receivers of one key; never both at once.
#[derive(Debug)]
struct Queue {
    key: Arc<str>,
    values: VecDeque<Value>,
    receivers: Line,
    /// Its one value was handed out ([`DuplicatePolicy::Report`]).
    is_spent: bool,
}

/// What became of an offered value.
#[derive(Debug)]
pub(super) struct Offered {
    pub(super) given_to: Receivers,
    /// It is kept here.
    pub(super) queued: bool,
}

/// Receivers that were given a value.
#[derive(Debug, Default)]
pub(super) struct Receivers {
    first: Option<Waiting>,
    /// Of one value only where duplicates are tolerated.
    others: Vec<Waiting>,
}

impl Receivers {
    fn add(&mut self, receiver: Option<Waiting>) {
        if self.first.is_some() {
            self.others.extend(receiver);
        } else {
            self.first = receiver;
        }
    }

    pub(super) fn wake(self) {
        self.first.into_iter().chain(self.others).for_each(Waiting::wake);
    }
}

/// What was in the queues of a step that is over.
#[derive(Debug, Default)]
pub(super) struct EndedQueues {
    pub(super) values: Vec<Value>,
    pub(super) waiting: Vec<Waiting>,
}

impl Queue {
    fn new(key: &Arc<str>) -> Self {
        Self { key: key.clone(), values: VecDeque::new(), receivers: Line::default(), is_spent: false }
    }

    fn is_unused(&self) -> bool {
        self.values.is_empty() && self.receivers.is_empty() && !self.is_spent
    }
}

impl Queues {
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Takes the oldest value of `key`; leaves it too where duplicates are tolerated.
    pub(super) fn pop(&mut self, duplicates: DuplicatePolicy, key: &str) -> Option<(Arc<str>, Value)> {
        let queue = self.by_key.get_mut(key)?;
        let value = if duplicates == DuplicatePolicy::Tolerate {
            queue.values.front()?.clone()
        } else {
            queue.values.pop_front()?
        };
        queue.is_spent = duplicates == DuplicatePolicy::Report;
        let key = queue.key.clone();
        if queue.is_unused() {
            self.by_key.remove(&key);
        }
        Some((key, value))
    }

    /// Adds a receiver of `key`, which has no value; `None` if it is one too many.
    pub(super) fn join(
        &mut self,
        duplicates: DuplicatePolicy,
        key: &str,
        token: Option<&CancellationToken>,
    ) -> Option<(Arc<str>, Place)> {
        let Self { by_key, waiters } = self;
        let queue = match by_key.get_mut(key) {
            Some(queue) => queue,
            None => by_key.entry(Arc::from(key)).or_insert_with_key(Queue::new),
        };
        let may_have_one = duplicates == DuplicatePolicy::Report;
        if may_have_one && (queue.is_spent || waiters.oldest(&mut queue.receivers).is_some()) {
            return None;
        }
        let place = waiters.join(&mut queue.receivers, token.cloned());
        Some((queue.key.clone(), place))
    }

    /// Whether a value of `key` would be one too many.
    pub(super) fn would_duplicate(&self, duplicates: DuplicatePolicy, key: &str) -> bool {
        duplicates != DuplicatePolicy::Queue
            && self.by_key.get(key).is_some_and(|queue| queue.is_spent || !queue.values.is_empty())
    }

    /// Gives `value` to the oldest receiver of `key`, or queues it in its place. Where duplicates are tolerated, all
    /// receivers get it, and it stays.
    pub(super) fn offer(&mut self, duplicates: DuplicatePolicy, key: &str, value: Value) -> Offered {
        let Self { by_key, waiters } = self;
        let queue = match by_key.get_mut(key) {
            Some(queue) => queue,
            None => by_key.entry(Arc::from(key)).or_insert_with_key(Queue::new),
        };
        let mut given_to = Receivers::default();
        while waiters.oldest(&mut queue.receivers).is_some() {
            if duplicates == DuplicatePolicy::Tolerate {
                given_to.add(waiters.end_first(&mut queue.receivers, Entry::Given(value.clone())));
                continue;
            }
            given_to.add(waiters.end_first(&mut queue.receivers, Entry::Given(value)));
            queue.is_spent = duplicates == DuplicatePolicy::Report;
            if queue.is_unused() {
                by_key.remove(key);
            }
            return Offered { given_to, queued: false };
        }
        let place = queue.values.partition_point(|queued| queued.sequence < value.sequence);
        queue.values.insert(place, value);
        queue.is_spent = false;
        Offered { given_to, queued: true }
    }

    pub(super) fn look(&mut self, place: Place, waker: &Waker) -> Look {
        self.waiters.look(place, waker)
    }

    /// Removes the receiver at `place`, of `key`. Gives what was there.
    pub(super) fn leave(&mut self, key: &str, place: Place) -> Entry {
        let queue = self.by_key.get_mut(key);
        let (line, is_there) = match queue {
            Some(queue) => (Some(&mut queue.receivers), true),
            None => (None, false),
        };
        let left = self.waiters.leave(line, place);
        if is_there && self.by_key.get(key).is_some_and(Queue::is_unused) {
            self.by_key.remove(key);
        }
        left
    }

    /// Takes out the values of the keys that `is_meant`.
    pub(super) fn drain(&mut self, is_meant: impl Fn(&str) -> bool) -> Vec<Value> {
        let mut drained = Vec::new();
        for queue in self.by_key.values_mut().filter(|queue| is_meant(&queue.key)) {
            drained.extend(queue.values.drain(..));
        }
        self.by_key.retain(|_, queue| !queue.is_unused());
        drained
    }

    /// Ends every key.
    pub(super) fn end(&mut self) -> EndedQueues {
        let mut ended = EndedQueues::default();
        for (_, mut queue) in std::mem::take(&mut self.by_key) {
            ended.values.extend(queue.values);
            while self.waiters.oldest(&mut queue.receivers).is_some() {
                ended.waiting.extend(self.waiters.end_first(&mut queue.receivers, Entry::Aborted));
            }
        }
        ended
    }
}

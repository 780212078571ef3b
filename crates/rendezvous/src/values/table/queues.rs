//! The values and receivers of one step, by key. Wakers, tokens and values are returned to the caller, which wakes and
//! drops them outside the lock, because this may run foreign code.

use std::{collections::VecDeque, hash::BuildHasher, sync::Arc, task::Waker};

use hashbrown::{
    HashTable,
    hash_table::{Entry, OccupiedEntry},
};
use tokio_util::sync::CancellationToken;

use super::{
    Value,
    waiters::{Look, Waiter, WaiterEntry, WaiterIndex, WaiterLine, Waiters},
};
use crate::values::{duplicates::DuplicatePolicy, sharded_map::FixedHasher};

/// All keys in use. Each operation computes one hash, because a step may have ten thousand outstanding receives.
#[derive(Debug, Default)]
pub(super) struct Queues {
    by_key: HashTable<Queue>,
    waiters: Waiters,
}

/// The values or the receivers of one key; never both.
#[derive(Debug)]
struct Queue {
    key: Arc<str>,
    values: VecDeque<Value>,
    receivers: WaiterLine,
    /// Its only value was taken ([`DuplicatePolicy::Report`]).
    is_spent: bool,
}

/// The result of offering a value.
#[derive(Debug)]
pub(super) struct Offered {
    pub(super) given_to: Receivers,
    /// The value was queued.
    pub(super) queued: bool,
}

/// Receivers that were given a value.
#[derive(Debug, Default)]
pub(super) struct Receivers {
    first: Option<Waiter>,
    /// Not empty only with [`DuplicatePolicy::Tolerate`].
    others: Vec<Waiter>,
}

impl Receivers {
    fn add(&mut self, receiver: Option<Waiter>) {
        if self.first.is_some() {
            self.others.extend(receiver);
        } else {
            self.first = receiver;
        }
    }

    pub(super) fn wake(self) {
        self.first.into_iter().chain(self.others).for_each(Waiter::wake);
    }
}

/// The content of the queues of a step that has ended.
#[derive(Debug, Default)]
pub(super) struct EndedQueues {
    pub(super) values: Vec<Value>,
    pub(super) waiting: Vec<Waiter>,
}

/// The result of a receive.
#[derive(Debug)]
pub(super) enum Found {
    Value(Arc<str>, Value),
    /// No value yet; the receiver was queued.
    Waits(Arc<str>, WaiterIndex),
    /// No value, and the token is cancelled.
    Cancelled,
    /// A second receiver, which the policy does not allow.
    Duplicate,
}

impl Queue {
    fn new(key: &str) -> Self {
        Self { key: key.into(), values: VecDeque::new(), receivers: WaiterLine::default(), is_spent: false }
    }

    fn is_unused(&self) -> bool {
        self.values.is_empty() && self.receivers.is_empty() && !self.is_spent
    }

    /// Takes the oldest value, or clones it with [`DuplicatePolicy::Tolerate`].
    fn pop(&mut self, duplicates: DuplicatePolicy) -> Option<Value> {
        if duplicates == DuplicatePolicy::Tolerate {
            return self.values.front().cloned();
        }
        let value = self.values.pop_front()?;
        self.is_spent = duplicates == DuplicatePolicy::Report;
        Some(value)
    }
}

/// Equal in every run.
fn hash(key: &str) -> u64 {
    FixedHasher::default().hash_one(key)
}

/// The queue of `key`, which is created if needed.
fn find_or_make<'table>(by_key: &'table mut HashTable<Queue>, key: &str) -> OccupiedEntry<'table, Queue> {
    match by_key.entry(hash(key), |queue| *queue.key == *key, |queue| hash(&queue.key)) {
        Entry::Occupied(queue) => queue,
        Entry::Vacant(free) => free.insert(Queue::new(key)),
    }
}

fn remove_if_unused(queue: OccupiedEntry<'_, Queue>) {
    if queue.get().is_unused() {
        queue.remove();
    }
}

impl Queues {
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Takes the oldest value of `key`, or clones it with [`DuplicatePolicy::Tolerate`].
    pub(super) fn pop(&mut self, duplicates: DuplicatePolicy, key: &str) -> Option<(Arc<str>, Value)> {
        let mut queue = self.find(key)?;
        let value = queue.get_mut().pop(duplicates)?;
        let key = queue.get().key.clone();
        remove_if_unused(queue);
        Some((key, value))
    }

    /// As [`pop`](Self::pop); queues the receiver if there is no value.
    pub(super) fn receive(
        &mut self,
        duplicates: DuplicatePolicy,
        key: &str,
        token: Option<&CancellationToken>,
    ) -> Found {
        let Self { by_key, waiters } = self;
        let mut queue = find_or_make(by_key, key);
        let key = queue.get().key.clone();
        if let Some(value) = queue.get_mut().pop(duplicates) {
            remove_if_unused(queue);
            return Found::Value(key, value);
        }
        // Checked after the value, because an available value takes precedence.
        if token.is_some_and(CancellationToken::is_cancelled) {
            remove_if_unused(queue);
            return Found::Cancelled;
        }
        let Queue { receivers, is_spent, .. } = queue.get_mut();
        let may_have_one = duplicates == DuplicatePolicy::Report;
        if may_have_one && (*is_spent || waiters.oldest(receivers).is_some()) {
            return Found::Duplicate;
        }
        Found::Waits(key, waiters.join(receivers, token.cloned()))
    }

    /// Whether another value of `key` would be a duplicate.
    pub(super) fn would_duplicate(&mut self, duplicates: DuplicatePolicy, key: &str) -> bool {
        let is_taken = |queue: &Queue| queue.is_spent || !queue.values.is_empty();
        duplicates != DuplicatePolicy::Queue && self.find(key).is_some_and(|queue| is_taken(queue.get()))
    }

    /// Gives `value` to the oldest receiver of `key`, or queues it by its sequence number. With
    /// [`DuplicatePolicy::Tolerate`], all receivers get the value, and it is queued, too.
    pub(super) fn offer(&mut self, duplicates: DuplicatePolicy, key: &str, value: Value) -> Offered {
        let Self { by_key, waiters } = self;
        let mut found = find_or_make(by_key, key);
        let queue = found.get_mut();
        let mut given_to = Receivers::default();
        while waiters.oldest(&mut queue.receivers).is_some() {
            if duplicates == DuplicatePolicy::Tolerate {
                given_to.add(waiters.end_first(&mut queue.receivers, WaiterEntry::Given(value.clone())));
                continue;
            }
            given_to.add(waiters.end_first(&mut queue.receivers, WaiterEntry::Given(value)));
            queue.is_spent = duplicates == DuplicatePolicy::Report;
            remove_if_unused(found);
            return Offered { given_to, queued: false };
        }
        let mut place = queue.values.partition_point(|queued| queued.sequence < value.sequence);
        if tensorwire_testpoints::planted!("an undelivered value is queued behind later ones") {
            place = queue.values.len();
        }
        queue.values.insert(place, value);
        queue.is_spent = false;
        Offered { given_to, queued: true }
    }

    pub(super) fn look(&mut self, place: WaiterIndex, waker: &Waker) -> Look {
        self.waiters.look(place, waker)
    }

    /// Removes the receiver `place` of `key`, and returns its entry.
    pub(super) fn leave(&mut self, key: &str, place: WaiterIndex) -> WaiterEntry {
        let Self { by_key, waiters } = self;
        let Ok(mut queue) = by_key.find_entry(hash(key), |queue| *queue.key == *key) else {
            return waiters.leave(None, place);
        };
        let left = waiters.leave(Some(&mut queue.get_mut().receivers), place);
        remove_if_unused(queue);
        left
    }

    /// Removes the values of the keys that `is_meant`, and returns them in the order in which they were sent.
    pub(super) fn drain(&mut self, is_meant: impl Fn(&str) -> bool) -> Vec<Value> {
        let mut drained = Vec::new();
        for queue in self.by_key.iter_mut().filter(|queue| is_meant(&queue.key)) {
            drained.extend(queue.values.drain(..));
        }
        self.by_key.retain(|queue| !queue.is_unused());
        drained.sort_by_key(|value| value.sequence);
        drained
    }

    /// Removes all values and receivers.
    pub(super) fn end(&mut self) -> EndedQueues {
        let mut ended = EndedQueues::default();
        let mut queues: Vec<_> = self.by_key.drain().collect();
        queues.sort_by(|one, other| one.key.cmp(&other.key));
        for mut queue in queues {
            ended.values.extend(queue.values);
            while self.waiters.oldest(&mut queue.receivers).is_some() {
                ended.waiting.extend(self.waiters.end_first(&mut queue.receivers, WaiterEntry::Aborted));
            }
        }
        ended
    }

    fn find(&mut self, key: &str) -> Option<OccupiedEntry<'_, Queue>> {
        self.by_key.find_entry(hash(key), |queue| *queue.key == *key).ok()
    }
}

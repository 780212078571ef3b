//! The values and receivers of one step, by key. Wakers, tokens and values are returned to the caller, which wakes and
//! drops them outside the lock, because this may run foreign code.

use std::{collections::VecDeque, mem, task::Waker};

use hashbrown::{
    HashTable,
    hash_table::{Entry, OccupiedEntry},
};
use tokio_util::sync::CancellationToken;

use super::{
    QueueKey, Value,
    waiters::{Look, Waiter, WaiterEntry, WaiterIndex, WaiterLine, Waiters},
};
use crate::values::duplicates::DuplicatePolicy;

/// All keys in use. Each operation computes one hash, because a step may have ten thousand outstanding receives.
#[derive(Debug, Default)]
pub(super) struct Queues {
    by_key: HashTable<Queue>,
    waiters: Waiters,
    /// Those that wait for the end of the step.
    watchers: WaiterLine,
}

/// The values or the receivers of one key; never both.
#[derive(Debug)]
struct Queue {
    key: QueueKey,
    values: Values,
    receivers: WaiterLine,
    /// Its only value was taken ([`DuplicatePolicy::Report`]).
    is_spent: bool,
}

/// The values of one key, in the order of their sequence numbers. Most keys have one, which needs no allocation.
#[derive(Debug, Default)]
struct Values {
    first: Option<Value>,
    /// Empty if there is no first.
    others: VecDeque<Value>,
}

impl Values {
    fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn pop(&mut self) -> Option<Value> {
        mem::replace(&mut self.first, self.others.pop_front())
    }

    fn insert(&mut self, value: Value) {
        let is_misplaced =
            || tensorwire_testpoints::planted!("an undelivered value is queued behind later ones");
        match &mut self.first {
            None => self.first = Some(value),
            Some(first) if value.sequence < first.sequence && !is_misplaced() => {
                self.others.push_front(mem::replace(first, value));
            }
            Some(_) => {
                let place = self.others.partition_point(|queued| queued.sequence < value.sequence);
                self.others.insert(place, value);
            }
        }
    }

    fn take(&mut self) -> impl Iterator<Item = Value> + use<> {
        let Self { first, others } = mem::take(self);
        first.into_iter().chain(others)
    }
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
    Value(Value),
    /// No value yet; the receiver was queued.
    Waits(WaiterIndex),
    /// No value, and the token is cancelled.
    Cancelled,
    /// A second receiver, which the policy does not allow.
    Duplicate,
}

impl Queue {
    fn new(key: &QueueKey) -> Self {
        Self {
            key: key.clone(),
            values: Values::default(),
            receivers: WaiterLine::default(),
            is_spent: false,
        }
    }

    fn is_unused(&self) -> bool {
        self.values.is_empty() && self.receivers.is_empty() && !self.is_spent
    }

    /// Takes the oldest value, or clones it with [`DuplicatePolicy::Tolerate`].
    fn pop(&mut self, duplicates: DuplicatePolicy) -> Option<Value> {
        if duplicates == DuplicatePolicy::Tolerate {
            return self.values.first.clone();
        }
        let value = self.values.pop()?;
        self.is_spent = duplicates == DuplicatePolicy::Report;
        Some(value)
    }
}

/// The queue of `key`, which is created if needed.
fn find_or_make<'table>(
    by_key: &'table mut HashTable<Queue>,
    key: &QueueKey,
) -> OccupiedEntry<'table, Queue> {
    match by_key.entry(key.hash(), |queue| queue.key == *key, |queue| queue.key.hash()) {
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
    pub(super) fn pop(&mut self, duplicates: DuplicatePolicy, key: &QueueKey) -> Option<Value> {
        let mut queue = self.find(key)?;
        let value = queue.get_mut().pop(duplicates)?;
        remove_if_unused(queue);
        Some(value)
    }

    /// As [`pop`](Self::pop); queues the receiver if there is no value.
    pub(super) fn receive(
        &mut self,
        duplicates: DuplicatePolicy,
        key: &QueueKey,
        token: Option<&CancellationToken>,
    ) -> Found {
        let Self { by_key, waiters, .. } = self;
        let mut queue = find_or_make(by_key, key);
        if let Some(value) = queue.get_mut().pop(duplicates) {
            remove_if_unused(queue);
            return Found::Value(value);
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
        Found::Waits(waiters.join(receivers, token.cloned()))
    }

    /// Whether another value of `key` would be a duplicate.
    pub(super) fn would_duplicate(&mut self, duplicates: DuplicatePolicy, key: &QueueKey) -> bool {
        let is_taken = |queue: &Queue| queue.is_spent || !queue.values.is_empty();
        duplicates != DuplicatePolicy::Queue && self.find(key).is_some_and(|queue| is_taken(queue.get()))
    }

    /// Gives `value` to the oldest receiver of `key`, or queues it by its sequence number. With
    /// [`DuplicatePolicy::Tolerate`], all receivers get the value, and it is queued, too.
    pub(super) fn offer(&mut self, duplicates: DuplicatePolicy, key: &QueueKey, value: Value) -> Offered {
        let Self { by_key, waiters, .. } = self;
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
        queue.values.insert(value);
        queue.is_spent = false;
        Offered { given_to, queued: true }
    }

    pub(super) fn look(&mut self, place: WaiterIndex, waker: &Waker) -> Look {
        self.waiters.look(place, waker)
    }

    /// Removes the receiver `place` of `key`, and returns its entry.
    pub(super) fn leave(&mut self, key: &QueueKey, place: WaiterIndex) -> WaiterEntry {
        let Self { by_key, waiters, .. } = self;
        let Ok(mut queue) = by_key.find_entry(key.hash(), |queue| queue.key == *key) else {
            return waiters.leave(None, place);
        };
        let left = waiters.leave(Some(&mut queue.get_mut().receivers), place);
        remove_if_unused(queue);
        left
    }

    /// Adds a task to those that wait for the end of the step, or replaces its waker. Returns a waker to be dropped outside
    /// the lock.
    pub(super) fn watch(&mut self, place: &mut Option<WaiterIndex>, waker: &Waker) -> Look {
        let place = *place.get_or_insert_with(|| self.waiters.join(&mut self.watchers, None));
        self.waiters.look(place, waker)
    }

    /// Removes a task that waited for the end of the step. Returns its entry, to be dropped outside the lock.
    pub(super) fn stop_watching(&mut self, place: WaiterIndex) -> WaiterEntry {
        self.waiters.leave(Some(&mut self.watchers), place)
    }

    /// Removes the values of the keys that `is_meant`, and returns them in the order in which they were sent.
    pub(super) fn drain(&mut self, is_meant: impl Fn(&QueueKey) -> bool) -> Vec<Value> {
        let mut drained = Vec::new();
        for queue in self.by_key.iter_mut().filter(|queue| is_meant(&queue.key)) {
            drained.extend(queue.values.take());
        }
        self.by_key.retain(|queue| !queue.is_unused());
        drained.sort_by_key(|value| value.sequence);
        drained
    }

    /// Removes all values and receivers.
    pub(super) fn end(&mut self) -> EndedQueues {
        let mut ended = EndedQueues::default();
        let mut queues: Vec<_> = self.by_key.drain().collect();
        queues.sort_by_cached_key(|queue| queue.key.to_string());
        for mut queue in queues {
            ended.values.extend(queue.values.take());
            while self.waiters.oldest(&mut queue.receivers).is_some() {
                ended.waiting.extend(self.waiters.end_first(&mut queue.receivers, WaiterEntry::Aborted));
            }
        }
        while self.waiters.oldest(&mut self.watchers).is_some() {
            ended.waiting.extend(self.waiters.end_first(&mut self.watchers, WaiterEntry::Aborted));
        }
        ended
    }

    fn find(&mut self, key: &QueueKey) -> Option<OccupiedEntry<'_, Queue>> {
        self.by_key.find_entry(key.hash(), |queue| queue.key == *key).ok()
    }
}

//! The values and receivers of one step, by key. Wakers, tokens and values are returned to the caller, which wakes and
//! drops them outside the lock, because this may run foreign code.

use std::{collections::VecDeque, mem, task::Waker};

use hashbrown::{HashTable, hash_table::Entry};
use tokio_util::sync::CancellationToken;

use super::{
    QueueKey, Value,
    waiters::{Look, Waiter, WaiterEntry, WaiterIndex, WaiterLine, Waiters},
};
use crate::values::duplicates::DuplicatePolicy;

/// All keys in use. A step may have ten thousand keys, which do not fit into a processor's cache. So a small table
/// finds them, and keys that are used one after the other are neighbours in memory.
#[derive(Debug, Default)]
pub(super) struct Queues {
    by_key: HashTable<Place>,
    queues: Vec<Option<Queue>>,
    /// The indices of `queues` without a key.
    free: Vec<usize>,
    waiters: Waiters<Value>,
    /// The tasks that wait for the end of the step.
    watchers: Waiters<()>,
    watching: WaiterLine,
}

/// The index of a key's queue, with the key's hash, so that other keys need not be compared.
#[derive(Debug)]
struct Place {
    hash: u64,
    index: usize,
}

/// The values or the receivers of one key; never both.
#[derive(Debug)]
struct Queue {
    key: QueueKey,
    values: Values,
    receivers: WaiterLine,
    /// The key's only value was taken ([`DuplicatePolicy::Report`]).
    is_spent: bool,
}

/// The values of one key, in the order of their sequence numbers. Most keys have one value, which needs no allocation.
#[derive(Debug, Default)]
struct Values {
    first: Option<Value>,
    /// Empty if there is no first value.
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

impl Queues {
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    fn find(&self, key: &QueueKey) -> Option<usize> {
        let found = self.by_key.find(key.hash(), |place| is_of(key, place, &self.queues));
        found.map(|place| place.index)
    }

    /// The place of the queue of `key`, which is created if needed.
    fn find_or_make(&mut self, key: &QueueKey) -> usize {
        let Self { by_key, queues, free, .. } = self;
        match by_key.entry(key.hash(), |place| is_of(key, place, queues), |place| place.hash) {
            Entry::Occupied(found) => found.get().index,
            Entry::Vacant(vacant) => {
                let made = Some(Queue::new(key));
                let index = free.pop().unwrap_or(queues.len());
                match queues.get_mut(index) {
                    Some(place) => *place = made,
                    None => queues.push(made),
                }
                vacant.insert(Place { hash: key.hash(), index });
                index
            }
        }
    }

    /// The queue at `index` and the receivers of all, unless there is none.
    fn at(&mut self, index: usize) -> Option<(&mut Queue, &mut Waiters<Value>)> {
        let queue = self.queues.get_mut(index)?.as_mut()?;
        Some((queue, &mut self.waiters))
    }

    fn remove_if_unused(&mut self, index: usize) {
        let Some(place) = self.queues.get_mut(index) else { return };
        let Some(gone) = place.take_if(|queue| queue.is_unused()) else { return };
        if let Ok(found) = self.by_key.find_entry(gone.key.hash(), |place| place.index == index) {
            found.remove();
        }
        self.free.push(index);
    }

    /// Takes the oldest value of `key`, or clones it with [`DuplicatePolicy::Tolerate`].
    pub(super) fn pop(&mut self, duplicates: DuplicatePolicy, key: &QueueKey) -> Option<Value> {
        let index = self.find(key)?;
        let value = self.at(index)?.0.pop(duplicates)?;
        self.remove_if_unused(index);
        Some(value)
    }

    /// Like [`pop`](Self::pop), but queues the receiver if there is no value.
    pub(super) fn receive(
        &mut self,
        duplicates: DuplicatePolicy,
        key: &QueueKey,
        token: Option<&CancellationToken>,
    ) -> Found {
        let index = self.find_or_make(key);
        let found = self.receive_at(duplicates, index, token);
        if !matches!(found, Found::Waits(_)) {
            self.remove_if_unused(index);
        }
        found
    }

    fn receive_at(
        &mut self,
        duplicates: DuplicatePolicy,
        index: usize,
        token: Option<&CancellationToken>,
    ) -> Found {
        let Some((queue, waiters)) = self.at(index) else { return Found::Cancelled };
        if let Some(value) = queue.pop(duplicates) {
            return Found::Value(value);
        }
        // Checked after the value, because an available value takes precedence.
        if token.is_some_and(CancellationToken::is_cancelled) {
            return Found::Cancelled;
        }
        let may_have_one = duplicates == DuplicatePolicy::Report;
        if may_have_one && (queue.is_spent || waiters.oldest(&mut queue.receivers).is_some()) {
            return Found::Duplicate;
        }
        Found::Waits(waiters.join(&mut queue.receivers, token.cloned()))
    }

    /// Whether another value of `key` would be a duplicate.
    pub(super) fn would_duplicate(&self, duplicates: DuplicatePolicy, key: &QueueKey) -> bool {
        let is_taken = |queue: &Queue| queue.is_spent || !queue.values.is_empty();
        let queue = |index: usize| self.queues.get(index)?.as_ref();
        duplicates != DuplicatePolicy::Queue && self.find(key).and_then(queue).is_some_and(is_taken)
    }

    /// Gives `value` to the oldest receiver of `key`, or queues it by its sequence number. With
    /// [`DuplicatePolicy::Tolerate`], all receivers get the value, and it is queued, too.
    pub(super) fn offer(&mut self, duplicates: DuplicatePolicy, key: &QueueKey, value: Value) -> Offered {
        let index = self.find_or_make(key);
        let mut given_to = Receivers::default();
        let Some((queue, waiters)) = self.at(index) else { return Offered { given_to, queued: false } };
        while waiters.oldest(&mut queue.receivers).is_some() {
            if duplicates == DuplicatePolicy::Tolerate {
                given_to.add(waiters.end_first(&mut queue.receivers, WaiterEntry::Given(value.clone())));
                continue;
            }
            given_to.add(waiters.end_first(&mut queue.receivers, WaiterEntry::Given(value)));
            queue.is_spent = duplicates == DuplicatePolicy::Report;
            self.remove_if_unused(index);
            return Offered { given_to, queued: false };
        }
        queue.values.insert(value);
        queue.is_spent = false;
        Offered { given_to, queued: true }
    }

    pub(super) fn look(&mut self, place: WaiterIndex, waker: &Waker) -> Look<Value> {
        self.waiters.look(place, waker)
    }

    /// Removes the receiver `place` of `key`, and returns its entry.
    pub(super) fn leave(&mut self, key: &QueueKey, place: WaiterIndex) -> WaiterEntry<Value> {
        let index = self.find(key);
        let line = index.and_then(|index| self.queues.get_mut(index)?.as_mut());
        let left = self.waiters.leave(line.map(|queue| &mut queue.receivers), place);
        index.into_iter().for_each(|index| self.remove_if_unused(index));
        left
    }

    /// Adds a task that waits for the end of the step, or replaces its waker. Returns a waker to be dropped outside the
    /// lock.
    pub(super) fn watch(&mut self, place: &mut Option<WaiterIndex>, waker: &Waker) -> Look<()> {
        let place = *place.get_or_insert_with(|| self.watchers.join(&mut self.watching, None));
        self.watchers.look(place, waker)
    }

    /// Removes a task that waited for the end of the step. Returns its entry, to be dropped outside the lock.
    pub(super) fn stop_watching(&mut self, place: WaiterIndex) -> WaiterEntry<()> {
        self.watchers.leave(Some(&mut self.watching), place)
    }

    /// Removes the values of the keys that `is_meant`, and returns them in the order in which they were sent.
    pub(super) fn drain(&mut self, is_meant: impl Fn(&QueueKey) -> bool) -> Vec<Value> {
        let mut drained = Vec::new();
        for index in 0..self.queues.len() {
            if let Some((queue, _)) = self.at(index).filter(|(queue, _)| is_meant(&queue.key)) {
                drained.extend(queue.values.take());
                self.remove_if_unused(index);
            }
        }
        drained.sort_by_key(|value| value.sequence);
        drained
    }

    /// Removes all values and receivers.
    pub(super) fn end(&mut self) -> EndedQueues {
        let mut ended = EndedQueues::default();
        let mut queues: Vec<_> = mem::take(&mut self.queues).into_iter().flatten().collect();
        self.by_key.clear();
        self.free.clear();
        queues.sort_by_cached_key(|queue| queue.key.to_string());
        for mut queue in queues {
            ended.values.extend(queue.values.take());
            while self.waiters.oldest(&mut queue.receivers).is_some() {
                ended.waiting.extend(self.waiters.end_first(&mut queue.receivers, WaiterEntry::Aborted));
            }
        }
        while self.watchers.oldest(&mut self.watching).is_some() {
            ended.waiting.extend(self.watchers.end_first(&mut self.watching, WaiterEntry::Aborted));
        }
        ended
    }
}

/// Whether `place` is the place of the queue of `key`.
fn is_of(key: &QueueKey, place: &Place, queues: &[Option<Queue>]) -> bool {
    let queue = || queues.get(place.index).and_then(Option::as_ref);
    place.hash == key.hash() && queue().is_some_and(|queue| queue.key == *key)
}

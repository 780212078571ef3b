//! The subscribers that want every version of a published tensor, and the publishers that wait for them.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Arc, MutexGuard, PoisonError},
};

use tensorwire_testpoints::sync::Mutex;
use tokio::sync::{Notify, OwnedMutexGuard};

/// The subscribers by name. A name is here as long as it has subscribers or waiting publishers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Takers(Arc<Mutex<BTreeMap<String, Arc<Name>>>>);

#[derive(Debug, Default)]
struct Name {
    taken: Mutex<Taken>,
    /// A subscriber has taken a version, or is gone.
    changed: Notify,
    /// The publisher whose turn it is holds this.
    turn: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug, Default)]
struct Taken {
    /// The version that each subscriber has taken last, by its number; 0 for none.
    versions: BTreeMap<u64, u64>,
    /// The number of the next subscriber.
    next: u64,
}

/// A subscriber that wants every version. It no longer counts once this is dropped.
#[derive(Debug)]
pub(crate) struct Taker {
    takers: Takers,
    name: String,
    subscribers: Arc<Name>,
    number: u64,
}

impl Taker {
    /// The subscriber has taken `version`.
    pub(crate) fn took(&self, version: u64) {
        self.subscribers.lock().versions.insert(self.number, version);
        self.subscribers.changed.notify_waiters();
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        self.subscribers.lock().versions.remove(&self.number);
        self.subscribers.changed.notify_waiters();
        self.takers.prune(&self.name);
    }
}

impl Name {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn have_all_taken(&self, version: u64) -> bool {
        let have_all = self.lock().versions.values().all(|taken| *taken >= version);
        have_all || tensorwire_testpoints::planted!("a publication does not wait for its subscribers")
    }
}

/// The turn of one publisher of a name.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Dropped first, so that the name is pruned after it.
    turn: Option<OwnedMutexGuard<()>>,
    takers: Takers,
    name: String,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turn = None;
        self.takers.prune(&self.name);
    }
}

impl Takers {
    /// Adds a subscriber that has taken `version`.
    pub(crate) fn subscribe(&self, name: &str, version: u64) -> Taker {
        let mut names = self.lock();
        let subscribers = names.entry(name.to_owned()).or_default().clone();
        let number = {
            let mut taken = subscribers.lock();
            taken.next += 1;
            let number = taken.next;
            taken.versions.insert(number, version);
            number
        };
        drop(names);
        Taker { takers: self.clone(), name: name.to_owned(), subscribers, number }
    }

    /// Waits until all subscribers have taken the `current` version of the tensor, and no other publisher has its turn.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(crate) async fn turn(&self, name: &str, current: impl Fn() -> u64) -> Turn {
        let (subscribers, waiting) = {
            let mut names = self.lock();
            let subscribers = names.entry(name.to_owned()).or_default();
            // This reference keeps the name.
            (subscribers.clone(), subscribers.turn.clone())
        };
        let mut turn = Turn { turn: None, takers: self.clone(), name: name.to_owned() };
        let held = waiting.lock_owned().await;
        loop {
            let mut changed = pin!(subscribers.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if subscribers.have_all_taken(current()) {
                turn.turn = Some(held);
                return turn;
            }
            changed.await;
        }
    }

    /// Forgets the name unless it has subscribers or publishers.
    fn prune(&self, name: &str) {
        let mut names = self.lock();
        let is_idle = |subscribers: &Arc<Name>| {
            subscribers.lock().versions.is_empty() && Arc::strong_count(&subscribers.turn) == 1
        };
        if names.get(name).is_some_and(is_idle) {
            names.remove(name);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Name>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

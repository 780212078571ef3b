//! What peers were asked to request: pages of writes, and arguments of calls.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    num::NonZeroU64,
    sync::{
        MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tensorwire_testpoints::sync::Mutex;

/// Contents by number, each for one peer, which takes it once.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    contents: Mutex<BTreeMap<NonZeroU64, (String, T)>>,
    latest: AtomicU64,
}

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Self { contents: Mutex::default(), latest: AtomicU64::new(0) }
    }
}

impl<T> Pending<T> {
    /// Lets `peer`, and no other, request `content`.
    pub(crate) fn offer(&self, peer: &str, content: T) -> Offered<'_, T> {
        let number = NonZeroU64::MIN.saturating_add(self.latest.fetch_add(1, Ordering::Relaxed));
        self.contents().insert(number, (peer.to_owned(), content));
        Offered { pending: self, number }
    }

    /// Takes the content that `peer` asks for. `None` if it has ended, was requested before, or is another peer's.
    pub(crate) fn take(&self, number: NonZeroU64, peer: &str) -> Option<T> {
        match self.contents().entry(number) {
            Entry::Occupied(content) if content.get().0 == peer => Some(content.remove().1),
            _ => None,
        }
    }

    fn contents(&self) -> MutexGuard<'_, BTreeMap<NonZeroU64, (String, T)>> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets the peer request a content while it lives.
#[derive(Debug)]
pub(crate) struct Offered<'a, T> {
    pending: &'a Pending<T>,
    pub(crate) number: NonZeroU64,
}

impl<T> Drop for Offered<'_, T> {
    fn drop(&mut self) {
        let content = self.pending.contents().remove(&self.number);
        drop(content);
    }
}

//! The state of a wait for several keys, and the pauses of polling.

use std::time::Duration;

use tensorwire_fabric::Runtime;

use super::StoreError;

/// The keys of a wait, and the values found so far.
#[derive(Debug)]
pub(super) struct Wanted<'a> {
    keys: &'a [String],
    found: Vec<Option<Vec<u8>>>,
}

impl<'a> Wanted<'a> {
    pub(super) fn new(keys: &'a [String]) -> Self {
        Self { keys, found: vec![None; keys.len()] }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.found.iter().all(Option::is_some)
    }

    /// The keys without a value, in their order.
    pub(super) fn missing(&self) -> Vec<String> {
        let missing = self.keys.iter().zip(&self.found).filter(|(_, value)| value.is_none());
        missing.map(|(key, _)| key.clone()).collect()
    }

    /// Stores the values of the [`missing`](Self::missing) keys.
    pub(super) fn fill(&mut self, values: Vec<Option<Vec<u8>>>) {
        let missing = self.found.iter_mut().filter(|value| value.is_none());
        missing.zip(values).for_each(|(entry, value)| *entry = value);
    }

    /// Stores the value of `key`, if it is one of the keys.
    #[cfg(feature = "etcd")]
    pub(super) fn put(&mut self, key: &[u8], value: &[u8]) {
        let wanted = self.keys.iter().zip(&mut self.found).filter(|(wanted, _)| wanted.as_bytes() == key);
        wanted.for_each(|(_, entry)| *entry = Some(value.to_vec()));
    }

    /// The values, in the order of the keys.
    pub(super) fn into_values(self) -> Vec<Vec<u8>> {
        self.found.into_iter().flatten().collect()
    }

    pub(super) fn timed_out(&self, store: String, limit: Duration) -> StoreError {
        StoreError::TimedOut { store, limit, missing: self.missing() }
    }
}

/// The pauses between polls. Each is up to twice as long as the one before, with a random part so that ranks do not poll
/// together.
#[derive(Debug)]
pub(super) struct Pause {
    next: Duration,
    longest: Duration,
}

impl Pause {
    pub(super) fn new(shortest: Duration, longest: Duration) -> Self {
        Self { next: shortest, longest }
    }

    /// Sleeps for the next pause, or for `left` if that is shorter.
    pub(super) async fn sleep(&mut self, runtime: &dyn Runtime, left: Duration) {
        let part = (runtime.random() % 1024) as u32;
        let pause = self.next / 2 + self.next / 2 * part / 1024;
        runtime.sleep(pause.min(left)).await;
        self.next = (self.next * 2).min(self.longest);
    }
}

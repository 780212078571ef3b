//! What a wait has found of its keys, and how a store is asked again that tells nobody of writes.

use std::time::Duration;

use tensorwire_verbs_reactor::Runtime;

use super::StoreError;

/// The keys of a wait, and the values that were found.
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

    /// Takes the values of the keys that were [`missing`](Self::missing).
    pub(super) fn fill(&mut self, values: Vec<Option<Vec<u8>>>) {
        let missing = self.found.iter_mut().filter(|value| value.is_none());
        missing.zip(values).for_each(|(place, value)| *place = value);
    }

    /// Takes the value of `key`, if it is wanted.
    #[cfg(feature = "etcd")]
    pub(super) fn put(&mut self, key: &[u8], value: &[u8]) {
        let wanted = self.keys.iter().zip(&mut self.found).filter(|(wanted, _)| wanted.as_bytes() == key);
        wanted.for_each(|(_, place)| *place = Some(value.to_vec()));
    }

    /// The values, in the order of the keys.
    pub(super) fn into_values(self) -> Vec<Vec<u8>> {
        self.found.into_iter().flatten().collect()
    }

    pub(super) fn timed_out(&self, store: String, limit: Duration) -> StoreError {
        StoreError::TimedOut { store, limit, missing: self.missing() }
    }
}

/// Pauses between looks at a store. Each is up to twice as long as the one before, and those of several ranks differ.
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

/// Looks for `keys` until all are found: reads those that are missing by `read`, with pauses in between, and a last time when
/// `limit` is over.
///
/// # Errors
/// [`StoreError::TimedOut`] of `store`; those of `read`.
pub(super) async fn look_for<Reading>(
    keys: &[String],
    limit: Duration,
    (runtime, mut pause): (&dyn Runtime, Pause),
    store: impl FnOnce() -> String,
    read: impl Fn(Vec<String>) -> Reading,
) -> Result<Vec<Vec<u8>>, StoreError>
where
    Reading: Future<Output = Result<Vec<Option<Vec<u8>>>, StoreError>>,
{
    let end = runtime.now().saturating_add(limit);
    let mut wanted = Wanted::new(keys);
    loop {
        let left = end.saturating_sub(runtime.now());
        wanted.fill(read(wanted.missing()).await?);
        if wanted.is_complete() {
            return Ok(wanted.into_values());
        }
        if left.is_zero() {
            return Err(wanted.timed_out(store(), limit));
        }
        pause.sleep(runtime, end.saturating_sub(runtime.now())).await;
    }
}

//! A map in memory, and the waits for its keys.

use std::{
    collections::{BTreeMap, HashMap},
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::channel::oneshot;
use serde::{Deserialize, Serialize};

use super::{
    StoreError,
    request::{Answer, Request, Value},
    rules::{NoSum, sum},
};

/// The limits of a [`MemoryStore`](super::MemoryStore). Beyond them it rejects requests with an error that names the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Keys. Default: 1,048,576.
    pub keys: usize,
    /// Bytes of all keys and values. Default: 256 MiB.
    pub bytes: usize,
    /// Waits at a time, of this process and of peers. Default: 65,536.
    pub waits: usize,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { keys: 1 << 20, bytes: 256 << 20, waits: 1 << 16 }
    }
}

/// Why a board rejects a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refused {
    NoSum(NoSum),
    /// A limit is reached.
    Full(Counted),
}

impl Refused {
    /// The error of `request` to `store`, whose limit is `limit`.
    pub(super) fn error(self, store: String, limit: usize, request: &Request) -> StoreError {
        match (self, request) {
            (Self::NoSum(why), Request::Add { key, delta }) => why.error(store, key, *delta),
            (Self::NoSum(_), _) => {
                StoreError::Unreachable { store, detail: "it refused a sum that nobody asked for".to_owned() }
            }
            (Self::Full(what), _) => StoreError::Full { store, what: what.name(), limit },
        }
    }
}

/// A limited resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Counted {
    Keys,
    Bytes,
    Waits,
}

impl Counted {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Bytes => "bytes",
            Self::Waits => "waits",
        }
    }
}

#[derive(Debug)]
pub(super) struct Board {
    limits: MemoryLimits,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    values: HashMap<String, Value>,
    /// The total of `values` and their keys.
    bytes: usize,
    /// Each wait is registered under the first of its keys that has no value, so that a write wakes no other waits.
    waits: HashMap<String, BTreeMap<u64, oneshot::Sender<()>>>,
    waits_count: usize,
    next_wait: u64,
}

impl Board {
    pub(super) fn new(limits: MemoryLimits) -> Self {
        Self { limits, inner: Mutex::default() }
    }

    /// Executes a request. For a wait, it reads the keys and does not wait.
    ///
    /// # Errors
    /// [`Refused`].
    pub(super) fn execute(&self, request: &Request) -> Result<Answer, Refused> {
        Ok(match request {
            Request::Set { key, value } => {
                self.set(key, value)?;
                Answer::Done
            }
            Request::Get { keys } | Request::Wait { keys, .. } => Answer::Values(self.get(keys)),
            Request::Add { key, delta } => Answer::Sum(self.add(key, *delta)?),
            Request::CompareSet { key, expected, value } => {
                Answer::Value(self.compare_set(key, expected.as_deref(), value)?)
            }
            Request::Delete { key } => Answer::Deleted(self.delete(key)),
        })
    }

    /// The limit that a request exceeds; 0 if it was refused for another reason.
    pub(super) fn limit(&self, why: Refused) -> usize {
        match why {
            Refused::NoSum(_) => 0,
            Refused::Full(Counted::Keys) => self.limits.keys,
            Refused::Full(Counted::Bytes) => self.limits.bytes,
            Refused::Full(Counted::Waits) => self.limits.waits,
        }
    }

    /// # Errors
    /// [`Refused::Full`].
    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<(), Refused> {
        let woken = self.lock().put(key, value, &self.limits)?;
        wake(woken);
        Ok(())
    }

    pub(super) fn get(&self, keys: &[String]) -> Vec<Option<Value>> {
        let inner = self.lock();
        keys.iter().map(|key| inner.values.get(key).cloned()).collect()
    }

    /// # Errors
    /// [`Refused`].
    pub(super) fn add(&self, key: &str, delta: i64) -> Result<i64, Refused> {
        let mut inner = self.lock();
        let sum = sum(inner.values.get(key).map(|value| &**value), delta).map_err(Refused::NoSum)?;
        let woken = inner.put(key, sum.to_string().as_bytes(), &self.limits)?;
        drop(inner);
        wake(woken);
        Ok(sum)
    }

    /// # Errors
    /// [`Refused::Full`].
    pub(super) fn compare_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<Option<Value>, Refused> {
        let mut inner = self.lock();
        let found = inner.values.get(key);
        if found.map(|value| &**value) != expected {
            return Ok(found.cloned());
        }
        let woken = inner.put(key, value, &self.limits)?;
        let stored = inner.values.get(key).cloned();
        drop(inner);
        wake(woken);
        Ok(stored)
    }

    pub(super) fn delete(&self, key: &str) -> bool {
        let mut inner = self.lock();
        let Some(value) = inner.values.remove(key) else { return false };
        inner.bytes -= key.len() + value.len();
        true
    }

    /// Completes when all `keys` have values.
    ///
    /// # Errors
    /// [`Refused::Full`].
    ///
    /// # Cancel safety
    /// A dropped wait is removed.
    pub(super) async fn wait(&self, keys: &[String]) -> Result<Vec<Value>, Refused> {
        let mut found = 0;
        loop {
            let (wait, woken) = match self.values_or_wait(keys, &mut found)? {
                Found::All(values) => return Ok(values),
                Found::Missing(wait, woken) => (wait, woken),
            };
            // The sender is dropped only by a wake: the guard lives until then.
            let _ = woken.await;
            drop(wait);
        }
    }

    /// The keys without a value.
    pub(super) fn missing(&self, keys: &[String]) -> Vec<String> {
        let inner = self.lock();
        keys.iter().filter(|key| !inner.values.contains_key(*key)).cloned().collect()
    }

    /// The number of waits.
    pub(super) fn waits(&self) -> usize {
        let inner = self.lock();
        debug_assert_eq!(inner.waits.values().map(BTreeMap::len).sum::<usize>(), inner.waits_count);
        inner.waits_count
    }

    /// The first `found` keys had values when they were last checked, and are checked again only at the end.
    fn values_or_wait<'a>(&'a self, keys: &'a [String], found: &mut usize) -> Result<Found<'a>, Refused> {
        let mut inner = self.lock();
        let is_missing = |key: &String| !inner.values.contains_key(key);
        let later = keys[*found..].iter().position(is_missing).map(|at| *found + at);
        // An earlier key may have been deleted.
        let Some(missing) = later.or_else(|| keys.iter().position(is_missing)) else {
            return Ok(Found::All(keys.iter().filter_map(|key| inner.values.get(key).cloned()).collect()));
        };
        *found = missing;
        let (id, woken) = inner.begin_wait(&keys[missing], self.limits.waits)?;
        Ok(Found::Missing(Wait { board: self, key: &keys[missing], id }, woken))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Found<'a> {
    All(Vec<Value>),
    Missing(Wait<'a>, oneshot::Receiver<()>),
}

/// Removes the wait when dropped.
struct Wait<'a> {
    board: &'a Board,
    key: &'a str,
    id: u64,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.board.lock().end_wait(self.key, self.id);
    }
}

type Woken = BTreeMap<u64, oneshot::Sender<()>>;

/// Called without the lock, because wakers are foreign code.
fn wake(woken: Woken) {
    for wait in woken.into_values() {
        // Its future may have been dropped meanwhile.
        let _ = wait.send(());
    }
}

impl Inner {
    fn put(&mut self, key: &str, value: &[u8], limits: &MemoryLimits) -> Result<Woken, Refused> {
        let before = self.values.get(key).map(|value| key.len() + value.len());
        let bytes = self.bytes - before.unwrap_or(0) + key.len() + value.len();
        if before.is_none() && self.values.len() >= limits.keys {
            return Err(Refused::Full(Counted::Keys));
        }
        if bytes > limits.bytes {
            return Err(Refused::Full(Counted::Bytes));
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value.into());
        let woken = self.waits.remove(key).unwrap_or_default();
        self.waits_count -= woken.len();
        Ok(woken)
    }

    fn begin_wait(&mut self, key: &str, max: usize) -> Result<(u64, oneshot::Receiver<()>), Refused> {
        if self.waits_count >= max {
            return Err(Refused::Full(Counted::Waits));
        }
        let (sender, woken) = oneshot::channel();
        let next = self.next_wait.wrapping_add(1);
        let id = mem::replace(&mut self.next_wait, next);
        self.waits.entry(key.to_owned()).or_default().insert(id, sender);
        self.waits_count += 1;
        Ok((id, woken))
    }

    fn end_wait(&mut self, key: &str, id: u64) {
        let Some(waits) = self.waits.get_mut(key) else { return };
        if waits.remove(&id).is_some() {
            self.waits_count -= 1;
        }
        if waits.is_empty() {
            self.waits.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn keys(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_wait_goes_on_to_the_next_key_and_leaves_nothing_behind() {
        let board = Board::new(MemoryLimits::default());
        let names = keys(&["a", "b", "a"]);
        let mut wait = Box::pin(board.wait(&names));
        assert!((&mut wait).now_or_never().is_none());
        board.set("b", b"2").unwrap();
        assert!((&mut wait).now_or_never().is_none());
        assert_eq!(board.waits(), 1);
        board.set("a", b"1").unwrap();
        assert_eq!(board.waits(), 0, "a woken wait is counted no more");
        let values = wait.now_or_never().unwrap().unwrap();
        assert_eq!(values, [b"1", b"2", b"1"].map(|value| Value::from(&value[..])));
    }

    #[test]
    fn a_key_that_is_deleted_meanwhile_is_waited_for_again() {
        let board = Board::new(MemoryLimits::default());
        let names = keys(&["a", "b"]);
        board.set("a", b"1").unwrap();
        let mut wait = Box::pin(board.wait(&names));
        assert!((&mut wait).now_or_never().is_none());
        assert!(board.delete("a"));
        board.set("b", b"2").unwrap();
        assert!((&mut wait).now_or_never().is_none());
        assert_eq!(board.missing(&names), ["a"]);
        board.set("a", b"3").unwrap();
        assert_eq!(&*wait.now_or_never().unwrap().unwrap()[0], b"3");
    }

    #[test]
    fn a_dropped_wait_is_forgotten() {
        let board = Board::new(MemoryLimits::default());
        let names = keys(&["a"]);
        let (mut first, mut second) = (Box::pin(board.wait(&names)), Box::pin(board.wait(&names)));
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        drop(first);
        assert_eq!(board.waits(), 1);
        drop(second);
        assert_eq!(board.waits(), 0);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_changes_nothing() {
        let board = Board::new(MemoryLimits { keys: 2, bytes: 8, waits: 1 });
        board.set("a", b"123").unwrap();
        board.set("b", b"123").unwrap();
        assert_eq!(board.set("c", b""), Err(Refused::Full(Counted::Keys)));
        assert_eq!(board.set("a", b"1234"), Err(Refused::Full(Counted::Bytes)));
        assert_eq!(board.compare_set("a", Some(b"123"), b"1234"), Err(Refused::Full(Counted::Bytes)));
        assert_eq!(board.get(&keys(&["a"])), [Some(Value::from(&b"123"[..]))]);
        board.set("a", b"1").unwrap();
        board.set("b", b"12345").unwrap();
        assert!(board.delete("a") && !board.delete("a"));
        assert_eq!(board.add("n", 10), Err(Refused::Full(Counted::Bytes)));
        assert_eq!(board.add("n", 1), Ok(1));
        let names = keys(&["x"]);
        let mut wait = Box::pin(board.wait(&names));
        assert!((&mut wait).now_or_never().is_none());
        assert_eq!(board.wait(&names).now_or_never().unwrap(), Err(Refused::Full(Counted::Waits)));
    }
}

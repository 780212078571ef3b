//! The store within one process.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use tensorwire_fabric::{BoxFuture, Runtime, timeout};

use super::{
    Store, StoreError,
    board::{Board, BoardLimits, Counted, Refused, Value},
    rules::{check_compare, check_key, check_keys, check_value},
};

/// A map in this process, for groups whose ranks are tasks of one process. Clones share it.
///
/// A write wakes the waits for its key; nothing polls. Keys and bytes are limited only by the available memory.
#[derive(Debug, Clone)]
pub struct MemoryStore {
    name: Arc<str>,
    board: Arc<Board>,
    runtime: Arc<dyn Runtime>,
}

impl MemoryStore {
    /// An empty map. `runtime` measures the time limits of waits.
    pub fn new(runtime: Arc<dyn Runtime>) -> Self {
        Self::over("the store in memory", Arc::new(Board::new(BoardLimits::NONE)), runtime)
    }

    /// A store of `board`, called `name` in errors.
    pub(super) fn over(name: &str, board: Arc<Board>, runtime: Arc<dyn Runtime>) -> Self {
        Self { name: name.into(), board, runtime }
    }

    /// The number of waits in progress, over all clones.
    pub fn waits(&self) -> usize {
        self.board.waits()
    }

    fn name(&self) -> String {
        (*self.name).to_owned()
    }

    fn set_now(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_key(key)?;
        check_value(value)?;
        self.board.set(key, value).map_err(|why| self.error(why, key, 0))
    }

    fn get_now(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        check_keys(keys)?;
        // Copied after the lock is released.
        Ok(self.board.get(keys).iter().map(|value| value.as_deref().map(<[u8]>::to_vec)).collect())
    }

    fn add_now(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        check_key(key)?;
        self.board.add(key, delta).map_err(|why| self.error(why, key, delta))
    }

    fn compare_set_now(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<Option<Vec<u8>>, StoreError> {
        check_compare(key, expected, value)?;
        let there = self.board.compare_set(key, expected, value).map_err(|why| self.error(why, key, 0))?;
        Ok(there.as_deref().map(<[u8]>::to_vec))
    }

    fn delete_now(&self, key: &str) -> Result<bool, StoreError> {
        check_key(key)?;
        Ok(self.board.delete(key))
    }

    async fn wait_for(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        check_keys(keys)?;
        let values = match timeout(&*self.runtime, limit, self.board.wait(keys)).await {
            Ok(values) => values.map_err(|why| self.error(why, "", 0))?,
            Err(_) => self.found_late(keys, limit)?,
        };
        Ok(values.iter().map(|value| value.to_vec()).collect())
    }

    /// The last value may have come just at the end of the limit.
    fn found_late(&self, keys: &[String], limit: Duration) -> Result<Vec<Value>, StoreError> {
        let values: Option<Vec<Value>> = self.board.get(keys).into_iter().collect();
        values.ok_or_else(|| StoreError::TimedOut {
            store: self.name(),
            limit,
            missing: self.board.missing(keys),
        })
    }

    fn error(&self, why: Refused, key: &str, delta: i64) -> StoreError {
        match why {
            Refused::NoSum(why) => why.error(self.name(), key, delta),
            Refused::Full(what) => {
                StoreError::Full { store: self.name(), what: what.name(), limit: self.limit(what) }
            }
        }
    }

    fn limit(&self, what: Counted) -> usize {
        let limits = self.board.limits();
        match what {
            Counted::Keys => limits.keys,
            Counted::Bytes => limits.bytes,
            Counted::Waits => limits.waits,
            // A board has no connections.
            Counted::Connections => 0,
        }
    }
}

impl Store for MemoryStore {
    fn own_address(&self) -> Option<IpAddr> {
        Some(Ipv4Addr::LOCALHOST.into())
    }

    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { self.set_now(key, value) }.boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        async move { self.get_now(keys) }.boxed()
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        self.wait_for(keys, limit).boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        async move { self.add_now(key, delta) }.boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        async move { self.compare_set_now(key, expected, value) }.boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move { self.delete_now(key) }.boxed()
    }
}

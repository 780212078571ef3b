//! A store that some ranks cannot reach any more.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::FutureExt;
use tensorwire_collective::store::{MemoryStore, Store, StoreError};
use tensorwire_verbs_reactor::BoxFuture;

/// One rank's way to the store, which breaks after some calls.
#[derive(Debug)]
pub(super) struct CutStore {
    below: Arc<MemoryStore>,
    calls_left: AtomicUsize,
}

impl CutStore {
    pub(super) fn new(below: &Arc<MemoryStore>) -> Arc<Self> {
        Arc::new(Self { below: below.clone(), calls_left: AtomicUsize::new(usize::MAX) })
    }

    pub(super) fn cut_after(&self, calls: usize) {
        self.calls_left.store(calls, Ordering::Relaxed);
    }

    fn reach(&self) -> Result<&MemoryStore, StoreError> {
        let counted = |left: usize| if left == usize::MAX { Some(left) } else { left.checked_sub(1) };
        match self.calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted) {
            Ok(_) => Ok(&self.below),
            Err(_) => Err(StoreError::Unreachable {
                store: "the store of this test".to_owned(),
                detail: "it is cut off".to_owned(),
            }),
        }
    }
}

impl Store for CutStore {
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { self.reach()?.set(key, value).await }.boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        async move { self.reach()?.get(keys).await }.boxed()
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        async move { self.reach()?.wait(keys, limit).await }.boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        async move { self.reach()?.add(key, delta).await }.boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        async move { self.reach()?.compare_set(key, expected, value).await }.boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move { self.reach()?.delete(key).await }.boxed()
    }
}

//! A store that some ranks can no longer reach.

use std::{
    future::pending,
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::FutureExt;
use tensorwire_collective::store::{MemoryStore, Store, StoreError};
use tensorwire_fabric::BoxFuture;
use tokio::sync::Notify;

/// One rank's access to the store, which fails after some calls.
#[derive(Debug)]
pub(super) struct CutStore {
    below: Mutex<Arc<MemoryStore>>,
    calls_left: AtomicUsize,
    is_silent: AtomicBool,
    /// What this leads to instead of failing.
    next: Mutex<Option<Arc<MemoryStore>>>,
    /// From where this machine reaches it, while it does.
    own_address: Mutex<Option<IpAddr>>,
    /// Notified when several keys have come that were waited for.
    pub(super) found: Notify,
}

impl CutStore {
    pub(super) fn new(below: &Arc<MemoryStore>) -> Arc<Self> {
        let (calls_left, is_silent) = (AtomicUsize::new(usize::MAX), AtomicBool::new(false));
        let (below, next, own_address) = (Mutex::new(below.clone()), Mutex::default(), Mutex::default());
        Arc::new(Self { below, calls_left, is_silent, next, own_address, found: Notify::new() })
    }

    pub(super) fn set_own_address(&self, own: Option<IpAddr>) {
        *self.own_address.lock().unwrap() = own;
    }

    pub(super) fn cut_after(&self, calls: usize) {
        self.calls_left.store(calls, Ordering::Relaxed);
    }

    /// Replaces the store by another one, as after a restart.
    pub(super) fn lead_to(&self, below: &Arc<MemoryStore>) {
        *self.below.lock().unwrap() = below.clone();
    }

    /// Answers nothing after this many calls, as if packets were lost.
    pub(super) fn silent_after(&self, calls: usize) {
        self.is_silent.store(true, Ordering::Relaxed);
        self.cut_after(calls);
    }

    /// Loses its data before the next call after this many.
    pub(super) fn forget_after(&self, calls: usize, empty: Arc<MemoryStore>) {
        *self.next.lock().unwrap() = Some(empty);
        self.cut_after(calls);
    }

    pub(super) fn has_forgotten(&self) -> bool {
        self.next.lock().unwrap().is_none()
    }

    async fn reach(&self) -> Result<Arc<MemoryStore>, StoreError> {
        let counted = |left: usize| if left == usize::MAX { Some(left) } else { left.checked_sub(1) };
        match self.calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted) {
            Ok(_) => Ok(self.below.lock().unwrap().clone()),
            Err(_) if let Some(empty) = self.next.lock().unwrap().take() => {
                self.cut_after(usize::MAX);
                self.lead_to(&empty);
                Ok(empty)
            }
            Err(_) if self.is_silent.load(Ordering::Relaxed) => pending().await,
            Err(_) => Err(StoreError::Unreachable {
                store: "the store of this test".to_owned(),
                detail: "it is cut off".to_owned(),
            }),
        }
    }
}

impl Store for CutStore {
    fn own_address(&self) -> Option<IpAddr> {
        *self.own_address.lock().unwrap()
    }

    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { self.reach().await?.set(key, value).await }.boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        async move { self.reach().await?.get(keys).await }.boxed()
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        async move {
            let found = self.reach().await?.wait(keys, limit).await?;
            if keys.len() > 1 {
                self.found.notify_one();
            }
            Ok(found)
        }
        .boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        async move { self.reach().await?.add(key, delta).await }.boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        async move { self.reach().await?.compare_set(key, expected, value).await }.boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move { self.reach().await?.delete(key).await }.boxed()
    }
}

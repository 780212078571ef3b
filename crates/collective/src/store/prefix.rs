//! A part of another store.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures::FutureExt;
use tensorwire_fabric::BoxFuture;

use super::{
    Store, StoreError,
    rules::{check_key, check_keys},
};

/// The keys of another store that begin with `prefix/`, without this prefix. It gives each of several users of one store its own
/// keys.
///
/// Prefixes nest: key `k` of a prefix `b` over a prefix `a` is `a/b/k` in the store below. So a key that contains `/` can belong
/// to two prefixes. Prefixes count towards the length of a key.
#[derive(Debug, Clone)]
pub struct PrefixStore {
    below: Arc<dyn Store>,
    /// With its `/`.
    prefix: String,
}

impl PrefixStore {
    /// The keys of `store` that begin with `prefix/`.
    pub fn new(store: Arc<dyn Store>, prefix: &str) -> Self {
        Self { below: store, prefix: format!("{prefix}/") }
    }

    /// The empty key is invalid here, although `prefix/` is valid below.
    fn joined(&self, key: &str) -> Result<String, StoreError> {
        check_key(key)?;
        Ok(format!("{}{key}", self.prefix))
    }

    fn all_joined(&self, keys: &[String]) -> Result<Vec<String>, StoreError> {
        check_keys(keys)?;
        Ok(keys.iter().map(|key| format!("{}{key}", self.prefix)).collect())
    }

    /// Translates keys, and the name of the store, from those of the store below.
    fn own(&self, error: StoreError) -> StoreError {
        let store = |store: String| format!("`{}` of {store}", self.prefix);
        let key = |key: String| key.strip_prefix(&self.prefix).map_or(key.clone(), str::to_owned);
        match error {
            StoreError::TimedOut { store: below, limit, missing } => StoreError::TimedOut {
                store: store(below),
                limit,
                missing: missing.into_iter().map(key).collect(),
            },
            StoreError::NotANumber { store: below, key: named } => {
                StoreError::NotANumber { store: store(below), key: key(named) }
            }
            StoreError::Overflow { store: below, key: named, delta } => {
                StoreError::Overflow { store: store(below), key: key(named), delta }
            }
            other => other,
        }
    }
}

impl Store for PrefixStore {
    fn own_address(&self) -> Option<IpAddr> {
        self.below.own_address()
    }

    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { self.below.set(&self.joined(key)?, value).await.map_err(|error| self.own(error)) }
            .boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        async move { self.below.get(&self.all_joined(keys)?).await.map_err(|error| self.own(error)) }.boxed()
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        async move { self.below.wait(&self.all_joined(keys)?, limit).await.map_err(|error| self.own(error)) }
            .boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        async move { self.below.add(&self.joined(key)?, delta).await.map_err(|error| self.own(error)) }
            .boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        async move {
            let key = self.joined(key)?;
            self.below.compare_set(&key, expected, value).await.map_err(|error| self.own(error))
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move { self.below.delete(&self.joined(key)?).await.map_err(|error| self.own(error)) }.boxed()
    }
}

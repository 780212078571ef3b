//! The trait that each kind of store implements, and what they share: the rules for keys and values, and polling.

use std::{fmt, net::IpAddr, time::Duration};

use futures::{FutureExt, future::ready};
use tensorwire_fabric::{BoxFuture, Runtime};

use super::{
    Store, StoreError,
    request::{Answer, Request},
    rules::check_keys,
    wanted::{Pause, Wanted},
};

/// A kind of store.
pub(super) trait Backend: Send + Sync + fmt::Debug + 'static {
    /// The store's name in errors.
    fn name(&self) -> String;

    /// See [`Store::own_address`].
    fn machine_address(&self) -> Option<IpAddr> {
        None
    }

    fn runtime(&self) -> &dyn Runtime;

    /// The pauses between two reads of a wait.
    fn pauses(&self) -> Pause {
        Pause::new(Duration::from_millis(1), Duration::from_millis(100))
    }

    /// Executes a request whose keys and values have been checked.
    fn execute(&self, request: Request) -> BoxFuture<'_, Result<Answer, StoreError>>;

    /// Checks `request`, and executes it.
    fn ask(&self, request: Request) -> BoxFuture<'_, Result<Answer, StoreError>> {
        match request.check() {
            Ok(()) => self.execute(request),
            Err(invalid) => ready(Err(invalid)).boxed(),
        }
    }

    /// The values of `keys` as soon as all have one. Polls, unless the store reports writes.
    fn wait_for<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        poll_for(self, keys, limit).boxed()
    }

    /// Reads `keys`.
    fn read(&self, keys: Vec<String>) -> BoxFuture<'_, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        async move {
            match self.ask(Request::Get { keys }).await? {
                Answer::Values(values) => {
                    Ok(values.into_iter().map(|value| value.map(|value| value.to_vec())).collect())
                }
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }

    fn unreachable(&self, detail: String) -> StoreError {
        StoreError::Unreachable { store: self.name(), detail }
    }

    /// The error of an answer to another kind of request.
    fn unexpected(&self) -> StoreError {
        self.unreachable("unexpected answer: check that this is a store, of the same release".to_owned())
    }
}

/// Polls for `keys` until all have values. Reads once more when `limit` expires.
///
/// # Errors
/// [`StoreError::TimedOut`]; those of reading.
async fn poll_for(
    store: &(impl Backend + ?Sized),
    keys: &[String],
    limit: Duration,
) -> Result<Vec<Vec<u8>>, StoreError> {
    let (runtime, mut pause) = (store.runtime(), store.pauses());
    let end = runtime.now().saturating_add(limit);
    let mut wanted = Wanted::new(keys);
    loop {
        let left = end.saturating_sub(runtime.now());
        wanted.fill(store.read(wanted.missing()).await?);
        if wanted.is_complete() {
            return Ok(wanted.into_values());
        }
        if left.is_zero() {
            return Err(wanted.timed_out(store.name(), limit));
        }
        pause.sleep(runtime, end.saturating_sub(runtime.now())).await;
    }
}

impl<Kind: Backend> Store for Kind {
    fn own_address(&self) -> Option<IpAddr> {
        self.machine_address()
    }

    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        async move {
            match self.ask(Request::Set { key: key.to_owned(), value: value.to_vec() }).await? {
                Answer::Done => Ok(()),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        self.read(keys.to_vec())
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        async move {
            check_keys(keys)?;
            self.wait_for(keys, limit).await
        }
        .boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        async move {
            match self.ask(Request::Add { key: key.to_owned(), delta }).await? {
                Answer::Sum(sum) => Ok(sum),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        async move {
            let (key, expected) = (key.to_owned(), expected.map(<[u8]>::to_vec));
            match self.ask(Request::CompareSet { key, expected, value: value.to_vec() }).await? {
                Answer::Value(value) => Ok(value.map(|value| value.to_vec())),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move {
            match self.ask(Request::Delete { key: key.to_owned() }).await? {
                Answer::Deleted(had_one) => Ok(had_one),
                _ => Err(self.unexpected()),
            }
        }
        .boxed()
    }
}

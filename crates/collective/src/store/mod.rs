//! Stores: small maps from keys to bytes, through which the ranks of a group find each other.
//!
//! A store holds records of a few hundred bytes: one for each rank and one for each generation of a group. It never holds
//! tensors.
//!
//! | store | who can reach it | lifetime of its keys |
//! | --- | --- | --- |
//! | [`WorkerStore`] | workers that reach the worker that serves it, and share its secret | until that worker ends |
//! | [`FileStore`] | processes that can access the folder | until the folder is removed |
//! | `RedisStore` (feature `redis`) | processes that can connect to the Redis server | that of the server's data |
//! | `EtcdStore` (feature `etcd`) | processes that can connect to the etcd server | until they are removed |
//! | [`MemoryStore`] | the tasks of one process, or the peers of the worker that serves it | as long as a clone |
//! | [`PrefixStore`] | as the store below it | as in the store below it |
//!
//! [`StoreUrl`] names one of them as text, for users and launchers.

mod backend;
mod board;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod memory;
pub(crate) mod on_runtime;
mod open;
mod prefix;
#[cfg(feature = "redis")]
mod redis;
mod request;
mod rules;
mod served;
mod url;
mod wanted;

use std::{fmt, net::IpAddr, time::Duration};

use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::text::escaped;

#[cfg(feature = "etcd")]
pub use self::etcd::EtcdStore;
#[cfg(feature = "redis")]
pub use self::redis::RedisStore;
pub use self::{
    board::MemoryLimits, file::FileStore, memory::MemoryStore, prefix::PrefixStore, served::WorkerStore,
    url::StoreUrl,
};

/// The longest key, in bytes. A key has at least one byte.
pub const KEY_BYTES_MAX: usize = 1024;

/// The longest value, in bytes. The record that admits ranks to a group of 5,000 fits, and two values fit into a frame of the control
/// plane.
pub const VALUE_BYTES_MAX: usize = 500 << 10;

/// A map from keys to bytes that all ranks of a group can reach.
///
/// Every operation ends within its limit, or within the store's own limit if it has no such parameter. If the store does not
/// respond, a wait ends within the sum of both.
///
/// # Cancel safety
/// All futures may be dropped. A dropped write may or may not take effect.
pub trait Store: Send + Sync + fmt::Debug + 'static {
    /// The address from which this machine reaches the store. Other machines that reach the store can reach this machine at it.
    /// Default: `None`, if the store is not reached over a network, or does not know the address.
    fn own_address(&self) -> Option<IpAddr> {
        None
    }

    /// Stores `value` under `key`, and replaces an earlier value.
    ///
    /// # Errors
    /// [`StoreError`].
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>>;

    /// The values of `keys`, in their order; `None` for a key without a value. Reads them together.
    ///
    /// # Errors
    /// [`StoreError`].
    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>>;

    /// Waits until all `keys` have values, and returns the values in the order of the keys.
    ///
    /// # Errors
    /// [`StoreError::TimedOut`] after `limit`, with the missing keys; other [`StoreError`]s.
    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>>;

    /// Adds `delta` to the number under `key`, or to 0 if there is none. Returns the sum, and stores it as decimal text.
    ///
    /// # Errors
    /// [`StoreError::NotANumber`] if the value is not such text; [`StoreError::Overflow`], in which case nothing changes; other
    /// [`StoreError`]s.
    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>>;

    /// Stores `value` under `key` if the current value is `expected` (`None`: no value). Returns the value that the key has
    /// afterwards: `value`, or the one that differed from `expected`. `None` if a value was expected and the key has none.
    ///
    /// # Errors
    /// [`StoreError`].
    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>>;

    /// Removes `key`. Returns whether it had a value.
    ///
    /// # Errors
    /// [`StoreError`].
    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>>;
}

/// Why a store's operation failed.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Keys had no value in time.
    #[error("after {limit:?} these keys are missing from {}: {}", escaped(store), escaped(&missing.join(", ")))]
    TimedOut {
        /// The store.
        store: String,
        /// The time limit.
        limit: Duration,
        /// The keys without a value.
        missing: Vec<String>,
    },
    /// The value under the key is not a number.
    #[error(
        "`{}` in {} is not a number: it was not written by `add`; use another key",
        escaped(key),
        escaped(store)
    )]
    NotANumber {
        /// The store.
        store: String,
        /// The key.
        key: String,
    },
    /// The sum exceeds 64 bits.
    #[error("`{}` in {}: the sum with {delta} does not fit 64 bits", escaped(key), escaped(store))]
    Overflow {
        /// The store.
        store: String,
        /// The key.
        key: String,
        /// The number to add.
        delta: i64,
    },
    /// The store has reached a limit.
    #[error("{} is full: it takes at most {limit} {what}", escaped(store))]
    Full {
        /// The store.
        store: String,
        /// The resource that is exhausted: `keys`, `bytes`, `waits` or `sessions`.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The store was restarted without its data.
    #[error(
        "the store has lost its data: `{}` is missing or has another value; use a store that persists it (etcd, Redis with \
         persistence, a folder)",
        escaped(key)
    )]
    Lost {
        /// A key that was written and never removed.
        key: String,
    },
    /// A key or a value of invalid length.
    #[error("{field} of {bytes} bytes: {remedy}")]
    Invalid {
        /// `key` or `value`.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// The valid lengths.
        remedy: String,
    },
    /// The text is not the URL of a store.
    #[error("`{}` is not the URL of a store: {}", escaped(url), escaped(remedy))]
    BadUrl {
        /// The text, without a password.
        url: String,
        /// What is wrong, and what to write.
        remedy: String,
    },
    /// The store cannot be reached, rejected the request, or broke its protocol.
    #[error("{}: {}", escaped(store), escaped(detail))]
    Unreachable {
        /// The store.
        store: String,
        /// What happened, and what to do.
        detail: String,
    },
}

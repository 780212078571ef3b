//! Stores: small services from keys to bytes, through which the ranks of a group find each other.
//!
//! A store holds records of a few hundred bytes: one for each rank and one for each generation of a group. No tensor passes
//! through it.
//!
//! | store | reaches | keeps its keys |
//! | --- | --- | --- |
//! | [`TcpStore`] | every process that can connect to the rank that serves | until that rank ends |
//! | [`FileStore`] | every process that sees the folder | until the folder is removed |
//! | `RedisStore` (feature `redis`) | every process that can connect to the server of Redis | as the server does |
//! | `EtcdStore` (feature `etcd`) | every process that can connect to the server of etcd | until they are removed |
//! | [`MemoryStore`] | the tasks of one process | as long as a clone lives |
//! | [`PrefixStore`] | what the store below it reaches | as the store below it |
//!
//! [`StoreUrl`] is the text that names one of them, as for users and launchers.

mod board;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod memory;
mod open;
mod prefix;
#[cfg(feature = "redis")]
mod redis;
mod rules;
mod tcp;
mod url;
mod wanted;

use std::{fmt, time::Duration};

use tensorwire_verbs_reactor::BoxFuture;

#[cfg(feature = "etcd")]
pub use self::etcd::EtcdStore;
#[cfg(feature = "redis")]
pub use self::redis::RedisStore;
pub use self::{
    file::FileStore,
    memory::MemoryStore,
    prefix::PrefixStore,
    tcp::{TcpLimits, TcpStore},
    url::StoreUrl,
};

/// Longest key, in bytes. The shortest has one.
pub const KEY_BYTES_MAX: usize = 1024;

/// Longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// A map from keys to bytes that all ranks of a group reach.
///
/// Every operation ends within its limit, or within the store's own limit if it has no parameter for one.
///
/// # Cancel safety
/// All futures may be dropped. Whether a write that was dropped happens is not known then.
pub trait Store: Send + Sync + fmt::Debug + 'static {
    /// Stores `value` under `key`, in place of an earlier one.
    ///
    /// # Errors
    /// [`StoreError`].
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>>;

    /// The values of `keys`, in their order; `None` where there is none. Reads them together.
    ///
    /// # Errors
    /// [`StoreError`].
    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>>;

    /// Waits until all `keys` have values, and returns these in the order of the keys.
    ///
    /// # Errors
    /// [`StoreError::TimedOut`] after `limit`, which names the keys that are missing; other [`StoreError`]s.
    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>>;

    /// Adds `delta` to the number under `key`, which is 0 if there is none. Returns the sum. Reads of the key give the sum as
    /// decimal text.
    ///
    /// # Errors
    /// [`StoreError::NotANumber`] if the value is not such text; [`StoreError::Overflow`], which changes nothing; other
    /// [`StoreError`]s.
    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>>;

    /// Stores `value` under `key` if the value there is `expected` (`None`: if there is none). Returns the value that is there
    /// afterwards: `value`, or the one that was not expected. `None` if there is none, though one was expected.
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
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Keys had no value in time.
    #[error("after {limit:?} these keys are missing from {store}: {}", missing.join(", "))]
    TimedOut {
        /// Which store.
        store: String,
        /// How long was waited.
        limit: Duration,
        /// The keys without a value.
        missing: Vec<String>,
    },
    /// The value under the key is not a number.
    #[error("`{key}` in {store} is no number: it was not written by `add`; use another key for the number")]
    NotANumber {
        /// Which store.
        store: String,
        /// The key.
        key: String,
    },
    /// The sum of the number under the key and what was to be added exceeds 64 bits.
    #[error("`{key}` in {store}: the sum with {delta} does not fit 64 bits")]
    Overflow {
        /// Which store.
        store: String,
        /// The key.
        key: String,
        /// What was to be added.
        delta: i64,
    },
    /// The store has no room.
    #[error("{store} is full: it takes at most {limit} {what}")]
    Full {
        /// Which store.
        store: String,
        /// What there is too much of: `connections`, `keys`, `bytes` or `waits`.
        what: &'static str,
        /// How many it takes.
        limit: usize,
    },
    /// The store was started again without its data.
    #[error(
        "the store has lost its data: `{key}` is not there any more, or another value is; use one that keeps it (etcd, Redis with \
         persistence, a folder)"
    )]
    Lost {
        /// A key that was written and is never removed.
        key: String,
    },
    /// A key or a value that no store takes.
    #[error("{field} of {bytes} bytes: {remedy}")]
    Invalid {
        /// `key` or `value`.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// What is allowed.
        remedy: String,
    },
    /// The text names no store.
    #[error("`{url}` names no store: {remedy}")]
    BadUrl {
        /// The text, without a password.
        url: String,
        /// What is wrong, and what to write.
        remedy: String,
    },
    /// The store cannot be reached, refuses what it is asked, or broke its protocol.
    #[error("{store}: {detail}")]
    Unreachable {
        /// Which store.
        store: String,
        /// What was observed, and what to do.
        detail: String,
    },
}

//! Tensors that stay until they are replaced or withdrawn, and serve any number of receivers.

use std::{
    hash::{BuildHasherDefault, DefaultHasher},
    ops::Bound,
    sync::atomic::{AtomicU64, Ordering},
};

use dashmap::DashMap;
use protocol::Metadata;

use crate::Tensor;

/// Fixed keys and a fixed number of shards, so that runs of one seed are alike.
type Hasher = BuildHasherDefault<DefaultHasher>;
const SHARDS: usize = 16;

/// What a worker's list says of one published tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Its name.
    pub name: String,
    /// Element type, shape and size.
    pub metadata: Metadata,
    /// Grows with every publication under any name of that worker.
    pub version: u64,
    /// XXH3-64 of the bytes, when asked for.
    pub checksum: Option<u64>,
}

/// The published tensors of this worker.
#[derive(Debug)]
pub(crate) struct PublishedSet {
    entries: DashMap<String, (u64, Tensor), Hasher>,
    versions: AtomicU64,
}

impl PublishedSet {
    pub(crate) fn new() -> Self {
        let entries = DashMap::with_hasher_and_shard_amount(Hasher::default(), SHARDS);
        Self { entries, versions: AtomicU64::new(0) }
    }

    pub(crate) fn publish(&self, name: &str, tensor: Tensor) -> u64 {
        let version = self.versions.fetch_add(1, Ordering::Relaxed) + 1;
        self.entries.insert(name.to_owned(), (version, tensor));
        version
    }

    pub(crate) fn withdraw(&self, name: &str) -> bool {
        self.entries.remove(name).is_some()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Tensor> {
        self.entries.get(name).map(|entry| entry.1.clone())
    }

    /// Up to `most` entries with names after `after`, sorted by name.
    pub(crate) fn page(&self, after: Option<&str>, most: usize) -> Vec<(String, u64, Tensor)> {
        let sorted: std::collections::BTreeMap<String, (u64, Tensor)> =
            self.entries.iter().map(|entry| (entry.key().clone(), entry.value().clone())).collect();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let following = sorted.range::<str, _>((start, Bound::Unbounded));
        following
            .take(most)
            .map(|(name, (version, tensor))| (name.clone(), *version, tensor.clone()))
            .collect()
    }
}

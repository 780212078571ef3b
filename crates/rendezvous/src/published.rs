//! Tensors that stay until they are replaced or withdrawn, and serve any number of receivers.

use std::sync::atomic::{AtomicU64, Ordering};

use protocol::Metadata;

use crate::{
    Tensor,
    sharded::{ShardedMap, sharded_map},
};

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
    entries: ShardedMap<String, (u64, Tensor)>,
    versions: AtomicU64,
}

impl PublishedSet {
    pub(crate) fn new() -> Self {
        Self { entries: sharded_map(), versions: AtomicU64::new(0) }
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
        let following =
            self.entries.iter().filter(|entry| after.is_none_or(|after| entry.key().as_str() > after));
        let mut page: Vec<_> =
            following.map(|entry| (entry.key().clone(), entry.value().0, entry.value().1.clone())).collect();
        page.sort_unstable_by(|(one, ..), (other, ..)| one.cmp(other));
        page.truncate(most);
        page
    }
}

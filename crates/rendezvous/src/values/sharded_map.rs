//! Maps that many tasks use at once, and that are alike in runs of one seed.

use std::hash::{BuildHasherDefault, DefaultHasher, Hash};

use dashmap::DashMap;

/// Fixed keys, so that equal runs meet equal shards.
pub(crate) type FixedHasher = BuildHasherDefault<DefaultHasher>;

/// A map in a fixed number of shards. Collect and sort before anything that wakes, sends or lists.
pub(crate) type ShardedMap<K, V> = DashMap<K, V, FixedHasher>;

/// An empty map.
pub(crate) fn sharded_map<K: Eq + Hash, V>() -> ShardedMap<K, V> {
    const SHARDS: usize = 16;
    DashMap::with_hasher_and_shard_amount(FixedHasher::default(), SHARDS)
}

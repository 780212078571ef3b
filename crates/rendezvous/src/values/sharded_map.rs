//! Concurrent maps with a deterministic order, so that simulator runs with equal seeds are equal.

use std::hash::{BuildHasherDefault, DefaultHasher, Hash};

use dashmap::DashMap;

/// A hasher without a random key, so that equal runs use equal shards.
pub(crate) type FixedHasher = BuildHasherDefault<DefaultHasher>;

/// A map with a fixed number of shards. Sort collected entries before waking, sending or listing.
pub(crate) type ShardedMap<K, V> = DashMap<K, V, FixedHasher>;

/// An empty map.
pub(crate) fn sharded_map<K: Eq + Hash, V>() -> ShardedMap<K, V> {
    const SHARDS: usize = 16;
    DashMap::with_hasher_and_shard_amount(FixedHasher::default(), SHARDS)
}

//! A hash of keys that costs little.

use std::hash::{BuildHasherDefault, Hasher};

use twox_hash::xxhash3_64;

/// Hashes keys, which are long and looked up several times for each receive. Only this process's user chooses keys, so the hash
/// need not be secret. Maps with it have the same order in every run.
#[derive(Debug, Default)]
pub(crate) struct KeyHasher(u64);

/// The hasher of maps by key.
pub(crate) type KeyHash = BuildHasherDefault<KeyHasher>;

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxhash3_64::Hasher::oneshot_with_seed(self.0, bytes);
    }

    /// The byte that ends a text.
    fn write_u8(&mut self, byte: u8) {
        self.0 = self.0.rotate_left(8) ^ u64::from(byte);
    }

    /// A hash that was computed before.
    fn write_u64(&mut self, hash: u64) {
        self.0 ^= hash;
    }
}

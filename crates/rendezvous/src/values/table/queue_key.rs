//! The keys of a step's queues.

use std::{fmt, ops::Range, sync::Arc};

use tensorwire_protocol::Key;
use twox_hash::xxhash3_64;

/// A text with a part that may be ignored: the incarnation in a [`Key`], which is compared separately. It shares the
/// text, so that sending or taking a value copies no text, and contains the hash, which is computed once.
#[derive(Clone)]
pub(crate) struct QueueKey {
    text: Arc<str>,
    /// The compared parts: the text before this position, and a part after it.
    head: usize,
    tail: (usize, usize),
    hash: u64,
}

impl QueueKey {
    fn new(text: Arc<str>, [head, tail]: [Range<usize>; 2]) -> Self {
        let mut key = Self { text, head: head.end, tail: (tail.start, tail.end), hash: 0 };
        let hash = |seed, part: &str| xxhash3_64::Hasher::oneshot_with_seed(seed, part.as_bytes());
        key.hash = key.parts().into_iter().fold(0, hash);
        key
    }

    fn parts(&self) -> [&str; 2] {
        let (start, end) = self.tail;
        [self.text.get(..self.head), self.text.get(start..end)].map(Option::unwrap_or_default)
    }

    /// The hash, which is equal in every run.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

impl From<&Key> for QueueKey {
    fn from(key: &Key) -> Self {
        Self::new(key.text().clone(), key.table_key_parts())
    }
}

impl From<&str> for QueueKey {
    fn from(text: &str) -> Self {
        Self::new(text.into(), [0..text.len(), 0..0])
    }
}

impl PartialEq for QueueKey {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.parts() == other.parts()
    }
}

impl fmt::Display for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts().into_iter().try_for_each(|part| f.write_str(part))
    }
}

impl fmt::Debug for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_found_whatever_the_incarnation() {
        let key = |text: &str| Key::parse(text).unwrap();
        let one = key("/job:a/cpu:0;0000000000001ed2;/job:b/cpu:0;edge;0:0");
        for alike in ["/job:a/cpu:0;1;/job:b/cpu:0;edge;0:0", "/job:a/cpu:0;1;/job:b/cpu:0;edge;0:0;"] {
            assert_eq!(QueueKey::from(&one), QueueKey::from(&key(alike)));
            assert_eq!(QueueKey::from(&one).hash(), QueueKey::from(&key(alike)).hash());
        }
        for other in ["/job:a/cpu:1;1ed2;/job:b/cpu:0;edge;0:0", "/job:a/cpu:0;1ed2;/job:b/cpu:0;w;0:0"] {
            assert_ne!(QueueKey::from(&one), QueueKey::from(&key(other)));
        }
        assert_eq!(QueueKey::from(&one).to_string(), one.table_key());
        assert_eq!(QueueKey::from("any text").to_string(), "any text");
    }
}

//! What the receiver remembers of values it has seen.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use super::Metadata;
use crate::Scope;

/// The two name spaces of keys. A key's metadata is the same in every step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Step,
    Published,
}

impl From<Scope> for Kind {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Step(_) => Self::Step,
            Scope::Published => Self::Published,
        }
    }
}

/// Metadata by kind of scope and key, bounded: the oldest entry makes room for a new one. Every lookup is a
/// snapshot, so an update never changes what a request under way believes (`tensorflow-verbs.md` §3.7).
#[derive(Debug)]
pub struct MetadataCache {
    capacity: usize,
    steps: HashMap<Arc<str>, Metadata>,
    published: HashMap<Arc<str>, Metadata>,
    /// Every entry once, oldest first.
    order: VecDeque<(Kind, Arc<str>)>,
}

impl MetadataCache {
    /// An empty cache of at most `capacity` entries.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, steps: HashMap::new(), published: HashMap::new(), order: VecDeque::new() }
    }

    /// Entries now.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// What the value of `key` was when it was last seen.
    pub fn get(&self, scope: Scope, key: &str) -> Option<Metadata> {
        match Kind::from(scope) {
            Kind::Step => self.steps.get(key).cloned(),
            Kind::Published => self.published.get(key).cloned(),
        }
    }

    /// Remembers `metadata` for `key`.
    pub fn insert(&mut self, scope: Scope, key: &str, metadata: Metadata) {
        let kind = Kind::from(scope);
        if let Some(known) = self.entries(kind).get_mut(key) {
            *known = metadata;
            return;
        }
        if self.order.len() >= self.capacity
            && let Some((kind, oldest)) = self.order.pop_front()
        {
            self.entries(kind).remove(&oldest);
        }
        if self.capacity > 0 {
            let key: Arc<str> = key.into();
            self.entries(kind).insert(key.clone(), metadata);
            self.order.push_back((kind, key));
        }
    }

    fn entries(&mut self, kind: Kind) -> &mut HashMap<Arc<str>, Metadata> {
        match kind {
            Kind::Step => &mut self.steps,
            Kind::Published => &mut self.published,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{DataType, Shape, StepId};

    fn metadata(length: u64) -> Metadata {
        Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap()
    }

    #[test]
    fn cache_keeps_steps_together_and_published_apart() {
        let mut cache = MetadataCache::new(8);
        cache.insert(Scope::Step(StepId(1)), "a", metadata(1));
        assert_eq!(cache.get(Scope::Step(StepId(2)), "a"), Some(metadata(1)));
        assert_eq!(cache.get(Scope::Published, "a"), None);
        cache.insert(Scope::Published, "a", metadata(2));
        assert_eq!(cache.get(Scope::Step(StepId(1)), "a"), Some(metadata(1)));
        assert_eq!(cache.len(), 2);
    }

    proptest! {
        /// Against a list of (kind, key, metadata) that drops its front.
        #[test]
        fn cache_is_a_bounded_list(
            capacity in 0usize..5,
            inserts in proptest::collection::vec((any::<bool>(), 0u8..8, 0u64..100), 0..40),
        ) {
            let mut cache = MetadataCache::new(capacity);
            let mut model: Vec<(bool, u8, u64)> = Vec::new();
            for (published, key, length) in inserts {
                let scope = if published { Scope::Published } else { Scope::Step(StepId(0)) };
                cache.insert(scope, &key.to_string(), metadata(length));
                match model.iter_mut().find(|entry| (entry.0, entry.1) == (published, key)) {
                    Some(entry) => entry.2 = length,
                    None => {
                        model.push((published, key, length));
                        if model.len() > capacity {
                            model.remove(0);
                        }
                    }
                }
                prop_assert_eq!(cache.len(), model.len());
                for key in 0..8u8 {
                    for published in [false, true] {
                        let scope = if published { Scope::Published } else { Scope::Step(StepId(9)) };
                        let found = model.iter().find(|entry| (entry.0, entry.1) == (published, key));
                        prop_assert_eq!(
                            cache.get(scope, &key.to_string()),
                            found.map(|entry| metadata(entry.2))
                        );
                    }
                }
            }
        }
    }
}

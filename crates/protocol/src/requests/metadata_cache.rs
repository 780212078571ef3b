//! The metadata that a receiver remembers for each key.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use crate::{Metadata, Scope, key::KeyHash, limits::KNOWN_BYTES_MAX};

/// The name spaces of keys. A key's metadata is the same in every step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Step,
    Published,
    Call,
}

impl From<Scope> for Kind {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Step(_) | Scope::StepNow(_) => Self::Step,
            Scope::Published
            | Scope::Versioned(_)
            | Scope::Offered(_)
            | Scope::Set(_)
            | Scope::SetContent(_)
            | Scope::Slice
            | Scope::SetSlice(_)
            | Scope::Pages(_)
            | Scope::PageWrite(_)
            | Scope::Arguments(_) => Self::Published,
            Scope::Call(_) => Self::Call,
        }
    }
}

type MetadataByKey = HashMap<Arc<str>, Arc<[Metadata]>, KeyHash>;

/// Metadata by kind of scope and key. Bounded: the oldest entry is dropped for a new one, and so is the oldest of
/// several metadata of one key. Every lookup is a snapshot: a request names its forms by their position in the list that
/// it sent, so an update must not change that list while the request is under way.
#[derive(Debug)]
pub struct MetadataCache {
    capacity: usize,
    per_key: usize,
    steps: MetadataByKey,
    published: MetadataByKey,
    calls: MetadataByKey,
    /// Each entry once, oldest first.
    order: VecDeque<(Kind, Arc<str>)>,
    /// Grows with every change of what a lookup finds.
    changes: u64,
}

impl MetadataCache {
    /// An empty cache of at most `capacity` keys, with at most `per_key` metadata each.
    pub fn new(capacity: usize, per_key: usize) -> Self {
        let [steps, published, calls] = [(); 3].map(|()| HashMap::default());
        Self { capacity, per_key, steps, published, calls, order: VecDeque::new(), changes: 0 }
    }

    /// Entries now.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Grows with every change: a result that was found at the same number still holds.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The metadata that values of `key` had, oldest first.
    pub fn get(&self, scope: Scope, key: &str) -> Arc<[Metadata]> {
        self.entry(scope, key).map(|(_, known)| known.clone()).unwrap_or_default()
    }

    /// The key as it is stored, which is cheap to clone, with its metadata.
    pub(crate) fn entry(&self, scope: Scope, key: &str) -> Option<(&Arc<str>, &Arc<[Metadata]>)> {
        let entries = match Kind::from(scope) {
            Kind::Step => &self.steps,
            Kind::Published => &self.published,
            Kind::Call => &self.calls,
        };
        entries.get_key_value(key)
    }

    /// Remembers `metadata` for `key`.
    pub fn insert(&mut self, scope: Scope, key: &Arc<str>, metadata: Metadata) {
        let (kind, per_key) = (Kind::from(scope), self.per_key);
        if let Some(known) = self.entries(kind).get_mut(key) {
            if !known.contains(&metadata) {
                *known = extended(known, metadata, per_key);
                self.changes += 1;
            }
            return;
        }
        self.changes += 1;
        if self.order.len() >= self.capacity
            && let Some((kind, oldest)) = self.order.pop_front()
        {
            self.entries(kind).remove(&oldest);
        }
        if self.capacity > 0 {
            self.entries(kind).insert(key.clone(), Arc::new([metadata]));
            self.order.push_back((kind, key.clone()));
        }
    }

    fn entries(&mut self, kind: Kind) -> &mut MetadataByKey {
        match kind {
            Kind::Step => &mut self.steps,
            Kind::Published => &mut self.published,
            Kind::Call => &mut self.calls,
        }
    }
}

/// `known` and `metadata`, without the oldest if they are too many or take too much room in a message.
fn extended(known: &[Metadata], metadata: Metadata, per_key: usize) -> Arc<[Metadata]> {
    let mut list: Vec<Metadata> = known.iter().cloned().chain([metadata]).collect();
    let is_too_much = |list: &[Metadata]| {
        let bytes: usize = list.iter().map(|metadata| 8 * metadata.shape.dimensions().len() + 16).sum();
        list.len() > per_key || bytes > KNOWN_BYTES_MAX
    };
    while list.len() > 1 && is_too_much(&list) {
        list.remove(0);
    }
    list.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{DataType, Shape, StepId};

    fn metadata(length: u64) -> Metadata {
        Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap()
    }

    fn key(name: &str) -> Arc<str> {
        name.into()
    }

    #[test]
    fn cache_keeps_steps_together_and_published_apart() {
        let mut cache = MetadataCache::new(8, 4);
        cache.insert(Scope::Step(StepId(1)), &key("a"), metadata(1));
        assert_eq!(*cache.get(Scope::Step(StepId(2)), "a"), [metadata(1)]);
        assert!(cache.get(Scope::Published, "a").is_empty());
        cache.insert(Scope::Published, &key("a"), metadata(2));
        assert_eq!(*cache.get(Scope::Step(StepId(1)), "a"), [metadata(1)]);
        assert_eq!(cache.len(), 2);
    }

    #[test]
    fn cache_keeps_the_last_few_metadata_of_a_key_as_far_as_they_fit_a_request() {
        let mut cache = MetadataCache::new(8, 4);
        for length in [1, 2, 1, 3, 4, 5, 3] {
            cache.insert(Scope::Published, &key("a"), metadata(length));
        }
        assert_eq!(*cache.get(Scope::Published, "a"), [2, 3, 4, 5].map(metadata));
        for last in 1..5 {
            let mut dimensions = vec![1; 254];
            dimensions[253] = last;
            let large = Metadata::new(DataType::U8, Shape::new(dimensions).unwrap()).unwrap();
            cache.insert(Scope::Published, &key("a"), large);
        }
        let ranks: Vec<_> =
            cache.get(Scope::Published, "a").iter().map(|known| known.shape.dimensions().len()).collect();
        assert_eq!(ranks, [254, 254, 254]);
    }

    proptest! {
        /// Against a list of (kind, key, list of lengths) that drops its front.
        #[test]
        fn cache_is_a_bounded_list(
            capacity in 0usize..5,
            per_key in 1usize..5,
            inserts in proptest::collection::vec((any::<bool>(), 0u8..8, 0u64..6), 0..60),
        ) {
            let mut cache = MetadataCache::new(capacity, per_key);
            let mut model: Vec<(bool, u8, Vec<u64>)> = Vec::new();
            for (published, number, length) in inserts {
                let scope = if published { Scope::Published } else { Scope::Step(StepId(0)) };
                cache.insert(scope, &key(&number.to_string()), metadata(length));
                match model.iter_mut().find(|entry| (entry.0, entry.1) == (published, number)) {
                    Some((.., lengths)) if lengths.contains(&length) => {}
                    Some((.., lengths)) => {
                        lengths.push(length);
                        if lengths.len() > per_key {
                            lengths.remove(0);
                        }
                    }
                    None => {
                        model.push((published, number, vec![length]));
                        if model.len() > capacity {
                            model.remove(0);
                        }
                    }
                }
                prop_assert_eq!(cache.len(), model.len());
                for number in 0..8u8 {
                    for published in [false, true] {
                        let scope = if published { Scope::Published } else { Scope::Step(StepId(9)) };
                        let found = model.iter().find(|entry| (entry.0, entry.1) == (published, number));
                        let expected: Vec<_> =
                            found.iter().flat_map(|entry| &entry.2).copied().map(metadata).collect();
                        prop_assert_eq!(&*cache.get(scope, &number.to_string()), &expected[..]);
                    }
                }
            }
        }
    }
}

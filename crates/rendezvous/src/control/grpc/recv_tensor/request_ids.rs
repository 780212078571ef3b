//! Requests that were seen, so that a repeat is recognised.

use std::collections::{HashSet, VecDeque};

use crate::sharded::FixedHasher;

/// How many are remembered; the oldest is forgotten for a new one.
pub(super) const REMEMBERED: usize = 100_000;

/// The numbers of the last requests. A repeated receive would wait for a value that was taken already.
#[derive(Debug, Default)]
pub(super) struct RequestIds {
    known: HashSet<u64, FixedHasher>,
    order: VecDeque<u64>,
}

impl RequestIds {
    /// Notes `id`; false if it is known already. 0 is always new.
    pub(super) fn is_new(&mut self, id: u64) -> bool {
        if id == 0 {
            return true;
        }
        if !self.known.insert(id) {
            return false;
        }
        self.order.push_back(id);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s7_the_last_100_000_request_ids_are_remembered_and_no_more() {
        let mut ids = RequestIds::default();
        let all = 1..=REMEMBERED as u64 + 1;
        assert!(all.clone().all(|id| ids.is_new(id)));
        assert_eq!((ids.known.len(), ids.order.len()), (REMEMBERED, REMEMBERED));
        // The oldest is forgotten; all others are repeats.
        assert!(all.skip(1).all(|id| !ids.is_new(id)));
        assert!(ids.is_new(1), "the first of 100,001 is remembered");
        // Which forgot the second.
        assert!(ids.is_new(2));
        assert_eq!((ids.known.len(), ids.order.len()), (REMEMBERED, REMEMBERED));
    }

    #[test]
    fn s7_request_id_0_is_exempt() {
        let mut ids = RequestIds::default();
        assert!((0..10).all(|_| ids.is_new(0)));
        assert!(ids.known.is_empty() && ids.order.is_empty());
    }
}

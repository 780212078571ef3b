//! The ranges of a block that a peer may read.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Weak},
};

use super::Allocation;

/// The exposed ranges of one block, by the first byte of their allocation.
#[derive(Debug, Default)]
pub(crate) struct ExposureTable {
    allocations: BTreeMap<usize, Exposed>,
}

#[derive(Debug)]
struct Exposed {
    /// Can be upgraded while an exposure exists. Weak, because the allocation holds the block, which holds this table.
    allocation: Weak<Allocation>,
    /// The number of exposures of each range, by `(start, end)` inside the allocation.
    ranges: BTreeMap<(usize, usize), usize>,
}

impl ExposureTable {
    pub(crate) fn add(&mut self, allocation: &Arc<Allocation>, range: Range<usize>) {
        let fresh = || Exposed { allocation: Arc::downgrade(allocation), ranges: BTreeMap::new() };
        let exposed = self.allocations.entry(allocation.offset()).or_insert_with(fresh);
        *exposed.ranges.entry((range.start, range.end)).or_insert(0) += 1;
    }

    pub(crate) fn remove(&mut self, offset: usize, range: &Range<usize>) {
        let Some(exposed) = self.allocations.get_mut(&offset) else { return };
        if let Some(count) = exposed.ranges.get_mut(&(range.start, range.end)) {
            *count -= 1;
            if *count == 0 {
                exposed.ranges.remove(&(range.start, range.end));
            }
        }
        if exposed.ranges.is_empty() {
            self.allocations.remove(&offset);
        }
    }

    /// The allocation with an exposure that covers `range`, and the range inside it.
    pub(crate) fn find(&self, range: Range<usize>) -> Option<(Weak<Allocation>, Range<usize>)> {
        let (&offset, exposed) = self.allocations.range(..=range.start).next_back()?;
        let (start, end) = (range.start - offset, range.end - offset);
        let before = exposed.ranges.range(..=(start, usize::MAX));
        before.rev().find(|((_, last), _)| end <= *last)?;
        Some((exposed.allocation.clone(), start..end))
    }
}

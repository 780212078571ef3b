//! Each rank sends every other rank the elements that the other one combines. A rank combines the elements of all ranks at once, in
//! their order: for elements that must not be rounded before that.
//!
//! The value has a part for each rank, which combines it. A part is cut into segments of at most `segment` elements (0 counts as 1).
//! While a rank combines one segment, the next is in flight.
//!
//! All ranks get copies of one result: their bits are equal. They do not depend on the parts.

use super::{Arrival, Exchange, Plan, parts, ring::parts_of_counts, segments, tree::to_root};
use std::ops::Range;

/// Every rank gets the combination of all.
///
/// Two steps. Rank `r` sends `count + (size-2)·|part r|` elements, which is `2·count·(size-1)/size` if parts are equal: as many as in
/// a [`ring`](super::ring).
#[must_use]
pub(crate) fn all_reduce(rank: usize, size: usize, count: usize, segment: usize) -> Plan {
    let parts = Parts { rank, parts: parts(0..count, size), segment: segment.max(1) };
    let mut plan = Plan::default();
    for number in 0..=parts.segments() {
        plan.push(parts.combine(number));
        if let Some(before) = number.checked_sub(1) {
            plan.push(parts.collect(before));
        }
    }
    plan
}

/// Every rank gets the combination of all in one step: it sends its elements to all others, a segment at a time.
///
/// Sends `count·(size-1)` elements. Two ranks combine each segment in place, unless elements must not be rounded before all are combined.
#[must_use]
pub(crate) fn exchange(rank: usize, size: usize, count: usize, segment: usize, rounds_once: bool) -> Plan {
    let arrival = match (size, rank) {
        (2, 0) if !rounds_once => Arrival::Fold,
        (2, _) if !rounds_once => Arrival::FoldLower,
        _ => Arrival::FoldAll,
    };
    let mut plan = Plan::default();
    for range in segments(&(0..count), segment) {
        let others = || (1..size).map(|ahead| (rank + ahead) % size);
        let send = others().map(|other| (other, range.clone())).collect();
        let receive = others().map(|other| (other, range.clone(), arrival)).collect();
        plan.push(Exchange { send, receive });
    }
    plan
}

/// Each rank gets the combination of its own elements, laid out as in [`ring::reduce_scatter`](super::ring::reduce_scatter). Rank `r`
/// sends all elements but its own.
#[must_use]
pub(crate) fn reduce_scatter(rank: usize, size: usize, counts: &[usize], segment: usize) -> Plan {
    Parts { rank, parts: parts_of_counts(size, counts), segment: segment.max(1) }.combine_all()
}

/// The root gets the combination of all. Every rank sends `count` elements, except the root, which sends those outside its part.
#[must_use]
pub(crate) fn reduce(rank: usize, size: usize, count: usize, root: usize, segment: usize) -> Plan {
    let parts = Parts { rank, parts: parts(0..count, size), segment: segment.max(1) };
    to_root(parts.combine_all(), rank, root, parts.parts)
}

struct Parts {
    rank: usize,
    parts: Vec<Range<usize>>,
    segment: usize,
}

impl Parts {
    /// How many segments the longest part has.
    fn segments(&self) -> usize {
        self.parts.iter().map(Range::len).max().unwrap_or_default().div_ceil(self.segment)
    }

    fn combine_all(&self) -> Plan {
        let mut plan = Plan::default();
        (0..self.segments()).for_each(|number| plan.push(self.combine(number)));
        plan
    }

    fn combine(&self, number: usize) -> Exchange {
        let own = self.range(self.rank, number);
        let send = self.others().map(|other| (other, self.range(other, number))).collect();
        Exchange {
            send,
            receive: self.others().map(|other| (other, own.clone(), Arrival::FoldAll)).collect(),
        }
    }

    fn collect(&self, number: usize) -> Exchange {
        let own = self.range(self.rank, number);
        let receives = self.others().map(|other| (other, self.range(other, number), Arrival::Replace));
        Exchange {
            send: self.others().map(|other| (other, own.clone())).collect(),
            receive: receives.collect(),
        }
    }

    /// The other ranks, beginning with the next one, so that the ranks do not all send to the same one first.
    fn others(&self) -> impl Iterator<Item = usize> {
        let size = self.parts.len();
        (1..size).map(move |ahead| (self.rank + ahead) % size)
    }

    /// Segment `number` of the part of `rank`. Empty if the part has fewer.
    fn range(&self, rank: usize, number: usize) -> Range<usize> {
        let part = self.parts.get(rank).cloned().unwrap_or_default();
        let start = part.start.saturating_add(number.saturating_mul(self.segment)).min(part.end);
        start..start.saturating_add(self.segment).min(part.end)
    }
}

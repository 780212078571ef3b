//! The ring: each rank sends to the next one, and receives from the one before it.
//!
//! The value has a part for each rank. To combine, a part travels once around the ring, and each rank adds its elements; after
//! `P-1` steps it is complete at its own rank. To collect, each complete part travels around once more. A rank sends each part but
//! one in either half, which is the least that any algorithm can do (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
//! for clusters of workstations", 2009).
//!
//! Each part is combined along one path, and all ranks get copies of that result: they end with the same bits.

use super::{Arrival, Exchange, Plan, parts};
use std::{iter, ops::Range};

/// Every rank gets the combination of all. Parts differ by at most one element. What travels in a step is cut into segments of at
/// most `segment` elements (0 counts as 1), each in an exchange of its own. Segment `k` of a step depends on nothing but the
/// receive of segment `k` of the step before, so one can be under way while another is combined.
///
/// With at least `size` elements and parts of one segment these are `2·(size-1)` exchanges. Rank `r` sends
/// `2·count - |part r| - |part r+1|` elements, which is `2·count·(size-1)/size` where parts are equal.
#[must_use]
pub fn all_reduce(rank: usize, size: usize, count: usize, segment: usize) -> Plan {
    let parts = parts(0..count, size);
    let mut plan = combine(rank, &parts, segment);
    plan.exchanges.extend(collect(rank, &parts, segment).exchanges);
    plan
}

/// The elements are those of rank 0, then those of rank 1, and so on: `counts[r]` of rank `r`, of which some may have none. Each rank
/// gets the combination of its own. The other elements are undefined afterwards.
///
/// At most `size-1` exchanges. Rank `r` sends all elements but its own.
#[must_use]
pub fn reduce_scatter(rank: usize, size: usize, counts: &[usize]) -> Plan {
    combine(rank, &parts_of_counts(size, counts), usize::MAX)
}

/// The elements are as in [`reduce_scatter`]. Each rank brings its own, and gets those of all others.
///
/// At most `size-1` exchanges. Rank `r` sends all elements but those of rank `r+1`.
#[must_use]
pub fn all_gather(rank: usize, size: usize, counts: &[usize]) -> Plan {
    collect(rank, &parts_of_counts(size, counts), usize::MAX)
}

/// Part `r` is complete at rank `r` afterwards: it starts at the rank behind `r`.
pub(super) fn combine(rank: usize, parts: &[Range<usize>], segment: usize) -> Plan {
    around(rank, parts, 1, segment, Arrival::Fold)
}

/// Part `r` starts at rank `r`, and is at all others afterwards.
fn collect(rank: usize, parts: &[Range<usize>], segment: usize) -> Plan {
    around(rank, parts, 0, segment, Arrival::Replace)
}

/// Each part travels to all ranks but one. In the first step a rank sends the part `lag` before its own, and in each later step the one
/// that it has just received.
fn around(rank: usize, parts: &[Range<usize>], lag: usize, segment: usize, arrival: Arrival) -> Plan {
    let size = parts.len();
    let mut plan = Plan::default();
    for step in 0..size.saturating_sub(1) {
        let sent = (rank + 2 * size - lag - step) % size;
        let received = (sent + size - 1) % size;
        let (Some(sent), Some(received)) = (parts.get(sent), parts.get(received)) else { continue };
        let (before, after) = ((rank + size - 1) % size, (rank + 1) % size);
        let (mut sends, mut receives) = (segments(sent, segment), segments(received, segment));
        loop {
            let send: Vec<_> = sends.next().map(|range| (after, range)).into_iter().collect();
            let receive: Vec<_> = receives.next().map(|range| (before, range, arrival)).into_iter().collect();
            if send.is_empty() && receive.is_empty() {
                break;
            }
            plan.push(Exchange { send, receive });
        }
    }
    plan
}

/// Pieces of at most `segment` elements, none of them empty.
fn segments(part: &Range<usize>, segment: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let (end, segment) = (part.end, segment.max(1));
    part.clone().step_by(segment).map(move |start| start..start.saturating_add(segment).min(end))
}

fn parts_of_counts(size: usize, counts: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let part = |count: usize| {
        let start = end;
        end += count;
        start..end
    };
    counts.iter().copied().chain(iter::repeat(0)).take(size).map(part).collect()
}

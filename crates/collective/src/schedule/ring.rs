//! The ring: each rank sends to the next one, and receives from the previous one.
//!
//! The value has a part for each rank. To combine, a part travels once around the ring, and each rank adds its elements; after
//! `P-1` steps it is complete at its own rank. To collect, each complete part travels around once more. In either half, a rank
//! sends all parts but one, which is the minimum of any algorithm (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
//! for clusters of workstations", 2009).
//!
//! Each part is combined along one path, and all ranks get copies of that result: their bits are equal.

use super::{Arrival, Exchange, Plan, parts, segments};
use std::{iter, ops::Range};

/// Every rank gets the combination of all. Parts differ by at most one element. The part of a step is cut into segments of at
/// most `segment` elements (0 counts as 1), each in its own exchange. Segment `k` of a step depends only on the receive of
/// segment `k` of the step before, so one can be in flight while another is combined.
///
/// With at least `size` elements and parts of one segment these are `2·(size-1)` exchanges. Rank `r` sends `2·count - |part r| -
/// |part r+1|` elements, which is `2·count·(size-1)/size` if parts are equal.
#[must_use]
pub(crate) fn all_reduce(rank: usize, size: usize, count: usize, segment: usize) -> Plan {
    let parts = parts(0..count, size);
    let mut plan = combine(rank, &parts, segment);
    plan.exchanges.extend(collect(rank, &parts, segment).exchanges);
    plan
}

/// Each rank gets the combination of its own elements: `counts[0]` elements for rank 0, then `counts[1]` for rank 1, and so on. A
/// count may be
/// 0. The other elements are undefined afterwards.
///
/// At most `size-1` exchanges. Rank `r` sends all elements but its own.
#[must_use]
pub(crate) fn reduce_scatter(rank: usize, size: usize, counts: &[usize]) -> Plan {
    combine(rank, &parts_of_counts(size, counts), usize::MAX)
}

/// Afterwards part `r` is complete at rank `r`. It starts at rank `r+1`.
pub(super) fn combine(rank: usize, parts: &[Range<usize>], segment: usize) -> Plan {
    around(rank, parts, 1, segment, |is_last| if is_last { Arrival::Fold } else { Arrival::Pass })
}

/// Part `r` starts at rank `r`, and is at all ranks afterwards.
fn collect(rank: usize, parts: &[Range<usize>], segment: usize) -> Plan {
    around(rank, parts, 0, segment, |_is_last| Arrival::Replace)
}

/// Each part travels to all ranks but one. In the first step a rank sends the part `lag` before its own, and in each later step
/// the one it has just received. `arrival` is told whether the step is the last.
fn around(
    rank: usize,
    parts: &[Range<usize>],
    lag: usize,
    segment: usize,
    arrival: impl Fn(bool) -> Arrival,
) -> Plan {
    let size = parts.len();
    let mut plan = Plan::default();
    for step in 0..size.saturating_sub(1) {
        let arrival = arrival(step + 2 == size);
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

pub(super) fn parts_of_counts(size: usize, counts: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let part = |count: usize| {
        let start = end;
        end += count;
        start..end
    };
    counts.iter().copied().chain(iter::repeat(0)).take(size).map(part).collect()
}

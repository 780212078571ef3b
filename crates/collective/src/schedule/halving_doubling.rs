//! Pairs of ranks exchange halves of the value, other pairs quarters of it, and so on, until each rank has combined its own part.
//! Then the same pairs in the opposite order exchange what they have.
//!
//! This is recursive vector halving with distance doubling, then vector doubling with distance halving: the longest messages are
//! between neighbours (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).
//! Each element is combined in one order, and all ranks get copies of that result: their bits are equal.
//!
//! The pairs need a power of two of ranks. The surplus ranks do not take part, as in the same paper: each sends its value to a
//! neighbour before, and gets the result after. Gloo's binary blocks divide the surplus ranks into smaller powers of two, so that
//! the longest wait is shorter. They are more complex.

use super::{Arrival, Exchange, Plan, part};
use std::ops::Range;

/// Every rank gets the combination of all.
///
/// If `size` is a power of two and there are at least `size` elements, these are `2·log2 size` exchanges of a message each way.
/// Rank `r` has `h(i) = ceil((count - r mod 2^i) / 2^i)` elements after `i` exchanges, and in all sends `count + h(1) + .. +
/// h(k-1)` elements, with `k = log2 size`. This is `2·count·(size-1)/size` if `size` divides `count`.
///
/// Otherwise let `surplus` be the number of ranks above the largest power of two. The even ones of the first `2·surplus` ranks
/// send all elements to the next rank, and receive all elements at the end: two exchanges, `count` elements sent. The odd ones
/// have these two exchanges in addition, and send `count` more elements. The other ranks do no more, but all wait for those two.
#[must_use]
pub(crate) fn all_reduce(rank: usize, size: usize, count: usize) -> Plan {
    let log = size.max(1).ilog2();
    let surplus = size - (1 << log).min(size);
    let paired = rank < 2 * surplus;
    if paired && rank.is_multiple_of(2) {
        return spare(rank + 1, count);
    }
    let mut plan = Plan::default();
    if paired {
        plan.push(Exchange { send: vec![], receive: vec![(rank - 1, 0..count, Arrival::Fold)] });
    }
    let position = if paired { rank / 2 } else { rank - surplus };
    let rank_at = |position| if position < surplus { 2 * position + 1 } else { position + surplus };
    let steps = halves(position, log, count);
    for (bit, Halves { own, other }) in steps.iter().enumerate() {
        let peer = rank_at(position ^ (1 << bit));
        let receive = vec![(peer, own.clone(), Arrival::Fold)];
        plan.push(Exchange { send: vec![(peer, other.clone())], receive });
    }
    for (bit, Halves { own, other }) in steps.iter().enumerate().rev() {
        let peer = rank_at(position ^ (1 << bit));
        let receive = vec![(peer, other.clone(), Arrival::Replace)];
        plan.push(Exchange { send: vec![(peer, own.clone())], receive });
    }
    if paired {
        plan.push(Exchange { send: vec![(rank - 1, 0..count)], receive: vec![] });
    }
    plan
}

/// What a pair divides.
struct Halves {
    own: Range<usize>,
    other: Range<usize>,
}

/// The halves of each step of the rank at `position`: in step `i` it is paired with the position that differs in bit `i`.
fn halves(position: usize, log: u32, count: usize) -> Vec<Halves> {
    let mut whole = 0..count;
    let step = |bit: u32| {
        let half = position >> bit & 1;
        let halves = Halves { own: part(&whole, 2, half), other: part(&whole, 2, 1 - half) };
        whole = halves.own.clone();
        halves
    };
    (0..log).map(step).collect()
}

/// The plan of a rank that does not take part, and leaves its elements to another one.
fn spare(neighbour: usize, count: usize) -> Plan {
    let mut plan = Plan::default();
    plan.push(Exchange { send: vec![(neighbour, 0..count)], receive: vec![] });
    plan.push(Exchange { send: vec![], receive: vec![(neighbour, 0..count, Arrival::Replace)] });
    plan
}

//! Reductions: only one rank, the root, gets the combination of all. The elements of the other ranks are undefined afterwards.

use super::{Arrival, Exchange, Plan, parts, ring};
use std::{iter, ops::Range};

/// A binomial tree, for short values: half of the ranks send all their elements to the other half, which combine them, then half
/// of those do, and so on (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).
///
/// The root takes `ceil(log2 size)` exchanges, and waits for as many messages in sequence. Every other rank sends `count`
/// elements once; the root sends none.
#[must_use]
pub(crate) fn reduce(rank: usize, size: usize, count: usize, root: usize) -> Plan {
    let position = (rank + size - root) % size;
    let rank_at = |position: usize| (position + root) % size;
    let mut plan = Plan::default();
    for distance in
        iter::successors(Some(1), |distance| Some(distance * 2)).take_while(|distance| *distance < size)
    {
        if position & distance != 0 {
            plan.push(Exchange { send: vec![(rank_at(position - distance), 0..count)], receive: vec![] });
            break;
        }
        if position + distance < size {
            let receive = vec![(rank_at(position + distance), 0..count, Arrival::Fold)];
            plan.push(Exchange { send: vec![], receive });
        }
    }
    plan
}

/// The place of a rank in the binomial tree of a broadcast.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Branch {
    /// The rank from which it receives. `None` for the root.
    pub(crate) parent: Option<usize>,
    /// The ranks to which it sends, in this order.
    pub(crate) children: Vec<usize>,
}

/// Relative to the root, which is number 0, a rank receives from the number without its own highest bit, and sends to the numbers with
/// one higher bit.
pub(crate) fn branch(rank: usize, size: usize, root: usize) -> Branch {
    let number = (rank + size - root) % size;
    let rank_at = |number: usize| (number + root) % size;
    let highest = number.checked_ilog2().map(|bit| 1 << bit);
    let first: usize = highest.map_or(1, |bit: usize| 2 * bit);
    let bits = iter::successors(Some(first), |bit| Some(2 * bit)).take_while(|bit| number + bit < size);
    Branch {
        parent: highest.map(|bit| rank_at(number - bit)),
        children: bits.map(|bit| rank_at(number + bit)).collect(),
    }
}

/// For long values: the ring combines a part at each rank, and the ranks send their parts to the root (Rabenseifner,
/// "Optimization of collective reduction operations", 2004, with a ring instead of halves). Segments are those of
/// [`ring::all_reduce`].
///
/// With at least `size` elements and parts of one segment these are `size` exchanges. Every rank sends `count` elements, except
/// the root, which sends those outside its part.
#[must_use]
pub(crate) fn reduce_long(rank: usize, size: usize, count: usize, root: usize, segment: usize) -> Plan {
    let parts = parts(0..count, size);
    to_root(ring::combine(rank, &parts, segment), rank, root, parts)
}

/// After `plan`, the ranks send their complete parts to the root.
pub(super) fn to_root(mut plan: Plan, rank: usize, root: usize, parts: Vec<Range<usize>>) -> Plan {
    let others = parts.into_iter().enumerate().filter(|(owner, _)| *owner != root);
    plan.push(if rank == root {
        let receive = others.map(|(owner, part)| (owner, part, Arrival::Replace)).collect();
        Exchange { send: vec![], receive }
    } else {
        let send = others.filter(|(owner, _)| *owner == rank).map(|(_, part)| (root, part)).collect();
        Exchange { send, receive: vec![] }
    });
    plan
}

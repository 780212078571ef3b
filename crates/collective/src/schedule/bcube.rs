//! Halving and doubling with more than two ranks in a group: in each step, groups of several ranks divide the elements that they
//! have.
//!
//! The ranks are the corners of a cube: the position of a rank has a digit for each step, and the ranks of a step's group differ
//! only in that digit. When they combine, they divide their elements into a part for each, and every rank sends the parts of the
//! others. When they collect, the same groups in the opposite order send their parts to each other (Guo et al., "BCube: a high
//! performance, server-centric network architecture for modular data centers", 2009; Gloo has this algorithm under that name).
//!
//! The first digit is the lowest, so the shortest messages travel between the most distant ranks. Each element is combined in one
//! order, and all ranks get copies of that result: their bits are equal.

use super::{Arrival, Exchange, Plan, part};
use std::ops::Range;

/// Every rank gets the combination of all, in steps of groups of at most `base` ranks (at least 2). If the number of ranks is not
/// a power of `base`, some steps have smaller groups. If it has a prime factor above `base`, one step has groups of that many
/// ranks; so a prime number of ranks has only one step in either half, in which each rank sends to all others.
///
/// For `k` groups of `f1`, `f2`, .. ranks these are `2·k` steps of a message each way to `f-1` ranks. A step of combining is
/// `f-1` exchanges, because its receives are of the same elements; all its sends are in the first. A step of collecting is one
/// exchange. So `size = base^k` takes `k·base` exchanges.
///
/// Rank `r` has `h(i) = ceil((count - r mod Fi) / Fi)` elements after `i` steps, with `Fi = f1·..·fi`. In all it sends `count -
/// h(k) + Σ (fi-1)·h(i)` elements, which is `2·count·(size-1)/size` if `size` divides `count`.
#[must_use]
pub fn all_reduce(rank: usize, size: usize, count: usize, base: usize) -> Plan {
    Cube { position: rank, factors: factors(size, base), rank_at: |position| position }.all_reduce(count)
}

/// The number of ranks in the groups of each step, whose product is `size`. Each is the largest that `base` allows.
fn factors(size: usize, base: usize) -> Vec<usize> {
    let mut factors = vec![];
    let mut rest = size;
    while rest > 1 {
        let divides = |factor: &usize| rest.is_multiple_of(*factor);
        let small = (2..=base.max(2).min(rest)).rev().find(divides);
        let factor = small.or_else(|| (2..rest).find(divides)).unwrap_or(rest);
        factors.push(factor);
        rest /= factor;
    }
    factors
}

/// The position of a rank among the ranks that take part.
pub(super) struct Cube<RankAt> {
    pub(super) position: usize,
    /// The number of ranks in the groups of each step.
    pub(super) factors: Vec<usize>,
    /// The rank at a position.
    pub(super) rank_at: RankAt,
}

/// A step of a rank.
struct Step {
    /// The elements that the group divides.
    whole: Range<usize>,
    /// The number of ranks in the group.
    ranks: usize,
    /// The difference of two neighbours' positions.
    distance: usize,
    /// The index of this rank in the group.
    digit: usize,
}

impl<RankAt: Fn(usize) -> usize> Cube<RankAt> {
    pub(super) fn all_reduce(&self, count: usize) -> Plan {
        let steps = self.steps(count);
        let mut plan = Plan::default();
        for step in &steps {
            self.combine(step, &mut plan);
        }
        for step in steps.iter().rev() {
            self.collect(step, &mut plan);
        }
        plan
    }

    fn steps(&self, count: usize) -> Vec<Step> {
        let (mut whole, mut distance) = (0..count, 1);
        let step = |ranks: &usize| {
            let digit = self.position / distance % ranks;
            let step = Step { whole: whole.clone(), ranks: *ranks, distance, digit };
            whole = step.part(digit);
            distance *= ranks;
            step
        };
        self.factors.iter().map(step).collect()
    }

    /// All sends happen at once. All receives are of one range, so each has its own exchange.
    fn combine(&self, step: &Step, plan: &mut Plan) {
        let mut send: Vec<_> =
            step.others().map(|digit| (self.peer(step, digit), step.part(digit))).collect();
        for digit in step.others_back() {
            let receive = vec![(self.peer(step, digit), step.part(step.digit), Arrival::Fold)];
            plan.push(Exchange { send: std::mem::take(&mut send), receive });
        }
    }

    fn collect(&self, step: &Step, plan: &mut Plan) {
        let send = |digit| (self.peer(step, digit), step.part(step.digit));
        let receive = |digit| (self.peer(step, digit), step.part(digit), Arrival::Replace);
        plan.push(Exchange {
            send: step.others().map(send).collect(),
            receive: step.others_back().map(receive).collect(),
        });
    }

    fn peer(&self, step: &Step, digit: usize) -> usize {
        (self.rank_at)(self.position - step.digit * step.distance + digit * step.distance)
    }
}

impl Step {
    fn part(&self, digit: usize) -> Range<usize> {
        part(&self.whole, self.ranks, digit)
    }

    /// The other ranks of the group, beginning with the next one, so that they do not all send to the same rank first.
    fn others(&self) -> impl Iterator<Item = usize> {
        (1..self.ranks).map(|ahead| (self.digit + ahead) % self.ranks)
    }

    /// The other ranks of the group in the order in which their messages to this one are sent.
    fn others_back(&self) -> impl Iterator<Item = usize> {
        (1..self.ranks).map(|behind| (self.digit + self.ranks - behind) % self.ranks)
    }
}

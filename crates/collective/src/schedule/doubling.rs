//! Recursive doubling: in each round pairs of ranks send each other all that they have, so that each knows of twice as many ranks as
//! before. For short values and barriers, whose time depends on the number of messages (Hensgen, Finkel and Manber, "Two algorithms
//! for barrier synchronization", 1988; Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
//! MPICH", 2005).
//!
//! The pairs need a power of two of ranks. A surplus rank takes no part: it sends its value to the next rank before, and gets the
//! result after. Both ranks of a pair combine the elements of the lower ranks with those of the higher ones, in this order, so all
//! ranks get the same bits.
//!
//! Ranks also compare their calls along some of these pairs: see [`ComparedRanks`].

use smallvec::SmallVec;

use super::{Arrival, Exchange, Plan};

/// A round of one rank: it sends all that it has, receives what the other one has, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Round {
    /// The other rank.
    pub(crate) with: usize,
    pub(crate) sends: bool,
    /// `None` if it receives nothing.
    pub(crate) arrival: Option<Arrival>,
}

/// The positions of the ranks that take part.
#[derive(Debug, Clone, Copy)]
struct Positions {
    rank: usize,
    /// A power of two.
    count: usize,
    /// The ranks that take no part: the even ones of the first `2·surplus`.
    surplus: usize,
}

impl Positions {
    fn of(rank: usize, size: usize) -> Self {
        let count = 1 << size.max(1).ilog2();
        Self { rank, count, surplus: size.saturating_sub(count) }
    }

    fn rank_at(&self, position: usize) -> usize {
        if position < self.surplus { 2 * position + 1 } else { position + self.surplus }
    }

    /// Whether this rank or the one before it takes no part.
    fn is_paired(&self) -> bool {
        self.rank < 2 * self.surplus
    }

    /// The position of this rank; `None` if it takes no part.
    fn own(&self) -> Option<usize> {
        match self.is_paired() {
            true => (!self.rank.is_multiple_of(2)).then_some(self.rank / 2),
            false => Some(self.rank - self.surplus),
        }
    }
}

/// The rounds of `rank` among `size` ranks, which take the same messages whatever a value is: each rank sends another at most one.
///
/// For `size = 2^k` these are `k` rounds, and `size·k` messages of all ranks together. Otherwise let `surplus` be the number of ranks
/// above the largest power of two: the messages are those of that power, and two for each surplus rank.
pub(crate) fn rounds(rank: usize, size: usize) -> impl Iterator<Item = Round> + use<> {
    let positions = Positions::of(rank, size);
    let round = |with, sends, arrival| Round { with, sends, arrival };
    let (mut before, mut after) = (None, None);
    match positions.own() {
        None => {
            before = Some(round(rank + 1, true, None));
            after = Some(round(rank + 1, false, Some(Arrival::Replace)));
        }
        Some(_) if positions.is_paired() => {
            before = Some(round(rank - 1, false, Some(Arrival::FoldLower)));
            after = Some(round(rank - 1, true, None));
        }
        Some(_) => {}
    }
    let pairs = positions.own().into_iter().flat_map(move |own| {
        (0..positions.count.ilog2()).map(move |bit| {
            let other = own ^ (1 << bit);
            let arrival = if other < own { Arrival::FoldLower } else { Arrival::Fold };
            round(positions.rank_at(other), true, Some(arrival))
        })
    });
    before.into_iter().chain(pairs).chain(after)
}

/// Every rank gets the combination of all, by these rounds.
#[must_use]
pub(super) fn all_reduce(rank: usize, size: usize, count: usize) -> Plan {
    let mut plan = Plan::default();
    for Round { with, sends, arrival } in rounds(rank, size) {
        let send = sends.then_some((with, 0..count)).into_iter().collect();
        let receive = arrival.map(|arrival| (with, 0..count, arrival)).into_iter().collect();
        plan.push(Exchange { send, receive });
    }
    plan
}

/// The ranks with which a rank compares every call, whatever its plan: it sends its call to some, and receives that of others.
///
/// The ranks that take part in [`rounds`] are a ring in which two neighbours differ in one bit of their position (Gray's code), and
/// each surplus rank compares with the next rank, both ways. So a call that travels in these rounds is compared by its own messages.
/// If some ranks make such a call and others another one, two of them meet along this ring: take the smallest group of `2^k` ranks in
/// which there are both. Its halves are uniform, so nobody in them waits before the round of their pairs, and one of these pairs is in
/// the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ComparedRanks {
    pub(crate) to: SmallVec<[usize; 2]>,
    pub(crate) from: SmallVec<[usize; 2]>,
}

/// The ring is enough for up to this many ranks. A rank is ahead of another by at most one call for each rank between them, and each call may
/// leave a note; a channel holds as many.
const RING_MAX: usize = 64;

impl ComparedRanks {
    pub(crate) fn of(rank: usize, size: usize) -> Self {
        let positions = Positions::of(rank, size);
        let (mut to, mut from) = (SmallVec::new(), SmallVec::new());
        match positions.own() {
            _ if size > RING_MAX => {
                to.extend(rounds(rank, size).filter(|round| round.sends).map(|round| round.with));
                from.extend(
                    rounds(rank, size).filter(|round| round.arrival.is_some()).map(|round| round.with),
                );
                return Self { to, from };
            }
            None => {
                to.push(rank + 1);
                from.push(rank + 1);
            }
            Some(own) => {
                if positions.is_paired() {
                    to.push(rank - 1);
                    from.push(rank - 1);
                }
                if positions.count > 1 {
                    let place = place_of(own);
                    let at = |place: usize| positions.rank_at(position_at(place % positions.count));
                    to.push(at(place + 1));
                    from.push(at(place + positions.count - 1));
                }
            }
        }
        Self { to, from }
    }
}

/// The position at a place of the ring: Gray's code of it.
fn position_at(place: usize) -> usize {
    place ^ (place >> 1)
}

/// The place of a position in the ring.
fn place_of(position: usize) -> usize {
    let log = usize::BITS.ilog2();
    (0..log).fold(position, |place, bit| place ^ (place >> (1 << bit)))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use super::*;

    const SIZES: std::ops::RangeInclusive<usize> = 1..=70;

    /// The ranges of ranks that each rank has combined at the end, in order. Every rank takes its rounds in order.
    fn run(size: usize) -> Vec<std::ops::Range<usize>> {
        let mut has: Vec<_> = (0..size).map(|rank| rank..rank + 1).collect();
        let mut left: Vec<VecDeque<_>> = (0..size).map(|rank| rounds(rank, size).collect()).collect();
        let mut has_sent = vec![false; size];
        let mut wires = vec![VecDeque::new(); size * size];
        let mut goes_on = true;
        while std::mem::take(&mut goes_on) {
            for rank in 0..size {
                let Some(round) = left[rank].front().copied() else { continue };
                if round.sends && !std::mem::replace(&mut has_sent[rank], true) {
                    wires[rank * size + round.with].push_back(has[rank].clone());
                    goes_on = true;
                }
                if let Some(arrival) = round.arrival {
                    let Some(theirs) = wires[round.with * size + rank].pop_front() else { continue };
                    let own = has[rank].clone();
                    has[rank] = match arrival {
                        Arrival::Replace => theirs,
                        Arrival::Fold => {
                            assert_eq!(own.end, theirs.start, "combined in the order of the ranks");
                            own.start..theirs.end
                        }
                        _ => {
                            assert_eq!(theirs.end, own.start, "combined in the order of the ranks");
                            theirs.start..own.end
                        }
                    };
                }
                left[rank].pop_front();
                has_sent[rank] = false;
                goes_on = true;
            }
        }
        assert!(left.iter().all(VecDeque::is_empty), "a rank waits for ever");
        assert!(wires.iter().all(VecDeque::is_empty), "a message that nobody receives");
        has
    }

    #[test]
    fn every_rank_combines_the_elements_of_all_in_their_order() {
        for size in SIZES {
            assert!(run(size).iter().all(|has| *has == (0..size)), "{size}");
        }
    }

    #[test]
    fn a_call_takes_a_message_of_each_rank_for_each_doubling_and_at_most_one_to_another_rank() {
        for size in SIZES {
            let sends = |rank| rounds(rank, size).filter(|round| round.sends).map(|round| round.with);
            let messages: usize = (0..size).map(|rank| sends(rank).count()).sum();
            let doublings = size.next_power_of_two().ilog2() as usize;
            assert!(messages <= size * doublings, "{messages} of {size} ranks");
            assert!(!size.is_power_of_two() || messages == size * doublings, "{messages} of {size} ranks");
            for rank in 0..size {
                let to: BTreeSet<_> = sends(rank).collect();
                assert_eq!(to.len(), sends(rank).count(), "rank {rank} of {size}");
            }
        }
    }

    #[test]
    fn whoever_sends_its_call_is_awaited_and_the_messages_of_the_rounds_carry_it() {
        for size in SIZES {
            for rank in 0..size {
                let ComparedRanks { to, from } = ComparedRanks::of(rank, size);
                for other in &to {
                    assert!(
                        ComparedRanks::of(*other, size).from.contains(&rank),
                        "{rank} to {other} of {size}"
                    );
                    assert!(rounds(rank, size).any(|round| round.sends && round.with == *other));
                }
                for other in &from {
                    assert!(
                        ComparedRanks::of(*other, size).to.contains(&rank),
                        "{other} to {rank} of {size}"
                    );
                    assert!(rounds(rank, size).any(|round| round.arrival.is_some() && round.with == *other));
                }
            }
        }
    }

    /// Of ranks that make two calls, one by [`rounds`] and one that is compared at once, some rank finds the other call.
    #[test]
    fn a_call_that_differs_is_found_whichever_ranks_make_it() {
        for size in 2..=11usize {
            for differs in 1..(1u32 << size) - 1 {
                let is_other = |rank: usize| differs >> rank & 1 == 1;
                assert!(is_found(size, is_other), "{differs:b} of {size} ranks");
            }
        }
    }

    fn is_found(size: usize, is_other: impl Fn(usize) -> bool) -> bool {
        let mut sent = BTreeSet::new();
        for rank in (0..size).filter(|rank| is_other(*rank)) {
            sent.extend(ComparedRanks::of(rank, size).to.iter().map(|to| (rank, *to)));
        }
        let mut left: Vec<VecDeque<_>> = (0..size).map(|rank| rounds(rank, size).collect()).collect();
        loop {
            let mut goes_on = false;
            for rank in (0..size).filter(|rank| !is_other(*rank)) {
                let Some(round) = left[rank].front().copied() else { continue };
                goes_on |= round.sends && sent.insert((rank, round.with));
                if round.arrival.is_none() || sent.contains(&(round.with, rank)) {
                    if round.arrival.is_some() && is_other(round.with) {
                        return true;
                    }
                    left[rank].pop_front();
                    goes_on = true;
                }
            }
            for rank in (0..size).filter(|rank| is_other(*rank)) {
                let from = ComparedRanks::of(rank, size).from;
                if from.iter().any(|from| !is_other(*from) && sent.contains(&(*from, rank))) {
                    return true;
                }
            }
            if !goes_on {
                return false;
            }
        }
    }
}

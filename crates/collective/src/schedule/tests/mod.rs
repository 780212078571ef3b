//! Plans run by a model: all ranks of a group in one thread, with queues of messages. Element `j` of rank `r` starts as `j·size +
//! r`.

mod direct;
mod halving_doubling;
mod hierarchical;
mod ring;
mod tree;

use crate::schedule::{Arrival, Exchange, Plan};
use std::{collections::VecDeque, ops::Range};

const COUNTS: [usize; 9] = [0, 1, 4, 7, 13, 64, 100, 1000, 10_007];

fn sizes() -> impl Iterator<Item = usize> {
    (1..=16).chain([24, 32])
}

fn shapes() -> impl Iterator<Item = (usize, usize)> {
    sizes().flat_map(|size| COUNTS.map(|count| (size, count)))
}

/// Segments of one element make too many exchanges of a long value.
fn segments(count: usize) -> impl Iterator<Item = usize> {
    [1, 3, 64, usize::MAX].into_iter().filter(move |segment| *segment > 1 || count <= 100)
}

fn plans(size: usize, plan: impl Fn(usize) -> Plan) -> Vec<Plan> {
    (0..size).map(plan).collect()
}

/// The elements of the ranks after their plans, which are checked first. Every rank takes its steps in order.
fn run(plans: &[Plan], count: usize) -> Vec<Vec<i64>> {
    check(plans, count);
    let mut model = Model::new(plans, count, |own, other| own + other);
    model.run(&(0..plans.len()).collect::<Vec<_>>());
    model.values
}

fn sum(size: usize, element: usize) -> i64 {
    (size * size * element + size * (size - 1) / 2) as i64
}

fn assert_sums(size: usize, values: &[i64], range: Range<usize>, what: &str) {
    for element in range {
        assert_eq!(values[element], sum(size, element), "element {element}, {what}");
    }
}

fn sent(plan: &Plan) -> usize {
    plan.exchanges.iter().flat_map(|exchange| &exchange.send).map(|(_, range)| range.len()).sum()
}

/// The length of part `index` of balanced parts, as documented.
fn part_length(count: usize, size: usize, index: usize) -> usize {
    count / size + usize::from(index % size < count % size)
}

/// The elements of a position after `ranks` have divided them among each other.
fn held(count: usize, position: usize, ranks: usize) -> usize {
    count.saturating_sub(position % ranks).div_ceil(ranks)
}

/// Runs the plans with each rank delayed in turn until no other can go on, so that each message is in flight as long as possible.
/// The combination distinguishes any two orders. All `owners` must get the same result.
fn assert_safe_and_same_everywhere(plans: &[Plan], count: usize, owners: Range<usize>) {
    check(plans, count);
    let ends: Vec<_> = (0..plans.len())
        .map(|held_back| {
            let mut model = Model::new(plans, count, |own, other| own.wrapping_mul(31).wrapping_add(other));
            let others = (0..plans.len()).filter(|rank| *rank != held_back);
            model.run(&others.chain([held_back]).collect::<Vec<_>>());
            model.values
        })
        .collect();
    for values in &ends {
        assert_eq!(values, &ends[0], "the result depends on which rank is slow");
        assert!(
            values[owners.clone()].windows(2).all(|pair| pair[0] == pair[1]),
            "ranks have combined in other orders"
        );
    }
}

/// What two ranks expect of each other matches, and is possible.
fn check(plans: &[Plan], count: usize) {
    let mut sent = vec![vec![vec![]; plans.len()]; plans.len()];
    let mut expected = sent.clone();
    for (rank, plan) in plans.iter().enumerate() {
        for exchange in &plan.exchanges {
            assert!(!exchange.send.is_empty() || !exchange.receive.is_empty(), "an empty exchange");
            for (to, range) in &exchange.send {
                assert!(!range.is_empty() && range.end <= count && *to != rank, "{exchange:?} of {rank}");
                sent[rank][*to].push(range.clone());
            }
            for (index, (from, range, _)) in exchange.receive.iter().enumerate() {
                assert!(!range.is_empty() && range.end <= count && *from != rank, "{exchange:?} of {rank}");
                let earlier = exchange.receive[..index].iter();
                let earlier = earlier.filter(|(_, _, arrival)| *arrival != Arrival::FoldAll);
                let earlier = earlier.map(|(_, earlier, _)| earlier);
                let sent = exchange.send.iter().map(|(_, sent)| sent);
                assert!(earlier.chain(sent).all(|other| !overlap(range, other)), "{exchange:?} of {rank}");
                expected[*from][rank].push(range.clone());
            }
        }
    }
    assert_eq!(sent, expected);
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The value of elements that were combined in a message.
const UNDEFINED: i64 = i64::MIN;

/// The messages sent and not yet received from one rank to another.
type Wire = VecDeque<(Range<usize>, Vec<i64>)>;

struct Model<'a> {
    plans: &'a [Plan],
    combine: fn(i64, i64) -> i64,
    values: Vec<Vec<i64>>,
    /// The messages of each rank that are passed on.
    passed: Vec<Vec<(Range<usize>, Vec<i64>)>>,
    /// The exchange of each rank, whether it has sent, and how many of its messages it has received.
    at: Vec<(usize, bool, usize)>,
    wires: Vec<Vec<Wire>>,
}

impl<'a> Model<'a> {
    fn new(plans: &'a [Plan], count: usize, combine: fn(i64, i64) -> i64) -> Self {
        let size = plans.len();
        let start = |rank| (0..count).map(|element| (element * size + rank) as i64).collect();
        let values = (0..size).map(start).collect();
        Self {
            plans,
            combine,
            values,
            passed: vec![Vec::new(); size],
            at: vec![(0, false, 0); size],
            wires: vec![vec![Wire::new(); size]; size],
        }
    }

    /// The first rank in `order` that can go on does so until it has to wait.
    fn run(&mut self, order: &[usize]) {
        while order.iter().any(|rank| self.advance(*rank)) {}
        for (rank, plan) in self.plans.iter().enumerate() {
            assert_eq!(self.at[rank].0, plan.exchanges.len(), "rank {rank} waits forever");
        }
        assert!(self.wires.iter().flatten().all(VecDeque::is_empty), "a message that nobody receives");
    }

    fn advance(&mut self, rank: usize) -> bool {
        let before = self.at[rank];
        while let Some(exchange) = self.plans[rank].exchanges.get(self.at[rank].0) {
            if !self.at[rank].1 {
                for (to, range) in &exchange.send {
                    let elements = self.sent(rank, range);
                    self.wires[rank][*to].push_back((range.clone(), elements));
                }
                self.at[rank].1 = true;
            }
            while let Some((from, range, arrival)) = exchange.receive.get(self.at[rank].2) {
                let Some((sent, elements)) = self.wires[*from][rank].pop_front() else {
                    return self.at[rank] != before;
                };
                assert_eq!(sent, *range);
                self.put(rank, range, *arrival, &elements);
                self.at[rank].2 += 1;
            }
            self.at[rank] = (self.at[rank].0 + 1, false, 0);
        }
        self.at[rank] != before
    }

    fn put(&mut self, rank: usize, range: &Range<usize>, arrival: Arrival, elements: &[i64]) {
        let mut under_way = self.wires[rank].iter().flatten();
        assert!(
            under_way.all(|(sent, _)| !overlap(sent, range)),
            "rank {rank} changes {range:?}, which is on its way"
        );
        let all = self.values[rank][range.clone()].iter_mut().zip(elements);
        let combined = all.map(|(own, other)| match arrival {
            Arrival::Fold | Arrival::FoldAll | Arrival::Pass => (self.combine)(*own, *other),
            Arrival::FoldLower => (self.combine)(*other, *own),
            Arrival::Replace => *other,
        });
        let mut combined: Vec<_> = combined.collect();
        if arrival == Arrival::Pass {
            self.passed[rank].push((range.clone(), combined.clone()));
            combined.fill(UNDEFINED);
        }
        self.values[rank][range.clone()].copy_from_slice(&combined);
    }

    /// What `rank` sends of `range`.
    fn sent(&mut self, rank: usize, range: &Range<usize>) -> Vec<i64> {
        let passed = &mut self.passed[rank];
        let elements = match passed.iter().position(|(passed, _)| passed == range) {
            Some(at) => passed.swap_remove(at).1,
            None => self.values[rank][range.clone()].to_vec(),
        };
        assert!(!elements.contains(&UNDEFINED), "rank {rank} sends {range:?}, which is undefined");
        elements
    }
}

#[test]
#[should_panic(expected = "waits forever")]
fn the_model_notices_ranks_that_wait_for_each_other() {
    let halves = [0..2, 2..4];
    let waits_first = |rank: usize| Plan {
        exchanges: vec![
            Exchange { send: vec![], receive: vec![(1 - rank, halves[rank].clone(), Arrival::Fold)] },
            Exchange { send: vec![(1 - rank, halves[1 - rank].clone())], receive: vec![] },
        ],
    };
    run(&plans(2, waits_first), 4);
}

#[test]
#[should_panic(expected = "which is on its way")]
fn the_model_notices_that_an_element_changes_while_it_is_on_its_way() {
    let to_the_next = |rank: usize| Plan {
        exchanges: vec![
            Exchange { send: vec![((rank + 1) % 3, 0..4)], receive: vec![] },
            Exchange { send: vec![], receive: vec![((rank + 2) % 3, 0..4, Arrival::Replace)] },
        ],
    };
    assert_safe_and_same_everywhere(&plans(3, to_the_next), 4, 0..0);
}

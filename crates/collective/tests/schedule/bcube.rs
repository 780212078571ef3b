//! Plans of groups of several ranks: what they compute, and exactly how many steps and elements they take.

use super::{assert_safe_and_same_everywhere, assert_sums, held, plans, run, sent, shapes};
use tensorwire_collective::schedule::bcube;

/// The groups of each step, with at most four ranks each unless a prime factor needs more.
const GROUPS_OF_FOUR: [(usize, &[usize]); 18] = [
    (1, &[]),
    (2, &[2]),
    (3, &[3]),
    (4, &[4]),
    (5, &[5]),
    (6, &[3, 2]),
    (7, &[7]),
    (8, &[4, 2]),
    (9, &[3, 3]),
    (10, &[2, 5]),
    (11, &[11]),
    (12, &[4, 3]),
    (13, &[13]),
    (14, &[2, 7]),
    (15, &[3, 5]),
    (16, &[4, 4]),
    (24, &[4, 3, 2]),
    (32, &[4, 4, 2]),
];

const COUNTS: [usize; 7] = [0, 1, 7, 13, 100, 1000, 10_007];

#[test]
fn every_rank_gets_every_sum() {
    for (size, count) in shapes() {
        for base in [0, 2, 3, 4, 5, 8, usize::MAX] {
            for values in run(&plans(size, |rank| bcube::all_reduce(rank, size, count, base)), count) {
                assert_sums(size, &values, 0..count, &format!("size {size}, count {count}, base {base}"));
            }
        }
    }
}

#[test]
fn steps_and_elements_are_those_of_the_groups() {
    for (size, groups) in GROUPS_OF_FOUR {
        for (rank, count) in (0..size).flat_map(|rank| COUNTS.map(|count| (rank, count))) {
            assert_costs(rank, size, count, 4, groups);
        }
    }
}

#[test]
fn a_power_of_the_base_has_groups_of_the_base() {
    for (base, power) in [(2, 1), (2, 5), (3, 2), (3, 3), (4, 2), (5, 2), (6, 2), (8, 2), (10, 2)] {
        let size = usize::pow(base, power);
        for (rank, count) in (0..size).flat_map(|rank| COUNTS.map(|count| (rank, count))) {
            assert_costs(rank, size, count, base, &vec![base; power as usize]);
        }
        for rank in 0..size {
            let plan = bcube::all_reduce(rank, size, 3 * size, base);
            assert_eq!(plan.exchanges.len(), power as usize * base);
            // Steps begin with their sends: the other exchanges only receive.
            let steps = plan.exchanges.iter().filter(|exchange| !exchange.send.is_empty());
            assert_eq!(steps.count(), 2 * power as usize);
            assert_eq!(sent(&plan), 2 * 3 * (size - 1));
        }
    }
}

fn assert_costs(rank: usize, size: usize, count: usize, base: usize, groups: &[usize]) {
    let plan = bcube::all_reduce(rank, size, count, base);
    let (mut exchanges, mut elements, mut ranks) = (0, 0, 1);
    for group in groups {
        let before = held(count, rank, ranks);
        ranks *= group;
        let after = held(count, rank, ranks);
        elements += before - after + (group - 1) * after;
        // A rank with an empty part has no receives in its first half. A rank whose group has no elements does nothing.
        exchanges += usize::from(before > 0) * (1 + if after > 0 { group - 1 } else { 1 });
    }
    assert_eq!(ranks, size);
    assert_eq!(sent(&plan), elements, "rank {rank} of {size}, count {count}, base {base}");
    assert_eq!(plan.exchanges.len(), exchanges, "rank {rank} of {size}, count {count}, base {base}");
    if count.is_multiple_of(size) {
        assert_eq!(elements, 2 * count * (size - 1) / size);
    }
}

#[test]
fn slow_ranks_change_no_result_and_no_element_on_its_way() {
    for size in (1..=9).chain([12, 16]) {
        for (base, count) in [(2, 5), (3, 13), (4, 100), (4, 3), (8, 100)] {
            let all = plans(size, |rank| bcube::all_reduce(rank, size, count, base));
            assert_safe_and_same_everywhere(&all, count, 0..size);
        }
    }
}

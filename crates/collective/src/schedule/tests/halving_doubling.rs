//! Plans of pairs: what they compute, and exactly how many steps and elements they take.

use super::{assert_safe_and_same_everywhere, assert_sums, held, plans, run, sent, shapes};
use crate::schedule::halving_doubling;

#[test]
fn every_rank_gets_every_sum() {
    for (size, count) in shapes() {
        for values in run(&plans(size, |rank| halving_doubling::all_reduce(rank, size, count)), count) {
            assert_sums(size, &values, 0..count, &format!("size {size}, count {count}"));
        }
    }
}

#[test]
fn powers_of_two_send_all_once_and_what_they_hold_after_each_step_but_the_last() {
    for (size, count) in shapes().filter(|(size, _)| size.is_power_of_two()) {
        for rank in 0..size {
            assert_part_taken(rank, rank, size, count, 0, 0);
            if count.is_multiple_of(size) {
                let plan = halving_doubling::all_reduce(rank, size, count);
                assert_eq!(sent(&plan), 2 * count * (size - 1) / size);
            }
        }
    }
}

#[test]
fn powers_of_two_take_a_step_each_way_for_each_doubling() {
    for log in 0..=6 {
        let size = 1 << log;
        for rank in 0..size {
            assert_eq!(halving_doubling::all_reduce(rank, size, size).exchanges.len(), 2 * log);
        }
    }
}

#[test]
fn surplus_ranks_send_all_once_and_their_neighbours_send_all_once_more() {
    for (size, count) in shapes().filter(|(size, _)| !size.is_power_of_two()) {
        let powers = size.next_power_of_two() / 2;
        let surplus = size - powers;
        for rank in 0..2 * surplus {
            if rank % 2 == 0 {
                let plan = halving_doubling::all_reduce(rank, size, count);
                assert_eq!(sent(&plan), count);
                assert_eq!(plan.exchanges.len(), if count == 0 { 0 } else { 2 });
            } else {
                assert_part_taken(rank, rank / 2, size, count, count, if count == 0 { 0 } else { 2 });
            }
        }
        for rank in 2 * surplus..size {
            assert_part_taken(rank, rank - surplus, size, count, 0, 0);
        }
    }
}

/// The costs of a rank that takes part at a position, in addition to what its surplus neighbour needs.
fn assert_part_taken(
    rank: usize,
    position: usize,
    size: usize,
    count: usize,
    more_sent: usize,
    more_exchanges: usize,
) {
    let plan = halving_doubling::all_reduce(rank, size, count);
    let log = size.ilog2();
    let kept = (1..log).map(|step| held(count, position, 1 << step)).sum::<usize>();
    let all = if log == 0 { 0 } else { count };
    assert_eq!(sent(&plan), all + kept + more_sent, "rank {rank} of {size}, count {count}");
    let exchanges = (0..log).filter(|step| held(count, position, 1 << step) > 0).count() * 2;
    assert_eq!(plan.exchanges.len(), exchanges + more_exchanges, "rank {rank} of {size}, count {count}");
}

#[test]
fn the_longest_messages_are_between_neighbours() {
    let plan = halving_doubling::all_reduce(5, 8, 80);
    let sent: Vec<_> = plan.exchanges.iter().flat_map(|exchange| &exchange.send).collect();
    let to_and_length: Vec<_> = sent.iter().map(|(to, range)| (*to, range.len())).collect();
    assert_eq!(to_and_length, [(4, 40), (7, 20), (1, 10), (1, 10), (7, 20), (4, 40)]);
}

#[test]
fn slow_ranks_change_no_result_and_no_element_on_its_way() {
    for size in (1..=13).chain([16]) {
        for count in [1, 5, 13, 100] {
            let all = plans(size, |rank| halving_doubling::all_reduce(rank, size, count));
            assert_safe_and_same_everywhere(&all, count, 0..size);
        }
    }
}

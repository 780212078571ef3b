//! Plans whose result one rank gets: what they compute, and exactly how many steps and elements they take.

use super::{
    assert_safe_and_same_everywhere, assert_sums, part_length, plans, run, segments, sent, shapes, sizes,
};
use crate::schedule::tree;

#[test]
fn every_root_gets_every_sum_of_a_short_value() {
    for (size, count) in shapes() {
        for root in 0..size {
            let values = run(&plans(size, |rank| tree::reduce(rank, size, count, root)), count);
            assert_sums(size, &values[root], 0..count, &format!("size {size}, count {count}, root {root}"));
        }
    }
}

/// All roots with long segments, and all segments with one root: only the ring has segments, and they are the same for all roots.
#[test]
fn every_root_gets_every_sum_of_a_long_value() {
    for (size, count) in shapes() {
        let roots = (0..size).map(|root| (root, usize::MAX));
        for (root, segment) in roots.chain(segments(count).map(|segment| (size / 2, segment))) {
            let values = run(&plans(size, |rank| tree::reduce_long(rank, size, count, root, segment)), count);
            let what = format!("size {size}, count {count}, root {root}, segment {segment}");
            assert_sums(size, &values[root], 0..count, &what);
        }
    }
}

/// A rank receives from one rank for each low zero bit of its distance from the root, if there are such ranks.
#[test]
fn a_tree_takes_the_logarithm_and_sends_all_once() {
    for (size, root) in sizes().flat_map(|size| (0..size).map(move |root| (size, root))) {
        for rank in 0..size {
            let plan = tree::reduce(rank, size, 10, root);
            let exchanges = plan.exchanges.len();
            let behind = (rank + size - root) % size;
            if rank == root {
                assert_eq!(exchanges, size.next_power_of_two().ilog2() as usize);
                assert_eq!(sent(&plan), 0);
            } else {
                let distances = (0..behind.trailing_zeros()).filter(|bit| behind + (1 << bit) < size);
                assert_eq!(exchanges, distances.count() + 1);
                assert_eq!(sent(&plan), 10);
            }
            assert_eq!(tree::reduce(rank, size, 0, root).exchanges.len(), 0);
        }
    }
}

#[test]
fn a_long_value_takes_a_step_for_each_rank_and_sends_all_once_but_the_part_of_the_root() {
    for (size, count) in shapes().filter(|(size, _)| *size > 1) {
        for (root, rank) in (0..size).flat_map(|root| (0..size).map(move |rank| (root, rank))) {
            let plan = tree::reduce_long(rank, size, count, root, usize::MAX);
            let kept = if rank == root { part_length(count, size, root) } else { 0 };
            assert_eq!(sent(&plan), count - kept);
            if count >= size {
                assert_eq!(plan.exchanges.len(), size);
            }
        }
    }
}

#[test]
fn one_rank_has_nothing_to_do() {
    assert_eq!(tree::reduce(0, 1, 10, 0).exchanges, []);
    assert_eq!(tree::reduce_long(0, 1, 10, 0, 3).exchanges, []);
}

#[test]
fn slow_ranks_change_no_result_and_no_element_on_its_way() {
    for size in 1..=9 {
        for root in [0, size / 2, size - 1] {
            let short = plans(size, |rank| tree::reduce(rank, size, 13, root));
            assert_safe_and_same_everywhere(&short, 13, root..root + 1);
            let long = plans(size, |rank| tree::reduce_long(rank, size, 100, root, 3));
            assert_safe_and_same_everywhere(&long, 100, root..root + 1);
        }
    }
}

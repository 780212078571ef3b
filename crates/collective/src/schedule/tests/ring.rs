//! Plans of the ring: what they compute, and exactly how many steps and elements they take.

use super::{
    assert_safe_and_same_everywhere, assert_sums, part_length, plans, run, segments, sent, shapes, sizes,
};
use crate::schedule::ring;

#[test]
fn every_rank_gets_every_sum_of_an_all_reduce() {
    for (size, count) in shapes() {
        for segment in segments(count) {
            let values = run(&plans(size, |rank| ring::all_reduce(rank, size, count, segment)), count);
            for values in values {
                assert_sums(
                    size,
                    &values,
                    0..count,
                    &format!("size {size}, count {count}, segment {segment}"),
                );
            }
        }
    }
}

#[test]
fn an_all_reduce_sends_all_twice_but_its_own_part_and_the_next_one() {
    for (size, count) in shapes().filter(|(size, _)| *size > 1) {
        for (rank, segment) in (0..size).flat_map(|rank| segments(count).map(move |segment| (rank, segment)))
        {
            let plan = ring::all_reduce(rank, size, count, segment);
            let missing = part_length(count, size, rank) + part_length(count, size, rank + 1);
            assert_eq!(sent(&plan), 2 * count - missing);
            if count.is_multiple_of(size) {
                assert_eq!(sent(&plan), 2 * count * (size - 1) / size);
            }
        }
    }
}

/// In each step but the last of either half a rank receives what it sends next, and its sends and receives are two neighbouring
/// parts.
#[test]
fn an_all_reduce_takes_an_exchange_for_each_segment_of_each_step() {
    for (size, count) in shapes() {
        for (rank, segment) in (0..size).flat_map(|rank| segments(count).map(move |segment| (rank, segment)))
        {
            let plan = ring::all_reduce(rank, size, count, segment);
            let pieces = |part| part_length(count, size, part + size).div_ceil(segment);
            // The cost of two neighbouring parts, for all pairs of neighbours but one in either half.
            let pair = |part| std::cmp::max(pieces(part), pieces(part + size - 1));
            let all: usize = (0..size).map(pair).sum();
            let exchanges = if size == 1 { 0 } else { 2 * all - pair(rank) - pair(rank + 1) };
            assert_eq!(
                plan.exchanges.len(),
                exchanges,
                "rank {rank} of {size}, count {count}, segment {segment}"
            );
            if count >= size && segment == usize::MAX {
                assert_eq!(exchanges, 2 * (size - 1));
            }
        }
    }
}

/// A segment is sent on as soon as it has come: it does not depend on the exchanges in between.
#[test]
fn a_segment_depends_on_the_same_segment_of_the_step_before_only() {
    let (size, count, segment) = (4, 1000, 50);
    for rank in 0..size {
        let exchanges = ring::all_reduce(rank, size, count, segment).exchanges;
        let steps: Vec<_> = exchanges.chunks(count / size / segment).collect();
        assert_eq!(steps.len(), 2 * (size - 1));
        for pair in steps.windows(2) {
            for (earlier, later) in pair[0].iter().zip(pair[1]) {
                assert_eq!(later.send[0].1, earlier.receive[0].1);
            }
        }
    }
}

#[test]
fn a_segment_of_no_elements_counts_as_one() {
    assert_eq!(ring::all_reduce(1, 3, 10, 0), ring::all_reduce(1, 3, 10, 1));
}

/// All shapes: even, some empty, all at one rank, and no elements.
fn counts_of_ranks(size: usize) -> impl Iterator<Item = Vec<usize>> {
    let uneven = (0..size).map(|rank| (rank * 7 + 3) % 5 * 11).collect();
    let first = (0..size).map(|rank| if rank == 0 { 100 } else { 0 }).collect();
    let last = (0..size).map(|rank| if rank + 1 == size { 100 } else { 0 }).collect();
    [vec![9; size], uneven, first, last, vec![0; size]].into_iter()
}

fn range_of(counts: &[usize], rank: usize) -> std::ops::Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

#[test]
fn each_rank_gets_the_sums_of_its_part_of_a_reduce_scatter() {
    for size in sizes() {
        for counts in counts_of_ranks(size) {
            let plans = plans(size, |rank| ring::reduce_scatter(rank, size, &counts));
            let all = counts.iter().sum();
            for (rank, values) in run(&plans, all).into_iter().enumerate() {
                assert_sums(
                    size,
                    &values,
                    range_of(&counts, rank),
                    &format!("rank {rank}, counts {counts:?}"),
                );
                assert_eq!(sent(&plans[rank]), if size == 1 { 0 } else { all - counts[rank] });
            }
        }
    }
}

#[test]
fn a_reduce_scatter_takes_a_step_less_than_there_are_ranks() {
    for size in sizes() {
        let counts = vec![5; size];
        for rank in 0..size {
            assert_eq!(ring::reduce_scatter(rank, size, &counts).exchanges.len(), size - 1);
        }
    }
}

#[test]
fn slow_ranks_change_no_result_and_no_element_on_its_way() {
    for size in 1..=9 {
        for (count, segment) in [(5, 1), (13, 3), (100, 7), (100, usize::MAX)] {
            let all = plans(size, |rank| ring::all_reduce(rank, size, count, segment));
            assert_safe_and_same_everywhere(&all, count, 0..size);
        }
    }
}

use super::{assert_safe_and_same_everywhere, assert_sums, part_length, plans, run, segments, sent, shapes};
use crate::schedule::{Arrival, Exchange, Plan, direct};

#[test]
fn all_ranks_get_sums_and_send_as_much_as_in_a_ring() {
    for (size, count) in shapes() {
        for segment in segments(count) {
            let plans = plans(size, |rank| direct::all_reduce(rank, size, count, segment));
            for (rank, values) in run(&plans, count).iter().enumerate() {
                assert_sums(
                    size,
                    values,
                    0..count,
                    &format!("{size} ranks, {count} elements, segment {segment}"),
                );
                let part = part_length(count, size, rank);
                let expected = if size == 1 { 0 } else { count - part + (size - 1) * part };
                assert_eq!(sent(&plans[rank]), expected, "rank {rank} of {size}, {count} elements");
            }
        }
    }
}

#[test]
fn no_element_changes_while_it_is_on_its_way() {
    for (size, count) in shapes().filter(|(size, count)| *size <= 8 && *count <= 100) {
        for segment in segments(count) {
            let plans = plans(size, |rank| direct::all_reduce(rank, size, count, segment));
            assert_safe_and_same_everywhere(&plans, count, 0..size);
        }
    }
}

#[test]
fn all_ranks_send_all_elements_to_all_others_a_segment_at_a_time() {
    for (size, count) in shapes().filter(|(size, count)| *size <= 8 && *count <= 100) {
        for (segment, rounds_once) in segments(count).flat_map(|segment| [(segment, false), (segment, true)])
        {
            for rank in 0..size {
                let Plan { exchanges } = direct::exchange(rank, size, count, segment, rounds_once);
                let mut end = 0;
                for Exchange { send, receive } in exchanges {
                    let range = send[0].1.clone();
                    assert_eq!(range.start, std::mem::replace(&mut end, range.end));
                    assert!(range.len() <= segment);
                    let others: Vec<_> =
                        (1..size).map(|ahead| ((rank + ahead) % size, range.clone())).collect();
                    assert_eq!(send, others);
                    let arrival = match (size, rank, rounds_once) {
                        (2, 0, false) => Arrival::Fold,
                        (2, 1, false) => Arrival::FoldLower,
                        _ => Arrival::FoldAll,
                    };
                    let others = others.into_iter().map(|(from, range)| (from, range, arrival));
                    assert_eq!(receive, others.collect::<Vec<_>>());
                }
                assert_eq!(end, if size == 1 { 0 } else { count });
            }
        }
    }
}

#[test]
fn each_rank_gets_its_part() {
    for size in 1..9 {
        for unit in [0, 1, 7] {
            // The first part is empty.
            let counts: Vec<usize> = (0..size).map(|rank| rank * unit).collect();
            let count = counts.iter().sum();
            for segment in segments(count) {
                let plans = plans(size, |rank| direct::reduce_scatter(rank, size, &counts, segment));
                let values = run(&plans, count);
                for rank in 0..size {
                    let start: usize = counts[..rank].iter().sum();
                    assert_sums(size, &values[rank], start..start + counts[rank], "its part");
                    assert_eq!(sent(&plans[rank]), if size == 1 { 0 } else { count - counts[rank] });
                }
            }
        }
    }
}

#[test]
fn the_root_gets_sums() {
    for (size, count) in shapes().filter(|(size, _)| *size <= 8) {
        for root in 0..size {
            for segment in segments(count) {
                let plans = plans(size, |rank| direct::reduce(rank, size, count, root, segment));
                assert_sums(size, &run(&plans, count)[root], 0..count, "the root");
            }
        }
    }
}

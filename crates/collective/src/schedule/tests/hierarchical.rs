//! Plans of two levels: what they compute, and exactly what they send within hosts and between them.

use super::{COUNTS, assert_safe_and_same_everywhere, assert_sums, part_length, plans, run, segments};
use crate::schedule::{Plan, hierarchical, ring};

/// The ranks of some hosts: of one, of hosts with as many ranks, with others, and with ranks that are not neighbours.
fn layouts() -> Vec<Vec<Vec<usize>>> {
    vec![
        vec![vec![0]],
        vec![vec![0, 1, 2]],
        vec![vec![0, 1], vec![2, 3]],
        vec![vec![0, 2], vec![1, 3]],
        vec![vec![0, 5, 3], vec![4, 2, 1]],
        vec![vec![0, 1, 2], vec![3, 4, 5], vec![6, 7, 8]],
        vec![vec![0], vec![1, 2, 3, 4]],
        vec![vec![0, 1, 2, 3, 4], vec![5], vec![6]],
        vec![vec![0, 1, 2], vec![3, 4], vec![5, 6, 7, 8]],
        vec![vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7, 8]],
    ]
}

/// Each layout with each number of elements.
fn cases(counts: &[usize]) -> impl Iterator<Item = (Vec<Vec<usize>>, usize)> {
    layouts().into_iter().flat_map(move |hosts| counts.iter().map(move |count| (hosts.clone(), *count)))
}

fn size(hosts: &[Vec<usize>]) -> usize {
    hosts.iter().map(Vec::len).sum()
}

fn all(hosts: &[Vec<usize>], count: usize, segment: usize) -> Vec<Plan> {
    plans(size(hosts), |rank| hierarchical::all_reduce(rank, hosts, count, segment))
}

#[test]
fn every_rank_gets_every_sum() {
    for (hosts, count) in cases(&COUNTS) {
        for segment in segments(count).chain([0]).filter(|segment| *segment > 0 || count <= 100) {
            for values in run(&all(&hosts, count, segment), count) {
                let what = format!("hosts {hosts:?}, count {count}, segment {segment}");
                assert_sums(size(&hosts), &values, 0..count, &what);
            }
        }
    }
}

#[test]
fn the_plans_that_combine_and_collect_are_one_plan_in_two() {
    for (hosts, count) in cases(&COUNTS) {
        for segment in segments(count) {
            let one_after_the_other = plans(size(&hosts), |rank| {
                let [combine, collect] = hierarchical::combine_and_collect(rank, &hosts, count, segment);
                Plan { exchanges: [combine.exchanges, collect.exchanges].concat() }
            });
            for values in run(&one_after_the_other, count) {
                assert_sums(size(&hosts), &values, 0..count, &format!("hosts {hosts:?}, segment {segment}"));
            }
            let sent = |plans: &[Plan]| plans.iter().map(|plan| sent(plan, |_| true)).collect::<Vec<_>>();
            assert_eq!(sent(&one_after_the_other), sent(&all(&hosts, count, segment)));
        }
    }
}

#[test]
fn slow_ranks_change_no_result_and_no_element_on_its_way() {
    for (hosts, count) in cases(&[3, 13, 100]) {
        for segment in [3, usize::MAX] {
            assert_safe_and_same_everywhere(&all(&hosts, count, segment), count, 0..size(&hosts));
        }
    }
}

/// Elements that `plan` sends to ranks that `is_counted` accepts.
fn sent(plan: &Plan, is_counted: impl Fn(usize) -> bool) -> usize {
    let sends = plan.exchanges.iter().flat_map(|exchange| &exchange.send);
    sends.filter(|(to, _)| is_counted(*to)).map(|(_, range)| range.len()).sum()
}

#[test]
fn what_a_rank_sends_is_as_documented() {
    for (hosts, count) in cases(&COUNTS) {
        let owners = hosts.iter().map(Vec::len).min().unwrap();
        let all = all(&hosts, count, 64);
        for (host, ranks) in hosts.iter().enumerate() {
            for (place, rank) in ranks.iter().enumerate() {
                let within = sent(&all[*rank], |to| ranks.contains(&to));
                let between = sent(&all[*rank], |to| !ranks.contains(&to));
                let part = if place < owners { part_length(count, owners, place) } else { 0 };
                let after = if place < owners { (ranks.len() - 1) * part } else { 0 };
                assert_eq!(within, count - part + after, "rank {rank} of {hosts:?}, count {count}");
                let piece = |host: usize| part_length(part, hosts.len(), host % hosts.len());
                let expected = 2 * part - piece(host) - piece(host + 1);
                assert_eq!(between, expected, "rank {rank} of {hosts:?}, count {count}");
            }
        }
    }
}

#[test]
fn a_host_sends_the_minimum_over_the_network() {
    for hosts in layouts() {
        let (owners, count) = (hosts.iter().map(Vec::len).min().unwrap(), 60 * hosts.len());
        assert!(count.is_multiple_of(owners * hosts.len()));
        let all = all(&hosts, count, usize::MAX);
        for ranks in &hosts {
            let between: usize = ranks.iter().map(|rank| sent(&all[*rank], |to| !ranks.contains(&to))).sum();
            assert_eq!(between, 2 * count * (hosts.len() - 1) / hosts.len(), "{hosts:?}");
        }
    }
}

/// With hosts of one rank each, an owner does what it does in the ring. It sends a piece when that has come, and not at the beginning
/// of the next step.
#[test]
fn hosts_of_one_rank_each_are_the_ring() {
    for count in COUNTS {
        let hosts: Vec<_> = (0..5).map(|rank| vec![rank]).collect();
        for (rank, plan) in all(&hosts, count, 64).iter().enumerate() {
            let ring = ring::all_reduce(rank, 5, count, 64);
            let sends =
                |plan: &Plan| plan.exchanges.iter().flat_map(|one| one.send.clone()).collect::<Vec<_>>();
            let receives =
                |plan: &Plan| plan.exchanges.iter().flat_map(|one| one.receive.clone()).collect::<Vec<_>>();
            assert_eq!(sends(plan), sends(&ring));
            assert_eq!(receives(plan), receives(&ring));
        }
    }
}

#[test]
fn a_rank_on_no_host_does_nothing() {
    assert_eq!(hierarchical::all_reduce(7, &[vec![0], vec![1]], 100, 10), Plan::default());
    assert_eq!(hierarchical::all_reduce(0, &[], 100, 10), Plan::default());
}

//! Two jobs that use one name in one store by mistake, and two processes with one rank.

use std::time::Instant;

use crate::harness::{LIMIT, Other, close, sum, tell, test};

/// The remedies in the errors.
const REMEDIES: [&str; 2] = ["a name or a store of its own", "the same name and the same number of ranks"];

#[test]
fn another_run_under_the_same_name_ends_the_first() {
    test("two_jobs::another_run_under_the_same_name_ends_the_first", "shm", LIMIT, |test| {
        let first = test.rank("first", 0, 2);
        first.expect("waiting");
        // It checks for another run from time to time, after it wrote its own.
        let second = test.rank("second", 0, 2);
        second.expect("waiting");
        let error = [&first, &second].map(Other::hear).into_iter();
        let other_runs: Vec<_> =
            error.filter(|error| error.starts_with("failed OtherRun: group `tests`: ")).collect();
        assert_eq!(other_runs.len(), 1, "the other one misses rank 1: {other_runs:?}");
        let [by, remedy] = [" has begun another run under this name; ", REMEDIES[0]];
        assert!(other_runs[0].contains(by) && other_runs[0].ends_with(remedy), "{other_runs:?}");
        first.end();
        second.end();
    });
}

/// Ranks of two jobs of two with one address, in this order. The ranks that come first to their places are one group. Each of the
/// others gets an error that names what is in its place.
fn launched_in_order(name: &'static str, order: [(&'static str, usize); 4]) {
    test(name, "tcp", LIMIT, |test| {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let (mut group, mut refused) = (Vec::new(), Vec::new());
        for (job, rank) in order {
            let other = test.launched(&free, job, rank, 2);
            match other.hear() {
                // Its place may be taken; it learns that when it joins.
                line if line == "waiting" && group.len() < 2 => group.push((rank, other)),
                line if line == "waiting" => {
                    refused.push((rank, other.failure_until(Instant::now() + 2 * LIMIT)));
                }
                line => refused.push((rank, line)),
            }
        }
        assert_eq!((group.len(), refused.len()), (2, 2), "{refused:?}");
        for (rank, error) in refused {
            let expected =
                if rank == 0 { "Address already in use" } else { "RankTaken: group `tests`: rank 1" };
            assert!(error.contains(expected) && error.contains("each job"), "{error}");
        }
        group.iter().for_each(|(rank, other)| other.expect(&format!("joined {rank} of 2")));
        let mut ranks: Vec<_> = group.into_iter().map(|(_, other)| other).collect();
        tell(&mut ranks, &["reduce 1000"]);
        ranks.iter().for_each(|rank| rank.expect(&format!("round 1: {}", sum(0..2))));
        close(ranks);
    });
}

#[test]
fn the_second_rank_of_another_job_comes_before_its_first() {
    let order = [("first", 0), ("second", 1), ("second", 0), ("first", 1)];
    launched_in_order("two_jobs::the_second_rank_of_another_job_comes_before_its_first", order);
}

#[test]
fn the_first_rank_of_another_job_comes_in_between() {
    let order = [("first", 0), ("second", 0), ("first", 1), ("second", 1)];
    launched_in_order("two_jobs::the_first_rank_of_another_job_comes_in_between", order);
}

#[test]
fn all_ranks_of_two_jobs_at_once_end_in_time() {
    test("two_jobs::all_ranks_of_two_jobs_at_once_end_in_time", "tcp", LIMIT, |test| {
        let start = |job| (0..3).map(move |rank| (job, rank));
        let ranks: Vec<_> =
            start("first").chain(start("second")).map(|(job, rank)| test.rank(job, rank, 3)).collect();
        ranks.iter().for_each(|rank| rank.expect("waiting"));
        let end = Instant::now() + 2 * LIMIT;
        let said: Vec<_> = ranks.iter().map(|rank| rank.hear_until(end)).collect();
        let is_clear = |line: &String| {
            line.starts_with("joined ") || REMEDIES.iter().any(|remedy| line.ends_with(remedy))
        };
        assert!(said.iter().all(is_clear), "{said:#?}");
        let joined = said.iter().filter(|line| line.starts_with("joined ")).count();
        // All ranks of a run succeed, or none. If one run is complete before the other begins, both succeed.
        assert!(joined.is_multiple_of(3), "{said:#?}");
        ranks.into_iter().for_each(Other::end);
    });
}

#[test]
fn two_processes_with_the_number_of_one_rank() {
    test("two_jobs::two_processes_with_the_number_of_one_rank", "shm", LIMIT, |test| {
        let zero = test.rank("job", 0, 2);
        zero.expect("waiting");
        let twins = [test.rank("job", 1, 2), test.rank("twin", 1, 2)];
        twins.iter().for_each(|rank| rank.expect("waiting"));
        zero.expect("joined 0 of 2");
        let end = Instant::now() + 2 * LIMIT;
        let (joined, refused): (Vec<_>, Vec<_>) = twins
            .into_iter()
            .map(|rank| (rank.hear_until(end), rank))
            .partition(|(line, _)| line == "joined 1 of 2");
        assert_eq!((joined.len(), refused.len()), (1, 1));
        let (error, refused) = refused.into_iter().next().unwrap();
        assert!(error.starts_with("failed RankTaken: group `tests`: rank 1 is taken by worker "), "{error}");
        assert!(error.ends_with(REMEDIES[0]), "{error}");
        refused.end();
        let mut ranks = vec![zero];
        ranks.extend(joined.into_iter().map(|(_, rank)| rank));
        tell(&mut ranks, &["reduce 1000"]);
        ranks.iter().for_each(|rank| rank.expect(&format!("round 1: {}", sum(0..2))));
        close(ranks);
    });
}

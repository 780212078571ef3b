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

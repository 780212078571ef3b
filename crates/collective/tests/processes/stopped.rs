//! A rank that is stopped while all ranks are in calls: the others go on without it, and it gets the error when it resumes.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::{
    harness::{LIMIT, STEP, close, sum, tell, test},
    killed::go_on,
};

/// The errors of a call that waits for a stopped rank.
const KINDS: [&str; 3] = ["TimedOut", "RankLost", "Over"];

/// Longer than a busy machine delays a rank, and shorter than [`LIMIT`].
const NOTICED: Duration = Duration::from_secs(2);

/// How long the others may take from their errors to a right result: they probe whether the stopped rank is alive.
const SHRUNK: Duration = Duration::from_secs(6);

fn kind(error: &str) -> &str {
    error.split(':').next().unwrap_or_default()
}

fn stopped(name: &'static str, fabric: &'static str, size: usize, is_noticed: bool, lengths: &[usize]) {
    test(name, fabric, LIMIT, |mut test| {
        if is_noticed {
            test.liveness = NOTICED;
        }
        for (at, length) in lengths.iter().enumerate() {
            let mut ranks = test.group(size);
            let (lost, round) = ((1 + at) % size, 2 + at);
            tell(&mut ranks, &[&format!("loop {length}"), "shrink", &format!("reduce {length}")]);
            for round in 1..=round {
                ranks[lost].expect(&format!("round {round}: {}", sum(0..size)));
            }
            let stopped = Instant::now();
            ranks[lost].signal(Signal::STOP);
            let lost_rank = ranks.remove(lost);
            let errors: Vec<_> = ranks.iter().map(|rank| rank.failure_until(stopped + 2 * LIMIT)).collect();
            assert!(errors.iter().all(|error| KINDS.contains(&kind(error))), "{errors:?}");
            let names = [format!("ranks [{lost}]"), format!("rank {lost} is lost")];
            let named = errors.iter().any(|error| names.iter().any(|name| error.contains(name)));
            assert!(named, "nobody names rank {lost}: {errors:?}");
            let failed = Instant::now();
            let left: Vec<usize> = (0..size).filter(|rank| *rank != lost).collect();
            go_on(&ranks, &left, size - 1);
            let shrunk = failed.elapsed();
            println!("{fabric}, {size} ranks, {length}: errors {:?}, then {shrunk:?}", failed - stopped);
            assert!(shrunk < SHRUNK, "{shrunk:?}");
            lost_rank.signal(Signal::CONT);
            let error = lost_rank.failure_until(Instant::now() + 2 * LIMIT);
            assert!(KINDS.contains(&kind(&error)), "{error}");
            let error = lost_rank.failure_until(Instant::now() + STEP);
            let expected = format!("LeftOut: group `tests`: the others went on without rank {lost}, ");
            assert!(error.starts_with(&expected), "{error}");
            // Its calls after that, in a group that is over.
            assert_eq!(kind(&lost_rank.failure_until(Instant::now() + STEP)), "Over");
            lost_rank.end();
            close(ranks);
        }
    });
}

macro_rules! stops {
    ($($name:ident: $fabric:literal, $size:literal, $is_noticed:literal, $lengths:expr;)*) => {
        $(#[test] fn $name() {
            stopped(concat!("stopped::", stringify!($name)), $fabric, $size, $is_noticed, &$lengths);
        })*
    };
}
stops! {
    two_run_into_their_limit_over_shm: "shm", 2, false, [1_000];
    four_run_into_their_limit_over_shm: "shm", 4, false, [1_000_000];
    three_run_into_their_limit_over_tcp: "tcp", 3, false, [1_000, 1_000_000];
    three_notice_it_over_shm: "shm", 3, true, [1_000, 1_000_000];
    four_notice_it_over_tcp: "tcp", 4, true, [1_000_000];
}

//! A rank that is killed while all ranks are in calls: the others notice, and go on without it.

use std::time::Instant;

use rustix::process::Signal;

use crate::{
    harness::{LIMIT, Other, close, sum, tell, test},
    rdma::patient,
};

/// Lengths of values: of a few messages, and long enough for the kill to interrupt.
const LENGTHS: [usize; 2] = [1_000, 1_000_000];

/// The errors of a rank that notices the loss of `lost` itself, or receives it from another.
fn names_the_lost(error: &str, lost: usize) -> bool {
    let received = error.strip_prefix("Over: the group is over: ");
    let noticed = error.strip_prefix("RankLost: ");
    received.or(noticed).is_some_and(|why| why.contains(&format!("rank {lost} is lost: ")))
}

/// The ranks in `left`, by their original numbers, agree and get the right sum.
pub(crate) fn go_on(ranks: &[Other], left: &[usize], size: usize) {
    for (rank, other) in ranks.iter().enumerate() {
        other.expect(&format!("shrunk to {rank} of {size}"));
    }
    for other in ranks {
        other.expect(&format!("round 1: {}", sum(left.iter().copied())));
    }
}

/// Each time another rank, after another round.
fn killed(name: &'static str, fabric: &'static str, size: usize) {
    test(name, fabric, patient(LIMIT), |test| {
        for (at, length) in LENGTHS.into_iter().enumerate() {
            let mut ranks = test.group(size);
            let (lost, round) = ((size - 1 + at) % size, 2 + 3 * at);
            tell(&mut ranks, &[&format!("loop {length}"), "shrink", &format!("reduce {length}")]);
            for round in 1..=round {
                ranks[lost].expect(&format!("round {round}: {}", sum(0..size)));
            }
            let killed = Instant::now();
            ranks[lost].signal(Signal::KILL);
            ranks.remove(lost).kill();
            for rank in &ranks {
                let error = rank.failure_until(killed + 2 * test.limit);
                assert!(names_the_lost(&error, lost), "without {lost}: {error}");
            }
            let noticed = killed.elapsed();
            let left: Vec<usize> = (0..size).filter(|rank| *rank != lost).collect();
            go_on(&ranks, &left, size - 1);
            println!(
                "{fabric}, {size} ranks, {length} values: errors {noticed:?}, then {:?}",
                killed.elapsed() - noticed
            );
            close(ranks);
        }
    });
}

macro_rules! sizes {
    ($($(#[$mark:meta])? $name:ident: $fabric:literal, $size:literal;)*) => {
        $(#[test] $(#[$mark])? fn $name() { killed(concat!("killed::", stringify!($name)), $fabric, $size); })*
    };
}
sizes! {
    one_of_two_over_shm: "shm", 2;
    one_of_three_over_shm: "shm", 3;
    one_of_four_over_shm: "shm", 4;
    one_of_eight_over_shm: "shm", 8;
    one_of_two_over_tcp: "tcp", 2;
    one_of_three_over_tcp: "tcp", 3;
    one_of_four_over_tcp: "tcp", 4;
    #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
    one_of_two_over_verbs: "verbs", 2;
    #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
    one_of_three_over_verbs: "verbs", 3;
    #[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
    one_of_four_over_verbs: "verbs", 4;
}

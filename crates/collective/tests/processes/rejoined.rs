//! Ranks that come back: a restarted process, and one that was stopped for too long.

use std::time::Instant;

use rustix::process::Signal;

use crate::{
    harness::{LIMIT, Other, STEP, close, sum, tell, test},
    killed::go_on,
};

const SIZE: usize = 3;

/// All ranks are in one group, the last of which has come back, and get the right sum.
fn are_whole(mut ranks: Vec<Other>) {
    for (rank, other) in ranks[..SIZE - 1].iter().enumerate() {
        other.expect(&format!("grown to {rank} of {SIZE}"));
    }
    ranks[SIZE - 1].expect(&format!("joined {} of {SIZE}", SIZE - 1));
    tell(&mut ranks, &["reduce 1000", "reduce 1000000"]);
    for rank in ranks.iter().chain(&ranks) {
        rank.expect(&format!("round 1: {}", sum(0..SIZE)));
    }
    close(ranks);
}

/// `lost` is killed, and restarted after the others went on without it, or before they notice.
fn started_again(name: &'static str, fabric: &'static str, lost: usize, go_on_first: bool) {
    test(name, fabric, LIMIT, |mut test| {
        // A process starts slowly on a busy machine.
        test.limit = STEP;
        let mut ranks = test.group(SIZE);
        ranks.remove(lost).kill();
        if go_on_first {
            tell(&mut ranks, &["shrink", "reduce 1000"]);
            let left: Vec<usize> = (0..SIZE).filter(|rank| *rank != lost).collect();
            go_on(&ranks, &left, SIZE - 1);
        }
        let again = test.newcomer(lost, SIZE);
        again.expect("waiting");
        tell(&mut ranks, &["admit"]);
        ranks.push(again);
        are_whole(ranks);
    });
}

#[test]
fn one_that_was_killed_comes_back_over_shm() {
    started_again("rejoined::one_that_was_killed_comes_back_over_shm", "shm", 1, true);
}

#[test]
fn the_first_that_was_killed_comes_back_over_tcp() {
    started_again("rejoined::the_first_that_was_killed_comes_back_over_tcp", "tcp", 0, true);
}

#[test]
fn one_comes_back_before_it_is_missed_over_shm() {
    started_again("rejoined::one_comes_back_before_it_is_missed_over_shm", "shm", 0, false);
}

#[test]
fn one_comes_back_before_it_is_missed_over_tcp() {
    started_again("rejoined::one_comes_back_before_it_is_missed_over_tcp", "tcp", 2, false);
}

fn stopped(name: &'static str, fabric: &'static str) {
    test(name, fabric, LIMIT, |test| {
        let mut ranks = test.group(SIZE);
        let mut away = ranks.remove(1);
        away.signal(Signal::STOP);
        tell(&mut ranks, &["reduce 1000", "shrink", "reduce 1000"]);
        ranks.iter().for_each(|rank| drop(rank.failure_until(Instant::now() + 2 * LIMIT)));
        go_on(&ranks, &[0, 2], SIZE - 1);
        away.signal(Signal::CONT);
        away.tell("shrink");
        let error = away.failure_until(Instant::now() + STEP);
        assert!(error.starts_with("LeftOut: "), "{error}");
        away.tell("rejoin");
        tell(&mut ranks, &["admit"]);
        ranks.push(away);
        are_whole(ranks);
    });
}

#[test]
fn one_that_was_stopped_comes_back_over_shm() {
    stopped("rejoined::one_that_was_stopped_comes_back_over_shm", "shm");
}

#[test]
fn one_that_was_stopped_comes_back_over_tcp() {
    stopped("rejoined::one_that_was_stopped_comes_back_over_tcp", "tcp");
}

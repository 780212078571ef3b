//! A failed run's plan shrinks to what matters, and the line that the report prints runs exactly that again.
//!
//! Runs only with `--features planted-bugs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster;
mod shrunk;

use cluster::{run_planned, run_seed};
use shrunk::shrunk;
use sim::{Plan, Shrunk};
use testpoints::plant;

/// A failure of a seed with at least four entries in its plan, and what is left of it.
fn found_and_shrunk(bug: &'static str) -> Shrunk {
    let _planted = plant(bug);
    let with_many_faults = |seed| run_seed(seed).err().filter(|failure| failure.plan.split(',').count() >= 4);
    let first = (0..200).find_map(with_many_faults);
    let first = first.expect("a seed with a plan of four entries finds the bug");
    let (seed, before, kind) = (first.seed, first.plan.clone(), first.violation.kind());
    let shrunk = shrunk(first);
    eprintln!("before: {before}\n{}", shrunk.failure);
    assert_eq!(shrunk.failure.violation.kind(), kind);

    let given = format!("SIM_SEED={seed} SIM_PLAN=\"{}\" cargo test", shrunk.plan);
    assert!(shrunk.failure.replay.starts_with(&given), "{}", shrunk.failure.replay);
    let read_back: Plan = shrunk.plan.to_string().parse().unwrap();
    let again = run_planned(seed, Some(&read_back)).unwrap_err();
    assert_eq!((again.hash, &again.violation), (shrunk.failure.hash, &shrunk.failure.violation));
    shrunk
}

#[test]
fn a_bug_that_traffic_alone_finds_needs_no_fault() {
    let shrunk = found_and_shrunk("a receive's memory goes back while the peer may write it");
    assert!(shrunk.plan.entries.len() <= 1, "{}", shrunk.plan);
}

#[test]
fn a_bug_that_needs_a_fault_keeps_that_and_at_most_one_more() {
    let shrunk = found_and_shrunk("memory of a broken connection stays lent");
    assert!((1..=2).contains(&shrunk.plan.entries.len()), "{}", shrunk.plan);
}

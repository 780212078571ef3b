//! A failed run's plan shrinks to what matters, and the line that the report prints runs exactly that again.
//!
//! Runs only with `--features planted-bugs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use tensorwire_sim::Plan;
use tensorwire_testpoints::plant;

use crate::{
    cluster::{run_planned, run_seed},
    shrunk::shrunk,
};

/// Entries that may be left of a plan: what the bug needs besides traffic, and one more.
const ENTRIES_MAX: usize = 2;

#[test]
fn a_planted_bugs_plan_shrinks_and_replays() {
    let _planted = plant("a receive's memory is freed while the peer may write it");
    let with_many_faults = |seed| run_seed(seed).err().filter(|failure| failure.plan.split(',').count() >= 5);
    let first = (0..200).find_map(with_many_faults);
    let first = first.expect("a seed with a plan of five entries finds the bug");
    let (seed, before) = (first.seed, first.plan.clone());
    let kind = first.violation.kind();
    let shrunk = shrunk(first);
    eprintln!("before: {before}\n{}", shrunk.failure);
    assert_eq!(shrunk.failure.violation.kind(), kind);
    assert!(shrunk.plan.entries.len() <= ENTRIES_MAX, "{}", shrunk.plan);

    let given = format!("SIM_SEED={seed} SIM_PLAN=\"{}\" cargo test", shrunk.plan);
    assert!(shrunk.failure.replay.starts_with(&given), "{}", shrunk.failure.replay);
    let read_back: Plan = shrunk.plan.to_string().parse().unwrap();
    let again = run_planned(seed, Some(&read_back)).unwrap_err();
    assert_eq!((again.hash, &again.violation), (shrunk.failure.hash, &shrunk.failure.violation));
}

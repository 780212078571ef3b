//! A failed seed with the smallest plan that fails the same way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

use std::time::Duration;

use tensorwire_sim::{Failure, Plan, Shrunk, shrink};

use crate::cluster::run_planned;

/// Runs that shrinking may take.
const RUNS_MAX: u32 = 200;

/// Time that it may take.
const TIME_MAX: Duration = Duration::from_secs(60);

/// Shrinks the plan of a `failure` of the cluster.
pub(crate) fn shrunk(failure: Box<Failure>) -> Shrunk {
    let seed = failure.seed;
    shrunk_by(failure, |plan| run_planned(seed, Some(plan)).err())
}

/// Shrinks the plan of `failure`. `run` runs another plan with its seed.
pub(crate) fn shrunk_by(failure: Box<Failure>, run: impl FnMut(&Plan) -> Option<Box<Failure>>) -> Shrunk {
    let seed = failure.seed;
    let plan = failure.plan.parse().unwrap();
    let began = now();
    let may_go_on = || now() - began < TIME_MAX;
    let shrunk = shrink(failure, plan, RUNS_MAX, may_go_on, run);
    eprintln!("seed {seed}: {} entries are left after {} runs", shrunk.plan.entries.len(), shrunk.runs);
    shrunk
}

/// Time outside the simulation.
#[allow(clippy::disallowed_methods)] // bounds work on a failure that was found already, and decides nothing in a world
fn now() -> Duration {
    use std::{sync::OnceLock, time::Instant};
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed()
}

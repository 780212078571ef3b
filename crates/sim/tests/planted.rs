//! Three bugs, planted one at a time: the same scenario and the same general checks as for every seed find each.
//!
//! Runs only with `--features planted-bugs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster;

use std::sync::{Mutex, MutexGuard, PoisonError};

use cluster::{TRANSFERS_MIN, run_seed};
use protocol::planted::{Bug, plant};
use sim::Violation;
use verbs_reactor::planted::lose_wake_ups;

/// Among this many seeds each bug must be found.
const SEEDS: u64 = 20;

/// Bugs are planted for the whole process: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Takes whatever was planted out again, also after a failed test.
struct Planted {
    _alone: MutexGuard<'static, ()>,
}

impl Planted {
    fn new(plant: impl FnOnce()) -> Self {
        let planted = Self { _alone: ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner) };
        plant();
        planted
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        plant(None);
        lose_wake_ups(false);
    }
}

/// The first finding, which must be the same when its seed runs again.
fn first_finding() -> (u64, Violation) {
    let finding = (0..SEEDS).find_map(|seed| run_seed(seed).err().map(|failure| (seed, failure)));
    let (seed, failure) = finding.expect("no seed found the bug");
    let again = run_seed(seed).unwrap_err();
    assert_eq!((again.hash, &again.violation), (failure.hash, &failure.violation));
    eprintln!("{failure}");
    (seed, failure.violation)
}

#[test]
fn a_granted_buffer_freed_early_is_found() {
    let _planted = Planted::new(|| plant(Some(Bug::GrantFreedEarly)));
    let (seed, violation) = first_finding();
    // The write into freed memory, or, sooner, a value whose memory is gone.
    assert!(matches!(violation, Violation::Memory(_) | Violation::Data(_)), "seed {seed}: {violation}");
}

#[test]
fn a_skipped_credit_is_found() {
    let _planted = Planted::new(|| plant(Some(Bug::CreditSkipped)));
    let (seed, violation) = first_finding();
    assert!(matches!(violation, Violation::Stuck(_)), "seed {seed}: {violation}");
}

#[test]
fn a_lost_wake_up_is_found() {
    let _planted = Planted::new(|| lose_wake_ups(true));
    let (seed, violation) = first_finding();
    assert!(matches!(violation, Violation::Stuck(_)), "seed {seed}: {violation}");
}

#[test]
fn nothing_is_found_when_nothing_is_planted() {
    let _planted = Planted::new(|| {});
    for seed in 0..SEEDS {
        assert!(run_seed(seed).unwrap().transfers >= TRANSFERS_MIN);
    }
}

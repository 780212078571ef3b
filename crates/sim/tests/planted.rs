//! Planted bugs, of kinds that have occurred before, one at a time: the scenario and the checks of all seeds find each.
//! They are listed by their points in the source (`tensorwire_testpoints::planted!`).
//!
//! Runs only with `--features planted-bugs`. `SIM_PLANTED_SEEDS=2000` tries up to so many seeds for each;
//! `SIM_PLANTED_FROM=any` begins anywhere (and prints where), `SIM_PLANTED_FROM=7` with that seed; `SIM_PLANTED=WORD` plants
//! only those whose name has the word.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tensorwire_sim::Failure;
use tensorwire_testpoints::plant;

use crate::{
    calls,
    cluster::run_seed,
    figures::{any_number, number, threads},
    pages,
    points::{Point, in_source},
    subscriptions,
};

/// Each bug must be found within this many seeds, if `SIM_PLANTED_SEEDS` is not set.
const SEEDS: u64 = 256;

/// The least number of files with planted bugs.
const FILES_MIN: usize = 10;

/// Seeds that show that nothing is found when nothing is planted.
const SEEDS_WITHOUT: u64 = 8;

fn from() -> u64 {
    match std::env::var("SIM_PLANTED_FROM") {
        Ok(text) if text == "any" => any_number() >> 1,
        Ok(_) => number("SIM_PLANTED_FROM").unwrap_or_default(),
        Err(_) => 0,
    }
}

/// The number of seeds until the bug `name` was found, and the failure. That seed runs twice, and must fail in the same
/// way.
fn found(point: &Point, from: u64, seeds: u64) -> Option<(u64, Box<Failure>)> {
    let name: &'static str = point.name.clone().leak();
    let run = |seed| {
        let _planted = plant(name);
        let scenario = match point {
            _ if point.is_of_subscriptions() => subscriptions::run_seed(seed).map(drop),
            _ if point.is_of_calls() => calls::run_seed(seed).map(drop),
            _ if point.is_of_pages() => pages::run_seed(seed).map(drop),
            _ => run_seed(seed).map(drop),
        };
        scenario.err()
    };
    let (seed, failure) = (from..from.saturating_add(seeds)).find_map(|seed| Some((seed, run(seed)?)))?;
    let again = run(seed).expect("the seed finds it again");
    assert_eq!((again.hash, &again.violation), (failure.hash, &failure.violation), "{name}, seed {seed}");
    Some((seed - from + 1, failure))
}

fn report(point: &Point, found: Option<&(u64, Box<Failure>)>) -> String {
    let text = match found {
        Some((seeds, failure)) => {
            let violation: String = failure.violation.to_string().chars().take(100).collect();
            format!("{seeds:>5} seeds: {violation}")
        }
        None => "not found".to_owned(),
    };
    format!("{} ({}): {text}", point.name, point.file.display())
}

#[test]
fn every_planted_bug_is_found() {
    let (from, seeds) = (from(), number("SIM_PLANTED_SEEDS").unwrap_or(SEEDS));
    let all = in_source("planted");
    let files: BTreeSet<_> = all.iter().map(|point| &point.file).collect();
    assert!(files.len() >= FILES_MIN, "{files:?}");
    let word = std::env::var("SIM_PLANTED").unwrap_or_default();
    let bugs: Vec<_> = all.iter().filter(|point| point.name.contains(&word)).collect();
    eprintln!("{} bugs in {} files, up to {seeds} seeds each from seed {from}", bugs.len(), files.len());
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // A bug is planted for its thread only.
    thread::scope(|scope| {
        for _ in 0..threads() {
            scope.spawn(|| {
                while let Some(point) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = found(point, from, seeds);
                    eprintln!("{}", report(point, found.as_ref()));
                    if found.is_none() {
                        missed.lock().unwrap().push(&point.name);
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found within {seeds} seeds from {from}: {missed:?}");
}

#[test]
fn nothing_is_found_when_nothing_is_planted() {
    for seed in 0..SEEDS_WITHOUT {
        run_seed(seed).unwrap();
        subscriptions::run_seed(seed).unwrap();
        pages::run_seed(seed).unwrap();
        calls::run_seed(seed).unwrap();
    }
}

//! Fresh seeds until the clock runs out.
//!
//! `SIM_SOAK=30m cargo test --release -p tensorwire-sim --test all soak -- --ignored --nocapture`; `SIM_FROM=7` begins
//! with that seed instead of a random one, `SIM_THREADS=1` uses one core.
//!
//! Each batch of seeds runs in a process of its own, whose end frees what crashed nodes have leaked: this test again,
//! with `SIM_BATCH` set to the number of its seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

use std::{
    env,
    process::{Command, Stdio},
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use tensorwire_sim::Failure;

use super::promised;
use crate::{
    cluster::{Report, run_long, run_seed},
    figures::{Figures, any_number, now, number, threads},
    shrunk::shrunk,
};

/// How long a soak is if `SIM_SOAK` is not set.
const LENGTH: Duration = Duration::from_secs(60);

/// How often progress is printed.
const PROGRESS: Duration = Duration::from_secs(10);

/// One of this many seeds has many rounds of faults, which show small leaks.
const LONG_EVERY: u64 = 16;

/// Rounds of such a seed.
const LONG_ROUNDS: u32 = 20;

/// "90s", "30m" or "2h".
fn length_of(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return None,
    };
    Some(Duration::from_secs(number.parse::<u64>().ok()? * seconds))
}

/// Seeds of a batch.
const BATCH: u64 = 48;

/// The report of a seed, or its failure with the command that runs it again.
fn soaked(seed: u64) -> Result<Report, String> {
    let is_long = seed.is_multiple_of(LONG_EVERY);
    let ended = if is_long { run_long(seed, LONG_ROUNDS) } else { run_seed(seed) };
    let report = ended.map_err(|failure| described(failure, is_long))?;
    promised(&report).map_err(|problem| format!("seed {seed}: {problem}"))?;
    Ok(report)
}

fn described(mut failure: Box<Failure>, is_long: bool) -> String {
    if is_long {
        failure.replay = format!("SIM_ROUNDS={LONG_ROUNDS} {}", failure.replay);
        return failure.to_string();
    }
    shrunk(failure).failure.to_string()
}

/// Runs the seeds of a batch, in its process, and prints their figures.
fn batch(from: u64, count: u64) {
    let mut figures = Figures::default();
    for seed in from..from + count {
        match soaked(seed) {
            Ok(report) => figures.add(&report),
            Err(failure) => panic!("{failure}"),
        }
    }
    println!("\n{}", figures.told());
}

/// The output of a batch, or that it failed; the reason is on standard error.
type Ended = Result<String, String>;

fn ended(from: u64) -> Ended {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["seeds::soak::soak_finds_nothing", "--exact", "--ignored", "--nocapture"]);
    command.env("SIM_FROM", from.to_string()).env("SIM_BATCH", BATCH.to_string());
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() { Ok(told) } else { Err(format!("a seed from {from} on failed: see above")) }
}

/// Runs batches until `until`, or until the receiver is dropped.
fn work(next: &AtomicU64, until: Duration, tell: &SyncSender<Ended>) {
    while now() < until {
        if tell.send(ended(next.fetch_add(BATCH, Ordering::Relaxed))).is_err() {
            return;
        }
    }
}

#[test]
#[ignore = "runs until its time is over: SIM_SOAK=30m"]
fn soak_finds_nothing() {
    // Halved, so that counting up does not overflow.
    let from = number("SIM_FROM").unwrap_or_else(|| any_number() >> 1);
    if let Some(count) = number("SIM_BATCH") {
        return batch(from, count);
    }
    let length = env::var("SIM_SOAK").map_or(LENGTH, |text| {
        length_of(&text).unwrap_or_else(|| panic!("SIM_SOAK={text}: give a number and s, m or h, as in 30m"))
    });
    eprintln!("soak of {length:?} from seed {from}, 1 of {LONG_EVERY} with {LONG_ROUNDS} rounds of faults");
    let (next, began) = (AtomicU64::new(from), now());
    let mut figures = Figures::default();
    let mut told = began;
    thread::scope(|scope| {
        let (tell, hear) = sync_channel(16);
        for _ in 0..threads() {
            let (next, tell) = (&next, tell.clone());
            scope.spawn(move || work(next, began + length, &tell));
        }
        drop(tell);
        loop {
            match hear.recv_timeout(PROGRESS) {
                Ok(Ok(lines)) => lines.lines().for_each(|line| figures.hear(line)),
                Ok(Err(failure)) => panic!("{failure}"),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if now() - told >= PROGRESS {
                told = now();
                eprintln!("{}", figures.progress(told - began));
            }
        }
    });
    eprintln!("{figures}\n{}", figures.progress(now() - began));
    assert!(figures.runs > 0);
}

//! Streams of frames from one process to another on one host: Tensorwire's subscriptions, and beside them, in turns, the publishers and
//! subscribers of iceoryx2 and zenoh. These are in the program of `benches/peers`, whose Cargo.lock is its own.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime

mod measure;
mod report;
mod stream;

use std::{path::PathBuf, time::Duration};

use clap::Parser;
use tensorwire_benches::{Failure, frames::Policy};

use crate::{
    measure::{Flow, Loss},
    report::{print_flows, print_losses},
};

/// Environment variable of a child: its part.
const PART: &str = "TENSORWIRE_BENCH_FRAMES";

/// The time that a slow reader takes for a frame.
const SLOW: Duration = Duration::from_millis(20);

/// The time between two frames for a slow reader.
const PACE: Duration = Duration::from_millis(5);

/// Measures streams of frames: with a reader that reads each frame once, with one that takes 20 ms for each while the writer has one
/// every 5 ms, and when the writer is killed. Every frame is written and read whole, and checked.
#[derive(Debug, Parser)]
struct Arguments {
    /// The program of the other systems: `cargo build --release --manifest-path benches/peers/Cargo.toml --no-default-features --features
    /// iceoryx2,zenoh`. Without it, only Tensorwire is measured.
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Mebibytes of a frame.
    #[arg(long, default_value_t = 16, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
    mebibytes: usize,
    /// Only rows with this word; may be given several times.
    #[arg(long)]
    only: Vec<String>,
    /// Rounds, each of which measures every row once.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of a measurement.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// How often the writer of each row is killed.
    #[arg(long, default_value_t = 3)]
    kills: u32,
}

/// A system, and how it is used.
#[derive(Debug, Clone, Copy)]
struct Row {
    system: &'static str,
    way: &'static str,
    policy: Policy,
    ahead: u8,
}

impl Row {
    fn words(&self) -> [&'static str; 3] {
        let policy = if self.policy == Policy::Every { "every" } else { "latest" };
        [self.system, self.way, policy]
    }
}

/// Rows whose reader wants the newest frame let one frame wait, the least. Tensorwire's default is two.
fn rows() -> Vec<Row> {
    let row = |system, way, policy, ahead| Row { system, way, policy, ahead };
    let mut rows = Vec::new();
    for (policy, ahead) in [(Policy::Every, 2), (Policy::Latest, 1)] {
        rows.extend(["shm", "view", "tcp"].map(|way| row("tensorwire", way, policy, ahead)));
        rows.push(row("iceoryx2", "shm", policy, ahead));
        rows.extend(["shm", "tcp"].map(|way| row("zenoh", way, policy, ahead)));
    }
    rows.push(row("tensorwire", "shm", Policy::Latest, 2));
    rows
}

/// What was measured of a row.
#[derive(Debug)]
struct Measured {
    row: Row,
    fast: Vec<Flow>,
    slow: Vec<Flow>,
    losses: Vec<Loss>,
    /// Why nothing more is measured.
    failure: Option<String>,
}

impl Measured {
    fn note<T>(&mut self, measured: Result<T, Failure>) -> Option<T> {
        match measured {
            Ok(measured) => Some(measured),
            Err(failure) => {
                self.failure = Some(failure.to_string());
                None
            }
        }
    }

    fn round(&mut self, arguments: &Arguments) {
        let fast = measure::flow(arguments, self.row, Duration::ZERO, Duration::ZERO);
        let fast = self.note(fast);
        self.fast.extend(fast);
        if self.failure.is_none() {
            let slow = measure::flow(arguments, self.row, PACE, SLOW);
            let slow = self.note(slow);
            self.slow.extend(slow);
        }
    }

    fn kill(&mut self, arguments: &Arguments, number: u32) {
        let loss = measure::loss(arguments, self.row, number);
        let loss = self.note(loss);
        self.losses.extend(loss);
    }
}

fn main() -> Result<(), Failure> {
    if let Ok(part) = std::env::var(PART) {
        let part = part.parse()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        return runtime.block_on(async { tokio::spawn(stream::run(part)).await? });
    }
    let arguments = Arguments::parse();
    let is_wanted = |row: &Row| arguments.only.iter().all(|word| row.words().contains(&word.as_str()));
    let is_there = |row: &Row| row.system == "tensorwire" || arguments.peers.is_some();
    let rows = rows().into_iter().filter(|row| is_wanted(row) && is_there(row));
    let mut measured: Vec<Measured> = rows
        .map(|row| Measured { row, fast: Vec::new(), slow: Vec::new(), losses: Vec::new(), failure: None })
        .collect();
    let live = |row: &&mut Measured| row.failure.is_none();
    for _ in 0..arguments.rounds {
        measured.iter_mut().filter(live).for_each(|row| row.round(&arguments));
    }
    for number in 0..arguments.kills {
        measured.iter_mut().filter(live).for_each(|row| row.kill(&arguments, number));
    }
    print_flows(&arguments, &measured);
    print_losses(&measured);
    Ok(())
}

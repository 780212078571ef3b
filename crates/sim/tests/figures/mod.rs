//! Figures of many runs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use tensorwire_sim::{Handle, World};

use crate::cluster::{Kinds, Report};

/// Sums over runs.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) runs: u64,
    /// Operations that succeeded, and those that failed.
    pub(crate) operations: [u64; 2],
    pub(crate) events: u64,
    pub(crate) crashes: u64,
    pub(crate) transfers: u64,
    pub(crate) kinds: Kinds,
    pub(crate) marks: BTreeMap<String, u64>,
}

impl Figures {
    pub(crate) fn add(&mut self, report: &Report) {
        let Report { summary, transfers, kinds, .. } = report;
        self.runs += 1;
        self.operations[0] += summary.operations_done;
        self.operations[1] += summary.operations_failed;
        self.events += summary.events;
        self.crashes += summary.crashes;
        self.transfers += transfers;
        kinds.iter().for_each(|(kind, count)| *self.kinds.entry(*kind).or_default() += count);
        let marks = summary.marks.iter();
        marks.for_each(|(mark, count)| *self.marks.entry((*mark).to_owned()).or_default() += count);
    }

    /// The figures in lines, for another process.
    pub(crate) fn told(&self) -> String {
        let Self { runs, operations: [well, otherwise], events, crashes, transfers, marks, .. } = self;
        let marks: String = marks.iter().map(|(mark, count)| format!("@@mark {count} {mark}\n")).collect();
        format!("@@sums {runs} {well} {otherwise} {events} {crashes} {transfers}\n{marks}")
    }

    /// Adds the figures of a line of another process; lines without figures are ignored.
    pub(crate) fn hear(&mut self, line: &str) {
        if let Some((count, mark)) = line.strip_prefix("@@mark ").and_then(|line| line.split_once(' ')) {
            *self.marks.entry(mark.to_owned()).or_default() += count.parse::<u64>().unwrap();
        }
        if let Some(sums) = line.strip_prefix("@@sums ") {
            let sums: Vec<u64> = sums.split(' ').map(|sum| sum.parse().unwrap()).collect();
            let [well, otherwise] = &mut self.operations;
            let own =
                [&mut self.runs, well, otherwise, &mut self.events, &mut self.crashes, &mut self.transfers];
            own.into_iter().zip(sums).for_each(|(own, sum)| *own += sum);
        }
    }

    /// One line of progress after `elapsed`.
    pub(crate) fn progress(&self, elapsed: Duration) -> String {
        let rate = self.runs as f64 / elapsed.as_secs_f64();
        let operations: u64 = self.operations.iter().sum();
        format!(
            "{:>6.0} s: {} seeds, {rate:.2} a second, {operations} operations, {} marks reached",
            elapsed.as_secs_f64(),
            self.runs,
            self.marks.len()
        )
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runs, operations: [well, otherwise], events, crashes, transfers, kinds, marks } = self;
        let each = (*runs).max(1);
        writeln!(f, "marks: {marks:?}")?;
        writeln!(f, "transfers by kind: {kinds:?}")?;
        write!(
            f,
            "{runs} seeds: {well} operations well, {otherwise} otherwise, {} a seed; {transfers} transfers, {crashes} \
             crashes, {events} events",
            (well + otherwise) / each
        )
    }
}

/// Time outside the simulation, since the first call.
#[allow(clippy::disallowed_methods)] // measures how long runs take, and decides nothing in a world
pub(crate) fn now() -> Duration {
    use std::{sync::OnceLock, time::Instant};
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed()
}

/// A number that differs from run to run of this program.
pub(crate) fn any_number() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

/// Threads to run worlds on.
pub(crate) fn threads() -> usize {
    let all = thread::available_parallelism().map_or(1, |threads| threads.get().min(8));
    number("SIM_THREADS").map_or(all, |threads| threads as usize)
}

/// Calls `run` with each number below `count`, on several [`threads`]: worlds share nothing.
pub(crate) fn for_each_below(count: u64, run: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..threads() {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        return;
                    }
                    run(index);
                }
            });
        }
    });
}

/// Runs each seed from `SIM_FROM` on twice, `SIM_SEEDS` or `seeds` of them: both runs must be the same. With `SIM_SEED`, runs that one and
/// prints its figures. The test called `name` replays a seed. Returns the marks that were reached; none with `SIM_SEED`.
pub(crate) fn every_seed_twice<Running: Future<Output = ()>>(
    name: &'static str,
    seeds: u64,
    scenario: impl Fn(Handle) -> Running + Sync,
) -> BTreeSet<&'static str> {
    let run = |seed| {
        let world = World::new(seed);
        world.replayed_by(name);
        world.run(scenario(world.handle())).unwrap_or_else(|failure| panic!("{failure}"));
        world.finish().unwrap_or_else(|failure| panic!("{failure}"))
    };
    if let Some(seed) = number("SIM_SEED") {
        eprintln!("{:?}", run(seed));
        return BTreeSet::new();
    }
    let (from, seeds) = (number("SIM_FROM").unwrap_or_default(), number("SIM_SEEDS").unwrap_or(seeds));
    let marks = Mutex::new(BTreeSet::new());
    for_each_below(seeds, |index| {
        let seed = from.wrapping_add(index);
        let summary = run(seed);
        assert_eq!(summary, run(seed), "seed {seed} gave two different runs");
        marks.lock().unwrap().extend(summary.marks.into_keys());
    });
    marks.into_inner().unwrap()
}

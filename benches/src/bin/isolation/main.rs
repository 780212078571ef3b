//! How much a rank of one group that is stopped, killed or hostile slows another group of the same process.
//!
//! Group A has two processes, `p` and `q`, on the first CPU. `p` times its all-reduces. Group B has `p` and a rank `r`,
//! on another CPU, that is disturbed. The baseline is the same with `bystander` in the place of `p` in group B: `r`
//! costs the machine the same, but does not reach `p`.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime

mod child;

use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use rustix::{
    process::Signal,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use tensorwire::{Worker, collective::store::MemoryStore};
use tensorwire_benches::{Failure, process::Process};

/// Environment variable of a child: its role.
const ROLE: &str = "TENSORWIRE_BENCH_ISOLATION";

/// The time between two kills.
const KILLED_AFTER: Duration = Duration::from_millis(50);

/// Sizes of an all-reduce in bytes, each with the divisor of its number of calls.
const SIZES: [(usize, u32); 2] = [(8, 1), (1 << 20, 10)];

/// Times one group's calls while a rank of another group of the same process is stopped, killed or hostile.
#[derive(Debug, Parser)]
struct Arguments {
    /// Rounds, each of which measures every case once.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Calls of 8 bytes that are timed together; of 1 MiB a tenth of this number.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(10..))]
    calls: u32,
    /// The fabric; may be given several times.
    #[arg(long = "fabric", value_parser = ["shm", "tcp"], default_values = ["shm", "tcp"])]
    fabrics: Vec<String>,
    /// The disturbance of the rank; may be given several times.
    #[arg(long = "case", value_enum, default_values_t = Case::value_variants().to_vec())]
    cases: Vec<Case>,
    /// Threads of the measured process.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
}

/// The disturbance of the rank of group B.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Case {
    /// Nothing; no call is under way.
    Idle,
    /// SIGSTOP, while calls are under way.
    Stopped,
    /// SIGKILL, repeatedly, each time with a new process and a new group.
    Killed,
    /// It requests tensors that do not exist, as fast as it can.
    Hostile,
}

/// Nanoseconds of a call: the median and the mean of the calls that are timed together.
type Time = [f64; 2];

/// In each round: with the bystander in group B, and with the measured process.
type Times = Vec<(Time, Time)>;

/// Starts a process of this name.
type Start<'run> = Box<dyn Fn(&str) -> Result<Process, Failure> + 'run>;

fn main() -> Result<(), Failure> {
    if let Ok(role) = std::env::var(ROLE) {
        return child::run(&role);
    }
    let arguments = Arguments::parse();
    let [quiet, noisy] = two_cpus()?;
    pin(noisy)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let worker = runtime.block_on(Worker::client().start())?;
    let served = MemoryStore::new(worker.runtime().clone());
    served.serve(&worker)?;
    let store = worker.address();
    println!(
        "| fabric | all_reduce | group B's rank | elsewhere | in this process | ratio | from, to | of means |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for fabric in &arguments.fabrics {
        let start = |name: &str, cpu, threads| {
            Process::start(ROLE, &format!("{fabric} {name} {store} {cpu} {threads}"))
        };
        let mut stage = Stage {
            measured: start(&format!("p_{fabric}"), quiet, arguments.threads)?,
            partner: start(&format!("q_{fabric}"), quiet, 1)?,
            bystander: start(&format!("bystander_{fabric}"), noisy, 1)?,
            start: Box::new(move |name| start(name, noisy, 1)),
            fabric,
            groups: 0,
            refused: Vec::new(),
        };
        stage.measure_all(&arguments)?;
    }
    Ok(())
}

/// The processes of one fabric.
struct Stage<'run> {
    measured: Process,
    partner: Process,
    bystander: Process,
    start: Start<'run>,
    fabric: &'run str,
    groups: u32,
    /// For each round, the hostile rank's requests per second that the measured process refused.
    refused: Vec<f64>,
}

impl Stage<'_> {
    fn measure_all(&mut self, arguments: &Arguments) -> Result<(), Failure> {
        let a = format!("a_{}", self.fabric);
        self.measured.tell(&format!("join {a} 0 2"))?;
        self.partner.tell(&format!("join {a} 1 2"))?;
        self.measured.hear()?;
        self.partner.hear()?;
        self.time(8, arguments.calls)?;
        let mut times = vec![[Times::new(), Times::new()]; arguments.cases.len()];
        for _ in 0..arguments.rounds {
            for (case, times) in arguments.cases.iter().zip(&mut times) {
                let elsewhere = self.disturbed(*case, false, arguments.calls)?;
                let here = self.disturbed(*case, true, arguments.calls)?;
                for (times, both) in times.iter_mut().zip(elsewhere.into_iter().zip(here)) {
                    times.push(both);
                }
            }
        }
        for (case, times) in arguments.cases.iter().zip(&times) {
            for ((bytes, _), times) in SIZES.iter().zip(times) {
                print(self.fabric, *bytes, *case, times);
            }
        }
        if !self.refused.is_empty() {
            eprintln!(
                "{}: {:.0} requests/s of the hostile rank refused",
                self.fabric,
                quantile(self.refused.clone(), 0.5)
            );
        }
        Ok(())
    }

    /// The times of a call of each size, while a rank of a group with this process, or with the bystander, is disturbed.
    fn disturbed(&mut self, case: Case, is_here: bool, calls: u32) -> Result<[Time; SIZES.len()], Failure> {
        let mut disturbed = self.new_rank(case, is_here)?;
        match case {
            Case::Stopped => disturbed.signal(Signal::STOP)?,
            Case::Hostile => {
                disturbed.tell(&format!("flood {}", self.victim(is_here)))?;
                disturbed.hear()?;
            }
            Case::Idle | Case::Killed => {}
        }
        let (mut rank, begun) = (Some(disturbed), Instant::now());
        let mut times = [Time::default(); SIZES.len()];
        for ((bytes, fewer), time) in SIZES.iter().zip(&mut times) {
            self.begin(*bytes, calls / fewer)?;
            *time = loop {
                if case != Case::Killed {
                    break parsed(&self.measured.hear()?)?;
                }
                if let Some(time) = self.measured.hear_within(KILLED_AFTER)? {
                    break parsed(&time)?;
                }
                // The previous process is killed first.
                drop(rank.take());
                rank = Some(self.new_rank(case, is_here)?);
            };
            self.partner.hear()?;
        }
        if let (Case::Hostile, true, Some(rank)) = (case, is_here, &mut rank) {
            rank.tell("refused")?;
            self.refused.push(rank.hear()?.parse::<f64>()? / begun.elapsed().as_secs_f64());
        }
        Ok(times)
    }

    fn victim(&self, is_here: bool) -> String {
        format!("{}_{}", if is_here { "p" } else { "bystander" }, self.fabric)
    }

    /// A new group B. Calls of it are under way, unless it is idle.
    fn new_rank(&mut self, case: Case, is_here: bool) -> Result<Process, Failure> {
        self.groups += 1;
        let name = format!("b_{}_{}", self.fabric, self.groups);
        let mut rank = (self.start)(&format!("r_{name}"))?;
        let victim = if is_here { &mut self.measured } else { &mut self.bystander };
        victim.tell(&format!("aside {name} {}", case != Case::Idle))?;
        rank.tell(&format!("join {name} 1 2"))?;
        rank.hear()?;
        Ok(rank)
    }

    fn begin(&mut self, bytes: usize, calls: u32) -> Result<(), Failure> {
        self.measured.tell(&format!("reduce {bytes} {calls}"))?;
        self.partner.tell(&format!("reduce {bytes} {calls}"))
    }

    fn time(&mut self, bytes: usize, calls: u32) -> Result<(), Failure> {
        self.begin(bytes, calls)?;
        self.measured.hear()?;
        self.partner.hear().map(drop)
    }
}

fn print(fabric: &str, bytes: usize, case: Case, times: &Times) {
    let [elsewhere, here] = [|both: &(Time, Time)| both.0[0], |both: &(Time, Time)| both.1[0]]
        .map(|side| quantile(times.iter().map(side).collect(), 0.5) / 1e3);
    let ratios = |at: usize| times.iter().map(|(elsewhere, here)| here[at] / elsewhere[at]).collect();
    let [low, ratio, high] = [0.25, 0.5, 0.75].map(|share| quantile(ratios(0), share));
    let of_means = quantile(ratios(1), 0.5);
    let case = format!("{case:?}").to_lowercase();
    println!(
        "| {fabric} | {bytes} B | {case} | {elsewhere:.1} µs | {here:.1} µs | {ratio:.2} | {low:.2}, {high:.2} | {of_means:.2} |"
    );
}

/// The times in a child's line.
fn parsed(line: &str) -> Result<Time, Failure> {
    let (median, mean) = line.split_once(' ').ok_or_else(|| format!("no times: {line}"))?;
    Ok([median.parse()?, mean.parse()?])
}

fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    values.get((last * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// One CPU for group A, and another one.
fn two_cpus() -> Result<[usize; 2], Failure> {
    let set = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu));
    match (cpus.next(), cpus.next()) {
        (Some(quiet), Some(noisy)) => Ok([quiet, noisy]),
        _ => {
            Err("one CPU: group A needs one that a hostile rank does not use; allow this process two".into())
        }
    }
}

/// Runs this thread, and all threads that it starts, on this CPU.
fn pin(cpu: usize) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

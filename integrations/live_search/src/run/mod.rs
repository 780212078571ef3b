//! The whole story: a trainer and two services, queries all the while, and both kinds of processes killed and restarted.

mod http;
mod load;
mod process;
mod recall;
mod report;

use std::{
    io::Write as _,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use tokio::time::{sleep, timeout};

use crate::{
    inputs::Inputs,
    prepared::Prepared,
    run::{
        load::Load,
        process::Process,
        report::{Latency, Moved, Recovery, Report},
    },
    service::Stats,
    trainer::{RESTS, STEPPED},
};

pub(crate) use report::is_sound;

/// The longest duration of a start, of a recovery, and of the rest of the training.
const LIMIT: Duration = Duration::from_secs(300);
/// Between two looks at something that cannot be waited for.
const LOOK: Duration = Duration::from_millis(20);
/// The services and the only fabric that each uses.
const SERVICES: [(&str, &str); 2] = [("search-shm", "shm"), ("search-tcp", "tcp")];

/// Runs a trainer and two services, kills and restarts both kinds, and prints what was measured.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    inputs: Inputs,
    /// The version at which the training ends; it is higher if the events before take longer.
    #[arg(long, default_value_t = 60)]
    versions: u64,
    /// Queries in each second.
    #[arg(long, default_value_t = 10.0, value_parser = rate)]
    rate: f64,
    /// Seconds of each of the three measurements of latency.
    #[arg(long, default_value_t = 20.0, value_parser = rate)]
    seconds: f64,
    /// Write what was measured to this file, too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn rate(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|error| error.to_string())?;
    if (0.01..=1e4).contains(&value) { Ok(value) } else { Err("it is from 0.01 to 10000".to_owned()) }
}

/// The processes of a run.
struct Cast {
    trainer: Process,
    services: Vec<Process>,
    addresses: Arc<[String]>,
    held_out: Vec<(String, String)>,
    queries: Arc<[String]>,
}

/// Runs everything, and prints the table.
///
/// # Errors
/// If a file is missing, a process ends by itself, or something does not happen in time; the text says what.
pub async fn run(arguments: Arguments) -> Result<()> {
    let began = Instant::now();
    let packages = prepare(&arguments.inputs)?;
    let mut cast = Cast::start(&arguments.inputs, packages).await?;
    say(began, "both services answer with version 1, the encoder as it was trained before");
    let before = recall::measure(&cast.addresses, &cast.held_out, 1).await?;
    say(began, &format!("recall@10 is {:.3}", before.at_10));

    let each = Duration::from_secs_f64(1.0 / arguments.rate);
    let load = Load::start(cast.addresses.clone(), cast.queries.clone(), each);
    let latencies = latencies(&mut cast, &load, Duration::from_secs_f64(arguments.seconds), began).await?;
    let trainer = kill_trainer(&mut cast, &load, began).await?;
    let went_back = stats(&cast.addresses).await?.iter().map(|stats| stats.went_back).sum();
    // The one over TCP. What it has counted ends with it.
    let killed = stats(&cast.addresses).await?;
    let service = kill_service(&mut cast, &load, 1, began).await?;

    let until = arguments.versions.max(load.newest() + 5);
    cast.trainer.order(&format!("until {until}")).await?;
    say(began, &format!("training goes on to version {until}"));
    let line = cast.trainer.wait_for_line(RESTS, LIMIT).await?;
    let last: u64 = line.parse().with_context(|| format!("the trainer's version, {line:?}"))?;
    cast.wait_for_version(last).await?;
    let queries = report::Queries::of(&load.between(began, Instant::now()));
    drop(load);
    let after = recall::measure(&cast.addresses, &cast.held_out, last).await?;
    say(began, &format!("recall@10 is {:.3}", after.at_10));

    let ended = stats(&cast.addresses).await?;
    let moved = Moved::of(&ended);
    let checks = report::sum(killed.get(1).into_iter().chain(&ended).map(|stats| stats.checks));
    cast.end().await?;
    say(began, "all processes have ended in order");
    let report = Report {
        before,
        after,
        versions: last,
        moved,
        latencies,
        checks,
        trainer,
        service,
        went_back,
        queries,
    };
    println!("\n{report}");
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text).with_context(|| format!("--json {}", path.display()))?;
    }
    is_sound(&report)
}

/// Computes what is computed once, and returns name and synopsis of the packages that are held out.
fn prepare(inputs: &Inputs) -> Result<Vec<(String, String)>> {
    let packages = inputs.packages()?;
    println!(
        "{} packages of Debian, {} of them held out. First the vectors of all descriptions, once: minutes on two cores.",
        packages.all.len(),
        packages.held_out().len()
    );
    let mut shown = 0;
    Prepared::read_or_compute(&inputs.work, &inputs.model, &packages, |done| {
        if (done * 10.0) as u32 > shown {
            shown = (done * 10.0) as u32;
            print!(" {}0 %", shown);
            // The progress is for the eye only.
            drop(std::io::stdout().flush());
        }
    })?;
    println!();
    let checkpoint = inputs.checkpoint();
    if checkpoint.exists() {
        std::fs::remove_file(&checkpoint).with_context(|| format!("removing {}", checkpoint.display()))?;
    }
    Ok(packages
        .held_out()
        .iter()
        .map(|package| (package.name.clone(), http::search(&package.synopsis)))
        .collect())
}

impl Cast {
    async fn start(inputs: &Inputs, held_out: Vec<(String, String)>) -> Result<Self> {
        let [at, first, second] = free_addresses()?;
        let addresses: Arc<[String]> = [first, second].into();
        let of = |command: &str, rest: &[&str]| {
            let rest = rest.iter().map(|&argument| argument.to_owned());
            std::iter::once(command.to_owned()).chain(inputs.arguments()).chain(rest).collect::<Vec<_>>()
        };
        let trainer =
            Process::start("trainer", &inputs.work, of("trainer", &["--bind", &at, "--controlled"]))?;
        let services = SERVICES.iter().zip(&*addresses).map(|((name, fabric), http)| {
            let rest = ["--name", name, "--trainer", &at, "--http", http, "--fabric", fabric];
            Process::start(name, &inputs.work, of("service", &rest))
        });
        let queries = held_out.iter().map(|(_, path)| path.clone()).collect();
        let mut cast =
            Self { trainer, services: services.collect::<Result<_>>()?, addresses, held_out, queries };
        cast.wait_for_version(1).await?;
        Ok(cast)
    }

    /// Waits until both services use this version or a newer one.
    async fn wait_for_version(&mut self, version: u64) -> Result<()> {
        let reached = async {
            loop {
                self.trainer.ensure_runs()?;
                self.services.iter_mut().try_for_each(Process::ensure_runs)?;
                let stats = stats(&self.addresses).await.unwrap_or_default();
                if !stats.is_empty() && stats.iter().all(|stats| stats.version >= version) {
                    return Ok(());
                }
                sleep(LOOK).await;
            }
        };
        let late = || format!("waited {LIMIT:?} for both services to use version {version}");
        timeout(LIMIT, reached).await.with_context(late)?
    }

    async fn end(self) -> Result<()> {
        for service in self.services {
            service.end().await?;
        }
        self.trainer.end().await
    }
}

async fn latencies(cast: &mut Cast, load: &Load, duration: Duration, began: Instant) -> Result<Vec<Latency>> {
    let mut latencies = Vec::new();
    for (what, order) in [
        ("no training", "pause"),
        ("training, no commits", "silent"),
        ("training, a commit each step", "commit"),
    ] {
        let from = load.newest().max(1);
        cast.trainer.order(order).await?;
        say(began, &format!("queries for {} s: {what}", duration.as_secs_f64()));
        let begin = Instant::now();
        sleep(duration).await;
        let samples = load.between(begin, Instant::now());
        latencies.push(Latency::of(what, &samples, load.newest() - from));
    }
    Ok(latencies)
}

async fn kill_trainer(cast: &mut Cast, load: &Load, began: Instant) -> Result<Recovery> {
    let killed = Instant::now();
    cast.trainer.kill().await?;
    // A version that the services have, but that no query was answered with yet, is not newer.
    let held = load.newest().max(cast.trainer.printed_version(STEPPED).unwrap_or(0));
    say(began, &format!("SIGKILL to the trainer, at version {held}; it starts again from its checkpoint"));
    cast.trainer.restart()?;
    cast.trainer.order("commit").await?;
    let what = format!("an answer with a version above {held} after the trainer's restart");
    let newer = load.wait_for(&what, LIMIT, |sample| sample.version() > held).await?;
    let recovery = Recovery::of(killed, &newer, held, &load.between(killed, newer.ended));
    say(began, &format!("version {} answers after {:.2} s", recovery.version, recovery.seconds));
    Ok(recovery)
}

async fn kill_service(cast: &mut Cast, load: &Load, victim: usize, began: Instant) -> Result<Recovery> {
    let held = load.newest();
    let killed = Instant::now();
    let process = cast.services.get_mut(victim).context("there is no such service")?;
    process.kill().await?;
    say(began, "SIGKILL to the service over TCP, while the trainer commits; it starts again without weights");
    process.restart()?;
    let is_current = |sample: &load::Sample| {
        sample.sent > killed
            && sample.answer.is_some_and(|(service, version)| service == victim && version >= held)
    };
    let what = format!("the restarted service to answer with version {held} or a newer one");
    let current = load.wait_for(&what, LIMIT, is_current).await?;
    let recovery = Recovery::of(killed, &current, held, &load.between(killed, current.ended));
    say(began, &format!("it answers with version {} after {:.2} s", recovery.version, recovery.seconds));
    Ok(recovery)
}

async fn stats(addresses: &[String]) -> Result<Vec<Stats>> {
    let mut all = Vec::new();
    for address in addresses {
        all.push(http::get(address, "/stats").await?);
    }
    Ok(all)
}

/// Addresses that nobody uses now. Each process binds one of them a moment later.
fn free_addresses() -> Result<[String; 3]> {
    let listeners = [(); 3].map(|()| std::net::TcpListener::bind("127.0.0.1:0"));
    let mut addresses = listeners.iter().map(|listener| match listener {
        Ok(listener) => Ok(listener.local_addr()?.to_string()),
        Err(error) => anyhow::bail!("a free port of 127.0.0.1: {error}"),
    });
    let mut next = || addresses.next().context("three addresses")?;
    Ok([next()?, next()?, next()?])
}

fn say(began: Instant, what: &str) {
    println!("{:7.2} s  {what}", began.elapsed().as_secs_f64());
}

//! The whole story: a trainer and two services, queries all the while, and both kinds of processes killed and restarted.

mod cast;
mod http;
mod load;
mod process;
mod recall;
mod report;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use tokio::time::sleep;

use crate::{
    inputs::Inputs,
    prepared::Prepared,
    run::{
        cast::{Cast, stats},
        load::Load,
        report::{Latency, Moved, Recovery, Report, is_sound},
    },
    trainer::{RESTS, STEPPED},
};

/// The longest duration of a start, of a recovery, and of the rest of the training.
const LIMIT: Duration = Duration::from_secs(300);

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
    // What a service has counted ends with it.
    let killed = stats(&cast.addresses).await?;
    let went_back = killed.iter().map(|stats| stats.went_back).sum();
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
    let versions = cast.trainer.printed(STEPPED)?.len();
    let moved = Moved::of(&ended);
    let checks = report::sum(killed.get(1).into_iter().chain(&ended).map(|stats| stats.checks));
    cast.end().await?;
    say(began, "all processes have ended in order");
    let report =
        Report { before, after, versions, moved, latencies, checks, trainer, service, went_back, queries };
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
    let (all, held_out) = (packages.all.len(), packages.held_out().len());
    println!("{all} packages of Debian, {held_out} of them held out");
    let mut tenths = 0;
    Prepared::read_or_compute(&inputs.work, &inputs.model, &packages, |done| {
        if (done * 10.0) as u32 > tenths {
            tenths = (done * 10.0) as u32;
            // Only the first run computes them, in minutes.
            println!("vectors of the descriptions: {tenths}0 %");
        }
    })?;
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

async fn latencies(cast: &mut Cast, load: &Load, duration: Duration, began: Instant) -> Result<Vec<Latency>> {
    let mut latencies = Vec::new();
    for (what, order) in [
        ("no training", "pause"),
        ("training, no commits", "silent"),
        ("training, a commit each step", "commit"),
    ] {
        let committed = cast.trainer.printed(STEPPED)?.len();
        cast.trainer.order(order).await?;
        say(began, &format!("queries for {} s: {what}", duration.as_secs_f64()));
        let begin = Instant::now();
        sleep(duration).await;
        let samples = load.between(begin, Instant::now());
        let versions = cast.trainer.printed(STEPPED)?.len() - committed;
        latencies.push(Latency::of(what, &samples, versions));
    }
    Ok(latencies)
}

async fn kill_trainer(cast: &mut Cast, load: &Load, began: Instant) -> Result<Recovery> {
    let killed = Instant::now();
    cast.trainer.kill().await?;
    // A version that the services have, but that no query was answered with yet, is not newer.
    let held = load.newest().max(cast.trainer.printed(STEPPED)?.last().copied().unwrap_or(0));
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

fn say(began: Instant, what: &str) {
    println!("{:7.2} s  {what}", began.elapsed().as_secs_f64());
}

//! `tensorwire-bench`: measures tensorwire on this machine, next to the machine's limits.

#![deny(unsafe_code)] // but for `limits::shared_memory`

mod arguments;
mod bootstrap;
mod case;
mod control;
mod cpus;
mod error;
mod fabrics;
mod group;
mod limits;
mod measure;
mod pages;
mod peer;
mod phase;
mod plot;
mod process;
mod ranks;
mod report;
mod side;
#[path = "../../../../crates/cli/src/size.rs"]
mod size;
mod suite;
mod task;
mod workers;

use std::{process::ExitCode, sync::Arc, time::Duration};

use clap::Parser;
use futures::channel::oneshot;
use indicatif::{ProgressBar, ProgressStyle};
use tensorwire::fabric::{Runtime, TokioRuntime};
use tensorwire_fabric::timeout;
use tracing_subscriber::EnvFilter;

use crate::{
    arguments::{Arguments, Bench, Hidden},
    case::{Case, DevicePair},
    cpus::Placement,
    error::{BenchError, system},
    measure::{Measurement, Settings, measure},
    plot::Chart,
    report::Report,
};

/// How much longer than planned a case may take before it counts as stuck.
const SLACK: u32 = 20;
/// Time for starting, connecting and memory.
const SET_UP_LIMIT: Duration = Duration::from_secs(120);

/// The log filter unless `RUST_LOG` is set.
const LOG_FILTER: &str = "warn,h2=error";

fn main() -> ExitCode {
    // clap exits with code 2 for a wrong command line; later failures exit with 1.
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG_FILTER));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tensorwire-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), BenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(system("starting tokio"))?;
    runtime.block_on(async {
        match arguments.peer {
            Some(Hidden::Peer(peer)) => peer::serve(peer).await,
            None => bench(&arguments.bench).await,
        }
    })
}

/// Measures every case of the command line, and prints each result when it is done.
async fn bench(arguments: &Bench) -> Result<(), BenchError> {
    let rows = suite::rows(arguments)?;
    for row in &rows {
        row.case.check()?;
    }
    let allowed = cpus::allowed()?;
    let settings = Settings {
        rounds: arguments.rounds.get(),
        round: Duration::from_millis(arguments.round_ms.get().into()),
        ops: arguments.ops.map(|ops| ops.get().into()),
    };
    let devices = DevicePair::new(arguments);
    let bar = bar(rows.len() as u64 * u64::from(settings.rounds));
    let mut report = Report::new(arguments.json);
    let mut chart = Chart::default();
    for row in rows {
        let placement = Placement::choose(row.cpus, row.case.size, &allowed)?;
        cpus::pin(&placement.own.map_or_else(|| allowed.clone(), |cpu| vec![cpu]))?;
        bar.set_message(format!("{row}"));
        let measured = measure_case((row.case, devices.clone()), placement, settings, bar.clone()).await?;
        bar.suspend(|| report.print(&row, placement, &measured))?;
        chart.add(&row, &measured);
    }
    bar.finish_and_clear();
    match &arguments.plot {
        Some(file) => std::fs::write(file, chart.svg())
            .map_err(|source| BenchError::Plot { file: file.clone(), source }),
        None => Ok(()),
    }
}

/// Measures one case with a time limit, in a separate task, as a user's program would run.
async fn measure_case(
    (case, devices): (Case, DevicePair),
    placement: Placement,
    settings: Settings,
    bar: ProgressBar,
) -> Result<Measurement, BenchError> {
    let runtime = TokioRuntime::current().ok_or(BenchError::Unexpected("no runtime".to_owned()))?;
    let runtime: Arc<dyn Runtime> = Arc::new(runtime);
    let (sender, measured) = oneshot::channel();
    let clock = runtime.clone();
    let task = async move {
        let measured = match case.set_up(placement, &devices, clock).await {
            Ok(ready) => measure(ready, settings, &bar).await,
            Err(error) => Err(error),
        };
        // The receiver is gone only if the time limit is over.
        let _ = sender.send(measured);
    };
    runtime.spawn("measure", Box::pin(task));
    let limit = SET_UP_LIMIT + settings.round * settings.rounds * SLACK;
    match timeout(&*runtime, limit, measured).await {
        Ok(Ok(measured)) => measured,
        Ok(Err(_)) => Err(BenchError::Unexpected("the measuring task has ended early".to_owned())),
        Err(_) => Err(BenchError::PeerSilent { during: "a whole case", limit }),
    }
}

/// A bar that counts rounds, on standard error, if that is a terminal.
fn bar(rounds: u64) -> ProgressBar {
    let bar = ProgressBar::new(rounds);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} rounds  {msg}") {
        bar.set_style(style);
    }
    bar
}

//! Weights from one process to several: a set whose elements change in part, to processes that follow it, that fetch it whole, and that pull
//! its tensors from a service written with tonic, in turns. With `--shards` a set of several processes to several others.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime

mod follower;
mod publisher;
mod shards;

use std::time::Duration;

use clap::{Parser, ValueEnum};
use tensorwire::FabricKind;
use tensorwire_benches::Failure;

use crate::{
    follower::{FOLLOW, Follower, Order},
    publisher::{Change, Publisher, Round},
    shards::SHARDS,
};

/// Measures how long a new version of a set takes from its commit until every follower has applied it, or with `--shards` how long the
/// parts of a set that several processes publish take until every follower has them in its own layout.
#[derive(Debug, Parser)]
struct Arguments {
    /// Between processes of this host, or over loopback.
    #[arg(long, value_enum, default_value_t = Fabric::Tcp)]
    fabric: Fabric,
    /// Processes that get each version.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    followers: u32,
    /// Tensors of the set, of 16-bit elements.
    #[arg(long, default_value_t = 300, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=10_000))]
    tensors: usize,
    /// Mebibytes of the set.
    #[arg(long, default_value_t = 400, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=4096))]
    mebibytes: usize,
    /// Measurements of each row. The median is printed.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measures sets of which several processes publish parts: rows, columns, and rows of fused matrices.
    #[arg(long)]
    shards: bool,
    /// Processes that publish parts.
    #[arg(long, requires = "shards", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    publishers: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Fabric {
    Shm,
    Tcp,
}

impl Arguments {
    fn tensor_bytes(&self) -> usize {
        (self.mebibytes << 20) / self.tensors / 2 * 2
    }
}

impl Fabric {
    fn kind(self) -> FabricKind {
        match self {
            Self::Shm => FabricKind::SHM,
            Self::Tcp => FabricKind::TCP,
        }
    }

    /// The kind that is given to a child.
    fn kind_named(name: &str) -> Result<FabricKind, Failure> {
        Ok(<Self as ValueEnum>::from_str(name, false)?.kind())
    }
}

/// One row: what changes between two versions, and how the others get it.
struct Row {
    change: Change,
    order: Order,
    rounds: Vec<Round>,
}

fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if let Ok(given) = std::env::var(FOLLOW) {
        return runtime.block_on(follower::run(&given));
    }
    if let Ok(given) = std::env::var(SHARDS) {
        return runtime.block_on(async { tokio::spawn(async move { shards::run(&given).await }).await? });
    }
    let arguments = Arguments::parse();
    if arguments.shards {
        return shards::measure(&arguments);
    }
    runtime.block_on(async { tokio::spawn(measure(arguments)).await? })
}

async fn measure(arguments: Arguments) -> Result<(), Failure> {
    let mut publisher = Publisher::start(&arguments).await?;
    let (address, tonic) = (publisher.address(), publisher.serve_by_tonic().await?);
    let mut followers = Vec::new();
    for _ in 0..arguments.followers {
        followers.push(Follower::start(&address, &tonic, &arguments)?);
    }
    println!(
        "# {} tensors, {} MiB of 16-bit elements, {} followers over {}, {} rounds in turns",
        arguments.tensors,
        arguments.mebibytes,
        arguments.followers,
        arguments.fabric.kind(),
        arguments.rounds
    );
    let mut rows = rows(arguments.fabric);
    for round in 0..=arguments.rounds {
        for row in &mut rows {
            let measured = publisher.round(row.change, row.order, &mut followers).await?;
            // The first round makes memory resident.
            if round > 0 {
                row.rounds.push(measured);
            }
        }
    }
    println!("changed\tgot by\tbytes to each follower\tmilliseconds\tof these the commit");
    for Row { change, order, rounds } in &rows {
        let median =
            |time: fn(&Round) -> Duration| milliseconds(&mut rounds.iter().map(time).collect::<Vec<_>>());
        let (all, commit) = (median(|round| round.all), median(|round| round.commit));
        let bytes = rounds.last().map_or(0, |round| round.bytes);
        println!("{change}\t{order}\t{bytes}\t{all:.2}\t{commit:.2}");
    }
    publisher.compare(arguments.rounds, &mut followers).await?;
    publisher::copy_alone(&arguments)?;
    drop(followers);
    publisher.end().await;
    Ok(())
}

fn rows(fabric: Fabric) -> Vec<Row> {
    let row = |change, order| Row { change, order, rounds: Vec::new() };
    let mut rows = vec![row(Change::Nothing, Order::Follow), row(Change::Rows, Order::Follow)];
    rows.extend(
        [0.1, 1.0, 3.0, 10.0, 30.0, 100.0].map(|percent| row(Change::Elements(percent), Order::Follow)),
    );
    rows.push(row(Change::Elements(1.0), Order::Fetch));
    rows.push(row(Change::Elements(1.0), if fabric == Fabric::Tcp { Order::Tonic } else { Order::Copy }));
    rows
}

/// The median.
fn milliseconds(times: &mut [Duration]) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

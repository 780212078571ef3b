//! Four processes average a gradient: each is a rank of a group.
//!
//! `cargo run --release --example all_reduce` starts itself once for each rank. A launcher may do that instead, for instance
//! `torchrun --no-python --nproc-per-node 4 target/release/examples/all_reduce`. `TENSORWIRE_STORE` overrides the launcher's
//! store: for example `redis://HOST`, if built with `--features tensorwire/redis`. On several machines, give `--bind 0.0.0.0:0` and
//! a secret.
#![forbid(unsafe_code)]

use std::{error::Error, time::Duration};

use clap::Parser;
use futures::future::try_join_all;
use tensorwire::collective::{
    Group, Reduction,
    launch::{Launch, LaunchError},
};
use tensorwire_examples::processes::free_addresses;

const RANKS: usize = 4;
const ELEMENTS: usize = 1 << 20;
const CALLS: u32 = 20;

/// Averages a gradient over all ranks.
///
/// Starts four ranks on this machine, unless a launcher (torchrun, mpirun, srun) has started this process as one of them.
#[derive(Debug, Parser)]
#[command(name = "all_reduce", max_term_width = 100)]
struct Flags {
    /// Where a rank listens; rank 0 listens where it serves the store. On several machines: 0.0.0.0:0, for all addresses of each
    /// and any free port. Other machines need the secret in the file that TENSORWIRE_SECRET_FILE names.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    bind: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let flags = Flags::parse();
    match Launch::from_env() {
        Ok(launch) => rank(launch, &flags.bind).await,
        Err(LaunchError::NotFound) => launch_all().await,
        Err(error) => Err(error.into()),
    }
}

/// Starts this program as each rank. Rank 0 serves the store.
async fn launch_all() -> Result<(), Box<dyn Error>> {
    let address = free_addresses(1)?.remove(0);
    let this_program = std::env::current_exe()?;
    let ranks = (0..RANKS).map(|rank| {
        tokio::process::Command::new(&this_program)
            .args(std::env::args_os().skip(1))
            .env("TENSORWIRE_RANK", rank.to_string())
            .env("TENSORWIRE_SIZE", RANKS.to_string())
            .env("TENSORWIRE_STORE", &address)
            .kill_on_drop(true)
            .status()
    });
    let ended = try_join_all(ranks).await?;
    match ended.iter().position(|ended| !ended.success()) {
        None => Ok(()),
        Some(rank) => Err(format!("rank {rank} failed").into()),
    }
}

async fn rank(launch: Launch, bind: &str) -> Result<(), Box<dyn Error>> {
    let worker = launch.worker(&format!("rank_{}", launch.rank)).bind(bind).start().await?;
    let store = launch.open_store(Duration::from_secs(30), &worker).await?;
    let group = Group::builder(store, launch.rank, launch.size).name("example").join(&worker).await?;

    let mut gradient = vec![launch.rank as f32; ELEMENTS];
    let begun = worker.runtime().now();
    for _ in 0..CALLS {
        group.all_reduce(&mut gradient).reduction(Reduction::Mean).await?;
    }
    let taken = (worker.runtime().now() - begun) / CALLS;
    println!(
        "rank {} of {}: mean {} of {ELEMENTS} numbers, {taken:.1?} a call",
        group.rank(),
        group.size(),
        gradient[0]
    );
    group.close().await?;
    worker.shutdown().await;
    Ok(())
}

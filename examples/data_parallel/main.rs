//! Data-parallel training: all ranks have the same network. Each computes the gradient of a part of every batch, and they
//! average.
//!
//! - A **rank** computes its gradient layer by layer, the last layer first, on its own thread. As soon as a layer's gradient is
//!   computed, an all-reduce adds up those of all ranks, while the thread computes the layer before. Then each rank applies the
//!   whole gradient, so all have the same parameters without a server.
//! - The **launcher** starts the ranks; torchrun or srun can do that, too. Rank 0 serves the store in which they find each other.
//!
//! If a rank is killed, the others shrink the group, take the parameters of the furthest step, and continue. Begin with
//! `rank.rs`.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "this is a user's program: it has tokio's clock")]

mod rank;
mod step;

use std::{error::Error, process::ExitCode};

use clap::Parser;
use tensorwire::collective::launch::{Launch, LaunchError};
use tensorwire_examples::{
    command_line::DataParallel as Flags,
    processes::{free_addresses, parent_lets_go, run_ranks},
    report::warn,
};

/// Why a process ends early.
type Failure = Box<dyn Error>;

fn main() -> ExitCode {
    let (flags, launch) = (Flags::parse(), Launch::from_env());
    let who = launch.as_ref().map_or("data_parallel".to_owned(), |launch| format!("rank {}", launch.rank));
    match run(&flags, launch) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            warn(format_args!("{who}: {failure}"));
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(flags: &Flags, launch: Result<Launch, LaunchError>) -> Result<(), Failure> {
    match launch {
        Ok(launch) => tokio::select! {
            ended = rank::run(flags, launch) => ended,
            () = parent_lets_go(), if flags.launched => Ok(()),
        },
        Err(LaunchError::NotFound) => start_ranks(flags).await,
        Err(error) => Err(error.into()),
    }
}

/// Starts this program as each rank.
async fn start_ranks(flags: &Flags) -> Result<(), Failure> {
    let address = free_addresses(1)?.remove(0);
    let variables = |rank: u16| {
        let [rank, size] = [rank, flags.ranks].map(|number| number.to_string());
        [("TENSORWIRE_RANK", rank), ("TENSORWIRE_SIZE", size), ("TENSORWIRE_STORE", address.clone())]
    };
    run_ranks(flags.ranks, variables, !flags.json).await
}

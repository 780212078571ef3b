//! The `tensorwire` command: serves the tensors of a safetensors file, pulls them, and measures
//! how fast that is.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod checkpoint;
mod dtype;
mod failure;
mod header;
mod output;
mod plan;
mod progress;
mod pull;
mod round;
mod serve;
mod sink;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::{
    arguments::{Arguments, Command},
    failure::Failure,
};

fn main() -> ExitCode {
    // clap ends with code 2 for a wrong command line; everything that fails later is 1.
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("tensorwire: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::Runtime)?;
    runtime.block_on(async {
        match &arguments.command {
            Command::Serve(serve) => serve::serve(serve).await,
            Command::Pull(pull) => pull::pull(pull).await,
            Command::Bench(arguments) => Ok(bench::bench(arguments).await?),
            Command::BenchPeer(arguments) => Ok(bench::peer::serve(*arguments).await?),
        }
    })
}

//! The `tensorwire` command: serves the tensors of a safetensors file, pulls them, measures how fast that is, and tells
//! what RDMA devices there are and whether they can be used.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod checkpoint;
mod devices;
mod doctor;
mod dtype;
mod failure;
mod header;
mod machine;
mod output;
mod plan;
mod progress;
mod pull;
mod registered;
mod round;
mod serve;
mod sink;
mod size;
mod tls;

use std::{io::Write, process::ExitCode};

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
        Ok(code) => code,
        Err(failure) => {
            eprintln!("tensorwire: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::Runtime)?;
    runtime.block_on(async {
        match &arguments.command {
            Command::Devices(arguments) => return devices::devices(arguments),
            Command::Doctor(arguments) => return doctor::doctor(arguments).await,
            Command::Serve(serve) => serve::serve(serve).await?,
            Command::Pull(pull) => pull::pull(pull).await?,
            Command::Bench(arguments) => bench::bench(arguments).await?,
            Command::BenchPeer(arguments) => bench::peer::serve(*arguments).await?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Writes to standard output. A reader that has seen enough is no failure.
fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::Print(error)),
        _ => Ok(()),
    }
}

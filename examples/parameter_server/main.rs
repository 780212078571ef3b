//! A parameter server and two workers that train a network on handwritten digits, each a process of its own.
//!
//! `cargo run --release --example parameter_server` starts all of them; `--help` tells the options, and the book's
//! page on this example what happens. Read [`server`] and [`worker`] first.
#![forbid(unsafe_code)]

mod children;
mod failure;
mod launcher;
mod link;
mod options;
mod report;
mod server;
mod summary;
mod worker;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::{
    failure::Failure,
    options::{Options, Role},
};

/// How many workers there are.
const WORKERS: usize = 2;

fn main() -> ExitCode {
    let options = Options::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let (who, ended) = match &options.role {
        None => ("parameter_server".to_owned(), launcher::run(&options)),
        Some(Role::Server) => ("server".to_owned(), block_on(server::run(&options))),
        Some(Role::Worker { server, index }) => {
            (format!("worker {index}"), block_on(worker::run(&options, server, *index)))
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{who}: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::Runtime)?;
    runtime.block_on(future)
}

//! Parameter servers and workers that train a model, each a process of its own.
//!
//! `cargo run --release --example parameter_server` starts all of them; `--help` tells the options, and the book's
//! page on this example what happens and how to start the processes by hand. Read [`server`] and [`worker`] first.
#![forbid(unsafe_code)]

mod bench;
mod chief;
mod children;
mod failure;
mod launcher;
mod link;
mod options;
mod parameters;
mod report;
mod server;
mod server_link;
mod summary;
mod worker;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::{
    failure::Failure,
    options::{Flags, Role, RoleName, Settings, with_dashes},
};

fn main() -> ExitCode {
    let flags = Flags::parse_from(with_dashes(std::env::args()));
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let (who, ended) =
        if flags.bench { ("parameter_server --bench".to_owned(), bench::run(&flags)) } else { train(flags) };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{who}: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Gives also who this process is.
fn train(flags: Flags) -> (String, Result<(), Failure>) {
    match Settings::new(flags) {
        Ok(settings) => (name(&settings.role), run(&settings)),
        Err(failure) => (name_of_launcher(), Err(failure)),
    }
}

fn run(settings: &Settings) -> Result<(), Failure> {
    match &settings.role {
        Role::Launcher => launcher::run(settings),
        Role::One(RoleName::Server(index), cluster) => block_on(server::run(settings, *index, cluster)),
        Role::One(RoleName::Worker(index), cluster) => block_on(worker::run(settings, *index, cluster)),
    }
}

fn name(role: &Role) -> String {
    match role {
        Role::Launcher => name_of_launcher(),
        Role::One(role, _) => role.to_string(),
    }
}

fn name_of_launcher() -> String {
    "parameter_server".to_owned()
}

fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::Runtime)?;
    runtime.block_on(future)
}

//! The command of the example.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use live_search::{run, service, trainer};

/// Search over Debian's descriptions of packages, with an encoder that is trained meanwhile.
///
/// A trainer tunes the upper part of a sentence encoder, and commits all weights as a version of a set after each step. Services
/// follow the set while they answer queries over HTTP, and say with which version. `run` starts a trainer and two services, kills
/// and restarts both kinds, and prints what it measured. integrations/live_search/run fetches what it needs, and runs it.
#[derive(Debug, Parser)]
#[command(name = "live-search", version)]
struct Command {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    Trainer(trainer::Arguments),
    Service(service::Arguments),
    Run(run::Arguments),
}

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Command::parse().role {
        Role::Trainer(arguments) => trainer::run(arguments).await,
        Role::Service(arguments) => service::run(arguments).await,
        Role::Run(arguments) => run::run(arguments).await,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("live-search: {error:#}");
            ExitCode::FAILURE
        }
    }
}

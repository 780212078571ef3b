//! A parameter server: processes that train a model together.
//!
//! - A **server** (`ps 0`, `ps 1`, …) has some tensors of the parameters. It commits them as a set, version after version. For the
//!   next version it fetches the gradients of all workers, or of one worker with `--issync 0`, and moves its tensors along them.
//! - A **worker** follows the sets of all servers. It computes a gradient from samples of its own, and publishes that:
//!   `gradient of w1@17`. It also commits the versions that it gets, as copies for a server that is started again. Of the linear
//!   model it pulls only the rows that its samples need.
//! - The **launcher** starts the others on this machine, and restarts those that are killed. It fetches the progress from
//!   worker 0, at the end the parameters from the servers, and measures them.
//!
//! Each process fetches what it needs, and fetches again when that fails. Begin with `server.rs` and `worker.rs`; `node.rs`
//! and `following.rs` have the code that fetches.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "this is a user's program: it has tokio's clock")]

mod following;
mod launcher;
mod node;
mod record;
mod server;
mod worker;

use std::{future::pending, io::IsTerminal, process::ExitCode};

use clap::Parser;
use tensorwire_examples::{
    command_line::{Flags, Job, Role},
    processes::parent_lets_go,
    report::warn,
};
use tracing_subscriber::EnvFilter;

use crate::node::{Failure, Node};

fn main() -> ExitCode {
    let flags = Flags::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("error"));
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
    let who = flags.role().map_or_else(|| "parameter_server".to_owned(), |role| role.to_string());
    match run(flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            warn(format_args!("{who}: {failure}"));
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(flags: Flags) -> Result<(), Failure> {
    match flags.role() {
        None => launcher::run(flags).await,
        Some(role) => be(role, &flags).await,
    }
}

/// Runs as one process of the cluster until the training is over; with a launcher, until the launcher ends it.
async fn be(role: Role, flags: &Flags) -> Result<(), Failure> {
    let node = Node::start(flags, Some(role)).await?;
    if !flags.launched {
        println!("listening    at {}", node.worker.address());
    }
    let working = async {
        let trained = match role.job {
            Job::Ps => server::run(&node, flags, role.index).await.map(|()| None),
            Job::Worker => worker::run(&node, flags, role.index).await.map(Some),
        };
        if flags.launched && trained.is_ok() { pending().await } else { trained }
    };
    let ended = tokio::select! {
        ended = working => ended,
        () = parent_lets_go(), if flags.launched => Ok(None),
    };
    node.worker.shutdown().await;
    if let Some(trained) = ended?.filter(|_| role.index == 0) {
        trained.print_summary(&node.plan, flags.json)?;
    }
    Ok(())
}

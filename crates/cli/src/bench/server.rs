//! The server of a benchmark: `--serve`, or the second process on one host.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
};

use clap::ValueEnum;
use serde::Serialize;
use tensorwire::{Code, Worker, WorkerError};
use tensorwire_protocol::text::escaped;
use tokio::sync::oneshot;

use super::{
    conversation::{CLIENT, Conversation, PUBLISHED, SERVER, VERSION},
    worker,
};
use crate::{
    arguments::{
        Fabric,
        bench::{Bench, WaitChoice},
        variables::variables,
    },
    console::Console,
    failure::{BenchError, Failure},
    print,
    reachable_address::instead_of_all,
    signals::{AtSignal, at_signal},
};

/// Precedes the address in the output.
const ADDRESS: &str = "address ";

/// Serves one client after the other until SIGINT or SIGTERM.
pub(super) async fn serve(arguments: &Bench, bind: &str) -> Result<(), Failure> {
    let wait = *arguments.wait.first().unwrap_or(&WaitChoice::Adaptive);
    let fabric = *arguments.fabric.first().unwrap_or(&Fabric::Auto);
    let worker = worker(arguments, SERVER, fabric, wait).bind(bind).start().await?;
    let (wake, woken) = oneshot::channel();
    if arguments.until_stdin_ends {
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            let _ = wake.send(());
        });
    } else {
        at_signal(AtSignal::Wake(wake)).map_err(Failure::Runtime)?;
    }
    announce(&worker, arguments.console)?;
    tokio::select! {
        _ = woken => {}
        ended = serve_clients(&worker) => ended?,
    }
    worker.shutdown().await;
    Ok(())
}

/// The line of `--serve --json`.
#[derive(Debug, Serialize)]
struct ServingJson<'a> {
    event: &'static str,
    version: u32,
    address: &'a str,
    fabrics: &'a [String],
}

fn announce(worker: &Worker, console: Console) -> Result<(), Failure> {
    let address =
        instead_of_all(worker.address()).map_or_else(|| worker.address().to_owned(), |one| one.to_string());
    let fabrics: Vec<String> =
        worker.offered_fabrics().into_iter().map(|(kind, _)| kind.to_string()).collect();
    if console.json {
        let line = ServingJson { event: "serving", version: 1, address: &address, fabrics: &fabrics };
        console.event(&line);
    }
    if console.json || console.quiet {
        return Ok(());
    }
    print(&format!(
        "serving benchmarks over {}; on the other host: tensorwire bench {address}\n{ADDRESS}{address}\n",
        fabrics.join(", ")
    ))
}

async fn serve_clients(worker: &Worker) -> Result<(), WorkerError> {
    loop {
        let client = match worker.wait_for_peer(CLIENT).await {
            Err(WorkerError::DeadlineExceeded { .. }) => continue,
            client => client?,
        };
        let incarnation = client.incarnation().unwrap_or_default();
        // A conversation ends when the client leaves, in order or not.
        match converse(worker, &Conversation::new(worker, client, incarnation)).await {
            Err(error) if matches!(error.code(), Code::Aborted | Code::Unavailable) => {}
            Err(error) => tracing::warn!("a benchmark ended early: {}", escaped(&error.to_string())),
            Ok(()) => {}
        }
        worker.withdraw(PUBLISHED);
    }
}

/// Executes the requests of one client, until it leaves or sends an unknown request.
async fn converse(worker: &Worker, client: &Conversation) -> Result<(), WorkerError> {
    loop {
        let asked = client.asked().await?;
        match asked.split_once(' ').unwrap_or((&asked, "")) {
            ("publish", bytes) => {
                // The old tensor first, so that the new one can use its memory.
                worker.withdraw(PUBLISHED);
                worker.publish(PUBLISHED, client.tensor(bytes.parse().unwrap_or(1))?)?;
                client.answer("ready")?;
            }
            ("echo", _) => {
                client.answer("ready")?;
                echo(client).await?;
            }
            _ => {
                let made = worker.peers().into_iter().find(|info| info.name == CLIENT);
                let reasons = made.map(|info| info.not_used).unwrap_or_default();
                client.answer(&[&[VERSION.to_owned()], &reasons[..]].concat().join("\n"))?;
            }
        }
    }
}

async fn echo(client: &Conversation) -> Result<(), WorkerError> {
    loop {
        let tensor = client.receive().await?;
        if tensor.bytes().is_empty() {
            return Ok(());
        }
        client.send(tensor)?;
    }
}

/// This program as the server of a benchmark on one host. It ends with this process.
pub(super) struct Process {
    child: Child,
    address: String,
}

impl Process {
    pub(super) fn start(arguments: &Bench, fabric: Fabric, wait: WaitChoice) -> Result<Self, BenchError> {
        let mut command = Command::new(std::env::current_exe().map_err(BenchError::Spawn)?);
        command.args(["bench", "--serve", "127.0.0.1:0", "--until-stdin-ends"]);
        command.args(["--config", "/dev/null", "--fabric", &name_of(&fabric), "--wait", &name_of(&wait)]);
        if let Some(path) = &arguments.secret.secret_file {
            command.arg("--secret-file").arg(path);
        }
        // Its settings are on its command line.
        for name in variables("bench") {
            command.env_remove(name);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Self { child: command.spawn().map_err(BenchError::Spawn)?, address: String::new() };
        let lines =
            process.child.stdout.take().map(|stdout| BufReader::new(stdout).lines().map_while(Result::ok));
        let address =
            lines.into_iter().flatten().find_map(|line| line.strip_prefix(ADDRESS).map(str::to_owned));
        process.address = address.ok_or(BenchError::NoAddress)?;
        Ok(process)
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended by itself: then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

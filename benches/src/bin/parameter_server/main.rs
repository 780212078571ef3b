//! A parameter server's workload between two processes, without the training: a worker pulls all parameters and pushes
//! a gradient, and the server moves the parameters along it. It runs on each way of tensorwire and as a service written
//! with tonic, in turns.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use clap::Parser;
use tensorwire_benches::Failure;
use tokio::{runtime::Runtime, sync::oneshot};

use crate::{model::Model, report::Figures};

mod model;
mod report;
mod with_tensorwire;
mod with_tonic;

/// Environment variable of the child that serves: the model and the number of threads.
const SERVE: &str = "TENSORWIRE_BENCH_SERVE";

/// Steps before the measured ones: after them connections and memory exist.
const WARM_UP: u32 = 5;

/// A worker pulls all parameters and pushes a gradient, along which the server moves the parameters: on tensorwire and
/// on tonic, in turns.
#[derive(Debug, Parser)]
struct Arguments {
    /// The model; may be given several times.
    #[arg(long = "model", value_enum, default_values_t = [Model::Small, Model::Resnet50])]
    models: Vec<Model>,
    /// Measures only tonic and this way of tensorwire.
    #[arg(long, value_parser = with_tensorwire::WAYS.map(|way| way.name))]
    way: Option<String>,
    /// Rounds, each of which measures every way once.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How long a way is measured in a round, in milliseconds.
    #[arg(long, default_value_t = 500)]
    round_ms: u64,
    /// Threads of the runtime of each side.
    #[arg(long, default_value_t = 2, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    threads: usize,
    /// Prints one JSON object for each model and way instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<(), Failure> {
    if let Some((model, threads)) =
        std::env::var(SERVE).ok().as_deref().and_then(|served| served.split_once(' '))
    {
        return serve(clap::ValueEnum::from_str(model, false)?, threads.parse()?);
    }
    let arguments = Arguments::parse();
    let runtime = runtime(arguments.threads)?;
    for &model in &arguments.models {
        let figures = measure(&runtime, &arguments, model)?;
        report::print(model, &figures, report::update_alone(model), arguments.json);
    }
    Ok(())
}

/// The runtime of either side. With one thread it is tokio's current-thread runtime.
fn runtime(threads: usize) -> std::io::Result<Runtime> {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.worker_threads(threads).enable_all().build()
}

/// The child's main function: serves in all ways, prints the addresses, and ends when the parent closes its stdin.
fn serve(model: Model, threads: usize) -> Result<(), Failure> {
    let (close, closed) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = close.send(());
    });
    runtime(threads)?.block_on(async {
        let mut addresses = Vec::new();
        for way in with_tensorwire::WAYS {
            let server = with_tensorwire::Server::start(way, model).await?;
            addresses.push(server.address().to_owned());
            // This task ends with its worker.
            tokio::spawn(server.serve());
        }
        let (address, serving) = with_tonic::serve(model).await?;
        tokio::spawn(serving);
        println!("{} {address}", addresses.join(" "));
        let _ = closed.await;
        Ok(())
    })
}

/// The child. Dropping this ends it.
struct Server {
    child: Child,
    addresses: Vec<String>,
}

impl Server {
    fn start(model: Model, threads: usize) -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env(SERVE, format!("{} {threads}", model.name()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut server = Self { child: command.spawn()?, addresses: Vec::new() };
        let mut line = String::new();
        if let Some(stdout) = server.child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        server.addresses = line.split_whitespace().map(str::to_owned).collect();
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A worker's side of one way.
enum Client {
    Tensorwire(with_tensorwire::Client),
    Tonic(with_tonic::Client),
}

impl Client {
    async fn pull(&mut self) -> Result<usize, Failure> {
        Ok(match self {
            Self::Tensorwire(client) => client.pull().await?,
            Self::Tonic(client) => client.pull().await?,
        })
    }

    async fn push(&mut self) -> Result<(), Failure> {
        match self {
            Self::Tensorwire(client) => client.push()?,
            Self::Tonic(client) => client.push().await?,
        }
        Ok(())
    }

    /// Does steps for `duration`, at least one. Returns the average times of a step: of its pull, and of its push with
    /// the update.
    async fn steps(&mut self, model: Model, duration: Duration) -> Result<(Duration, Duration), Failure> {
        let (begun, mut pulling, mut steps) = (Instant::now(), Duration::ZERO, 0);
        loop {
            let begun_pull = Instant::now();
            if self.pull().await? != model.bytes() {
                return Err("a pull of other parameters than the model's".into());
            }
            pulling += begun_pull.elapsed();
            self.push().await?;
            steps += 1;
            if begun.elapsed() >= duration {
                return Ok((pulling / steps, (begun.elapsed() - pulling) / steps));
            }
        }
    }
}

/// Measures each way once in each round.
fn measure(runtime: &Runtime, arguments: &Arguments, model: Model) -> Result<Vec<Figures>, Failure> {
    let server = Server::start(model, arguments.threads)?;
    let (rounds, round) = (arguments.rounds, Duration::from_millis(arguments.round_ms));
    runtime.block_on(async {
        let mut clients = connect(model, &server.addresses).await?;
        clients.retain(|(way, _)| {
            *way == report::TONIC || arguments.way.as_deref().is_none_or(|wanted| wanted == *way)
        });
        // In a separate task, as in a service: then arrivals need not wake another thread.
        tokio::spawn(steps_of_all(clients, model, rounds, round)).await?
    })
}

async fn steps_of_all(
    mut clients: Vec<(&'static str, Client)>,
    model: Model,
    rounds: u32,
    round: Duration,
) -> Result<Vec<Figures>, Failure> {
    for (_, client) in &mut clients {
        for _ in 0..WARM_UP {
            client.steps(model, Duration::ZERO).await?;
        }
    }
    let mut figures: Vec<Figures> = clients.iter().map(|(way, _)| Figures::of(way)).collect();
    for _ in 0..rounds {
        for ((_, client), figures) in clients.iter_mut().zip(&mut figures) {
            figures.add(client.steps(model, round).await?);
        }
    }
    for (_, client) in clients {
        if let Client::Tensorwire(client) = client {
            client.shutdown().await;
        }
    }
    Ok(figures)
}

/// All ways, tonic last.
async fn connect(model: Model, addresses: &[String]) -> Result<Vec<(&'static str, Client)>, Failure> {
    let Some((tonic, tensorwire)) = addresses.split_last() else {
        return Err("the server has no address".into());
    };
    let mut clients = Vec::new();
    for (way, address) in with_tensorwire::WAYS.into_iter().zip(tensorwire) {
        let client = with_tensorwire::Client::connect(way, model, address).await?;
        clients.push((way.name, Client::Tensorwire(client)));
    }
    clients.push((report::TONIC, Client::Tonic(with_tonic::Client::connect(model, tonic).await?)));
    Ok(clients)
}

//! A search service: it follows the trainer's encoder while it answers queries over HTTP.

use std::{
    io::Read as _,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result};
use axum::{
    Json, Router,
    extract::{Query, State},
    http::StatusCode,
    routing::get,
};
use serde::{Deserialize, Serialize};
use tensorwire::{
    FabricKind, Peer, Worker, WorkerError,
    sets::{Policy, Snapshot},
};
use tensorwire_axum::{Metrics, Readiness, Requirement, operations, serve};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
};

use crate::{
    inputs::{Inputs, SET},
    model::{Answer, Checks, Index, Model},
    prepared::{Prepared, QUERY_TOKENS},
    tokens::Tokens,
    tunable::Tunable,
};

/// Queries and versions that wait for the model; further ones wait outside.
const QUEUE: usize = 64;
/// How long `/ready` answers 503 before the listener closes.
const DRAIN: Duration = Duration::from_millis(300);

/// Answers queries with the newest version of the encoder.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    inputs: Inputs,
    /// End when standard input does, as that of a program does with the one that started it.
    #[arg(long)]
    tied: bool,
    /// The name of this service.
    #[arg(long, default_value = "search")]
    name: String,
    /// Where the trainer is.
    #[arg(long, default_value = "127.0.0.1:4300", value_name = "HOST:PORT")]
    trainer: String,
    /// Where it answers.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    http: String,
    /// The only fabric that it uses: shm within one host, or tcp as between hosts. By default the best one.
    #[arg(long, value_parser = ["shm", "tcp"])]
    fabric: Option<String>,
}

/// What a service has done, as `GET /stats` shows it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Stats {
    /// The service.
    pub service: String,
    /// The version that it uses; 0 before the first.
    pub version: u64,
    /// Of each version that it took, the bytes that were moved for it: contents, deltas and the manifest.
    pub bytes_moved: Vec<u64>,
    /// The bytes of all tensors of a version.
    pub bytes_of_version: u64,
    /// Comparisons with the trainer's probe.
    pub checks: Checks,
    /// How often the trainer came back with an older version than this service uses.
    pub went_back: u64,
    /// Versions that did not fit the model, and other errors of following it.
    pub errors: u64,
}

/// What the thread of the model does next.
enum Work {
    Query(Ask, oneshot::Sender<Result<Answer>>),
    Version(Snapshot),
}

#[derive(Debug, Deserialize)]
struct Ask {
    q: String,
    #[serde(default = "ten")]
    k: usize,
}

fn ten() -> usize {
    10
}

#[derive(Clone)]
struct Service {
    work: mpsc::Sender<Work>,
    stats: Arc<Mutex<Stats>>,
}

/// Runs until SIGTERM or SIGINT, and with `--tied` until standard input ends.
///
/// # Errors
/// If a file is missing or does not fit, or an address cannot be used.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { inputs, tied, name, trainer, http, fabric } = arguments;
    let metrics = Metrics::install()?;
    let mut builder = Worker::builder(&name);
    match fabric.as_deref() {
        Some("shm") => builder = builder.require(FabricKind::SHM),
        Some("tcp") => builder = builder.require(FabricKind::TCP),
        _ => {}
    }
    let worker = builder.start().await?;
    let peer = worker.set_address("trainer", &trainer)?;
    let readiness = Readiness::new(&worker);
    let weights = readiness.require("weights");

    let stats = Arc::new(Mutex::new(Stats { service: name, ..Stats::default() }));
    let (work, queue) = mpsc::channel(QUEUE);
    let service = Service { work, stats };
    let model = load(&inputs)?;
    let of_model = service.stats.clone();
    std::thread::spawn(move || compute(model, queue, &of_model, &weights));
    tokio::spawn(follow(peer, service.clone()));
    let listener = TcpListener::bind(&http).await.with_context(|| format!("--http {http}"))?;
    println!("service: http://{}", listener.local_addr()?);
    if tied {
        end_with_input();
    }
    let routes =
        Router::new().route("/search", get(search)).route("/stats", get(stats_of)).with_state(service);
    serve(listener, routes.merge(operations(&worker, &metrics, &readiness)), &worker, &readiness, DRAIN)
        .await?;
    Ok(())
}

fn load(inputs: &Inputs) -> Result<Model> {
    let packages = inputs.packages()?;
    let prepared = Prepared::read_or_compute(&inputs.work, &inputs.model, &packages, |_| {})?;
    let names = packages.all.into_iter().map(|package| package.name);
    let index = Index::new(names, &prepared.documents)?;
    Model::new(Tunable::load(&inputs.model)?, Tokens::load(&inputs.model, QUERY_TOKENS)?, index)
}

/// Hands each version to the model as soon as it has arrived. Queries do not wait for the network.
async fn follow(trainer: Peer, service: Service) {
    let mut versions = trainer.set(SET).follow(Policy::Latest);
    while let Some(staged) = versions.next().await {
        match staged {
            Ok(staged) => {
                let moved = staged.bytes_moved();
                let snapshot = staged.apply();
                service.count(|stats| stats.took(moved, &snapshot));
                if service.work.send(Work::Version(snapshot)).await.is_err() {
                    return;
                }
            }
            // The trainer continues at its checkpoint. This service keeps the weights that it has until newer ones come.
            Err(WorkerError::WentBack { .. }) => service.count(|stats| stats.went_back += 1),
            Err(WorkerError::ShutDown) => return,
            Err(error) => {
                eprintln!("service: {error}");
                service.count(|stats| stats.errors += 1);
            }
        }
    }
}

/// The one thread that has the model: versions are applied between two queries, so no query sees parts of two.
fn compute(mut model: Model, mut queue: mpsc::Receiver<Work>, stats: &Mutex<Stats>, weights: &Requirement) {
    let name = lock(stats).service.clone();
    while let Some(work) = queue.blocking_recv() {
        let outcome = match work {
            Work::Version(snapshot) => model.apply(&snapshot).map(|()| {
                weights.met(format!("version {}", snapshot.version()));
                lock(stats).version = snapshot.version();
            }),
            Work::Query(ask, answer) => {
                // A client that has gone needs no answer.
                drop(answer.send(model.search(&name, &ask.q, ask.k)));
                Ok(())
            }
        };
        let mut stats = lock(stats);
        stats.checks = model.checks();
        if let Err(error) = outcome {
            eprintln!("service: {error:#}");
            stats.errors += 1;
        }
    }
}

async fn search(
    State(service): State<Service>,
    Query(ask): Query<Ask>,
) -> Result<Json<Answer>, (StatusCode, String)> {
    let unavailable = |text: String| (StatusCode::SERVICE_UNAVAILABLE, text);
    let (answer, receiver) = oneshot::channel();
    service.work.send(Work::Query(ask, answer)).await.map_err(|error| unavailable(error.to_string()))?;
    let answered = receiver.await.map_err(|error| unavailable(error.to_string()))?;
    answered.map(Json).map_err(|error| unavailable(format!("{error:#}")))
}

async fn stats_of(State(service): State<Service>) -> Json<Stats> {
    Json(lock(&service.stats).clone())
}

impl Service {
    fn count(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut lock(&self.stats));
    }
}

impl Stats {
    fn took(&mut self, moved: u64, version: &Snapshot) {
        self.bytes_moved.push(moved);
        self.bytes_of_version = version.iter().map(|(_, tensor)| tensor.bytes().len() as u64).sum();
    }
}

// A panic of another holder leaves the counters whole.
fn lock(stats: &Mutex<Stats>) -> std::sync::MutexGuard<'_, Stats> {
    stats.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the process when standard input does: the program that started it is gone.
fn end_with_input() {
    std::thread::spawn(|| {
        drop(std::io::stdin().lock().read_to_end(&mut Vec::new()));
        std::process::exit(3);
    });
}

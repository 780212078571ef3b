//! A trainer commits new weights of a line, and two services answer requests with the weights that they have. A service moves the next
//! version while it answers with the one before, and says which version it used.
//!
//! `cargo run --release --example weight_sync`
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods)] // it runs on tokio's runtime

use std::error::Error;

use tensorwire::{
    Peer, Tensor, Worker,
    sets::{Policy, Snapshot},
};
use tokio::sync::watch;

type Failure = Box<dyn Error + Send + Sync>;

/// The line that the trainer looks for: `y = 3 x + 1`.
const SLOPE: f32 = 3.0;
const OFFSET: f32 = 1.0;

const VERSIONS: u64 = 20;
const LEARNING_RATE: f32 = 0.1;

/// A request: the `x` whose `y` is wanted.
const X: f32 = 10.0;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let trainer = Worker::builder("trainer").start().await?;
    let mut services = Vec::new();
    for name in ["service 1", "service 2"] {
        services.push(Service::start(name, trainer.address()).await?);
    }
    let (mut slope, mut offset) = (0.0, 0.0);
    for version in 1..=VERSIONS {
        commit(&trainer, version, slope, offset).await?;
        for service in &mut services {
            println!("{}", service.answer(X, version).await?);
        }
        (slope, offset) = step(slope, offset);
    }
    for service in services {
        service.worker.shutdown().await;
    }
    trainer.shutdown().await;
    Ok(())
}

/// Commits both weights together, so that no service sees one of another version.
async fn commit(trainer: &Worker, version: u64, slope: f32, offset: f32) -> Result<(), Failure> {
    let weight = |value| Tensor::from_values(trainer.pool(), &[1], &[value]);
    Ok(trainer.set("line").commit(version, [("slope", weight(slope)?), ("offset", weight(offset)?)]).await?)
}

/// One step of gradient descent on ten points of the line.
fn step(slope: f32, offset: f32) -> (f32, f32) {
    let points = (0..10).map(|at| at as f32 / 10.0);
    let errors: Vec<(f32, f32)> = points.map(|x| (x, slope * x + offset - (SLOPE * x + OFFSET))).collect();
    let by_slope: f32 = errors.iter().map(|(x, error)| error * x).sum();
    let by_offset: f32 = errors.iter().map(|(_, error)| error).sum();
    (slope - LEARNING_RATE * by_slope, offset - LEARNING_RATE * by_offset)
}

/// A service that answers with the newest weights that it has.
struct Service {
    name: &'static str,
    worker: Worker,
    weights: watch::Receiver<Option<Snapshot>>,
}

impl Service {
    async fn start(name: &'static str, trainer: &str) -> Result<Self, Failure> {
        let worker = Worker::client().start().await?;
        let trainer = worker.peer_at(trainer).await?;
        let (newest, weights) = watch::channel(None);
        tokio::spawn(follow(trainer, newest));
        Ok(Self { name, worker, weights })
    }

    /// The answer to a request, once the service has `version` or a newer one.
    async fn answer(&mut self, x: f32, version: u64) -> Result<String, Failure> {
        let has =
            |weights: &Option<Snapshot>| weights.as_ref().is_some_and(|weights| weights.version() >= version);
        let weights = self.weights.wait_for(has).await?.clone().ok_or("no weights")?;
        let weight = |name| -> Result<f32, Failure> {
            let values = weights.get(name).ok_or("a weight is missing")?.values::<f32>()?;
            Ok(values.first().copied().ok_or("a weight is empty")?)
        };
        let y = weight("slope")? * x + weight("offset")?;
        Ok(format!("{} with version {:2}: {x} -> {y:.2}", self.name, weights.version()))
    }
}

/// Applies each version, until the service or the trainer ends.
async fn follow(trainer: Peer, newest: watch::Sender<Option<Snapshot>>) {
    let mut versions = trainer.set("line").follow(Policy::Latest);
    while let Some(staged) = versions.next().await {
        match staged {
            Ok(staged) => drop(newest.send_replace(Some(staged.apply()))),
            Err(error) => eprintln!("{error}"),
        }
        if newest.is_closed() {
            return;
        }
    }
}

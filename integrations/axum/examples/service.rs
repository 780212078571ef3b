//! An HTTP service that answers with the weights it follows: `cargo run --example service`, then
//! `curl localhost:8080/ready localhost:8080/version localhost:8080/metrics`. The trainer runs in the same process here.

use std::{error::Error, time::Duration};

use axum::{Router, routing::get};
use tensorwire::{Tensor, Worker, sets::Policy};
use tensorwire_axum::{Metrics, Readiness, operations, serve};
use tokio::{net::TcpListener, sync::watch};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let metrics = Metrics::install()?;
    let trainer = Worker::builder("trainer").start().await?;
    tokio::spawn(train(trainer.clone()));

    let worker = Worker::builder("search").start().await?;
    let readiness = Readiness::new(&worker);
    let peer = worker.peer_at(trainer.address()).await?;
    readiness.require_peer(&peer);
    let weights = readiness.require("weights");
    let (newest, version) = watch::channel(0);
    let mut versions = peer.set("policy").follow(Policy::Latest);
    tokio::spawn(async move {
        while let Some(staged) = versions.next().await {
            let Ok(staged) = staged else { continue };
            let snapshot = staged.apply();
            weights.met(format!("version {}", snapshot.version()));
            newest.send_replace(snapshot.version());
        }
    });

    let answer = move || async move { version.borrow().to_string() };
    let service =
        Router::new().route("/version", get(answer)).merge(operations(&worker, &metrics, &readiness));
    let listener = TcpListener::bind("127.0.0.1:8080").await?;
    println!("http://{}", listener.local_addr()?);
    serve(listener, service, &worker, &readiness, Duration::from_secs(1)).await?;
    trainer.shutdown().await;
    Ok(())
}

/// Commits a version each second.
async fn train(trainer: Worker) -> Result<(), tensorwire::WorkerError> {
    let set = trainer.set("policy");
    for version in 1.. {
        let weights = Tensor::from_values(trainer.pool(), &[2], &[version as f32, 0.0])?;
        set.commit(version, [("w", weights)]).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

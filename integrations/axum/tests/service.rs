//! The routes of a service as a client of HTTP sees them, and its end by a signal, in a process of its own.

mod http;

use std::{error::Error, process::Stdio, sync::OnceLock, time::Duration};

use axum::{Router, routing::get};
use serde_json::Value;
use tensorwire::{Tensor, Worker};
use tensorwire_axum::{Metrics, Readiness, operations, serve};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::Command,
    time::timeout,
};

use http::{ask, served};

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

/// Longest duration of a test.
const LIMIT: Duration = Duration::from_secs(30);

/// The recorder of this process: it can have one only.
fn metrics() -> &'static Metrics {
    static INSTALLED: OnceLock<Metrics> = OnceLock::new();
    INSTALLED.get_or_init(|| Metrics::install().unwrap_or_else(|error| unreachable!("{error}")))
}

/// The value of the line of `page` that begins with `name` and has all `labels`.
fn value(page: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let line = page
        .lines()
        .find(|line| line.starts_with(name) && labels.iter().all(|label| line.contains(label)))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test]
async fn metrics_count_what_was_fetched_with_help_units_and_histograms() -> Outcome {
    let metrics = metrics();
    let server = Worker::builder("counted").start().await?;
    server.publish("w", Tensor::from_values(server.pool(), &[1024], &[1.0f32; 1024])?)?;
    let client = Worker::builder("counting").start().await?;
    let peer = client.peer_at(server.address()).await?;
    let address = served(operations(&client, metrics, &Readiness::new(&client))).await?;

    for _ in 0..37 {
        peer.fetch("w").await?;
    }

    let (status, page) = timeout(LIMIT, ask(&address, "/metrics", &[])).await??;
    assert_eq!(status, 200);
    let labels = ["direction=\"received\"", "peer=\"/job:counted/replica:0/task:0\""];
    assert_eq!(value(&page, "tensorwire_transfers_total{", &labels), Some(37.0), "{page}");
    assert_eq!(value(&page, "tensorwire_bytes_total{", &labels), Some(37.0 * 4096.0), "{page}");
    let peers = ["worker=\"/job:counting/replica:0/task:0\""];
    assert_eq!(value(&page, "tensorwire_peers_connected{", &peers), Some(1.0), "{page}");
    assert!(page.contains("# HELP tensorwire_bytes_total "), "{page}");
    assert!(page.contains("# TYPE tensorwire_receive_seconds histogram"), "{page}");
    assert!(
        value(&page, "tensorwire_receive_seconds_bucket{", &["operation=\"fetch\"", "le=\"+Inf\""])
            >= Some(37.0),
        "{page}"
    );
    client.shutdown().await;
    server.shutdown().await;
    Ok(())
}

#[tokio::test]
async fn a_service_is_ready_when_its_peer_and_its_weights_are_there() -> Outcome {
    let server = Worker::builder("needed").start().await?;
    let client = Worker::builder("needing").start().await?;
    let peer = client.set_address("needed", server.address())?;
    let readiness = Readiness::new(&client);
    readiness.require_peer(&peer);
    readiness.require_peer(&peer);
    let weights = readiness.require("weights");
    let address = served(operations(&client, metrics(), &readiness)).await?;

    let (status, body) = timeout(LIMIT, ask(&address, "/ready", &[])).await??;
    let report: Value = serde_json::from_str(&body)?;
    assert_eq!(status, 503);
    assert_eq!(report["peers"]["/job:needed/replica:0/task:0"], Value::Null);
    assert_eq!(report["requirements"]["weights"], Value::Null);

    peer.connect().await?;
    assert_eq!(timeout(LIMIT, ask(&address, "/ready", &[])).await??.0, 503, "the weights are missing");
    weights.met("version 7");
    let (status, body) = timeout(LIMIT, ask(&address, "/ready", &[])).await??;
    let report: Value = serde_json::from_str(&body)?;
    assert_eq!(status, 200, "{body}");
    assert_eq!(report["requirements"]["weights"], "version 7");
    assert!(report["peers"]["/job:needed/replica:0/task:0"].is_string(), "{body}");
    weights.missing();
    assert_eq!(timeout(LIMIT, ask(&address, "/ready", &[])).await??.0, 503);
    client.shutdown().await;
    server.shutdown().await;
    Ok(())
}

#[tokio::test]
async fn health_ends_with_the_worker() -> Outcome {
    let worker = Worker::builder("healthy").start().await?;
    let address = served(operations(&worker, metrics(), &Readiness::new(&worker))).await?;
    let (status, body) = timeout(LIMIT, ask(&address, "/health", &[])).await??;
    let health: Value = serde_json::from_str(&body)?;
    assert_eq!((status, &health["runs"]), (200, &Value::Bool(true)));
    assert_eq!(health["incarnation"], worker.incarnation().to_string());

    worker.shutdown().await;
    let (status, body) = timeout(LIMIT, ask(&address, "/health", &[])).await??;
    let health: Value = serde_json::from_str(&body)?;
    assert_eq!((status, &health["runs"]), (503, &Value::Bool(false)));
    Ok(())
}

#[test]
fn a_second_recorder_is_an_error_that_names_the_way_out() {
    metrics();
    let error = Metrics::install().map(drop).map_err(|error| error.to_string());
    assert!(error.is_err_and(|text| text.contains("Metrics::of")));
}

/// Serves `/slow`, which ends when the service is not ready any more, and prints its address.
#[tokio::test]
#[ignore = "the child process of another test"]
async fn child_of_sigterm_test() -> Outcome {
    let worker = Worker::builder("ending").start().await?;
    let readiness = Readiness::new(&worker);
    let watched = readiness.clone();
    let slow = move || async move {
        println!("slow begins");
        while watched.is_ready() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        "the last answer"
    };
    let router = Router::new().route("/slow", get(slow));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("address {}", listener.local_addr()?);
    serve(listener, router, &worker, &readiness, Duration::from_millis(50)).await?;
    println!(
        "the worker is shut down: {}",
        worker.publish("w", Tensor::from_values(worker.pool(), &[1], &[1u8])?).is_err()
    );
    Ok(())
}

#[tokio::test]
async fn sigterm_ends_a_service_when_the_requests_under_way_are_answered() -> Outcome {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--exact", "child_of_sigterm_test", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let output = child.stdout.take().ok_or("the child has no output")?;
    let mut lines = BufReader::new(output).lines();
    let mut line_with = async |text: &str| -> Result<String, Box<dyn Error + Send + Sync>> {
        while let Some(line) = timeout(LIMIT, lines.next_line()).await?? {
            if let Some((_, rest)) = line.split_once(text) {
                return Ok(rest.trim().to_owned());
            }
        }
        Err(format!("the child printed no line with {text:?}").into())
    };
    let address = line_with("address ").await?;
    let asked = address.clone();
    let slow = tokio::spawn(async move { ask(&asked, "/slow", &[]).await });
    line_with("slow begins").await?;

    let process = child.id().ok_or("the child has ended")?;
    Command::new("kill").args(["-TERM", &process.to_string()]).status().await?;

    assert_eq!(timeout(LIMIT, slow).await???, (200, "the last answer".to_owned()));
    assert_eq!(line_with("the worker is shut down: ").await?, "true");
    assert!(timeout(LIMIT, child.wait()).await??.success());
    assert!(ask(&address, "/slow", &[]).await.is_err(), "nobody listens any more");
    Ok(())
}

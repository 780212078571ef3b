//! The routes that operators and Prometheus ask.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Waker},
};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use tensorwire::Worker;

use crate::{metrics::Metrics, readiness::Readiness};

/// The version of the text format that Prometheus asks for.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Debug, Clone)]
struct Operated {
    worker: Worker,
    metrics: Metrics,
    readiness: Readiness,
}

/// The answer of `GET /health`.
#[derive(Debug, Serialize)]
struct Health {
    runs: bool,
    worker: String,
    address: String,
    /// As text: it has 64 bits, of which JSON's numbers keep 53.
    incarnation: String,
}

/// `GET /metrics`, `/health` and `/ready`, to be merged into the router of a service. They show names and addresses of peers:
/// where strangers reach the service, serve them at another port, by a router of their own.
pub fn operations(worker: &Worker, metrics: &Metrics, readiness: &Readiness) -> Router {
    let operated =
        Operated { worker: worker.clone(), metrics: metrics.clone(), readiness: readiness.clone() };
    Router::new()
        .route("/metrics", get(show_metrics))
        .route("/health", get(show_health))
        .route("/ready", get(show_readiness))
        .with_state(operated)
}

async fn show_metrics(State(operated): State<Operated>) -> Response {
    ([(CONTENT_TYPE, PROMETHEUS)], operated.metrics.render(&operated.worker)).into_response()
}

async fn show_health(State(operated): State<Operated>) -> Response {
    let Operated { worker, .. } = operated;
    // Ends with the worker's shutdown, so one poll says whether there was one.
    let runs = pin!(worker.join()).poll(&mut Context::from_waker(Waker::noop())).is_pending();
    let incarnation = worker.incarnation().to_string();
    let health =
        Health { runs, worker: worker.name().to_owned(), address: worker.address().to_owned(), incarnation };
    (status(runs), Json(health)).into_response()
}

async fn show_readiness(State(operated): State<Operated>) -> Response {
    let report = operated.readiness.report();
    (status(report.ready), Json(report)).into_response()
}

fn status(good: bool) -> StatusCode {
    if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

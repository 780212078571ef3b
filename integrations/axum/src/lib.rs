//! What an [axum](https://docs.rs/axum) service needs around Tensorwire's workers: metrics for Prometheus, probes that
//! Kubernetes asks, traces over processes, and an end in which no request is lost.
//!
//! | route | what |
//! | --- | --- |
//! | `GET /metrics` | [`Metrics`]: counters and histograms of the process and gauges of the worker, in Prometheus' text format |
//! | `GET /health` | whether the worker runs: 200, or 503 after its shutdown. For a liveness probe |
//! | `GET /ready` | [`Readiness`]: 200, or 503 with what is missing. For a readiness probe |
//!
//! ```no_run
//! use std::time::Duration;
//! use axum::{Router, routing::get};
//! use tensorwire::{Worker, sets::Policy};
//! use tensorwire_axum::{Metrics, Readiness, operations, serve};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let metrics = Metrics::install()?; // before the first worker
//!     let worker = Worker::builder("search").start().await?;
//!     let readiness = Readiness::new(&worker);
//!     let trainer = worker.set_address("trainer", "trainer:7000")?;
//!     readiness.require_peer(&trainer);
//!     let weights = readiness.require("weights");
//!
//!     // A task that follows the trainer's weights says which version the service uses.
//!     tokio::spawn(async move {
//!         let mut versions = trainer.set("policy").follow(Policy::Latest);
//!         while let Some(staged) = versions.next().await {
//!             if let Ok(staged) = staged {
//!                 let snapshot = staged.apply();
//!                 weights.met(format!("version {}", snapshot.version()));
//!             }
//!         }
//!     });
//!
//!     let service = Router::new().route("/", get(|| async { "hello" }));
//!     let service = service.merge(operations(&worker, &metrics, &readiness));
//!     let listener = tokio::net::TcpListener::bind("0.0.0.0:8080").await?;
//!     serve(listener, service, &worker, &readiness, Duration::from_secs(5)).await?;
//!     Ok(())
//! }
//! ```
//!
//! # The end of a service
//! [`serve`] ends at SIGTERM or SIGINT, in this order: `/ready` answers 503, so that load balancers send no further requests;
//! after a pause, in which they learn that, no connection is accepted; requests under way are finished; the worker shuts
//! down, which tells its peers. A second signal ends the process at once.
//!
//! # Traces
//! With the feature `opentelemetry` a trace goes from the HTTP request through a [call](tensorwire::calls) into the handler of another
//! process: [`traced`] continues the trace of a request's headers, and [`OpenTelemetry`] that of a call. What the exporter is, and how spans
//! are sampled, is the program's choice.
//!
//! ```no_run
//! # #[cfg(feature = "opentelemetry")]
//! # async fn start(provider: opentelemetry_sdk::trace::SdkTracerProvider, service: axum::Router) -> Result<(), tensorwire::WorkerError> {
//! use opentelemetry::{global, trace::TracerProvider as _};
//! use opentelemetry_sdk::propagation::TraceContextPropagator;
//! use tensorwire_axum::{OpenTelemetry, traced};
//! use tracing_subscriber::{layer::SubscriberExt as _, util::SubscriberInitExt as _};
//!
//! global::set_text_map_propagator(TraceContextPropagator::new()); // reads the header `traceparent`
//! let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("search"));
//! tracing_subscriber::registry().with(layer).init();
//!
//! let worker = tensorwire::Worker::builder("search").propagator(OpenTelemetry).start().await?;
//! let service = traced(service);
//! # let _ = (worker, service); Ok(())
//! # }
//! ```
//!
//! # Versions
//! Version 0.8 of this crate works with axum 0.8.

#![forbid(unsafe_code)]

mod drain;
mod metrics;
mod readiness;
mod routes;
#[cfg(feature = "opentelemetry")]
mod trace;

pub use drain::{ServeError, serve};
pub use metrics::{InstallError, Metrics};
pub use readiness::{Readiness, Requirement};
pub use routes::operations;
#[cfg(feature = "opentelemetry")]
pub use trace::{OpenTelemetry, traced};

//! A service from its first request to its last.

use std::{io, time::Duration};

use axum::Router;
use tensorwire::Worker;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
};
use tracing::info;

use crate::readiness::Readiness;

/// Why a service ended before a signal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// SIGTERM and SIGINT cannot be handled.
    #[error("signals cannot be handled: {0}")]
    Signals(#[source] io::Error),
    /// The listener failed.
    #[error("serving HTTP failed: {0}")]
    Http(#[source] io::Error),
}

/// Serves `service` until SIGTERM or SIGINT, and then ends [in order](crate#the-end-of-a-service): `/ready` answers 503 for
/// `pause`, in which load balancers learn of it; then no connection is accepted, requests under way are finished, and the
/// worker shuts down. Returns when all that is done. A second signal ends the process at once, with status 130.
///
/// In Kubernetes `pause` is a little longer than the probe's `periodSeconds` times its `failureThreshold`, and
/// `terminationGracePeriodSeconds` longer than `pause` and the longest request together.
///
/// # Errors
/// [`ServeError`]. The worker is shut down then, too.
///
/// # Cancel safety
/// Dropping the future drops the listener and all requests; the worker goes on.
pub async fn serve(
    listener: TcpListener,
    service: Router,
    worker: &Worker,
    readiness: &Readiness,
    pause: Duration,
) -> Result<(), ServeError> {
    let signals = Signals::handle().map_err(ServeError::Signals)?;
    let ends = end_after(signals, readiness.clone(), pause);
    let served = axum::serve(listener, service).with_graceful_shutdown(ends).await;
    worker.shutdown().await;
    info!(target: "tensorwire::worker", worker = worker.name(), "the service has ended");
    served.map_err(ServeError::Http)
}

async fn end_after(mut signals: Signals, readiness: Readiness, pause: Duration) {
    let name = signals.next().await;
    info!(target: "tensorwire::worker", signal = name, pause_s = pause.as_secs_f64(), "the service ends: it is not ready any more");
    readiness.begin_end();
    tokio::spawn(async move {
        signals.next().await;
        std::process::exit(130);
    });
    tokio::time::sleep(pause).await;
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn handle() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

//! Reports: what a worker is doing, for its own program and for peers.
//!
//! [`Worker::report`](crate::Worker::report) is the report of the own worker, and [`Peer::report`](crate::Peer::report) asks a peer for its
//! own, as `tensorwire top` does each second. Rates come from two reports:
//!
//! ```
//! use tensorwire::Worker;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tensorwire::WorkerError> {
//! let server = Worker::builder("ps").start().await?;
//! let client = Worker::client().start().await?;
//! let peer = client.peer_at(server.address()).await?;
//! let earlier = peer.report().await?;
//! // Some time later.
//! let later = peer.report().await?;
//! let seconds = (later.clock - earlier.clock).as_secs_f64();
//! if let (Some(earlier), Some(later)) = (earlier.total, later.total) {
//!     println!("{} bytes per second sent", (later.bytes_sent - earlier.bytes_sent) as f64 / seconds);
//! }
//! # Ok(())
//! # }
//! ```

use std::pin::pin;

use tensorwire_protocol::wire::control::ControlFrame;
pub use tensorwire_protocol::{
    Waiting,
    report::{PeerReport, PoolReport, SetReport, Traffic, WorkerReport},
};

use crate::{
    error::{Transfer, WorkerError},
    session::Session,
    worker::{Worker, peer::Peer},
};

impl Worker {
    /// A report of this worker: its peers, sets and memory. [`Peer::report`](crate::Peer::report) is the same of another worker.
    pub fn report(&self) -> WorkerReport {
        self.node.report(None)
    }
}

impl Peer {
    /// Asks the peer for a report of itself. It takes no data connection and changes none of the numbers in it. Sets that this worker may
    /// not read are left out. A peer with [`Trust::Hostile`](crate::Trust::Hostile) names no other peer, and leaves out its memory and what
    /// it has moved in all. The deadline is the worker's [`timeout`](crate::WorkerBuilder::timeout).
    ///
    /// # Errors
    /// [`WorkerError::Control`], [`WorkerError::PeerLost`] or [`WorkerError::DeadlineExceeded`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn report(&self) -> Result<WorkerReport, WorkerError> {
        let (node, known) = (&self.worker.node, &self.known);
        if node.is_own(known) {
            return Ok(self.worker.report());
        }
        let reported = async {
            let session = node.session(known).await?;
            let (request, report) = session.ask_report().map_err(|_| self.unreported(&session))?;
            session.send(ControlFrame::ReportRequest { request }).await?;
            report.await.map_err(|_| self.unreported(&session))
        };
        let limit = self.worker.operations.defaults.limit;
        let what = || format!("asking {} for a report", known.name());
        self.worker.within(limit, what, "does the peer run?", pin!(reported)).await
    }

    /// The error of a session that ended before the report.
    fn unreported(&self, session: &Session) -> WorkerError {
        let transfer = Transfer { peer: &session.peer.worker, key: "report", step: None };
        self.lost_session(session, transfer.name())
    }
}

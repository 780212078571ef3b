//! Shutting a worker down.

use std::{sync::atomic::Ordering, time::Duration};

use tensorwire_fabric::timeout;
use tensorwire_protocol::{Code, Status};

use crate::{error::Lost, session::known_peer::KnownPeer, worker::Worker};

/// How long a shutdown waits for the sessions' goodbyes.
const GOODBYES: Duration = Duration::from_secs(2);

/// Interval at which a shutdown checks whether transfers are still under way.
const LOOK: Duration = Duration::from_millis(1);

impl Worker {
    /// Shuts the worker down in order. New operations fail with [`WorkerError::ShutDown`](crate::WorkerError), and
    /// peers that wait for a publication get UNAVAILABLE. Transfers under way may take
    /// [`WorkerBuilder::shutdown_grace`](crate::WorkerBuilder::shutdown_grace). Then steps end with ABORTED, peers get
    /// a goodbye, connections close, and the address is free again. Handlers of [calls](crate::calls::Handling) are not waited for.
    ///
    /// # Cancel safety
    /// Cancel-safe: new operations stay refused, and another call continues the shutdown.
    pub async fn shutdown(&self) {
        let node = &self.node;
        self.operations.refusing.store(true, Ordering::Release);
        let over = Status::new(Code::Unavailable, format!("{} is shut down", node.name()));
        node.values().published.close(over.clone());
        node.values().heads.close(over);
        let _ = timeout(&**node.runtime(), self.operations.defaults.grace, self.quiet()).await;
        node.begin_closing();
        node.values().steps.abort_all(&Status::new(Code::Aborted, "Shutdown"));
        // Each session sends a goodbye and closes its connections. The limit is for peers that do not read.
        let _ = timeout(&**node.runtime(), GOODBYES, node.sessions().none_served()).await;
        for peer in node.all_peers() {
            if let Some(connection) = peer.connection() {
                connection.close(&Lost::shut_down_here()).await;
            }
        }
        node.values().sets.close();
        node.close_control().await;
        self.operations.closed.send_replace(true);
    }

    /// Waits until this worker is shut down through any of its clones. For the main function of a server.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn join(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.operations.closed.subscribe().wait_for(|is_closed| *is_closed).await;
    }

    /// Waits until no transfer is under way.
    async fn quiet(&self) {
        let is_transferring =
            |peer: &KnownPeer| peer.connection().is_some_and(|link| link.protocol.is_transferring());
        while self.node.all_peers().iter().any(is_transferring) {
            self.node.runtime().sleep(LOOK).await;
        }
    }
}

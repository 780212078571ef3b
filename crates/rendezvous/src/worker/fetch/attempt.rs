//! A single fetch, which is repeated once if its connection breaks.

use std::sync::Arc;

use tensorwire_protocol::{ReceiveOptions, Scope};

use crate::{
    connection::DataConnection,
    error::{PeerLoss, Transfer, WorkerError},
    peer_memory::target::Target,
    session::known_peer::KnownPeer,
    values::{
        published::{Edition, Version},
        tensor::Tensor,
    },
    worker::{Worker, receive_into::Filled},
};

impl Worker {
    /// Fetches one tensor. A tensor that this worker has published itself needs no connection.
    ///
    /// Fetches are idempotent, so one whose connection broke is repeated once, with the same incarnation of the peer.
    pub(crate) async fn fetch_one(
        &self,
        peer: &KnownPeer,
        transfer: &Transfer<'_>,
        scope: &Scope,
        options: &ReceiveOptions,
    ) -> Result<(Tensor, Option<Version>), WorkerError> {
        // Rare cases are boxed, because otherwise the future of every fetch would have room for them.
        if self.node.is_own(peer) {
            let remote = |status| WorkerError::Remote { transfer: transfer.name(), status };
            let own = Box::pin(self.node.values().own(*scope, transfer.key)).await;
            let Edition { tensor, version, .. } = own.map_err(remote)?;
            return Ok((tensor, Some(Version { incarnation: self.incarnation(), number: version })));
        }
        let connection = match peer.live_connection() {
            Some(connection) => connection,
            None => Box::pin(self.node.connected(peer)).await?,
        };
        let lost = match connection.fetch(scope, transfer, options).await {
            Err(lost) if is_repeatable(&lost) => lost,
            ended => return ended,
        };
        Box::pin(async move {
            let connection = self.connected_again(peer, &connection, lost).await?;
            connection.fetch(scope, transfer, options).await
        })
        .await
    }

    /// Like [`fetch_one`](Self::fetch_one), into `target`.
    pub(super) async fn fetch_into(
        &self,
        peer: &KnownPeer,
        transfer: Transfer<'_>,
        scope: Scope,
        target: &Target,
    ) -> Result<Filled, WorkerError> {
        let mut connection = self.node.connected(peer).await?;
        if let Some(filled) = connection.fill(scope, transfer, target).await {
            let (metadata, version) = filled?;
            let buffer = target.take().ok_or_else(WorkerError::handed_out)?;
            return Ok(Filled { metadata, buffer, version });
        }
        let mut ended = connection.receive_into(&scope, &transfer, target).await;
        if let Err(lost) = ended {
            if !is_repeatable(&lost) {
                return Err(lost);
            }
            connection = self.connected_again(peer, &connection, lost).await?;
            ended = connection.receive_into(&scope, &transfer, target).await;
        }
        let mut held = ended?;
        let version = held.get().and_then(|received| connection.version(received));
        let (metadata, buffer) = target.fill(transfer, &mut held, &self.node.pools().receive).await?;
        Ok(Filled { metadata, buffer, version })
    }

    /// A connection that replaces one that broke with `lost`, to the same incarnation of the peer.
    async fn connected_again(
        &self,
        peer: &KnownPeer,
        broken: &Arc<DataConnection>,
        lost: WorkerError,
    ) -> Result<Arc<DataConnection>, WorkerError> {
        match self.node.connected(peer).await {
            Ok(next) if next.peer_incarnation == broken.peer_incarnation => {
                log!(DEBUG, peer = peer.name(), %lost, "the connection broke; repeating the fetch");
                Ok(next)
            }
            Ok(next) => Err(lost.and(&format!(
                "the fetch was not repeated, because the peer restarted (incarnation {:016x}, now {:016x}) and may \
                 publish something else",
                broken.peer_incarnation,
                next.peer_incarnation
            ))),
            Err(WorkerError::ShutDown) => Err(WorkerError::ShutDown),
            Err(error) => Err(lost.and(&format!("reconnecting failed: {error}"))),
        }
    }
}

/// Whether a new connection may succeed where this one failed.
pub(crate) fn is_repeatable(error: &WorkerError) -> bool {
    matches!(error, WorkerError::PeerLost { loss: PeerLoss::Gone | PeerLoss::Unreachable, .. })
}

//! One fetch, made again once if its connection breaks.

use std::sync::Arc;

use protocol::{Manner, Scope};

use crate::{
    Peer, PeerLoss, Tensor, Version, Worker, WorkerError, error::TransferName, receive_into::Target,
    route::Route, step::HeldTensor,
};

impl Worker {
    /// Fetches are idempotent, so one whose connection broke is made again, once and with the same life of the peer.
    pub(super) async fn fetch_one(
        &self,
        peer: &Peer,
        transfer: &TransferName,
        scope: Scope,
        manner: Manner,
    ) -> Result<(Tensor, Option<Version>), WorkerError> {
        let route = peer.connected(&self.node).await?;
        match route.receive(scope, transfer, manner).await {
            Err(lost) if is_repeatable(&lost) => {
                let route = self.connected_again(peer, &route, lost).await?;
                route.receive(scope, transfer, manner).await
            }
            ended => ended,
        }
    }

    /// As [`fetch_one`](Self::fetch_one), into `target`.
    pub(super) async fn fetch_held(
        &self,
        peer: &Peer,
        transfer: &TransferName,
        scope: Scope,
        target: &Arc<Target>,
    ) -> Result<(HeldTensor, Option<Version>), WorkerError> {
        let mut route = peer.connected(&self.node).await?;
        let mut ended = route.receive_into(scope, transfer, target, None).await;
        if let Err(lost) = ended {
            if !is_repeatable(&lost) {
                return Err(lost);
            }
            route = self.connected_again(peer, &route, lost).await?;
            ended = route.receive_into(scope, transfer, target, None).await;
        }
        let held = ended?;
        let version = route.version(&held);
        Ok((held, version))
    }

    /// A connection in place of one that broke with `lost`, to the same life of the peer.
    async fn connected_again(
        &self,
        peer: &Peer,
        broken: &Route,
        lost: WorkerError,
    ) -> Result<Route, WorkerError> {
        match peer.connected(&self.node).await {
            Ok(next) if next.peer_incarnation() == broken.peer_incarnation() => {
                tracing::debug!(peer = peer.name(), %lost, "fetching once more");
                Ok(next)
            }
            Ok(next) => Err(lost.and(&format!(
                "it was not fetched again, because the peer was restarted (incarnation {:016x}, now {:016x}) and may \
                 publish something else",
                broken.peer_incarnation(),
                next.peer_incarnation()
            ))),
            Err(WorkerError::ShutDown) => Err(WorkerError::ShutDown),
            Err(error) => Err(lost.and(&format!("connecting again failed: {error}"))),
        }
    }
}

/// Whether the connection broke in a way that another one may mend.
fn is_repeatable(error: &WorkerError) -> bool {
    matches!(error, WorkerError::PeerLost { loss: PeerLoss::Gone, .. })
}

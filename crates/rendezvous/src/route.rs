//! How tensors move between this worker and one peer.

use std::{sync::Arc, time::Duration};

use protocol::{Counters, Manner, Scope, StepId};
use tracing::Instrument as _;
use verbs_reactor::{FabricKind, QueuePairStats};

use crate::{
    Tensor, Version, WorkerError,
    control::{Arrived, GrpcRoute, HeldArrival},
    data::DataConnection,
    error::{Lost, TransferName},
    meter::receive_span,
    receive_into::Target,
    step::{HeldTensor, handed_out},
};

/// What requests to a peer go over. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) enum Route {
    /// A queue pair with the protocol on it.
    Data(Arc<DataConnection>),
    /// Calls on the control plane's port.
    Grpc(Arc<GrpcRoute>),
}

impl Route {
    /// The fabric it uses.
    pub(crate) fn kind(&self) -> FabricKind {
        match self {
            Self::Data(connection) => connection.kind,
            Self::Grpc(_) => FabricKind::Grpc,
        }
    }

    /// Whether what travels over it is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        match self {
            Self::Data(connection) => connection.queue_pair.capabilities().encrypted,
            Self::Grpc(route) => route.is_encrypted(),
        }
    }

    /// The life of the peer that it leads to.
    pub(crate) fn peer_incarnation(&self) -> u64 {
        match self {
            Self::Data(connection) => connection.peer_incarnation,
            Self::Grpc(route) => route.peer_incarnation,
        }
    }

    /// Whether this is the same one.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Data(one), Self::Data(other)) => Arc::ptr_eq(one, other),
            (Self::Grpc(one), Self::Grpc(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Its queue pair and protocol, if it has them.
    pub(crate) fn data(&self) -> Option<&Arc<DataConnection>> {
        match self {
            Self::Data(connection) => Some(connection),
            Self::Grpc(_) => None,
        }
    }

    /// Whether it can carry no more transfers.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Data(connection) => connection.is_over(),
            Self::Grpc(route) => route.is_over(),
        }
    }

    /// Whether its end is known here, and what it may have lost is noted.
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Self::Data(connection) => connection.has_ended(),
            Self::Grpc(route) => route.has_ended(),
        }
    }

    /// Whether a value is on its way.
    pub(crate) fn is_transferring(&self) -> bool {
        match self {
            Self::Data(connection) => connection.protocol.is_transferring(),
            Self::Grpc(route) => route.is_transferring(),
        }
    }

    /// The peer has said why it will end it. Nothing new goes over it.
    pub(crate) fn expect_end(&self, why: &Lost) {
        match self {
            Self::Data(connection) => connection.expect_end(why),
            Self::Grpc(route) => route.expect_end(why),
        }
    }

    /// Waits until its end is known, or nothing is under way here that the peer could still answer.
    pub(crate) async fn until_settled(&self) {
        match self {
            Self::Data(connection) => connection.until_end().await,
            Self::Grpc(route) => route.until_settled().await,
        }
    }

    /// Waits until its end is known.
    pub(crate) async fn until_end(&self) {
        match self {
            Self::Data(connection) => connection.until_end().await,
            Self::Grpc(route) => route.until_end().await,
        }
    }

    /// Ends every transfer over it.
    pub(crate) fn fail(&self, why: &Lost) {
        match self {
            Self::Data(connection) => connection.fail(why),
            Self::Grpc(route) => route.fail(why),
        }
    }

    /// Begins its end.
    pub(crate) async fn close(&self, why: &Lost) {
        match self {
            Self::Data(connection) => connection.close(why).await,
            Self::Grpc(route) => route.close(why),
        }
    }

    /// What was received for a step and not handed out goes back.
    pub(crate) fn discard(&self, step: StepId) {
        match self {
            Self::Data(connection) => connection.protocol.discard(step),
            Self::Grpc(route) => route.discard(step),
        }
    }

    /// Counts that it stands, for the first time with its peer or once more.
    pub(crate) fn count_connect(&self, is_again: bool) {
        let encrypted = self.is_encrypted();
        match self {
            Self::Data(connection) => connection.meter.connected(is_again, encrypted),
            Self::Grpc(route) => route.values.meter.connected(is_again, encrypted),
        }
    }

    /// The fabric's counters.
    pub(crate) fn stats(&self) -> QueuePairStats {
        match self {
            Self::Data(connection) => connection.queue_pair.stats(),
            Self::Grpc(route) => route.stats(),
        }
    }

    /// The protocol's counters.
    pub(crate) fn counters(&self) -> Counters {
        match self {
            Self::Data(connection) => connection.protocol.counters(),
            Self::Grpc(route) => route.counters(),
        }
    }

    /// Receives one value; with its version, if `scope` asks for that.
    pub(crate) async fn receive(
        &self,
        scope: Scope,
        name: &TransferName,
        manner: Manner,
    ) -> Result<(Tensor, Option<Version>), WorkerError> {
        match self {
            Self::Data(connection) => connection.receive(scope, name, manner).await,
            Self::Grpc(route) => {
                let mut held = Box::pin(called(route, name, route.get(scope, name, None, None))).await?;
                let version = held.version();
                Ok((held.take().map(Arrived::into_tensor).ok_or_else(handed_out)?, version))
            }
        }
    }

    /// Receives one of several values that are wanted together: it is not lost if the others do not come. `limit` is told
    /// to the sender, where it can be; the caller keeps it.
    pub(crate) async fn receive_held(
        &self,
        scope: Scope,
        name: &TransferName,
        manner: Manner,
        limit: Duration,
    ) -> Result<HeldTensor, WorkerError> {
        match self {
            Self::Data(connection) => {
                connection.receive_held(scope, name, manner).await.map(HeldTensor::Peers)
            }
            Self::Grpc(route) => {
                let get = route.get(scope, name, None, Some(limit));
                Box::pin(called(route, name, get)).await.map(HeldTensor::Grpc)
            }
        }
    }

    /// Receives one value into `target` if that is possible; [`Target::fill`] does the rest.
    pub(crate) async fn receive_into(
        &self,
        scope: Scope,
        name: &TransferName,
        target: &Arc<Target>,
        limit: Option<Duration>,
    ) -> Result<HeldTensor, WorkerError> {
        match self {
            Self::Data(connection) => {
                connection.receive_into(scope, name, target).await.map(HeldTensor::Peers)
            }
            Self::Grpc(route) => {
                let get = route.get(scope, name, Some(target), limit);
                Box::pin(called(route, name, get)).await.map(HeldTensor::Grpc)
            }
        }
    }

    /// The version of a value that was received over it, if it came with one.
    pub(crate) fn version(&self, held: &HeldTensor) -> Option<Version> {
        match (self, held) {
            (Self::Data(connection), HeldTensor::Peers(held)) => connection.version(held.get()?),
            (Self::Grpc(_), HeldTensor::Grpc(held)) => held.version(),
            _ => None,
        }
    }
}

/// A call, counted and traced.
async fn called(
    route: &GrpcRoute,
    name: &TransferName,
    get: impl Future<Output = Result<HeldArrival, WorkerError>>,
) -> Result<HeldArrival, WorkerError> {
    let span = receive_span(name, FabricKind::Grpc);
    let got = get.instrument(span.clone()).await;
    route.values.meter.ended(&span, got.as_ref().map(HeldArrival::byte_length));
    got
}

impl From<Arc<DataConnection>> for Route {
    fn from(connection: Arc<DataConnection>) -> Self {
        Self::Data(connection)
    }
}

//! Setting up a route over gRPC, from both ends: tokens change hands over the session, as other fabrics' addresses do.

use std::sync::Arc;

use protocol::{
    Agreed, Code, Destination, Status,
    limits::SLOT_BYTES,
    wire::control::{Connect, ControlFrame, RingOffer},
};
use verbs_reactor::{FabricError, FabricKind, timeout};

use crate::{
    Peer, WorkerError,
    control::{ControlError, Expected, GrpcRoute, RouteEnds, TensorCalls, Token},
    meter::Meter,
    node::{Node, fabric_number},
    route::Route,
    session::Session,
};

/// That this worker moves tensors over gRPC if nothing better does.
#[derive(Debug)]
pub(crate) struct GrpcOffer {
    pub(crate) calls: Arc<TensorCalls>,
    /// How many fabrics are preferred to it.
    pub(crate) place: usize,
}

fn failed(detail: String) -> WorkerError {
    FabricError::Connect { kind: FabricKind::Grpc, step: "agreeing with the peer", detail }.into()
}

impl Node {
    /// Agrees with the peer on a route, and connects this end's direction. `None` when the peer is connecting at the
    /// same moment, and its route counts.
    pub(crate) async fn open_grpc(
        self: &Arc<Self>,
        peer: &Peer,
        session: &Arc<Session>,
    ) -> Result<Option<Route>, WorkerError> {
        let (number, answered) = session.open().map_err(failed)?;
        let opened = async {
            let (token, expected) = self.expect_calls()?;
            session.send(ControlFrame::Connect(self.grpc_end(number, &token))).await?;
            let answer = timeout(&*self.runtime, self.connect_limit, answered).await;
            let answer = answer.map_err(|_| failed("the peer did not answer".to_owned()))?;
            match answer.map_err(|_| failed(session.why_over()))? {
                Ok(answer) => {
                    let route = self.grpc_route(peer, session, expected, &answer)?;
                    route.connect().await?;
                    self.grpc_up(session, number, route).map(Some)
                }
                Err(status) if status.code == Code::AlreadyExists => Ok(None),
                Err(status) => Err(failed(status.to_string())),
            }
        }
        .await;
        if !matches!(opened, Ok(Some(_))) {
            session.forget(number);
        }
        opened
    }

    /// Answers the peer's Connect. This end's direction is connected when it is first used.
    pub(crate) async fn accept_grpc(
        self: &Arc<Self>,
        peer: &Peer,
        session: &Arc<Session>,
        offer: &Connect,
    ) -> Result<Route, WorkerError> {
        let (token, expected) = self.expect_calls()?;
        let route = self.grpc_route(peer, session, expected, offer)?;
        let route = self.grpc_up(session, offer.connection, route)?;
        session.send(ControlFrame::Connected(self.grpc_end(offer.connection, &token))).await?;
        Ok(route)
    }

    /// A token for the peer's calls, which may come as soon as it has heard of it.
    fn expect_calls(&self) -> Result<(Token, Expected), WorkerError> {
        let offer = self.grpc.as_ref();
        let offer = offer.ok_or_else(|| failed("this worker does not move tensors over gRPC".to_owned()))?;
        let token = Token::new(&*self.runtime);
        let expected = offer.calls.expect(&token);
        Ok((token, expected.ok_or_else(|| failed("a token cannot be shown".to_owned()))?))
    }

    /// Whether a Connect for gRPC can be agreed to.
    pub(crate) fn consider_grpc(&self) -> Result<(), Status> {
        if self.grpc.is_some() {
            return Ok(());
        }
        Err(Status::new(Code::Unavailable, format!("{} does not move tensors over gRPC", self.name)))
    }

    fn grpc_up(&self, session: &Session, number: u32, route: Arc<GrpcRoute>) -> Result<Route, WorkerError> {
        let route = Route::Grpc(route);
        let lost = |detail| WorkerError::Control(ControlError::Lost { detail });
        session.up(number, &route).map_err(lost)?;
        Ok(route)
    }

    fn grpc_route(
        &self,
        peer: &Peer,
        session: &Session,
        expected: Expected,
        other: &Connect,
    ) -> Result<Arc<GrpcRoute>, WorkerError> {
        let token = Token::from_connection_data(&other.data).map_err(failed)?;
        let ends = RouteEnds {
            expected,
            values: self.values.clone(),
            runtime: self.runtime.clone(),
            pool: self.pools.receive.clone(),
            peer: session.peer.worker.clone(),
            meter: Meter::new(self.labels.of(&session.peer.worker), FabricKind::Grpc, &self.log),
            incarnation: session.peer.incarnation,
            address: peer.address(),
            token,
            agreed: Agreed::of(&self.parameters, &other.parameters),
            connect_limit: self.connect_limit,
            certificate: session.certificate,
            session_over: session.ended(),
        };
        GrpcRoute::new(ends).ok_or_else(|| failed("a token cannot be shown".to_owned()))
    }

    /// This end, as it travels. There is no ring; the wire format wants one of the size that the parameters say.
    fn grpc_end(&self, connection: u32, token: &Token) -> Connect {
        let nowhere = |bytes: u32| Destination {
            region: 0,
            generation: 0,
            offset: 0,
            capacity: bytes.into(),
            result: None,
        };
        Connect {
            connection,
            kind: fabric_number(FabricKind::Grpc),
            data: token.to_connection_data(),
            parameters: self.parameters,
            ring: RingOffer {
                destination: nowhere(self.parameters.first_ring_bytes()),
                slots: nowhere(2 * SLOT_BYTES),
            },
            regions: Vec::new(),
        }
    }
}

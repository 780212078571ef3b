//! The gRPC service between two planes, as `proto/control.proto` describes it: its message and its only method.

use std::convert::Infallible;

use futures::Stream;
use tonic::{
    Request, Status, Streaming,
    body::Body,
    client::Grpc,
    codegen::http::{self, uri::PathAndQuery},
    server::{self, StreamingService},
    transport::Channel,
};
use tonic_prost::ProstCodec;

use super::ON_THE_WIRE_MAX;

/// The method of a session. The session ends when both directions have ended.
const ATTACH: &str = "/tensorwire.control.v1.Control/Attach";

/// One frame of the control protocol.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Frame {
    /// The encoded control frame.
    #[prost(bytes = "vec", tag = "1")]
    pub(super) data: Vec<u8>,
    /// The last frame of its direction; `data` is empty. An end without it is a loss: gRPC libraries report some
    /// broken connections as the regular end of a request.
    #[prost(bool, tag = "2")]
    pub(super) goodbye: bool,
    /// CRC-32C of `data`. It finds damage in transit, not attacks. A frame without it is accepted.
    #[prost(fixed32, optional, tag = "3")]
    pub(super) checksum: Option<u32>,
}

/// Opens a session that sends `frames`, whose lengths the session has checked.
pub(super) async fn attach(
    channel: Channel,
    frames: impl Stream<Item = Frame> + Send + 'static,
) -> Result<Streaming<Frame>, Status> {
    let mut grpc = Grpc::new(channel).max_decoding_message_size(ON_THE_WIRE_MAX);
    grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let (path, codec) = (PathAndQuery::from_static(ATTACH), ProstCodec::<Frame, Frame>::default());
    Ok(grpc.streaming(Request::new(frames), path, codec).await?.into_inner())
}

/// Answers one HTTP request: opens a session of `service`, unless the request is for another method.
pub(super) async fn answer(
    service: impl StreamingService<Frame, Response = Frame, ResponseStream: Send + 'static> + Send,
    request: http::Request<Body>,
) -> Result<http::Response<Body>, Infallible> {
    if request.uri().path() != ATTACH {
        return Ok(Status::unimplemented("a control plane has one method, Attach").into_http());
    }
    let grpc = server::Grpc::new(ProstCodec::<Frame, Frame>::default());
    Ok(grpc.max_decoding_message_size(ON_THE_WIRE_MAX).streaming(service, request).await)
}

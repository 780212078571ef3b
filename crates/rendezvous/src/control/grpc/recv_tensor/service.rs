//! The called end: who may call, and what each method does.

use std::{pin::Pin, sync::Arc};

use bytes::Bytes;
use prost::Message;
use protocol::{Scope, StepId, limits::NAME_BYTES_MAX};
use tonic::{
    Status,
    codegen::{
        Body, StdError,
        http::{HeaderValue, Request, Response, header, request},
    },
};

use super::{
    ORDER, TOKEN, TensorCalls,
    answer::Form,
    client::Once,
    messages::{CancelRecvRequest, FetchTensorRequest, RecvTensorRequest},
    route::GrpcRoute,
    served,
};
use crate::control::grpc::door::Guest;

/// The methods.
pub(super) mod path {
    pub(in super::super) const RECV: &str = "/tensorflow.WorkerService/RecvTensor";
    pub(in super::super) const RECV_STREAM: &str = "/tensorwire.tensors.v1.Tensors/RecvTensorStream";
    pub(in super::super) const FETCH: &str = "/tensorwire.tensors.v1.Tensors/FetchTensor";
    pub(in super::super) const CANCEL: &str = "/tensorwire.tensors.v1.Tensors/CancelRecv";
}

/// Longest request, in bytes: a key, and fields that are passed over.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Answers calls for tensors.
#[derive(Debug, Clone)]
pub(in crate::control::grpc) struct TensorService {
    calls: Arc<TensorCalls>,
}

impl TensorService {
    pub(in crate::control::grpc) fn new(calls: Arc<TensorCalls>) -> Self {
        Self { calls }
    }

    /// Whether a method of this service is there.
    pub(in crate::control::grpc) fn has(path: &str) -> bool {
        [path::RECV, path::RECV_STREAM, path::FETCH, path::CANCEL].contains(&path)
    }

    /// Answers one call.
    pub(in crate::control::grpc) async fn call(
        self,
        request: Request<tonic::body::Body>,
    ) -> Response<tonic::body::Body> {
        match self.answer(request).await {
            Ok(body) => {
                let mut response = Response::new(body);
                let grpc = HeaderValue::from_static("application/grpc");
                response.headers_mut().insert(header::CONTENT_TYPE, grpc);
                response
            }
            Err(status) => status.into_http(),
        }
    }

    async fn answer(&self, request: Request<tonic::body::Body>) -> Result<tonic::body::Body, Status> {
        let (parts, body) = request.into_parts();
        let route = self.caller(&parts).await?;
        let order = parts.headers.get(ORDER).and_then(|order| order.to_str().ok()?.parse().ok());
        let turn = order.map(|number| route.served.turns.of(number));
        let message = read_message(body).await?;
        let (id, scope, key) = match parts.uri.path() {
            path::FETCH => {
                let request: FetchTensorRequest = decoded(message)?;
                (0, request.scope(), request.name)
            }
            path::CANCEL => {
                let id = decoded::<CancelRecvRequest>(message)?.request_id.cast_unsigned();
                if !route.served.cancel(id) {
                    // Should it come after this, it is taken for a repeat.
                    self.calls.is_new(id);
                }
                return Ok(tonic::body::Body::new(Empty::new()));
            }
            _ => {
                let request: RecvTensorRequest = decoded(message)?;
                let id = request.request_id.cast_unsigned();
                (id, Scope::Step(StepId(request.step_id)), request.rendezvous_key)
            }
        };
        if key.len() > NAME_BYTES_MAX {
            let message =
                format!("the key has {} bytes, the limit is {NAME_BYTES_MAX}: shorten it", key.len());
            return Err(Status::invalid_argument(message));
        }
        if !self.calls.is_new(id) {
            return Err(Status::aborted(format!(
                "request {id:016x} was received before, or given up: a repeated receive would wait for a value that \
                 is taken already; ask with a request_id of its own"
            )));
        }
        let form = Form {
            message_bytes_max: self.calls.message_bytes_max,
            in_pieces: parts.uri.path() != path::RECV,
            validation: route.validation(),
        };
        Ok(tonic::body::Body::new(served::answer(route, (id, scope, key), turn, form).await?))
    }

    /// The route that a call belongs to, by its token.
    async fn caller(&self, request: &request::Parts) -> Result<Arc<GrpcRoute>, Status> {
        let guest = request.extensions.get::<Arc<Guest>>();
        let guest = guest.ok_or_else(|| Status::internal("a connection without a guest"))?;
        let route = match request.headers.get(TOKEN) {
            Some(token) => self.calls.route(token).await,
            None => None,
        };
        // A token that another member has stolen is of no use to it.
        let route = route.filter(|route| route.is_of(guest));
        let Some(route) = route else {
            guest.turn_away();
            return Err(Status::unauthenticated(
                "the call has no token, or one of a route that is over: connect anew over the control session",
            ));
        };
        if guest.carry(&route) {
            return Ok(route);
        }
        Err(Status::resource_exhausted(
            "this connection carries something else, or there are too many of them",
        ))
    }
}

fn decoded<M: Message + Default>(message: Bytes) -> Result<M, Status> {
    M::decode(message).map_err(|error| Status::invalid_argument(format!("the request is malformed: {error}")))
}

/// The one message of a request.
async fn read_message<B>(mut body: B) -> Result<Bytes, Status>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<StdError>,
{
    let mut received = Vec::new();
    while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame.map_err(|error| Status::unknown(error.into().to_string()))?;
        if let Ok(data) = frame.into_data() {
            received.extend_from_slice(&data);
        }
        if received.len() > REQUEST_BYTES_MAX {
            let message = format!("a request has more than {REQUEST_BYTES_MAX} bytes; no key is as long");
            return Err(Status::resource_exhausted(message));
        }
    }
    let whole = Bytes::from(received);
    let message = match whole.get(..5) {
        Some(&[0, a, b, c, d]) => {
            let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            (whole.len() - 5 == length).then(|| whole.slice(5..))
        }
        _ => None,
    };
    message.ok_or_else(|| Status::invalid_argument("the request is not one uncompressed gRPC message"))
}

/// An answer of an empty message.
struct Empty {
    message: Once,
    is_over: bool,
}

impl Empty {
    fn new() -> Self {
        Self { message: Once::new(&()), is_over: false }
    }
}

impl Body for Empty {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if let std::task::Poll::Ready(Some(Ok(frame))) = Pin::new(&mut this.message).poll_frame(context) {
            return std::task::Poll::Ready(Some(Ok(frame)));
        }
        if std::mem::replace(&mut this.is_over, true) {
            return std::task::Poll::Ready(None);
        }
        let mut trailers = tonic::codegen::http::HeaderMap::new();
        Status::new(tonic::Code::Ok, "").add_header(&mut trailers)?;
        std::task::Poll::Ready(Some(Ok(hyper::body::Frame::trailers(trailers))))
    }
}

//! The server and the worker on tonic, as a service written with it has them: a pull is a call whose answer is a stream
//! of parts of tensors, and a push is a call with such a stream. Contents are `Bytes`, which share the memory of the
//! message they came in, and the server moves the parameters in place. The service is written by hand and does the same
//! as generated code.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use futures::{StreamExt, TryStreamExt, stream};
use prost::bytes::{Bytes, BytesMut};
use tonic::{
    Request, Response, Status, Streaming,
    codegen::{Body, BoxFuture, BoxStream, Service, StdError, http},
    server::{ClientStreamingService, Grpc, NamedService, ServerStreamingService},
    transport::{Channel, Endpoint, server::TcpIncoming},
};
use tonic_prost::ProstCodec;

use crate::model::{Model, descend_in_place};

const PULL: &str = "/tensorwire.bench.ParameterServer/Pull";
const PUSH: &str = "/tensorwire.bench.ParameterServer/Push";

/// Longest content of a message. One message for each tensor, or parts of 1 MiB, took 1.2 to 1.6 times as long: each
/// message's buffer is newly allocated.
const PART_BYTES_MAX: usize = 64 << 10;

/// HTTP/2 windows: large enough that flow control never stops a tensor, as a user would set them for this purpose.
const WINDOW_BYTES: u32 = 32 << 20;

/// A call without arguments, or an answer without content.
#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

/// A part of one of the model's tensors.
#[derive(Clone, PartialEq, prost::Message)]
struct Part {
    /// The index of the tensor.
    #[prost(uint32, tag = "1")]
    tensor: u32,
    /// Offset of the part in the tensor, in bytes.
    #[prost(uint64, tag = "2")]
    offset: u64,
    #[prost(bytes = "bytes", tag = "3")]
    content: Bytes,
}

impl Part {
    /// All parts of some tensors.
    fn all(tensors: &[Bytes]) -> Vec<Self> {
        let parts = |(tensor, bytes): (usize, &Bytes)| -> Vec<Self> {
            let part = |offset| {
                let content = bytes.slice(offset..bytes.len().min(offset + PART_BYTES_MAX));
                Self { tensor: tensor as u32, offset: offset as u64, content }
            };
            (0..bytes.len()).step_by(PART_BYTES_MAX).map(part).collect()
        };
        tensors.iter().enumerate().flat_map(parts).collect()
    }

    /// The part's range in `tensors`.
    fn of<'a>(&self, tensors: &'a mut [impl AsMut<[u8]>]) -> Result<&'a mut [u8], Status> {
        let tensor = tensors.get_mut(self.tensor as usize).map(AsMut::as_mut);
        let range = self.offset as usize..(self.offset as usize).saturating_add(self.content.len());
        let range = tensor.and_then(|tensor| tensor.get_mut(range));
        range.ok_or_else(|| Status::invalid_argument("a part of no tensor"))
    }
}

/// The parameters.
#[derive(Clone)]
struct ParameterServer {
    tensors: Arc<Mutex<Vec<Bytes>>>,
}

impl ParameterServer {
    fn pull(&self) -> Vec<Part> {
        Part::all(&self.tensors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn follow(&self, gradient: &[Part]) -> Result<(), Status> {
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        // Copied only if an answer that is being sent still shares the memory.
        let own = |tensor: Bytes| tensor.try_into_mut().unwrap_or_else(|held| BytesMut::from(&held[..]));
        let mut moved: Vec<BytesMut> = std::mem::take(&mut *tensors).into_iter().map(own).collect();
        let followed = gradient.iter().try_for_each(|part| {
            descend_in_place(part.of(&mut moved)?, &part.content);
            Ok(())
        });
        *tensors = moved.into_iter().map(BytesMut::freeze).collect();
        followed
    }
}

impl ServerStreamingService<Nothing> for ParameterServer {
    type Response = Part;
    type ResponseStream = BoxStream<Part>;
    type Future = std::future::Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, _: Request<Nothing>) -> Self::Future {
        std::future::ready(Ok(Response::new(stream::iter(self.pull()).map(Ok).boxed())))
    }
}

impl ClientStreamingService<Part> for ParameterServer {
    type Response = Nothing;
    type Future = BoxFuture<Response<Nothing>, Status>;

    fn call(&mut self, request: Request<Streaming<Part>>) -> Self::Future {
        let server = self.clone();
        Box::pin(async move {
            let gradient: Vec<Part> = request.into_inner().try_collect().await?;
            server.follow(&gradient)?;
            Ok(Response::new(Nothing {}))
        })
    }
}

impl<B> Service<http::Request<B>> for ParameterServer
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let server = self.clone();
        Box::pin(async move {
            if request.uri().path() == PULL {
                return Ok(Grpc::new(ProstCodec::default()).server_streaming(server, request).await);
            }
            Ok(Grpc::new(ProstCodec::default()).client_streaming(server, request).await)
        })
    }
}

impl NamedService for ParameterServer {
    const NAME: &'static str = "tensorwire.bench.ParameterServer";
}

/// Serves the model's parameters on a free port of loopback until the task is dropped.
pub(crate) async fn serve(
    model: Model,
) -> Result<(SocketAddr, impl Future<Output = Result<(), StdError>>), StdError> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let tensors = Arc::new(Mutex::new(model.filled(1.0).map(Bytes::from).collect()));
    let server = tonic::transport::Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .serve_with_incoming(
            ParameterServer { tensors },
            TcpIncoming::from(listener).with_nodelay(Some(true)),
        );
    Ok((address, async { Ok(server.await?) }))
}

/// A worker that is connected.
pub(crate) struct Client {
    grpc: tonic::client::Grpc<Channel>,
    gradient: Vec<Bytes>,
    /// The pulled parameters.
    parameters: Vec<Vec<u8>>,
}

impl Client {
    pub(crate) async fn connect(model: Model, address: &str) -> Result<Self, StdError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let grpc = tonic::client::Grpc::new(endpoint.connect().await?);
        let gradient = model.filled(0.5).map(Bytes::from).collect();
        Ok(Self { grpc, gradient, parameters: model.filled(0.0).collect() })
    }

    pub(crate) async fn pull(&mut self) -> Result<usize, StdError> {
        self.grpc.ready().await?;
        let (path, codec) =
            (http::uri::PathAndQuery::from_static(PULL), ProstCodec::<Nothing, Part>::default());
        let answer = self.grpc.server_streaming(Request::new(Nothing {}), path, codec).await?;
        let (mut parts, mut bytes) = (answer.into_inner(), 0);
        while let Some(part) = parts.message().await? {
            part.of(&mut self.parameters)?.copy_from_slice(&part.content);
            bytes += part.content.len();
        }
        Ok(bytes)
    }

    /// Sends the gradient; the answer comes after the update of the parameters.
    pub(crate) async fn push(&mut self) -> Result<(), StdError> {
        self.grpc.ready().await?;
        let (path, codec) =
            (http::uri::PathAndQuery::from_static(PUSH), ProstCodec::<Part, Nothing>::default());
        let gradient = stream::iter(Part::all(&self.gradient));
        self.grpc.client_streaming(Request::new(gradient), path, codec).await?;
        Ok(())
    }
}

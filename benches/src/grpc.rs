//! The same pulls over gRPC: a pull is one unary call whose answer is the tensor's bytes, as in a service written with
//! tonic. The service is written by hand, so that no generator is needed; it does the same as generated code.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use prost::bytes::Bytes;
use tonic::{
    Request, Response, Status,
    codegen::{Body, BoxFuture, Service, StdError, http},
    server::{NamedService, UnaryService},
    transport::{Channel, Endpoint, Server},
};
use tonic_prost::ProstCodec;

const PATH: &str = "/tensorwire.bench.Pull/Pull";
const ECHO_PATH: &str = "/tensorwire.bench.Pull/Echo";
/// Largest message.
const MESSAGE_BYTES_MAX: usize = 128 << 20;

/// The request for a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ask {
    /// Its length in bytes, which names it.
    #[prost(uint64, tag = "1")]
    pub bytes: u64,
}

/// A tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Pulled {
    /// Its bytes; shared with the message they came in, not copied out of it.
    #[prost(bytes = "bytes", tag = "1")]
    pub content: Bytes,
}

/// Answers with one of a few tensors, or with what came.
#[derive(Debug, Clone)]
pub struct PullService {
    tensors: Vec<Bytes>,
}

impl PullService {
    /// Serves tensors of these sizes.
    pub fn new(sizes: &[usize]) -> Self {
        Self { tensors: sizes.iter().map(|&bytes| Bytes::from(vec![7; bytes])).collect() }
    }
}

impl UnaryService<Ask> for PullService {
    type Response = Pulled;
    type Future = std::future::Ready<Result<Response<Pulled>, Status>>;

    fn call(&mut self, request: Request<Ask>) -> Self::Future {
        let wanted = request.get_ref().bytes;
        let found = self.tensors.iter().find(|tensor| tensor.len() as u64 == wanted).cloned();
        let answer = found.map(|content| Response::new(Pulled { content }));
        std::future::ready(answer.ok_or_else(|| Status::not_found(format!("no tensor of {wanted} bytes"))))
    }
}

impl UnaryService<Pulled> for PullService {
    type Response = Pulled;
    type Future = std::future::Ready<Result<Response<Pulled>, Status>>;

    fn call(&mut self, request: Request<Pulled>) -> Self::Future {
        std::future::ready(Ok(Response::new(request.into_inner())))
    }
}

impl<B> Service<http::Request<B>> for PullService
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
        let service = self.clone();
        Box::pin(async move {
            if request.uri().path() == ECHO_PATH {
                let grpc = tonic::server::Grpc::new(ProstCodec::<Pulled, Pulled>::default());
                return Ok(grpc.max_decoding_message_size(MESSAGE_BYTES_MAX).unary(service, request).await);
            }
            let grpc = tonic::server::Grpc::new(ProstCodec::<Pulled, Ask>::default());
            Ok(grpc.max_decoding_message_size(MESSAGE_BYTES_MAX).unary(service, request).await)
        })
    }
}

impl NamedService for PullService {
    const NAME: &'static str = "tensorwire.bench.Pull";
}

/// Serves on a free port of loopback, which it passes to `listening`, until `closed` ends.
///
/// # Errors
/// No port is free, or the server fails.
pub async fn serve(
    sizes: &[usize],
    listening: impl FnOnce(std::net::SocketAddr),
    closed: impl Future<Output = ()>,
) -> Result<(), StdError> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    listening(listener.local_addr()?);
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    let server = Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    Ok(server.serve_with_incoming_shutdown(PullService::new(sizes), incoming, closed).await?)
}

/// HTTP/2 windows: large enough that flow control never stops a tensor, as a user would set them for this purpose.
const WINDOW_BYTES: u32 = 32 << 20;

/// A client of [`serve`].
#[derive(Debug, Clone)]
pub struct Puller {
    client: tonic::client::Grpc<Channel>,
}

impl Puller {
    /// Connects to the server at `address` (`host:port`).
    ///
    /// # Errors
    /// It can't be reached.
    pub async fn connect(address: &str) -> Result<Self, StdError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let client =
            tonic::client::Grpc::new(endpoint.connect().await?).max_decoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Self { client })
    }

    /// Pulls the tensor of `bytes` bytes.
    ///
    /// # Errors
    /// The call fails.
    pub async fn pull(&mut self, bytes: usize) -> Result<Bytes, StdError> {
        self.client.ready().await?;
        let path = http::uri::PathAndQuery::from_static(PATH);
        let ask = Request::new(Ask { bytes: bytes as u64 });
        let pulled = self.client.unary(ask, path, ProstCodec::<Ask, Pulled>::default()).await?;
        Ok(pulled.into_inner().content)
    }

    /// Sends `content`, and gets it back.
    ///
    /// # Errors
    /// The call fails.
    pub async fn echo(&mut self, content: Bytes) -> Result<Bytes, StdError> {
        self.client.ready().await?;
        let path = http::uri::PathAndQuery::from_static(ECHO_PATH);
        let sent = Request::new(Pulled { content });
        let answer = self.client.unary(sent, path, ProstCodec::<Pulled, Pulled>::default()).await?;
        Ok(answer.into_inner().content)
    }
}

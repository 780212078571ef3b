//! The same exchange as a service written with tonic: one unary call for each tensor, as TensorFlow's workers do it.
//! The service is written by hand, so that no generator is needed; it does what generated code does.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use futures::future::{BoxFuture, try_join_all};
use prost::bytes::Bytes;
use tokio::sync::Barrier;
use tonic::{
    Request, Response, Status,
    codegen::{Body, Service, StdError, http},
    server::{NamedService, UnaryService},
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tonic_prost::ProstCodec;

use super::{FILL, WORKERS, update::Updated};

/// Largest message: a tensor and its tags.
const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// HTTP/2 windows: large enough that flow control never stops a tensor, as one would set them for this use.
const WINDOW_BYTES: u32 = 64 << 20;

/// A worker asks for a tensor, sends a gradient, or says that it has sent all.
#[derive(Clone, PartialEq, prost::Message)]
struct Ask {
    #[prost(uint64, tag = "1")]
    tensor: u64,
    #[prost(uint64, tag = "2")]
    worker: u64,
    #[prost(bytes = "bytes", tag = "3")]
    gradient: Bytes,
    #[prost(bool, tag = "4")]
    update: bool,
}

/// The answer: a tensor, or nothing.
#[derive(Clone, PartialEq, prost::Message)]
struct Answer {
    #[prost(bytes = "bytes", tag = "1")]
    tensor: Bytes,
}

const PULL: &str = "/tensorwire.example.Exchange/Pull";
const PUSH: &str = "/tensorwire.example.Exchange/Push";
const END: &str = "/tensorwire.example.Exchange/End";

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// All workers have sent all.
    arrived: Barrier,
    /// The update is made.
    updated: Barrier,
}

#[derive(Debug)]
struct State {
    parameters: Vec<Bytes>,
    gradients: [Vec<Bytes>; WORKERS],
    updated: Updated,
}

/// The service.
#[derive(Debug, Clone)]
struct Exchange {
    shared: Arc<Shared>,
}

impl Exchange {
    fn new(sizes: &[usize]) -> Self {
        let state = State {
            parameters: sizes.iter().map(|&size| Bytes::from(vec![FILL; size * size_of::<f32>()])).collect(),
            gradients: std::array::from_fn(|_| vec![Bytes::new(); sizes.len()]),
            updated: Updated::new(sizes),
        };
        let (arrived, updated) = (Barrier::new(WORKERS), Barrier::new(WORKERS));
        Self { shared: Arc::new(Shared { state: Mutex::new(state), arrived, updated }) }
    }

    async fn answer(self, method: &'static str, ask: Ask) -> Result<Response<Answer>, Status> {
        let tensor = usize::try_from(ask.tensor).unwrap_or(usize::MAX);
        let missing = || Status::not_found(format!("no tensor {} of worker {}", ask.tensor, ask.worker));
        let answer = match method {
            PULL => self.state().parameters.get(tensor).cloned().ok_or_else(missing)?,
            PUSH => {
                let worker = usize::try_from(ask.worker).unwrap_or(usize::MAX);
                let mut state = self.state();
                let place = state.gradients.get_mut(worker).and_then(|tensors| tensors.get_mut(tensor));
                *place.ok_or_else(missing)? = ask.gradient;
                Bytes::new()
            }
            _ => {
                let first = self.shared.arrived.wait().await.is_leader();
                if first && ask.update {
                    self.state().update();
                }
                self.shared.updated.wait().await;
                Bytes::new()
            }
        };
        Ok(Response::new(Answer { tensor: answer }))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn update(&mut self) {
        let [first, second] = &self.gradients;
        for (tensor, pair) in first.iter().zip(second).enumerate() {
            let values = self.updated.update(tensor, [pair.0, pair.1]);
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.parameters[tensor] = Bytes::from(bytes);
        }
    }
}

/// One method of the service.
struct Method(Exchange, &'static str);

impl UnaryService<Ask> for Method {
    type Response = Answer;
    type Future = BoxFuture<'static, Result<Response<Answer>, Status>>;

    fn call(&mut self, request: Request<Ask>) -> Self::Future {
        Box::pin(self.0.clone().answer(self.1, request.into_inner()))
    }
}

impl<B> Service<http::Request<B>> for Exchange
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let known = [PULL, PUSH].into_iter().find(|path| request.uri().path() == *path);
        let method = Method(self.clone(), known.unwrap_or(END));
        Box::pin(async move {
            let grpc = tonic::server::Grpc::new(ProstCodec::default());
            Ok(grpc.max_decoding_message_size(MESSAGE_BYTES_MAX).unary(method, request).await)
        })
    }
}

impl NamedService for Exchange {
    const NAME: &'static str = "tensorwire.example.Exchange";
}

/// Serves tensors of these sizes on a free port of loopback, which it tells.
pub(crate) async fn serve(
    sizes: Vec<usize>,
    told: impl FnOnce(std::net::SocketAddr),
) -> Result<(), StdError> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    told(listener.local_addr()?);
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let server = Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    Ok(server.serve_with_incoming(Exchange::new(&sizes), incoming).await?)
}

/// One worker's end.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    client: tonic::client::Grpc<Channel>,
    worker: u64,
    gradients: Vec<Bytes>,
}

impl Client {
    /// Connects worker `worker` to the server at `address`.
    pub(crate) async fn connect(address: &str, worker: usize, sizes: &[usize]) -> Result<Self, StdError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let client = tonic::client::Grpc::new(endpoint.connect().await?);
        let client = client.max_decoding_message_size(MESSAGE_BYTES_MAX);
        let gradients = sizes.iter().map(|&size| Bytes::from(vec![FILL; size * size_of::<f32>()])).collect();
        Ok(Self { client, worker: worker as u64, gradients })
    }

    /// Pulls all parameters.
    pub(crate) async fn pull(&self) -> Result<Vec<Bytes>, StdError> {
        let asks = (0..self.gradients.len())
            .map(|tensor| self.call(PULL, Ask { tensor: tensor as u64, ..self.ask() }));
        try_join_all(asks).await
    }

    /// Pushes all gradients, and waits until all workers have.
    pub(crate) async fn push(&self, update: bool) -> Result<(), StdError> {
        let push = |(tensor, gradient): (usize, &Bytes)| {
            self.call(PUSH, Ask { tensor: tensor as u64, gradient: gradient.clone(), ..self.ask() })
        };
        try_join_all(self.gradients.iter().enumerate().map(push)).await?;
        self.call(END, Ask { update, ..self.ask() }).await.map(drop)
    }

    fn ask(&self) -> Ask {
        Ask { worker: self.worker, ..Ask::default() }
    }

    async fn call(&self, path: &'static str, ask: Ask) -> Result<Bytes, StdError> {
        let mut client = self.client.clone();
        client.ready().await?;
        let path = http::uri::PathAndQuery::from_static(path);
        let answer = client.unary(Request::new(ask), path, ProstCodec::<Ask, Answer>::default()).await?;
        Ok(answer.into_inner().tensor)
    }
}

//! The service as others see it: real calls by a plain gRPC client, with a token that the test knows.

use std::{
    io::Write,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use prost::Message;
use protocol::{DataType, Key};
use tonic::{
    Code, Request, Response, Status,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;
use verbs_reactor::{FabricKind, TokioRuntime};

use super::{
    messages::{CancelRecvRequest, FetchTensorRequest, RecvTensorRequest, RecvTensorResponse},
    request_ids::REMEMBERED,
    service::path,
    *,
};
use crate::{
    Tensor, Worker,
    control::{
        generated::{Frame, control_client::ControlClient},
        grpc::tests::bounded,
    },
    meter::Meter,
};

const SENDER: &str = "/job:ps/replica:0/task:0";
const SENDER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CALLER: &str = "/job:caller/replica:0/task:0";
const CALLER_CPU: &str = "/job:caller/replica:0/task:0/device:CPU:0";

/// A worker, and a plain client that has a token of it.
struct Called {
    worker: Worker,
    route: Arc<GrpcRoute>,
    token: String,
    channel: Channel,
}

fn hex(token: &Token) -> String {
    token.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Lets the worker serve a caller, who shows the token that comes back.
fn admit(worker: &Worker) -> (Arc<GrpcRoute>, Token) {
    admit_by(worker, None)
}

/// As [`admit`], if the caller's connections show this certificate.
fn admit_by(worker: &Worker, certificate: Option<[u8; 32]>) -> (Arc<GrpcRoute>, Token) {
    let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
    let token = Token::new(&*runtime);
    let node = &worker.node;
    let ends = RouteEnds {
        expected: node.grpc.as_ref().unwrap().calls.expect(&token).unwrap(),
        meter: Meter::new("peer".into(), FabricKind::Grpc, &node.log),
        values: node.values.clone(),
        runtime: runtime.clone(),
        pool: node.pools.receive.clone(),
        peer: CALLER.to_owned(),
        incarnation: 1,
        address: None,
        token: Token::new(&*runtime),
        agreed: protocol::Agreed::of(&node.parameters, &node.parameters),
        certificate,
        connect_limit: Duration::from_secs(10),
        session_over: tokio::sync::watch::channel(false).1,
    };
    (GrpcRoute::new(ends).unwrap(), token)
}

async fn channel(worker: &Worker) -> Channel {
    Endpoint::from_shared(format!("http://{}", worker.address())).unwrap().connect().await.unwrap()
}

impl Called {
    async fn start() -> Self {
        let worker = Worker::builder(SENDER).require(FabricKind::Grpc).start().await.unwrap();
        let (route, token) = admit(&worker);
        let channel = channel(&worker).await;
        Self { worker, route, token: hex(&token), channel }
    }

    async fn call<Q, A>(
        &self,
        path: &'static str,
        asked: Q,
        headers: &[(&'static str, &str)],
    ) -> Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut client = tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(1 << 27);
        client.ready().await.unwrap();
        let mut request = Request::new(asked);
        for (name, value) in headers {
            request.metadata_mut().insert(*name, value.parse().unwrap());
        }
        let path = tonic::codegen::http::uri::PathAndQuery::from_static(path);
        let codec = ProstCodec::<Q, A>::default();
        client.unary(request, path, codec).await.map(Response::into_inner)
    }

    async fn recv_with(&self, step: i64, key: &str, id: i64, headers: &[(&'static str, &str)]) -> Recv {
        let asked = RecvTensorRequest {
            step_id: step,
            rendezvous_key: key.to_owned(),
            dma_ok: false,
            request_id: id,
        };
        self.call(path::RECV, asked, headers).await
    }

    async fn recv(&self, step: i64, key: &str, id: i64) -> Recv {
        self.recv_with(step, key, id, &[(TOKEN, &self.token)]).await
    }

    fn key(&self, edge: &str) -> Key {
        self.worker.key(SENDER_CPU, CALLER_CPU, edge).unwrap()
    }

    fn send(&self, edge: &str, values: &[u8]) -> String {
        let tensor = Tensor::from_values(self.worker.pool(), &[values.len() as u64], values).unwrap();
        let key = self.key(edge);
        self.worker.step(1).send(&key, tensor).unwrap();
        key.to_string()
    }

    /// Waits until the worker has `calls` of the caller to answer.
    async fn answering(&self, calls: usize) {
        let limit = std::time::Duration::from_secs(20);
        let counted = async {
            while self.route.served.unanswered() != calls {
                tokio::task::yield_now().await;
            }
        };
        super::super::within(limit, counted).await.expect("the calls are not as many");
    }
}

type Recv = Result<RecvTensorResponse, Status>;

fn content(answer: Recv) -> Bytes {
    answer.unwrap().tensor.unwrap().tensor_content
}

#[test]
fn s7_a_plain_client_gets_tensorflows_messages() {
    bounded(|| async {
        let called = Called::start().await;
        let step = called.worker.step(1);
        let key = called.key("e");
        let pool = called.worker.pool();
        step.send(&key, Tensor::from_values(pool, &[2, 1], &[1.0f32, 2.0]).unwrap()).unwrap();
        let answer = called.recv(1, key.as_ref(), 1).await.unwrap();
        assert!(!answer.is_dead && answer.send_start_micros > 1_600_000_000_000_000);
        let tensor = answer.tensor.unwrap();
        // DT_FLOAT is 1.
        assert_eq!((tensor.dtype, tensor.tensor_content.len()), (1, 8));
        let sizes: Vec<i64> = tensor.tensor_shape.unwrap().dim.iter().map(|dim| dim.size).collect();
        assert_eq!(sizes, [2, 1]);

        step.send(&key, Tensor::from_strings(pool, &[2], &["a", "bc"]).unwrap()).unwrap();
        let tensor = called.recv(1, key.as_ref(), 2).await.unwrap().tensor.unwrap();
        assert_eq!((tensor.dtype, &tensor.string_val[..]), (7, &[Bytes::from("a"), Bytes::from("bc")][..]));

        step.send(&key, Tensor::dead(DataType::F64, &[3]).unwrap()).unwrap();
        let answer = called.recv(1, key.as_ref(), 3).await.unwrap();
        let tensor = answer.tensor.unwrap();
        assert_eq!((answer.is_dead, tensor.dtype, tensor.tensor_content.len()), (true, 2, 0));

        called.worker.publish("w", Tensor::from_values(pool, &[2], &[3u8, 4]).unwrap()).unwrap();
        for _ in 0..2 {
            let asked = FetchTensorRequest::new("w", protocol::Scope::Published);
            let fetched = called.call(path::FETCH, asked, &[(TOKEN, &called.token)]).await;
            assert_eq!(content(fetched), [3, 4][..]);
        }
    });
}

#[test]
fn s7_without_the_right_token_a_call_is_unauthenticated() {
    bounded(|| async {
        let mut called = Called::start().await;
        let key = called.send("e", &[1]);
        let wrong = "0".repeat(64);
        let cut = called.token[..62].to_owned();
        let upper = called.token.to_ascii_uppercase();
        for token in [None, Some(wrong), Some(cut), Some(upper), Some(String::new())] {
            let headers: Vec<(&str, &str)> = token.iter().map(|token| (TOKEN, token.as_str())).collect();
            let refused = called.recv_with(1, &key, 7, &headers).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
            for path in [path::FETCH, path::CANCEL, path::RECV_STREAM] {
                let refused: Status =
                    called.call::<_, RecvTensorResponse>(path, (), &headers).await.unwrap_err();
                // The connection that was turned away may be gone by now.
                let is_refused =
                    matches!(refused.code(), Code::Unauthenticated | Code::Unknown | Code::Unavailable);
                assert!(is_refused, "{path}: {refused}");
            }
            called.channel = channel(&called.worker).await;
        }
        // Nothing was taken, and no request was noted.
        assert_eq!(content(called.recv(1, &key, 7).await), [1][..]);
        // A route that is over is none.
        called.route.fail(&crate::error::Lost::shut_down_here());
        assert_eq!(called.recv(1, &key, 8).await.unwrap_err().code(), Code::Unauthenticated);
    });
}

#[test]
fn e_a_stolen_token_is_of_no_use_without_its_certificate() {
    bounded(|| async {
        let mut called = Called::start().await;
        let key = called.send("e", &[1]);
        let (_route, stolen) = admit_by(&called.worker, Some([7; 32]));
        let refused = called.recv_with(1, &key, 7, &[(TOKEN, &hex(&stolen))]).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
        // Nothing was taken.
        called.channel = channel(&called.worker).await;
        assert_eq!(content(called.recv(1, &key, 7).await), [1][..]);
    });
}

#[test]
fn s7_a_connection_carries_one_route_or_one_session() {
    bounded(|| async {
        let called = Called::start().await;
        let key = called.send("e", &[1]);
        let (_other, token) = admit(&called.worker);
        assert_eq!(content(called.recv(1, &key, 1).await), [1][..]);
        let refused = called.recv_with(1, &key, 2, &[(TOKEN, &hex(&token))]).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        let (_frames, stream) = tokio::sync::mpsc::channel::<Frame>(1);
        let stream = tokio_stream::wrappers::ReceiverStream::new(stream);
        let refused = ControlClient::new(called.channel.clone()).attach(stream).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    });
}

#[test]
fn s7_a_route_has_few_connections() {
    bounded(|| async {
        let mut called = Called::start().await;
        let mut kept = Vec::new();
        for number in 0..CONNECTIONS_MAX {
            let key = called.send("e", &[number as u8]);
            assert_eq!(content(called.recv(1, &key, 1 + number as i64).await), [number as u8][..]);
            kept.push(std::mem::replace(&mut called.channel, channel(&called.worker).await));
        }
        let key = called.send("e", &[9]);
        let refused = called.recv(1, &key, 100).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    });
}

#[test]
fn s7_a_repeated_request_is_aborted_and_id_0_is_exempt() {
    bounded(|| async {
        let called = Called::start().await;
        let key = called.send("e", &[1]);
        assert_eq!(content(called.recv(1, &key, -5).await), [1][..]);
        let repeated = called.recv(1, &key, -5).await.unwrap_err();
        assert_eq!(repeated.code(), Code::Aborted);
        assert!(repeated.message().contains("request_id"), "{repeated}");
        for number in 2..5 {
            called.send("e", &[number]);
            assert_eq!(content(called.recv(1, &key, 0).await), [number][..]);
        }
        // The worker remembers the last 100,000 of all its callers, and no more.
        let calls = &called.worker.node.grpc.as_ref().unwrap().calls;
        assert!((0..REMEMBERED as u64 - 1).all(|id| calls.is_new(1 << 32 | id)));
        assert_eq!(called.recv(1, &key, -5).await.unwrap_err().code(), Code::Aborted);
        assert!(calls.is_new(1 << 33));
        called.send("e", &[9]);
        assert_eq!(content(called.recv(1, &key, -5).await), [9][..]);
    });
}

#[test]
fn s7_a_caller_that_is_gone_leaves_the_value_and_the_step() {
    bounded(|| async {
        let called = Called::start().await;
        let step = called.worker.step(1);
        let key = called.key("e").to_string();
        {
            let waiting = std::pin::pin!(called.recv(1, &key, 1));
            let answering = std::pin::pin!(called.answering(1));
            assert!(matches!(
                futures::future::select(waiting, answering).await,
                futures::future::Either::Right(_)
            ));
        }
        // Reset by the client; TensorFlow would abort the step now.
        called.answering(0).await;
        called.send("e", &[5]);
        assert_eq!(content(called.recv(1, &key, 2).await), [5][..]);
        drop(step);
    });
}

#[test]
fn s7_a_deadline_ends_the_wait_at_the_sender_and_not_the_step() {
    bounded(|| async {
        let called = Called::start().await;
        let step = called.worker.step(1);
        let key = called.key("e").to_string();
        let headers = [(TOKEN, called.token.as_str()), ("grpc-timeout", "30m")];
        let late = called.recv_with(1, &key, 1, &headers).await.unwrap_err();
        assert!(matches!(late.code(), Code::Cancelled | Code::DeadlineExceeded), "{late}");
        called.answering(0).await;
        called.send("e", &[5]);
        assert_eq!(content(called.recv(1, &key, 2).await), [5][..]);
        drop(step);
    });
}

#[test]
fn s7_a_receive_that_is_given_up_is_cancelled_before_and_after_it_came() {
    bounded(|| async {
        let called = Called::start().await;
        let step = called.worker.step(1);
        let key = called.key("e").to_string();
        let cancel = async |id: i64| {
            let asked = CancelRecvRequest { request_id: id };
            called.call::<_, ()>(path::CANCEL, asked, &[(TOKEN, &called.token)]).await.unwrap();
        };
        let cancelling = async {
            called.answering(1).await;
            cancel(1).await;
        };
        let (given_up, ()) = futures::future::join(called.recv(1, &key, 1), cancelling).await;
        assert_eq!(given_up.unwrap_err().code(), Code::Cancelled);
        // Before it comes.
        cancel(2).await;
        assert_eq!(called.recv(1, &key, 2).await.unwrap_err().code(), Code::Aborted);
        called.send("e", &[5]);
        assert_eq!(content(called.recv(1, &key, 3).await), [5][..]);
        drop(step);
    });
}

#[test]
fn s5_hostile_requests_get_errors_that_name_the_limit() {
    bounded(|| async {
        let called = Called::start().await;
        let refused = called.recv(1, &"k".repeat(1025), 1).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("1025") && refused.message().contains("1024"), "{refused}");
        let refused = called.recv(1, &"k".repeat(100_000), 1).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        assert_eq!(called.recv(1, "k;k", 2).await.unwrap_err().code(), Code::InvalidArgument);
        // As many as may wait, and one more.
        let step = called.worker.step(1);
        let key = called.key("e").to_string();
        let waiting: Vec<_> =
            (0..CALLS_MAX as i64).map(|id| Box::pin(called.recv(1, &key, 100 + id))).collect();
        let waiting = futures::future::join_all(waiting);
        let one_more = async {
            called.answering(CALLS_MAX).await;
            let refused = called.recv(1, &key, 1 << 40).await.unwrap_err();
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
            called.worker.cleanup(1);
        };
        let (ended, ()) = futures::future::join(waiting, one_more).await;
        assert!(ended.iter().all(|ended| ended.as_ref().unwrap_err().code() == Code::Aborted));
        drop(step);
    });
}

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn s7_a_token_is_never_shown() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let token = runtime.block_on(async { Token::new(&TokioRuntime::current().unwrap()) });
    let header = token.to_header().unwrap();
    assert!(header.is_sensitive());
    let shown = format!("{token:?} {header:?}");
    assert!(!shown.contains(&hex(&token)[..12]), "{shown}");
    assert_eq!(Token::from_connection_data(&token.to_connection_data()), Ok(token));
    for (bytes, expected) in [(&[1, 2][..], "2 bytes"), (&[2; 33], "version 2"), (&[], "0 bytes")] {
        assert!(Token::from_connection_data(bytes).unwrap_err().contains(expected));
    }
}

#[test]
fn s7_a_token_is_in_no_log_line_of_either_end() {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(|| Log);
    // The other tests of a process that runs them all log here too.
    let _ = subscriber.try_init();
    bounded(|| async {
        let worker = Worker::builder(SENDER).require(FabricKind::Grpc).start().await.unwrap();
        let (_served, token) = admit(&worker);
        let (route, own) = admit(&worker);
        // A caller of this crate, whose calls present the token of the other route.
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
        let stop = tokio::sync::watch::channel(false);
        let (address, security) =
            (worker.address().to_owned(), crate::control::grpc::wire::Security::default());
        let mut caller =
            client::connect(&address, (&security, None), &runtime, stop.1, Box::new(drop)).await.unwrap();
        let message = client::Once::new(&FetchTensorRequest::new("nothing", protocol::Scope::Published));
        let token_header = token.to_header().unwrap();
        let request =
            client::request((&address, path::FETCH), &token_header, Some(1000), None, message).unwrap();
        tracing::trace!("logging works");
        let answered = caller.send_request(request).await.unwrap();
        assert_eq!(client::status_alone(&answered).unwrap().code(), Code::NotFound);
        let log = String::from_utf8_lossy(&LOG.lock().unwrap()).to_ascii_lowercase();
        assert!(log.contains("logging works"), "nothing was logged: the search proves nothing");
        for token in [&token, &own] {
            for part in hex(token).as_bytes().windows(16) {
                assert!(!log.contains(std::str::from_utf8(part).unwrap()), "a token was logged");
            }
        }
        drop(route);
    });
}

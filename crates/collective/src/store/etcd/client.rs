//! Calls to an etcd server.

use std::{
    error::Error,
    io,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt, StreamExt, stream};
use hyper_util::rt::TokioIo;
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tokio::net::TcpStream;
use tonic::{
    Code, ConnectError, Request, Status, Streaming,
    client::Grpc,
    codegen::http::uri::{PathAndQuery, Uri},
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{
    super::{KEY_BYTES_MAX, StoreError, VALUE_BYTES_MAX, rules::shown, url::Service},
    KEYS_FEW,
    messages::{Authenticate, Authenticated, Transaction, TransactionDone, WatchRequest, Watched},
};

/// The largest answer in bytes: that to a read of `KEYS_FEW` keys, with some room for each. An answer of empty fields takes up to
/// 64 times as much memory.
const ANSWER_BYTES_MAX: usize = KEYS_FEW * (VALUE_BYTES_MAX + KEY_BYTES_MAX + 1024);

/// How long a connection with calls in progress may be idle before a keep-alive ping, and how long the ping may stay unanswered.
/// Servers reject clients that ping more often than every 5 s.
const SILENT_MAX: Duration = Duration::from_secs(15);

/// Whether a call may happen twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeated {
    Once,
    AsNeeded,
}

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum Failed {
    Silent,
    Status(Status),
    /// The server may have received the call.
    Unknown(Status),
}

/// Connects the channel by the project's dialler.
#[derive(Clone)]
struct Connector {
    service: Service,
    runtime: Arc<dyn Runtime>,
}

impl tonic::codegen::Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { service, runtime } = self.clone();
        async move { service.connect(&runtime).await.map(TokioIo::new) }.boxed()
    }
}

/// A connection to a server, which all calls share, made by the first call. Not printed, because it has the password.
pub(super) struct Client {
    /// The store's name in errors, without a password.
    pub(super) name: String,
    pub(super) limit: Duration,
    pub(super) runtime: Arc<dyn Runtime>,
    channel: Channel,
    /// The user and the password, if the URL has them.
    credentials: Option<Authenticate>,
    /// The server's token for the credentials. The server forgets tokens unused for some minutes, and all when it restarts.
    token: Mutex<Option<MetadataValue<Ascii>>>,
}

impl Client {
    /// Must be called on a tokio runtime, in which the connection has its tasks.
    pub(super) fn new(
        name: String,
        service: &Service,
        limit: Duration,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Self, StoreError> {
        let endpoint = Endpoint::from_shared(format!("http://{}", service.address()));
        let endpoint = endpoint.map_err(|error| StoreError::Unreachable {
            store: name.clone(),
            detail: format!("{error}: check the host in the URL"),
        })?;
        let endpoint = endpoint.connect_timeout(limit).http2_keep_alive_interval(SILENT_MAX);
        let connector = Connector { service: service.clone(), runtime: Arc::clone(&runtime) };
        let channel = endpoint.keep_alive_timeout(SILENT_MAX).connect_with_connector_lazy(connector);
        let password = service.password.clone();
        let credentials = password.map(|password| Authenticate { name: service.user.clone(), password });
        Ok(Self { name, limit, runtime, channel, credentials, token: Mutex::new(None) })
    }

    /// Calls `method` of the key-value service, within the limit.
    pub(super) async fn call<Asked, Answer>(
        &self,
        method: &'static str,
        asked: &Asked,
        repeated: Repeated,
    ) -> Result<Answer, Failed>
    where
        Asked: prost::Message + Clone + 'static,
        Answer: prost::Message + Default + 'static,
    {
        let call = async {
            let mut answer = self.call_once(method, asked).await;
            // Twice: after a broken connection, a restarted server does not know the token either.
            for _ in 0..2 {
                let again = answer.as_ref().is_err_and(|status| {
                    // Without a valid token nothing happened.
                    self.forget_token(status) || is_lost(status) && repeated == Repeated::AsNeeded
                });
                if !again {
                    break;
                }
                answer = self.call_once(method, asked).await;
            }
            answer
        };
        let answer = timeout(&*self.runtime, self.limit, call.boxed()).await.map_err(|_| Failed::Silent)?;
        answer.map_err(|status| match repeated {
            Repeated::Once if is_lost(&status) && !never_sent(&status) => Failed::Unknown(status),
            _ => Failed::Status(status),
        })
    }

    pub(super) async fn transact(
        &self,
        transaction: &Transaction,
        repeated: Repeated,
    ) -> Result<TransactionDone, Failed> {
        self.call("/etcdserverpb.KV/Txn", transaction, repeated).await
    }

    /// The events of a watch. It ends when dropped.
    pub(super) async fn watch(&self, request: WatchRequest) -> Result<Streaming<Watched>, Status> {
        let mut grpc = self.grpc().await?;
        // The watch lasts as long as its stream of requests.
        let requests = stream::iter([request]).chain(stream::pending());
        let request = self.with_token(requests).await?;
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let streaming = grpc.streaming(request, path, ProstCodec::<WatchRequest, Watched>::default());
        Ok(streaming.await?.into_inner())
    }

    async fn call_once<Asked, Answer>(&self, method: &'static str, asked: &Asked) -> Result<Answer, Status>
    where
        Asked: prost::Message + Clone + 'static,
        Answer: prost::Message + Default + 'static,
    {
        let request = self.with_token(asked.clone()).await?;
        self.unary(method, request).await
    }

    async fn unary<Asked, Answer>(
        &self,
        method: &'static str,
        request: Request<Asked>,
    ) -> Result<Answer, Status>
    where
        Asked: prost::Message + 'static,
        Answer: prost::Message + Default + 'static,
    {
        let codec = ProstCodec::<Asked, Answer>::default();
        let answer = self.grpc().await?.unary(request, PathAndQuery::from_static(method), codec).await?;
        Ok(answer.into_inner())
    }

    async fn grpc(&self) -> Result<Grpc<Channel>, Status> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
        Ok(grpc)
    }

    /// Adds the token to a request. Requests one from the server if there is none.
    async fn with_token<T>(&self, message: T) -> Result<Request<T>, Status> {
        let mut request = Request::new(message);
        let Some(credentials) = &self.credentials else { return Ok(request) };
        let known = self.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let token = match known {
            Some(token) => token,
            None => self.authenticate(credentials).await?,
        };
        request.metadata_mut().insert("token", token);
        Ok(request)
    }

    async fn authenticate(&self, credentials: &Authenticate) -> Result<MetadataValue<Ascii>, Status> {
        let request = Request::new(credentials.clone());
        let answer: Authenticated = self.unary("/etcdserverpb.Auth/Authenticate", request).await?;
        let token = MetadataValue::try_from(answer.token);
        let token = token.map_err(|_| Status::internal("its token is not text"))?;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token.clone());
        Ok(token)
    }

    /// Whether the server does not know the token. If so, forgets it.
    fn forget_token(&self, status: &Status) -> bool {
        let is_old = status.code() == Code::Unauthenticated || status.message().contains("auth store is old");
        is_old && self.token.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }

    pub(super) fn error(&self, why: &Failed) -> StoreError {
        self.unreachable(match why {
            Failed::Silent => format!(
                "it did not answer within {:?}, and the request may still take effect; check that etcd runs there, has a leader, and is not stopped or overloaded",
                self.limit
            ),
            Failed::Unknown(status) => format!(
                "{} before it answered: whether the write happened is unknown; read the key before you repeat it",
                describe(status)
            ),
            Failed::Status(status) => format!("{}; {}", describe(status), remedy(status)),
        })
    }

    pub(super) fn unreachable(&self, detail: String) -> StoreError {
        StoreError::Unreachable { store: self.name.clone(), detail }
    }
}

/// Whether the connection broke, or the server asks the client to use another one.
fn is_lost(status: &Status) -> bool {
    // A status that the server itself sent has no source.
    status.code() == Code::Unavailable || status.source().is_some()
}

/// Whether there was no connection to send the call on.
fn never_sent(status: &Status) -> bool {
    causes(status).any(<dyn Error>::is::<ConnectError>)
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |&error| error.source())
}

/// The error's message, with its causes.
fn describe(status: &Status) -> String {
    let mut parts = vec![status.message().to_owned()];
    for cause in causes(status).map(ToString::to_string) {
        // Some errors include the text of their cause.
        if !parts.contains(&cause) {
            parts.push(cause);
        }
    }
    shown(parts.join(": "))
}

fn remedy(status: &Status) -> &'static str {
    let message = status.message();
    if message.contains("invalid user ID or password") {
        "check the user and the password in the URL"
    } else if message.contains("authentication is not enabled") {
        "leave the user and the password out of the URL"
    } else if message.contains("user name is empty") {
        "give a user in the URL: etcd://USER:PASSWORD@HOST:PORT"
    } else if message.contains("permission denied") {
        "grant the user a role that reads and writes the job's keys"
    } else if message.contains("space exceeded") {
        "the server is full: compact and defragment it, disarm its alarm, or raise `--quota-backend-bytes`"
    } else {
        "check that etcd runs there, and that the URL names its host and the port for clients"
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use tensorwire_protocol::text::is_active;

    use super::{super::messages::Ranged, *};

    #[test]
    fn s5_what_etcd_says_in_an_error_is_escaped_and_cut() {
        let said = format!("no\nrank 1 is lost\u{1b}[2J {}", "x".repeat(5000));
        let text = describe(&Status::internal(said));
        assert!(text.contains(r"no\nrank 1 is lost\u{1b}[2J xxx") && text.len() < 1100, "{text}");
        assert!(!text.contains(is_active));
    }

    #[test]
    fn s4_an_answer_about_a_key_has_one_value_however_often_it_comes() {
        let empty = [0x12, 0].repeat(1 << 20);
        let ranged = Ranged::decode(&*empty).unwrap();
        assert_eq!(ranged.kv, Some(super::super::KeyValue::default()));
    }
}

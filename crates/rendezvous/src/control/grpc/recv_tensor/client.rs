//! The calling end of a route's HTTP/2 connection.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::{BufMut, Bytes};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    client::conn::http2,
};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, sync::watch};
use tonic::codegen::{
    Body,
    http::{HeaderMap, HeaderValue, Method, Request, Response, Uri, Version, header},
};
use verbs_reactor::{BoxFuture, Runtime};

use super::{ORDER, TOKEN};
use crate::{
    control::{
        ControlError,
        grpc::{
            dial,
            wire::{Security, Wire},
        },
    },
    data::unless,
};

/// How far the peer may send ahead of a reader, in bytes: of one answer, and of all that may stand still at once.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 512 << 20;

/// Longest frame, in bytes: fewer of them for long contents.
const FRAME_BYTES_MAX: u32 = 64 << 10;

/// Makes calls; cheap to clone.
pub(super) type Caller = http2::SendRequest<Once>;

/// One gRPC message.
#[derive(Debug)]
pub(super) struct Once(Option<Bytes>);

impl Once {
    /// With the prefix that says how long it is.
    pub(super) fn new(message: &impl prost::Message) -> Self {
        let length = message.encoded_len();
        let mut bytes = Vec::with_capacity(5 + length);
        bytes.put_u8(0); // not compressed
        bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
        // A vector grows: encoding cannot fail.
        let _ = message.encode(&mut bytes);
        Self(Some(bytes.into()))
    }
}

impl Body for Once {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, Bytes::len) as u64)
    }
}

/// Runs hyper's tasks.
#[derive(Clone)]
struct OnRuntime(Arc<dyn Runtime>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for OnRuntime {
    fn execute(&self, task: F) {
        self.0.spawn("http2", Box::pin(task));
    }
}

/// Connects to the plane at `address`, which must show the `certificate`, if it shows one. The connection ends when `stop` turns true; `ended` is called with the reason
/// when it ends otherwise. To be run on a task of `runtime`.
pub(super) async fn connect(
    address: &str,
    (security, certificate): (&Security, Option<[u8; 32]>),
    runtime: &Arc<dyn Runtime>,
    stop: watch::Receiver<bool>,
    ended: Box<dyn FnOnce(String) + Send>,
) -> Result<Caller, ControlError> {
    let unreachable = |detail| ControlError::Unreachable { address: address.to_owned(), detail };
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(unreachable("gRPC needs tokio as the worker's runtime".to_owned()));
    }
    let (host, port) = dial::host_and_port(address)?;
    let stream = TcpStream::connect((host, port))
        .await
        .map_err(|error| unreachable(error.to_string()).unless_limit(memory::Limit::of_files(&error)))?;
    // Each call is awaited by somebody.
    let _ = stream.set_nodelay(true);
    let tls = |detail| ControlError::Tls { address: address.to_owned(), detail };
    let stream = Wire::dial(stream, security, host).await.map_err(tls)?;
    if stream.proven().map(|proven| proven.certificate) != certificate {
        let detail = "it shows another certificate than over the control session: is there another worker at its \
                      address now?";
        return Err(tls(detail.to_owned()));
    }
    let connecting = http2::Builder::new(OnRuntime(runtime.clone()))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .handshake(TokioIo::new(stream));
    let (caller, connection) = connecting.await.map_err(|error| unreachable(dial::causes(&error)))?;
    let running: BoxFuture<'static, ()> = Box::pin(async move {
        match unless(stop, connection).await {
            Some(Ok(())) => ended("the peer closed the connection".to_owned()),
            Some(Err(error)) => ended(dial::causes(&error)),
            None => {}
        }
    });
    runtime.spawn("grpc connection", running);
    Ok(caller)
}

/// A call of the method at `path`, with `token`, and its place among those that are answered in order.
pub(super) fn request(
    (authority, path): (&str, &'static str),
    token: &HeaderValue,
    timeout_ms: Option<u128>,
    order: Option<u64>,
    message: Once,
) -> Result<Request<Once>, String> {
    let uri = Uri::builder().scheme("http").authority(authority).path_and_query(path).build();
    let uri = uri.map_err(|error| format!("{authority}: {error}"))?;
    let mut headers = HeaderMap::with_capacity(5);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    headers.insert(TOKEN, token.clone());
    if let Some(timeout) = timeout_ms.and_then(timeout_header) {
        headers.insert("grpc-timeout", timeout);
    }
    if let Some(order) = order {
        headers.insert(ORDER, HeaderValue::from(order));
    }
    let mut request = Request::new(message);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri;
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = headers;
    Ok(request)
}

/// At most eight digits and a unit.
fn timeout_header(milliseconds: u128) -> Option<HeaderValue> {
    const DIGITS_MAX: u128 = 99_999_999;
    let text = match milliseconds {
        0..=DIGITS_MAX => format!("{milliseconds}m"),
        _ => format!("{}S", (milliseconds / 1000).min(DIGITS_MAX)),
    };
    HeaderValue::from_str(&text).ok()
}

/// The status of an answer that is nothing else.
pub(super) fn status_alone(answer: &Response<Incoming>) -> Option<tonic::Status> {
    let found = tonic::Status::from_header_map(answer.headers());
    if found.is_some() || answer.status().is_success() {
        return found;
    }
    Some(tonic::Status::unknown(format!("HTTP status {}: is a Tensorwire worker there?", answer.status())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s7_deadlines_have_at_most_eight_digits() {
        let shown = |milliseconds| timeout_header(milliseconds).unwrap().to_str().unwrap().to_owned();
        assert_eq!(shown(0), "0m");
        assert_eq!(shown(61_000), "61000m");
        assert_eq!(shown(100_000_000), "100000S");
        assert_eq!(shown(u128::MAX), "99999999S");
    }
}

//! The dialling side.

use std::{
    error::Error,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, StreamExt};
use memory::Limit;
use tokio::sync::watch;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use super::{
    Keepalive, ON_THE_WIRE_MAX, WINDOW_BYTES, closed,
    server::Tasks,
    session::{OutgoingFrames, Parts, session},
    within,
};
use crate::control::{
    ControlError, ControlSession,
    generated::{Frame, control_client::ControlClient},
};

/// What dialling works with.
pub(super) struct Dialler {
    pub(super) tasks: Tasks,
    pub(super) closing: watch::Receiver<bool>,
    pub(super) keepalive: Keepalive,
    pub(super) limit: Duration,
}

impl Dialler {
    /// Opens a session. Runs on the plane's runtime.
    pub(super) async fn dial(self, address: String) -> Result<ControlSession, ControlError> {
        let (host, port) = host_and_port(&address)?;
        let unreachable = |Failure { detail, limit }| {
            ControlError::Unreachable { address: address.clone(), detail }.unless_limit(limit)
        };
        let closing = self.closing.clone();
        let limit = self.limit;
        tokio::select! {
            biased;
            () = closed(closing) => Err(ControlError::Closed),
            dialled = within(limit, self.attempt(host.to_owned(), port)) => match dialled {
                Ok(dialled) => dialled.map_err(unreachable),
                Err(_) => Err(unreachable(silence(limit).into())),
            }
        }
    }

    /// Tries the host's addresses in turn.
    async fn attempt(self, host: String, port: u16) -> Result<ControlSession, Failure> {
        let found = lookup(host, port).await?;
        let mut failure = Failure::from("the name has no address".to_owned());
        for address in found {
            let Parts { session, task, outgoing } = session(Some(address.ip()), None);
            match attach(address, outgoing, self.keepalive, self.limit).await {
                Ok((client, stream)) => {
                    let closing = self.closing.clone();
                    self.tasks.spawn(async move {
                        task.run(stream, closing).await;
                        drop(client);
                    });
                    return Ok(session);
                }
                Err(last) => failure = last,
            }
        }
        Err(failure)
    }
}

async fn attach(
    address: SocketAddr,
    outgoing: OutgoingFrames,
    keepalive: Keepalive,
    limit: Duration,
) -> Result<(ControlClient<Channel>, Streaming<Frame>), Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| causes(&error))?;
    let endpoint = endpoint
        .connect_timeout(limit)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(keepalive.interval)
        .keep_alive_timeout(keepalive.timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    let channel = endpoint.connect().await.map_err(|error| connect_failure(&error, limit))?;
    let mut client = ControlClient::new(channel)
        .max_decoding_message_size(ON_THE_WIRE_MAX)
        .max_encoding_message_size(ON_THE_WIRE_MAX);
    let stream = client.attach(RequestFrames(outgoing)).await.map_err(|status| {
        format!("what answers there is no Tensorwire control plane, or it is closing: {}", causes(&status))
    })?;
    Ok((client, stream.into_inner()))
}

/// The frames of a request stream, which aborts by ending without a goodbye.
struct RequestFrames(OutgoingFrames);

impl Stream for RequestFrames {
    type Item = Frame;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Frame>> {
        self.0.poll_next_unpin(context).map(|frame| frame?.ok())
    }
}

/// Splits `HOST:PORT`; an IPv6 host is in brackets.
pub(super) fn host_and_port(address: &str) -> Result<(&str, u16), ControlError> {
    let bad = || ControlError::BadAddress { address: address.to_owned() };
    let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
    let port = port.parse().map_err(|_| bad())?;
    let host = match host.strip_prefix('[') {
        Some(host) => host.strip_suffix(']').ok_or_else(bad)?,
        None if host.contains(':') => return Err(bad()),
        None => host,
    };
    if host.is_empty() || host.chars().any(char::is_whitespace) { Err(bad()) } else { Ok((host, port)) }
}

/// Why nobody was reached, for [`ControlError::Unreachable`].
#[derive(Debug)]
struct Failure {
    detail: String,
    limit: Option<Limit>,
}

impl From<String> for Failure {
    fn from(detail: String) -> Self {
        Self { detail, limit: None }
    }
}

async fn lookup(host: String, port: u16) -> Result<Vec<SocketAddr>, Failure> {
    let found = tokio::net::lookup_host((host, port)).await.map_err(|error| Failure {
        detail: format!("the name cannot be resolved: {error}"),
        limit: Limit::of_files(&error),
    });
    Ok(found?.collect())
}

fn silence(limit: Duration) -> String {
    format!(
        "no answer within {} s: is the host up, is the worker running, does a firewall drop its port?",
        limit.as_secs_f32()
    )
}

/// What a failed connection attempt means to people.
fn connect_failure(error: &(dyn Error + 'static), limit: Duration) -> Failure {
    let io = io_error(error);
    let detail = match io.map(io::Error::kind) {
        Some(io::ErrorKind::ConnectionRefused) => "connection refused: is the worker running?".to_owned(),
        Some(io::ErrorKind::TimedOut) => silence(limit),
        _ => causes(error),
    };
    Failure { detail, limit: io.and_then(Limit::of_files) }
}

/// The operating system's answer behind an error.
fn io_error<'error>(error: &'error (dyn Error + 'static)) -> Option<&'error io::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return Some(error);
        }
        next = error.source();
    }
    None
}

/// An error with all its causes, in one line.
pub(super) fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = match error.downcast_ref::<tonic::Status>() {
        Some(status) => status.message().to_owned(),
        None => error.to_string(),
    };
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

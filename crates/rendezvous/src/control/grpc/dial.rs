//! Dialling sessions.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, StreamExt};
use hyper_util::rt::TokioIo;
use tensorwire_fabric::Runtime;
use tensorwire_fabric_tcp::Dial;
use tensorwire_memory::Limit;
use tokio::{
    net::{TcpStream, lookup_host},
    sync::watch,
};
use tonic::{
    Streaming,
    codegen::{Service, http::Uri},
    transport::{Channel, Endpoint},
};

use super::{
    CONNECTION_WINDOW_BYTES, Keepalive, WINDOW_BYTES, closed,
    frame::{self, Frame},
    server::Tasks,
    session::{OutgoingFrames, Parts, causes, session},
    wire::{Security, Wire},
    within,
};
use crate::control::{Addresses, ControlError, ControlSession, address::parts};

/// The parameters of dialling.
pub(super) struct Dialler {
    pub(super) tasks: Tasks,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) closing: watch::Receiver<bool>,
    pub(super) keepalive: Keepalive,
    pub(super) limit: Duration,
    pub(super) security: Security,
}

impl Dialler {
    /// Opens a session with `address`. Under TLS the peer proves the host of `name`, or that of `address` if there is no
    /// `name`. Runs on the plane's runtime.
    pub(super) async fn dial(
        self,
        address: String,
        name: Option<String>,
    ) -> Result<ControlSession, ControlError> {
        let (host, port) = parts(&address)?;
        let (proven, _) = parts(name.as_ref().unwrap_or(&address))?;
        let unreachable = |Failure { detail, limit, is_tls }| match is_tls {
            true => ControlError::Tls { address: address.clone(), detail },
            false => ControlError::Unreachable { address: address.clone(), detail }.unless_limit(limit),
        };
        let closing = self.closing.clone();
        let limit = self.limit;
        let mut dial = Dial::new(self.runtime.clone());
        tokio::select! {
            biased;
            () = closed(closing) => Err(ControlError::Closed),
            dialled = within(limit, self.attempt((host, port), proven, &mut dial)) => match dialled {
                Ok(dialled) => dialled.map_err(unreachable),
                Err(_) => Err(unreachable(format!("{dial}; {}", silence(limit)).into())),
            }
        }
    }

    /// Tries the host's addresses, until one has a session.
    async fn attempt(
        self,
        (host, port): (&str, u16),
        proven: &str,
        dial: &mut Dial,
    ) -> Result<ControlSession, Failure> {
        dial.resolve(host, port).await.map_err(|error| Failure {
            detail: unresolved(&error),
            limit: Limit::of_files(&error),
            is_tls: false,
        })?;
        let mut is_tls = None;
        while let Some((address, stream)) = dial.connect().await {
            match self.open(address, stream, proven).await {
                Ok(session) => return Ok(session),
                Err(failure) => {
                    is_tls = Some(failure.is_tls);
                    dial.refuse(failure.detail);
                }
            }
        }
        let hint = if is_tls.is_some() { "" } else { "; is the worker running?" };
        let detail = format!("{dial}{hint}");
        Err(Failure { detail, limit: dial.limit(), is_tls: is_tls.unwrap_or_default() })
    }

    /// Opens a session on a new connection.
    async fn open(
        &self,
        address: SocketAddr,
        stream: TcpStream,
        host: &str,
    ) -> Result<ControlSession, Failure> {
        let own = stream.local_addr().map_err(|error| error.to_string())?;
        let addresses = Addresses { own, peer: address };
        let wire = Wire::dial(stream, &self.security, host).await.map_err(Failure::of_tls)?;
        let Parts { session, task, outgoing } = session(addresses, None, wire.proven().cloned());
        let (channel, stream) = attach(address, wire, outgoing, self.keepalive).await?;
        let closing = self.closing.clone();
        self.tasks.spawn(async move {
            task.run(stream, closing).await;
            drop(channel);
        });
        Ok(session)
    }
}

/// The addresses that `name` has now. Runs on the plane's runtime, whose threads for blocking work do the lookup.
pub(super) async fn resolve(name: String) -> Result<Vec<String>, ControlError> {
    let found = lookup_host(parts(&name)?).await;
    let found = found.map(|found| found.map(|address| address.to_string()).collect());
    found.map_err(|error| ControlError::Unreachable { address: name, detail: unresolved(&error) })
}

fn unresolved(error: &io::Error) -> String {
    format!("the name cannot be resolved: {error}")
}

/// A connector that returns an already connected stream.
struct OneWire(Option<Wire>);

impl Service<Uri> for OneWire {
    type Response = TokioIo<Wire>;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<TokioIo<Wire>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let wire = self.0.take().map(TokioIo::new);
        std::future::ready(wire.ok_or_else(|| io::Error::other("a connection carries one session")))
    }
}

async fn attach(
    address: SocketAddr,
    wire: Wire,
    outgoing: OutgoingFrames,
    keepalive: Keepalive,
) -> Result<(Channel, Streaming<Frame>), Failure> {
    // Without the zone, which a URL cannot have.
    let authority = SocketAddr::new(address.ip(), address.port());
    let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(|error| causes(&error))?;
    let endpoint = endpoint
        .http2_keep_alive_interval(keepalive.interval)
        .keep_alive_timeout(keepalive.timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    let trouble = wire.trouble().clone();
    // The errors of HTTP/2 do not contain the reason why its stream ended.
    let or_trouble = |failure: Failure| {
        trouble.why().map_or(failure, |why| Failure { is_tls: why.is_tls, ..why.text.clone().into() })
    };
    let channel = endpoint.connect_with_connector(OneWire(Some(wire))).await;
    let channel = channel.map_err(|error| or_trouble(causes(&error).into()))?;
    let stream = frame::attach(channel.clone(), RequestFrames(outgoing)).await.map_err(|status| {
        let detail = format!("it is not a Tensorwire control plane, or it is closing: {}", causes(&status));
        or_trouble(detail.into())
    })?;
    Ok((channel, stream))
}

/// The frames of a request stream. To abort, it ends without a goodbye.
struct RequestFrames(OutgoingFrames);

impl Stream for RequestFrames {
    type Item = Frame;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Frame>> {
        self.0.poll_next_unpin(context).map(|frame| frame?.ok())
    }
}

/// The cause of [`ControlError::Unreachable`] or [`ControlError::Tls`].
#[derive(Debug)]
struct Failure {
    detail: String,
    limit: Option<Limit>,
    is_tls: bool,
}

impl Failure {
    fn of_tls(detail: String) -> Self {
        Self { detail, limit: None, is_tls: true }
    }
}

impl From<String> for Failure {
    fn from(detail: String) -> Self {
        Self { detail, limit: None, is_tls: false }
    }
}

fn silence(limit: Duration) -> String {
    format!(
        "no answer within {} s: is the host up, is the worker running, has it file descriptors left, does a firewall drop its port?",
        limit.as_secs_f32()
    )
}

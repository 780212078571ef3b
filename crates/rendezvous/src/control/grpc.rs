//! The control plane over gRPC.
//!
//! ```text
//!  user's runtime(s)           │  the plane's thread
//!  dial ───────────────────────┼─▶ Dialler ──▶ HTTP/2 client ─┐
//!  accept ◀──── arrivals ──────┼── Attach ◀── HTTP/2 server ◀─┼─ Door ◀── listener
//!  FrameSender ── frames ──────┼─▶ outgoing stream            │    │
//!  FrameReceiver ◀── frames ───┼── SessionTask ◀──────────────┘    │
//!  tcp fabric ◀── streams ─────┼── DataPort ◀──────────────────────┘
//! ```
//!
//! The plane runs on a separate thread with its own runtime, on which the worker also serves its sessions. So pings are
//! answered while user code blocks its runtime, and peers do not take a busy worker for a dead one. All channels
//! between the two runtimes are bounded.
//!
//! The service is described by `proto/control.proto`.

mod dial;
mod door;
mod frame;
mod handover;
#[cfg(feature = "tls")]
mod secured;
mod server;
mod session;
#[cfg(test)]
pub(in crate::control) mod tests;
mod traffic;
mod trouble;
mod wire;

use std::{
    fmt,
    net::{SocketAddr, TcpListener, ToSocketAddrs},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use tensorwire_fabric::{BoxFuture, Elapsed, Runtime, TokioRuntime};
use tensorwire_fabric_tcp::{Congestion, DataPort, Door, listen};
use tensorwire_memory::check_own_user_is_certain;
use tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;
use tokio::sync::{mpsc, watch};

use self::{
    dial::Dialler,
    door::Reception,
    handover::Handover,
    server::{Arrival, Host, Tasks},
    wire::Security,
};
use super::{ControlError, ControlPlane, ControlSession, Secret, address::parts};
use crate::log::quota::LogQuota;

/// Maximum length of a gRPC message: the longest frame, its checksum, and their tags and lengths.
const ON_THE_WIRE_MAX: usize = CONTROL_FRAME_BYTES_MAX + 16;

/// HTTP/2 flow control window of a session's stream: how many bytes a peer may send before they are read.
const WINDOW_BYTES: u32 = 256 << 10;

/// The flow control window of a connection, which has one stream and so never more than [`WINDOW_BYTES`] in it.
///
/// The library ends a connection whose unread DATA frames fall short of 256 bytes each by more than half of this window
/// in total. The shortest control frame is 8 bytes long, and 32,768 of them fill the stream's window: 8.1 MB short.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// The bounds of both times of [`Keepalive`].
const KEEPALIVE_SHORTEST: Duration = Duration::from_millis(1);
const KEEPALIVE_LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Interval of HTTP/2 pings, and how long an answer may take.
#[derive(Debug, Clone, Copy)]
struct Keepalive {
    interval: Duration,
    timeout: Duration,
}

/// How a [`GrpcPlane`] listens and dials.
#[derive(Debug, Clone)]
pub struct GrpcConfig {
    address: String,
    secret: Option<Secret>,
    security: Security,
    dial_limit: Duration,
    keepalive: Keepalive,
    strangers_max: usize,
    arrival_limit: Duration,
    congestion: Congestion,
}

impl GrpcConfig {
    /// Listens on `address`, `HOST:PORT`. With port 0 the system chooses a port.
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            secret: None,
            security: Security::None,
            dial_limit: Duration::from_secs(10),
            keepalive: Keepalive { interval: Duration::from_secs(10), timeout: Duration::from_secs(20) },
            strangers_max: 64,
            arrival_limit: Duration::from_secs(10),
            congestion: Congestion::default(),
        }
    }

    /// The congestion control of accepted streams, sessions and data alike. Default: the system's.
    #[must_use]
    pub fn congestion(mut self, congestion: Congestion) -> Self {
        self.congestion = congestion;
        self
    }

    /// The secret that peers must prove. Without one, only loopback addresses can be bound.
    #[must_use]
    pub fn secret(mut self, secret: Option<Secret>) -> Self {
        self.secret = secret;
        self
    }

    /// Turns mutual TLS on: the identity of this worker, and what certificates of peers must contain. With TLS no
    /// secret is needed.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, identity: tensorwire_fabric_tcp::tls::TlsIdentity, names: super::TlsNames) -> Self {
        self.security = Security::Tls { identity, names };
        self
    }

    /// Maximum time to dial, including name resolution. Default 10 s.
    #[must_use]
    pub fn dial_limit(mut self, limit: Duration) -> Self {
        self.dial_limit = limit;
        self
    }

    /// After `interval` without data from a peer it is pinged; if no answer arrives within `timeout`, its sessions are
    /// lost. Defaults 10 s and 20 s: a host that has vanished is noticed within 30 s. Both are at least a millisecond and at
    /// most a year: HTTP/2 adds them to the time of day, which has an end.
    #[must_use]
    pub fn keepalive(mut self, interval: Duration, timeout: Duration) -> Self {
        let [interval, timeout] =
            [interval, timeout].map(|length| length.clamp(KEEPALIVE_SHORTEST, KEEPALIVE_LONGEST));
        self.keepalive = Keepalive { interval, timeout };
        self
    }

    /// How long a connection may take until its session is open, or until a data connection has presented its token.
    /// Default 10 s.
    #[must_use]
    pub fn arrival_limit(mut self, limit: Duration) -> Self {
        self.arrival_limit = limit;
        self
    }

    /// Maximum number of connections whose peers are not authenticated, for sessions and for data together. A further
    /// connection replaces the oldest of the kind that has more. From each, at most 64 KiB are read. Default 64.
    #[must_use]
    pub fn strangers_max(mut self, limit: usize) -> Self {
        self.strangers_max = limit;
        self
    }
}

/// Dials and accepts control sessions over gRPC, on a separate thread.
///
/// Dropping it closes the plane without waiting.
pub struct GrpcPlane {
    address: String,
    config: GrpcConfig,
    /// The secret that peers must prove; `None` if every peer may connect.
    secret: Option<Secret>,
    runtime: tokio::runtime::Handle,
    /// The runtime as a [`Runtime`], on which sessions are served.
    served_on: Arc<dyn Runtime>,
    arrivals: Mutex<mpsc::Receiver<Arrival>>,
    tasks: Tasks,
    data: DataPort,
    closing: watch::Sender<bool>,
    /// Nothing is sent on this channel: receiving fails when the thread ends.
    done: watch::Receiver<()>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl GrpcPlane {
    /// Starts to listen. Blocks while a host name in the address is resolved.
    ///
    /// # Errors
    /// [`ControlError::BadAddress`], [`ControlError::Bind`]; [`ControlError::SecretNeeded`] for an address that other
    /// hosts reach, without a secret or TLS.
    pub fn bind(config: GrpcConfig) -> Result<Self, ControlError> {
        let addresses = resolve(&config.address)?;
        let needs_secret = config.secret.is_none() && !config.security.encrypts();
        if needs_secret && !are_loopback(&addresses) {
            return Err(ControlError::SecretNeeded { address: config.address });
        }
        let ports = if needs_secret {
            check_own_user_is_certain().map_err(|why| {
                let detail = format!("no secret can be handed over: {why}, or give a secret file");
                ControlError::Bind { address: config.address.clone(), detail }
            })?;
            Ports::listen_with_handover(&config, &addresses)
        } else {
            Ports::listen(&config, &addresses)
        };
        Self::start(config, ports?)
    }

    /// Starts to listen without a secret on any address: everyone who reaches the port can read and replace tensors.
    /// For networks that are protected by other means.
    ///
    /// # Errors
    /// [`ControlError::BadAddress`], [`ControlError::Bind`].
    pub fn dangerous_bind_without_secret(config: GrpcConfig) -> Result<Self, ControlError> {
        let addresses = resolve(&config.address)?;
        log!(WARN, address = config.address, "listening without a secret: every peer is trusted");
        let config = GrpcConfig { secret: None, ..config };
        let ports = Ports::listen(&config, &addresses)?;
        Self::start(config, ports)
    }

    /// The secret that peers of this plane must prove.
    pub fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    fn start(config: GrpcConfig, ports: Ports) -> Result<Self, ControlError> {
        let failed = |error: std::io::Error| bind_error(&config, &error);
        let Ports { listener, handover } = ports;
        let address = listener.local_addr().map_err(failed)?.to_string();
        let secret = handover.as_ref().map(Handover::secret).or(config.secret.as_ref()).cloned();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (listener, served_on) = {
            let _context = runtime.enter();
            let served_on: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().ok_or(ControlError::Closed)?);
            (tokio::net::TcpListener::from_std(listener).map_err(failed)?, served_on)
        };
        let (closing, close) = watch::channel(false);
        let (arrived, arrivals) = mpsc::channel(config.strangers_max.max(1));
        let (running, all_done) = mpsc::channel(1);
        let (finished, done) = watch::channel(());
        let tasks = Tasks(running.downgrade());
        let data = config.security.data_port();
        let host = Host {
            listener,
            handover,
            reception: Arc::new(Reception {
                door: Door::new(config.strangers_max, config.arrival_limit, served_on.clone()),
                security: config.security.clone(),
                data: data.clone(),
                log: LogQuota::new(served_on.clone()),
            }),
            arrivals: arrived,
            closing: close,
            tasks: tasks.clone(),
            keepalive: config.keepalive,
        };
        let handle = runtime.handle().clone();
        let thread = std::thread::Builder::new().name(thread_name(&address)).spawn(move || {
            runtime.block_on(host.run(running, all_done));
            // A blocking name resolution may still run, and must not delay the shutdown.
            runtime.shutdown_background();
            drop(finished);
        });
        let thread = Mutex::new(Some(thread.map_err(failed)?));
        let arrivals = Mutex::new(arrivals);
        Ok(Self {
            address,
            config,
            secret,
            runtime: handle,
            served_on,
            arrivals,
            tasks,
            data,
            closing,
            done,
            thread,
        })
    }

    fn dialler(&self) -> Dialler {
        Dialler {
            tasks: self.tasks.clone(),
            runtime: self.served_on.clone(),
            closing: self.closing.subscribe(),
            keepalive: self.config.keepalive,
            limit: self.config.dial_limit,
            security: self.config.security.clone(),
        }
    }

    fn poll_arrival(&self, context: &mut Context<'_>) -> Poll<Result<ControlSession, ControlError>> {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match arrivals.poll_recv(context) {
                Poll::Pending => return Poll::Pending,
                // The peer disconnected, or its connection was replaced, while it waited.
                Poll::Ready(Some(arrival)) if arrival.guest.stranger.is_evicted() => {}
                Poll::Ready(Some(arrival)) => return Poll::Ready(Ok(arrival.session)),
                Poll::Ready(None) => return Poll::Ready(Err(ControlError::Closed)),
            }
        }
    }

    fn begin_close(&self) {
        self.closing.send_replace(true);
    }
}

impl ControlPlane for GrpcPlane {
    fn local_address(&self) -> String {
        self.address.clone()
    }

    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        Box::pin(on_plane(self.runtime.clone(), self.dialler().dial(address.to_owned(), None)))
    }

    fn resolve(&self, name: &str) -> BoxFuture<'static, Result<Vec<String>, ControlError>> {
        Box::pin(on_plane(self.runtime.clone(), dial::resolve(name.to_owned())))
    }

    fn dial_resolved(
        &self,
        address: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        let dialling = self.dialler().dial(address.to_owned(), Some(name.to_owned()));
        Box::pin(on_plane(self.runtime.clone(), dialling))
    }

    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>> {
        let closing = self.closing.subscribe();
        Box::pin(async move {
            tokio::select! {
                biased;
                () = closed(closing) => Err(ControlError::Closed),
                arrival = std::future::poll_fn(|context| self.poll_arrival(context)) => arrival,
            }
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.begin_close();
        let mut done = self.done.clone();
        Box::pin(async move {
            // This fails when the thread ends, for which this waits.
            let _ = done.changed().await;
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(thread) = thread {
                // The thread returns at once.
                let _ = thread.join();
            }
        })
    }

    fn runtime(&self) -> Option<Arc<dyn Runtime>> {
        Some(self.served_on.clone())
    }

    fn data_port(&self) -> Option<DataPort> {
        Some(self.data.clone())
    }

    fn ambient_secret(&self, address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>> {
        // With TLS the certificate identifies the peer, so no secret is requested from a socket that any user may have
        // bound.
        if address == self.address || self.config.security.encrypts() {
            return Box::pin(std::future::ready(Ok(self.secret.clone())));
        }
        let (runtime, address, open) = (self.runtime.clone(), address.to_owned(), self.secret.is_none());
        Box::pin(async move {
            let asked = {
                let address = address.clone();
                on_plane(runtime, async move { handover::ask(&address).await }).await?
            };
            if asked.is_none() && !open { Err(ControlError::NoSecret { address }) } else { Ok(asked) }
        })
    }
}

impl Drop for GrpcPlane {
    fn drop(&mut self) {
        self.begin_close();
    }
}

impl fmt::Debug for GrpcPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcPlane").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The sockets that a plane listens on.
struct Ports {
    listener: TcpListener,
    handover: Option<Handover>,
}

impl Ports {
    fn listen(config: &GrpcConfig, addresses: &[SocketAddr]) -> Result<Self, ControlError> {
        let listener = listen(addresses, &config.congestion).map_err(|error| bind_error(config, &error))?;
        Ok(Self { listener, handover: None })
    }

    /// Listens on a port for which the name of the hand-over socket is free.
    fn listen_with_handover(config: &GrpcConfig, addresses: &[SocketAddr]) -> Result<Self, ControlError> {
        let any_port = addresses.iter().all(|address| address.port() == 0);
        let mut attempts = if any_port { 16 } else { 1 };
        loop {
            let Self { listener, .. } = Self::listen(config, addresses)?;
            let address = listener.local_addr().map_err(|error| bind_error(config, &error))?;
            let port = address.port();
            attempts -= 1;
            match Handover::bind(address) {
                Ok(handover) => return Ok(Self { listener, handover: Some(handover) }),
                Err(error) if tensorwire_memory::Limit::of_files(&error).is_some() => {
                    return Err(bind_error(config, &error));
                }
                Err(error) if attempts == 0 => {
                    let detail = format!(
                        "the abstract socket tensorwire-{port}, which hands over the secret: {error}; \
                         another process, perhaps another user's, has it: use another port or a secret file"
                    );
                    return Err(ControlError::Bind { address: config.address.clone(), detail });
                }
                Err(_) => {}
            }
        }
    }
}

fn bind_error(config: &GrpcConfig, error: &std::io::Error) -> ControlError {
    let remedy = match error.kind() {
        std::io::ErrorKind::AddrInUse => "; use another port, or 0 for any free one",
        std::io::ErrorKind::AddrNotAvailable => "; use an address of this host, or 0.0.0.0 for all of them",
        _ => "",
    };
    let bind = ControlError::Bind { address: config.address.clone(), detail: format!("{error}{remedy}") };
    bind.unless_limit(tensorwire_memory::Limit::of_files(error))
}

/// Runs `work` on the plane's runtime. Dropping the returned future cancels it.
async fn on_plane<T: Send + 'static>(
    runtime: tokio::runtime::Handle,
    work: impl Future<Output = Result<T, ControlError>> + Send + 'static,
) -> Result<T, ControlError> {
    let mut task = AbortOnDrop(runtime.spawn(work));
    // The task is cancelled only when the plane's runtime ends.
    (&mut task.0).await.unwrap_or(Err(ControlError::Closed))
}

/// Cancels a task when it is dropped.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs `future` for at most `limit`, on the plane's own runtime.
#[allow(clippy::disallowed_methods)] // sockets live in real time, also where the rest is simulated
async fn within<F: Future>(limit: Duration, future: F) -> Result<F::Output, Elapsed> {
    tokio::time::timeout(limit, future).await.map_err(|_| Elapsed)
}

/// Waits until the plane begins to close.
fn closed(mut closing: watch::Receiver<bool>) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        // This fails when the plane is dropped, which also closes it.
        let _ = closing.wait_for(|closing| *closing).await;
    })
}

/// At most 15 bytes, because the operating system truncates longer thread names.
fn thread_name(address: &str) -> String {
    format!("tw-ctl-{}", address.rsplit(':').next().unwrap_or_default())
}

fn resolve(address: &str) -> Result<Vec<SocketAddr>, ControlError> {
    let (host, port) = parts(address)?;
    let failed = |detail| ControlError::Bind { address: address.to_owned(), detail };
    let found = (host, port).to_socket_addrs().map_err(|error| failed(error.to_string()))?;
    let found: Vec<_> = found.collect();
    if found.is_empty() { Err(failed("the name has no address".to_owned())) } else { Ok(found) }
}

/// Whether a host with these addresses is this one, and no other host reaches it at them.
fn are_loopback(addresses: &[SocketAddr]) -> bool {
    !addresses.is_empty() && addresses.iter().all(|address| address.ip().to_canonical().is_loopback())
}

//! The fabric, its domains, and the connecting of a prepared queue pair.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tensorwire_fabric::{
    Access, BoxFuture, Capabilities, ConnectParams, Connected, ConnectionData, Domain, Fabric, FabricError,
    FabricKind, PeerViolation, Prepared, QueuePairConfig, RegionTable, RemoteRegion, Role, Runtime, Spinner,
    Wait, timeout,
};
use tensorwire_memory::{Block, BlockId};

use crate::{
    congestion::Congestion,
    dial,
    door::Door,
    driver::start,
    handshake::{
        Address, Hello, Token, VERSION, WELCOME_BYTES, answers_in_http, check_welcome, encode_welcome,
    },
    listener::Listener,
    port::{DataPort, Ticket},
    protection::{Protection, Stream},
    socket::{bound_unsent, watch},
};

/// How the fabric listens and sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// The address to listen on for data connections. With port 0 the system chooses a port when the first queue pair
    /// is prepared. With an unspecified address (`0.0.0.0`, `::`) dialers use the host of the control connection. Not
    /// used by a fabric [at a port](TcpFabric::at_port) that the application listens on. Default `127.0.0.1:0`.
    pub bind: SocketAddr,
    /// How long an accepted stream may take to send its hello. Not used [at a port](TcpFabric::at_port). Default 5 s.
    pub handshake_limit: Duration,
    /// The most accepted streams that have not sent their hello, over all domains. Each costs a descriptor and about
    /// 1 KiB. One more closes the oldest that is older than 50 ms. Not used [at a port](TcpFabric::at_port). Default
    /// 64.
    pub pending_handshakes_max: usize,
    /// A longer logical write is split into pieces of at most this length. Each piece counts in the send queue.
    /// Default 1 GiB.
    pub piece_bytes_max: u64,
    /// The kernel probes an idle connection after half of this time, in whole seconds, at least 1. The peer's kernel
    /// answers even while its process is stopped. [`QueuePairStats::unacknowledged`] shows the owner of the connection, such
    /// as a worker, that answers are missing. Default 30 s.
    ///
    /// [`QueuePairStats::unacknowledged`]: tensorwire_fabric::QueuePairStats::unacknowledged
    pub silence_limit: Duration,
    /// The kernel ends a connection if the peer's host accepts no bytes, or answers no probe, for this long, even if the peer is
    /// alive and only does not read. Default 2 min.
    pub stall_limit: Duration,
    /// The congestion control of streams. A listener that the application [listens](crate::listen) on needs it too. Default:
    /// the system's.
    pub congestion: Congestion,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            handshake_limit: Duration::from_secs(5),
            pending_handshakes_max: 64,
            piece_bytes_max: 1 << 30,
            silence_limit: Duration::from_secs(30),
            stall_limit: Duration::from_secs(120),
            congestion: Congestion::default(),
        }
    }
}

impl TcpConfig {
    fn capabilities(&self, protection: &Protection) -> Capabilities {
        let mut capabilities = Capabilities::WRITES;
        capabilities.encrypted = protection.encrypts();
        capabilities.vectored = true;
        capabilities.read = true;
        capabilities.piece_bytes_max = self.piece_bytes_max.max(1);
        capabilities
    }
}

/// Counters of a fabric's listener.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Streams accepted.
    pub accepted: u64,
    /// Streams passed to the queue pair that issued their token.
    pub handed_over: u64,
    /// Streams closed because their token was never issued, or was used before.
    pub bad_tokens: u64,
    /// Streams closed because their first bytes were not a hello of this version.
    pub malformed: u64,
    /// Streams closed because the hello did not come in time.
    pub timed_out: u64,
    /// Streams closed because newer ones arrived while too many had not sent their hello.
    pub evicted: u64,
    /// Streams closed because they must be encrypted, and the peer did not use TLS or showed no trusted certificate.
    pub not_trusted: u64,
}

/// One TCP stream per queue pair.
///
/// Its connections and listeners use tokio's reactor: `runtime` must spawn onto a tokio runtime with IO
/// enabled, and connecting must be awaited on one.
#[derive(Debug)]
pub struct TcpFabric {
    runtime: Arc<dyn Runtime>,
    config: TcpConfig,
    spinner: Arc<Spinner>,
    port: DataPort,
    listening: Option<Listening>,
    /// The listener of a fabric that listens before it has connections.
    listener: Option<Arc<Listener>>,
}

impl TcpFabric {
    /// A fabric whose connections are driven on `runtime`. It listens on a port of its own while there are queue
    /// pairs.
    pub fn new(runtime: Arc<dyn Runtime>, config: TcpConfig) -> Self {
        let door = Door::new(config.pending_handshakes_max, config.handshake_limit, runtime.clone());
        let listening = Some(Listening { door, current: Arc::default() });
        let (spinner, port) = (Spinner::new(Wait::default()), DataPort::new());
        Self { runtime, config, spinner, port, listening, listener: None }
    }

    /// A fabric that does not listen: the listener of the control connection passes its streams to `port`. The side
    /// that dialled the control connection must dial the data connection too ([`ConnectParams::peer_address`]).
    /// Streams are encrypted if those of `port` are.
    pub fn at_port(runtime: Arc<dyn Runtime>, config: TcpConfig, port: DataPort) -> Self {
        Self {
            runtime,
            config,
            spinner: Spinner::new(Wait::default()),
            port,
            listening: None,
            listener: None,
        }
    }

    /// Encrypts every connection by mutual TLS. Refuses peers that do not encrypt, and peers whose certificate differs
    /// from the one in their connection data. Costs one copy of the received bytes.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self, identity: crate::tls::TlsIdentity) -> Self {
        self.port = DataPort::with_tls(identity);
        self
    }

    /// How drivers wait. At most one driver of this fabric spins at a time; each of its looks is a read of the socket
    /// that does not wait.
    #[must_use]
    pub fn with_wait(mut self, wait: Wait) -> Self {
        self.spinner = Spinner::new(wait);
        self
    }

    /// Listens from now on, instead of from the first queue pair on.
    ///
    /// # Errors
    /// [`FabricError::Device`] naming the call that the system refused, [`FabricError::Limit`] the limit behind it.
    pub fn listen(mut self) -> Result<Self, FabricError> {
        if let Some(listening) = &self.listening {
            self.listener = Some(listening.listener(&self.runtime, &self.config, &self.port)?);
        }
        Ok(self)
    }

    /// The counters of its listeners, past ones included.
    pub fn listener_stats(&self) -> ListenerStats {
        let door = self.listening.as_ref().map(|listening| listening.door.stats()).unwrap_or_default();
        let [handed_over, bad_tokens, malformed, not_trusted] = self.port.counts();
        ListenerStats {
            accepted: door.accepted,
            timed_out: door.timed_out,
            evicted: door.evicted,
            handed_over,
            bad_tokens,
            malformed,
            not_trusted,
        }
    }
}

/// State that all domains of a fabric share while one of them has a prepared queue pair. A worker may have one domain
/// per connection and needs only one port.
#[derive(Debug, Clone)]
struct Listening {
    door: Arc<Door>,
    current: Arc<Mutex<Weak<Listener>>>,
}

impl Listening {
    /// The current listener, or a new one.
    fn listener(
        &self,
        runtime: &Arc<dyn Runtime>,
        config: &TcpConfig,
        port: &DataPort,
    ) -> Result<Arc<Listener>, FabricError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = current.upgrade() {
            return Ok(listener);
        }
        let started =
            Listener::start(runtime, config.bind, &config.congestion, self.door.clone(), port.clone());
        let listener = started.map_err(|error| match remedy(&error) {
            Some(remedy) => {
                FabricError::refused(FabricKind::TCP, "listen", &error, format!("{error}; {remedy}"))
            }
            None => FabricError::device(FabricKind::TCP, "listen", error),
        })?;
        *current = Arc::downgrade(&listener);
        Ok(listener)
    }
}

impl Fabric for TcpFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::TCP
    }

    fn capabilities(&self) -> Capabilities {
        self.config.capabilities(self.port.protection())
    }

    fn reach(&self) -> Vec<u8> {
        Vec::new()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        Ok(Arc::new(TcpDomain {
            runtime: self.runtime.clone(),
            config: self.config.clone(),
            spinner: self.spinner.clone(),
            table: Arc::new(RegionTable::new(&*self.runtime)),
            port: self.port.clone(),
            listening: self.listening.clone(),
            listener: Mutex::new(self.listener.clone()),
        }))
    }
}

/// A domain: its regions, and the listener once a queue pair was prepared.
#[derive(Debug)]
struct TcpDomain {
    runtime: Arc<dyn Runtime>,
    config: TcpConfig,
    spinner: Arc<Spinner>,
    table: Arc<RegionTable>,
    port: DataPort,
    listening: Option<Listening>,
    listener: Mutex<Option<Arc<Listener>>>,
}

impl TcpDomain {
    /// This domain's listener; `None` if it uses the port of the control connection.
    fn listener(&self) -> Result<Option<Arc<Listener>>, FabricError> {
        let Some(listening) = &self.listening else { return Ok(None) };
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if listener.is_none() {
            *listener = Some(listening.listener(&self.runtime, &self.config, &self.port)?);
        }
        Ok(listener.clone())
    }
}

impl Domain for TcpDomain {
    fn kind(&self) -> FabricKind {
        FabricKind::TCP
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        Ok(self.table.register(&*self.runtime, block, access))
    }

    fn deregister(&self, block: BlockId) {
        self.table.deregister(block);
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let listener = self.listener()?;
        let at = listener.as_ref().map(|listener| listener.address());
        let token = Token::random(&*self.runtime);
        let ticket = self.port.issue(token);
        let ip = at.map(|at| at.ip()).filter(|ip| !ip.is_unspecified());
        let port = at.map_or(0, |at| at.port());
        let certificate = self.port.protection().certificate();
        let address = Address { ip, port, ticket: ticket.number(), token, certificate };
        let (runtime, spinner, table) = (self.runtime.clone(), self.spinner.clone(), self.table.clone());
        let capabilities = self.config.capabilities(self.port.protection());
        let limits = (self.config.silence_limit, self.config.stall_limit);
        let congestion = self.config.congestion.clone();
        let protection = self.port.protection().clone();
        Ok(Box::new(TcpPrepared {
            runtime,
            spinner,
            table,
            config,
            capabilities,
            limits,
            congestion,
            address,
            ticket,
            protection,
            _listener: listener,
        }))
    }
}

/// A prepared queue pair that is not connected yet. It keeps the listener alive.
#[derive(Debug)]
struct TcpPrepared {
    runtime: Arc<dyn Runtime>,
    spinner: Arc<Spinner>,
    table: Arc<RegionTable>,
    config: QueuePairConfig,
    capabilities: Capabilities,
    /// The limits on silence and on a stall.
    limits: (Duration, Duration),
    congestion: Congestion,
    address: Address,
    ticket: Ticket,
    protection: Protection,
    _listener: Option<Arc<Listener>>,
}

impl Prepared for TcpPrepared {
    fn connection_data(&self) -> ConnectionData {
        self.address.encode()
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        Box::pin(async move {
            if tokio::runtime::Handle::try_current().is_err() {
                let detail = "await it on a tokio runtime with IO enabled".to_owned();
                return Err(failed("finding the tokio runtime", detail));
            }
            let runtime = self.runtime.clone();
            let limit_ms = u64::try_from(params.limit.as_millis()).unwrap_or(u64::MAX);
            let elapsed = |_| FabricError::ConnectTimeout { kind: FabricKind::TCP, limit_ms };
            timeout(&*runtime, params.limit, self.establish(&params)).await.map_err(elapsed)?
        })
    }
}

impl TcpPrepared {
    async fn establish(self, params: &ConnectParams) -> Result<Connected, FabricError> {
        let peer = Address::decode(&params.peer)?;
        self.protection.check(peer.certificate.as_ref())?;
        let Self {
            runtime,
            spinner,
            table,
            config,
            capabilities,
            limits,
            congestion,
            address,
            ticket,
            protection,
            ..
        } = self;
        let stream = match params.role {
            Role::Dialer => {
                // The ticket is used: no other stream may claim it.
                drop(ticket);
                dial(&peer, params.peer_address, address.token, &protection, &congestion).await?
            }
            Role::Acceptor => accept(ticket, &peer, &congestion).await?,
        };
        let tcp = stream.tcp();
        tcp.set_nodelay(true).map_err(|error| failed("setting TCP_NODELAY", error.to_string()))?;
        bound_unsent(tcp).map_err(|error| failed("setting TCP_NOTSENT_LOWAT", error.to_string()))?;
        let watched = watch(tcp, limits.0, limits.1);
        watched.map_err(|error| failed("setting the limits of silence", error.to_string()))?;
        start(&runtime, table, config, capabilities, spinner, stream)
    }
}

/// Opens the stream and shows the acceptor's token. `control` is the address at which the control connection was
/// dialled.
async fn dial(
    peer: &Address,
    control: Option<SocketAddr>,
    nonce: Token,
    protection: &Protection,
    congestion: &Congestion,
) -> Result<Stream, FabricError> {
    let Some(to) = peer.dialled_at(control) else {
        let detail = "the peer has named no address of its own for data; give the address that the control connection \
                      was dialled at in ConnectParams::peer_address"
            .to_owned();
        return Err(failed("finding the peer's address", detail));
    };
    let stream = dial::open(to, congestion).await.map_err(|error| {
        let remedy = remedy(&error).unwrap_or("is the peer alive, and the port open in its firewall?");
        FabricError::refused(FabricKind::TCP, "connecting", &error, format!("{to}: {error}; {remedy}"))
    })?;
    let mut stream = protection.dial(stream, peer.certificate.as_ref()).await?;
    let hello = Hello { version: VERSION, ticket: peer.ticket, token: peer.token, nonce };
    let mut welcome = [0; WELCOME_BYTES];
    let exchange = async {
        stream.write_all(&hello.encode()).await?;
        stream.read_exact(&mut welcome).await
    };
    let exchanged = exchange.await;
    if answers_in_http(&welcome) {
        let detail = format!(
            "{to} answers in HTTP, so a proxy or load balancer for HTTP is on the way: tensors over tcp need one that \
             passes TCP or TLS through unchanged"
        );
        return Err(failed("the handshake", detail));
    }
    exchanged.map_err(|error| {
        let why = protection.explain(&error);
        let detail = format!(
            "{to}: {why}; the peer has given up, its token was used already, or a proxy on the way carries nothing but \
             HTTP/2: tensors over tcp need one that passes TCP or TLS through unchanged"
        );
        failed("the handshake", detail)
    })?;
    check_welcome(&welcome)?;
    Ok(stream)
}

/// Waits for the stream that shows this side's token, and checks that it is the dialer's.
async fn accept(mut ticket: Ticket, peer: &Address, congestion: &Congestion) -> Result<Stream, FabricError> {
    let Some(visitor) = ticket.visitor().await else {
        return Err(failed(
            "accepting",
            "nothing listens for it any more; see the log for the reason".to_owned(),
        ));
    };
    if !visitor.nonce.matches(&peer.token) {
        let violation = PeerViolation::BadToken;
        return Err(FabricError::PeerMisbehaved { kind: FabricKind::TCP, violation });
    }
    let mut stream = visitor.stream;
    stream.check_peer(peer.certificate.as_ref())?;
    // Inherited already, unless the listener is not this fabric's.
    congestion.choose(stream.tcp());
    let answered = stream.write_all(&encode_welcome()).await;
    answered.map_err(|error| failed("the handshake", format!("{error}; the dialer has gone")))?;
    Ok(stream)
}

/// The remedy for an error that is due to a limit of this process or host.
pub(super) fn remedy(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error() {
        Some(libc::EMFILE) => Some(
            "this process has as many descriptors open as its limit RLIMIT_NOFILE allows, and each connection takes \
             one: raise the limit (`ulimit -n`, LimitNOFILE= of a systemd unit)",
        ),
        Some(libc::ENFILE) => Some("this host has as many files open as fs.file-max allows: raise it"),
        _ => None,
    }
}

fn failed(step: &'static str, detail: String) -> FabricError {
    FabricError::Connect { kind: FabricKind::TCP, step, detail }
}

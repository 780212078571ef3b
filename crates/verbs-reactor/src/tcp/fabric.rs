//! The fabric, its domains, and connecting a prepared end.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use memory::{Block, BlockId};
use tokio::net::{TcpSocket, TcpStream};

use super::{
    handshake::{Address, Hello, Token, VERSION, WELCOME_BYTES, check_welcome, encode_welcome},
    link::TcpLink,
    listener::{Counters, Listener, ListenerStats, Ticket},
    protection::{Protection, Stream},
    socket::{prefer_cubic, watch},
};
use crate::{
    Access, BoxFuture, Capabilities, ConnectParams, ConnectionData, Domain, Fabric, FabricError, FabricKind,
    PeerViolation, Prepared, QueuePair, QueuePairConfig, RegionTable, RemoteRegion, Role, Runtime, Wait,
    timeout, wait::Spinner,
};

/// How the fabric listens and sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// The address that data connections come to; the port is chosen by the system when the first queue pair is
    /// prepared. Unspecified (`0.0.0.0`, `::`): dialers use the host of the control connection.
    /// Default `127.0.0.1`.
    pub bind: IpAddr,
    /// How long an accepted stream may take to say who it is. Default 5 s.
    pub handshake_limit: Duration,
    /// Accepted streams that have not said who they are, of all domains together; each holds a descriptor and about 1 KiB.
    /// One more closes the oldest, once that has had 20 ms. Default 64.
    pub pending_handshakes_max: usize,
    /// A logical write of more bytes is split into pieces of at most as many, each of which counts in the send
    /// queue. Default 1 GiB.
    pub piece_bytes_max: u64,
    /// An idle connection whose peer's host answers nothing for about this long is lost. Its kernel is asked, not
    /// its process: one that is stopped answers. Whole seconds; at least 6. Default 30 s.
    pub silence_limit: Duration,
    /// A connection whose peer's host has taken none of the bytes under way for this long is lost, also when the
    /// peer lives and reads nothing. Default 2 min.
    pub stall_limit: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            handshake_limit: Duration::from_secs(5),
            pending_handshakes_max: 64,
            piece_bytes_max: 1 << 30,
            silence_limit: Duration::from_secs(30),
            stall_limit: Duration::from_secs(120),
        }
    }
}

impl TcpConfig {
    fn capabilities(&self, protection: &Protection) -> Capabilities {
        let piece_bytes_max = self.piece_bytes_max.max(1);
        Capabilities {
            encrypted: protection.encrypts(),
            vectored: true,
            read: true,
            read_vectored: true,
            piece_bytes_max,
            ..Capabilities::WRITES
        }
    }
}

/// One TCP stream per queue pair.
///
/// Its connections and listeners use tokio's reactor: `runtime` must spawn onto a tokio runtime with IO
/// enabled, and connecting must be awaited on one.
#[derive(Debug)]
pub struct TcpFabric {
    runtime: Arc<dyn Runtime>,
    config: TcpConfig,
    counters: Arc<Counters>,
    spinner: Arc<Spinner>,
    listening: Listening,
    protection: Protection,
}

/// What all domains of a fabric share while one of them has prepared a queue pair: a worker may have a domain for each
/// connection, and needs no port for each.
type Listening = Arc<Mutex<Weak<Listener>>>;

impl TcpFabric {
    /// A fabric whose connections are driven on `runtime`.
    pub fn new(runtime: Arc<dyn Runtime>, config: TcpConfig) -> Self {
        Self {
            runtime,
            config,
            counters: Arc::default(),
            spinner: Spinner::new(Wait::default()),
            listening: Listening::default(),
            protection: Protection::default(),
        }
    }

    /// Encrypts every connection by mutual TLS, and refuses ends that don't, or whose certificate is another one than
    /// their connection data says. Costs one copy of what is received.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self, identity: crate::tls::TlsIdentity) -> Self {
        self.protection = Protection::Tls(identity);
        self
    }

    /// How drivers wait. At most one driver of this fabric spins at a time; each of its looks is a read of the socket
    /// that does not wait.
    #[must_use]
    pub fn with_wait(mut self, wait: Wait) -> Self {
        self.spinner = Spinner::new(wait);
        self
    }

    /// What its listener saw, and those before it.
    pub fn listener_stats(&self) -> ListenerStats {
        self.counters.stats()
    }
}

impl Fabric for TcpFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn capabilities(&self) -> Capabilities {
        self.config.capabilities(&self.protection)
    }

    fn reach(&self) -> Vec<u8> {
        Vec::new()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        Ok(Arc::new(TcpDomain {
            runtime: self.runtime.clone(),
            config: self.config.clone(),
            counters: self.counters.clone(),
            spinner: self.spinner.clone(),
            table: Arc::new(RegionTable::new(&*self.runtime)),
            listening: self.listening.clone(),
            protection: self.protection.clone(),
            listener: Mutex::default(),
        }))
    }
}

/// Regions, and the listener once a queue pair was prepared.
#[derive(Debug)]
struct TcpDomain {
    runtime: Arc<dyn Runtime>,
    config: TcpConfig,
    counters: Arc<Counters>,
    spinner: Arc<Spinner>,
    table: Arc<RegionTable>,
    listening: Listening,
    protection: Protection,
    listener: Mutex<Option<Arc<Listener>>>,
}

impl TcpDomain {
    fn listener(&self) -> Result<Arc<Listener>, FabricError> {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = &*listener {
            return Ok(listener.clone());
        }
        let mut listening = self.listening.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = match listening.upgrade() {
            Some(others) => others,
            None => Listener::start(&self.runtime, &self.config, &self.counters, &self.protection)?,
        };
        *listening = Arc::downgrade(&shared);
        *listener = Some(shared.clone());
        Ok(shared)
    }
}

impl Domain for TcpDomain {
    fn kind(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        Ok(self.table.register(&*self.runtime, block, access))
    }

    fn deregister(&self, block: BlockId) {
        self.table.deregister(block);
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let listener = self.listener()?;
        let at = listener.address();
        let token = Token::random(&*self.runtime);
        let ticket = listener.issue(token);
        let ip = Some(at.ip()).filter(|ip| !ip.is_unspecified());
        let certificate = self.protection.certificate();
        let address = Address { ip, port: at.port(), ticket: ticket.number(), token, certificate };
        let (runtime, spinner, table) = (self.runtime.clone(), self.spinner.clone(), self.table.clone());
        let capabilities = self.config.capabilities(&self.protection);
        let limits = (self.config.silence_limit, self.config.stall_limit);
        let protection = self.protection.clone();
        Ok(Box::new(TcpPrepared {
            runtime,
            spinner,
            table,
            config,
            capabilities,
            limits,
            address,
            ticket,
            protection,
        }))
    }
}

/// One end, not connected yet. Its ticket keeps the listener alive.
#[derive(Debug)]
struct TcpPrepared {
    runtime: Arc<dyn Runtime>,
    spinner: Arc<Spinner>,
    table: Arc<RegionTable>,
    config: QueuePairConfig,
    capabilities: Capabilities,
    /// Of silence, and of a stall.
    limits: (Duration, Duration),
    address: Address,
    ticket: Ticket,
    protection: Protection,
}

impl Prepared for TcpPrepared {
    fn connection_data(&self) -> ConnectionData {
        self.address.encode()
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<QueuePair, FabricError>> {
        Box::pin(async move {
            if tokio::runtime::Handle::try_current().is_err() {
                let detail = "await it on a tokio runtime with IO enabled".to_owned();
                return Err(failed("finding the tokio runtime", detail));
            }
            let runtime = self.runtime.clone();
            let limit_ms = u64::try_from(params.limit.as_millis()).unwrap_or(u64::MAX);
            let elapsed = |_| FabricError::ConnectTimeout { kind: FabricKind::Tcp, limit_ms };
            timeout(&*runtime, params.limit, self.establish(&params)).await.map_err(elapsed)?
        })
    }
}

impl TcpPrepared {
    async fn establish(self, params: &ConnectParams) -> Result<QueuePair, FabricError> {
        let peer = Address::decode(&params.peer)?;
        self.protection.check(peer.certificate.as_ref())?;
        let Self { runtime, spinner, table, config, capabilities, limits, address, ticket, protection } =
            self;
        let stream = match params.role {
            Role::Dialer => {
                // Nobody is to dial this end any more.
                drop(ticket);
                dial(&peer, params.peer_host, address.token, &protection).await?
            }
            Role::Acceptor => accept(ticket, &peer).await?,
        };
        let tcp = stream.tcp();
        tcp.set_nodelay(true).map_err(|error| failed("setting TCP_NODELAY", error.to_string()))?;
        let watched = watch(tcp, limits.0, limits.1);
        watched.map_err(|error| failed("setting the limits of silence", error.to_string()))?;
        TcpLink::start(&runtime, table, config, capabilities, spinner, stream)
    }
}

/// Opens the stream and shows the acceptor's token.
async fn dial(
    peer: &Address,
    host: Option<IpAddr>,
    nonce: Token,
    protection: &Protection,
) -> Result<Stream, FabricError> {
    let Some(ip) = peer.ip.or(host) else {
        let detail =
            "the peer listens on every address; give its host in ConnectParams::peer_host".to_owned();
        return Err(failed("finding the peer's address", detail));
    };
    let to = SocketAddr::new(ip, peer.port);
    let stream = open(to).await.map_err(|error| {
        let remedy = remedy(&error).unwrap_or("is the peer alive, and the port open in its firewall?");
        FabricError::refused(FabricKind::Tcp, "connecting", &error, format!("{to}: {error}; {remedy}"))
    })?;
    let mut stream = protection.dial(stream, peer.certificate.as_ref()).await?;
    let hello = Hello { version: VERSION, ticket: peer.ticket, token: peer.token, nonce };
    let mut welcome = [0; WELCOME_BYTES];
    let exchange = async {
        stream.write_all(&hello.encode()).await?;
        stream.read_exact(&mut welcome).await
    };
    exchange.await.map_err(|error| {
        let why = protection.explain(&error);
        failed("the handshake", format!("{to}: {why}; the peer has given up, or its token was used already"))
    })?;
    check_welcome(&welcome)?;
    Ok(stream)
}

async fn open(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if to.ip().is_loopback() {
        prefer_cubic(&socket);
    }
    socket.connect(to).await
}

/// Waits for the stream that shows this end's token, and checks that it is the dialer's.
async fn accept(mut ticket: Ticket, peer: &Address) -> Result<Stream, FabricError> {
    let Some(visitor) = ticket.visitor().await else {
        return Err(failed("accepting", "the listener ended; see the log for its reason".to_owned()));
    };
    if !visitor.nonce.matches(&peer.token) {
        let violation = PeerViolation::BadToken;
        return Err(FabricError::PeerMisbehaved { kind: FabricKind::Tcp, violation });
    }
    let mut stream = visitor.stream;
    stream.check_peer(peer.certificate.as_ref())?;
    if stream.tcp().peer_addr().is_ok_and(|peer| peer.ip().is_loopback()) {
        // Already so, unless the listener is bound to every address.
        prefer_cubic(stream.tcp());
    }
    let answered = stream.write_all(&encode_welcome()).await;
    answered.map_err(|error| failed("the handshake", format!("{error}; the dialer has gone")))?;
    Ok(stream)
}

/// What to do about a limit of this process or host.
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
    FabricError::Connect { kind: FabricKind::Tcp, step, detail }
}

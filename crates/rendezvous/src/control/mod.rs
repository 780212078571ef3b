//! The control plane: how workers find, authenticate and describe themselves to each other.
//!
//! A [`ControlPlane`] carries opaque frames in order between two workers. The frames are
//! `tensorwire::wire::control::ControlFrame`s, and the [`handshake`] authenticates the peer. So an in-memory plane (the
//! simulator) and gRPC are interchangeable.

mod address;
pub(crate) mod cluster;
mod grpc;
pub(crate) mod name;
mod proven;

pub mod handshake;
pub mod secret;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_fabric_tcp::DataPort;
pub use tensorwire_fabric_tcp::Dial;
use tensorwire_protocol::text::escaped;

pub(crate) use self::address::{dialable, for_peers};
#[cfg(feature = "tls")]
pub(crate) use self::proven::{check_worker, named_workers, own_name};
pub use self::{
    address::host_and_port,
    grpc::{GrpcConfig, GrpcPlane},
    proven::{ProvenPeer, TlsNames},
};

/// How long the last frame of a session, or its end, may take if the peer reads slowly.
pub(crate) const FAREWELL: Duration = Duration::from_secs(1);

/// Dials and accepts sessions.
pub trait ControlPlane: Send + Sync + fmt::Debug + 'static {
    /// The address that peers dial, as text (`127.0.0.1:4242`).
    fn local_address(&self) -> String;

    /// Opens a session to the worker at `address`.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`], [`ControlError::BadAddress`].
    ///
    /// # Cancel safety
    /// Dropping the future cancels the attempt.
    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>>;

    /// The addresses that `name` (`host:port`) has now, each as [`dial`](Self::dial) takes it. Those of a plane without
    /// names are `name` itself.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`] if it has none, [`ControlError::BadAddress`].
    ///
    /// # Cancel safety
    /// Cancel-safe. A lookup of the operating system ends by itself.
    fn resolve(&self, name: &str) -> BoxFuture<'static, Result<Vec<String>, ControlError>> {
        Box::pin(std::future::ready(Ok(vec![name.to_owned()])))
    }

    /// As [`dial`](Self::dial), for an address of `name`: under TLS the peer proves the host of `name`, not that of
    /// `address`.
    ///
    /// # Errors
    /// As [`dial`](Self::dial).
    ///
    /// # Cancel safety
    /// Dropping the future cancels the attempt.
    fn dial_resolved(
        &self,
        address: &str,
        name: &str,
    ) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        let _ = name;
        self.dial(address)
    }

    /// The next session that a peer has opened. If peers connect faster than sessions are accepted, the plane delays or
    /// refuses them. One caller at a time.
    ///
    /// # Errors
    /// [`ControlError::Closed`] once the plane is closed.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>>;

    /// Stops listening, ends every session, and waits for background tasks.
    fn close(&self) -> BoxFuture<'_, ()>;

    /// The plane's own runtime, if it has one. Sessions are served on it, so that they are served while user code
    /// blocks the worker's runtime.
    fn runtime(&self) -> Option<Arc<dyn Runtime>> {
        None
    }

    /// Passes data connections that arrive at this plane's port to the tcp fabric. `None` if the plane accepts only
    /// sessions; then the fabric listens on a separate port.
    fn data_port(&self) -> Option<DataPort> {
        None
    }

    /// The secret for the worker at `address` if the user gave none. On loopback, that worker hands its secret over
    /// through an abstract Unix socket, after both sides have compared their user ids. It is valid only at its
    /// [`listening_address`](Secret::listening_address), which must be dialled instead of `address`. For the plane's
    /// own address: the secret that peers must prove. `None` if peers are not authenticated: in the simulator, and on
    /// planes made by a `dangerous_` constructor.
    ///
    /// # Errors
    /// [`ControlError::NoSecret`] if there is none; [`ControlError::Unreachable`] if the socket belongs to another
    /// user, its process ends or does not answer, or the worker with that port listens on another address than
    /// `address`; [`ControlError::Misbehaved`] if it hands over bytes that are no secret.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    fn ambient_secret(&self, address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>>;
}

/// A session, split into its two directions. Dropping both ends it.
#[derive(Debug)]
pub struct ControlSession {
    /// To the peer.
    pub sender: Arc<dyn FrameSender>,
    /// From the peer.
    pub receiver: Box<dyn FrameReceiver>,
    /// The addresses of the connection, if it has any.
    pub addresses: Option<Addresses>,
}

impl ControlSession {
    /// The peer's host, if the connection has addresses.
    pub fn peer_host(&self) -> Option<IpAddr> {
        self.addresses.map(|addresses| addresses.peer.ip())
    }
}

/// The local and the remote address of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The local address.
    pub own: SocketAddr,
    /// The remote address.
    pub peer: SocketAddr,
}

/// Sends frames, in order.
pub trait FrameSender: Send + Sync + fmt::Debug + 'static {
    /// Sends one frame of at most [`CONTROL_FRAME_BYTES_MAX`](tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX) bytes.
    /// Waits while the peer is slow (bounded buffering).
    ///
    /// # Errors
    /// [`ControlError::FrameTooLarge`], [`ControlError::Lost`], [`ControlError::Closed`].
    ///
    /// # Cancel safety
    /// A frame is sent whole or not at all.
    fn send(&self, frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>>;

    /// Called by the handshake when the peer is authenticated, so that the session no longer counts towards the limit
    /// of unauthenticated sessions.
    fn admitted(&self) {}

    /// What the peer has proven by TLS; `None` without TLS. The handshake compares the peer's claims with it.
    fn proven(&self) -> Option<&ProvenPeer> {
        None
    }
}

/// Receives frames, in order.
pub trait FrameReceiver: Send + fmt::Debug + 'static {
    /// The next frame, or `None` after the peer has ended the session in order.
    ///
    /// # Errors
    /// [`ControlError::Lost`] if the peer or the connection is lost.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>>;
}

/// A shared secret. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
    /// The address of the plane that generated the secret; `None` for a user's secret.
    listens_on: Option<SocketAddr>,
}

impl Secret {
    /// A user's secret of at least 16 bytes, for several workers. Proofs of it are not bound to a connection.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Option<Self> {
        let bytes = bytes.into();
        (bytes.len() >= 16).then_some(Self { bytes, listens_on: None })
    }

    /// The bytes, to compute proofs.
    pub fn expose(&self) -> &[u8] {
        &self.bytes
    }

    /// The listen address of the worker that generated this secret and hands it over on its host. A proof of such a
    /// secret is bound to the connection, so that nobody can relay it, not even an intended proxy. `None` for a user's
    /// secret.
    pub fn listening_address(&self) -> Option<SocketAddr> {
        self.listens_on
    }

    pub(crate) fn is_handed_over(&self) -> bool {
        self.listens_on.is_some()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why the control plane failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No session could be opened.
    #[error("cannot reach the worker at `{address}`: {detail}")]
    Unreachable {
        /// The address dialled.
        address: String,
        /// What was observed.
        detail: String,
    },
    /// Text that is not an address.
    #[error("`{}` is not an address: use HOST:PORT, for instance 127.0.0.1:4242", escaped(address))]
    BadAddress {
        /// The text.
        address: String,
    },
    /// Listening failed.
    #[error("cannot listen on `{address}`: {detail}")]
    Bind {
        /// The address.
        address: String,
        /// The error of the operating system.
        detail: String,
    },
    /// A limit of the operating system is reached.
    #[error("{what}")]
    Limit {
        /// What failed, and the error of the operating system.
        what: String,
        /// The limit.
        limit: tensorwire_memory::Limit,
    },
    /// Listening on an address that other hosts reach needs a secret.
    #[error(
        "refusing to listen on `{address}`: it is reachable from other hosts and no secret is set; \
         give one with a secret file (TENSORWIRE_SECRET_FILE), use TLS, or bind to 127.0.0.1"
    )]
    SecretNeeded {
        /// The address.
        address: String,
    },
    /// The peer did not prove the secret.
    #[error(
        "the worker at `{address}` does not know the secret; give both workers the same secret file (a secret handed over on \
         loopback cannot be used through a proxy)"
    )]
    WrongSecret {
        /// The address.
        address: String,
    },
    /// TLS with the peer failed, or only one side uses it.
    #[error("TLS with the worker at `{address}`: {detail}")]
    Tls {
        /// The address.
        address: String,
        /// What was observed, and what to do.
        detail: String,
    },
    /// The peer uses a name that its certificate does not contain.
    #[error("the worker at `{address}` claims to be {worker}, but its certificate {problem}")]
    NameNotProven {
        /// The address.
        address: String,
        /// The name.
        worker: String,
        /// What the certificate contains, and what to do.
        problem: String,
    },
    /// The dialled worker is this worker.
    #[error("the worker at `{address}` is this worker itself; its own values need no connection")]
    ThisWorker {
        /// The address.
        address: String,
    },
    /// The peer refuses this worker.
    #[error("the worker at `{address}` refuses this one: {detail}")]
    Refused {
        /// The address.
        address: String,
        /// The peer's message.
        detail: String,
    },
    /// No secret is known for the peer.
    #[error(
        "no secret is known for the worker at `{address}`: give this worker the secret file of that one \
         (TENSORWIRE_SECRET_FILE), or run both under the same user on one host and without secret files"
    )]
    NoSecret {
        /// The address.
        address: String,
    },
    /// A secret file cannot be used.
    #[error("secret file `{}`: {problem}", path.display())]
    SecretFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// The peer has another version, or violated the protocol.
    #[error("the worker at `{address}` broke the control protocol: {detail}")]
    Misbehaved {
        /// The address.
        address: String,
        /// The rule.
        detail: String,
    },
    /// A frame is too long to be sent.
    #[error(
        "a control frame of {bytes} bytes is above the limit of {} bytes; announce fewer or shorter things at once",
        tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX
    )]
    FrameTooLarge {
        /// Its length.
        bytes: usize,
    },
    /// The session is lost.
    #[error("the control session is lost: {detail}")]
    Lost {
        /// What was observed.
        detail: String,
    },
    /// The plane was closed on this side.
    #[error("the control plane was closed")]
    Closed,
}

impl ControlError {
    /// The limit of this process or host that caused the error, if one did.
    pub fn limit(&self) -> Option<tensorwire_memory::Limit> {
        match self {
            Self::Limit { limit, .. } => Some(*limit),
            _ => None,
        }
    }

    /// This error, or [`ControlError::Limit`] if `limit` caused it.
    fn unless_limit(self, limit: Option<tensorwire_memory::Limit>) -> Self {
        match limit {
            Some(limit) => Self::Limit { what: self.to_string(), limit },
            None => self,
        }
    }
}

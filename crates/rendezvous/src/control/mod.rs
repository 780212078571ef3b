//! The control plane: how workers find, authenticate and describe themselves to each other.
//!
//! A [`ControlPlane`] carries opaque frames in order between two workers; what is in them is
//! `tensorwire_protocol::wire::control::ControlFrame`, and who may speak is decided by the handshake above, so an
//! in-memory plane (the simulator) and gRPC are interchangeable.

mod address;
pub(crate) mod cluster;
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::needless_pass_by_value)] // not written by hand
mod generated;
mod grpc;
pub(crate) mod name;
mod proven;

pub mod handshake;
pub mod secret;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use tensorwire_fabric_tcp::DataPort;
use tensorwire_protocol::text::escaped;
use tensorwire_verbs_reactor::{BoxFuture, Runtime};

#[cfg(feature = "tls")]
pub(crate) use self::proven::{check_worker, named_workers, own_name};
pub use self::{
    address::host_and_port,
    grpc::{GrpcConfig, GrpcPlane},
    proven::{ProvenPeer, TlsNames},
};

/// Dials and accepts sessions.
pub trait ControlPlane: Send + Sync + fmt::Debug + 'static {
    /// The address peers dial, as text (`127.0.0.1:4242`).
    fn local_address(&self) -> String;

    /// Opens a session to the worker at `address`.
    ///
    /// # Errors
    /// [`ControlError::Unreachable`], [`ControlError::BadAddress`].
    ///
    /// # Cancel safety
    /// Dropping the future abandons the attempt.
    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>>;

    /// The next session that a peer has opened. Bounded: a plane holds back or refuses peers that come faster
    /// than sessions are accepted. One caller at a time.
    ///
    /// # Errors
    /// [`ControlError::Closed`] once the plane is closed.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>>;

    /// Stops listening and ends every session. Waits for background work to end.
    fn close(&self) -> BoxFuture<'_, ()>;

    /// The runtime that sessions should be served on, so that they are served while user code blocks the worker's.
    /// `None`, unless the plane has one of its own: the worker's.
    fn runtime(&self) -> Option<Arc<dyn Runtime>> {
        None
    }

    /// Where data connections of the tcp fabric are handed over that come in at this plane's own port. `None`, unless the
    /// plane tells them from sessions: then the fabric listens on a port of its own.
    fn data_port(&self) -> Option<DataPort> {
        None
    }

    /// The secret to use with the worker at `address` when the user gave none: on loopback it is handed over
    /// through an abstract Unix socket after both ends' user ids were compared, and is of use at its
    /// [`listening_address`](Secret::listening_address) alone, which is to be dialled in place of `address`. For the own
    /// address, the secret that peers of this plane must know. `None` if nobody is to be authenticated: in the
    /// simulator, and on planes made by a `dangerous_` constructor.
    ///
    /// # Errors
    /// [`ControlError::NoSecret`] where there is none, [`ControlError::Misbehaved`] if another user has the
    /// socket, [`ControlError::Unreachable`] if the worker with that port listens on another address than `address`.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    fn ambient_secret(&self, address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>>;
}

/// One session, split into its two directions. Dropping both ends it.
#[derive(Debug)]
pub struct ControlSession {
    /// To the peer.
    pub sender: Arc<dyn FrameSender>,
    /// From the peer.
    pub receiver: Box<dyn FrameReceiver>,
    /// The connection's two ends, where it has addresses.
    pub addresses: Option<Addresses>,
}

impl ControlSession {
    /// The peer's host, where there is one.
    pub fn peer_host(&self) -> Option<IpAddr> {
        self.addresses.map(|addresses| addresses.peer.ip())
    }
}

/// The addresses of a connection's two ends, as one of them sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// This end's.
    pub own: SocketAddr,
    /// The peer's.
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

    /// Tells the plane that the peer has proven itself, so that the session no longer counts among the few
    /// that unauthenticated peers may have. The handshake calls it.
    fn admitted(&self) {}

    /// What the peer has proven by TLS; `None` unless the plane speaks it. The handshake holds what the peer says against
    /// it.
    fn proven(&self) -> Option<&ProvenPeer> {
        None
    }
}

/// Receives frames, in order.
pub trait FrameReceiver: Send + fmt::Debug + 'static {
    /// The next frame, or `None` after the peer's orderly end.
    ///
    /// # Errors
    /// [`ControlError::Lost`] when the peer or the way to it is gone.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>>;
}

/// A shared secret. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
    /// Of a plane that made it by itself.
    listens_on: Option<SocketAddr>,
}

impl Secret {
    /// At least 16 bytes, which a user gives to several workers: it proves nothing about the connections between them.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Option<Self> {
        let bytes = bytes.into();
        (bytes.len() >= 16).then_some(Self { bytes, listens_on: None })
    }

    /// The bytes, for computing proofs.
    pub fn expose(&self) -> &[u8] {
        &self.bytes
    }

    /// Where the worker listens that made this secret and hands it over on its host. A proof of such a secret also says
    /// over which connection it goes, so that nobody can stand in between, be it a proxy that was put there on purpose.
    /// `None` for a secret that a user gave.
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
        /// What was seen.
        detail: String,
    },
    /// Text that is no address.
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
        /// The operating system's answer.
        detail: String,
    },
    /// A limit of the operating system is in the way.
    #[error("{what}")]
    Limit {
        /// What failed, where, and with which answer.
        what: String,
        /// The limit.
        limit: tensorwire_memory::Limit,
    },
    /// Listening beyond loopback needs a secret.
    #[error(
        "refusing to listen on `{address}`: it is reachable from other hosts and no secret is set; \
         give one with a secret file (TENSORWIRE_SECRET_FILE), use TLS, or bind to 127.0.0.1"
    )]
    SecretNeeded {
        /// The address.
        address: String,
    },
    /// The peer could not prove that it knows the secret.
    #[error(
        "the worker at `{address}` does not know the secret; give both ends the same secret file (one that is handed over on \
         loopback goes through no proxy)"
    )]
    WrongSecret {
        /// The address.
        address: String,
    },
    /// TLS with the peer failed, or only one end speaks it.
    #[error("TLS with the worker at `{address}`: {detail}")]
    Tls {
        /// The address.
        address: String,
        /// What was seen, and what to do.
        detail: String,
    },
    /// The peer goes by a name that its certificate does not have.
    #[error("the worker at `{address}` says that it is {worker}, but its certificate {problem}")]
    NameNotProven {
        /// The address.
        address: String,
        /// The name.
        worker: String,
        /// What the certificate has, and what to do.
        problem: String,
    },
    /// The peer does not let this worker in.
    #[error("the worker at `{address}` does not let this one in: {detail}")]
    Refused {
        /// The address.
        address: String,
        /// What it said.
        detail: String,
    },
    /// No secret is known that the peer could be asked for.
    #[error(
        "no secret is known for the worker at `{address}`: give this end the secret file of that worker \
         (TENSORWIRE_SECRET_FILE), or run both under the same user on one host and without secret files"
    )]
    NoSecret {
        /// The address.
        address: String,
    },
    /// A secret file that cannot be used.
    #[error("secret file `{}`: {problem}", path.display())]
    SecretFile {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// The peer is of another version or sent what it must not.
    #[error("the worker at `{address}` broke the control protocol: {detail}")]
    Misbehaved {
        /// The address.
        address: String,
        /// The rule.
        detail: String,
    },
    /// A frame that may not be sent.
    #[error(
        "a control frame of {bytes} bytes is above the limit of {} bytes; announce fewer or shorter things at once",
        tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX
    )]
    FrameTooLarge {
        /// Its length.
        bytes: usize,
    },
    /// The session broke.
    #[error("the control session is lost: {detail}")]
    Lost {
        /// What was seen.
        detail: String,
    },
    /// This side closed it.
    #[error("the control plane was closed")]
    Closed,
}

impl ControlError {
    /// The limit of this process or host that is behind it, if one is.
    pub fn limit(&self) -> Option<tensorwire_memory::Limit> {
        match self {
            Self::Limit { limit, .. } => Some(*limit),
            _ => None,
        }
    }

    /// This error, unless `limit` is behind it.
    fn unless_limit(self, limit: Option<tensorwire_memory::Limit>) -> Self {
        match limit {
            Some(limit) => Self::Limit { what: self.to_string(), limit },
            None => self,
        }
    }
}

//! The handshake of two prepared queue pairs, over a Unix socket with an abstract name.
//!
//! ```text
//! dialer                                   acceptor (listens since it was prepared)
//!   connect, check the peer's user          accept, check the peer's user
//!   Hello {acceptor's token} + 3 fds   --->  token right? check and map the page set
//!   token right? check and map         <---  Hello {dialer's token} + 3 fds
//!   Ready                              --->
//! ```
//! Abstract names are public. The acceptor refuses a process that connects without the right token, and goes on
//! waiting. A token can be used once.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tensorwire_fabric::{
    ConnectParams, FabricError, FabricKind, LossCause, PeerViolation, QueuePairConfig, Role, Runtime, timeout,
};
use tensorwire_memory::{NotOwnUser, check_own_user};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    catalogue::{NeighbourCatalogue, OwnCatalogue},
    doorbell::Ringer,
    frame::{Address, Frame, Token},
    import::{ImportError, ImportedBlocks},
    limits::CANDIDATE_SHARE,
    ring::{OwnPage, PeerPage},
    sys::{self, ProcessId},
};

const KIND: FabricKind = FabricKind::SHM;

/// How long a dialer waits before it connects again, if the acceptor's backlog was full.
const BACKLOG_PAUSE: Duration = Duration::from_millis(1);

/// What this side contributes to the connection.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) address: Address,
    pub(super) config: QueuePairConfig,
    pub(super) listener: OwnedFd,
    pub(super) page: OwnPage,
    /// The memfd of `page`.
    pub(super) page_fd: OwnedFd,
    /// The eventfd this side sleeps on.
    pub(super) bell: OwnedFd,
    pub(super) catalogue: Arc<OwnCatalogue>,
}

/// What the peer contributed.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) socket: AsyncFd<OwnedFd>,
    pub(super) shared: Imported,
    pub(super) receive_depth: u32,
    /// Its process, if it is visible to this process.
    pub(super) process: Option<(ProcessId, OwnedFd)>,
}

/// The peer's descriptors, checked and mapped.
#[derive(Debug)]
pub(super) struct Imported {
    pub(super) page: Arc<PeerPage>,
    pub(super) ringer: Ringer,
    /// The peer's blocks, of which there are none yet.
    pub(super) blocks: Arc<ImportedBlocks>,
    pub(super) catalogue: NeighbourCatalogue,
}

/// Why a handshake failed.
#[derive(Debug)]
enum Failure {
    System(&'static str, io::Error),
    Violation(PeerViolation),
    EndOfFile,
    OtherUser(NotOwnUser),
}

impl From<PeerViolation> for Failure {
    fn from(violation: PeerViolation) -> Self {
        Self::Violation(violation)
    }
}

impl From<ImportError> for Failure {
    fn from(error: ImportError) -> Self {
        match error {
            ImportError::Refused(violation) => Self::Violation(violation),
            ImportError::System(error) => Self::System("mapping the peer's rings", error),
        }
    }
}

impl From<Failure> for FabricError {
    fn from(failure: Failure) -> Self {
        let connect = |step, detail| Self::Connect { kind: KIND, step, detail };
        match failure {
            Failure::System(step, error) => Self::refused(KIND, step, &error, error.to_string()),
            Failure::Violation(violation) => Self::PeerMisbehaved { kind: KIND, violation },
            Failure::EndOfFile => Self::PeerLost {
                kind: KIND,
                cause: LossCause::EndOfFile,
                detail:
                    "it closed the socket during the handshake: it gave up, or this side's token was wrong"
                        .into(),
            },
            Failure::OtherUser(why) => {
                connect("checking the peer's user", format!("{why}: run both as the same user"))
            }
        }
    }
}

/// Connects within `params.limit`.
///
/// # Cancel safety
/// Dropping the future closes the socket, which the peer notices.
pub(super) async fn establish(
    runtime: &Arc<dyn Runtime>,
    offer: &Offer,
    params: &ConnectParams,
) -> Result<Accepted, FabricError> {
    let peer = Address::decode(&params.peer)?;
    let stranger = AtomicBool::new(false);
    let handshake = async {
        match params.role {
            Role::Dialer => dial(runtime.as_ref(), offer, &peer).await,
            Role::Acceptor => accept(runtime.as_ref(), offer, &peer, params.limit, &stranger).await,
        }
    };
    match timeout(runtime.as_ref(), params.limit, handshake).await {
        Ok(result) => result.map_err(FabricError::from),
        Err(_) if stranger.load(Ordering::Relaxed) => {
            Err(FabricError::PeerMisbehaved { kind: KIND, violation: PeerViolation::BadToken })
        }
        Err(_) => {
            let limit_ms = u64::try_from(params.limit.as_millis()).unwrap_or(u64::MAX);
            Err(FabricError::ConnectTimeout { kind: KIND, limit_ms })
        }
    }
}

async fn dial(runtime: &dyn Runtime, offer: &Offer, peer: &Address) -> Result<Accepted, Failure> {
    let socket = loop {
        match sys::connect(&peer.socket_name()) {
            Ok(socket) => break socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => runtime.sleep(BACKLOG_PAUSE).await,
            Err(error) => return Err(Failure::System("connecting to the peer's socket", error)),
        }
    };
    check_user(socket.as_fd())?;
    let socket = register(socket)?;
    send_hello(&socket, offer, &peer.token).await?;
    let hello = receive_hello(&socket).await?;
    if !hello.token.matches(&offer.address.token) {
        return Err(PeerViolation::BadToken.into());
    }
    let receive_depth = hello.receive_depth;
    let shared = hello.import()?;
    send(&socket, &Frame::Ready, &[]).await?;
    let process = sys::peer_process(socket.get_ref().as_fd());
    Ok(Accepted { socket, shared, receive_depth, process })
}

async fn accept(
    runtime: &dyn Runtime,
    offer: &Offer,
    peer: &Address,
    limit: Duration,
    stranger: &AtomicBool,
) -> Result<Accepted, Failure> {
    let failed = |error| Failure::System("listening", error);
    let listener = sys::watch_borrowed(offer.listener.as_fd(), Interest::READABLE).map_err(failed)?;
    loop {
        let candidate = listener.async_io(Interest::READABLE, |fd| sys::accept(*fd)).await;
        let candidate = candidate.map_err(failed)?;
        let screened = timeout(runtime, limit / CANDIDATE_SHARE, screen(candidate, offer)).await;
        match screened {
            Ok(Ok((socket, hello))) => return answer(offer, peer, socket, hello).await,
            Ok(Err(failure)) => {
                stranger.fetch_or(matches!(failure, Failure::Violation(_)), Ordering::Relaxed);
                // DEBUG, because any local process can cause any number of these lines. If no process shows the right
                // token, the connection attempt fails with an error that says so, and its caller logs that within a
                // quota.
                log!(DEBUG, ?failure, "shm: refused a process without the right token");
            }
            Err(_) => log!(DEBUG, "shm: refused a process that sent no hello in time"),
        }
    }
}

/// Checks that `candidate` runs as the same user and shows this side's token.
async fn screen(candidate: OwnedFd, offer: &Offer) -> Result<(AsyncFd<OwnedFd>, Hello), Failure> {
    check_user(candidate.as_fd())?;
    let socket = register(candidate)?;
    let hello = receive_hello(&socket).await?;
    if !hello.token.matches(&offer.address.token) {
        return Err(PeerViolation::BadToken.into());
    }
    Ok((socket, hello))
}

/// The acceptor's half, once the peer has shown the right token.
async fn answer(
    offer: &Offer,
    peer: &Address,
    socket: AsyncFd<OwnedFd>,
    hello: Hello,
) -> Result<Accepted, Failure> {
    let receive_depth = hello.receive_depth;
    let shared = hello.import()?;
    send_hello(&socket, offer, &peer.token).await?;
    match receive(&socket).await? {
        (Frame::Ready, _) => {
            let process = sys::peer_process(socket.get_ref().as_fd());
            Ok(Accepted { socket, shared, receive_depth, process })
        }
        _ => Err(PeerViolation::Malformed.into()),
    }
}

fn check_user(socket: BorrowedFd<'_>) -> Result<(), Failure> {
    let credentials = sys::peer_credentials(socket);
    let uid = credentials.map_err(|error| Failure::System("getting the peer's user", error))?.uid;
    check_own_user(uid).map_err(Failure::OtherUser)
}

fn register(socket: OwnedFd) -> Result<AsyncFd<OwnedFd>, Failure> {
    let interest = Interest::READABLE | Interest::WRITABLE;
    sys::watch(socket, interest).map_err(|error| Failure::System("registering the socket", error))
}

/// The peer's first frame. Its descriptors have not been checked yet.
#[derive(Debug)]
struct Hello {
    token: Token,
    slots: u32,
    receive_depth: u32,
    page: OwnedFd,
    bell: OwnedFd,
    catalogue: OwnedFd,
}

impl Hello {
    fn import(self) -> Result<Imported, ImportError> {
        let page = Arc::new(PeerPage::import(self.page.as_fd(), self.slots)?);
        let ringer = Ringer::import(self.bell)?;
        let blocks = Arc::<ImportedBlocks>::default();
        let catalogue = NeighbourCatalogue::import(self.catalogue.as_fd(), page.clone(), blocks.clone())?;
        Ok(Imported { page, ringer, blocks, catalogue })
    }
}

async fn send_hello(socket: &AsyncFd<OwnedFd>, offer: &Offer, token: &Token) -> Result<(), Failure> {
    let frame = Frame::Hello {
        token: token.clone(),
        slots: offer.page.slots(),
        receive_depth: offer.config.receive_depth,
    };
    send(socket, &frame, &[offer.page_fd.as_fd(), offer.bell.as_fd(), offer.catalogue.fd()]).await
}

async fn receive_hello(socket: &AsyncFd<OwnedFd>) -> Result<Hello, Failure> {
    let (frame, fds) = receive(socket).await?;
    let Ok([page, bell, catalogue]) = <[OwnedFd; 3]>::try_from(fds) else {
        return Err(PeerViolation::Malformed.into());
    };
    match frame {
        Frame::Hello { token, slots, receive_depth } => {
            Ok(Hello { token, slots, receive_depth, page, bell, catalogue })
        }
        Frame::Ready | Frame::Block { .. } => Err(PeerViolation::Malformed.into()),
    }
}

async fn send(socket: &AsyncFd<OwnedFd>, frame: &Frame, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
    let bytes = frame.encode();
    let sent = socket.async_io(Interest::WRITABLE, |fd| sys::send(fd.as_fd(), &bytes, fds)).await;
    sent.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Failure::EndOfFile,
        _ => Failure::System("sending to the peer", error),
    })
}

async fn receive(socket: &AsyncFd<OwnedFd>) -> Result<(Frame, Vec<OwnedFd>), Failure> {
    let packet = socket.async_io(Interest::READABLE, |fd| sys::receive(fd.as_fd())).await;
    let packet = packet.map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionReset => Failure::EndOfFile,
        _ => Failure::System("receiving from the peer", error),
    })?;
    if packet.length == 0 {
        return Err(Failure::EndOfFile);
    }
    let frame = Frame::decode(packet.bytes.get(..packet.length).unwrap_or_default())?;
    if packet.truncated || packet.fds.len() != frame.fds() {
        return Err(PeerViolation::Malformed.into());
    }
    Ok((frame, packet.fds))
}

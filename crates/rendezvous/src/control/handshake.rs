//! Authentication and introductions on a control session.
//!
//! ```text
//!   dialling end                                          accepting end
//!   Hello{version, name, incarnation, address, nonce} ──▶
//!                                                     ◀── Hello{version, name, incarnation, address, nonce}
//!   Proof{proof}                                      ──▶ checked, else Goodbye
//!   checked, else Goodbye                             ◀── Welcome{fabrics, proof}
//!   Welcome{fabrics, proof}                           ──▶ checked, else Goodbye
//!
//!   proof = HMAC-SHA256(secret, role ‖ connection ‖ all frames so far ‖ this frame without its proof)
//! ```
//!
//! Every frame that counts is under a proof, byte by byte as it was sent: names, incarnations, listen addresses, nonces,
//! the wire version and the fabrics. Only a refusal (Goodbye) is not, and all that can be done by it is to refuse. Neither
//! end tells the secret. A proof made in another session has other nonces and fails, as does one sent back to the end
//! that made it (its role differs) and one that this same worker was talked into making in a session with itself (refused
//! by name). The dialling end proves itself first: whoever merely reaches the port is given nothing to try guesses on, and
//! is not told of fabrics. Whoever gets a worker to dial them is given a proof, so a secret should be random, not a word.
//!
//! *Connection* says what the session runs over, and as what kind: both ends know that by themselves, and a proof of
//! another kind fails.
//!
//! | secret | what both ends put there | so a proof is of use |
//! | --- | --- | --- |
//! | any, or none, under TLS | the connection's exporter | on this TLS connection |
//! | handed over on this host | the addresses of both ends of the connection | on this connection: nobody can relay it |
//! | given by the user | nothing | through port forwards and proxies, too |
//!
//! A secret that was given authenticates the ends. It does not hide or protect what is sent later from somebody who sits
//! *between* them; that is what TLS is for. Where a session runs over TLS, the name in a Hello must be in the certificate of
//! the end that sends it, too.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tensorwire_protocol::{
    Code, Status,
    limits::WIRE_VERSION,
    wire::{
        WireError,
        control::{ControlFrame, FabricOffer},
    },
};
use tensorwire_verbs_reactor::{Runtime, timeout};

use super::{Addresses, ControlError, ControlSession, Secret};

/// Who a worker says it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Introduction {
    /// Its name.
    pub worker: String,
    /// Tells this life of it from others.
    pub incarnation: u64,
    /// Where it accepts sessions itself.
    pub listen_address: Option<String>,
    /// Numbers and reaches of the fabrics it has, best first.
    pub fabrics: Vec<(u8, Vec<u8>)>,
}

/// Authenticates the worker that was dialled at `address`, and introduces `me` to it.
///
/// Without a `secret` nobody is authenticated: for the simulator, and planes made by a `dangerous_` constructor. One that
/// was handed over proves this one connection, see the module.
///
/// # Errors
/// [`ControlError::WrongSecret`], [`ControlError::NoSecret`], [`ControlError::Misbehaved`] (also for another wire
/// version), [`ControlError::Unreachable`] after `limit`, and those of the session. It is of no use after one.
///
/// # Cancel safety
/// Not cancel-safe: drop the session too.
pub async fn dial(
    session: &mut ControlSession,
    me: &Introduction,
    secret: Option<&Secret>,
    runtime: &dyn Runtime,
    limit: Duration,
    address: &str,
) -> Result<Introduction, ControlError> {
    let mut end = Side::new(Role::Dialling, session, me, secret, address);
    let met = timeout(runtime, limit, end.dial(nonce(runtime))).await;
    met.unwrap_or_else(|_| {
        let detail = format!("no handshake within {} ms; is it overloaded or stopped?", limit.as_millis());
        Err(ControlError::Unreachable { address: address.to_owned(), detail })
    })
}

/// Authenticates the worker that dialled, and introduces `me` to it. `secret` as for [`dial`].
///
/// # Errors
/// As [`dial`], but [`ControlError::Lost`] after `limit`.
///
/// # Cancel safety
/// Not cancel-safe: drop the session too.
pub async fn accept(
    session: &mut ControlSession,
    me: &Introduction,
    secret: Option<&Secret>,
    runtime: &dyn Runtime,
    limit: Duration,
) -> Result<Introduction, ControlError> {
    let peer = session.peer_host().map_or_else(|| "the dialling end".to_owned(), |host| host.to_string());
    let mut end = Side::new(Role::Accepting, session, me, secret, &peer);
    let met = timeout(runtime, limit, end.accept(nonce(runtime))).await;
    met.unwrap_or_else(|_| {
        Err(ControlError::Lost { detail: format!("{peer}: no handshake within {} ms", limit.as_millis()) })
    })
}

/// Which end makes a proof; its label is part of what is proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Dialling,
    Accepting,
}

impl Role {
    fn label(self) -> &'static [u8] {
        match self {
            Self::Dialling => b"tensorwire control, dialling end\0",
            Self::Accepting => b"tensorwire control, accepting end\0",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Dialling => Self::Accepting,
            Self::Accepting => Self::Dialling,
        }
    }
}

/// The key of sessions in which nobody is authenticated. Everybody knows it.
const NO_SECRET: &[u8] = b"tensorwire without a secret";

/// Length of a proof, in bytes.
const PROOF_BYTES: usize = 32;

/// Stands in a frame until its proof is made.
const NO_PROOF: [u8; PROOF_BYTES] = [0; PROOF_BYTES];

/// What both ends have said, and what proves it.
struct Transcript<'a> {
    secret: Option<&'a Secret>,
    /// What the session runs over, and as what kind; `None` if a proof must say it and this end does not know it.
    connection: Option<Vec<u8>>,
    /// The frames so far, in the order in which both ends take turns. Each begins with its length.
    said: Vec<u8>,
}

impl<'a> Transcript<'a> {
    fn new(role: Role, session: &ControlSession, secret: Option<&'a Secret>) -> Self {
        let connection = match session.sender.proven() {
            Some(proven) => Some([&b"over TLS\0"[..], &proven.channel].concat()),
            None if secret.is_some_and(Secret::is_handed_over) => {
                session.addresses.map(|addresses| addresses.seen_by(role).into_bytes())
            }
            None => Some(b"over any connection\0".to_vec()),
        };
        Self { secret, connection, said: Vec::new() }
    }

    fn authenticator(&self, role: Role, frame: &[u8]) -> Option<Hmac<Sha256>> {
        let key = self.secret.map_or(NO_SECRET, Secret::expose);
        let mut authenticator = Hmac::<Sha256>::new_from_slice(key).ok()?;
        authenticator.update(role.label());
        authenticator.update(self.connection.as_ref()?);
        authenticator.update(&self.said);
        authenticator.update(frame);
        Some(authenticator)
    }

    /// `frame`, whose last bytes are its proof, with the right one.
    fn prove(&self, role: Role, frame: &ControlFrame) -> Option<Vec<u8>> {
        let mut bytes = frame.encode();
        let (said, proof) = bytes.split_last_chunk_mut::<PROOF_BYTES>()?;
        *proof = self.authenticator(role, said)?.finalize().into_bytes().into();
        Some(bytes)
    }

    /// Whether the proof at the end of `frame` is right. In constant time.
    fn verify(&self, role: Role, frame: &[u8]) -> bool {
        let Some((said, proof)) = frame.split_last_chunk::<PROOF_BYTES>() else { return false };
        self.authenticator(role, said).is_some_and(|it| it.verify_slice(proof).is_ok())
    }
}

impl Addresses {
    /// The dialling end's, then the accepting end's; the same text at both ends, if nobody is between them.
    fn seen_by(&self, role: Role) -> String {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let (own, peer) = (canonical(self.own), canonical(self.peer));
        match role {
            Role::Dialling => format!("from {own} to {peer}\0"),
            Role::Accepting => format!("from {peer} to {own}\0"),
        }
    }
}

/// One end of a handshake.
struct Side<'a> {
    role: Role,
    session: &'a mut ControlSession,
    me: &'a Introduction,
    peer: &'a str,
    transcript: Transcript<'a>,
}

impl<'a> Side<'a> {
    fn new(
        role: Role,
        session: &'a mut ControlSession,
        me: &'a Introduction,
        secret: Option<&'a Secret>,
        peer: &'a str,
    ) -> Self {
        let transcript = Transcript::new(role, session, secret);
        Self { role, session, me, peer, transcript }
    }

    async fn dial(&mut self, nonce: [u8; 32]) -> Result<Introduction, ControlError> {
        self.send(hello(self.me, nonce).encode()).await?;
        let them = self.receive_hello().await?;
        self.send_proven(&ControlFrame::Proof { proof: NO_PROOF }).await?;
        let fabrics = self.receive_welcome().await?;
        self.send_proven(&welcome(self.me)).await?;
        Ok(Introduction { fabrics, ..them })
    }

    async fn accept(&mut self, nonce: [u8; 32]) -> Result<Introduction, ControlError> {
        let mine = hello(self.me, nonce).encode();
        let them = match self.receive_hello().await {
            Ok(hello) => hello,
            Err(error @ ControlError::NameNotProven { .. }) => return Err(error),
            Err(error) => {
                // Tells a peer of another version which one this is; anything else it may know, too.
                let _ = self.send(mine).await;
                return Err(error);
            }
        };
        self.send(mine).await?;
        self.receive_proof().await?;
        self.send_proven(&welcome(self.me)).await?;
        let fabrics = self.receive_welcome().await?;
        // A peer that stops before its last frame stays a stranger: it counts against no cap of sessions yet.
        self.session.sender.admitted();
        Ok(Introduction { fabrics, ..them })
    }

    /// Whether the peer may go by the name `worker`; it is told if not.
    async fn check_name(&mut self, worker: &str) -> Result<(), ControlError> {
        let checked = self.session.sender.proven().map_or(Ok(()), |proven| proven.check_worker(worker));
        let Err(problem) = checked else { return Ok(()) };
        let text = format!("{worker} is not proven: its certificate {problem}");
        let status = Status::new(Code::PermissionDenied, text);
        self.refuse(status).await;
        Err(ControlError::NameNotProven { address: self.peer.to_owned(), worker: worker.to_owned(), problem })
    }

    async fn receive_hello(&mut self) -> Result<Introduction, ControlError> {
        let (frame, bytes) = self.receive().await?;
        let ControlFrame::Hello { worker, incarnation, listen_address, .. } = frame else {
            return Err(self.unless_refused(&frame, "it did not start with Hello"));
        };
        self.transcript.said.extend_from_slice(&bytes);
        self.check_name(&worker).await?;
        if worker == self.me.worker && incarnation == self.me.incarnation {
            return Err(self.misbehaved("it is this worker itself; use its own values without a connection"));
        }
        let listen_address = listen_address.map(|address| dialable(&address, self.session.peer_host()));
        Ok(Introduction { worker, incarnation, listen_address, fabrics: Vec::new() })
    }

    async fn receive_proof(&mut self) -> Result<(), ControlError> {
        let (frame, bytes) = self.receive().await?;
        let ControlFrame::Proof { .. } = frame else {
            return Err(self.unless_refused(&frame, "it sent something else than the proof of its secret"));
        };
        self.verify(&bytes).await
    }

    async fn receive_welcome(&mut self) -> Result<Vec<(u8, Vec<u8>)>, ControlError> {
        let (frame, bytes) = self.receive().await?;
        let ControlFrame::Welcome { fabrics, .. } = frame else {
            return Err(self.unless_refused(&frame, "it sent something else than Welcome"));
        };
        self.verify(&bytes).await?;
        Ok(fabrics.into_iter().map(|offer| (offer.kind, offer.reach)).collect())
    }

    /// Checks the proof of the peer's `frame`, and tells it when it is wrong.
    async fn verify(&mut self, frame: &[u8]) -> Result<(), ControlError> {
        if self.transcript.verify(self.role.other(), frame) {
            self.transcript.said.extend_from_slice(frame);
            return Ok(());
        }
        self.refuse(Status::new(Code::Unauthenticated, "the proof of the secret is wrong")).await;
        Err(self.wrong_secret())
    }

    /// The peer may be gone; this end has its answer.
    async fn refuse(&mut self, status: Status) {
        let _ = self.send(ControlFrame::Goodbye { status }.encode()).await;
    }

    async fn send_proven(&mut self, frame: &ControlFrame) -> Result<(), ControlError> {
        let proven = self.transcript.prove(self.role, frame).ok_or_else(|| self.wrong_secret())?;
        self.send(proven).await
    }

    async fn send(&mut self, frame: Vec<u8>) -> Result<(), ControlError> {
        self.transcript.said.extend_from_slice(&frame);
        self.session.sender.send(frame).await
    }

    /// The peer's next frame, and as it was sent.
    async fn receive(&mut self) -> Result<(ControlFrame, Vec<u8>), ControlError> {
        let Some(bytes) = self.session.receiver.recv().await? else {
            let detail = format!("{} ended the session during the handshake", self.peer);
            return Err(ControlError::Lost { detail });
        };
        let frame = ControlFrame::decode(&bytes);
        let frame = frame.map_err(|error: WireError| self.misbehaved(&error.to_string()))?;
        Ok((frame, bytes))
    }

    /// That the peer broke a rule by `frame`, unless it says with it that it does not let this worker in.
    fn unless_refused(&self, frame: &ControlFrame, rule: &str) -> ControlError {
        match frame {
            ControlFrame::Goodbye { status } if status.code == Code::PermissionDenied => {
                ControlError::Refused { address: self.peer.to_owned(), detail: status.message.clone() }
            }
            ControlFrame::Goodbye { status } if status.code == Code::Unauthenticated => self.wrong_secret(),
            _ => self.misbehaved(rule),
        }
    }

    fn misbehaved(&self, detail: &str) -> ControlError {
        ControlError::Misbehaved { address: self.peer.to_owned(), detail: detail.to_owned() }
    }

    fn wrong_secret(&self) -> ControlError {
        let address = self.peer.to_owned();
        match self.transcript.secret {
            Some(_) => ControlError::WrongSecret { address },
            None => ControlError::NoSecret { address },
        }
    }
}

fn hello(me: &Introduction, nonce: [u8; 32]) -> ControlFrame {
    ControlFrame::Hello {
        wire_version: WIRE_VERSION,
        worker: me.worker.clone(),
        incarnation: me.incarnation,
        listen_address: me.listen_address.clone(),
        nonce,
    }
}

fn welcome(me: &Introduction) -> ControlFrame {
    let offers = me.fabrics.iter();
    ControlFrame::Welcome {
        fabrics: offers.map(|(kind, reach)| FabricOffer { kind: *kind, reach: reach.clone() }).collect(),
        proof: NO_PROOF,
    }
}

fn nonce(runtime: &dyn Runtime) -> [u8; 32] {
    let mut nonce = [0; 32];
    nonce.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&runtime.random().to_le_bytes()));
    nonce
}

/// `address` as this end can dial it: a worker that listens on all its addresses tells none of them, but is
/// known to have the one that this session uses.
fn dialable(address: &str, peer_host: Option<IpAddr>) -> String {
    let wildcard = ["0.0.0.0:", "[::]:"].into_iter().find_map(|any| address.strip_prefix(any));
    match (wildcard, peer_host.map(|host| host.to_canonical())) {
        (Some(port), Some(IpAddr::V4(host))) => format!("{host}:{port}"),
        (Some(port), Some(IpAddr::V6(host))) => format!("[{host}]:{port}"),
        _ => address.to_owned(),
    }
}

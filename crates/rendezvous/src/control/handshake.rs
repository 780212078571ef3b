//! Authentication and introductions on a control session.
//!
//! ```text
//!   dialling side                                         accepting side
//!   Hello{version, name, incarnation, address, nonce} ──▶
//!                                                     ◀── Hello{version, name, incarnation, address, nonce}
//!   Proof{proof}                                      ──▶ checked, else Goodbye
//!   checked, else Goodbye                             ◀── Welcome{fabrics, proof}
//!   Welcome{fabrics, proof}                           ──▶ checked, else Goodbye
//!
//!   proof = HMAC-SHA256(secret, role ‖ connection ‖ all frames so far ‖ this frame without its proof)
//! ```
//!
//! A proof covers all frames, byte by byte as they were sent: names, incarnations, listen addresses, nonces, the wire
//! version and the fabrics. Only a refusal (Goodbye) is not covered; a forged one can only refuse. The secret itself is
//! never sent. A proof from another session fails, because the nonces differ. A proof that is sent back to the side
//! that made it fails, because the role differs. A proof that a worker makes in a session with itself is refused by
//! name. The dialling side proves itself first, so that a stranger who merely reaches the port gets no proof to test
//! guesses on, and does not learn the fabrics. A stranger whom a worker dials does get a proof, so a secret should be
//! random and not a word.
//!
//! *Connection* identifies the connection under the session, and its kind. Both sides know it without exchanging it. A
//! proof for another connection or kind fails.
//!
//! | secret | connection | so a proof is valid |
//! | --- | --- | --- |
//! | any, or none, under TLS | the connection's exporter | on this TLS connection |
//! | handed over on this host | both addresses of the connection | on this connection: nobody can relay it |
//! | given by the user | nothing | through port forwards and proxies, too |
//!
//! A user's secret authenticates both sides. It neither encrypts nor protects later frames from an attacker *between*
//! them; TLS does that. Under TLS, the name in a Hello must also be in the certificate of the side that sends it.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;

use std::{net::SocketAddr, time::Duration};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_protocol::{
    Code, Status,
    limits::WIRE_VERSION,
    wire::{
        WireError,
        control::{ControlFrame, FabricOffer},
    },
};

use super::{Addresses, ControlError, ControlSession, Secret, dialable};

/// The identity that a worker claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Introduction {
    /// Its name.
    pub worker: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// The address at which it accepts sessions.
    pub listen_address: Option<String>,
    /// Numbers and reaches of its fabrics, in order of preference.
    pub fabrics: Vec<(u8, Vec<u8>)>,
}

/// Authenticates the worker that was dialled at `address`, and introduces `me` to it.
///
/// Without a `secret` no peer is authenticated: for the simulator, and planes made by a `dangerous_` constructor. The
/// proof of a handed-over secret is bound to this connection; see the module.
///
/// # Errors
/// [`ControlError::WrongSecret`], [`ControlError::NoSecret`], [`ControlError::Misbehaved`] (also for another wire
/// version), [`ControlError::ThisWorker`], [`ControlError::Unreachable`] after `limit`, and errors of the session. The
/// session cannot be used after an error.
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
    let mut side = Side::new(Role::Dialling, session, me, secret, address);
    let met = timeout(runtime, limit, side.dial(nonce(runtime))).await;
    met.unwrap_or_else(|_| {
        let detail = format!(
            "no handshake within {} ms; is it overloaded or stopped, or has it no file descriptor left?",
            limit.as_millis()
        );
        Err(ControlError::Unreachable { address: address.to_owned(), detail })
    })
}

/// Authenticates the worker that dialled, and introduces `me` to it. `secret` as for [`dial`].
///
/// # Errors
/// As [`dial`], except that [`ControlError::Lost`] is returned after `limit`.
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
    let peer = session.peer_host().map_or_else(|| "the dialling worker".to_owned(), |host| host.to_string());
    let mut side = Side::new(Role::Accepting, session, me, secret, &peer);
    let met = timeout(runtime, limit, side.accept(nonce(runtime))).await;
    met.unwrap_or_else(|_| {
        Err(ControlError::Lost { detail: format!("{peer}: no handshake within {} ms", limit.as_millis()) })
    })
}

/// The side that makes a proof. Its label is part of the proven text.
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

/// The public key for sessions without authentication.
const NO_SECRET: &[u8] = b"tensorwire without a secret";

/// Length of a proof, in bytes.
const PROOF_BYTES: usize = 32;

/// Placeholder in a frame until its proof is computed.
const NO_PROOF: [u8; PROOF_BYTES] = [0; PROOF_BYTES];

/// The frames so far, and the secret that proves them.
struct Transcript<'a> {
    secret: Option<&'a Secret>,
    /// The connection and its kind; `None` if a proof must contain them and this side does not know them.
    connection: Option<Vec<u8>>,
    /// The frames of both sides, in order. Each begins with its length.
    frames: Vec<u8>,
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
        Self { secret, connection, frames: Vec::new() }
    }

    fn authenticator(&self, role: Role, frame: &[u8]) -> Option<Hmac<Sha256>> {
        let key = self.secret.map_or(NO_SECRET, Secret::expose);
        let mut authenticator = Hmac::<Sha256>::new_from_slice(key).ok()?;
        authenticator.update(role.label());
        authenticator.update(self.connection.as_ref()?);
        authenticator.update(&self.frames);
        authenticator.update(frame);
        Some(authenticator)
    }

    /// Encodes `frame`, whose last bytes are its proof, with the correct proof.
    fn prove(&self, role: Role, frame: &ControlFrame) -> Option<Vec<u8>> {
        let mut bytes = frame.encode();
        let (content, proof) = bytes.split_last_chunk_mut::<PROOF_BYTES>()?;
        *proof = self.authenticator(role, content)?.finalize().into_bytes().into();
        Some(bytes)
    }

    /// Whether the proof at the end of `frame` is correct. In constant time.
    fn verify(&self, role: Role, frame: &[u8]) -> bool {
        let Some((content, proof)) = frame.split_last_chunk::<PROOF_BYTES>() else { return false };
        self.authenticator(role, content).is_some_and(|it| it.verify_slice(proof).is_ok())
    }
}

impl Addresses {
    /// The dialling side's address, then the accepting side's. Both sides compute the same text, unless an attacker is
    /// between them.
    fn seen_by(&self, role: Role) -> String {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let (own, peer) = (canonical(self.own), canonical(self.peer));
        match role {
            Role::Dialling => format!("from {own} to {peer}\0"),
            Role::Accepting => format!("from {peer} to {own}\0"),
        }
    }
}

/// One side of a handshake.
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
                // Also sent to a peer of another version, so that the peer learns this version. The Hello contains
                // nothing secret.
                let _ = self.send(mine).await;
                return Err(error);
            }
        };
        self.send(mine).await?;
        self.receive_proof().await?;
        self.send_proven(&welcome(self.me)).await?;
        let fabrics = self.receive_welcome().await?;
        // Only now: a peer that does not send its last frame stays a stranger, and does not count towards the limits of
        // sessions.
        self.session.sender.admitted();
        Ok(Introduction { fabrics, ..them })
    }

    /// Checks that the peer may use the name `worker`. If not, the peer is refused with the reason.
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
        self.transcript.frames.extend_from_slice(&bytes);
        self.check_name(&worker).await?;
        if worker == self.me.worker && incarnation == self.me.incarnation {
            return Err(ControlError::ThisWorker { address: self.peer.to_owned() });
        }
        let listen_address =
            listen_address.map(|address| dialable(&address, self.session.addresses.map(|ends| ends.peer)));
        Ok(Introduction { worker, incarnation, listen_address, fabrics: Vec::new() })
    }

    async fn receive_proof(&mut self) -> Result<(), ControlError> {
        let (frame, bytes) = self.receive().await?;
        let ControlFrame::Proof { .. } = frame else {
            return Err(self.unless_refused(&frame, "it did not send the proof of its secret"));
        };
        self.verify(&bytes).await
    }

    async fn receive_welcome(&mut self) -> Result<Vec<(u8, Vec<u8>)>, ControlError> {
        let (frame, bytes) = self.receive().await?;
        let ControlFrame::Welcome { fabrics, .. } = frame else {
            return Err(self.unless_refused(&frame, "it did not send Welcome"));
        };
        self.verify(&bytes).await?;
        Ok(fabrics.into_iter().map(|offer| (offer.kind, offer.reach)).collect())
    }

    /// Checks the proof in the peer's `frame`. If it is wrong, the peer is refused.
    async fn verify(&mut self, frame: &[u8]) -> Result<(), ControlError> {
        if self.transcript.verify(self.role.other(), frame) {
            self.transcript.frames.extend_from_slice(frame);
            return Ok(());
        }
        self.refuse(Status::new(Code::Unauthenticated, "the proof of the secret is wrong")).await;
        Err(self.wrong_secret())
    }

    /// Sends a refusal. An error is ignored, because the result of the handshake is already known.
    async fn refuse(&mut self, status: Status) {
        let _ = self.send(ControlFrame::Goodbye { status }.encode()).await;
    }

    async fn send_proven(&mut self, frame: &ControlFrame) -> Result<(), ControlError> {
        let proven = self.transcript.prove(self.role, frame).ok_or_else(|| self.wrong_secret())?;
        self.send(proven).await
    }

    async fn send(&mut self, frame: Vec<u8>) -> Result<(), ControlError> {
        self.transcript.frames.extend_from_slice(&frame);
        self.session.sender.send(frame).await
    }

    /// The peer's next frame, decoded and as bytes.
    async fn receive(&mut self) -> Result<(ControlFrame, Vec<u8>), ControlError> {
        let Some(bytes) = self.session.receiver.recv().await? else {
            let detail = format!("{} ended the session during the handshake", self.peer);
            return Err(ControlError::Lost { detail });
        };
        let frame = ControlFrame::decode(&bytes);
        let frame = frame.map_err(|error: WireError| self.misbehaved(&error.to_string()))?;
        Ok((frame, bytes))
    }

    /// The error for an unexpected `frame`: the peer's refusal, if it is one, or the violated `rule`.
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

//! Authentication and introductions on a control session.
//!
//! ```text
//!   dialling end                                  accepting end
//!   Hello{version, name, incarnation, nonce} ──▶
//!                                            ◀──  Hello{version, name, incarnation, nonce}
//!   Proof{HMAC(secret, dialling ‖ hellos)}   ──▶  checked, else Goodbye{Unauthenticated}
//!            checked, else Goodbye           ◀──  Proof{HMAC(secret, accepting ‖ hellos)}
//!                                            ◀──  Welcome{name, incarnation, fabrics}
//!   Welcome{name, incarnation, fabrics}      ──▶
//! ```
//!
//! Both proofs are HMAC-SHA256 over the role of the end that makes it and both Hello frames whole, so over both
//! names, incarnations, listen addresses, nonces and the wire version. Neither end tells the secret. A proof
//! made in another session has other nonces and fails, as does one sent back to the end that made it (its role
//! differs) and one that this same worker was talked into making in a session with itself (refused by name).
//! The dialling end proves itself first: whoever merely reaches the port is given nothing to try guesses on.
//! Whoever gets a worker to dial them is, so a secret should be random, not a word.
//!
//! This authenticates the ends. It does not hide or protect what is sent later from somebody who sits *between*
//! them; that is what TLS is for. Where a session runs over TLS, the name in a Hello must be in the certificate of the end
//! that sends it, and the proofs cover the TLS connection too, so that they are of no use on another one.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;

use std::{net::IpAddr, time::Duration};

use hmac::{Hmac, KeyInit, Mac};
use protocol::{
    Code, Status,
    limits::WIRE_VERSION,
    wire::{
        WireError,
        control::{ControlFrame, FabricOffer},
    },
};
use sha2::Sha256;
use verbs_reactor::{Runtime, timeout};

use super::{ControlError, ControlSession, Secret};

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
/// Without a `secret` nobody is authenticated: for the simulator, and planes made by a `dangerous_` constructor.
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
    let mut end = End { role: Role::Dialling, session, me, secret, peer: address };
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
    let peer = session.peer_host.map_or_else(|| "the dialling end".to_owned(), |host| host.to_string());
    let mut end = End { role: Role::Accepting, session, me, secret, peer: &peer };
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
}

/// The key of sessions in which nobody is authenticated. Everybody knows it.
const NO_SECRET: &[u8] = b"tensorwire without a secret";

/// One end of a handshake.
struct End<'a> {
    role: Role,
    session: &'a mut ControlSession,
    me: &'a Introduction,
    secret: Option<&'a Secret>,
    peer: &'a str,
}

/// The Hello frames of both ends; what is proven is that they were seen by somebody who knows the secret.
struct Hellos {
    dialling: ControlFrame,
    accepting: ControlFrame,
    /// What the two ends of a TLS connection know, and nobody else.
    channel: Option<[u8; 32]>,
}

impl Hellos {
    fn authenticator(&self, role: Role, secret: Option<&Secret>) -> Option<Hmac<Sha256>> {
        let key = secret.map_or(NO_SECRET, Secret::expose);
        let mut authenticator = Hmac::<Sha256>::new_from_slice(key).ok()?;
        authenticator.update(role.label());
        // Frames start with their length, so that the bytes of one cannot be taken for the other's.
        authenticator.update(&self.dialling.encode());
        authenticator.update(&self.accepting.encode());
        authenticator.update(self.channel.as_ref().map_or(&[], |channel| channel.as_slice()));
        Some(authenticator)
    }

    fn prove(&self, role: Role, secret: Option<&Secret>) -> Option<[u8; 32]> {
        Some(self.authenticator(role, secret)?.finalize().into_bytes().into())
    }

    /// In constant time.
    fn verify(&self, role: Role, secret: Option<&Secret>, proof: &[u8; 32]) -> bool {
        self.authenticator(role, secret).is_some_and(|it| it.verify_slice(proof).is_ok())
    }
}

impl End<'_> {
    async fn dial(&mut self, nonce: [u8; 32]) -> Result<Introduction, ControlError> {
        let mine = self.hello(nonce);
        self.send(&mine).await?;
        let (theirs, them) = self.receive_hello().await?;
        let hellos = Hellos { dialling: mine, accepting: theirs, channel: self.channel() };
        self.send_proof(&hellos).await?;
        self.receive_proof(&hellos, Role::Accepting).await?;
        self.send_welcome().await?;
        self.receive_welcome(them).await
    }

    async fn accept(&mut self, nonce: [u8; 32]) -> Result<Introduction, ControlError> {
        let mine = self.hello(nonce);
        let (theirs, them) = match self.receive_hello().await {
            Ok(hello) => hello,
            Err(error @ ControlError::NameNotProven { .. }) => return Err(error),
            Err(error) => {
                // Tells a peer of another version which one this is; anything else it may know, too.
                let _ = self.send(&mine).await;
                return Err(error);
            }
        };
        self.send(&mine).await?;
        let hellos = Hellos { dialling: theirs, accepting: mine, channel: self.channel() };
        self.receive_proof(&hellos, Role::Dialling).await?;
        self.session.sender.admitted();
        self.send_proof(&hellos).await?;
        self.send_welcome().await?;
        self.receive_welcome(them).await
    }

    fn hello(&self, nonce: [u8; 32]) -> ControlFrame {
        ControlFrame::Hello {
            wire_version: WIRE_VERSION,
            worker: self.me.worker.clone(),
            incarnation: self.me.incarnation,
            listen_address: self.me.listen_address.clone(),
            nonce,
        }
    }

    fn channel(&self) -> Option<[u8; 32]> {
        self.session.sender.proven().map(|proven| proven.channel)
    }

    /// Whether the peer may go by the name `worker`; it is told if not.
    async fn check_name(&mut self, worker: &str) -> Result<(), ControlError> {
        let checked = self.session.sender.proven().map_or(Ok(()), |proven| proven.check_worker(worker));
        let Err(problem) = checked else { return Ok(()) };
        let text = format!("{worker} is not proven: its certificate {problem}");
        let status = Status::new(Code::PermissionDenied, text);
        // It may be gone; this end has its answer.
        let _ = self.send(&ControlFrame::Goodbye { status }).await;
        Err(ControlError::NameNotProven { address: self.peer.to_owned(), worker: worker.to_owned(), problem })
    }

    async fn receive_hello(&mut self) -> Result<(ControlFrame, Introduction), ControlError> {
        let frame = self.receive().await?;
        let ControlFrame::Hello { worker, incarnation, listen_address, .. } = &frame else {
            return Err(self.unless_refused(&frame, "it did not start with Hello"));
        };
        self.check_name(worker).await?;
        if *worker == self.me.worker && *incarnation == self.me.incarnation {
            return Err(self.misbehaved("it is this worker itself; use its own values without a connection"));
        }
        let listen_address = listen_address.as_ref().map(|address| dialable(address, self.session.peer_host));
        let (worker, incarnation) = (worker.clone(), *incarnation);
        let them = Introduction { worker, incarnation, listen_address, fabrics: Vec::new() };
        Ok((frame, them))
    }

    async fn send_proof(&mut self, hellos: &Hellos) -> Result<(), ControlError> {
        let proof = hellos.prove(self.role, self.secret).ok_or_else(|| self.wrong_secret())?;
        self.send(&ControlFrame::Proof { proof }).await
    }

    /// Checks the proof of the peer, and tells it when it is wrong.
    async fn receive_proof(&mut self, hellos: &Hellos, role: Role) -> Result<(), ControlError> {
        let proof = match self.receive().await? {
            ControlFrame::Proof { proof } => proof,
            ControlFrame::Goodbye { status } if status.code == Code::Unauthenticated => {
                return Err(self.wrong_secret());
            }
            frame => {
                return Err(
                    self.unless_refused(&frame, "it sent something else than the proof of its secret")
                );
            }
        };
        if hellos.verify(role, self.secret, &proof) {
            return Ok(());
        }
        let status = Status::new(Code::Unauthenticated, "the proof of the secret is wrong");
        // It may be gone; this end has its answer.
        let _ = self.send(&ControlFrame::Goodbye { status }).await;
        Err(self.wrong_secret())
    }

    async fn send_welcome(&mut self) -> Result<(), ControlError> {
        let offers = self.me.fabrics.iter();
        let welcome = ControlFrame::Welcome {
            worker: self.me.worker.clone(),
            incarnation: self.me.incarnation,
            fabrics: offers.map(|(kind, reach)| FabricOffer { kind: *kind, reach: reach.clone() }).collect(),
        };
        self.send(&welcome).await
    }

    async fn receive_welcome(&mut self, them: Introduction) -> Result<Introduction, ControlError> {
        let ControlFrame::Welcome { worker, incarnation, fabrics } = self.receive().await? else {
            return Err(self.misbehaved("it sent something else than Welcome"));
        };
        if worker != them.worker || incarnation != them.incarnation {
            return Err(self.misbehaved("its Welcome and its Hello name different workers"));
        }
        let fabrics = fabrics.into_iter().map(|offer| (offer.kind, offer.reach)).collect();
        Ok(Introduction { fabrics, ..them })
    }

    async fn send(&mut self, frame: &ControlFrame) -> Result<(), ControlError> {
        self.session.sender.send(frame.encode()).await
    }

    async fn receive(&mut self) -> Result<ControlFrame, ControlError> {
        let Some(bytes) = self.session.receiver.recv().await? else {
            let detail = format!("{} ended the session during the handshake", self.peer);
            return Err(ControlError::Lost { detail });
        };
        ControlFrame::decode(&bytes).map_err(|error: WireError| self.misbehaved(&error.to_string()))
    }

    /// That the peer broke a rule by `frame`, unless it says with it that it does not let this worker in.
    fn unless_refused(&self, frame: &ControlFrame, rule: &str) -> ControlError {
        match frame {
            ControlFrame::Goodbye { status } if status.code == Code::PermissionDenied => {
                ControlError::Refused { address: self.peer.to_owned(), detail: status.message.clone() }
            }
            _ => self.misbehaved(rule),
        }
    }

    fn misbehaved(&self, detail: &str) -> ControlError {
        ControlError::Misbehaved { address: self.peer.to_owned(), detail: detail.to_owned() }
    }

    fn wrong_secret(&self) -> ControlError {
        let address = self.peer.to_owned();
        match self.secret {
            Some(_) => ControlError::WrongSecret { address },
            None => ControlError::NoSecret { address },
        }
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

//! Setting up sessions, dialled and accepted.

use std::sync::Arc;

use tensorwire_fabric::{BoxFuture, timeout};
use tensorwire_protocol::{Code, Status, wire::control::ControlFrame};

use crate::{
    control::{ControlError, ControlSession, FAREWELL, FrameReceiver, FrameSender, Secret, handshake},
    error::{Lost, PeerLoss, WorkerError},
    session::{Session, known_peer::KnownPeer, node::Node, whereabouts},
    values::end_signal::unless,
};

/// The name or address that the user has specified, for TLS to verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verify<'a> {
    /// A worker name; the name that the peer proves must be this one.
    Worker,
    /// Only an address; the certificate must be valid for its host.
    Host,
    /// A name (`host:port`), of which the address is one; the certificate must be valid for the host of the name.
    HostOf(&'a str),
}

/// How a session has begun.
#[derive(Debug, Clone, Copy)]
enum Begun<'a> {
    /// The peer dialled this worker.
    Accepted,
    /// This worker dialled the address, at which it knows the peer from now on.
    Dialled(&'a str),
    /// This worker dialled the address, which may be that of another worker later.
    Discovered(&'a str),
}

impl Node {
    /// A live session with `peer`.
    pub(crate) async fn session(self: &Arc<Self>, peer: &KnownPeer) -> Result<Arc<Session>, WorkerError> {
        if let Some(session) = peer.live_session() {
            return Ok(session);
        }
        if let Some(taken) = self.name_taken(peer) {
            return Err(taken);
        }
        let mut failed = None;
        for address in self.addresses(peer) {
            let failure = match self.meet(&address, Verify::Worker).await {
                Ok((session, them)) if them.worker == peer.name() => {
                    let begun = self.begin_session(session, them, Begun::Dialled(&address)).await;
                    return begun.map(|(session, _)| session);
                }
                // The session is dropped: a wrong address, which another worker may have announced, must not cause
                // sessions between two workers that did not ask for them.
                Ok((_, them)) => WorkerError::Config {
                    field: "cluster",
                    value: format!("{} at {address}", peer.name()),
                    remedy: format!(
                        "the worker there is {}; correct the address in the cluster, or set the peer's address with \
                         Worker::set_address",
                        them.worker
                    ),
                },
                Err(error) => error,
            };
            failed.get_or_insert(failure);
        }
        Err(failed.unwrap_or_else(|| WorkerError::NoAddress { peer: peer.name().to_owned() }))
    }

    /// Waits until the peer at `address` answers on a session that this worker has opened, because the peer may still refuse this
    /// worker, for its name or for a limit. Stops waiting for a peer that takes long.
    ///
    /// # Errors
    /// Why the session has ended.
    pub(crate) async fn serves(&self, session: &Session, address: &str) -> Result<(), WorkerError> {
        self.served(session).await.map_err(|Lost { loss, detail }| match loss {
            PeerLoss::NameTaken => WorkerError::NameTaken { name: self.settings.name.clone(), detail },
            PeerLoss::ShutDownHere => WorkerError::ShutDown,
            _ => ControlError::Refused { address: address.to_owned(), detail }.into(),
        })
    }

    async fn served(&self, session: &Session) -> Result<(), Lost> {
        let nonce = self.settings.control_runtime.random();
        let answered = session.expect_pong(nonce);
        let asking =
            async { session.send(ControlFrame::Ping { nonce }).await.is_ok() && answered.await.is_ok() };
        let asking = unless(session.ended(), asking);
        match timeout(&*self.settings.control_runtime, self.settings.connect_limit, asking).await {
            Ok(None | Some(false)) => Err(session.lost()),
            Ok(Some(true)) | Err(_) => Ok(()),
        }
    }

    /// Opens a session to `address`: connects, proves the secret, and learns the peer's identity.
    pub(crate) async fn dial(
        self: &Arc<Self>,
        address: &str,
        verify: Verify<'_>,
    ) -> Result<(Arc<Session>, KnownPeer), WorkerError> {
        let (session, them) = self.meet(address, verify).await?;
        self.begin_session(session, them, Begun::Dialled(address)).await
    }

    /// The peer at `address`, one of the addresses of `name`, once it serves this worker. A peer that is connected keeps
    /// its sessions, and gets none for another of its addresses.
    ///
    /// # Errors
    /// [`ControlError::ThisWorker`], and as [`Worker::peer_at`](crate::Worker::peer_at).
    pub(crate) async fn dial_discovered(
        self: &Arc<Self>,
        address: &str,
        name: &str,
    ) -> Result<KnownPeer, WorkerError> {
        let (session, them) = self.meet(address, Verify::HostOf(name)).await?;
        if let Some(peer) = self.known_peer(&them.worker).filter(|peer| peer.life() == Some(them.incarnation))
        {
            return Ok(peer);
        }
        let (session, peer) = self.begin_session(session, them, Begun::Discovered(address)).await?;
        self.serves(&session, address).await?;
        Ok(peer)
    }

    /// The addresses that `name` has now.
    pub(crate) fn resolve(&self, name: &str) -> BoxFuture<'static, Result<Vec<String>, ControlError>> {
        self.settings.control.resolve(name)
    }

    /// Connects to `address`, proves the secret, and learns the peer's identity.
    async fn meet(
        &self,
        address: &str,
        verify: Verify<'_>,
    ) -> Result<(ControlSession, handshake::Introduction), WorkerError> {
        if self.is_closing() {
            return Err(WorkerError::ShutDown);
        }
        let (secret, handed_over_at) = self.secret_for(address).await?;
        let dialled = handed_over_at.as_deref().unwrap_or(address);
        let mut session = match verify {
            Verify::HostOf(name) => self.settings.control.dial_resolved(dialled, name).await?,
            Verify::Worker | Verify::Host => self.settings.control.dial(dialled).await?,
        };
        if let (Verify::Host | Verify::HostOf(_), Some(proven)) = (verify, session.sender.proven()) {
            let address = address.to_owned();
            proven.check_host().map_err(|detail| ControlError::Tls { address, detail })?;
        }
        let me = self.introduction();
        // There is no session yet whose pings would show that the peer's process is stopped.
        let limit = self.settings.connect_limit.min(self.settings.liveness);
        let them =
            handshake::dial(&mut session, &me, secret.as_ref(), &*self.settings.runtime, limit, address)
                .await?;
        Ok((session, them))
    }

    /// The secret for the worker at `address`. If that worker handed it over, also the only address at which it may be
    /// used.
    async fn secret_for(&self, address: &str) -> Result<(Option<Secret>, Option<String>), ControlError> {
        if self.settings.secret.is_some() {
            return Ok((self.settings.secret.clone(), None));
        }
        let asked = self.settings.control.ambient_secret(address).await;
        if let Err(ControlError::NoSecret { .. }) = &asked {
            // If the worker is not running, this returns that error instead.
            self.settings.control.dial(address).await?;
        }
        let secret = asked?;
        let handed_over_at = secret.as_ref().and_then(Secret::listening_address).map(|it| it.to_string());
        Ok((secret, handed_over_at))
    }

    /// Authenticates a session that a peer opened.
    pub(crate) async fn welcome(self: Arc<Self>, mut session: ControlSession) {
        let me = self.introduction();
        let secret = self.settings.accept_secret.clone();
        let host = session.peer_host().map_or_else(|| "unknown".to_owned(), |host| host.to_string());
        let met = handshake::accept(
            &mut session,
            &me,
            secret.as_ref(),
            &*self.settings.control_runtime,
            self.settings.connect_limit,
        )
        .await;
        let begun = match met {
            Ok(them) => self.begin_session(session, them, Begun::Accepted).await.map(drop),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = begun
            && !error.is_this_worker()
            && let Some(left_out) = self.log.line(&host)
        {
            log!(WARN, host, %error, left_out, "a control session was refused");
        }
    }

    async fn begin_session(
        self: &Arc<Self>,
        session: ControlSession,
        them: handshake::Introduction,
        begun: Begun<'_>,
    ) -> Result<(Arc<Session>, KnownPeer), WorkerError> {
        let name = them.worker.clone();
        let is_dialled = !matches!(begun, Begun::Accepted);
        let ControlSession { sender, receiver, addresses } = session;
        if name == self.settings.name {
            let (own, other) = (self.settings.address.clone(), whereabouts(&them, addresses));
            let (holder, newcomer) = if is_dialled { (other, own) } else { (own, other) };
            let detail = name_taken(&holder, &newcomer);
            self.refuse(sender, receiver, Status::new(Code::AlreadyExists, detail.as_str()));
            return Err(WorkerError::NameTaken { name, detail });
        }
        let room = self.sessions.serve_one(&name).and_then(|served| {
            let connections = served.connections();
            let session = Session::new(them, addresses, sender.clone(), is_dialled, connections);
            Ok((served, self.meet_peer(&session)?, session))
        });
        let (served, peer, session) = match room {
            Ok(room) => room,
            Err(full) => {
                let remedy = full.remedy(&name);
                let message = format!("{}: {remedy}", self.settings.name);
                self.refuse(sender, receiver, Status::new(Code::ResourceExhausted, message));
                return Err(WorkerError::Config { field: full.field, value: full.most.to_string(), remedy });
            }
        };
        if let Err(detail) = self.claim_name(&peer, &session).await {
            self.refuse(sender, receiver, Status::new(Code::AlreadyExists, detail.as_str()));
            return Err(WorkerError::NameTaken { name, detail });
        }
        // The address is stored only after the name was claimed, because a refused worker's address is not this peer's.
        // The peer is already known, so this cannot exceed the limit.
        let peer = match begun {
            Begun::Accepted => peer,
            Begun::Dialled(address) => self.note_peer(&name, Some(address)).unwrap_or(peer),
            Begun::Discovered(address) => {
                peer.note_address(address);
                peer
            }
        };
        self.met.notify_waiters();
        let serving = self.clone().serve_session(session.clone(), receiver, served);
        self.settings.control_runtime.spawn("session", Box::pin(serving));
        self.settings.control_runtime.spawn("liveness", Box::pin(self.clone().watch_over(session.clone())));
        Ok((session, peer))
    }

    /// Adds the session to the peer, unless another worker has its name and answers. A worker that does not answer is dead,
    /// stopped or unreachable, and the new one replaces it.
    ///
    /// # Errors
    /// The addresses of both workers, and what to do.
    async fn claim_name(&self, peer: &KnownPeer, session: &Arc<Session>) -> Result<(), String> {
        while let Err(holder) = peer.note_session(session) {
            let newcomer = session.whereabouts();
            if self.answers(&holder).await {
                return Err(name_taken(&holder.whereabouts(), &newcomer));
            }
            let detail = format!(
                "it did not answer when another worker of its name connected, which is at {newcomer}"
            );
            holder.condemn(Lost::new(PeerLoss::Unresponsive, detail));
        }
        Ok(())
    }

    /// The error for a peer that has refused this worker because of its name within the last second.
    pub(crate) fn name_taken(&self, peer: &KnownPeer) -> Option<WorkerError> {
        let detail = peer.refusal(self.settings.runtime.now())?;
        Some(WorkerError::NameTaken { name: self.settings.name.clone(), detail })
    }

    /// Refuses a session, and sends the peer the reason.
    fn refuse(
        self: &Arc<Self>,
        sender: Arc<dyn FrameSender>,
        receiver: Box<dyn FrameReceiver>,
        status: Status,
    ) {
        let node = self.clone();
        let refuse = async move {
            let goodbye = ControlFrame::Goodbye { status }.encode();
            let _ = timeout(&*node.settings.control_runtime, FAREWELL, sender.send(goodbye)).await;
            drop(receiver);
        };
        self.settings.control_runtime.spawn("refuse session", Box::pin(refuse));
    }
}

/// The error text for two workers of the same name.
fn name_taken(holder: &str, newcomer: &str) -> String {
    format!(
        "the worker at {holder} has it and answers, so the one at {newcomer} is refused; stop one of them, or give each its \
         own name (a client needs none)"
    )
}

//! Setting up sessions and data connections, from both ends.

use std::sync::{Arc, Mutex};

use memory::GrantEnd;
use protocol::{
    Agreed, Code, Status,
    credit::Depths,
    limits::SLOT_BYTES,
    wire::control::{Connect, ControlFrame, RingOffer},
};
use verbs_reactor::{
    ConnectParams, ConnectionData, FabricError, FabricKind, Prepared, QueuePairConfig, RemoteRegion, Role,
    timeout,
};

use crate::{
    Peer, WorkerError,
    announce::{Announcer, disconnected, record, region},
    control::{ControlError, ControlSession, handshake},
    data::{DataConnection, REASON, unless},
    destinations::ReceiveAllocator,
    enclosure::{Enclosure, LocalFabric},
    error::Lost,
    fabric_channel::FabricChannel,
    import::Import,
    meter::Meter,
    node::{Candidate, Node, fabric_number},
    ring::{OwnRing, RingMaker},
    route::Route,
    serve::FAREWELL,
    session::Session,
    sessions::Full,
};

/// This end of a data connection that is being set up.
struct Half {
    enclosure: Arc<Enclosure>,
    prepared: Box<dyn Prepared>,
    ring: Arc<OwnRing>,
    ring_at: RingOffer,
    known: Vec<RemoteRegion>,
}

/// Whom the user has named, where TLS can prove it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meant {
    /// A worker; who answers is held against its name.
    Worker,
    /// An address, and nothing more.
    Host,
}

/// What a peer's Connect asks for.
enum Considered<'node> {
    Fabric(&'node LocalFabric, Box<Half>),
    Grpc,
}

impl Node {
    /// A data connection to `peer`, over a session that exists or a new one.
    pub(crate) async fn connect(self: &Arc<Self>, peer: &Peer) -> Result<Route, WorkerError> {
        let end = self.runtime.now() + self.connect_limit;
        let (mut was_lost, mut told) = (false, None);
        loop {
            let known = peer.live_session();
            let session = match &known {
                Some(session) => session.clone(),
                None => self.session(peer).await?,
            };
            if let Some(connection) = session.live_connection() {
                return Ok(connection);
            }
            match self.open_data(peer, &session).await {
                Ok(Some(connection)) => return Ok(connection),
                Ok(None) => {}
                // It had been lost, and nobody had noticed: the peer may be there all the same. Once that is tried however
                // late it is, for this process may have been stopped meanwhile.
                Err(_) if known.is_some() && session.is_over() && (!was_lost || self.runtime.now() < end) => {
                    was_lost = true;
                    continue;
                }
                Err(error) => return Err(error),
            }
            // Since then it could have connected; before, this process may have been stopped.
            let told = *told.get_or_insert(self.runtime.now());
            if let Some(connection) = peer.accepted(&*self.runtime).await {
                return Ok(connection);
            }
            if self.runtime.now() >= told + self.connect_limit {
                let tried = "the peer says that it connects itself, and does not".to_owned();
                return Err(WorkerError::NoFabric { peer: peer.name().to_owned(), tried });
            }
        }
    }

    /// A live session with `peer`.
    pub(crate) async fn session(self: &Arc<Self>, peer: &Peer) -> Result<Arc<Session>, WorkerError> {
        if let Some(session) = peer.live_session() {
            return Ok(session);
        }
        let mut failed = None;
        for address in self.addresses(peer) {
            let failure = match self.meet(&address, Meant::Worker).await {
                Ok((session, them)) if them.worker == peer.name() => {
                    return self.begin_session(session, them, Some(&address)).map(|(session, _)| session);
                }
                // The session ends here: who tells wrong addresses must not make two others meet again and again.
                Ok((_, them)) => WorkerError::Config {
                    field: "cluster",
                    value: format!("{} at {address}", peer.name()),
                    remedy: format!(
                        "the worker there is {}; correct the cluster's addresses, or tell where the peer is with \
                         Worker::set_address",
                        them.worker
                    ),
                },
                Err(error) => error,
            };
            failed.get_or_insert(failure);
        }
        Err(failed.unwrap_or_else(|| WorkerError::UnknownWorker {
            name: peer.name().to_owned(),
            known: "it connected from an address that nobody told".to_owned(),
        }))
    }

    /// Opens a session to `address`, proves the secret, and learns who is there.
    pub(crate) async fn dial(
        self: &Arc<Self>,
        address: &str,
        meant: Meant,
    ) -> Result<(Arc<Session>, Peer), WorkerError> {
        let (session, them) = self.meet(address, meant).await?;
        self.begin_session(session, them, Some(address))
    }

    /// Dials `address`, proves the secret, and learns who is there.
    async fn meet(
        &self,
        address: &str,
        meant: Meant,
    ) -> Result<(ControlSession, handshake::Introduction), WorkerError> {
        if self.is_closing() {
            return Err(WorkerError::ShutDown);
        }
        // First, so that a worker that is not running is reported as that.
        let mut session = self.control.dial(address).await?;
        if let (Meant::Host, Some(proven)) = (meant, session.sender.proven()) {
            let address = address.to_owned();
            proven.check_host().map_err(|detail| ControlError::Tls { address, detail })?;
        }
        let secret = match &self.secret {
            Some(secret) => Some(secret.clone()),
            None => self.control.ambient_secret(address).await?,
        };
        let me = self.introduction();
        let limit = self.connect_limit;
        let them =
            handshake::dial(&mut session, &me, secret.as_ref(), &*self.runtime, limit, address).await?;
        Ok((session, them))
    }

    /// Authenticates a session that a peer opened.
    pub(crate) async fn welcome(self: Arc<Self>, mut session: ControlSession) {
        let me = self.introduction();
        let secret = self.accept_secret.clone();
        let host = session.peer_host.map_or_else(|| "unknown".to_owned(), |host| host.to_string());
        let met =
            handshake::accept(&mut session, &me, secret.as_ref(), &*self.control_runtime, self.connect_limit)
                .await;
        let begun = match met {
            Ok(them) => self.begin_session(session, them, None).map(drop),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = begun
            && let Some(left_out) = self.log.line(&host)
        {
            tracing::warn!(host, %error, left_out, "a control session was refused");
        }
    }

    fn begin_session(
        self: &Arc<Self>,
        session: ControlSession,
        them: handshake::Introduction,
        dialled: Option<&str>,
    ) -> Result<(Arc<Session>, Peer), WorkerError> {
        if them.worker == self.name {
            let remedy = "two workers have this name; every worker of a cluster needs its own".to_owned();
            return Err(WorkerError::Config { field: "name", value: self.name.clone(), remedy });
        }
        let served = match self.serve_one(&them.worker) {
            Ok(served) => served,
            Err(full) => return Err(self.too_many_sessions(session, &them.worker, full)),
        };
        let peer = match self.note_peer(&them.worker, dialled) {
            Ok(peer) => peer,
            Err(full) => return Err(self.too_many_sessions(session, &them.worker, full)),
        };
        let ControlSession { sender, receiver, peer_host } = session;
        let session = Session::new(them, peer_host, sender, dialled.is_some(), served.connections());
        peer.note_session(&session, dialled.is_some());
        self.met.notify_waiters();
        let serving = self.clone().serve_session(session.clone(), receiver, served);
        self.control_runtime.spawn("session", Box::pin(serving));
        self.control_runtime.spawn("liveness", Box::pin(self.clone().watch_over(session.clone())));
        Ok((session, peer))
    }

    /// Tells the peer that there is no room for its session.
    fn too_many_sessions(self: &Arc<Self>, session: ControlSession, peer: &str, full: Full) -> WorkerError {
        let remedy = full.remedy(peer);
        let status = Status::new(Code::ResourceExhausted, format!("{}: {remedy}", self.name));
        let node = self.clone();
        let refuse = async move {
            let goodbye = ControlFrame::Goodbye { status }.encode();
            let _ = timeout(&*node.control_runtime, FAREWELL, session.sender.send(goodbye)).await;
        };
        self.control_runtime.spawn("refuse session", Box::pin(refuse));
        WorkerError::Config { field: full.field, value: full.most.to_string(), remedy }
    }

    /// Tries the fabrics both ends have, in this worker's order of preference. `None` when the peer is connecting
    /// at the same moment, and its connection counts.
    async fn open_data(
        self: &Arc<Self>,
        peer: &Peer,
        session: &Arc<Session>,
    ) -> Result<Option<Route>, WorkerError> {
        let mut tried: Vec<String> =
            self.unavailable.iter().map(|(kind, why)| format!("{kind}: {why}")).collect();
        let mut limit = None;
        for candidate in self.candidates() {
            let kind = candidate.kind();
            let offered = session.peer.fabrics.iter().find(|(number, _)| *number == fabric_number(kind));
            let opened = match (offered, candidate) {
                (None, _) => {
                    tried.push(format!("{kind}: the peer does not offer it"));
                    continue;
                }
                (Some((_, reach)), _) if *reach != candidate.reach() => {
                    tried.push(format!("{kind}: the peer is on another host or belongs to another user"));
                    continue;
                }
                (Some(_), Candidate::Grpc) => self.open_grpc(peer, session).await,
                (Some(_), Candidate::Fabric(fabric)) => self.open_over(fabric, session).await,
            };
            match opened {
                Ok(None) => return Ok(None),
                Ok(Some(connection)) => {
                    let others = tried.join("; ");
                    let encrypted = connection.is_encrypted();
                    tracing::info!(peer = peer.name(), transport = %kind, encrypted, not_used = others, "connected");
                    peer.note_not_used(tried);
                    connection.count_connect(peer.note_connect());
                    self.let_go_at_end(peer, &connection);
                    return Ok(Some(connection));
                }
                Err(why) => {
                    limit = limit.or(why.limit());
                    tried.push(named(kind, &why));
                }
            }
        }
        let none = WorkerError::NoFabric { peer: peer.name().to_owned(), tried: tried.join("; ") };
        Err(match limit {
            Some(limit) => WorkerError::at_limit(none.to_string(), limit),
            None => none,
        })
    }

    /// Nothing that belongs to a connection is kept with its peer beyond its end.
    fn let_go_at_end(&self, peer: &Peer, connection: &Route) {
        let (peer, connection) = (peer.clone(), connection.clone());
        let ending = async move {
            connection.until_end().await;
            peer.let_go(&connection);
        };
        self.runtime.spawn("let go of a connection", Box::pin(ending));
    }

    async fn open_over(
        self: &Arc<Self>,
        fabric: &LocalFabric,
        session: &Arc<Session>,
    ) -> Result<Option<Route>, WorkerError> {
        let half = self.prepare(fabric)?;
        let ring = half.ring.clone();
        let lost = |detail: String| FabricError::Connect {
            kind: fabric.kind,
            step: "agreeing with the peer",
            detail,
        };
        // The session may have ended meanwhile: then the peer was not told of the ring.
        let (number, answered) = session.open().map_err(lost).inspect_err(|_| ring.end())?;
        let opened = async {
            let offer = self.offer(number, fabric, &half);
            session.send(ControlFrame::Connect(offer)).await?;
            let answer = timeout(&*self.runtime, self.connect_limit, answered).await;
            let answer = answer.map_err(|_| lost("the peer did not answer".to_owned()))?;
            let answer = answer.map_err(|_| lost(session.why_over()))?;
            match answer {
                Ok(answer) => self.join(fabric, session, half, answer, Role::Dialer).await.map(Some),
                Err(status) if status.code == Code::AlreadyExists => Ok(None),
                Err(status) => Err(lost(status.to_string()).into()),
            }
        }
        .await;
        if !matches!(opened, Ok(Some(_))) {
            session.forget(number);
            ring.end();
        }
        if let Err(error) = &opened {
            self.disown(session, number, error).await;
        }
        opened
    }

    /// Answers the peer's Connect, whose number the session has noted, and sets up this end.
    pub(crate) async fn accept_data(self: Arc<Self>, session: Arc<Session>, offer: Connect) {
        let number = offer.connection;
        let (peer, considered) = match self.begin_accepting(&session.peer.worker, &offer) {
            Ok(considered) => considered,
            Err(status) => {
                session.forget(number);
                let _ = session.send(ControlFrame::Refused { connection: number, status }).await;
                return;
            }
        };
        let opened = match considered {
            Considered::Fabric(fabric, half) => self.accept_over(fabric, &session, *half, offer).await,
            Considered::Grpc => self.accept_grpc(&peer, &session, &offer).await,
        };
        let replaced = peer.end_accept(opened.as_ref().ok());
        match opened {
            Ok(connection) => {
                if let Some(left_out) = self.log.line(peer.name()) {
                    let (transport, encrypted) = (connection.kind(), connection.is_encrypted());
                    tracing::info!(peer = peer.name(), %transport, encrypted, left_out, "connected by the peer");
                }
                peer.note_not_used(Vec::new());
                connection.count_connect(peer.note_connect());
                self.let_go_at_end(&peer, &connection);
            }
            Err(error) => {
                if let Some(left_out) = self.log.line(peer.name()) {
                    tracing::warn!(peer = peer.name(), %error, left_out, "a data connection could not be set up");
                }
                session.forget(number);
                self.disown(&session, number, &error).await;
            }
        }
        if let Some(replaced) = replaced {
            replaced.close(&Lost::gone("the peer lost its end, and connected again")).await;
        }
    }

    /// Tells the peer that this end could not set the connection up: the peer's end may stand already, and wait.
    async fn disown(&self, session: &Session, number: u32, why: &WorkerError) {
        let frame = disconnected(number, &why.to_string());
        // Without a session there is no connection either, and a peer that reads nothing holds nobody up.
        let _ = timeout(&*self.runtime, REASON, session.send(frame)).await;
    }

    fn begin_accepting(&self, peer: &str, offer: &Connect) -> Result<(Peer, Considered<'_>), Status> {
        let noted = self.note_peer(peer, None);
        let noted = noted.map_err(|full| Status::new(Code::ResourceExhausted, full.remedy(peer)))?;
        noted.begin_accept(*self.name < *peer)?;
        let considered = self.consider(offer).inspect_err(|_| drop(noted.end_accept(None)))?;
        Ok((noted, considered))
    }

    async fn accept_over(
        self: &Arc<Self>,
        fabric: &LocalFabric,
        session: &Arc<Session>,
        half: Half,
        offer: Connect,
    ) -> Result<Route, WorkerError> {
        let ring = half.ring.clone();
        let opened = async {
            let answer = self.offer(offer.connection, fabric, &half);
            session.send(ControlFrame::Connected(answer)).await?;
            self.join(fabric, session, half, offer, Role::Acceptor).await
        }
        .await;
        opened.inspect_err(|_| ring.end())
    }

    fn consider(&self, offer: &Connect) -> Result<Considered<'_>, Status> {
        if offer.kind == fabric_number(FabricKind::Grpc) {
            return self.consider_grpc().map(|()| Considered::Grpc);
        }
        let fabric = self.fabrics.iter().find(|fabric| fabric_number(fabric.kind) == offer.kind);
        let fabric = fabric.ok_or_else(|| {
            Status::new(
                Code::Unavailable,
                format!("{} does not offer fabric number {}", self.name, offer.kind),
            )
        })?;
        let half = self.prepare(fabric).map_err(|error| Status::new(Code::Unavailable, error.to_string()))?;
        Ok(Considered::Fabric(fabric, Box::new(half)))
    }

    /// A queue pair end with a ring. Its depths suffice whatever the peer offers.
    fn prepare(&self, fabric: &LocalFabric) -> Result<Half, WorkerError> {
        let depths = Depths::for_any_peer(&self.parameters);
        let config = QueuePairConfig { send_depth: depths.send, receive_depth: depths.receive };
        let enclosure = fabric.enclosure()?;
        let prepared = enclosure.prepare(config)?;
        let (ring, destination) = enclosure.lend_ring(self.parameters.first_ring_bytes())?;
        let (record_slots, slots) = match enclosure.lend_ring(2 * SLOT_BYTES) {
            Ok(lent) => lent,
            Err(error) => {
                drop(ring.end(GrantEnd::NeverSent));
                return Err(error);
            }
        };
        let ring_at = RingOffer { destination, slots };
        let known = enclosure.regions.all();
        Ok(Half { enclosure, prepared, ring: OwnRing::new(ring, record_slots), ring_at, known })
    }

    fn offer(&self, connection: u32, fabric: &LocalFabric, half: &Half) -> Connect {
        Connect {
            connection,
            kind: fabric_number(fabric.kind),
            data: half.prepared.connection_data().0,
            parameters: self.parameters,
            ring: half.ring_at,
            regions: half.known.iter().map(record).collect(),
        }
    }

    /// Connects this end with what the other end said, and starts the protocol on it.
    async fn join(
        self: &Arc<Self>,
        fabric: &LocalFabric,
        session: &Arc<Session>,
        half: Half,
        other: Connect,
        role: Role,
    ) -> Result<Route, WorkerError> {
        let Half { enclosure, prepared, ring, known, .. } = half;
        let (peer, limit) = (ConnectionData(other.data), self.connect_limit);
        let announcer = Announcer::new(other.connection, &session.sender()?, self.runtime.clone(), &known);
        let announcer = Arc::new(announcer);
        let connecting = prepared.connect(ConnectParams { peer, role, peer_host: session.peer_host, limit });
        // A peer that died after its Connect never comes, and its next life would be kept waiting for the whole limit.
        let connected = unless(session.ended(), connecting).await;
        let queue_pair = connected.ok_or_else(|| ControlError::Lost { detail: session.why_over() })??;
        other.regions.iter().for_each(|record| queue_pair.add_remote_region(region(record)));
        let channel = FabricChannel {
            queue_pair,
            message_pool: self.pools.message.clone(),
            own_ring: ring,
            ring_maker: RingMaker { enclosure: enclosure.clone(), announcer: announcer.clone() },
            peer_ring: Mutex::new(other.ring.destination),
            peer_slots: other.ring.slots,
            held: Arc::default(),
            import: Import { pool: self.pools.source.clone(), enclosure: enclosure.clone() },
        };
        let has_slots = Agreed::of(&self.parameters, &other.parameters).has_result_slots();
        let pool = self.pools.receive.clone();
        let allocator = ReceiveAllocator { pool, enclosure, announcer, has_slots };
        let parameters = (self.parameters, other.parameters);
        let meter = Meter::new(self.labels.of(&session.peer.worker), fabric.kind, &self.log);
        let connection =
            DataConnection::new(channel, parameters, allocator, &session.peer, &self.values, meter);
        connection.start(&self.runtime);
        match confirm_regions(session, other.connection, &connection).await {
            Ok(()) => Ok(connection.into()),
            Err(error) => {
                // From here on the peer can write this end's ring: it must not be given back before the drain.
                connection.close(&Lost::gone(error.to_string())).await;
                Err(error)
            }
        }
    }
}

/// Makes the connection known to its session, and confirms the regions that the peer announced meanwhile.
async fn confirm_regions(
    session: &Session,
    number: u32,
    connection: &Arc<DataConnection>,
) -> Result<(), WorkerError> {
    let lost = |detail| WorkerError::Control(ControlError::Lost { detail });
    for region in session.up(number, &connection.clone().into()).map_err(lost)? {
        session.send(ControlFrame::RegionAck { connection: number, region }).await?;
    }
    Ok(())
}

/// Why the fabric is not used; most errors name it themselves.
fn named(kind: FabricKind, why: &WorkerError) -> String {
    let (prefix, why) = (format!("{kind}: "), why.to_string());
    if why.starts_with(&prefix) { why } else { prefix + &why }
}

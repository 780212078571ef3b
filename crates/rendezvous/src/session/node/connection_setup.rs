//! Setting up data connections, dialled and accepted.

#[cfg(test)]
pub(crate) mod tests;

use std::{sync::Arc, time::Duration};

use futures::FutureExt;
use tensorwire_fabric::{
    ConnectParams, Connected, ConnectionData, FabricError, FabricKind, Prepared, QueuePairConfig,
    RemoteRegion, Role, SharedMemory, timeout,
};
use tensorwire_protocol::{
    Agreed, Code, Rings, Status,
    credit::Depths,
    limits::SLOT_BYTES,
    wire::control::{Connect, ControlFrame, RingOffer},
};

use crate::{
    connection::{
        DataConnection, REASON, fabric_channel::FabricChannel, mailbox::Mailbox, meter::Meter,
        pieces::Pieces, tally::PeerTally,
    },
    control::ControlError,
    error::{Lost, PeerLoss, WorkerError},
    peer_memory::{
        announcer::Announcer,
        destinations::ReceiveAllocator,
        enclosure::{Enclosure, LocalFabric},
        import::Import,
        region_record::{record, region},
        ring::{RingMaker, UnusedRing},
    },
    session::{
        Session,
        known_peer::{Attempt, AttemptNumber, ConnectionOrAttempt, KnownPeer},
        node::{Node, fabric_number},
    },
    values::{end_signal::unless, latch::LatchSetter},
};

/// How long the simulator may delay one side's set-up. The peer announces regions meanwhile.
const LATE: Duration = Duration::from_millis(20);

/// The local side of a data connection that is being set up.
pub(super) struct Half {
    enclosure: Arc<Enclosure>,
    prepared: Box<dyn Prepared>,
    ring: UnusedRing,
    slots: UnusedRing,
    ring_at: RingOffer,
    known: Vec<RemoteRegion>,
}

impl Node {
    /// A live data connection to `peer`; connects if there is none. Tasks that wait for the same attempt resume in the
    /// order of their calls.
    ///
    /// # Cancel safety
    /// Cancel-safe: an attempt under way continues.
    pub(crate) async fn connected(self: &Arc<Self>, peer: &KnownPeer) -> Attempt {
        // A caller that joined an attempt which began before retries once if that attempt fails soon: its cause may be gone,
        // or it was the peer's attempt, which ends without a result. After a longer wait the peer is given up: a silent peer takes
        // up to the liveness bound.
        let soon = self.settings.runtime.now() + self.settings.liveness / 2;
        let mut failed = None;
        for _ in 0..2 {
            let (attempt, is_new) = match peer.connection_or_attempt() {
                ConnectionOrAttempt::Connection(connection) => return Ok(connection),
                ConnectionOrAttempt::UnderWay(attempt) => (attempt, false),
                ConnectionOrAttempt::Begun(attempt) => {
                    self.spawn_attempt(peer, attempt.setter());
                    (attempt, true)
                }
            };
            match attempt.wait().await {
                Some(Err(error))
                    if !is_new && error.code() == Code::Unavailable && self.settings.runtime.now() < soon =>
                {
                    failed = Some(error);
                }
                Some(ended) => return ended,
                None if self.settings.runtime.now() < soon => {}
                None => return Err(self.given_up(peer, "the peer began to connect, and did not complete it")),
            }
        }
        Err(failed.unwrap_or(WorkerError::ShutDown))
    }

    fn spawn_attempt(self: &Arc<Self>, peer: &KnownPeer, setter: LatchSetter<Attempt>) {
        let (node, peer) = (self.clone(), peer.clone());
        let attempt = async move {
            let ended = node.connect(&peer).await.map_err(WorkerError::or_limit);
            setter.set(peer.end_attempt(ended));
            node.forget_unmet(&peer);
        };
        self.settings.runtime.spawn("connect", Box::pin(attempt));
    }

    /// Sets up a data connection to `peer`, by an existing session or a new one.
    async fn connect(self: &Arc<Self>, peer: &KnownPeer) -> Result<Arc<DataConnection>, WorkerError> {
        let end = self.settings.runtime.now() + self.settings.connect_limit;
        let (mut was_lost, mut announced) = (false, None);
        loop {
            let known = peer.live_session();
            let session = match &known {
                Some(session) => session.clone(),
                None => self.session(peer).await?,
            };
            if let Some(connection) = session.live_connection() {
                return Ok(connection);
            }
            let opened = self.open_data(peer, &session).await;
            if let (Err(_), Some(taken)) = (&opened, self.name_taken(peer)) {
                return Err(taken);
            }
            match opened {
                Ok(Some(connection)) => return Ok(connection),
                Ok(None) => {}
                // The existing session was lost before this was noticed, so a new session may succeed. The first retry
                // is made even after the deadline, because this process may have been stopped.
                Err(_)
                    if known.is_some()
                        && session.is_over()
                        && !is_unresponsive(peer, &session)
                        && (!was_lost || self.settings.runtime.now() < end) =>
                {
                    was_lost = true;
                    continue;
                }
                Err(error) => return Err(error),
            }
            // The peer has announced that it connects itself. Its limit counts from that announcement and not from the beginning
            // of this attempt, because this process may have been stopped in between.
            let announced = *announced.get_or_insert(self.settings.runtime.now());
            if let Some(connection) = peer.accepted(&*self.settings.runtime).await {
                return Ok(connection);
            }
            let is_late = self.settings.runtime.now() >= announced + self.settings.connect_limit;
            if is_late || is_unresponsive(peer, &session) {
                return Err(self.given_up(peer, "the peer announced that it connects itself, and did not"));
            }
        }
    }

    /// The error of callers that have waited for an attempt of the peer.
    fn given_up(&self, peer: &KnownPeer, tried: &str) -> WorkerError {
        if self.is_closing() {
            return WorkerError::ShutDown;
        }
        WorkerError::NoFabric { peer: peer.name().to_owned(), tried: tried.to_owned() }
    }

    /// Tries the fabrics that both workers have, in this worker's order of preference. `None` if the peer is connecting
    /// at the same time and its connection takes precedence.
    async fn open_data(
        self: &Arc<Self>,
        peer: &KnownPeer,
        session: &Arc<Session>,
    ) -> Result<Option<Arc<DataConnection>>, WorkerError> {
        let mut tried: Vec<String> =
            self.settings.unavailable.iter().map(|(kind, why)| format!("{kind}: {why}")).collect();
        let (mut limit, mut has_failed) = (None, false);
        for fabric in &self.settings.fabrics {
            let kind = fabric.kind;
            match session.peer.fabrics.iter().find(|(number, _)| *number == fabric_number(kind)) {
                None => {
                    tried.push(format!("{kind}: the peer does not offer it"));
                    continue;
                }
                Some((_, reach)) if *reach != fabric.reach => {
                    tried.push(format!(
                        "{kind}: the peer is on another host, in another container (network namespace), or \
                         belongs to another user"
                    ));
                    continue;
                }
                Some(_) => {}
            }
            match self.open_over(fabric, session, None).await {
                Ok(None) => return Ok(None),
                Ok(Some(connection)) => {
                    let others = tried.join("; ");
                    let encrypted = connection.is_encrypted();
                    log!(INFO, peer = peer.name(), transport = %kind, encrypted, not_used = others, "connected");
                    peer.note_not_used(tried);
                    self.adopt(peer, &connection);
                    if has_failed {
                        self.seek_better(peer, session, &connection);
                    }
                    return Ok(Some(connection));
                }
                Err(why) => {
                    (limit, has_failed) = (limit.or(why.limit()), true);
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

    /// Counts a new connection with `peer`, and releases the peer's reference to it when it has ended.
    pub(super) fn adopt(&self, peer: &KnownPeer, connection: &Arc<DataConnection>) {
        connection.count_connect(peer.note_connect());
        let (peer, ending) = (peer.clone(), connection.clone());
        let ending = Box::pin(async move {
            ending.until_end().await;
            peer.let_go(&ending);
        });
        if let Err(ending) = connection.entries.add_unpolled(ending) {
            // The connection's task has ended, so this future completes at once.
            let _done = ending.now_or_never();
        }
    }

    /// Sets up a connection over `fabric`: one for requests, or the standby of the connection `replaces`. `None` if the peer's own connection
    /// takes precedence.
    pub(super) async fn open_over(
        self: &Arc<Self>,
        fabric: &LocalFabric,
        session: &Arc<Session>,
        replaces: Option<u32>,
    ) -> Result<Option<Arc<DataConnection>>, WorkerError> {
        let half = self.prepare(fabric)?;
        let lost = |detail: String| FabricError::Connect {
            kind: fabric.kind,
            step: "agreeing with the peer",
            detail,
        };
        let (number, answered) = session.open().map_err(lost)?;
        let opened = async {
            let offer = self.offer(number, fabric, &half);
            session
                .send(match replaces {
                    None => ControlFrame::Connect(offer),
                    Some(replaces) => ControlFrame::Standby { replaces, offer },
                })
                .await?;
            let answer = timeout(&*self.settings.runtime, self.settings.connect_limit, answered).await;
            let answer = answer.map_err(|_| lost("the peer did not answer".to_owned()))?;
            let answer = answer.map_err(|_| lost(session.why_over()))?;
            match answer {
                Ok(answer) => self.join(fabric, session, half, answer, true).await.map(Some),
                Err(status) if status.code == Code::AlreadyExists => Ok(None),
                Err(status) => Err(lost(status.to_string()).into()),
            }
        }
        .await;
        if !matches!(opened, Ok(Some(_))) {
            session.forget(number);
        }
        if let Err(error) = &opened {
            self.disown(session, number, error).await;
        }
        opened
    }

    /// Answers the peer's Connect, whose number the session has registered, and sets up the local side.
    pub(crate) async fn accept_data(self: Arc<Self>, session: Arc<Session>, offer: Connect) {
        let number = offer.connection;
        let (peer, attempt, (fabric, half)) = match self.begin_accepting(&session.peer.worker, &offer) {
            Ok(accepting) => accepting,
            Err(status) => {
                return refuse(&session, number, status).await;
            }
        };
        let opened = self.accept_over(fabric, &session, half, offer).await.map_err(WorkerError::or_limit);
        let replaced = peer.end_accept(opened.as_ref().ok().map(|connection| (attempt, connection)));
        match opened {
            Ok(connection) => {
                if let Some(left_out) = self.log.line(peer.name()) {
                    let (transport, encrypted) = (connection.kind, connection.is_encrypted());
                    log!(INFO, peer = peer.name(), %transport, encrypted, left_out, "connected by the peer");
                }
                peer.note_not_used(Vec::new());
                self.adopt(&peer, &connection);
            }
            Err(error) => {
                if let Some(left_out) = self.log.line(peer.name()) {
                    log!(WARN, peer = peer.name(), %error, left_out, "a data connection could not be set up");
                }
                session.forget(number);
                self.disown(&session, number, &error).await;
            }
        }
        if let Some(replaced) = replaced {
            replaced.close(&Lost::gone("the peer lost its side, and connected again")).await;
        }
    }

    /// Sends the peer a `Disconnected` frame, because the local side could not be set up and the peer's side may
    /// already be up.
    pub(super) async fn disown(&self, session: &Session, number: u32, why: &WorkerError) {
        let frame =
            ControlFrame::Disconnected { connection: number, status: Lost::gone(why.to_string()).status() };
        // A failure means that the session has ended, which ends the peer's side, too. The limit is for a peer that
        // reads nothing.
        let _ = timeout(&*self.settings.runtime, REASON, session.send(frame)).await;
    }

    fn begin_accepting(
        &self,
        peer: &str,
        offer: &Connect,
    ) -> Result<(KnownPeer, AttemptNumber, (&LocalFabric, Half)), Status> {
        let noted = self.note_peer(peer, None);
        let noted = noted.map_err(|full| Status::new(Code::ResourceExhausted, full.remedy(peer)))?;
        let attempt = noted.begin_accept(*self.settings.name < *peer)?;
        let half = self.prepare_for(offer).inspect_err(|_| drop(noted.end_accept(None)))?;
        Ok((noted, attempt, half))
    }

    pub(super) async fn accept_over(
        self: &Arc<Self>,
        fabric: &LocalFabric,
        session: &Arc<Session>,
        half: Half,
        offer: Connect,
    ) -> Result<Arc<DataConnection>, WorkerError> {
        let answer = self.offer(offer.connection, fabric, &half);
        session.send(ControlFrame::Connected(answer)).await?;
        self.join(fabric, session, half, offer, false).await
    }

    /// The fabric that a peer's Connect requests, and the local side of a connection over it.
    pub(super) fn prepare_for(&self, offer: &Connect) -> Result<(&LocalFabric, Half), Status> {
        let fabric = self.settings.fabrics.iter().find(|fabric| fabric_number(fabric.kind) == offer.kind);
        let fabric = fabric.ok_or_else(|| {
            Status::new(
                Code::Unavailable,
                format!("{} does not offer fabric number {}", self.settings.name, offer.kind),
            )
        })?;
        // The peer cannot read the value of a limit of this process.
        let half = self.prepare(fabric).map_err(|error| {
            let why = format!("{}: {}", self.settings.name, error.or_limit());
            Status::new(Code::Unavailable, why)
        })?;
        Ok((fabric, half))
    }

    /// A queue pair with a ring. Its depths are sufficient for any parameters of the peer.
    fn prepare(&self, fabric: &LocalFabric) -> Result<Half, WorkerError> {
        let depths = Depths::for_any_peer(&self.settings.parameters);
        let config = QueuePairConfig { send_depth: depths.send, receive_depth: depths.receive };
        let enclosure = fabric.enclosure()?;
        let prepared = enclosure.prepare(config)?;
        let lend = |bytes| enclosure.lend_ring(bytes).map(|(granted, at)| (UnusedRing::new(granted), at));
        let (ring, destination) = lend(self.settings.parameters.first_ring_bytes())?;
        let (slots, slots_at) = lend(2 * SLOT_BYTES)?;
        let ring_at = RingOffer { destination, slots: slots_at };
        let known = enclosure.regions.of_pools();
        Ok(Half { enclosure, prepared, ring, slots, ring_at, known })
    }

    fn offer(&self, connection: u32, fabric: &LocalFabric, half: &Half) -> Connect {
        Connect {
            connection,
            kind: fabric_number(fabric.kind),
            data: half.prepared.connection_data().0,
            parameters: self.settings.parameters,
            ring: half.ring_at,
            regions: half.known.iter().map(record).collect(),
        }
    }

    /// Connects the queue pair with the peer's parameters, and starts the protocol. `asked` if this worker sent the
    /// Connect.
    async fn join(
        self: &Arc<Self>,
        fabric: &LocalFabric,
        session: &Arc<Session>,
        half: Half,
        other: Connect,
        asked: bool,
    ) -> Result<Arc<DataConnection>, WorkerError> {
        let Half { enclosure, prepared, ring, slots, known, .. } = half;
        let (peer, limit) = (ConnectionData(other.data), self.settings.connect_limit);
        let announcer =
            Announcer::new(other.connection, &session.sender()?, self.settings.runtime.clone(), &known);
        let announcer = Arc::new(announcer);
        // With tcp, the side that dialled the session also dials for data, because a firewall or address translation
        // may block the other direction. With other fabrics, the side that asked dials, because the peer is ready by
        // then.
        let dials = if fabric.kind == FabricKind::TCP { session.is_dialled() } else { asked };
        let role = if dials { Role::Dialer } else { Role::Acceptor };
        let params = ConnectParams { peer, role, peer_address: session.dialled_at(), limit };
        let connecting = async {
            tokio::select! {
                biased;
                connected = prepared.connect(params) => connected.map_err(WorkerError::from),
                why = session.disowned(other.connection) => Err(could_not_connect(fabric.kind, &why)),
            }
        };
        // Ends with the session: a peer that died after its Connect never connects, and its next incarnation would have
        // to wait for the whole limit.
        let connected = unless(session.ended(), connecting).await;
        let Connected { queue_pair, driver } =
            connected.ok_or_else(|| ControlError::Lost { detail: session.why_over() })??;
        other.regions.iter().for_each(|record| queue_pair.add_remote_region(region(record)));
        let board = queue_pair.shared_memory().and_then(SharedMemory::board);
        let channel = FabricChannel {
            pieces: Pieces::default(),
            mailbox: board.map(Mailbox::new),
            queue_pair,
            message_pool: self.settings.pools.message.clone(),
            ring_maker: RingMaker { enclosure: enclosure.clone(), announcer: announcer.clone() },
            peer_slots: other.ring.slots,
            import: Import { pool: self.settings.pools.source.clone(), enclosure: enclosure.clone() },
        };
        let has_slots = Agreed::of(&self.settings.parameters, &other.parameters).has_result_slots();
        let pool = self.settings.pools.receive.clone();
        let allocator = ReceiveAllocator { pool, enclosure, announcer, has_slots };
        let parameters = (self.settings.parameters, other.parameters);
        let tally = match self.known_peer(&session.peer.worker) {
            Some(peer) => peer.tally(&self.forgotten),
            None => PeerTally::new(&self.forgotten),
        };
        let meter = Meter::new(self.labels.of(&session.peer.worker), fabric.kind, tally, &self.log);
        let peer = (&session.peer, session.whereabouts());
        let (Some(own), Some(own_slots)) = (ring.take(), slots.take()) else {
            return Err(could_not_connect(fabric.kind, "the own ring was taken already"));
        };
        let rings = Rings { own, own_slots, peer: other.ring.destination };
        let values = (&self.settings.values, &self.settings.runtime);
        let connection = DataConnection::new(channel, rings, parameters, allocator, peer, values, meter);
        connection.start(driver, &self.settings.runtime);
        if tensorwire_testpoints::chance!("one side of a connection is up later") {
            self.settings.runtime.sleep(LATE).await;
        }
        match confirm_regions(session, other.connection, &connection).await {
            Ok(()) => Ok(connection),
            Err(error) => {
                // The peer can write the local ring from here on, so the ring must not be released before the queue
                // pair is drained.
                connection.close(&Lost::gone(error.to_string())).await;
                Err(error)
            }
        }
    }
}

/// Refuses the connection that the peer asked for by this number.
pub(super) async fn refuse(session: &Session, number: u32, status: Status) {
    session.forget(number);
    // A failure means that the session has ended.
    let _ = session.send(ControlFrame::Refused { connection: number, status }).await;
}

/// Registers the connection with its session, and confirms the regions that the peer has announced in the meantime.
async fn confirm_regions(
    session: &Session,
    number: u32,
    connection: &Arc<DataConnection>,
) -> Result<(), WorkerError> {
    let lost = |detail| WorkerError::Control(ControlError::Lost { detail });
    for region in session.up(number, connection).map_err(lost)? {
        session.send(ControlFrame::RegionAck { connection: number, region }).await?;
    }
    Ok(())
}

/// Whether the peer was silent on `session` for the liveness bound, and no newer life of it has connected.
fn is_unresponsive(peer: &KnownPeer, session: &Session) -> bool {
    session.lost().loss == PeerLoss::Unresponsive && peer.live_session().is_none()
}

/// The error of a connection that the peer could not set up.
fn could_not_connect(kind: FabricKind, why: &str) -> WorkerError {
    let detail = format!("the peer failed: {why}");
    FabricError::Connect { kind, step: "connecting", detail }.into()
}

/// Why the fabric is not used, prefixed with its name unless the error names it.
pub(super) fn named(kind: FabricKind, why: &WorkerError) -> String {
    let (prefix, why) = (format!("{kind}: "), why.to_string());
    if why.starts_with(&prefix) { why } else { prefix + &why }
}

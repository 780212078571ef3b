//! A member of the cluster that knows the secret and does anything. It consists of parts of a worker, without a worker.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tensorwire_fabric::{
    Access, ConnectParams, ConnectionData, Domain, Fabric, Prepared, QueuePairConfig, Role, Runtime, timeout,
};
use tensorwire_memory::Granted;
use tensorwire_protocol::{
    Parameters,
    limits::SLOT_BYTES,
    wire::control::{Connect, ControlFrame, RegionRecord, RingOffer},
};
use tensorwire_rendezvous::control::{
    ControlPlane, ControlSession, FrameReceiver, FrameSender, Secret, handshake,
};
use tensorwire_sim::{Node, Rng, SimControl};

use super::{
    deeds, frames,
    line::Line,
    memory_of::{Registered, record_of},
    stage::{Stage, address, name, rogue_address, rogue_name},
};

const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 64, receive_depth: 512 };

/// The longest that it waits for anything.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// One life of a rogue.
#[derive(Debug)]
pub(super) struct Rogue {
    pub(super) stage: Stage,
    pub(super) place: usize,
    pub(super) node: Node,
    plane: Arc<SimControl>,
    domain: Arc<dyn Domain>,
    reach: Vec<u8>,
    /// Memory that peers may write.
    pub(super) lent: Registered,
    pub(super) source: Registered,
    incarnation: u64,
    /// Regions that honest workers have announced, with the worker.
    pub(super) regions: Mutex<Vec<(usize, RegionRecord)>>,
}

/// A control session with an honest worker.
#[derive(Debug)]
pub(super) struct Talk {
    pub(super) rogue: Arc<Rogue>,
    /// The honest worker.
    pub(super) target: usize,
    pub(super) sender: Arc<dyn FrameSender>,
    /// Whether the rogue dialled.
    dialled: bool,
    /// Whether it answers nothing.
    mute: bool,
    state: Mutex<TalkState>,
}

#[derive(Debug, Default)]
struct TalkState {
    lines: Vec<Arc<Line>>,
    /// Connections that are being set up.
    opening: BTreeMap<u32, Half>,
    /// Frames of both sides.
    frames: Vec<Vec<u8>>,
    next: u32,
}

/// One end of a data connection that is being set up.
#[derive(Debug)]
pub(super) struct Half {
    prepared: Box<dyn Prepared>,
    ring: Granted,
    slots: Granted,
    offer: Connect,
}

/// Lives one life, which ends. `rng` alone decides what it does.
pub(super) async fn live(stage: Stage, place: usize, mut rng: Rng) {
    let node = stage.handle.start_node(&rogue_address(place)).unwrap();
    stage.handle.turn_hostile(node.id());
    let life = {
        let (stage, node, rng) = (stage.clone(), node.clone(), Rng::new(rng.next_u64()));
        async move { Rogue::new(&stage, place, &node).act(rng).await }
    };
    node.run("rogue", life).await;
    // Killed while its tasks still run, or some time later.
    let moment = rng.pick([Duration::ZERO, Duration::from_millis(5), Duration::from_secs(4)]);
    stage.handle.runtime().sleep(moment).await;
    node.crash();
}

impl Rogue {
    fn new(stage: &Stage, place: usize, node: &Node) -> Arc<Self> {
        let fabric = node.fabric();
        let domain = fabric.open_domain().unwrap();
        Arc::new(Self {
            stage: stage.clone(),
            place,
            node: node.clone(),
            plane: node.control_plane(),
            reach: fabric.reach(),
            lent: Registered::new(node, &domain, "lent", Access::RECEIVE),
            source: Registered::new(node, &domain, "source", Access::LOCAL),
            domain,
            incarnation: node.runtime().random(),
            regions: Mutex::default(),
        })
    }

    pub(super) async fn rest(&self, rng: &mut Rng, longest: Duration) {
        let moment = rng.duration(longest);
        self.node.runtime().sleep(moment).await;
    }

    async fn act(self: Arc<Self>, mut rng: Rng) {
        let (me, accept_rng) = (self.clone(), Rng::new(rng.next_u64()));
        self.node.spawn("rogue accepts", async move { me.accept(accept_rng).await });
        for _ in 0..rng.within(1..4) {
            self.rest(&mut rng, Duration::from_millis(100)).await;
            let target = rng.below(self.stage.setup.honest);
            self.clone().visit(target, &mut rng).await;
        }
        // Its sessions and connections continue while it still answers.
        self.rest(&mut rng, Duration::from_secs(1)).await;
    }

    /// Dials an honest worker and does its deeds there.
    async fn visit(self: Arc<Self>, target: usize, rng: &mut Rng) {
        self.stage.truth().attempts += 1;
        let mut target = target;
        let mut worker = rogue_name(self.place);
        if self.stage.setup.impostor && self.place == 0 && rng.chance(1, 2) {
            (target, worker) = (0, name(self.stage.setup.honest - 1));
            self.stage.did("came under an honest worker's name");
        } else if rng.chance(1, 4) {
            worker = format!("/job:other/replica:0/task:{}", rng.below(4));
            self.stage.did("came under another name");
        }
        let Ok(mut session) = self.plane.dial(&address(target)).await else { return };
        if rng.chance(1, 6) {
            return frames::bad_handshake(&self, session, target, rng).await;
        }
        let mut me = self.introduction(worker);
        if rng.chance(1, 4) {
            self.stage.did("says that it listens elsewhere");
            let other = address(rng.below(self.stage.setup.honest));
            me.listen_address = match rng.below(4) {
                0 => None,
                1 => Some(address(target)),
                2 => Some(other),
                _ => Some("nowhere".to_owned()),
            };
        }
        if rng.chance(1, 6) {
            self.stage.did("says that it lives another life");
            me.incarnation = rng.next_u64();
        }
        let secret = self.secret(target).await;
        let runtime = self.node.runtime();
        let met = handshake::dial(&mut session, &me, secret.as_ref(), &*runtime, PATIENCE, "honest").await;
        let Ok(_them) = met else { return };
        let talk = self.begin(session, target, true, rng);
        let connections = rng.pick([0, 1, 1, 1, 2]);
        for _ in 0..connections {
            talk.open(rng).await;
            self.rest(rng, Duration::from_millis(20)).await;
        }
        deeds::go(&talk, rng).await;
    }

    pub(super) async fn secret(&self, target: usize) -> Option<Secret> {
        self.plane.ambient_secret(&address(target)).await.ok().flatten()
    }

    pub(super) fn introduction(&self, worker: String) -> handshake::Introduction {
        handshake::Introduction {
            worker,
            incarnation: self.incarnation,
            listen_address: Some(rogue_address(self.place)),
            // The number of the simulated fabric.
            fabrics: vec![(4, self.reach.clone())],
        }
    }

    fn begin(
        self: &Arc<Self>,
        session: ControlSession,
        target: usize,
        dialled: bool,
        rng: &mut Rng,
    ) -> Arc<Talk> {
        let ControlSession { sender, receiver, .. } = session;
        let mute = rng.chance(1, 10);
        if mute {
            self.stage.did("never answers a frame");
        }
        let state = Mutex::default();
        let talk = Arc::new(Talk { rogue: self.clone(), target, sender, dialled, mute, state });
        let (hearing, rng) = (talk.clone(), Rng::new(rng.next_u64()));
        self.node.spawn("rogue hears", async move { hearing.hear(receiver, rng).await });
        talk
    }

    /// Takes the sessions that honest workers dial.
    async fn accept(self: Arc<Self>, mut rng: Rng) {
        while let Ok(session) = self.plane.accept().await {
            self.stage.truth().attempts += 1;
            let (me, rng) = (self.clone(), Rng::new(rng.next_u64()));
            self.node.spawn("rogue welcomes", async move { me.welcome(session, rng).await });
        }
    }

    async fn welcome(self: Arc<Self>, mut session: ControlSession, mut rng: Rng) {
        if rng.chance(1, 8) {
            return frames::bad_welcome(&self, session, &mut rng).await;
        }
        let me = self.introduction(rogue_name(self.place));
        // All honest workers have one secret.
        let secret = self.secret(0).await;
        let runtime = self.node.runtime();
        let met = handshake::accept(&mut session, &me, secret.as_ref(), &*runtime, PATIENCE).await;
        let Ok(them) = met else { return };
        let Some(target) = (0..self.stage.setup.honest).find(|worker| name(*worker) == them.worker) else {
            return;
        };
        let talk = self.begin(session, target, false, &mut rng);
        if rng.chance(1, 2) {
            deeds::go(&talk, &mut rng).await;
        }
    }

    /// Half of a data connection.
    fn half(&self, connection: u32, rng: &mut Rng) -> Option<Half> {
        let setup = &self.stage.setup;
        let mut parameters = Parameters {
            mode: setup.mode,
            validation: setup.validation,
            requests_max: rng.pick([1, 8, 1024]),
            ..Parameters::default()
        };
        parameters.eager_bytes_max = setup.eager_bytes_max;
        let (ring, region, destination) = self.lent.lend(parameters.first_ring_bytes())?;
        let (slots, other, slots_at) = self.lent.lend(2 * SLOT_BYTES)?;
        let prepared = self.domain.prepare(DEPTHS).ok()?;
        let offer = Connect {
            connection,
            kind: 4,
            data: prepared.connection_data().0,
            parameters,
            ring: RingOffer { destination, slots: slots_at },
            regions: vec![record_of(&region), record_of(&other)],
        };
        Some(Half { prepared, ring, slots, offer })
    }
}

impl Talk {
    fn lock(&self) -> MutexGuard<'_, TalkState> {
        self.state.lock().unwrap()
    }

    pub(super) fn stage(&self) -> &Stage {
        &self.rogue.stage
    }

    pub(super) fn lines(&self) -> Vec<Arc<Line>> {
        self.lock().lines.clone()
    }

    /// Frames that this session has seen.
    pub(super) fn frames(&self) -> Vec<Vec<u8>> {
        self.lock().frames.clone()
    }

    /// Sends `bytes` as a frame, without patience for a peer that does not read.
    pub(super) async fn frame(&self, bytes: Vec<u8>) {
        let runtime = self.rogue.node.runtime();
        let _may_be_over = timeout(&*runtime, PATIENCE, self.sender.send(bytes)).await;
    }

    pub(super) async fn say(&self, frame: ControlFrame) {
        let bytes = frame.encode();
        self.keep(&bytes);
        self.frame(bytes).await;
    }

    fn keep(&self, bytes: &[u8]) {
        let mut state = self.lock();
        if state.frames.len() < 16 {
            state.frames.push(bytes.to_vec());
        }
    }

    /// Asks for a data connection.
    pub(super) async fn open(&self, rng: &mut Rng) {
        let number = {
            let mut state = self.lock();
            state.next += 1;
            if self.dialled { state.next } else { state.next | 1 << 31 }
        };
        let Some(half) = self.rogue.half(number, rng) else { return };
        self.stage().truth().attempts += 1;
        let offer = half.offer.clone();
        self.lock().opening.insert(number, half);
        self.say(ControlFrame::Connect(offer)).await;
    }

    /// Answers what any member answers, most of the time.
    async fn hear(self: Arc<Self>, mut receiver: Box<dyn FrameReceiver>, mut rng: Rng) {
        while let Ok(Some(bytes)) = receiver.recv().await {
            self.keep(&bytes);
            let frame = ControlFrame::decode(&bytes).expect("honest workers send whole frames");
            if self.mute {
                continue;
            }
            match frame {
                ControlFrame::Ping { nonce } => self.frame(ControlFrame::Pong { nonce }.encode()).await,
                ControlFrame::RegionAdd { connection, region } => {
                    self.note_regions(&[region]);
                    let line = self.lines().into_iter().find(|line| line.number == connection);
                    if let Some(line) = line {
                        line.add_region(&region);
                    }
                    let region = region.region;
                    self.frame(ControlFrame::RegionAck { connection, region }.encode()).await;
                }
                ControlFrame::Connect(offer) => self.clone().answer(offer, &mut rng).await,
                ControlFrame::Connected(answer) => {
                    let half = self.lock().opening.remove(&answer.connection);
                    if let Some(half) = half {
                        self.connect(half, answer, Role::Dialer, &mut rng);
                    }
                }
                _ => {}
            }
        }
    }

    /// The honest worker asks for a data connection.
    async fn answer(self: Arc<Self>, offer: Connect, rng: &mut Rng) {
        self.stage().truth().attempts += 1;
        if rng.chance(1, 5) {
            return frames::bad_answer(&self, &offer, rng).await;
        }
        let Some(half) = self.rogue.half(offer.connection, rng) else { return };
        self.say(ControlFrame::Connected(half.offer.clone())).await;
        self.connect(half, offer, Role::Acceptor, rng);
    }

    fn connect(self: &Arc<Self>, half: Half, other: Connect, role: Role, rng: &mut Rng) {
        self.note_regions(&other.regions);
        let (talk, mut rng) = (self.clone(), Rng::new(rng.next_u64()));
        self.rogue.node.spawn("rogue connects", async move {
            let Half { prepared, ring, slots, offer } = half;
            let peer = ConnectionData(other.data.clone());
            let params = ConnectParams { peer, role, peer_address: None, limit: PATIENCE };
            let Ok(connected) = prepared.connect(params).await else { return };
            let queue_pair = connected.spawn(&*talk.rogue.node.runtime());
            let stingy = rng.chance(1, 6);
            if stingy {
                talk.stage().did("returns no credits");
            }
            let line = Line::new(&talk, queue_pair, (offer, other), (ring, slots), stingy);
            talk.lock().lines.push(line.clone());
            line.take_arrivals(rng).await;
        });
    }

    fn note_regions(&self, records: &[RegionRecord]) {
        let mut regions = self.rogue.regions.lock().unwrap();
        regions.extend(records.iter().map(|record| (self.target, *record)));
        let excess = regions.len().saturating_sub(64);
        regions.drain(..excess);
    }
}

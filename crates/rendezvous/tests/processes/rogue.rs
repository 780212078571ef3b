//! A member of the cluster that knows the secret, greets as it should, sets up a data connection, and then breaks a
//! rule of the protocol. It is made of the parts that a worker is made of, without a worker.

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::{
    Access, ConnectParams, ConnectionData, Domain, Fabric, FabricKind, Immediate, QueuePair, QueuePairConfig,
    RegionGeneration, RegionId, RegisteredPool, RemoteRange, RemoteRegion, Role, Runtime, TokioRuntime,
};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_memory::{Granted, Pool, PoolConfig};
use tensorwire_protocol::{
    DataType, Destination, MESSAGE_IMMEDIATE, Message, MetaDataResponse, Metadata, Parameters, RequestIndex,
    Scope, Shape, TensorReRequest, TensorRequest, Want,
    credit::{Answer, Counts},
    limits::{PULLS_MAX, SLOT_BYTES, WIRE_VERSION},
    message::StepId,
    names::NameForm,
    wire::{
        control::{Connect, ControlFrame, RegionRecord, RingOffer},
        record,
    },
};
use tensorwire_rendezvous::control::{
    ControlPlane, ControlSession, FrameSender, GrpcConfig, GrpcPlane, handshake,
};
use tokio::sync::mpsc;

use crate::harness::step;

pub(crate) const ROGUE: &str = "/job:rogue/replica:0/task:0";
pub(crate) const ROGUE_CPU: &str = "/job:rogue/replica:0/task:0/device:CPU:0";
const INCARNATION: u64 = 77;

const ACKNOWLEDGEMENT: Immediate = Immediate(0xFFFF_FFFE);
const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 512, receive_depth: 2048 };
const LIMIT: Duration = Duration::from_secs(10);

/// The number of the data connection that it asks for.
const NUMBER: u32 = 1;

/// What it offers: no more than one request at a time, so that more are soon too many.
fn parameters() -> Parameters {
    Parameters { requests_max: 1, ..Parameters::default() }
}

struct Registered(RegisteredPool);

impl Registered {
    fn new(domain: &Arc<dyn Domain>, name: &'static str, access: Access) -> Self {
        let pool = Pool::new(PoolConfig { block_bytes: 1 << 20, ..PoolConfig::new(name) }).unwrap();
        Self(RegisteredPool::new(pool, domain, access).unwrap())
    }

    fn lend(&self, bytes: u32) -> (Granted, RemoteRegion, Destination) {
        let granted = self.0.pool.try_alloc(bytes as usize).unwrap().grant();
        let region = self.0.region(granted.block().unwrap().id()).unwrap();
        let destination = Destination {
            region: region.region.0,
            generation: region.generation.0,
            offset: granted.offset() as u64,
            capacity: bytes.into(),
            result: None,
        };
        (granted, region, destination)
    }
}

/// What it has set up, with everything that it needs to break rules.
pub(crate) struct Rogue {
    pub(crate) queue_pair: QueuePair,
    sender: Arc<dyn FrameSender>,
    refusals: mpsc::UnboundedReceiver<String>,
    source: Registered,
    peer: Connect,
    /// Where the next record goes in the peer's ring.
    at: u64,
    /// A key that the peer may be asked for, and never has.
    key: String,
    _ring: [Granted; 2],
    _plane: GrpcPlane,
}

fn fabric(kind: FabricKind, runtime: Arc<dyn Runtime>) -> (Arc<dyn Fabric>, u8) {
    match kind {
        FabricKind::SHM => (Arc::new(ShmFabric::new(runtime).unwrap()), 2),
        _ => (Arc::new(TcpFabric::new(runtime, TcpConfig::default())), 3),
    }
}

/// Greets the worker at `address` as any member does.
async fn greet(
    plane: &GrpcPlane,
    address: &str,
    fabrics: Vec<(u8, Vec<u8>)>,
    runtime: &dyn Runtime,
) -> ControlSession {
    let mut session = plane.dial(address).await.unwrap();
    let secret = plane.ambient_secret(address).await.unwrap();
    let me = handshake::Introduction {
        worker: ROGUE.to_owned(),
        incarnation: INCARNATION,
        listen_address: Some(plane.local_address()),
        fabrics,
    };
    handshake::dial(&mut session, &me, secret.as_ref(), runtime, LIMIT, address).await.unwrap();
    session
}

/// Answers what any member answers; returns the answer to its Connect, and passes every refusal on.
async fn serve(
    session: ControlSession,
    connected: mpsc::UnboundedSender<Connect>,
    refused: mpsc::UnboundedSender<String>,
) {
    let ControlSession { sender, mut receiver, .. } = session;
    while let Ok(Some(bytes)) = receiver.recv().await {
        let answer = match ControlFrame::decode(&bytes).unwrap() {
            ControlFrame::Ping { nonce } => ControlFrame::Pong { nonce },
            ControlFrame::RegionAdd { connection, region } => {
                ControlFrame::RegionAck { connection, region: region.region }
            }
            ControlFrame::Connected(answer) => {
                let _only_the_first_counts = connected.send(answer);
                continue;
            }
            ControlFrame::Refused { status, .. } | ControlFrame::Goodbye { status } => {
                let _nobody_asks_any_more = refused.send(status.to_string());
                continue;
            }
            _ => continue,
        };
        let _may_be_over = sender.send(answer.encode()).await;
    }
}

fn region(record: &RegionRecord) -> RemoteRegion {
    RemoteRegion {
        region: RegionId(record.region),
        generation: RegionGeneration(record.generation),
        base: record.base,
        length: record.length,
        key: record.key,
    }
}

impl Rogue {
    /// Greets, and sets up a data connection.
    pub(crate) async fn join(kind: FabricKind, address: &str, key: &str, runtime: Arc<dyn Runtime>) -> Self {
        let (fabric, number) = fabric(kind, runtime.clone());
        let domain = fabric.open_domain().unwrap();
        let (ring_pool, source) = (
            Registered::new(&domain, "ring", Access::RING),
            Registered::new(&domain, "source", Access::LOCAL),
        );
        let (ring, ring_region, destination) = ring_pool.lend(parameters().first_ring_bytes());
        let (slots, _, slots_at) = ring_pool.lend(2 * SLOT_BYTES);
        let prepared = domain.prepare(DEPTHS).unwrap();
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let session = greet(&plane, address, vec![(number, fabric.reach())], &*runtime).await;
        let (sender, peer_address) = (session.sender.clone(), session.addresses.map(|ends| ends.peer));
        let (tell, mut answers) = mpsc::unbounded_channel();
        let (refused, refusals) = mpsc::unbounded_channel();
        runtime.spawn("session", Box::pin(serve(session, tell, refused)));
        let record = RegionRecord {
            region: ring_region.region.0,
            generation: ring_region.generation.0,
            base: ring_region.base,
            length: ring_region.length,
            key: ring_region.key,
        };
        let offer = Connect {
            connection: NUMBER,
            kind: number,
            data: prepared.connection_data().0,
            parameters: parameters(),
            ring: RingOffer { destination, slots: slots_at },
            regions: vec![record],
        };
        sender.send(ControlFrame::Connect(offer).encode()).await.unwrap();
        let peer: Connect = step("the answer to Connect", answers.recv()).await.unwrap();
        let data = ConnectionData(peer.data.clone());
        let params = ConnectParams { peer: data, role: Role::Dialer, peer_address, limit: LIMIT };
        let queue_pair = prepared.connect(params).await.unwrap().spawn(&TokioRuntime::current().unwrap());
        peer.regions.iter().for_each(|record| queue_pair.add_remote_region(region(record)));
        let (key, _ring) = (key.to_owned(), [ring, slots]);
        Self { queue_pair, sender, refusals, source, peer, at: 0, key, _ring, _plane: plane }
    }

    async fn write(&mut self, at: Destination, offset: u64, bytes: &[u8], immediate: Immediate) {
        let mut local = self.source.0.pool.try_alloc(bytes.len()).unwrap();
        local.copy_from_slice(bytes);
        let remote = RemoteRange {
            region: RegionId(at.region),
            generation: RegionGeneration(at.generation),
            offset: at.offset + offset,
            length: bytes.len() as u64,
        };
        // The connection may be over by now.
        let _ = step("a write", self.queue_pair.write_imm(local.freeze(), remote, immediate)).await;
    }

    /// These bytes as the next record of the peer's ring.
    async fn record(&mut self, bytes: &[u8]) {
        let (ring, at) = (self.peer.ring.destination, self.at);
        self.at += bytes.len() as u64;
        self.write(ring, at, bytes, Immediate(MESSAGE_IMMEDIATE)).await;
    }

    async fn message_with(&mut self, counts: Counts, form: NameForm, message: &Message) {
        let mut bytes = Vec::new();
        record::encode_message(Some((counts, &[form])), message, &mut bytes);
        self.record(&bytes).await;
    }

    async fn message(&mut self, message: &Message) {
        self.message_with(Counts::default(), NameForm::Plain, message).await;
    }

    async fn frame(&mut self, bytes: Vec<u8>) {
        let _may_be_over = self.sender.send(bytes).await;
    }

    fn request(&self, index: u32) -> Message {
        Message::TensorRequest(TensorRequest {
            index: RequestIndex(index),
            // Its own: a step that an earlier rogue was lost in is over.
            scope: Scope::Step(StepId(std::process::id().into())),
            key: self.key.as_str().into(),
            known: Arc::default(),
            want: Want::Write(None),
            arguments: None,
        })
    }

    fn connect_again(&self, number: u32) -> ControlFrame {
        ControlFrame::Connect(Connect { connection: number, ..self.peer.clone() })
    }

    /// Breaks the rule. The peer has a request of its own under way, whose index is 0.
    pub(crate) async fn commit(&mut self, deed: &str) {
        let eight = Metadata::new(DataType::U8, Shape::new([8]).unwrap()).unwrap();
        let response = |loan_follows| {
            let (index, metadata) = (RequestIndex(0), eight.clone());
            let (content, checksum) = (None, None);
            Message::MetaDataResponse(MetaDataResponse { index, metadata, content, loan_follows, checksum })
        };
        match deed {
            "malformed" => self.record(&[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 99, 1, 2, 3]).await,
            "endless_record" => self.record(&u32::MAX.to_le_bytes()).await,
            "reserved_index" => self.message(&Message::CancelAck(RequestIndex(0xFFFF_FFF5))).await,
            "reserved_immediate" => {
                let _ = self.queue_pair.notify(Immediate(0xFFFF_FFF5)).await;
            }
            "content_unasked" => {
                let _ = self.queue_pair.notify(Immediate(0)).await;
            }
            "loan_unasked" => self.message(&response(true)).await,
            "cancel_ack_unasked" => self.message(&Message::CancelAck(RequestIndex(0))).await,
            "flood" => {
                // All of them fit the ring, because only the first spells its key out, and not what may be owed to it.
                for index in 0..90 + PULLS_MAX {
                    let form = if index == 0 { NameForm::Define(0) } else { NameForm::Number(0) };
                    let request = self.request(index << 2);
                    self.message_with(Counts::default(), form, &request).await;
                }
            }
            "duplicate_request" => {
                for _ in 0..2 {
                    let request = self.request(0);
                    self.message(&request).await;
                }
            }
            "re_request_unasked" => {
                let request = self.request(0);
                self.message(&request).await;
                let re_request = TensorReRequest { index: RequestIndex(0), destination: None };
                self.message(&Message::TensorReRequest(re_request)).await;
            }
            "returned_too_much" => {
                let counts = Counts { receives: 1000, ..Counts::default() };
                let request = self.request(0);
                self.message_with(counts, NameForm::Plain, &request).await;
            }
            "unknown_name" => {
                let request = self.request(0);
                self.message_with(Counts::default(), NameForm::Number(9), &request).await;
            }
            "answer_without_ask" => {
                let bytes = record::encode_answer(Answer { counts: Counts::default(), asks: 1 });
                self.write(self.peer.ring.slots, SLOT_BYTES.into(), &bytes, ACKNOWLEDGEMENT).await;
            }
            other => self.commit_in_frames(other).await,
        }
    }

    /// Breaks a rule of the control plane.
    async fn commit_in_frames(&mut self, deed: &str) {
        match deed {
            "illegal_frame" => {
                let (worker, listen_address) = (ROGUE.to_owned(), None);
                let hello = ControlFrame::Hello {
                    wire_version: WIRE_VERSION,
                    worker,
                    incarnation: 1,
                    listen_address,
                    nonce: [0; 32],
                };
                self.frame(hello.encode()).await;
            }
            "garbage_frame" => self.frame(vec![0xAB; 1000]).await,
            "frame_of_nothing" => self.frame(Vec::new()).await,
            "connects_over_the_cap" => {
                for number in 2..40 {
                    let again = self.connect_again(number).encode();
                    self.frame(again).await;
                }
            }
            other => panic!("unknown deed {other}"),
        }
    }

    /// Waits for a refusal or goodbye that contains `words`.
    pub(crate) async fn refused_with(&mut self, words: &str) -> String {
        let found = async {
            loop {
                let refusal = self.refusals.recv().await.expect("a refusal");
                if refusal.contains(words) {
                    return refusal;
                }
            }
        };
        step("a refusal", found).await
    }

    /// Waits until the peer asks for something.
    pub(crate) async fn asked(&self) {
        step("a request", self.queue_pair.next_arrival()).await.unwrap();
    }

    /// Waits until the peer has ended the connection.
    pub(crate) async fn ended(&self) {
        let ended = async { while self.queue_pair.next_arrival().await.is_ok() {} };
        step("the end of the connection", ended).await;
    }
}

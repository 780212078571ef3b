//! What peers that have gone bad can do to a worker that does not trust them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::bounded::bounded_on;
use crate::watched::{Watcher, watched};
use crate::{
    fabrics::{kinds, over_verbs},
    rdma::{End, device_at, patient},
};
use tensorwire_fabric::{
    Access, Fabric, FabricKind, Purpose, QueuePair, RemoteRange, RemoteRegion, Runtime, TokioRuntime,
};
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_memory::{BlockId, Pool, PoolConfig};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Peer, Tensor, Trust, Worker, WorkerError};
use tensorwire_verbs_reactor::VerbsFabric;

const VICTIM: &str = "/job:victim/replica:0/task:0";
const BYTES: usize = (3 << 20) + 77;
/// No byte of a tensor here.
const SPOILT: u8 = 0xEE;

fn runtime() -> Arc<dyn Runtime> {
    Arc::new(TokioRuntime::current().unwrap())
}

/// Remembers who could write what.
#[derive(Debug, Default)]
struct Spy {
    writable: Mutex<Vec<(Purpose, RemoteRegion)>>,
    queue_pairs: Mutex<Vec<QueuePair>>,
    /// Of all domains together.
    registered: Mutex<Vec<BlockId>>,
}

impl Watcher for Spy {
    fn registered(&self, block: BlockId, access: Access, region: RemoteRegion) {
        if access.remote_write {
            self.writable.lock().unwrap().push((access.purpose, region));
        }
        self.registered.lock().unwrap().push(block);
    }

    fn deregistered(&self, block: BlockId) {
        let mut registered = self.registered.lock().unwrap();
        let place = registered.iter().position(|known| *known == block).unwrap();
        registered.remove(place);
    }

    fn connected(&self, queue_pair: &QueuePair) {
        self.queue_pairs.lock().unwrap().push(queue_pair.clone());
    }
}

impl Spy {
    /// All regions of its domains that peers can write, and that are for `purpose`.
    fn writable(&self, purpose: Purpose) -> Vec<RemoteRegion> {
        let writable = self.writable.lock().unwrap();
        writable.iter().filter(|(found, _)| *found == purpose).map(|(_, region)| *region).collect()
    }

    /// Blocks that its domains have, counted in each of them.
    fn registered(&self) -> usize {
        self.registered.lock().unwrap().len()
    }
}

/// A worker at `end`, and who watches its fabric.
async fn worker(name: &str, kind: FabricKind, end: End, trust: Trust) -> (Worker, Arc<Spy>) {
    let fabric: Arc<dyn Fabric> = match kind {
        FabricKind::TCP => Arc::new(TcpFabric::new(runtime(), TcpConfig::default())),
        _ => Arc::new(VerbsFabric::open(runtime(), &device_at(end)).unwrap()),
    };
    let spy = Arc::default();
    let builder = Worker::builder(name).local_fabrics(vec![watched(fabric, &spy)]);
    (builder.trust(trust).timeout(patient(LIMIT)).start().await.unwrap(), spy)
}

const LIMIT: Duration = Duration::from_secs(20);

/// A worker that has published `x`, whose bytes are `seed` and what follows it, and the fabric it uses.
struct Member {
    worker: Worker,
    spy: Arc<Spy>,
    x: Tensor,
}

impl Member {
    async fn start(name: &str, kind: FabricKind, seed: u8) -> Self {
        let (worker, spy) = worker(name, kind, End::Right, Trust::Cluster).await;
        let mut buffer = worker.pool().try_alloc(BYTES).unwrap();
        buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 101) as u8 + seed);
        let x = Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap();
        worker.publish("x", x.clone()).unwrap();
        Self { worker, spy, x }
    }

    async fn known_to(&self, victim: &Worker) -> Peer {
        victim.peer_at(self.worker.address()).await.unwrap()
    }

    /// Its end of its only connection.
    fn queue_pair(&self) -> QueuePair {
        self.spy.queue_pairs.lock().unwrap().last().unwrap().clone()
    }

    async fn is_fetched_well(&self, peer: &Peer) {
        let fetched = peer.fetch("x").await.unwrap();
        assert!(fetched.bytes() == self.x.bytes());
    }
}

/// Writes over all of `regions`, whether they were announced to this worker or not. How many writes completed well: over
/// verbs they have landed, over tcp they have left.
async fn spoil(by: &Member, queue_pair: &QueuePair, regions: &[RemoteRegion]) -> usize {
    let mut well = 0;
    for region in regions {
        queue_pair.add_remote_region(*region);
        let length = usize::try_from(region.length).unwrap();
        let mut local = by.worker.pool().alloc(length).await.unwrap();
        local.fill(SPOILT);
        let (region, generation) = (region.region, region.generation);
        let remote = RemoteRange { region, generation, offset: 0, length: length as u64 };
        well += usize::from(queue_pair.write(local.freeze(), remote).await.is_ok());
    }
    well
}

/// Waits until the connection has failed.
async fn failed(queue_pair: &QueuePair) {
    until("the end of the connection", || queue_pair.failure().is_some()).await;
}

async fn until(what: &str, done: impl Fn() -> bool) {
    let waited = async {
        while !done() {
            runtime().sleep(Duration::from_millis(1)).await;
        }
    };
    step(what, waited).await;
}

/// A peer writes all regions that were ever announced, after its tensor was received. Whether the tensor is unchanged. Over
/// verbs it must be able to, or this would show nothing; over tcp it must be refused.
async fn spoilt_later(kind: FabricKind, trust: Trust) -> bool {
    let bad = Member::start("/job:bad/replica:0/task:0", kind, 1).await;
    let (victim, spy) = worker(VICTIM, kind, End::Left, trust).await;
    let peer = bad.known_to(&victim).await;
    let fetched = peer.fetch("x").await.unwrap();
    assert!(fetched.bytes() == bad.x.bytes());
    let payload = spy.writable(Purpose::Payload);
    assert!(!payload.is_empty());
    let well = spoil(&bad, &bad.queue_pair(), &payload).await;
    if kind == FabricKind::VERBS {
        assert_eq!(well, payload.len(), "{kind}");
    } else {
        failed(&bad.queue_pair()).await;
    }
    let is_unharmed = fetched.bytes() == bad.x.bytes();
    // What it may write of messages breaks its own connection, and the worker goes on.
    spoil(&bad, &bad.queue_pair(), &spy.writable(Purpose::Messages)).await;
    let honest = Member::start("/job:honest/replica:0/task:0", kind, 2).await;
    let peer = honest.known_to(&victim).await;
    honest.is_fetched_well(&peer).await;
    is_unharmed
}

/// A device lets a peer write what is registered for it at any time; tcp checks every write against the granted memory.
#[test]
fn e_received_values_stay_what_they_are_whatever_their_sender_writes() {
    bounded(async {
        for &kind in kinds(&[FabricKind::TCP]) {
            assert!(spoilt_later(kind, Trust::Hostile).await, "{kind}");
            // What it is like where peers are trusted.
            assert_eq!(spoilt_later(kind, Trust::Cluster).await, kind != FabricKind::VERBS, "{kind}");
        }
    });
}

/// A peer writes what was announced to another one, whose keys it has got hold of.
#[test]
fn e_a_peer_with_anothers_keys_writes_nothing() {
    bounded(async {
        for &kind in kinds(&[FabricKind::TCP]) {
            let (victim, spy) = worker(VICTIM, kind, End::Left, Trust::Hostile).await;
            let honest = Member::start("/job:honest/replica:0/task:0", kind, 2).await;
            let peer = honest.known_to(&victim).await;
            honest.is_fetched_well(&peer).await;
            let others = spy.writable(Purpose::Payload);
            let bad = Member::start("/job:bad/replica:0/task:0", kind, 1).await;
            bad.is_fetched_well(&bad.known_to(&victim).await).await;
            // A tcp peer is refused what is not granted at this moment, so a write alone does not show whose memory it is.
            let own = spy.writable(Purpose::Payload).len() - others.len();
            assert!(own > 0, "{kind}: what this peer sends lands in memory of another connection");
            let queue_pair = bad.queue_pair();
            let well = spoil(&bad, &queue_pair, &others).await;
            assert!(kind != FabricKind::VERBS || well == 0, "{kind}: {well}");
            failed(&queue_pair).await;
            assert!(honest.queue_pair().failure().is_none(), "{kind}: the other one goes on");
            honest.is_fetched_well(&peer).await;
        }
    });
}

/// The memory of a connection goes with it, also out of the device.
#[test]
fn memory_that_peers_could_write_goes_with_their_connections() {
    bounded(async {
        for &kind in kinds(&[FabricKind::TCP]) {
            let (victim, spy) = worker(VICTIM, kind, End::Left, Trust::Hostile).await;
            // One block of each pool.
            drop(victim.pool().alloc(1).await.unwrap());
            for round in 0..3 {
                let member = Member::start(&format!("/job:m/replica:0/task:{round}"), kind, round).await;
                let peer = member.known_to(&victim).await;
                member.is_fetched_well(&peer).await;
                assert!(spy.registered() >= 4, "{kind}: source, rings, what bounces and where it stays");
                member.worker.shutdown().await;
                until("the registrations' end", || spy.registered() == 0).await;
                let memory = victim.receive_memory();
                assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0), "{kind}");
            }
            // Nor does one that could not be set up: the peer offers no fabric that this worker has.
            let other = Worker::builder("/job:other/replica:0/task:0").require(FabricKind::SHM);
            let other = other.start().await.unwrap();
            let peer = victim.peer_at(other.address()).await.unwrap();
            let refused = peer.fetch("x").await.unwrap_err();
            assert!(matches!(refused, WorkerError::NoFabric { .. }), "{refused}");
            assert_eq!(spy.registered(), 0, "{kind}");
        }
    });
}

#[test]
fn shared_memory_is_not_used_with_peers_that_are_not_trusted() {
    bounded(async {
        let builder = |name| Worker::builder(name).trust(Trust::Hostile).timeout(LIMIT);
        let refused = builder(VICTIM).require(FabricKind::SHM).start().await.unwrap_err().to_string();
        assert!(refused.contains("Trust::Hostile") && refused.contains("use tcp or verbs"), "{refused}");
        let both = [FabricKind::SHM, FabricKind::TCP];
        let victim = builder(VICTIM).fabrics(both).start().await.unwrap();
        let other = Worker::builder("/job:other/replica:0/task:0").fabrics(both).start().await.unwrap();
        let tensor = Tensor::from_values(other.pool(), &[3], &[1u8, 2, 3]).unwrap();
        other.publish("x", tensor).unwrap();
        let peer = victim.peer_at(other.address()).await.unwrap();
        assert_eq!(peer.fetch("x").await.unwrap().bytes(), [1, 2, 3]);
        let known = victim.peers().pop().unwrap();
        assert_eq!(known.transport, Some(FabricKind::TCP));
        assert!(known.not_used.iter().any(|why| why.contains("Trust::Hostile")), "{:?}", known.not_used);
    });
}

#[test]
fn a_value_that_is_longer_than_what_may_bounce_is_refused_by_the_limits_name() {
    bounded(async {
        let victim = Worker::builder(VICTIM)
            .trust(Trust::Hostile)
            .memory(|memory| memory.bounce_bytes = 1 << 20)
            .timeout(LIMIT);
        let victim = victim.require(FabricKind::TCP).start().await.unwrap();
        let member = Member::start("/job:m/replica:0/task:0", FabricKind::TCP, 1).await;
        let peer = member.known_to(&victim).await;
        let refused = peer.fetch("x").await.unwrap_err().to_string();
        assert!(refused.contains("bounce") && refused.contains("1048576"), "{refused}");
        let none = Worker::builder(VICTIM)
            .memory(|memory| memory.bounce_bytes = 0)
            .start()
            .await
            .unwrap_err()
            .to_string();
        assert!(none.contains("bounce_bytes"), "{none}");
    });
}

/// Pools of tests use the names of the worker's own.
#[test]
fn a_buffer_of_any_pool_can_be_filled() {
    bounded(async {
        let (victim, _) = worker(VICTIM, FabricKind::TCP, End::Left, Trust::Hostile).await;
        let member = Member::start("/job:m/replica:0/task:0", FabricKind::TCP, 1).await;
        let peer = member.known_to(&victim).await;
        let pool = Pool::new(PoolConfig::new("of my own")).unwrap();
        for _ in 0..3 {
            let buffer = pool.alloc(BYTES + 10).await.unwrap();
            let given = buffer.as_ptr();
            let filled = peer.fetch("x").into_buffer(buffer).dtype(DataType::U8).await.unwrap();
            assert_eq!(filled.buffer.as_ptr(), given);
            assert!(filled.bytes() == member.x.bytes());
        }
        assert_eq!(pool.stats().used_bytes, 0);
    });
}

async fn step<T>(what: &str, future: impl Future<Output = T>) -> T {
    tensorwire_fabric::timeout(&*runtime(), patient(LIMIT), future)
        .await
        .unwrap_or_else(|_| panic!("{what} hangs"))
}

fn bounded(test: impl Future<Output = ()>) {
    bounded_on(2, patient(LIMIT * 5), test);
}

over_verbs! {
    e_received_values_stay_what_they_are_whatever_their_sender_writes
    e_a_peer_with_anothers_keys_writes_nothing
    memory_that_peers_could_write_goes_with_their_connections
}

//! What peers that have gone bad can do to a worker that does not trust them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rdma;
mod spy;

use std::{future::Future, sync::Arc, time::Duration};

use memory::{Pool, PoolConfig};
use protocol::DataType;
use rdma::{End, device_at, kinds, only_verbs, patient};
use rendezvous::{Peer, Tensor, Trust, Worker, WorkerError};
use spy::Spy;
use verbs_reactor::{
    Fabric, FabricKind, Purpose, QueuePair, RemoteRange, RemoteRegion, Runtime, TokioRuntime,
    tcp::{TcpConfig, TcpFabric},
    verbs::VerbsFabric,
};

const VICTIM: &str = "/job:victim/replica:0/task:0";
const BYTES: usize = (3 << 20) + 77;
/// No byte of a tensor here.
const SPOILT: u8 = 0xEE;

fn runtime() -> Arc<dyn Runtime> {
    Arc::new(TokioRuntime::current().unwrap())
}

/// A fabric whose use can be watched.
fn spy(kind: FabricKind, end: End) -> Arc<Spy> {
    let fabric: Arc<dyn Fabric> = match kind {
        FabricKind::Tcp => Arc::new(TcpFabric::new(runtime(), TcpConfig::default())),
        _ => Arc::new(VerbsFabric::open(runtime(), &device_at(end)).unwrap()),
    };
    Spy::new(fabric)
}

async fn worker(name: &str, fabric: &Arc<Spy>, trust: Trust) -> Worker {
    let fabrics: Vec<Arc<dyn Fabric>> = vec![fabric.clone()];
    let builder = Worker::builder(name).local_fabrics(fabrics).trust(trust).timeout(patient(LIMIT));
    builder.start().await.unwrap()
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
        let spy = spy(kind, End::Right);
        let worker = worker(name, &spy, Trust::Cluster).await;
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
        self.spy.queue_pairs().pop().unwrap()
    }

    async fn is_fetched_well(&self, victim: &Worker, peer: &Peer) {
        let fetched = victim.fetch(peer, "x").await.unwrap();
        assert!(fetched.bytes() == self.x.bytes());
    }
}

/// Writes over all of `regions`, whether they were announced to this end or not. How many writes did what was asked.
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

/// A peer writes all that it was ever told of, after its tensor was received. Whether the tensor is as it was, and how
/// many writes did what was asked.
async fn spoilt_later(kind: FabricKind, trust: Trust) -> (bool, usize) {
    let (spy, bad) = (spy(kind, End::Left), Member::start("/job:bad/replica:0/task:0", kind, 1).await);
    let victim = worker(VICTIM, &spy, trust).await;
    let peer = bad.known_to(&victim).await;
    let fetched = victim.fetch(&peer, "x").await.unwrap();
    assert!(fetched.bytes() == bad.x.bytes());
    let payload = spy.writable(Purpose::Payload);
    assert!(!payload.is_empty());
    let well = spoil(&bad, &bad.queue_pair(), &payload).await;
    let is_unharmed = fetched.bytes() == bad.x.bytes();
    // What it may write of messages breaks its own connection, and the worker goes on.
    spoil(&bad, &bad.queue_pair(), &spy.writable(Purpose::Messages)).await;
    let honest = Member::start("/job:honest/replica:0/task:0", kind, 2).await;
    let peer = honest.known_to(&victim).await;
    honest.is_fetched_well(&victim, &peer).await;
    (is_unharmed, well)
}

/// A device lets a peer write what is registered for it, whenever it likes; tcp holds every write against what is lent.
fn received_values_stay_what_they_are() {
    bounded(async {
        for &kind in kinds(&[FabricKind::Tcp]) {
            let is_device = kind == FabricKind::Verbs;
            let (is_unharmed, well) = spoilt_later(kind, Trust::Hostile).await;
            assert!(is_unharmed, "{kind}");
            assert_eq!(well > 0, is_device, "{kind}: {well} writes landed where content bounces");
            // Else this test would show nothing.
            let (is_unharmed, _) = spoilt_later(kind, Trust::Cluster).await;
            assert_eq!(is_unharmed, !is_device, "{kind}");
        }
    });
}

#[test]
fn e_received_values_stay_what_they_are_whatever_their_sender_writes() {
    received_values_stay_what_they_are();
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn e_received_values_stay_what_they_are_whatever_their_sender_writes_over_verbs() {
    only_verbs(received_values_stay_what_they_are);
}

/// A peer writes what was announced to another one, whose keys it has got hold of.
fn nobody_writes_anothers_memory() {
    bounded(async {
        for &kind in kinds(&[FabricKind::Tcp]) {
            let spy = spy(kind, End::Left);
            let victim = worker(VICTIM, &spy, Trust::Hostile).await;
            let honest = Member::start("/job:honest/replica:0/task:0", kind, 2).await;
            let peer = honest.known_to(&victim).await;
            honest.is_fetched_well(&victim, &peer).await;
            let others = spy.writable(Purpose::Payload);
            let bad = Member::start("/job:bad/replica:0/task:0", kind, 1).await;
            bad.is_fetched_well(&victim, &bad.known_to(&victim).await).await;
            let queue_pair = bad.queue_pair();
            assert_eq!(spoil(&bad, &queue_pair, &others).await, 0, "{kind}");
            assert!(queue_pair.failure().is_some(), "{kind}: its connection is over");
            assert!(honest.queue_pair().failure().is_none(), "{kind}: the other one goes on");
            honest.is_fetched_well(&victim, &peer).await;
        }
    });
}

#[test]
fn e_a_peer_with_anothers_keys_writes_nothing() {
    nobody_writes_anothers_memory();
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn e_a_peer_with_anothers_keys_writes_nothing_over_verbs() {
    only_verbs(nobody_writes_anothers_memory);
}

/// The memory of a connection goes with it, also out of the device.
fn connections_leave_nothing_behind() {
    bounded(async {
        for &kind in kinds(&[FabricKind::Tcp]) {
            let spy = spy(kind, End::Left);
            let victim = worker(VICTIM, &spy, Trust::Hostile).await;
            // One block of each pool.
            drop(victim.pool().alloc(1).await.unwrap());
            for round in 0..3 {
                let member = Member::start(&format!("/job:m/replica:0/task:{round}"), kind, round).await;
                let peer = member.known_to(&victim).await;
                member.is_fetched_well(&victim, &peer).await;
                assert!(spy.registered() >= 4, "{kind}: source, rings, what bounces and where it stays");
                member.worker.shutdown().await;
                let gone = async {
                    while spy.registered() > 0 {
                        runtime().sleep(Duration::from_millis(1)).await;
                    }
                };
                step("the registrations' end", gone).await;
                let memory = victim.receive_memory();
                assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0), "{kind}");
            }
            // Nor does one that could not be set up: the peer offers nothing that this end has.
            let other = Worker::builder("/job:other/replica:0/task:0").require(FabricKind::Grpc);
            let other = other.start().await.unwrap();
            let peer = victim.peer_at(other.address()).await.unwrap();
            let refused = victim.fetch(&peer, "x").await.unwrap_err();
            assert!(matches!(refused, WorkerError::NoFabric { .. }), "{refused}");
            assert_eq!(spy.registered(), 0, "{kind}");
        }
    });
}

#[test]
fn memory_that_peers_could_write_goes_with_their_connections() {
    connections_leave_nothing_behind();
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn memory_that_peers_could_write_goes_with_their_connections_over_verbs() {
    only_verbs(connections_leave_nothing_behind);
}

#[test]
fn shared_memory_is_not_used_with_peers_that_are_not_trusted() {
    bounded(async {
        let builder = |name| Worker::builder(name).trust(Trust::Hostile).timeout(LIMIT);
        let refused = builder(VICTIM).require(FabricKind::Shm).start().await.unwrap_err().to_string();
        assert!(
            refused.contains("Trust::Hostile") && refused.contains("use tcp, verbs or grpc"),
            "{refused}"
        );
        let both = [FabricKind::Shm, FabricKind::Tcp];
        let victim = builder(VICTIM).fabrics(both).start().await.unwrap();
        let other = Worker::builder("/job:other/replica:0/task:0").fabrics(both).start().await.unwrap();
        let tensor = Tensor::from_values(other.pool(), &[3], &[1u8, 2, 3]).unwrap();
        other.publish("x", tensor).unwrap();
        let peer = victim.peer_at(other.address()).await.unwrap();
        assert_eq!(victim.fetch(&peer, "x").await.unwrap().bytes(), [1, 2, 3]);
        let known = victim.peers().pop().unwrap();
        assert_eq!(known.transport, Some(FabricKind::Tcp));
        assert!(known.not_used.iter().any(|why| why.contains("Trust::Hostile")), "{:?}", known.not_used);
    });
}

#[test]
fn a_value_that_is_longer_than_what_may_bounce_is_refused_by_the_limits_name() {
    bounded(async {
        let victim = Worker::builder(VICTIM).trust(Trust::Hostile).bounce_bytes(1 << 20).timeout(LIMIT);
        let victim = victim.require(FabricKind::Tcp).start().await.unwrap();
        let member = Member::start("/job:m/replica:0/task:0", FabricKind::Tcp, 1).await;
        let peer = member.known_to(&victim).await;
        let refused = victim.fetch(&peer, "x").await.unwrap_err().to_string();
        assert!(refused.contains("bounce") && refused.contains("1048576"), "{refused}");
        let none = Worker::builder(VICTIM).bounce_bytes(0).start().await.unwrap_err().to_string();
        assert!(none.contains("bounce_bytes"), "{none}");
    });
}

/// Pools of tests use the names of the worker's own.
#[test]
fn a_buffer_of_any_pool_can_be_filled() {
    bounded(async {
        let victim = worker(VICTIM, &spy(FabricKind::Tcp, End::Left), Trust::Hostile).await;
        let member = Member::start("/job:m/replica:0/task:0", FabricKind::Tcp, 1).await;
        let peer = member.known_to(&victim).await;
        let pool = Pool::new(PoolConfig::new("of my own")).unwrap();
        for _ in 0..3 {
            let buffer = pool.alloc(BYTES + 10).await.unwrap();
            let given = buffer.as_ptr();
            let filled = victim.fetch_into(&peer, "x", DataType::U8, buffer).await.unwrap();
            assert_eq!(filled.buffer.as_ptr(), given);
            assert!(filled.bytes() == member.x.bytes());
        }
        assert_eq!(pool.stats().used_bytes, 0);
    });
}

async fn step<T>(what: &str, future: impl Future<Output = T>) -> T {
    verbs_reactor::timeout(&*runtime(), patient(LIMIT), future)
        .await
        .unwrap_or_else(|_| panic!("{what} hangs"))
}

fn bounded(test: impl Future<Output = ()>) {
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    #[allow(clippy::disallowed_methods)] // the watchdog of a test that runs on tokio itself
    let ended = tokio.block_on(async { tokio::time::timeout(patient(LIMIT * 5), test).await });
    ended.expect("the test hangs");
}

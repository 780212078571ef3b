//! Views of a peer's memory and one-sided reads, under faults: which side holds the bytes, and until when.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{
    Access, Arrival, Domain, FabricError, Immediate, QueuePair, RemoteRange, RemoteRegion, Runtime,
};
use tensorwire_memory::{Block, BlockVisitor, Buf, Pool, PoolConfig, VisitError};
use tensorwire_protocol::Mode;
use tensorwire_rendezvous::{Sharing, Tensor, Worker};
use tensorwire_sim::{Allowed, Event, Fault, Handle, Rng, Swarm, World};

use crate::common::{Pair, Side, builder, connect, pair};
use crate::join_all::join_all;

const LENGTH: usize = 5000;

/// Longer than anything is in flight in a world without stopped processes.
const SETTLED: Duration = Duration::from_millis(900);

/// Runs `scenario` under each of `seeds` seeds, with at most `leases` views at once; returns the rare branches taken.
fn on_seeds(seeds: u64, leases: u32, scenario: impl AsyncFn(Handle)) -> BTreeMap<&'static str, u64> {
    let mut marks = BTreeMap::new();
    for seed in 0..seeds {
        let swarm = Swarm { leases_max: leases, ..Swarm::draw(&mut Rng::new(seed).fork(6)) };
        let world = World::with_swarm(seed, swarm);
        world.replayed_by("loans");
        world.run(scenario(world.handle())).unwrap();
        for (mark, count) in world.finish().unwrap().marks {
            *marks.entry(mark).or_default() += count;
        }
    }
    marks
}

async fn loan(queue_pair: &QueuePair) -> Buf {
    match queue_pair.next_arrival().await.unwrap() {
        Arrival::Loan { buffer, .. } => buffer,
        other => panic!("not a loan: {other:?}"),
    }
}

/// Lends the content of `transfer` from left to right.
async fn viewed(pair: &Pair, transfer: u64) -> Buf {
    let source = pair.left.filled(LENGTH, transfer).await;
    let (lent, view) = join(pair.to_right.lend(source, Immediate(1)), loan(&pair.to_left)).await;
    lent.unwrap();
    pair.left.handle.verify(transfer, &view);
    view
}

/// Used, retired and leaked bytes.
fn figures(pool: &Pool) -> (u64, u64, u64) {
    let stats = pool.stats();
    (stats.used_bytes, stats.retired_bytes, stats.leaked_bytes)
}

const KEPT: u64 = (LENGTH as u64).next_multiple_of(tensorwire_memory::ALIGNMENT as u64);

#[test]
fn over_the_cap_a_loan_is_refused_at_once_and_lent_again_when_views_are_gone() {
    for cap in [0, 1, 3] {
        let marks = on_seeds(20, cap, async |handle| {
            let pair = pair(&handle, handle.swarm().depths).await;
            let mut views = Vec::new();
            for transfer in 0..u64::from(cap) {
                views.push(viewed(&pair, transfer).await);
            }
            let source = pair.left.filled(LENGTH, 9).await;
            let refused = pair.to_right.lend_now(source.clone(), Immediate(1)).unwrap_err();
            let FabricError::LeasesExhausted { open, cap: told } = refused else { panic!("{refused}") };
            assert_eq!((open, told), (cap, cap));
            drop(source);
            // A second connection between the same processes counts too.
            let (left, right) = connect(&pair.left, &pair.right, handle.swarm().depths).await;
            let more = left.lend(pair.left.filled(LENGTH, 9).await, Immediate(1)).await;
            assert!(matches!(more, Err(FabricError::LeasesExhausted { .. })), "{more:?}");
            join(left.close(), right.close()).await;
            if cap > 0 {
                views.pop();
                handle.runtime().sleep(SETTLED).await;
                drop(viewed(&pair, 10).await);
            }
            drop(views);
            handle.runtime().sleep(SETTLED).await;
            assert_eq!(figures(&pair.left.source), (0, 0, 0));
        });
        assert!(marks.contains_key("loan refused"));
    }
}

#[test]
fn s1_a_view_keeps_its_bytes_whoever_closes_and_they_come_back_after_it() {
    let marks = on_seeds(60, 64, async |handle| {
        let pair = pair(&handle, handle.swarm().depths).await;
        let mut rng = Rng::new(handle.seed());
        let view = viewed(&pair, 1).await;
        match rng.below(4) {
            0 => pair.to_right.close().await,
            1 => pair.to_left.close().await,
            2 => drop(join(pair.to_right.close(), pair.to_left.close()).await),
            _ => handle.inject(Fault::LoseLink(pair.left.node.id(), pair.right.node.id())),
        }
        handle.runtime().sleep(SETTLED).await;
        // Retired if the lender's side is over; in any case not allocated again.
        let (used, retired, leaked) = figures(&pair.left.source);
        assert_eq!((used, leaked), (KEPT, 0));
        assert!(retired == KEPT, "{retired} bytes are retired");
        for transfer in 2..10 {
            drop(pair.left.filled(LENGTH, transfer).await);
        }
        handle.verify(1, &view);
        drop(view);
        handle.runtime().sleep(SETTLED).await;
        assert_eq!(figures(&pair.left.source), (0, 0, 0));
    });
    assert!(marks.contains_key("retired lease released"));
}

#[test]
fn s1_loans_that_never_arrive_come_back() {
    let marks = on_seeds(60, 64, async |handle| {
        let pair = pair(&handle, handle.swarm().depths).await;
        let lends: Vec<_> = join_all((0..3).map(|transfer| pair.left.filled(LENGTH, transfer))).await;
        let lends: Vec<_> = lends.into_iter().map(|bytes| pair.to_right.lend(bytes, Immediate(1))).collect();
        handle.inject(Fault::LoseLink(pair.left.node.id(), pair.right.node.id()));
        for lend in lends {
            drop(lend.await);
        }
        let mut views = Vec::new();
        while let Ok(Arrival::Loan { buffer, .. }) = pair.to_left.next_arrival().await {
            handle.verify(views.len() as u64, &buffer);
            views.push(buffer);
        }
        drop(views);
        handle.runtime().sleep(SETTLED).await;
        assert_eq!(figures(&pair.left.source), (0, 0, 0));
    });
    assert!(marks.contains_key("lease retired"));
}

#[test]
fn s1_arrivals_that_nobody_took_give_their_leases_back_with_the_queue_pair() {
    on_seeds(20, 64, async |handle| {
        let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
        to_right.lend(left.filled(LENGTH, 1).await, Immediate(1)).await.unwrap();
        to_left.close().await;
        drop((to_left, to_right));
        handle.runtime().sleep(SETTLED).await;
        assert_eq!(figures(&left.source), (0, 0, 0));
        drop(right);
    });
}

#[test]
fn d_peer_sigkill_views_of_a_dead_lender_stay_whole() {
    let marks = on_seeds(60, 64, async |handle| {
        let pair = pair(&handle, handle.swarm().depths).await;
        let mut views = vec![viewed(&pair, 0).await];
        let more = pair.left.filled(LENGTH, 1).await;
        drop(pair.to_right.lend(more, Immediate(1)));
        pair.left.node.crash();
        while let Ok(Arrival::Loan { buffer, .. }) = pair.to_left.next_arrival().await {
            views.push(buffer);
        }
        pair.to_left.close().await;
        // Another life at the same address.
        let again = Side::new(&handle, "left:1");
        let (to_right, to_left) = connect(&again, &pair.right, handle.swarm().depths).await;
        let lent = join(to_right.lend(again.filled(LENGTH, 7).await, Immediate(1)), loan(&to_left)).await;
        lent.0.unwrap();
        handle.verify(7, &lent.1);
        for (transfer, view) in views.iter().enumerate() {
            handle.verify(transfer as u64, view);
        }
    });
    assert!(marks.contains_key("loan of a dead lender"));
}

#[test]
fn d_peer_sigkill_leases_of_a_dead_holder_come_back() {
    let marks = on_seeds(40, 3, async |handle| {
        let pair = pair(&handle, handle.swarm().depths).await;
        // Held by the process itself: a view that is dropped when it dies.
        let (view, right) = (viewed(&pair, 1).await, pair.right.node.clone());
        right.spawn("holder", async move {
            futures::future::pending::<()>().await;
            drop(view);
        });
        handle.runtime().sleep(Duration::from_micros(10)).await;
        drop(pair.to_right.lend(pair.left.filled(LENGTH, 2).await, Immediate(1)));
        assert!(figures(&pair.left.source).0 > 0);
        right.crash();
        handle.runtime().sleep(SETTLED).await;
        assert_eq!(figures(&pair.left.source), (0, 0, 0));
    });
    assert!(marks.contains_key("leases of a dead holder"));
}

#[test]
fn d_peer_sigstop_a_stopped_lender_gets_its_memory_back_when_it_goes_on() {
    on_seeds(20, 64, async |handle| {
        let pair = pair(&handle, handle.swarm().depths).await;
        let view = viewed(&pair, 1).await;
        handle.inject(Fault::Freeze(pair.left.node.id()));
        drop(view);
        handle.runtime().sleep(SETTLED).await;
        handle.inject(Fault::Thaw(pair.left.node.id()));
        handle.runtime().sleep(SETTLED).await;
        assert_eq!(figures(&pair.left.source), (0, 0, 0));
    });
}

#[derive(Debug)]
struct Exposing {
    domain: Arc<dyn Domain>,
}

impl BlockVisitor for Exposing {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        self.domain.register(block, Access::READABLE).map(drop).map_err(|error| VisitError(Arc::new(error)))
    }
}

/// A pool of `side` that its peers may read from.
fn readable(side: &Side) -> Pool {
    let config = PoolConfig { block_bytes: 64 << 10, ..PoolConfig::new("exposed") };
    let pool = side.node.pool(config).unwrap();
    pool.add_visitor(Arc::new(Exposing { domain: side.domain.clone() })).unwrap();
    pool
}

/// The content of `transfer`, and what a peer must know to read it.
fn exposed(side: &Side, pool: &Pool, transfer: u64) -> (Buf, RemoteRegion, RemoteRange) {
    let mut bytes = pool.try_alloc(LENGTH).unwrap();
    side.handle.pattern().fill(transfer, &mut bytes);
    let bytes = bytes.freeze();
    let region = side.domain.register(bytes.block().unwrap(), Access::READABLE).unwrap();
    let (id, generation) = (region.region, region.generation);
    let range = RemoteRange { region: id, generation, offset: bytes.offset() as u64, length: LENGTH as u64 };
    (bytes, region, range)
}

#[test]
fn d_peer_sigkill_and_link_drop_a_read_ends_whole_or_with_an_error_and_its_memory_is_back() {
    let marks = on_seeds(80, 64, async |handle| {
        let pair = pair(&handle, handle.swarm().depths).await;
        let pool = readable(&pair.right);
        let (bytes, region, range) = exposed(&pair.right, &pool, 5);
        let exposure = bytes.expose();
        pair.to_right.add_remote_region(region);
        let mut reads = Vec::new();
        for _ in 0..3 {
            reads.push(pair.to_right.read(range, pair.left.receive.alloc(LENGTH).await.unwrap()));
        }
        let mut rng = Rng::new(handle.seed());
        handle.runtime().sleep(rng.duration(Duration::from_millis(3))).await;
        match rng.below(3) {
            0 => pair.right.node.crash(),
            1 => handle.inject(Fault::LoseLink(pair.left.node.id(), pair.right.node.id())),
            // No longer exposed: reads that the target has not checked before are refused.
            _ => {
                let mut allowed = Allowed::default();
                allowed.refusals = true;
                handle.allow(allowed);
                drop((bytes, exposure));
            }
        }
        for read in reads {
            if let Ok(read) = read.await {
                handle.verify(5, &read);
            }
        }
        assert_eq!(figures(&pair.left.receive), (0, 0, 0));
        pair.to_right.close().await;
    });
    assert!(marks.contains_key("read completed") && marks.contains_key("connection lost"));
}

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";

async fn start(handle: &Handle, name: &str, address: &str, mode: Mode) -> Worker {
    let node = handle.start_node(address).unwrap();
    builder(&node, name).flow(|flow| flow.mode = mode).start().await.unwrap()
}

#[test]
fn copies_of_a_viewed_tensor_are_none() {
    for seed in 0..20 {
        let swarm = Swarm { leases_max: 64, ..Swarm::draw(&mut Rng::new(seed).fork(7)) };
        let world = World::with_swarm(seed, swarm);
        world.replayed_by("loans");
        world.keep_events(usize::MAX);
        let handle = world.handle();
        let scenario = async {
            let server = start(&handle, SERVER, "server:1", Mode::default()).await;
            let client = start(&handle, CLIENT, "client:1", Mode::default()).await;
            let peer = client.peer_at("server:1").await.unwrap();
            server
                .publish("x", Tensor::from_values(server.pool(), &[4000], &[7_u32; 4000]).unwrap())
                .unwrap();
            // Contents that land in the memory of tensors; messages have a hash.
            let landed = || {
                let events = handle.events().into_iter().filter_map(|(_, event)| match event {
                    Event::Landed { content: 0, length, .. } => Some(length),
                    _ => None,
                });
                events.sum::<usize>()
            };
            for _ in 0..3 {
                let view = peer.fetch("x").sharing(Sharing::View).await.unwrap();
                assert!(view.buf().is_foreign());
                assert_eq!(view.values::<u32>().unwrap(), [7; 4000]);
            }
            assert_eq!((landed(), client.receive_memory().used_bytes), (0, 0));
            let copy = peer.fetch("x").sharing(Sharing::Copy).await.unwrap();
            assert!(!copy.buf().is_foreign());
            assert_eq!(landed(), 16_000);
            drop(copy);
            join(client.shutdown(), server.shutdown()).await;
            handle.runtime().sleep(SETTLED).await;
            server.withdraw("x");
            assert_eq!(figures(server.pool()), (0, 0, 0));
        };
        world.run(scenario).unwrap();
        world.finish().unwrap();
    }
}

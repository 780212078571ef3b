//! Processes that stop, run late, or whose calls fail; half-open connections; queues of the least depth.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{collections::BTreeSet, time::Duration};

use futures::future::join;
use tensorwire_fabric::{FabricError, Immediate, QueuePairConfig, RemoteRange, Runtime, timeout};
use tensorwire_memory::{GrantEnd, copy::CopyReason};
use tensorwire_rendezvous::{ClusterSpec, Tensor, Worker, WorkerBuilder};
use tensorwire_sim::{
    Call, Event, Fault, Handle, Node, OperationResult, Rng, Summary, Swarm, Violation, World,
};

use crate::common::{Pair, Side, builder, connect, immediate, pair};
use crate::join_all::join_all;

/// Runs `scenario` under each of `seeds` seeds.
fn on_seeds(seeds: u64, scenario: impl AsyncFn(Handle)) -> Vec<Summary> {
    let run = |seed| {
        let world = World::new(seed);
        world.replayed_by("stops");
        world.run(scenario(world.handle())).unwrap();
        world.finish().unwrap()
    };
    (0..seeds).map(run).collect()
}

fn reached(summaries: &[Summary], mark: &str) -> bool {
    summaries.iter().any(|summary| summary.marks.contains_key(mark))
}

#[test]
fn d_peer_sigstop_holds_its_own_transfers_up_and_nobody_elses() {
    let summaries = on_seeds(20, async |handle| {
        let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
        let third = Side::new(&handle, "third:1");
        let (to_third, from_left) = connect(&left, &third, handle.swarm().depths).await;
        handle.inject(Fault::Freeze(right.node.id()));
        let arrived = right.node.run("receiver", {
            let (right, to_right) = (right.clone(), to_right.clone());
            async move {
                let lent = right.lend_to(&to_right, 3000).await;
                let range = lent.range;
                (lent, range)
            }
        });
        // The other peer receives everything while the first one is stopped.
        for transfer in 0..20 {
            let lent = third.lend_to(&to_third, 1000).await;
            let write = to_third.write_imm(left.filled(1000, transfer).await, lent.range, Immediate(0));
            let (written, arrival) = join(write, from_left.next_arrival()).await;
            written.unwrap();
            arrival.unwrap();
            handle.verify(transfer, &lent.take());
        }
        handle.inject(Fault::Thaw(right.node.id()));
        let (lent, range) = arrived.await.unwrap();
        let write = to_right.write_imm(left.filled(3000, 99).await, range, Immediate(1));
        let (written, arrival) = join(write, to_left.next_arrival()).await;
        written.unwrap();
        assert_eq!(immediate(arrival.unwrap()), (1, 3000));
        handle.verify(99, &lent.take());
    });
    assert!(reached(&summaries, "process stopped") && reached(&summaries, "process stopped, its NIC not"));
}

#[test]
fn a_stopped_process_takes_no_step() {
    let _ = on_seeds(10, async |handle| {
        let node = handle.start_node("a:1").unwrap();
        let runtime = node.runtime();
        let slept = node.run("sleeper", async move {
            runtime.sleep(Duration::from_millis(1)).await;
            runtime.now()
        });
        let stopped = Duration::from_secs(5);
        handle.inject(Fault::Pause(node.id(), stopped));
        assert!(slept.await.unwrap() >= stopped);
    });
}

#[test]
fn s1_a_write_under_way_to_a_stopped_process_lands_whole_or_not_at_all() {
    let _ = on_seeds(30, async |handle| {
        let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
        let lent = right.lend_to(&to_right, 5000).await;
        let write = to_right.write_imm(left.filled(5000, 1).await, lent.range, Immediate(1));
        handle.inject(Fault::Freeze(right.node.id()));
        handle.runtime().sleep(Duration::from_millis(30)).await;
        // The writer closes its queue pair, and fills the source with other bytes.
        to_right.close().await;
        drop(write.await);
        let again = left.filled(5000, 2).await;
        handle.inject(Fault::Thaw(right.node.id()));
        match to_left.next_arrival().await {
            Ok(arrival) => {
                assert_eq!(immediate(arrival), (1, 5000));
                handle.verify(1, &lent.take());
            }
            Err(_) => {
                to_left.close().await;
                drop(lent.granted.end(GrantEnd::QueuePairDrained).unwrap());
            }
        }
        drop(again);
    });
}

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";

fn known(node: &Node, name: &str) -> WorkerBuilder {
    let cluster = ClusterSpec::new().worker(SERVER, "server:1").worker(CLIENT, "client:1");
    builder(node, name).cluster(cluster).flow(|flow| {
        flow.requests_max = 4;
        flow.contents_max = 2;
        flow.ring_bytes = 8 << 10;
    })
}

/// Starts a worker that publishes `x`; a call that fails is repeated once.
async fn start(node: &Node, name: &str) -> Worker {
    loop {
        let Ok(worker) = known(node, name).start().await else { continue };
        loop {
            if let Ok(tensor) = Tensor::from_values(worker.pool(), &[4000], &[7u32; 4000]) {
                worker.publish("x", tensor).unwrap();
                return worker;
            }
        }
    }
}

/// Fetches `x` of `peer` in at most `attempts` attempts; returns how many failed before the one that succeeded.
async fn fetches(worker: &Worker, node: &Node, peer: (&str, &str), attempts: u32) -> u32 {
    let (name, address) = peer;
    for failed in 0..attempts {
        let operation = node.begin(Some(address), format!("fetch from {name}"));
        let peer = worker.peer(name).unwrap();
        match peer.fetch("x").await {
            Ok(tensor) => {
                assert_eq!(tensor.values::<u32>().unwrap(), [7; 4000]);
                operation.end(&OperationResult::Done);
                return failed;
            }
            Err(error) => {
                operation.end_because(&OperationResult::PeerLost, &error);
                node.runtime().sleep(Duration::from_millis(300)).await;
            }
        }
    }
    panic!("no fetch from {name} in {attempts} attempts");
}

struct Two {
    server_node: Node,
    client_node: Node,
    server: Worker,
    client: Worker,
}

impl Two {
    async fn start(handle: &Handle) -> Self {
        let (server_node, client_node) =
            (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
        let (server, client) = (start(&server_node, SERVER).await, start(&client_node, CLIENT).await);
        Self { server_node, client_node, server, client }
    }

    /// Both fetch from each other at once.
    async fn fetch_both_ways(&self, attempts: u32) -> u32 {
        let to_server = fetches(&self.client, &self.client_node, (SERVER, "server:1"), attempts);
        let to_client = fetches(&self.server, &self.server_node, (CLIENT, "client:1"), attempts);
        let (one, other) = join(to_server, to_client).await;
        one + other
    }

    /// Ends both, and checks that no resource is left.
    async fn end(self, handle: &Handle) {
        join(self.client.shutdown(), self.server.shutdown()).await;
        handle.runtime().sleep(Duration::from_secs(30)).await;
        for worker in [&self.server, &self.client] {
            let memory = worker.receive_memory();
            assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0), "{}", worker.name());
            worker.withdraw("x");
            assert_eq!(worker.pool().stats().used_bytes, 0, "{}", worker.name());
        }
    }
}

#[test]
fn d_peer_sigstop_is_noticed_and_the_peer_used_again_when_it_goes_on() {
    let _ = on_seeds(10, async |handle| {
        let two = Two::start(&handle).await;
        two.fetch_both_ways(1).await;
        handle.inject(Fault::Freeze(two.server_node.id()));
        let began = handle.now();
        let operation = two.client_node.begin(Some("server:1"), "fetch from a stopped worker");
        let peer = two.client.peer(SERVER).unwrap();
        let fetched = peer.fetch("x").await;
        match &fetched {
            // The fabric or the tasks of the peer may have answered before the stop.
            Ok(_) => operation.end(&OperationResult::Done),
            Err(error) => operation.end_because(&OperationResult::PeerLost, error),
        }
        assert!(handle.now() - began <= Duration::from_secs(61), "{:?}", handle.now() - began);
        handle.inject(Fault::Thaw(two.server_node.id()));
        fetches(&two.client, &two.client_node, (SERVER, "server:1"), 5).await;
        two.end(&handle).await;
    });
}

#[test]
fn d_half_open_is_closed_by_the_end_that_has_it_and_a_new_connection_works() {
    let summaries = on_seeds(30, async |handle| {
        let two = Two::start(&handle).await;
        handle.inject(Fault::HalfOpen(two.server_node.id(), two.client_node.id()));
        two.fetch_both_ways(10).await;
        handle.heal();
        two.fetch_both_ways(10).await;
        two.end(&handle).await;
    });
    assert!(reached(&summaries, "half-open"));
}

#[test]
fn d_both_ends_dial_and_at_most_two_connections_come_of_it() {
    let mut crossed = 0;
    for seed in 0..30 {
        let world = World::new(seed);
        world.replayed_by("stops");
        world.keep_events(usize::MAX);
        let handle = world.handle();
        let scenario = async {
            let two = Two::start(&handle).await;
            assert_eq!(two.fetch_both_ways(1).await, 0);
            let count = |wanted: fn(&Event) -> bool| {
                handle.events().iter().filter(|(_, event)| wanted(event)).count()
            };
            assert!(count(|event| matches!(event, Event::Connected { .. })) <= 4);
            assert!(count(|event| matches!(event, Event::Dialled { .. })) <= 2);
            two.end(&handle).await;
        };
        world.run(scenario).unwrap();
        crossed += u32::from(world.finish().unwrap().marks.contains_key("both sides dialled"));
    }
    assert!(crossed > 0);
}

/// Runs whole workers of which the call after `successes` others fails. False if there are fewer calls.
fn with_failing_call(seed: u64, call: Call, successes: u64, at_server: bool) -> bool {
    let world = World::new(seed);
    world.replayed_by("stops");
    let handle = world.handle();
    let scenario = async {
        let (server_node, client_node) =
            (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
        let victim = if at_server { server_node.id() } else { client_node.id() };
        handle.fail_call(victim, call, successes);
        let (server, client) = (start(&server_node, SERVER).await, start(&client_node, CLIENT).await);
        let two = Two { server_node, client_node, server, client };
        two.fetch_both_ways(5).await;
        two.fetch_both_ways(5).await;
        let happened = !handle.has_failure_ahead(victim);
        handle.heal();
        assert_eq!(two.fetch_both_ways(5).await, 0, "{call:?} {successes}: it does not work again");
        two.end(&handle).await;
        happened
    };
    let happened = world.run(scenario).unwrap();
    world.finish().unwrap();
    happened
}

/// Makes the first, second, … call fail, until there are no more.
fn every_call_fails_once(call: Call, least: u64) {
    for (seed, at_server) in [(1, true), (2, false), (3, true), (4, false)] {
        let failed = (0..1000).find(|successes| !with_failing_call(seed, call, *successes, at_server));
        assert!(failed.unwrap() >= least, "only {failed:?} calls failed");
    }
}

#[test]
fn d_memory_exhaustion_of_every_registration_is_an_error_and_works_again() {
    every_call_fails_once(Call::Register, 3);
}

#[test]
fn d_memory_exhaustion_of_every_queue_pair_is_an_error_and_works_again() {
    every_call_fails_once(Call::Prepare, 1);
}

#[test]
fn d_memory_exhaustion_of_every_post_is_an_error_and_works_again() {
    every_call_fails_once(Call::Post, 5);
}

#[test]
fn d_memory_exhaustion_of_every_allocation_is_an_error_and_works_again() {
    every_call_fails_once(Call::Allocate, 5);
}

/// One-byte pieces, the smallest queues, and nothing aligned.
fn tiny() -> Swarm {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 4 };
    Swarm {
        pieces_max: 64,
        tiny_pieces: true,
        direct_of_256: 64,
        depths,
        piece_bytes_max: 13,
        ..Swarm::calm()
    }
}

#[test]
fn s2_writes_in_pieces_of_one_byte_at_odd_places_touch_their_range_alone() {
    for seed in 0..20 {
        let world = World::with_swarm(seed, tiny());
        let handle = world.handle();
        let scenario = async {
            let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
            let mut rng = Rng::new(seed);
            for transfer in 0..30 {
                let lent = right.lend_to(&to_right, 100).await;
                let before = left.filled(100, 1000 + transfer).await;
                let fill = to_right.write_imm(before, lent.range, Immediate(0));
                // Nine parts of at most 13 bytes do not fit into four slots.
                assert!(matches!(fill.await, Err(FabricError::TooManyPieces { pieces: 8, depth: 4 })));
                let (first, length) = (rng.below(40), rng.below(50));
                let source = left.filled(100, transfer).await.slice(first..first + length).unwrap();
                let to = 1 + rng.below(49);
                let range = RemoteRange {
                    offset: lent.range.offset + to as u64,
                    length: length as u64,
                    ..lent.range
                };
                let mut expected = vec![0; 100];
                lent.granted.read_at(0, &mut expected, CopyReason::Local).unwrap();
                expected[to..to + length].copy_from_slice(&source);
                let write = to_right.write_imm(source, range, Immediate(1));
                let (written, arrival) = join(write, to_left.next_arrival()).await;
                written.unwrap();
                assert_eq!(immediate(arrival.unwrap()), (1, length as u64));
                assert_eq!(lent.take()[..], expected);
            }
        };
        world.run(scenario).unwrap();
    }
}

#[test]
fn a_logical_write_is_split_at_the_limit_and_stays_one_arrival() {
    const LIMIT: u64 = 1000;
    for length in [LIMIT - 1, LIMIT, LIMIT + 1, 64 * LIMIT] {
        let depths = QueuePairConfig { send_depth: 64, receive_depth: 4 };
        let swarm =
            Swarm { depths, piece_bytes_max: LIMIT, pieces_max: 3, direct_of_256: 0, ..Swarm::calm() };
        let world = World::with_swarm(length, swarm);
        let handle = world.handle();
        let scenario = async {
            let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
            let lent = right.lend_to(&to_right, length as usize).await;
            let write = to_right.write_imm(left.filled(length as usize, 5).await, lent.range, Immediate(9));
            let (written, arrival) = join(write, to_left.next_arrival()).await;
            written.unwrap();
            assert_eq!(immediate(arrival.unwrap()), (9, length));
            handle.verify(5, &lent.take());
        };
        world.run(scenario).unwrap();
        let parted = world.finish().unwrap().marks.contains_key("write of many parts");
        assert_eq!(parted, length > LIMIT, "{length}");
    }
}

#[test]
fn s2_a_flipped_bit_is_found_by_whoever_checks() {
    let world = World::with_swarm(1, Swarm { flips_of_65536: 1 << 16, ..Swarm::calm() });
    let handle = world.handle();
    let scenario = async {
        let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
        let lent = right.lend_to(&to_right, 1000).await;
        let write = to_right.write_imm(left.filled(1000, 5).await, lent.range, Immediate(9));
        let (written, arrival) = join(write, to_left.next_arrival()).await;
        written.unwrap();
        arrival.unwrap();
        handle.verify(5, &lent.take());
    };
    let failure = world.run(scenario).unwrap_err();
    assert!(matches!(failure.violation, Violation::Data(_)), "{failure}");
}

#[test]
fn a_slow_process_ends_what_it_does_all_the_same() {
    let summaries = on_seeds(10, async |handle| {
        let two = Two::start(&handle).await;
        handle.inject(Fault::Slow(two.server_node.id()));
        assert_eq!(two.fetch_both_ways(1).await, 0);
        let rounds = (0..20).map(|_| two.fetch_both_ways(1));
        assert_eq!(join_all(rounds).await.into_iter().sum::<u32>(), 0);
        two.end(&handle).await;
    });
    assert!(reached(&summaries, "process slow"));
}

#[test]
fn deadlines_may_pass_while_a_process_is_stopped() {
    let seen: BTreeSet<bool> = (0..4)
        .map(|seed| {
            let world = World::new(seed);
            let handle = world.handle();
            let scenario = async {
                let pair = pair(&handle, handle.swarm().depths).await;
                if seed % 2 == 0 {
                    handle.inject(Fault::Freeze(pair.left.node.id()));
                }
                let operation = pair.right.node.begin(Some("left:1"), "an arrival that nobody sends");
                let runtime = pair.right.node.runtime();
                let arrival =
                    timeout(runtime.as_ref(), Duration::from_secs(60), pair.to_left.next_arrival()).await;
                assert!(arrival.is_err());
                operation.end(&OperationResult::Deadline);
            };
            world.run(scenario).is_ok()
        })
        .collect();
    assert_eq!(seen.len(), 2, "a deadline passes exactly when a process is stopped");
}

//! The simulator's own rules: equal seeds give equal runs, and each oracle finds its kind of mistake.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{collections::BTreeSet, time::Duration};

use futures::future::join;
use tensorwire_fabric::{FabricError, Immediate, PeerViolation, QueuePairConfig, Runtime, timeout};
use tensorwire_memory::GrantEnd;
use tensorwire_sim::{
    Allowed, Completions, Event, Failure, Handle, OperationResult, Rng, Summary, Swarm, Violation, World,
};

use crate::common::{Lent, Pair, connect, immediate, pair};
use crate::join_all::join_all;

/// Sends `count` transfers of odd lengths from left to right and checks each.
async fn stream(handle: Handle, count: u64) {
    let depths = handle.swarm().depths;
    let Pair { left, right, to_right, to_left } = pair(&handle, depths).await;
    let peer = right.node.address().to_owned();
    for transfer in 0..count {
        let operation = left.node.begin(Some(&peer), format!("transfer {transfer}"));
        let length = [1, 7, 64, 1000, 9001][transfer as usize % 5];
        let lent = right.lend_to(&to_right, length).await;
        let source = left.filled(length, transfer).await;
        let value = transfer as u32;
        let write = to_right.write_imm(source, lent.range, Immediate(value));
        let (written, arrival) = join(write, to_left.next_arrival()).await;
        written.unwrap();
        assert_eq!(immediate(arrival.unwrap()), (value, length as u64));
        handle.verify(transfer, &lent.take());
        operation.end(&OperationResult::Done);
    }
    join(to_right.close(), to_left.close()).await;
}

fn run_stream(seed: u64, count: u64) -> Result<Summary, Box<Failure>> {
    let world = World::new(seed);
    world.run(stream(world.handle(), count))?;
    world.finish()
}

#[test]
fn equal_seeds_give_equal_hashes_and_other_seeds_differ() {
    let mut hashes = BTreeSet::new();
    for seed in 0..30 {
        let (first, second) = (run_stream(seed, 20).unwrap(), run_stream(seed, 20).unwrap());
        assert_eq!(first, second, "seed {seed}");
        assert_eq!((first.operations_done, first.operations_failed), (20, 0));
        hashes.insert(first.hash);
    }
    assert_eq!(hashes.len(), 30);
}

#[test]
fn a_failing_seed_fails_again_with_the_same_hash_and_events() {
    let fail = || {
        let world = World::new(11);
        let handle = world.handle();
        let finding = async move {
            stream(handle.clone(), 3).await;
            handle.fail(Violation::Scenario("found".into()));
        };
        world.run(finding).unwrap_err()
    };
    let (first, second) = (fail(), fail());
    assert_eq!((first.hash, first.events, &first.tail), (second.hash, second.events, &second.tail));
    let text = first.to_string();
    assert!(text.starts_with("found\n  seed 11, event hash"), "{text}");
    assert!(text.contains("SIM_SEED=11 cargo test -p tensorwire-sim"), "{text}");
    assert!(text.contains("Delivered"), "{text}");
}

fn wild() -> Swarm {
    let depths = QueuePairConfig { send_depth: 16, receive_depth: 16 };
    Swarm { pieces_max: 16, direct_of_256: 64, depths, ..Swarm::calm() }
}

/// Posts eight writes at once and returns the events of the world.
fn eight_writes(seed: u64, swarm: Swarm) -> Vec<Event> {
    let world = World::with_swarm(seed, swarm);
    world.keep_events(usize::MAX);
    let handle = world.handle();
    let scenario = async move {
        let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
        let mut lent: Vec<Lent> = Vec::new();
        let mut writes = Vec::new();
        for transfer in 0..8 {
            let there = right.lend_to(&to_right, 2000).await;
            let source = left.filled(2000, transfer).await;
            writes.push(to_right.write_imm(source, there.range, Immediate(transfer as u32)));
            lent.push(there);
        }
        let arrivals = async {
            for (transfer, lent) in lent.into_iter().enumerate() {
                let arrival = to_left.next_arrival().await.unwrap();
                assert_eq!(immediate(arrival), (transfer as u32, 2000));
                handle.verify(transfer as u64, &lent.take());
            }
        };
        let (written, ()) = join(join_all(writes), arrivals).await;
        written.into_iter().for_each(|result| result.unwrap());
        handle.events().into_iter().map(|(_, event)| event).collect()
    };
    world.run(scenario).unwrap()
}

#[test]
fn pieces_land_in_any_order_and_between_those_of_other_writes() {
    let (mut out_of_order, mut interleaved) = (0, 0);
    for seed in 0..20 {
        let events = eight_writes(seed, wild());
        let landed: Vec<(u64, usize)> = events.iter().filter_map(landing).collect();
        out_of_order += landed.windows(2).filter(|w| w[0].0 == w[1].0 && w[0].1 > w[1].1).count();
        interleaved += landed.windows(2).filter(|w| w[0].0 > w[1].0).count();
    }
    assert!(out_of_order > 0 && interleaved > 0, "{out_of_order} {interleaved}");
}

fn landing(event: &Event) -> Option<(u64, usize)> {
    match event {
        Event::Landed { write, offset, .. } => Some((*write, *offset)),
        _ => None,
    }
}

#[test]
fn an_immediate_comes_in_order_after_every_piece_of_its_write_and_of_earlier_ones() {
    for seed in 0..20 {
        let events = eight_writes(seed, wild());
        let mut landed = [0; 8];
        let mut next = 0;
        for event in events {
            match event {
                Event::Landed { write, length, .. } => landed[write as usize] += length,
                Event::Delivered { write, .. } => {
                    assert_eq!(write, next);
                    assert!(landed[..=write as usize].iter().all(|bytes| *bytes == 2000));
                    next += 1;
                }
                _ => {}
            }
        }
        assert_eq!(next, 8);
    }
}

/// For each write: whether it completed before it was delivered.
fn completed_first(seed: u64, completions: Completions) -> Vec<bool> {
    let events = eight_writes(seed, Swarm { completions, ..wild() });
    let place = |wanted: &dyn Fn(&Event) -> bool| events.iter().position(wanted).unwrap();
    let mut last = 0;
    (0..8)
        .map(|number| {
            let completed =
                place(&|e| matches!(e, Event::Completed { write, ok: true, .. } if *write == number));
            assert!(completed >= last, "completions come in posting order");
            last = completed;
            completed < place(&|event| matches!(event, Event::Delivered { write, .. } if *write == number))
        })
        .collect()
}

#[test]
fn completions_come_in_order_before_or_after_the_arrival_as_the_fabric_may() {
    let nic: Vec<bool> = (0..20).flat_map(|seed| completed_first(seed, Completions::AfterDelivery)).collect();
    assert!(nic.iter().all(|before| !before));
    let socket: Vec<bool> =
        (0..20).flat_map(|seed| completed_first(seed, Completions::AfterReading)).collect();
    assert!(socket.iter().any(|before| *before) && socket.iter().any(|before| !before));
}

#[test]
fn an_immediate_without_a_receive_fails_the_run() {
    let found = (0..5).all(|seed| {
        let world = World::new(seed);
        let handle = world.handle();
        let depths = QueuePairConfig { send_depth: 8, receive_depth: 4 };
        let scenario = async move {
            let pair = pair(&handle, depths).await;
            let writes = (0..5).map(|value| pair.to_right.notify(Immediate(value)));
            join_all(writes.collect::<Vec<_>>()).await;
            // Completions may be reported before the arrivals.
            handle.runtime().sleep(Duration::from_secs(600)).await;
        };
        let failure = world.run(scenario).unwrap_err();
        matches!(failure.violation, Violation::ReceiverNotReady(_))
    });
    assert!(found);
}

#[test]
fn an_allowed_missing_receive_fails_both_ends_and_nothing_else() {
    for seed in 0..10 {
        let world = World::new(seed);
        let handle = world.handle();
        handle.allow(allowed(|allowed| allowed.receiver_not_ready = true));
        let depths = QueuePairConfig { send_depth: 8, receive_depth: 4 };
        let scenario = async move {
            let pair = pair(&handle, depths).await;
            let writes: Vec<_> = (0..5).map(|value| pair.to_right.notify(Immediate(value))).collect();
            for value in 0..4 {
                // All five arrive before the first is taken.
                while pair.to_left.failure().is_none() {
                    handle.runtime().sleep(Duration::from_micros(100)).await;
                }
                assert_eq!(immediate(pair.to_left.next_arrival().await.unwrap()), (value, 0));
            }
            drop(writes);
            let ends = join(pair.to_left.next_arrival(), pair.to_right.next_arrival()).await;
            for end in [ends.0, ends.1] {
                assert!(matches!(end, Err(FabricError::ReceiverNotReady { depth: 4, .. })), "{end:?}");
            }
        };
        world.run(scenario).unwrap();
    }
}

fn allowed(change: impl Fn(&mut Allowed)) -> Allowed {
    let mut allowed = Allowed::default();
    change(&mut allowed);
    allowed
}

#[test]
fn s1_a_write_to_an_ended_grant_fails_the_run() {
    for seed in 0..20 {
        let world = World::new(seed);
        let handle = world.handle();
        let scenario = async move {
            let pair = pair(&handle, handle.swarm().depths).await;
            let lent = pair.right.lend_to(&pair.to_right, 1000).await;
            let range = lent.range;
            drop(lent.granted.end(GrantEnd::NeverSent).unwrap());
            let source = pair.left.filled(1000, 0).await;
            let _ = pair.to_right.write_imm(source, range, Immediate(0)).await;
            pair.to_left.next_arrival().await
        };
        let failure = world.run(scenario).unwrap_err();
        assert!(matches!(failure.violation, Violation::Memory(_)), "{failure}");
    }
}

#[test]
fn s1_a_grant_that_ends_before_its_content_came_fails_the_run_at_once() {
    for seed in 0..20 {
        let world = World::new(seed);
        let handle = world.handle();
        let scenario = async move {
            let pair = pair(&handle, handle.swarm().depths).await;
            let lent = pair.right.lend_to(&pair.to_right, 1000).await;
            let source = pair.left.filled(1000, 0).await;
            let write = pair.to_right.write_imm(source, lent.range, Immediate(0));
            // The mistake: there is no evidence that the content has arrived.
            drop(lent.take());
            let _ = write.await;
        };
        let failure = world.run(scenario).unwrap_err();
        assert!(matches!(&failure.violation, Violation::Memory(text) if text.contains("can still land")));
    }
}

#[test]
fn s1_a_write_for_an_earlier_grant_of_the_same_bytes_fails_the_run() {
    let world = World::with_swarm(1, Swarm::calm());
    let handle = world.handle();
    let scenario = async move {
        let pair = pair(&handle, handle.swarm().depths).await;
        let lent = pair.right.lend_to(&pair.to_right, 1000).await;
        let range = lent.range;
        let source = pair.left.filled(1000, 0).await;
        drop(lent.granted.end(GrantEnd::NeverSent).unwrap());
        // Posted while nothing is granted; the bytes are granted again, for something else, before it lands.
        let write = pair.to_right.write_imm(source, range, Immediate(0));
        let again = pair.right.lend(1000).await;
        assert_eq!(again.range, range);
        let _ = write.await;
    };
    let failure = world.run(scenario).unwrap_err();
    assert!(matches!(&failure.violation, Violation::Memory(text) if text.contains("posted under Nothing")));
}

#[test]
fn an_allowed_refusal_touches_nothing_and_ends_that_connection_only() {
    for seed in 0..20 {
        let world = World::new(seed);
        let handle = world.handle();
        handle.allow(allowed(|allowed| allowed.refusals = true));
        let scenario = async move {
            let pair = pair(&handle, handle.swarm().depths).await;
            let (other_right, other_left) = connect(&pair.left, &pair.right, handle.swarm().depths).await;
            let lent = pair.right.lend_to(&pair.to_right, 1000).await;
            let mut range = lent.range;
            range.length = 1001;
            let bad = pair.to_right.write_imm(pair.left.filled(1001, 5).await, range, Immediate(0));
            let (written, end) = join(bad, pair.to_left.next_arrival()).await;
            // On a fabric that completes early the write itself may be Ok.
            if let Err(error) = written {
                let reason = PeerViolation::NotGranted;
                assert!(matches!(error, FabricError::RemoteRefused { reason: r, .. } if r == reason));
            }
            let expected = PeerViolation::NotGranted;
            assert!(
                matches!(end, Err(FabricError::PeerMisbehaved { violation, .. }) if violation == expected)
            );
            let refused = pair.to_right.next_arrival().await;
            assert!(matches!(refused, Err(FabricError::RemoteRefused { .. })), "{refused:?}");
            let good = pair.left.filled(1000, 6).await;
            other_right.add_remote_region(lent.region);
            let write = other_right.write_imm(good, lent.range, Immediate(1));
            let (written, arrival) = join(write, other_left.next_arrival()).await;
            written.unwrap();
            arrival.unwrap();
            handle.verify(6, &lent.take());
        };
        world.run(scenario).unwrap();
    }
}

#[test]
fn s2_a_wrong_content_fails_the_run() {
    let world = World::new(1);
    let handle = world.handle();
    let failure = world.run(async move { handle.verify(3, &handle.pattern().bytes(4, 100)) }).unwrap_err();
    assert!(
        matches!(&failure.violation, Violation::Data(text) if text.contains("of transfer 4")),
        "{failure}"
    );
}

#[test]
fn s3_an_operation_that_nobody_ends_fails_the_run() {
    let world = World::new(1);
    let handle = world.handle();
    let failure = world.run(async move {
        let node = handle.start_node("a:1").unwrap();
        drop(node.begin(None, "forgotten"));
    });
    assert!(matches!(failure.unwrap_err().violation, Violation::Operation(_)));

    let world = World::new(1);
    let handle = world.handle();
    let open = world.run(async move { handle.start_node("a:1").unwrap().begin(None, "left open") }).unwrap();
    let failure = world.finish().unwrap_err();
    assert!(matches!(failure.violation, Violation::Operation(_)));
    drop(open);
}

#[test]
fn an_operation_that_only_a_deadline_can_end_is_stuck() {
    let world = World::new(1);
    let handle = world.handle();
    let scenario = async move {
        let pair = pair(&handle, handle.swarm().depths).await;
        let operation = pair.right.node.begin(Some("left:1"), "receive that nobody answers");
        let runtime = pair.right.node.runtime();
        let _ = timeout(runtime.as_ref(), Duration::from_secs(60), pair.to_left.next_arrival()).await;
        operation.end(&OperationResult::Deadline);
    };
    let failure = world.run(scenario).unwrap_err();
    assert!(
        matches!(&failure.violation, Violation::Stuck(text) if text.contains("nobody answers")),
        "{failure}"
    );
}

#[test]
fn a_scenario_that_waits_for_nothing_is_stuck() {
    let failure = World::new(1).run(std::future::pending::<()>()).unwrap_err();
    assert!(matches!(failure.violation, Violation::Stuck(_)), "{failure}");
}

#[test]
fn a_short_sleep_is_progress_and_a_long_one_with_nothing_open_passes() {
    let world = World::new(1);
    let handle = world.handle();
    let scenario = async move {
        let node = handle.start_node("a:1").unwrap();
        let operation = node.begin(None, "backs off");
        node.runtime().sleep(Duration::from_millis(900)).await;
        operation.end(&OperationResult::Done);
        node.runtime().sleep(Duration::from_secs(3600)).await;
        handle.now()
    };
    assert!(world.run(scenario).unwrap() >= Duration::from_secs(3600));
    world.finish().unwrap();
}

#[test]
fn tasks_that_spin_do_not_hold_time_back() {
    let swarm = Swarm { latency_max: Duration::from_millis(5), jitter_of_256: 0, ..Swarm::calm() };
    let world = World::with_swarm(3, swarm);
    let handle = world.handle();
    let scenario = async move {
        let pair = pair(&handle, handle.swarm().depths).await;
        let writes: Vec<_> = (0..8).map(|value| pair.to_right.notify(Immediate(value))).collect();
        while pair.to_left.stats().arrivals < 8 {
            let mut yielded = false;
            std::future::poll_fn(|context| {
                context.waker().wake_by_ref();
                if std::mem::replace(&mut yielded, true) {
                    std::task::Poll::Ready(())
                } else {
                    std::task::Poll::Pending
                }
            })
            .await;
        }
        drop(writes);
    };
    world.run(scenario).unwrap();
}

#[test]
fn an_endless_run_is_found() {
    let world = World::with_swarm(1, Swarm { events_max: 10_000, ..Swarm::calm() });
    let spin = std::future::poll_fn(|context: &mut std::task::Context<'_>| {
        context.waker().wake_by_ref();
        std::task::Poll::<()>::Pending
    });
    assert!(matches!(world.run(spin).unwrap_err().violation, Violation::Endless(_)));
}

#[test]
fn a_panic_in_a_task_fails_the_run() {
    let world = World::new(1);
    let handle = world.handle();
    let scenario = async move {
        let node = handle.start_node("a:1").unwrap();
        node.spawn("panics", async { panic!("on purpose") });
        std::future::pending::<()>().await;
    };
    let failure = world.run(scenario).unwrap_err();
    assert_eq!(failure.violation, Violation::Panicked("on purpose".into()));
}

#[test]
fn swarm_draws_reach_every_kind_of_knob() {
    let drawn: Vec<Swarm> = (0..200).map(|seed| Swarm::draw(&mut Rng::new(seed))).collect();
    assert!(drawn.iter().any(|swarm| swarm.pieces_max == 1) && drawn.iter().any(|s| s.pieces_max == 16));
    assert!(drawn.iter().any(|swarm| swarm.depths.receive_depth == 4));
    let kinds: BTreeSet<String> = drawn.iter().map(|swarm| format!("{:?}", swarm.completions)).collect();
    assert_eq!(kinds.len(), 3);
}

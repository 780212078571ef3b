//! Injected faults: which nodes see them, which failures they explain, and what is safe after them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use futures::future::join;
use tensorwire_fabric::{FabricError, Immediate, LossCause};
use tensorwire_memory::GrantEnd;
use tensorwire_sim::{Failure, Fault, OperationResult, Summary, Violation, World};

use crate::common::{Pair, Side, connect, immediate, pair};

#[test]
fn an_unexplained_loss_fails_the_run_and_an_explained_one_does_not() {
    for crash in [false, true] {
        let world = World::new(5);
        let handle = world.handle();
        let scenario = async move {
            let pair = pair(&handle, handle.swarm().depths).await;
            let operation = pair.right.node.begin(Some("left:1"), "receive");
            if crash {
                pair.left.node.crash();
            } else {
                drop(pair.to_right);
            }
            assert!(matches!(pair.to_left.next_arrival().await, Err(FabricError::PeerLost { .. })));
            operation.end(&OperationResult::PeerLost);
        };
        let result = world.run(scenario);
        match crash {
            true => result.unwrap(),
            false => assert!(matches!(result.unwrap_err().violation, Violation::Unexplained(_))),
        }
    }
}

/// A transfer stream whose left end crashes after `crash_at` events. Returns how many transfers arrived, and how much
/// of the grant in progress had been written when the loss was noticed.
fn crash_run(seed: u64, crash_at: u64) -> Result<(u64, Summary), Box<Failure>> {
    let world = World::new(seed);
    let handle = world.handle();
    let scenario = async move {
        let Pair { left, right, to_right, to_left } = pair(&handle, handle.swarm().depths).await;
        handle.inject_at_event(crash_at, Fault::Crash(left.node.id()));
        let mut came = 0;
        loop {
            let operation = right.node.begin(Some("left:1"), format!("receive {came}"));
            let lent = right.lend_to(&to_right, 5000).await;
            let (sender, queue_pair, range) = (left.clone(), to_right.clone(), lent.range);
            left.node.spawn("writer", async move {
                let source = sender.filled(5000, came).await;
                let _ = queue_pair.write_imm(source, range, Immediate(came as u32)).await;
            });
            match to_left.next_arrival().await {
                Ok(arrival) => {
                    assert_eq!(immediate(arrival), (came as u32, 5000));
                    handle.verify(came, &lent.take());
                    operation.end(&OperationResult::Done);
                    came += 1;
                }
                Err(error) => {
                    let expected = [LossCause::EndOfFile, LossCause::Reset, LossCause::RetryExceeded];
                    assert!(
                        matches!(error, FabricError::PeerLost { cause, .. } if expected.contains(&cause))
                    );
                    operation.end(&OperationResult::PeerLost);
                    // Bytes may arrive until the queue pair is drained; then the memory is safe again.
                    to_left.close().await;
                    drop(lent.granted.end(GrantEnd::QueuePairDrained).unwrap());
                    return came;
                }
            }
        }
    };
    let came = world.run(scenario)?;
    Ok((came, world.finish()?))
}

#[test]
fn s3_a_crash_at_any_event_ends_every_operation_and_peers_see_the_loss() {
    let mut came_any = 0;
    for crash_at in 0..150 {
        let (came, summary) = crash_run(crash_at % 7, crash_at).unwrap();
        assert_eq!((summary.crashes, summary.leaks), (1, 0));
        assert_eq!(summary.operations_done, came);
        came_any += came;
    }
    assert!(came_any > 0);
}

#[test]
fn a_node_restarts_at_its_address_and_lives_apart_from_its_past() {
    for seed in 0..10 {
        let world = World::new(seed);
        let handle = world.handle();
        let scenario = async move {
            let before = pair(&handle, handle.swarm().depths).await;
            assert!(handle.start_node("left:1").is_err());
            before.left.node.crash();
            assert!(!before.left.node.is_alive());
            let again = Side::new(&handle, "left:1");
            assert_ne!(again.node.id(), before.left.node.id());
            let (to_right, to_left) = connect(&again, &before.right, handle.swarm().depths).await;
            let lent = before.right.lend_to(&to_right, 100).await;
            let write = to_right.write_imm(again.filled(100, 1).await, lent.range, Immediate(1));
            let (written, arrival) = join(write, to_left.next_arrival()).await;
            written.unwrap();
            arrival.unwrap();
            handle.verify(1, &lent.take());
            assert!(before.to_left.next_arrival().await.is_err());
        };
        world.run(scenario).unwrap();
        world.finish().unwrap();
    }
}

#[test]
fn a_lost_link_ends_both_ends_and_both_nodes_live() {
    for seed in 0..20 {
        let world = World::new(seed);
        let handle = world.handle();
        let scenario = async move {
            let pair = pair(&handle, handle.swarm().depths).await;
            let lent = pair.right.lend_to(&pair.to_right, 5000).await;
            let write = pair.to_right.write_imm(pair.left.filled(5000, 1).await, lent.range, Immediate(1));
            handle.inject(Fault::LoseLink(pair.left.node.id(), pair.right.node.id()));
            // Posted just before: it may complete and arrive, or not.
            let _ = write.await;
            let mut arrivals = 0;
            while pair.to_left.next_arrival().await.is_ok() {
                arrivals += 1;
            }
            assert!(arrivals <= 1);
            assert!(matches!(pair.to_right.next_arrival().await, Err(FabricError::PeerLost { .. })));
            assert!(pair.left.node.is_alive() && pair.right.node.is_alive());
            join(pair.to_left.close(), pair.to_right.close()).await;
            drop(lent.granted.end(GrantEnd::QueuePairDrained).unwrap());
        };
        world.run(scenario).unwrap();
    }
}

#[test]
fn every_source_comes_back_when_its_operations_end() {
    for seed in 0..20 {
        let world = World::new(seed);
        let handle = world.handle();
        let scenario = async move {
            let pair = pair(&handle, handle.swarm().depths).await;
            let lent = pair.right.lend_to(&pair.to_right, 3000).await;
            for number in 0..3 {
                let mut range = lent.range;
                (range.offset, range.length) = (range.offset + number * 1000, 1000);
                // No task awaits it: the slot holds the bytes nevertheless.
                drop(pair.to_right.write_imm(
                    pair.left.filled(1000, number).await,
                    range,
                    Immediate(number as u32),
                ));
            }
            join(pair.to_right.close(), pair.to_left.close()).await;
            assert_eq!(pair.left.source.stats().used_bytes, 0);
            lent.granted.end(GrantEnd::QueuePairDrained).unwrap();
        };
        world.run(scenario).unwrap();
    }
}

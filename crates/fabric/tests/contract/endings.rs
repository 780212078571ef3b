//! How connections end.

use std::sync::Arc;

use futures::{
    FutureExt,
    future::{join, join_all},
};
use tensorwire_fabric::{FabricError, Immediate, LossCause, QueuePairConfig, Runtime};
use tensorwire_memory::GrantEnd;

use super::{
    Setup,
    pair::{DEPTHS, Pair, end_of, pattern, step, yield_once},
};

pub async fn close_ends_every_outstanding_operation_once(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for yields in 0..8 {
        let (left_end, right_end) = pair.connect_again().await;
        let grant = pair.right.receive.grant(1 << 20);
        left_end.add_remote_region(grant.region);
        let posted: Vec<_> = (0..8)
            .map(|value| {
                let source = pair.left.source.filled(1 << 20, 3);
                left_end.write_imm(source, grant.range, Immediate(value))
            })
            .collect();
        // Close at different moments of the transfer.
        for _ in 0..yields {
            yield_once().await;
        }
        let (results, ()) = pair.step("the close", join(join_all(posted), left_end.close())).await;
        let completed = results.iter().take_while(|result| result.is_ok()).count();
        for result in &results[completed..] {
            assert!(matches!(result, Err(FabricError::Closed)), "unexpected: {result:?}");
        }
        assert_eq!(pair.left.source.pool.stats().used_bytes, 0, "a buffer was kept");
        // Every write that was announced to the peer has landed completely.
        let mut arrivals = 0;
        while pair.step("the end", right_end.next_arrival()).await.is_ok() {
            arrivals += 1;
        }
        pair.step("the other close", right_end.close()).await;
        let landed = grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
        assert!(arrivals == 0 || landed[..] == pattern(1 << 20, 3)[..]);
    }
}

pub async fn close_of_both_ends_at_once_ends(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let there: Vec<_> = (0..8).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let back: Vec<_> = (0..8).map(|value| pair.to_left.notify(Immediate(value))).collect();
    pair.step("both closes", join(pair.to_right.close(), pair.to_left.close())).await;
    for operation in there.into_iter().chain(back) {
        let _ended_either_way = pair.step("an operation", operation).await;
    }
    // A second close waits for the same end.
    pair.step("both closes again", join(pair.to_right.close(), pair.to_left.close())).await;
}

pub async fn operations_after_close_are_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(8);
    pair.step("the close", pair.to_right.close()).await;
    let error = pair.to_right.notify(Immediate(0)).await.unwrap_err();
    assert!(matches!(error, FabricError::Closed), "unexpected: {error}");
    let source = pair.left.source.filled(8, 0);
    let error = pair.to_right.write_imm(source, grant.range, Immediate(0)).await.unwrap_err();
    assert!(matches!(error, FabricError::Closed), "unexpected: {error}");
    let error = pair.end_at_left().await;
    assert!(matches!(error, FabricError::Closed), "unexpected: {error}");
    assert!(matches!(pair.to_right.failure(), Some(FabricError::Closed)));
}

pub async fn after_close_a_grant_can_end_as_drained(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for yields in 0..6 {
        let (left_end, right_end) = pair.connect_again().await;
        let grant = pair.right.receive.grant(4 << 20);
        left_end.add_remote_region(grant.region);
        let write = left_end.write_imm(pair.left.source.filled(4 << 20, 6), grant.range, Immediate(0));
        for _ in 0..yields {
            yield_once().await;
        }
        // The target closes in the middle of the peer's write; nothing may touch the memory after that.
        pair.step("the close", right_end.close()).await;
        let mut memory = grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
        memory.fill(0xAA);
        let _ended_either_way = pair.step("the write", write).await;
        assert!(memory.iter().all(|&byte| byte == 0xAA), "written after the close");
    }
    assert_eq!(pair.right.receive.pool.stats().leaked_bytes, 0);
}

fn assert_closed_by_peer(error: &FabricError) {
    let orderly = LossCause::ClosedByPeer;
    assert!(matches!(error, FabricError::PeerLost { cause, .. } if *cause == orderly), "unexpected: {error}");
}

pub async fn the_peer_learns_of_a_close(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    pair.works(&pair.to_right, &pair.to_left).await;
    let ((), end) = pair.step("the close", join(pair.to_right.close(), pair.to_left.next_arrival())).await;
    assert_closed_by_peer(&end.unwrap_err());
    let error = pair.to_left.notify(Immediate(0)).await.unwrap_err();
    assert_closed_by_peer(&error);
}

pub async fn the_peer_learns_of_a_drop(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let (left_end, right_end) = pair.connect_again().await;
    let clone = left_end.clone();
    drop(left_end);
    pair.works(&clone, &right_end).await;
    drop(clone);
    assert_closed_by_peer(&end_of(&pair.runtime, &right_end).await);
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn arrivals_before_the_loss_are_still_taken(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Pair { runtime, left, right, to_right, to_left, .. } = Pair::new(setup, runtime).await;
    let grant = right.receive.grant(1000);
    to_right.add_remote_region(grant.region);
    let source = left.source.filled(1000, 8);
    step(&runtime, "the write", to_right.write_imm(source, grant.range, Immediate(7))).await.unwrap();
    // On some fabrics a completed write may still be under way; an echo shows that it has landed.
    for value in 0..3 {
        step(&runtime, "a notification", to_right.notify(Immediate(value))).await.unwrap();
    }
    while to_left.stats().arrivals < 4 {
        yield_once().await;
    }
    drop(to_right);
    while to_left.failure().is_none() {
        yield_once().await;
    }
    for expected in [(7, 1000), (0, 0), (1, 0), (2, 0)] {
        let arrival = step(&runtime, "an arrival", to_left.next_arrival()).await.unwrap();
        assert_eq!(super::pair::immediate(arrival), expected);
    }
    assert_eq!(grant.take()[..], pattern(1000, 8)[..]);
    assert_closed_by_peer(&end_of(&runtime, &to_left).await);
}

pub async fn writers_waiting_for_a_slot_end_with_the_connection(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 2, receive_depth: 16 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let held: Vec<_> = (0..2).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let waiting: Vec<_> = (2..5).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let close = async {
        yield_once().await;
        pair.to_left.close().await;
    };
    let (results, ()) = pair.step("the waiters", join(join_all(waiting), close)).await;
    for result in results {
        assert_closed_by_peer(&result.unwrap_err());
    }
    drop(held);
}

pub async fn connections_of_one_pair_of_domains_are_independent(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let mut ends = Vec::new();
    for _ in 0..6 {
        ends.push(pair.connect_again().await);
    }
    while let Some((left_end, right_end)) = ends.pop() {
        for (left, right) in &ends {
            pair.works(left, right).await;
        }
        pair.step("a close", left_end.close()).await;
        assert_closed_by_peer(&end_of(&pair.runtime, &right_end).await);
    }
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn a_prepared_end_can_be_dropped(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for _ in 0..20 {
        let prepared = pair.left.domain.prepare(DEPTHS).unwrap();
        assert!(!prepared.connection_data().0.is_empty());
        drop(prepared);
    }
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn closing_with_many_outstanding_ends_each_once(setup: Setup, runtime: Arc<dyn Runtime>) {
    const POSTED: u32 = 64;
    let depths = QueuePairConfig { send_depth: POSTED, receive_depth: 8 * POSTED };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let operations: Vec<_> = (0..8 * POSTED).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let (results, ()) = pair.step("the close", join(join_all(operations), pair.to_right.close())).await;
    assert_eq!(results.len(), 8 * POSTED as usize);
    for result in results {
        assert!(matches!(result, Ok(()) | Err(FabricError::Closed)), "unexpected: {result:?}");
    }
    pair.step("the other close", pair.to_left.close()).await;
}

pub async fn closing_from_several_tasks_is_one_close(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime.clone()).await;
    let grant = pair.grant_right(4 << 20);
    let write = pair.to_right.write_imm(pair.left.source.filled(4 << 20, 6), grant.range, Immediate(0));
    let mut closed = Vec::new();
    for _ in 0..6 {
        let (queue_pair, (sender, done)) = (pair.to_right.clone(), futures::channel::oneshot::channel());
        closed.push(done);
        let close = async move {
            queue_pair.close().await;
            let _ = sender.send(());
        };
        runtime.spawn("closer", Box::pin(close));
    }
    for done in pair.step("all closes", join_all(closed)).await {
        done.unwrap();
    }
    let _ended_either_way = pair.step("the write", write).await;
    assert_eq!(pair.left.source.pool.stats().used_bytes, 0, "a buffer was kept");
}

pub async fn closing_after_a_panic_of_whoever_waited(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let (left_end, right_end) = pair.connect_again().await;
    let grant = pair.right.receive.grant(1 << 20);
    left_end.add_remote_region(grant.region);
    let (queue_pair, source) = (left_end.clone(), pair.left.source.filled(1 << 20, 6));
    let careless = async {
        let _posted = queue_pair.write(source.clone(), grant.range);
        let _more = queue_pair.write_imm(source, grant.range, Immediate(1));
        yield_once().await;
        panic!("a user's bug, on purpose");
    };
    let result: Result<(), _> = std::panic::AssertUnwindSafe(careless).catch_unwind().await;
    result.unwrap_err();
    // Its posted operations continue, and so do all other tasks.
    let arrival = pair.step("an arrival", right_end.next_arrival()).await.unwrap();
    assert_eq!(super::pair::immediate(arrival), (1, 1 << 20));
    pair.works(&left_end, &right_end).await;
    pair.step("the close", left_end.close()).await;
    assert_eq!(grant.take()[..], pattern(1 << 20, 6)[..]);
}

pub async fn closing_after_domain_and_pools_were_dropped(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Pair { runtime, left, right, to_right, to_left, .. } = Pair::new(setup, runtime).await;
    let grant = right.receive.grant(2 << 20);
    to_right.add_remote_region(grant.region);
    let write = to_right.write_imm(left.source.filled(2 << 20, 8), grant.range, Immediate(7));
    drop(left);
    let arrival = step(&runtime, "the arrival", to_left.next_arrival()).await.unwrap();
    assert_eq!(super::pair::immediate(arrival), (7, 2 << 20));
    assert_eq!(grant.bytes(), pattern(2 << 20, 8));
    drop(right);
    step(&runtime, "the write", write).await.unwrap();
    step(&runtime, "both closes", join(to_right.close(), to_left.close())).await;
    grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
}

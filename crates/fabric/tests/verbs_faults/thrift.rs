//! Queue pairs make only the calls to the device that they need.

use std::{sync::Arc, time::Duration};

use futures::future::{join, join_all};
use tensorwire_fabric::{Immediate, QueuePairConfig, RemoteRange, Runtime, Segment, Wait};

use super::{Asked, SETUP, asked_so_far, prepare};
use crate::contract::{
    Flavour, bounded,
    pair::{Pair, pattern},
};

const DEEP: QueuePairConfig = QueuePairConfig { send_depth: 64, receive_depth: 64 };

/// Calls, requests and requests with a completion since `before`.
fn asked(before: &Asked) -> (u64, u64, u64) {
    let after = asked_so_far();
    (after.posts - before.posts, after.requests - before.requests, after.signals - before.signals)
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn writes_of_one_poll_share_a_call_and_a_completion() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::with_depths(SETUP, runtime, DEEP).await;
        let grant = pair.grant_right(64);
        let before = asked_so_far();
        let write = |index| {
            pair.to_right.write_imm(pair.left.source.filled(8, 1), grant.part(0, 8), Immediate(index))
        };
        let writes: Vec<_> = (0..16).map(write).collect();
        // The first write finds nothing outstanding and is posted at once; the others follow when the task begins to
        // wait.
        for result in pair.step("the writes", join_all(writes)).await {
            result.unwrap();
        }
        assert_eq!(asked(&before), (2, 16, 2));
        for index in 0..16 {
            assert_eq!(pair.arrival_at_right().await.0, index);
        }
        drop(grant.take());
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn adjacent_segments_are_one_request() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::with_depths(SETUP, runtime, DEEP).await;
        for (count, gap, requests) in [(4, 0, 1), (4, 1, 4), (16, 0, 1), (17, 0, 2)] {
            let grant = pair.grant_right(count * 101);
            let range = |index: usize| grant.part((index * (100 + gap)) as u64, 100);
            let segment = |index: usize| Segment {
                local: pair.left.source.filled(100, index as u64),
                remote: RemoteRange { ..range(index) },
            };
            let segments: Vec<_> = (0..count).map(segment).collect();
            let before = asked_so_far();
            let write = pair.to_right.write_vectored(segments, Some(Immediate(1)));
            pair.step("the write", write).await.unwrap();
            // The message that announces the ranges before the last.
            let requests = requests + u64::from(requests > 1);
            assert_eq!(asked(&before), (1, requests, 1), "{count} segments, {gap} bytes apart");
            assert_eq!(pair.arrival_at_right().await, (1, count as u64 * 100));
            let landed = grant.take();
            for index in 0..count {
                assert!(landed[index * (100 + gap)..][..100] == pattern(100, index as u64)[..], "{index}");
            }
        }
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn every_way_of_waiting_moves_bytes_and_only_busy_polls_when_idle() {
    for flavour in [Flavour::CurrentThread, Flavour::TwoWorkers] {
        for wait in [Wait::Sleep, Wait::Adaptive, Wait::Busy] {
            bounded(flavour, move |runtime| async move {
                prepare(Default::default(), wait);
                let pair = Pair::new(SETUP, runtime.clone()).await;
                for round in 0..100 {
                    there_and_back(&pair, round).await;
                }
                if wait == Wait::Busy {
                    pair.step("polls of an idle connection", polls_go_on(&runtime)).await;
                } else {
                    assert!(is_quiet(&runtime).await, "{wait:?}");
                }
                there_and_back(&pair, 100).await;
                pair.step("the closes", join(pair.to_right.close(), pair.to_left.close())).await;
            });
        }
    }
}

async fn there_and_back(pair: &Pair, round: u32) {
    let ping = pair.to_right.notify(Immediate(round));
    assert_eq!(pair.arrival_at_right().await.0, round);
    let pong = pair.to_left.notify(Immediate(round));
    assert_eq!(pair.arrival_at_left().await.0, round);
    let (ping, pong) = pair.step("the notifications", join(ping, pong)).await;
    ping.and(pong).unwrap();
}

/// Waits until the driver polls, however little CPU time it gets on a loaded machine.
async fn polls_go_on(runtime: &Arc<dyn Runtime>) {
    let before = asked_so_far().polls;
    while asked_so_far().polls < before + 1000 {
        runtime.sleep(Duration::from_millis(1)).await;
    }
}

/// Whether polls of an idle connection end soon.
async fn is_quiet(runtime: &Arc<dyn Runtime>) -> bool {
    for _ in 0..10 {
        let before = asked_so_far().polls;
        runtime.sleep(Duration::from_millis(50)).await;
        if asked_so_far().polls == before {
            return true;
        }
    }
    false
}

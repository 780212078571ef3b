//! Cancelled operations of queue pairs and pools.

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{
    Arrival, ConnectParams, Connected, FabricError, Immediate, QueuePair, QueuePairConfig, RemoteRange, Role,
    Runtime, Segment, WorkRequest, scattered,
};
use tensorwire_memory::{Buf, GrantEnd, MemoryError, Pool, PoolConfig};
use tensorwire_sim::Handle;

use super::{
    common::{Lent, Pair, connect, immediate, pair},
    for_every_k, on_seeds, polled,
};
use crate::join_all::join_all;

/// What this file cancels.
pub(super) const CASES: [&str; 14] = [
    "alloc",
    "connect",
    "close",
    "lend",
    "lend_now",
    "next_arrival",
    "notify",
    "post",
    "post_now",
    "read",
    "read_vectored",
    "write",
    "write_imm",
    "write_vectored",
];

/// The smallest queues.
const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 4, receive_depth: 4 };

const BYTES: usize = 1000;

/// Posts one operation more than the send queue is deep, cancels each after some polls, and checks that exactly the
/// posted ones arrive, in order, and that the queue is empty afterwards.
async fn given_up_operations(
    pair: &Pair,
    polls: usize,
    post: impl AsyncFn(u32, &Lent) -> Option<Result<(), FabricError>>,
) -> bool {
    let lent = pair.right.lend_to(&pair.to_right, BYTES).await;
    let completed = post(7, &lent).await;
    // Whether or not it was posted, the next one arrives after it.
    let last = pair.to_right.notify(Immediate(1000));
    let arrivals = async {
        let mut before = Vec::new();
        loop {
            let (value, _) = immediate(pair.to_left.next_arrival().await.unwrap());
            if value == 1000 {
                return before;
            }
            before.push(value);
        }
    };
    let (ended, before) = join(last, arrivals).await;
    ended.unwrap();
    assert!(before.is_empty() || before == [7], "{before:?}");
    if let Some(result) = &completed {
        result.as_ref().unwrap();
    }
    // Its bytes have landed, because a later arrival has come.
    drop(lent.granted.end(GrantEnd::Content).unwrap());
    // Posted by the call, so it arrives even if it is never polled.
    assert!(completed.is_none() || polls > 0);
    completed.is_some()
}

/// Closes both sides, and checks that no memory is in use.
async fn closed(handle: &Handle, pair: Pair) {
    join(pair.to_right.close(), pair.to_left.close()).await;
    handle.runtime().sleep(Duration::from_millis(500)).await;
    for pool in [&pair.left.source, &pair.left.receive, &pair.right.source, &pair.right.receive] {
        let stats = pool.stats();
        assert_eq!((stats.used_bytes, stats.leaked_bytes, stats.waiting), (0, 0, 0), "{pool:?}");
    }
}

#[test]
fn s3_a_write_given_up_frees_its_slot_and_its_buffer() {
    on_seeds(async |handle: Handle| {
        let pair = pair(&handle, DEPTHS).await;
        for_every_k("write", async |polls| {
            let source = pair.left.filled(BYTES, 1).await;
            let write =
                async |_, lent: &Lent| polled(polls, pair.to_right.write(source.clone(), lent.range)).await;
            given_up_operations(&pair, polls, write).await
        })
        .await;
        closed(&handle, pair).await;
    });
}

#[test]
fn s3_a_write_with_immediate_given_up_arrives_once_or_never() {
    on_seeds(async |handle: Handle| {
        let pair = pair(&handle, DEPTHS).await;
        for_every_k("write_imm", async |polls| {
            let source = pair.left.filled(BYTES, 1).await;
            let write = async |value, lent: &Lent| {
                polled(polls, pair.to_right.write_imm(source.clone(), lent.range, Immediate(value))).await
            };
            given_up_operations(&pair, polls, write).await
        })
        .await;
        closed(&handle, pair).await;
    });
}

#[test]
fn s3_a_vectored_write_given_up_arrives_once_or_never() {
    on_seeds(async |handle: Handle| {
        let pair = pair(&handle, DEPTHS).await;
        for_every_k("write_vectored", async |polls| {
            let source = pair.left.filled(BYTES, 1).await;
            let write = async |value, lent: &Lent| {
                let part = |from: usize, to: usize| Segment {
                    local: source.slice(from..to).unwrap(),
                    remote: tensorwire_fabric::RemoteRange {
                        offset: lent.range.offset + from as u64,
                        length: (to - from) as u64,
                        ..lent.range
                    },
                };
                let segments: Arc<[Segment]> = [part(501, BYTES), part(0, 3), part(3, 501)].into();
                polled(polls, pair.to_right.write_vectored(segments, Some(Immediate(value)))).await
            };
            given_up_operations(&pair, polls, write).await
        })
        .await;
        closed(&handle, pair).await;
    });
}

/// Posts a loan, cancels it after some polls, and checks that it arrives whole or is refused.
async fn given_up_loans(handle: &Handle, what: &str, waits: bool) {
    let pair = pair(handle, DEPTHS).await;
    for_every_k(what, async |polls| {
        let source = pair.left.filled(BYTES, 3).await;
        let lend = if waits {
            polled(polls, pair.to_right.lend(source, Immediate(7))).await
        } else {
            match pair.to_right.lend_now(source, Immediate(7)) {
                Ok(operation) => polled(polls, operation).await,
                Err(refusal) => Some(Err(refusal)),
            }
        };
        let last = pair.to_right.notify(Immediate(1000));
        let arrivals = async {
            let mut views = Vec::new();
            loop {
                match pair.to_left.next_arrival().await.unwrap() {
                    Arrival::Loan { immediate: Immediate(7), buffer } => views.push(buffer),
                    other => {
                        assert_eq!(immediate(other).0, 1000);
                        return views;
                    }
                }
            }
        };
        let (ended, views) = join(last, arrivals).await;
        ended.unwrap();
        views.iter().for_each(|view| handle.verify(3, view));
        let refused = matches!(lend, Some(Err(FabricError::LeasesExhausted { .. })));
        // Posted by the call: it arrives once, even if it is never polled.
        assert!(views.len() == 1 || views.is_empty() && (refused || handle.swarm().leases_max < 2));
        drop(views);
        handle.runtime().sleep(Duration::from_millis(50)).await;
        assert_eq!(pair.left.source.stats().used_bytes, 0, "the lease was kept");
        lend.is_some() && polls > 0
    })
    .await;
    closed(handle, pair).await;
}

#[test]
fn s3_a_loan_given_up_arrives_once_and_comes_back() {
    on_seeds(async |handle: Handle| given_up_loans(&handle, "lend", true).await);
    on_seeds(async |handle: Handle| given_up_loans(&handle, "lend_now", false).await);
}

#[test]
fn s1_a_read_given_up_keeps_its_destination_until_it_is_over() {
    on_seeds(async |handle: Handle| {
        given_up_reads(&handle, "read", async |polls, to_right, range, small| {
            let into = small.alloc(BYTES).await.unwrap();
            Some(polled(polls, to_right.read(range, into)).await?.unwrap().to_vec())
        })
        .await;
    });
}

#[test]
fn s1_a_vectored_read_given_up_keeps_its_buffers_until_it_is_over() {
    on_seeds(async |handle: Handle| {
        given_up_reads(&handle, "read_vectored", async |polls, to_right, range, small| {
            let (first, second) =
                (small.alloc(BYTES / 4).await.unwrap(), small.alloc(BYTES - BYTES / 4).await.unwrap());
            let segments = scattered(range, vec![first, second]).unwrap();
            let read = polled(polls, to_right.read_vectored(segments)).await?.unwrap();
            Some([&read[0][..], &read[1][..]].concat())
        })
        .await;
    });
}

/// `read` begins a read of the range, with memory of that pool, and returns the bytes unless it was cancelled.
async fn given_up_reads(
    handle: &Handle,
    case: &str,
    read: impl AsyncFn(usize, &QueuePair, RemoteRange, &Pool) -> Option<Vec<u8>>,
) {
    let pair = pair(handle, DEPTHS).await;
    let lent = pair.right.lend_to(&pair.to_right, BYTES).await;
    let write = pair.to_right.write(pair.left.filled(BYTES, 4).await, lent.range);
    write.await.unwrap();
    let told = join(pair.to_right.notify(Immediate(0)), pair.to_left.next_arrival()).await;
    told.1.unwrap();
    // The written bytes are read.
    let (range, bytes) = (lent.range, lent.take());
    let _exposure = bytes.expose();
    // One destination at a time.
    let config = PoolConfig { block_bytes: 1024, cap_bytes: 1024, ..PoolConfig::new("small") };
    let small = pair.left.node.pool(config).unwrap();
    pair.left.register(&small);
    for_every_k(case, async |polls| {
        let read = read(polls, &pair.to_right, range, &small).await;
        if let Some(read) = &read {
            handle.verify(4, read);
        }
        read.is_some()
    })
    .await;
    drop((_exposure, bytes));
    let all = small.alloc(BYTES).await.unwrap();
    drop(all);
    assert_eq!((small.stats().used_bytes, small.stats().leaked_bytes), (0, 0));
    closed(handle, pair).await;
}

#[test]
fn s3_a_notification_given_up_arrives_once_or_never() {
    on_seeds(async |handle: Handle| {
        let pair = pair(&handle, DEPTHS).await;
        for_every_k("notify", async |polls| {
            let notify = async |value, _: &Lent| polled(polls, pair.to_right.notify(Immediate(value))).await;
            given_up_operations(&pair, polls, notify).await
        })
        .await;
        for_every_k("post_now", async |polls| {
            let post = async |value, _: &Lent| {
                let request = WorkRequest::Write {
                    local: tensorwire_memory::Buf::empty(),
                    remote: None,
                    immediate: Some(Immediate(value)),
                };
                polled(polls, pair.to_right.post_now(&request).unwrap()).await
            };
            given_up_operations(&pair, polls, post).await
        })
        .await;
        closed(&handle, pair).await;
    });
}

#[test]
fn s3_posts_in_line_can_be_given_up_and_arrive_in_order_all_the_same() {
    on_seeds(async |handle: Handle| {
        let pair = pair(&handle, QueuePairConfig { receive_depth: 8, ..DEPTHS }).await;
        for_every_k("post", async |polls| {
            let posted: Vec<_> = (0..4).map(|value| pair.to_right.notify(Immediate(value))).collect();
            let request =
                WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(Immediate(4)) };
            let fifth = pair.to_right.post(&request).unwrap();
            let arrivals = async {
                for expected in 0..6 {
                    assert_eq!(immediate(pair.to_left.next_arrival().await.unwrap()).0, expected);
                }
            };
            let later = async {
                let fifth = polled(polls, fifth).await;
                // Awaiting an operation submits the waiting ones.
                pair.to_right.notify(Immediate(5)).await.unwrap();
                fifth
            };
            let (ended, ((), fifth)) = join(join_all(posted), join(arrivals, later)).await;
            ended.into_iter().for_each(|result| result.unwrap());
            fifth.is_some_and(|result| result.is_ok())
        })
        .await;
        closed(&handle, pair).await;
    });
}

#[test]
fn s3_an_arrival_is_not_lost_when_nobody_waits_for_it_any_more() {
    on_seeds(async |handle: Handle| {
        let pair = pair(&handle, DEPTHS).await;
        let mut next = 0;
        for_every_k("next_arrival", async |polls| {
            // Posted now; arrives with or without a task that waits.
            drop(pair.to_right.notify(Immediate(next)));
            let arrival = polled(polls, pair.to_left.next_arrival()).await;
            let completed = arrival.is_some();
            let arrival = match arrival {
                Some(arrival) => arrival,
                None => pair.to_left.next_arrival().await,
            };
            assert_eq!(immediate(arrival.unwrap()).0, next);
            next += 1;
            completed && polls > 1
        })
        .await;
        closed(&handle, pair).await;
    });
}

#[test]
fn l3_a_close_given_up_goes_on() {
    on_seeds(async |handle: Handle| {
        let first = pair(&handle, DEPTHS).await;
        for_every_k("close", async |polls| {
            let (to_right, to_left) = connect(&first.left, &first.right, DEPTHS).await;
            let write = to_right.notify(Immediate(1));
            let completed = polled(polls, to_right.close()).await.is_some();
            if polls > 0 {
                assert!(to_right.notify(Immediate(2)).await.is_err());
                drop(write.await);
            } else {
                write.await.unwrap();
            }
            to_right.close().await;
            to_left.close().await;
            completed
        })
        .await;
        closed(&handle, first).await;
    });
}

#[test]
fn s3_a_connect_given_up_leaves_nothing_behind() {
    on_seeds(async |handle: Handle| {
        let first = pair(&handle, DEPTHS).await;
        for_every_k("connect", async |polls| {
            let dialer = first.left.domain.prepare(DEPTHS).unwrap();
            let acceptor = first.right.domain.prepare(DEPTHS).unwrap();
            let limit = Duration::from_millis(900);
            let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit };
            let dial = params(acceptor.connection_data(), Role::Dialer);
            let accept = params(dialer.connection_data(), Role::Acceptor);
            let (given_up, other) = join(polled(polls, dialer.connect(dial)), acceptor.connect(accept)).await;
            let left = |connected: Connected| connected.spawn(&*first.left.node.runtime());
            let given_up = given_up.map(|one| one.map(left));
            let other = other.map(|connected| connected.spawn(&*first.right.node.runtime()));
            let completed = given_up.is_some();
            match (given_up, other) {
                (Some(one), Ok(other)) => {
                    let one = one.unwrap();
                    one.notify(Immediate(1)).await.unwrap();
                    assert_eq!(immediate(other.next_arrival().await.unwrap()).0, 1);
                    join(one.close(), other.close()).await;
                }
                (Some(one), Err(_)) => assert!(one.is_err()),
                // It had connected before the other was dropped, so it sees that the connection is over.
                (None, Ok(other)) => {
                    assert!(other.next_arrival().await.is_err());
                    other.close().await;
                }
                (None, Err(error)) => {
                    assert!(matches!(
                        error,
                        FabricError::Connect { .. }
                            | FabricError::ConnectTimeout { .. }
                            | FabricError::Closed
                    ));
                }
            }
            completed
        })
        .await;
        closed(&handle, first).await;
    });
}

#[test]
fn s1_an_allocation_given_up_takes_nothing_and_holds_nobody_up() {
    on_seeds(async |handle: Handle| {
        let node = handle.start_node("a:1").unwrap();
        let config = PoolConfig { block_bytes: 4096, cap_bytes: 4096, ..PoolConfig::new("small") };
        let pool = node.pool(config).unwrap();
        for polls in 0..2 {
            let all = pool.alloc(4096).await.unwrap();
            let mut next = Box::pin(pool.alloc(4096));
            let waiting = polled(polls, &mut next).await;
            assert!(waiting.is_none());
            let behind = node.run("behind", {
                let pool = pool.clone();
                async move { pool.alloc(64).await.map(drop) }
            });
            handle.runtime().sleep(Duration::from_micros(10)).await;
            drop(next);
            drop(all);
            behind.await.unwrap().unwrap();
            assert_eq!((pool.stats().used_bytes, pool.stats().waiting), (0, 0));
        }
        let too_much = pool.alloc(1 << 20).await;
        assert!(matches!(too_much, Err(MemoryError::TooLarge { .. })), "{too_much:?}");
    });
}

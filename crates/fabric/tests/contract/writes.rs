//! The rules of writes and notifications.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
};

use futures::{
    FutureExt as _, StreamExt as _,
    channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded},
    future::{Either, join, join_all, select, select_all},
};
use tensorwire_fabric::{
    Access, Arrival, ArrivalSink, FabricError, Immediate, QueuePair, QueuePairConfig, Runtime, WorkRequest,
};
use tensorwire_memory::Buf;

use super::{
    Setup,
    pair::{DEPTHS, Grant, Pair, RegisteredPool, checksum, fill, immediate, pattern, step, yield_once},
};

pub async fn a_write_is_visible_at_its_immediate(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for round in 0..100_u32 {
        let grant = pair.grant_right(1000);
        let source = pair.left.source.filled(1000, u64::from(round));
        let write = pair.to_right.write_imm(source, grant.range, Immediate(round));
        assert_eq!(pair.arrival_at_right().await, (round, 1000));
        assert_eq!(grant.take()[..], pattern(1000, u64::from(round))[..], "round {round}");
        pair.step("the write", write).await.unwrap();
    }
}

pub async fn a_plain_write_is_visible_at_the_next_immediate(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let (first, second) = (pair.grant_right(300_000), pair.grant_right(10));
    let writes = [
        pair.to_right.write(pair.left.source.filled(300_000, 1), first.range),
        pair.to_right.write(pair.left.source.filled(10, 2), second.range),
        pair.to_right.notify(Immediate(3)),
    ];
    assert_eq!(pair.arrival_at_right().await, (3, 0), "plain writes announce nothing");
    assert_eq!(first.take()[..], pattern(300_000, 1)[..]);
    assert_eq!(second.take()[..], pattern(10, 2)[..]);
    for result in pair.step("the writes", join_all(writes)).await {
        result.unwrap();
    }
}

pub async fn immediates_arrive_in_posting_order(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(1 << 20);
    for first in (0..200_u32).step_by(8) {
        let mut posted = Vec::new();
        for value in first..first + 8 {
            // Long, short and empty ones in turn: a later, shorter write must not overtake.
            let length = [1 << 20, 8, 0, 5000][value as usize % 4];
            let source = pair.left.source.filled(length, u64::from(value));
            posted.push(match length {
                0 => pair.to_right.notify(Immediate(value)),
                _ => pair.to_right.write_imm(source, grant.part(0, length as u64), Immediate(value)),
            });
        }
        for value in first..first + 8 {
            let length = [1 << 20, 8, 0, 5000][value as usize % 4];
            assert_eq!(pair.arrival_at_right().await, (value, length));
        }
        for result in pair.step("the writes", join_all(posted)).await {
            result.unwrap();
        }
    }
}

pub async fn a_notification_carries_no_bytes(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for value in [0, 1, 0x8000_0000, u32::MAX] {
        let notified = pair.to_right.notify(Immediate(value));
        assert_eq!(pair.arrival_at_right().await, (value, 0));
        pair.step("the notification", notified).await.unwrap();
    }
    assert_eq!(pair.to_left.stats().bytes_received, 0);
}

pub async fn posts_that_are_complete_at_once_find_room_while_the_peer_executes_them(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    // This depth leaves the least spare room in a ring whose number of slots is a power of two.
    let depths = QueuePairConfig { send_depth: 96, receive_depth: 64 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    for value in 0..1000 {
        match pair.to_right.post_inline(&[], None, Some(Immediate(value))) {
            Some(posted) => posted.unwrap(),
            // A fabric that has no such posts.
            None if value == 0 => return,
            None => panic!("post {value} found no room, though the peer has executed all before it"),
        }
        assert_eq!(pair.arrival_at_right().await, (value, 0));
    }
}

pub async fn bytes_around_a_write_stay_untouched(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for (offset, length) in [(0, 1), (1, 1), (7, 64), (63, 65), (100, 4096), (1, 300_001)] {
        let total = offset + length + 100;
        let grant = pair.grant_right(total);
        let source = pair.left.source.filled(length, 9);
        let write = pair.to_right.write_imm(source, grant.part(offset as u64, length as u64), Immediate(0));
        pair.arrival_at_right().await;
        pair.step("the write", write).await.unwrap();
        let mut expected = vec![0; total];
        expected[offset..offset + length].copy_from_slice(&pattern(length, 9));
        assert_eq!(grant.take()[..], expected[..], "{length} bytes at {offset}");
    }
}

/// `length` bytes from an odd source address to an odd destination address.
async fn unaligned(setup: Setup, runtime: Arc<dyn Runtime>, length: usize) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(length + 3);
    let source = pair.left.source.filled(length + 5, 4).slice(5..length + 5).unwrap();
    let write = pair.to_right.write_imm(source.clone(), grant.part(3, length as u64), Immediate(1));
    assert_eq!(pair.arrival_at_right().await, (1, length as u64));
    pair.step("the write", write).await.unwrap();
    let landed = grant.take();
    assert_eq!(landed[3..], source[..]);
    assert_eq!(landed[..3], [0; 3]);
}

pub async fn length_0(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 0).await;
}

pub async fn length_1(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 1).await;
}

pub async fn length_63(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 63).await;
}

pub async fn length_64(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 64).await;
}

pub async fn length_65(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 65).await;
}

pub async fn length_4096(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 4096).await;
}

pub async fn length_1_mib(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 1 << 20).await;
}

pub async fn length_16_mib(setup: Setup, runtime: Arc<dyn Runtime>) {
    unaligned(setup, runtime, 16 << 20).await;
}

pub async fn the_address_granted_is_the_address_written(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(100_000);
    let address = grant.address;
    let write = pair.to_right.write_imm(pair.left.source.filled(100_000, 5), grant.range, Immediate(0));
    pair.arrival_at_right().await;
    pair.step("the write", write).await.unwrap();
    let shared = grant.take().freeze();
    assert_eq!(shared.as_ptr() as usize, address);
    assert_eq!(shared[..], pattern(100_000, 5)[..]);
}

pub async fn many_writes_may_be_outstanding(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 64, receive_depth: 64 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let grant: Vec<Grant> = (0..64).map(|index| pair.grant_right(1 + index * 999)).collect();
    let mut posted = Vec::new();
    for (index, grant) in grant.iter().enumerate() {
        let source = pair.left.source.filled(1 + index * 999, index as u64);
        let request = WorkRequestOf::write(source, grant, index as u32);
        posted.push(pair.to_right.post_now(&request.0).unwrap());
    }
    for (index, grant) in grant.into_iter().enumerate() {
        assert_eq!(pair.arrival_at_right().await, (index as u32, 1 + index as u64 * 999));
        assert_eq!(grant.take()[..], pattern(1 + index * 999, index as u64)[..], "write {index}");
    }
    for result in pair.step("the writes", join_all(posted)).await {
        result.unwrap();
    }
}

/// Work requests are made by queue pairs; tests that post them themselves need their own.
struct WorkRequestOf(WorkRequest);

impl WorkRequestOf {
    fn write(local: Buf, grant: &Grant, value: u32) -> Self {
        let (remote, immediate) = (Some(grant.range), Some(Immediate(value)));
        Self(WorkRequest::Write { local, remote, immediate })
    }
}

pub async fn a_full_send_queue_makes_the_next_write_wait(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 16 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    // A completed operation keeps its slot until its future is polled or dropped, so this stays full.
    let posted: Vec<_> = (0..4).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let mut waiting = pin!(pair.to_right.notify(Immediate(4)));
    assert!(futures::poll!(&mut waiting).is_pending(), "the fifth of four was posted");
    for value in 0..4 {
        assert_eq!(pair.arrival_at_right().await.0, value);
    }
    assert!(futures::poll!(&mut waiting).is_pending(), "a slot was free before its future was polled");
    for result in pair.step("the first four", join_all(posted)).await {
        result.unwrap();
    }
    let (written, arrival) = join(waiting, pair.arrival_at_right()).await;
    written.unwrap();
    assert_eq!(arrival.0, 4);
}

pub async fn post_now_says_that_the_send_queue_is_full(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 16 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let request = WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(Immediate(1)) };
    let posted: Vec<_> = (0..4).map(|_| pair.to_right.post_now(&request).unwrap()).collect();
    let error = pair.to_right.post_now(&request).unwrap_err();
    assert!(matches!(error, FabricError::SendQueueFull { depth: 4 }), "{error}");
    for result in pair.step("the first four", join_all(posted)).await {
        result.unwrap();
    }
    pair.step("one more", pair.to_right.post_now(&request).unwrap()).await.unwrap();
}

pub async fn a_dropped_future_still_completes_and_then_frees_its_buffer(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    const BYTES: usize = 16 << 20;
    let pair = Pair::new(setup, runtime).await;
    // Room for one buffer only: a second allocation waits until the write has released the first.
    let small = RegisteredPool::new(&pair.left.domain, "one buffer", Access::LOCAL, BYTES as u64);
    for round in 0..3 {
        let grant = pair.grant_right(BYTES);
        let source = small.filled(BYTES, round);
        drop(pair.to_right.write_imm(source, grant.range, Immediate(0)));
        let mut next = pair.step("the buffer's return", small.pool.alloc(BYTES)).await.unwrap();
        fill(&mut next, 1000);
        assert_eq!(pair.arrival_at_right().await, (0, BYTES as u64));
        assert!(grant.take()[..] == pattern(BYTES, round)[..], "the buffer was reused too early");
    }
}

pub async fn an_arrival_not_taken_is_not_lost(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for value in 0..20 {
        {
            let mut abandoned = pin!(pair.to_left.next_arrival());
            assert!(futures::poll!(&mut abandoned).is_pending());
        }
        pair.step("the notification", pair.to_right.notify(Immediate(value))).await.unwrap();
        assert_eq!(pair.arrival_at_right().await.0, value);
    }
}

/// Answers each arrival inside the sink, with a number that is higher by `step`.
#[derive(Debug)]
struct Answering {
    queue_pair: Mutex<Option<QueuePair>>,
    step: u32,
    /// Locked while the sink handles an arrival.
    inside: Mutex<()>,
    /// Receives the numbers of arrivals, or `None` for an arrival during another.
    seen: UnboundedSender<Option<u32>>,
}

/// One more than the last number that is sent.
const ANSWERED: u32 = 400;

impl Answering {
    fn between(queue_pair: &QueuePair, step: u32) -> (Arc<Self>, UnboundedReceiver<Option<u32>>) {
        let (seen, sees) = unbounded();
        let queue_pair_of_sink = Mutex::new(Some(queue_pair.clone()));
        let sink = Arc::new(Self { queue_pair: queue_pair_of_sink, step, inside: Mutex::new(()), seen });
        queue_pair.set_sink(sink.clone());
        (sink, sees)
    }

    fn post(&self, value: u32) {
        let queue_pair = self.queue_pair.lock().unwrap().clone().unwrap();
        let immediate = Some(Immediate(value));
        drop(queue_pair.post(&WorkRequest::Write { local: Buf::empty(), remote: None, immediate }).unwrap());
    }
}

impl ArrivalSink for Answering {
    fn arrived(&self, arrival: Arrival) -> bool {
        let inside = self.inside.try_lock();
        let (value, _) = immediate(arrival);
        if value + self.step < ANSWERED {
            self.post(value + self.step);
        }
        let _test_is_over = self.seen.unbounded_send(inside.is_ok().then_some(value));
        false
    }
}

/// Drives `queue_pair` until its connection fails.
async fn driven(queue_pair: &QueuePair) -> FabricError {
    poll_fn(|context| {
        loop {
            match queue_pair.poll_progress(context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(failure)) => return Poll::Ready(failure),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}

/// Waits until all numbers were seen, in order.
async fn all_seen(mut sees: UnboundedReceiver<Option<u32>>) {
    for value in 0..ANSWERED {
        assert_eq!(sees.next().await, Some(Some(value)));
    }
}

pub async fn a_sink_takes_arrivals_one_at_a_time_and_in_order(setup: Setup, runtime: Arc<dyn Runtime>) {
    /// How many numbers are under way at once.
    const AT_ONCE: u32 = 8;
    let pair = Pair::new(setup, runtime).await;
    let (left, seen_by_left) = Answering::between(&pair.to_right, AT_ONCE);
    (0..AT_ONCE).for_each(|value| left.post(value));
    // Arrivals from before the sink was set go to it first.
    let (right, seen_by_right) = Answering::between(&pair.to_left, 0);
    let all = pin!(join(all_seen(seen_by_left), all_seen(seen_by_right)));
    let driven = [&pair.to_right, &pair.to_left].map(|queue_pair| driven(queue_pair).boxed_local());
    match pair.step("all answers", select(all, select_all(driven))).await {
        Either::Left(_) => {}
        Either::Right(((failure, side, _), _)) => panic!("side {side} failed: {failure:?}"),
    }
    // A sink must not keep its queue pair.
    drop([left, right].map(|sink| sink.queue_pair.lock().unwrap().take()));
}

/// Writes `rounds` buffers of changing length to `grant` and checks what the other side echoes.
async fn pump(to_peer: &QueuePair, source: &RegisteredPool, grant: &Grant, rounds: u32) {
    for round in 0..rounds {
        let length = lengths(round);
        let bytes = source.filled(length, u64::from(round));
        let write = to_peer.write_imm(bytes, grant.part(0, length as u64), Immediate(round));
        write.await.unwrap();
        // The peer confirms that it has checked this round, so that its memory may be written again.
        while !target_is_free(to_peer, round).await {}
    }
}

/// Immediates at or above this acknowledge a round.
const CHECKED: u32 = 0x4000_0000;

async fn target_is_free(to_peer: &QueuePair, round: u32) -> bool {
    immediate(to_peer.next_arrival().await.unwrap()).0 == CHECKED + round
}

fn lengths(round: u32) -> usize {
    [8, 1000, 64, 70_000, 65, 400_000, 1, 4096][round as usize % 8]
}

/// The receiving half of [`pump`].
async fn check(from_peer: &QueuePair, grant: &Grant, rounds: u32) {
    for round in 0..rounds {
        let (value, length) = immediate(from_peer.next_arrival().await.unwrap());
        assert_eq!((value, length), (round, lengths(round) as u64));
        let landed = &grant.bytes()[..lengths(round)];
        assert_eq!(checksum(landed), checksum(&pattern(lengths(round), u64::from(round))), "round {round}");
        from_peer.notify(Immediate(CHECKED + round)).await.unwrap();
    }
}

pub async fn traffic_both_ways_under_load_keeps_its_checksums(setup: Setup, runtime: Arc<dyn Runtime>) {
    const ROUNDS: u32 = 120;
    let pair = Arc::new(Pair::new(setup, runtime.clone()).await);
    // Four connections, two per direction, all between the same two domains.
    let mut lanes = Vec::new();
    for lane in 0..4 {
        let (left, right) = pair.connect_again().await;
        let leftward = lane % 2 == 1;
        let receiving = if leftward { &pair.left } else { &pair.right };
        let grant = receiving.receive.grant(400_000);
        let (writer, checker) = if leftward { (right, left) } else { (left, right) };
        writer.add_remote_region(grant.region);
        lanes.push((leftward, writer, checker, Arc::new(grant)));
    }
    let mut tasks = Vec::new();
    for (leftward, writer, checker, grant) in lanes {
        let (sender, receiver) = futures::channel::oneshot::channel();
        let (pair, checked) = (pair.clone(), grant.clone());
        let checking = async move {
            check(&checker, &checked, ROUNDS).await;
            // Not closed here: the last write may have landed and not be complete, and would fail then.
            let _ = sender.send(checker);
        };
        runtime.spawn("checker", Box::pin(checking));
        tasks.push(async move {
            let source = if leftward { &pair.right.source } else { &pair.left.source };
            pump(&writer, source, &grant, ROUNDS).await;
            receiver.await.unwrap();
        });
    }
    pair.step("all lanes", join_all(tasks)).await;
}

pub async fn both_directions_of_one_connection_work_at_once(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for round in 0..30 {
        let length = [16, 600_000, 65][round as usize % 3];
        let (at_right, at_left) = (pair.grant_right(length), pair.grant_left(length));
        let there = pair.left.source.filled(length, u64::from(round));
        let back = pair.right.source.filled(length, u64::from(round) + 1000);
        let writes = join(
            pair.to_right.write_imm(there, at_right.range, Immediate(round)),
            pair.to_left.write_imm(back, at_left.range, Immediate(round)),
        );
        let arrivals = join(pair.arrival_at_right(), pair.arrival_at_left());
        let ((there, back), (right, left)) = join(writes, arrivals).await;
        there.unwrap();
        back.unwrap();
        assert_eq!((right, left), ((round, length as u64), (round, length as u64)));
        assert_eq!(checksum(&at_right.take()), checksum(&pattern(length, u64::from(round))));
        assert_eq!(checksum(&at_left.take()), checksum(&pattern(length, u64::from(round) + 1000)));
    }
}

pub async fn writes_from_many_tasks_all_land(setup: Setup, runtime: Arc<dyn Runtime>) {
    const TASKS: u32 = 8;
    const EACH: u32 = 50;
    let depths = QueuePairConfig { send_depth: 8, receive_depth: 1024 };
    let pair = Arc::new(Pair::with_depths(setup, runtime.clone(), depths).await);
    let grant = pair.grant_right((TASKS * EACH * 16) as usize);
    let mut finished = Vec::new();
    for task in 0..TASKS {
        let (pair, base) = (pair.clone(), grant.part(u64::from(task * EACH * 16), 16));
        let (sender, receiver) = futures::channel::oneshot::channel();
        finished.push(receiver);
        let work = async move {
            for each in 0..EACH {
                let mut range = base;
                range.offset += u64::from(each * 16);
                let source = pair.left.source.filled(16, u64::from(task * EACH + each));
                pair.to_right.write_imm(source, range, Immediate(task * EACH + each)).await.unwrap();
            }
            let _ = sender.send(());
        };
        runtime.spawn("writer", Box::pin(work));
    }
    let mut seen = vec![false; (TASKS * EACH) as usize];
    for _ in 0..TASKS * EACH {
        let (value, _) = pair.arrival_at_right().await;
        assert!(!std::mem::replace(&mut seen[value as usize], true), "{value} came twice");
    }
    step(&runtime, "the writers", join_all(finished)).await;
    let landed = grant.take();
    for (index, bytes) in landed.chunks(16).enumerate() {
        assert_eq!(bytes, pattern(16, index as u64), "write {index}");
    }
}

pub async fn counters_count_operations_and_bytes(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(100_000);
    let lengths = [1, 64, 65, 100_000];
    for length in lengths {
        let source = pair.left.source.filled(length as usize, 0);
        let write = pair.to_right.write_imm(source, grant.part(0, length), Immediate(0));
        pair.step("a write", write).await.unwrap();
        pair.arrival_at_right().await;
    }
    pair.step("a notification", pair.to_right.notify(Immediate(0))).await.unwrap();
    pair.arrival_at_right().await;
    let total: u64 = lengths.iter().sum();
    let (left, right) = (pair.to_right.stats(), pair.to_left.stats());
    assert_eq!((left.operations, left.bytes_sent), (5, total));
    assert_eq!((right.arrivals, right.bytes_received), (5, total));
    assert_eq!((left.arrivals, left.bytes_received), (0, 0));
    assert_eq!((right.operations, right.bytes_sent), (0, 0));
    // A failed operation counts nowhere.
    let mut unknown = grant.range;
    unknown.region.0 += 1000;
    let source = pair.left.source.filled(100_000, 0);
    pair.step("a bad write", pair.to_right.write(source, unknown)).await.unwrap_err();
    assert_eq!(pair.to_right.stats(), left);
    assert_eq!(DEPTHS, pair.to_right.config());
    yield_once().await;
    assert!(matches!(futures::poll!(pin!(pair.to_left.next_arrival())), Poll::Pending));
}

pub async fn waiting_operations_are_posted_in_the_order_they_began_to_wait(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    let depths = QueuePairConfig { send_depth: 2, receive_depth: 64 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let held: Vec<_> = (0..2).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let mut waiting: Vec<_> = (2..22).map(|value| Box::pin(pair.to_right.notify(Immediate(value)))).collect();
    for operation in &mut waiting {
        assert!(futures::poll!(operation).is_pending());
    }
    // Two are dropped; the others, awaited in the opposite order, get room in the order in which they began to wait.
    drop(waiting.remove(7));
    drop(waiting.remove(0));
    waiting.reverse();
    let operations = join(join_all(held), join_all(waiting));
    let arrivals = async {
        for value in (0..22).filter(|value| ![2, 9].contains(value)) {
            assert_eq!(pair.arrival_at_right().await.0, value);
        }
    };
    let ((held, waited), ()) = pair.step("all operations", join(operations, arrivals)).await;
    held.into_iter().chain(waited).for_each(|result| result.unwrap());
}

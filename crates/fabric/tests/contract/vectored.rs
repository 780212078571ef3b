//! Writes of many ranges, and writes that a fabric splits: one completion, one notification, all or nothing.

use std::{pin::pin, sync::Arc};

use futures::future::{join, join_all};
use tensorwire_fabric::{
    FabricError, Immediate, Operation, PeerViolation, QueuePairConfig, RemoteRange, Runtime, Segment,
    WorkRequest, paged,
};
use tensorwire_memory::Buf;

use super::{
    Setup,
    pair::{DEPTHS, Grant, Pair, pattern, yield_once},
};

/// A pair of [`DEPTHS`] of a fabric that can do vectored writes.
async fn vectored_pair(setup: Setup, runtime: Arc<dyn Runtime>, depths: QueuePairConfig) -> Option<Pair> {
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let able = pair.to_right.capabilities().vectored;
    super::is_able(&pair, "vectored", able).then_some(pair)
}

/// Lengths of segments for most rules: one of each size that some fabric treats differently.
const LENGTHS: [usize; 7] = [1, 4096, 0, 63, 100_001, 64, 65];

/// Segments of [`LENGTHS`] that go to `grant` with a gap of 10 bytes before each, last segment first in memory.
fn scattered(pair: &Pair, grant: &Grant, seed: u64) -> Vec<Segment> {
    let mut end = grant.range.length;
    let segments = LENGTHS.iter().enumerate().map(|(index, &length)| {
        end -= length as u64;
        let local = pair.left.source.filled(length + 1, seed + index as u64).slice(1..length + 1).unwrap();
        let remote = grant.part(end, length as u64);
        end -= 10;
        Segment { local, remote }
    });
    segments.collect()
}

fn scattered_bytes() -> usize {
    LENGTHS.iter().map(|length| length + 10).sum()
}

/// What [`scattered`] leaves in memory.
fn expected(grant: &Grant, segments: &[Segment]) -> Vec<u8> {
    let mut bytes = vec![0; grant.range.length as usize];
    for Segment { local, remote } in segments {
        let start = (remote.offset - grant.range.offset) as usize;
        bytes[start..start + local.len()].copy_from_slice(local);
    }
    bytes
}

pub async fn many_segments_are_one_completion_and_one_notification(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    let total: usize = LENGTHS.iter().sum();
    for round in 0..10_u32 {
        let grant = pair.grant_right(scattered_bytes());
        let segments = scattered(&pair, &grant, u64::from(round));
        let expected = expected(&grant, &segments);
        let write = pair.to_right.write_vectored(segments, Some(Immediate(round)));
        assert_eq!(pair.arrival_at_right().await, (round, total as u64), "the arrival tells all bytes");
        assert!(grant.take()[..] == expected[..], "round {round}");
        pair.step("the write", write).await.unwrap();
        let (left, right) = (pair.to_right.stats(), pair.to_left.stats());
        let rounds = u64::from(round) + 1;
        assert_eq!((left.operations, left.bytes_sent), (rounds, rounds * total as u64));
        assert_eq!((right.arrivals, right.bytes_received), (rounds, rounds * total as u64));
    }
    assert_eq!(pair.left.source.pool.stats().used_bytes, 0, "a buffer was kept");
}

pub async fn pages_land_where_the_table_says(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    let grant = pair.grant_right(16 * 4096);
    let table: Vec<u64> = [7, 0, 15, 3, 8].iter().map(|page| grant.range.offset + page * 4096).collect();
    let source = pair.left.source.filled(4 * 4096 + 100, 3);
    let segments = paged(&source, 4096, grant.range, &table).unwrap();
    let write = pair.to_right.write_vectored(segments, Some(Immediate(1)));
    assert_eq!(pair.arrival_at_right().await, (1, 4 * 4096 + 100));
    pair.step("the write", write).await.unwrap();
    let (landed, mut expected) = (grant.take(), vec![0; 16 * 4096]);
    for (page, bytes) in [7, 0, 15, 3, 8].iter().zip(source.chunks(4096)) {
        expected[page * 4096..page * 4096 + bytes.len()].copy_from_slice(bytes);
    }
    assert!(landed[..] == expected[..]);
}

pub async fn a_plain_vectored_write_is_visible_at_the_next_immediate(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    let grant = pair.grant_right(scattered_bytes());
    let segments = scattered(&pair, &grant, 5);
    let expected = expected(&grant, &segments);
    let write = pair.to_right.write_vectored(segments, None);
    let notified = pair.to_right.notify(Immediate(2));
    assert_eq!(pair.arrival_at_right().await, (2, 0), "a plain write announces nothing");
    assert!(grant.take()[..] == expected[..]);
    for result in pair.step("both", join_all([write, notified])).await {
        result.unwrap();
    }
}

/// Expects that a write of `segments` fails with an error that `is_expected` accepts, and that no part of it was
/// posted.
async fn fails_whole(
    pair: &Pair,
    grant: &Grant,
    segments: Vec<Segment>,
    is_expected: impl Fn(&FabricError) -> bool,
) {
    let before = pair.to_right.stats();
    let error = pair.step("a bad write", pair.to_right.write_vectored(segments, Some(Immediate(66)))).await;
    let error = error.unwrap_err();
    assert!(is_expected(&error), "unexpected: {error}");
    pair.works(&pair.to_right, &pair.to_left).await;
    assert!(grant.bytes().iter().all(|&byte| byte == 0), "a part of it was posted");
    assert_eq!(pair.to_right.stats().operations, before.operations + 1, "it counts as done");
    assert!(pair.to_right.failure().is_none() && pair.to_left.failure().is_none());
}

pub async fn one_bad_segment_fails_the_whole_before_anything_is_posted(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    let grant = pair.grant_right(scattered_bytes());
    for bad in 0..LENGTHS.len() {
        let mut segments = scattered(&pair, &grant, 1);
        segments[bad].remote.region.0 += 1000;
        let unknown = |error: &FabricError| matches!(error, FabricError::UnknownRemoteRegion { .. });
        fails_whole(&pair, &grant, segments, unknown).await;

        let mut segments = scattered(&pair, &grant, 1);
        segments[bad].remote.length += 1;
        let mismatch = |error: &FabricError| matches!(error, FabricError::LengthMismatch { .. });
        fails_whole(&pair, &grant, segments, mismatch).await;

        // An empty segment is never out of bounds.
        if LENGTHS[bad] > 0 {
            let mut segments = scattered(&pair, &grant, 1);
            segments[bad].remote.offset = grant.region.length - segments[bad].remote.length + 1;
            fails_whole(&pair, &grant, segments, mismatch).await;
        }
    }
}

pub async fn an_unregistered_segment_fails_the_whole(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    let grant = pair.grant_right(scattered_bytes());
    let stranger = tensorwire_memory::Pool::new(tensorwire_memory::PoolConfig::new("stranger")).unwrap();
    for bad in [0, 3, LENGTHS.len() - 1] {
        let mut segments = scattered(&pair, &grant, 1);
        segments[bad].local = stranger.try_alloc(LENGTHS[bad]).unwrap().freeze();
        let is_expected = |error: &FabricError| matches!(error, FabricError::NotRegistered { .. });
        fails_whole(&pair, &grant, segments, is_expected).await;
    }
}

pub async fn overlapping_segments_fail_the_whole(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    let grant = pair.grant_right(1000);
    let segment = |offset: u64, length: usize| Segment {
        local: pair.left.source.filled(length, offset),
        remote: grant.part(offset, length as u64),
    };
    let is_expected = |error: &FabricError| matches!(error, FabricError::OverlappingSegments { .. });
    let overlapping: [&[(u64, usize)]; 5] = [
        &[(0, 100), (99, 100)],
        &[(500, 10), (0, 100), (509, 1)],
        &[(300, 1), (0, 1000)],
        &[(7, 7), (7, 7)],
        &[(900, 50), (0, 10), (20, 10), (5, 1)],
    ];
    for ranges in overlapping {
        let segments = ranges.iter().map(|&(offset, length)| segment(offset, length)).collect();
        fails_whole(&pair, &grant, segments, is_expected).await;
    }
    // Adjacent segments do not overlap, and one source may be written to many ranges.
    let source = pair.left.source.filled(500, 8);
    let twice = [500, 0].map(|offset| Segment { local: source.clone(), remote: grant.part(offset, 500) });
    let write = pair.to_right.write_vectored(twice, Some(Immediate(3)));
    assert_eq!(pair.arrival_at_right().await, (3, 1000));
    pair.step("the write", write).await.unwrap();
    assert_eq!(grant.take()[..], [pattern(500, 8), pattern(500, 8)].concat()[..]);
}

pub async fn a_segment_that_was_not_granted_ends_the_connection(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    if !pair.knows_ranges() {
        return;
    }
    let (left_end, right_end) = pair.connect_again().await;
    let grant = pair.right.receive.grant(1000);
    left_end.add_remote_region(grant.region);
    let beyond = RemoteRange { offset: grant.range.offset + 1000, length: 64, ..grant.range };
    let segments = [grant.part(0, 64), beyond, grant.part(100, 64)]
        .map(|remote| Segment { local: pair.left.source.filled(64, 1), remote });
    let write = left_end.write_vectored(segments, Some(Immediate(1)));
    let error = super::pair::end_of(&pair.runtime, &right_end).await;
    let misbehaved =
        matches!(error, FabricError::PeerMisbehaved { violation: PeerViolation::NotGranted, .. });
    assert!(misbehaved, "unexpected: {error}");
    let _ended_either_way = pair.step("the write", write).await;
    assert!(grant.bytes()[100..].iter().all(|&byte| byte == 0), "written after the refusal");
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn more_segments_than_the_send_queue_holds_are_too_many_pieces(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 16 };
    let Some(pair) = vectored_pair(setup, runtime, depths).await else { return };
    let grant = pair.grant_right(64);
    let segments = |count: u64| -> Vec<Segment> {
        let segment =
            |index| Segment { local: pair.left.source.filled(8, 1), remote: grant.part(index * 8, 8) };
        (0..count).map(segment).collect()
    };
    let is_expected =
        |error: &FabricError| matches!(error, FabricError::TooManyPieces { pieces: 5, depth: 4 });
    fails_whole(&pair, &grant, segments(5), is_expected).await;
    let write = pair.to_right.write_vectored(segments(4), Some(Immediate(2)));
    assert_eq!(pair.arrival_at_right().await, (2, 32));
    pair.step("the write", write).await.unwrap();
}

pub async fn a_vectored_write_without_segments_is_a_notification(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(pair) = vectored_pair(setup, runtime, DEPTHS).await else { return };
    let announced = pair.to_right.write_vectored(Vec::new(), Some(Immediate(4)));
    let silent = pair.to_right.write_vectored(Vec::new(), None);
    assert_eq!(pair.arrival_at_right().await, (4, 0));
    for result in pair.step("both", join_all([announced, silent])).await {
        result.unwrap();
    }
}

pub async fn a_vectored_write_that_waits_for_room_posts_whole_and_in_order(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 16 };
    let Some(pair) = vectored_pair(setup, runtime, depths).await else { return };
    let grant = pair.grant_right(4 * 1000);
    let held: Vec<Operation> = (0..3).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let segments: Vec<Segment> = (0..4)
        .map(|index| Segment {
            local: pair.left.source.filled(1000, index),
            remote: grant.part(index * 1000, 1000),
        })
        .collect();
    let mut heavy = pin!(pair.to_right.write_vectored(segments, Some(Immediate(100))));
    assert!(futures::poll!(&mut heavy).is_pending(), "four of four slots were taken beside three");
    // There is room for this one, but it began to wait later.
    let mut light = pin!(pair.to_right.notify(Immediate(101)));
    assert!(futures::poll!(&mut light).is_pending(), "passed one that waits");
    let now = WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(Immediate(102)) };
    let error = pair.to_right.post_now(&now).unwrap_err();
    assert!(matches!(error, FabricError::SendQueueFull { depth: 4 }), "{error}");
    for value in 0..3 {
        assert_eq!(pair.arrival_at_right().await.0, value);
    }
    let all = join(join_all(held), join(heavy, light));
    let arrivals = async { [pair.arrival_at_right().await, pair.arrival_at_right().await] };
    let ((held, (heavy, light)), arrivals) = pair.step("everything", join(all, arrivals)).await;
    assert_eq!(arrivals, [(100, 4000), (101, 0)]);
    held.into_iter().chain([heavy, light]).for_each(|result| result.unwrap());
    let whole: Vec<u8> = (0..4).flat_map(|index| pattern(1000, index)).collect();
    assert!(grant.take()[..] == whole[..]);
}

pub async fn a_heavy_write_is_not_passed_by_light_ones_for_ever(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 256 };
    let Some(pair) = vectored_pair(setup, runtime.clone(), depths).await else { return };
    let grant = pair.grant_right(5 * 8);
    let segments: Vec<Segment> = (0..4)
        .map(|index| Segment { local: pair.left.source.filled(8, index), remote: grant.part(index * 8, 8) })
        .collect();
    // Three tasks keep the queue busy until the heavy write has completed; their writes consume no receives.
    let (local, remote) = (pair.left.source.filled(8, 4), grant.part(4 * 8, 8));
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut light = Vec::new();
    for _ in 0..3 {
        let (queue_pair, stop, local) = (pair.to_right.clone(), stop.clone(), local.clone());
        let (sender, done) = futures::channel::oneshot::channel();
        light.push(done);
        let work = async move {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                queue_pair.write(local.clone(), remote).await.unwrap();
                yield_once().await;
            }
            let _ = sender.send(());
        };
        runtime.spawn("light", Box::pin(work));
    }
    let arrivals = async { while pair.arrival_at_right().await != (2, 32) {} };
    let heavy = pair.to_right.write_vectored(segments, Some(Immediate(2)));
    let (written, ()) = pair.step("the heavy write", join(heavy, arrivals)).await;
    written.unwrap();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let arrivals = async { while pair.to_left.next_arrival().await.is_ok() {} };
    let done = async {
        join_all(light).await;
        pair.to_right.close().await;
    };
    pair.step("the light ones", join(done, arrivals)).await;
}

/// A write of `limit + more` bytes, at a fabric whose limit is small enough to try.
async fn at_the_limit(setup: Setup, runtime: Arc<dyn Runtime>, more: i64) {
    let pair = Pair::new(setup, runtime).await;
    let limit = pair.left.piece_bytes_max;
    if !super::is_able(&pair, "small_pieces", limit <= 16 << 20) {
        return;
    }
    let length = (limit as i64 + more) as usize;
    let grant = pair.grant_right(length + 7);
    let source = pair.left.source.filled(length, 3);
    let write = pair.to_right.write_imm(source.clone(), grant.part(7, length as u64), Immediate(1));
    let (written, arrival) = pair.step("the write", join(write, pair.arrival_at_right())).await;
    written.unwrap();
    assert_eq!(arrival, (1, length as u64));
    assert_eq!(pair.to_right.stats().operations, 1);
    assert!(grant.take()[7..] == source[..]);
}

pub async fn a_write_one_byte_below_the_piece_limit(setup: Setup, runtime: Arc<dyn Runtime>) {
    at_the_limit(setup, runtime, -1).await;
}

pub async fn a_write_at_the_piece_limit(setup: Setup, runtime: Arc<dyn Runtime>) {
    at_the_limit(setup, runtime, 0).await;
}

pub async fn a_write_one_byte_above_the_piece_limit(setup: Setup, runtime: Arc<dyn Runtime>) {
    at_the_limit(setup, runtime, 1).await;
}

pub async fn a_write_of_more_pieces_than_the_send_queue_holds(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 2, receive_depth: 16 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let limit = pair.to_right.capabilities().piece_bytes_max;
    if !super::is_able(&pair, "small_pieces", limit <= 16 << 20) {
        return;
    }
    let grant = pair.grant_right(2 * limit as usize + 1);
    let source = pair.left.source.filled(2 * limit as usize + 1, 3);
    let error = pair.to_right.write_imm(source.clone(), grant.range, Immediate(1)).await.unwrap_err();
    assert!(matches!(error, FabricError::TooManyPieces { pieces: 3, depth: 2 }), "unexpected: {error}");
    let source = source.slice(0..2 * limit as usize).unwrap();
    let write = pair.to_right.write_imm(source.clone(), grant.part(0, 2 * limit), Immediate(2));
    let (written, arrival) = pair.step("the write", join(write, pair.arrival_at_right())).await;
    written.unwrap();
    assert_eq!(arrival, (2, 2 * limit));
    assert!(grant.take()[..2 * limit as usize] == source[..]);
}

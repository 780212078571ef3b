//! Reads of many ranges by one operation: one completion, all or nothing.

use std::{pin::pin, sync::Arc};

use futures::future::{join, join_all};
use tensorwire_fabric::{
    Access, FabricError, Immediate, Operation, PeerViolation, QueuePair, QueuePairConfig, RemoteRange,
    Runtime, scattered,
};
use tensorwire_memory::BufMut;

use super::{
    super::{
        Setup,
        pair::{DEPTHS, RegisteredPool, end_of},
    },
    Readers, Source, a_close_ends, is_under_way_after,
};

/// Lengths of ranges for most rules about vectored reads: one of each size that some fabric treats differently.
const LENGTHS: [usize; 7] = [1, 4096, 0, 63, 100_001, 64, 65];

/// The gap between two ranges, if they have a gap.
const GAP: usize = 10;

/// The segments of a vectored read.
type Ranges = Vec<(RemoteRange, BufMut)>;

impl Readers {
    /// Ranges of `source` with these starts and lengths, each with a buffer of left's.
    fn ranges(&self, source: &Source, given: impl IntoIterator<Item = (usize, usize)>) -> Ranges {
        let range = |(start, length): (usize, usize)| {
            let offset = source.range.offset + start as u64;
            (RemoteRange { offset, length: length as u64, ..source.range }, self.destination(length))
        };
        given.into_iter().map(range).collect()
    }

    /// Expects that a read of `ranges` fails with an error that `is_expected` accepts, and that no part of it was
    /// requested.
    async fn fails_whole(&self, ranges: Ranges, is_expected: impl Fn(&FabricError) -> bool) {
        let before = self.pair.to_right.stats();
        let read = self.pair.to_right.read_vectored(ranges);
        let error = self.pair.step("a bad read", read).await.unwrap_err();
        assert!(is_expected(&error), "unexpected: {error}");
        assert_eq!(self.pair.left.receive.pool.stats().used_bytes, 0, "a buffer was kept");
        self.works(&self.pair.to_right).await;
        assert_eq!(self.pair.to_right.stats().operations, before.operations + 1, "it counts as done");
    }
}

/// [`LENGTHS`] with gaps of [`GAP`] bytes, the last range first in memory.
fn spread() -> Vec<(usize, usize)> {
    let mut end: usize = spread_bytes();
    let starts = LENGTHS.iter().map(|&length| {
        end -= length;
        let start = end;
        end -= GAP;
        (start, length)
    });
    starts.collect()
}

fn spread_bytes() -> usize {
    LENGTHS.iter().map(|length| length + GAP).sum()
}

/// The content of the ranges of `given`.
fn bytes_of(source: &Source, given: &[(usize, usize)]) -> Vec<Vec<u8>> {
    given.iter().map(|&(start, length)| source.buffer[start..start + length].to_vec()).collect()
}

fn bytes(buffers: &[BufMut]) -> Vec<Vec<u8>> {
    buffers.iter().map(|buffer| buffer.to_vec()).collect()
}

pub async fn many_ranges_are_read_by_one_operation(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let total: usize = LENGTHS.iter().sum();
    for round in 0..10_u64 {
        let (source, _exposure) = readers.exposed(spread_bytes(), round);
        let ranges = readers.ranges(&source, spread());
        let addresses: Vec<_> = ranges.iter().map(|(_, into)| into.as_ptr() as usize).collect();
        let read = readers.pair.step("the read", readers.pair.to_right.read_vectored(ranges)).await.unwrap();
        assert!(bytes(&read) == bytes_of(&source, &spread()), "round {round}");
        let landed: Vec<_> = read.iter().map(|buffer| buffer.as_ptr() as usize).collect();
        assert_eq!(landed, addresses, "not where they were to go");
        let stats = readers.pair.to_right.stats();
        assert_eq!((stats.operations, stats.bytes_sent), (round + 1, (round + 1) * total as u64));
    }
    // Ranges of several regions, and the same bytes twice.
    let pool = RegisteredPool::new(&readers.pair.right.domain, "other", Access::READABLE, 1 << 20);
    let (one, _one_exposed) = readers.exposed(5000, 1);
    let other = readers.source(&pool, 5000, 2);
    let _other_exposed = other.buffer.expose();
    let mut ranges = readers.ranges(&one, [(0, 5000), (100, 1), (100, 2000)]);
    ranges.extend(readers.ranges(&other, [(4999, 1), (0, 4999)]));
    let read = readers.pair.step("the read", readers.pair.to_right.read_vectored(ranges)).await.unwrap();
    assert!(bytes(&read[..3]) == bytes_of(&one, &[(0, 5000), (100, 1), (100, 2000)]));
    assert!(bytes(&read[3..]) == bytes_of(&other, &[(4999, 1), (0, 4999)]));
    assert_eq!(readers.pair.to_left.stats().arrivals, 0, "the peer gets no notification");
}

pub async fn one_range_is_scattered_to_many_buffers(setup: Setup, runtime: Arc<dyn Runtime>) {
    // More ranges than fit into one request, and than a device gets at once.
    let lengths: Vec<usize> = (0..100).map(|index| [7, 0, 4096, 513][index % 4]).collect();
    let depths = QueuePairConfig { send_depth: 100, receive_depth: 16 };
    let Some(readers) = Readers::new(setup, runtime, depths).await else { return };
    let total: usize = lengths.iter().sum();
    let (source, _exposure) = readers.exposed(total, 5);
    let buffers = || lengths.iter().map(|&length| readers.destination(length)).collect::<Vec<_>>();
    let read = readers.pair.to_right.read_vectored(scattered(source.range, buffers()).unwrap());
    let read = readers.pair.step("the read", read).await.unwrap();
    assert_eq!(read.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), lengths);
    assert!(bytes(&read).concat() == source.buffer[..]);
    let longer = RemoteRange { length: total as u64 + 1, ..source.range };
    let error = scattered(longer, buffers()).unwrap_err();
    assert!(matches!(error, FabricError::LengthMismatch { .. }), "unexpected: {error}");
    assert_eq!(readers.pair.to_right.stats().operations, 1);
}

pub async fn a_range_longer_than_a_piece_is_read_among_short_ones(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 64, receive_depth: 16 };
    let Some(readers) = Readers::new(setup, runtime, depths).await else { return };
    const LONG: usize = (9 << 20) + 3;
    let (source, _exposure) = readers.exposed(2 * LONG + 300, 8);
    // All of them adjacent.
    let given = [(0, 100), (100, LONG), (100 + LONG, 100), (200 + LONG, LONG), (200 + 2 * LONG, 100)];
    let read = readers.pair.to_right.read_vectored(readers.ranges(&source, given));
    let read = readers.pair.step("the read", read).await.unwrap();
    assert!(bytes(&read).concat() == source.buffer[..]);
}

pub async fn many_vectored_reads_may_be_outstanding(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 128, receive_depth: 16 };
    let Some(readers) = Readers::new(setup, runtime, depths).await else { return };
    let (source, _exposure) = readers.exposed(200_000, 3);
    // Beside each, a read of one range: neither ends the other.
    let given = |index: usize| -> Vec<(usize, usize)> {
        (0..3).map(|part| (index * 5000 + part * (70 + index % 2), 70)).collect()
    };
    let reads = (0..32).map(|index| {
        let read = readers.pair.to_right.read_vectored(readers.ranges(&source, given(index)));
        let range = RemoteRange { offset: source.range.offset + index as u64, length: 900, ..source.range };
        join(read, readers.pair.to_right.read(range, readers.destination(900)))
    });
    let reads: Vec<_> = reads.collect();
    for (index, both) in readers.pair.step("the reads", join_all(reads)).await.into_iter().enumerate() {
        assert!(bytes(&both.0.unwrap()) == bytes_of(&source, &given(index)), "read {index}");
        assert!(both.1.unwrap()[..] == source.buffer[index..][..900], "read {index}");
    }
    assert_eq!(readers.pair.to_right.stats().operations, 64);
}

pub async fn a_vectored_read_of_nothing_completes(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(100, 3);
    for ranges in [Vec::new(), readers.ranges(&source, [(0, 0)]), readers.ranges(&source, [(5, 0), (7, 0)])] {
        let count = ranges.len();
        let read = readers.pair.step("the read", readers.pair.to_right.read_vectored(ranges)).await.unwrap();
        assert!(read.len() == count && read.iter().all(|buffer| buffer.is_empty()));
    }
    assert_eq!(readers.pair.to_left.stats().arrivals, 0, "the peer gets no notification");
    readers.works(&readers.pair.to_right).await;
}

pub async fn one_bad_range_fails_the_whole_before_anything_is_asked(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(spread_bytes(), 1);
    for bad in 0..LENGTHS.len() {
        let mut ranges = readers.ranges(&source, spread());
        ranges[bad].0.region.0 += 1000;
        let unknown = |error: &FabricError| matches!(error, FabricError::UnknownRemoteRegion { .. });
        readers.fails_whole(ranges, unknown).await;

        let mut ranges = readers.ranges(&source, spread());
        ranges[bad].0.length += 1;
        let mismatch = |error: &FabricError| matches!(error, FabricError::LengthMismatch { .. });
        readers.fails_whole(ranges, mismatch).await;

        // An empty range is never out of bounds.
        if LENGTHS[bad] > 0 {
            let mut ranges = readers.ranges(&source, spread());
            ranges[bad].0.offset = source.region.length - ranges[bad].0.length + 1;
            readers.fails_whole(ranges, mismatch).await;
        }
    }
}

pub async fn an_unregistered_buffer_fails_the_whole(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(spread_bytes(), 1);
    let stranger = tensorwire_memory::Pool::new(tensorwire_memory::PoolConfig::new("stranger")).unwrap();
    for bad in [0, 3, LENGTHS.len() - 1] {
        let mut ranges = readers.ranges(&source, spread());
        ranges[bad].1 = stranger.try_alloc(LENGTHS[bad]).unwrap();
        let is_expected = |error: &FabricError| matches!(error, FabricError::NotRegistered { .. });
        readers.fails_whole(ranges, is_expected).await;
    }
    assert_eq!(stranger.stats().used_bytes, 0, "a buffer was kept");
}

pub async fn a_range_without_the_read_right_ends_the_connection(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(1000, 1);
    let closed = readers.source(&readers.pair.right.source, 1000, 1);
    let _closed_exposed = closed.buffer.expose();
    for place in 0..3 {
        let (left_end, right_end) = readers.pair.connect_again().await;
        left_end.add_remote_region(source.region);
        left_end.add_remote_region(closed.region);
        let mut ranges = readers.ranges(&source, [(0, 100), (500, 100)]);
        ranges.insert(place, (closed.range, readers.destination(1000)));
        let read = left_end.read_vectored(ranges);
        let (result, end) = join(read, end_of(&readers.pair.runtime, &right_end)).await;
        let names = readers.pair.names_violations();
        let (error, expected) = (result.unwrap_err(), PeerViolation::NoRight);
        let refused =
            matches!(error, FabricError::RemoteRefused { reason, .. } if reason == expected || !names);
        assert!(refused, "unexpected: {error}");
        let misbehaved =
            matches!(end, FabricError::PeerMisbehaved { violation, .. } if violation == expected);
        assert!(misbehaved || !names, "unexpected: {end}");
        assert_eq!(readers.pair.left.receive.pool.stats().used_bytes, 0, "a buffer was kept");
        readers.works(&readers.pair.to_right).await;
    }
}

pub async fn more_ranges_than_the_send_queue_holds_are_too_many_pieces(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 16 };
    let Some(readers) = Readers::new(setup, runtime, depths).await else { return };
    let (source, _exposure) = readers.exposed(1000, 1);
    let given = |count: usize| -> Vec<(usize, usize)> { (0..count).map(|index| (index * 8, 8)).collect() };
    let is_expected =
        |error: &FabricError| matches!(error, FabricError::TooManyPieces { pieces: 5, depth: 4 });
    readers.fails_whole(readers.ranges(&source, given(5)), is_expected).await;
    for _ in 0..10 {
        let read = readers.pair.to_right.read_vectored(readers.ranges(&source, given(4)));
        let read = readers.pair.step("the read", read).await.unwrap();
        assert!(bytes(&read) == bytes_of(&source, &given(4)));
    }
}

pub async fn a_vectored_read_that_waits_for_room_is_posted_whole(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 16 };
    let Some(readers) = Readers::new(setup, runtime, depths).await else { return };
    let pair = &readers.pair;
    let (source, _exposure) = readers.exposed(4000, 2);
    let given = [(0, 1000), (1000, 1000), (2500, 1000), (10, 10)];
    let held: Vec<Operation> = (0..3).map(|value| pair.to_right.notify(Immediate(value))).collect();
    let mut heavy = pin!(pair.to_right.read_vectored(readers.ranges(&source, given)));
    assert!(futures::poll!(&mut heavy).is_pending(), "four of four slots were taken beside three");
    let mut light = pin!(pair.to_right.notify(Immediate(3)));
    assert!(futures::poll!(&mut light).is_pending(), "passed one that waits");
    let arrivals = async {
        for value in 0..4 {
            assert_eq!(pair.arrival_at_right().await.0, value);
        }
    };
    let all = join(join(join_all(held), join(heavy, light)), arrivals);
    let ((held, (heavy, light)), ()) = pair.step("everything", all).await;
    held.into_iter().chain([light]).for_each(|result| result.unwrap());
    assert!(bytes(&heavy.unwrap()) == bytes_of(&source, &given));
}

pub async fn a_dropped_vectored_read_keeps_its_buffers_until_it_is_over(
    setup: Setup,
    runtime: Arc<dyn Runtime>,
) {
    const BYTES: usize = 4 << 20;
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    // Room for the buffers of one read only.
    let small =
        RegisteredPool::new(&readers.pair.left.domain, "four buffers", Access::LOCAL, 4 * BYTES as u64);
    let (source, _exposure) = readers.exposed(4 * BYTES, 3);
    // Another thread may finish a read before it is dropped: such a round is not counted.
    let mut dropped_under_way = 0;
    for round in 0..200 {
        if dropped_under_way == 4 {
            break;
        }
        let buffers = (0..4).map(|_| small.pool.try_alloc(BYTES).unwrap()).collect();
        let read = readers.pair.to_right.read_vectored(scattered(source.range, buffers).unwrap());
        dropped_under_way += usize::from(is_under_way_after(round % 4, read).await);
        let mut next = Vec::new();
        for _ in 0..4 {
            let buffer = readers.pair.step("a buffer's return", small.pool.alloc(BYTES)).await;
            next.push(buffer.unwrap());
        }
        next.iter_mut().for_each(|buffer| buffer.fill(0xAA));
        readers.works(&readers.pair.to_right).await;
        let untouched = next.iter().all(|buffer| buffer.iter().all(|&byte| byte == 0xAA));
        assert!(untouched, "written after the buffers were given back");
    }
    assert_eq!(dropped_under_way, 4, "reads that were not over when they were dropped");
    assert_eq!(small.pool.stats().leaked_bytes, 0);
}

pub async fn a_close_ends_vectored_reads_under_way(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(4 << 20, 4);
    let given = [(0, 1 << 20), (1 << 20, 70), (2 << 20, 2 << 20)];
    let read = |reader: &QueuePair| reader.read_vectored(readers.ranges(&source, given));
    a_close_ends(&readers, source.region, read, |read| bytes(read) == bytes_of(&source, &given)).await;
}

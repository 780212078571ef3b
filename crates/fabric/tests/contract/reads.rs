//! One-sided reads: the bytes that they return, and their refusals.

mod vectored;

pub use vectored::*;

use std::{future::Future, pin::pin, sync::Arc};

use futures::future::{join, join_all};
use tensorwire_fabric::{
    Access, FabricError, FabricKind, Immediate, PeerViolation, QueuePair, QueuePairConfig, RemoteRange,
    RemoteRegion, Runtime,
};
use tensorwire_memory::{Buf, BufMut, Exposure};

use super::{
    Setup,
    pair::{DEPTHS, Pair, RegisteredPool, end_of, pattern, yield_once},
};

/// A pair whose left end reads memory that right exposes.
struct Readers {
    pair: Pair,
    /// Right's memory, with the read right.
    exposed: RegisteredPool,
}

/// A part of right's memory.
struct Source {
    buffer: Buf,
    region: RemoteRegion,
    range: RemoteRange,
}

impl Readers {
    async fn new(setup: Setup, runtime: Arc<dyn Runtime>, depths: QueuePairConfig) -> Option<Self> {
        let pair = Pair::with_depths(setup, runtime, depths).await;
        let able = pair.to_right.capabilities().read;
        let exposed = RegisteredPool::new(&pair.right.domain, "exposed", Access::READABLE, 256 << 20);
        super::is_able(&pair, "read", able).then_some(Self { pair, exposed })
    }

    /// `length` bytes of right's, known to left, and not exposed yet.
    fn source(&self, pool: &RegisteredPool, length: usize, seed: u64) -> Source {
        let buffer = pool.filled(length, seed);
        let region = pool.region(buffer.block().unwrap());
        let (region_id, generation) = (region.region, region.generation);
        let offset = buffer.offset() as u64;
        let range = RemoteRange { region: region_id, generation, offset, length: length as u64 };
        self.pair.to_right.add_remote_region(region);
        Source { buffer, region, range }
    }

    fn exposed(&self, length: usize, seed: u64) -> (Source, Exposure) {
        let source = self.source(&self.exposed, length, seed);
        let exposure = source.buffer.expose();
        (source, exposure)
    }

    /// Left's memory.
    fn destination(&self, length: usize) -> BufMut {
        let mut into = self.pair.left.receive.pool.try_alloc(length).unwrap();
        into.fill(0);
        into
    }

    /// Expects that a read of `range` on a new connection is refused, and that only that connection ends.
    async fn is_refused(&self, region: RemoteRegion, range: RemoteRange, violation: PeerViolation) {
        let (left_end, right_end) = self.pair.connect_again().await;
        left_end.add_remote_region(region);
        let read = left_end.read(range, self.destination(range.length as usize));
        let (result, end) = join(read, end_of(&self.pair.runtime, &right_end)).await;
        let error = result.unwrap_err();
        let names = self.pair.names_violations();
        let refused =
            matches!(error, FabricError::RemoteRefused { reason, .. } if reason == violation || !names);
        assert!(refused, "unexpected: {error}");
        let misbehaved =
            matches!(end, FabricError::PeerMisbehaved { violation: seen, .. } if seen == violation || !names);
        assert!(misbehaved || !names, "unexpected: {end}");
        assert_eq!(self.pair.left.receive.pool.stats().used_bytes, 0, "the destination did not return");
        self.works(&self.pair.to_right).await;
    }

    async fn works(&self, left_end: &QueuePair) {
        let (source, _exposure) = self.exposed(100, 99);
        left_end.add_remote_region(source.region);
        let read = left_end.read(source.range, self.destination(100));
        assert_eq!(self.pair.step("a small read", read).await.unwrap()[..], source.buffer[..]);
    }
}

pub async fn a_read_gives_the_exposed_bytes(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    for length in [1, 63, 64, 65, 4096, 100_001, 1 << 20] {
        let (source, _exposure) = readers.exposed(length, length as u64);
        let into = readers.destination(length);
        let address = into.as_ptr() as usize;
        let read = readers.pair.step("a read", readers.pair.to_right.read(source.range, into)).await.unwrap();
        assert!(read[..] == pattern(length, length as u64)[..], "{length} bytes");
        assert_eq!(read.as_ptr() as usize, address, "not where it was to go");
        // A part of the exposed bytes may be read.
        let range =
            RemoteRange { offset: source.range.offset + length as u64 / 2, length: 1, ..source.range };
        let part = readers.pair.to_right.read(range, readers.destination(1));
        assert_eq!(readers.pair.step("a read", part).await.unwrap()[..], source.buffer[length / 2..][..1]);
    }
    let range = readers.exposed(1, 1).0.range;
    let nothing = readers.pair.to_right.read(RemoteRange { length: 0, ..range }, readers.destination(0));
    assert!(readers.pair.step("a read of nothing", nothing).await.unwrap().is_empty());
    assert_eq!(readers.pair.to_left.stats().arrivals, 0, "the peer gets no notification");
    assert_eq!(readers.pair.right.source.pool.stats().used_bytes, 0);
}

pub async fn a_read_may_be_as_long_as_the_memory(setup: Setup, runtime: Arc<dyn Runtime>) {
    // As many work requests as the read has pieces on a fabric that splits early.
    let depths = QueuePairConfig { send_depth: 64, receive_depth: 16 };
    let Some(readers) = Readers::new(setup, runtime, depths).await else { return };
    let length = (33 << 20) + 5;
    let (source, _exposure) = readers.exposed(length, 7);
    let read = readers.pair.to_right.read(source.range, readers.destination(length));
    assert!(readers.pair.step("the read", read).await.unwrap()[..] == source.buffer[..]);
}

pub async fn many_reads_may_be_outstanding(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 128, receive_depth: 16 };
    let Some(readers) = Readers::new(setup, runtime, depths).await else { return };
    let (source, _exposure) = readers.exposed(200_000, 3);
    let reads = (0..128_u64).map(|index| {
        let range =
            RemoteRange { offset: source.range.offset + index * 1000, length: 1 + index * 9, ..source.range };
        readers.pair.to_right.read(range, readers.destination(range.length as usize))
    });
    let reads: Vec<_> = reads.collect();
    for (index, read) in readers.pair.step("the reads", join_all(reads)).await.into_iter().enumerate() {
        let read = read.unwrap();
        assert!(read[..] == source.buffer[index * 1000..][..read.len()], "read {index}");
    }
    assert_eq!(readers.pair.to_right.stats().operations, 128);
}

pub async fn a_read_sees_the_writes_posted_before_it(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    // A block that is granted as a whole is never exposed. Only an adapter allows reads of it nevertheless.
    let able = !super::grants_whole_blocks() || readers.pair.to_right.kind() == FabricKind::VERBS;
    if !super::is_able(&readers.pair, "reads of what was granted", able) {
        return;
    }
    let both = Access { remote_read: true, ..Access::RECEIVE };
    let pool = RegisteredPool::new(&readers.pair.right.domain, "both", both, 16 << 20);
    let grant = pool.grant(4096);
    readers.pair.to_right.add_remote_region(grant.region);
    let write = readers.pair.to_right.write(readers.pair.left.source.filled(4096, 5), grant.range);
    // Exposed memory is immutable: the written bytes can be read after their grant has ended.
    readers.pair.step("the write", write).await.unwrap();
    let notified = readers.pair.to_right.notify(Immediate(1));
    assert_eq!(readers.pair.arrival_at_right().await.0, 1);
    readers.pair.step("the notification", notified).await.unwrap();
    let range = grant.range;
    let landed = grant.take().freeze();
    let _exposure = landed.expose();
    let read = readers.pair.to_right.read(range, readers.destination(4096));
    assert!(readers.pair.step("the read", read).await.unwrap()[..] == pattern(4096, 5)[..]);
}

pub async fn reads_and_writes_both_ways_at_once(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let pair = &readers.pair;
    let at_left = RegisteredPool::new(&pair.left.domain, "exposed at left", Access::READABLE, 64 << 20);
    for round in 0..6_u64 {
        let length = [5_000_000, 70_000, 9][round as usize % 3];
        let (there, _exposure) = readers.exposed(length, round);
        let back = at_left.filled(length, round + 100);
        let _exposure = back.expose();
        let region = at_left.region(back.block().unwrap());
        pair.to_left.add_remote_region(region);
        let range = RemoteRange {
            region: region.region,
            generation: region.generation,
            offset: back.offset() as u64,
            length: length as u64,
        };
        let into = pair.right.receive.pool.try_alloc(length).unwrap();
        let grant = pair.grant_right(length);
        let source = pair.left.source.filled(length, round + 200);
        let write = pair.to_right.write_imm(source.clone(), grant.range, Immediate(round as u32));
        let reads = join(
            pair.to_right.read(there.range, readers.destination(length)),
            pair.to_left.read(range, into),
        );
        let both = join(join(write, pair.arrival_at_right()), reads);
        let ((written, arrival), (left, right)) = pair.step("everything", both).await;
        written.unwrap();
        assert_eq!(arrival, (round as u32, length as u64));
        expect_bytes("read by left", &left.unwrap(), &there.buffer);
        expect_bytes("read by right", &right.unwrap(), &back);
        expect_bytes("written", &grant.take(), &source);
    }
}

/// Expects equal bytes. The message has the place and the values of a difference: bytes that never arrived are zeros.
fn expect_bytes(what: &str, got: &[u8], wanted: &[u8]) {
    if got == wanted {
        return;
    }
    let wrong: Vec<usize> =
        (0..wanted.len().max(got.len())).filter(|&at| got.get(at) != wanted.get(at)).collect();
    let sample = |bytes: &[u8]| bytes.iter().skip(wrong[0]).take(8).copied().collect::<Vec<_>>();
    panic!(
        "{what}: {} of {} bytes are wrong, within {}..={}: {:?} instead of {:?}",
        wrong.len(),
        wanted.len(),
        wrong[0],
        wrong[wrong.len() - 1],
        sample(got),
        sample(wanted),
    );
}

pub async fn a_dropped_read_keeps_its_destination_until_it_is_over(setup: Setup, runtime: Arc<dyn Runtime>) {
    const BYTES: usize = 16 << 20;
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    // Room for one destination only: a second allocation waits until the read has released the first.
    let small = RegisteredPool::new(&readers.pair.left.domain, "one buffer", Access::LOCAL, BYTES as u64);
    let (source, _exposure) = readers.exposed(BYTES, 3);
    // Another thread may finish a read before it is dropped: such a round is not counted.
    let mut dropped_under_way = 0;
    for round in 0..200 {
        if dropped_under_way == 4 {
            break;
        }
        let read = readers.pair.to_right.read(source.range, small.pool.try_alloc(BYTES).unwrap());
        dropped_under_way += usize::from(is_under_way_after(round % 4, read).await);
        let mut next = readers.pair.step("the buffer's return", small.pool.alloc(BYTES)).await.unwrap();
        next.fill(0xAA);
        readers.works(&readers.pair.to_right).await;
        assert!(next.iter().all(|&byte| byte == 0xAA), "written after the buffer was given back");
    }
    assert_eq!(dropped_under_way, 4, "reads that were not over when they were dropped");
    assert_eq!(small.pool.stats().leaked_bytes, 0);
}

/// Polls `read` `yields` + 1 times, drops it, and returns whether it was still pending.
async fn is_under_way_after<T>(yields: usize, read: impl Future<Output = T>) -> bool {
    let mut read = pin!(read);
    for _ in 0..yields {
        if futures::poll!(&mut read).is_ready() {
            return false;
        }
        yield_once().await;
    }
    futures::poll!(&mut read).is_pending()
}

pub async fn a_read_outlives_the_end_of_its_exposure(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, exposure) = readers.exposed(3 << 20, 4);
    let read = readers.pair.to_right.read(source.range, readers.destination(3 << 20));
    readers.works(&readers.pair.to_right).await;
    drop((exposure, source));
    let read = readers.pair.step("the read", read).await.unwrap();
    assert!(read[..] == pattern(3 << 20, 4)[..], "the bytes changed under the read");
}

pub async fn what_is_not_exposed_is_not_read(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    if !readers.pair.knows_ranges() {
        return;
    }
    let source = readers.source(&readers.exposed, 1000, 1);
    readers.is_refused(source.region, source.range, PeerViolation::NotExposed).await;
}

pub async fn what_is_exposed_no_more_is_not_read(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    if !readers.pair.knows_ranges() {
        return;
    }
    let (source, exposure) = readers.exposed(1000, 1);
    readers.works(&readers.pair.to_right).await;
    drop(exposure);
    readers.is_refused(source.region, source.range, PeerViolation::NotExposed).await;
}

pub async fn a_region_without_the_read_right_is_not_read(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    // Sources have no remote access by default, exposed or not.
    let source = readers.source(&readers.pair.right.source, 1000, 1);
    let _exposure = source.buffer.expose();
    readers.is_refused(source.region, source.range, PeerViolation::NoRight).await;
}

pub async fn a_read_past_the_exposed_bytes_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(1000, 1);
    if readers.pair.names_violations() {
        let longer = RemoteRange { length: 1001, ..source.range };
        readers.is_refused(source.region, longer, PeerViolation::NotExposed).await;
    }
    // A claim of more bytes than the region has.
    let claimed = RemoteRegion { length: u64::MAX, ..source.region };
    for offset in [source.region.length - 10, u64::MAX - 20, u64::MAX / 2] {
        let outside = RemoteRange { offset, length: 20, ..source.range };
        readers.is_refused(claimed, outside, PeerViolation::OutOfBounds).await;
    }
}

pub async fn a_read_with_a_wrong_key_or_generation_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(1000, 1);
    let wrong = RemoteRegion { key: source.region.key ^ 1, ..source.region };
    readers.is_refused(wrong, source.range, PeerViolation::WrongKey).await;
    let mut stale = (source.region, source.range);
    stale.0.generation.0 ^= 1;
    stale.1.generation.0 ^= 1;
    if !readers.pair.names_violations() {
        stale.0.key ^= 1; // Over verbs only the key carries the generation.
    }
    readers.is_refused(stale.0, stale.1, PeerViolation::UnknownRegion).await;
}

pub async fn a_read_that_cannot_be_posted_fails_alone(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(1000, 1);
    let to_right = &readers.pair.to_right;
    let error = to_right.read(source.range, readers.destination(999)).await.unwrap_err();
    assert!(matches!(error, FabricError::LengthMismatch { .. }), "unexpected: {error}");
    let mut unknown = source.range;
    unknown.region.0 += 1000;
    let error = to_right.read(unknown, readers.destination(1000)).await.unwrap_err();
    assert!(matches!(error, FabricError::UnknownRemoteRegion { .. }), "unexpected: {error}");
    let stranger = tensorwire_memory::Pool::new(tensorwire_memory::PoolConfig::new("stranger")).unwrap();
    let error = to_right.read(source.range, stranger.try_alloc(1000).unwrap()).await.unwrap_err();
    assert!(matches!(error, FabricError::NotRegistered { .. }), "unexpected: {error}");
    assert_eq!(readers.pair.left.receive.pool.stats().used_bytes, 0);
    readers.works(to_right).await;
}

pub async fn a_close_ends_reads_under_way(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some(readers) = Readers::new(setup, runtime, DEPTHS).await else { return };
    let (source, _exposure) = readers.exposed(8 << 20, 4);
    let read = |reader: &QueuePair| reader.read(source.range, readers.destination(8 << 20));
    a_close_ends(&readers, source.region, read, |read| read[..] == source.buffer[..]).await;
}

/// Closes connections, by either end, with eight reads under way on each, and passes their results to `is_right`.
async fn a_close_ends<T, F: Future<Output = Result<T, FabricError>>>(
    readers: &Readers,
    region: RemoteRegion,
    begin: impl Fn(&QueuePair) -> F,
    is_right: impl Fn(&T) -> bool,
) {
    for (yields, by_reader) in [(0, true), (1, false), (3, true), (5, false)] {
        let (left_end, right_end) = readers.pair.connect_again().await;
        left_end.add_remote_region(region);
        let reads: Vec<_> = (0..8).map(|_| begin(&left_end)).collect();
        for _ in 0..yields {
            yield_once().await;
        }
        let closing = if by_reader { &left_end } else { &right_end };
        let (reads, ()) = readers.pair.step("the close", join(join_all(reads), closing.close())).await;
        for read in reads {
            match read {
                Ok(read) => assert!(is_right(&read)),
                Err(FabricError::Closed | FabricError::PeerLost { .. }) => {}
                Err(other) => panic!("unexpected: {other}"),
            }
        }
        let stats = readers.pair.left.receive.pool.stats();
        assert_eq!((stats.used_bytes, stats.leaked_bytes), (0, 0), "a destination did not return");
    }
}

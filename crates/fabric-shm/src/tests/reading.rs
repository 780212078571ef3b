//! One-sided reads, with a neighbour that breaks the rules on either side.

use futures::FutureExt;
use tensorwire_fabric::{
    Access, FabricError, Look, LossCause, PeerViolation, ReadOperation, RegionGeneration, RegionId,
    RemoteRange, RemoteRegion,
};
use tensorwire_memory::{Buf, Exposure};

use super::{
    super::{
        limits::{CHUNK_BYTES, READS_MAX},
        ring::{Descriptor, Source},
    },
    Rig, on_a_runtime,
};

const CONSUMED_AT: usize = 128;
/// The region of the attacker's memory, which the victim assumes to be registered.
const REGION: RemoteRegion =
    RemoteRegion { region: RegionId(3), generation: RegionGeneration(4), base: 0, length: 1 << 30, key: 5 };

impl Rig {
    /// Lets the victim read `length` bytes of the attacker's memory.
    fn reads(&self, length: usize) -> ReadOperation {
        let mut into = self.pool.try_alloc(length).unwrap();
        into.fill(0);
        self.regions.register(self.runtime.as_ref(), into.block().unwrap(), Access::LOCAL);
        self.victim.add_remote_region(REGION);
        let (region, generation) = (REGION.region, REGION.generation);
        let read =
            self.victim.read(RemoteRange { region, generation, offset: 0, length: length as u64 }, into);
        assert_ne!(self.settle(), Look::Over);
        read
    }

    fn answers(&mut self, tag: u32, offset: u64, length: u64) {
        let source = Source::Answer { tag, index: 0, offset, length };
        self.publish(&Descriptor {
            immediate: None,
            continues: false,
            is_quiet: false,
            remote: None,
            source,
        });
    }

    /// Exposes memory of the victim; returns the range and key by which the attacker may name it.
    pub(super) fn exposes(&self, length: usize) -> (Exposure, RemoteRange, u32) {
        let bytes: Buf = self.pool.try_alloc(length).unwrap().freeze();
        let (block, offset) = (bytes.block().unwrap(), bytes.offset() as u64);
        let region = self.regions.register(self.runtime.as_ref(), block, Access::READABLE);
        let range = RemoteRange {
            region: region.region,
            generation: region.generation,
            offset,
            length: length as u64,
        };
        (bytes.expose(), range, region.key)
    }

    pub(super) fn asks(&mut self, range: RemoteRange, key: u32, tag: u32) {
        let remote = Some((range, key));
        self.publish(&Descriptor {
            immediate: None,
            continues: false,
            is_quiet: false,
            remote,
            source: Source::Asked { tag },
        });
    }

    fn breaks(&self) -> PeerViolation {
        match self.failure() {
            FabricError::PeerMisbehaved { violation, .. } => violation,
            other => panic!("unexpected: {other}"),
        }
    }

    fn in_use(&self) -> (u64, u64) {
        let stats = self.pool.stats();
        (stats.used_bytes, stats.leaked_bytes)
    }
}

fn is_read(result: Option<Result<tensorwire_memory::BufMut, FabricError>>, length: usize) -> bool {
    matches!(result, Some(Ok(bytes)) if bytes[..] == vec![7; length][..])
}

#[test]
fn a_read_takes_the_bytes_that_its_answer_names() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        rig.send_block(0, 2 * CHUNK_BYTES);
        for (tag, length) in [1, 64, 65, CHUNK_BYTES, CHUNK_BYTES + 1].into_iter().enumerate() {
            let mut read = rig.reads(length);
            let asked = rig.sees.descriptor(tag as u64).unwrap().unwrap();
            assert_eq!(asked.source, Source::Asked { tag: tag as u32 });
            rig.page.forge(CONSUMED_AT, tag as u64 + 1);
            rig.settle();
            assert!((&mut read).now_or_never().is_none(), "the request's completion is not the read's");
            rig.answers(tag as u32, 5, length as u64);
            rig.settle();
            assert!(is_read(read.now_or_never(), length));
        }
        assert_eq!(rig.in_use(), (0, 0));
        assert_eq!(rig.victim.stats().bytes_received, 0, "a read is no write of the peer");
    });
}

#[test]
fn answers_that_nobody_asked_for_are_refused() {
    // No read was posted; another tag; another length; an answer twice.
    for (reads, tag, length) in [(0, 0, 64), (1, 1, 64), (1, u32::MAX, 64), (1, 0, 63), (1, 0, u64::MAX)] {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            rig.send_block(0, 4096);
            let read: Vec<_> = (0..reads).map(|_| rig.reads(64)).collect();
            rig.answers(tag, 0, length);
            assert_eq!(rig.breaks(), PeerViolation::Malformed);
            assert!(read.into_iter().all(|read| matches!(read.now_or_never(), Some(Err(_)))));
            assert_eq!(rig.in_use(), (0, 0));
        });
    }
    on_a_runtime(|| {
        let mut rig = Rig::new();
        rig.send_block(0, 4096);
        let read = rig.reads(64);
        rig.answers(0, 0, 64);
        rig.answers(0, 0, 64);
        assert_eq!(rig.breaks(), PeerViolation::Malformed);
        assert!(is_read(read.now_or_never(), 64), "what was executed before is good");
    });
}

#[test]
fn answers_outside_their_block_are_refused_before_anything_is_touched() {
    for (offset, violation) in [
        (4096 - 63, PeerViolation::OutOfBounds),
        (u64::MAX, PeerViolation::OutOfBounds),
        (u64::MAX - 63, PeerViolation::OutOfBounds),
    ] {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            rig.send_block(0, 4096);
            let read = rig.reads(64);
            rig.answers(0, offset, 64);
            assert_eq!(rig.breaks(), violation);
            assert!(matches!(read.now_or_never(), Some(Err(FabricError::PeerMisbehaved { .. }))));
            assert_eq!(rig.in_use(), (0, 0));
        });
    }
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let read = rig.reads(64);
        rig.answers(0, 0, 64);
        assert_eq!(rig.breaks(), PeerViolation::Malformed, "a block that was never sent");
        drop(read);
    });
}

#[test]
fn a_peer_that_closes_in_the_middle_of_an_answer_ends_the_read() {
    const CHUNKS: usize = 4;
    for goes in 0..=CHUNKS {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            rig.send_block(0, CHUNKS * CHUNK_BYTES);
            let read = rig.reads(CHUNKS * CHUNK_BYTES);
            rig.answers(0, 0, (CHUNKS * CHUNK_BYTES) as u64);
            for _ in 0..goes {
                assert_eq!(rig.link.turn(), Look::More);
            }
            // From here on the bytes may be reused: only a read that is complete already is valid.
            rig.page.set_closed(1);
            assert_eq!(rig.settle(), Look::Over);
            let result = read.now_or_never();
            if goes == CHUNKS {
                assert!(is_read(result, CHUNKS * CHUNK_BYTES));
            } else {
                let cause = LossCause::ClosedByPeer;
                let lost =
                    matches!(result, Some(Err(FabricError::PeerLost { cause: seen, .. })) if seen == cause);
                assert!(lost, "after {goes} goes");
            }
            assert_eq!(rig.in_use(), (0, 0));
        });
    }
}

#[test]
fn bytes_that_a_peer_reads_stay_until_it_has_executed_the_answer_or_the_end() {
    for executes in [true, false] {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            let (exposure, range, key) = rig.exposes(4096);
            rig.asks(range, key, 9);
            assert_ne!(rig.settle(), Look::Over);
            let answer = rig.sees.descriptor(0).unwrap().unwrap();
            let Source::Answer { tag: 9, index: 0, offset, length: 4096 } = answer.source else {
                panic!("not the answer: {answer:?}")
            };
            assert_eq!(offset, range.offset);
            drop(exposure);
            assert_eq!(rig.in_use(), (4096, 0), "the peer is reading them");
            if executes {
                rig.page.forge(CONSUMED_AT, 1);
                assert_ne!(rig.settle(), Look::Over);
            } else {
                rig.page.set_closed(1);
                assert_eq!(rig.settle(), Look::Over);
                assert_ne!(rig.sees.closed(), 0, "they went back before the peer could know");
            }
            assert_eq!(rig.in_use(), (0, 0));
        });
    }
}

#[test]
fn more_reads_than_are_answered_end_the_connection() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let (exposure, range, key) = rig.exposes(64);
        // The ring holds eight: later answers wait for room, and count nevertheless.
        for tag in 0..READS_MAX {
            rig.asks(range, key, tag);
            assert_ne!(rig.settle(), Look::Over, "read {tag}");
        }
        rig.page.forge(CONSUMED_AT, 3);
        assert_ne!(rig.settle(), Look::Over);
        for tag in 0..3 {
            rig.asks(range, key, tag);
            assert_ne!(rig.settle(), Look::Over, "one more for each that was executed");
        }
        rig.asks(range, key, 0);
        assert_eq!(rig.breaks(), PeerViolation::TooManyReads);
        drop(exposure);
        assert_eq!(rig.in_use(), (0, 0));
    });
}

/// Changes a range that the attacker may read into one that it requests instead.
type Change = fn(RemoteRange) -> RemoteRange;

#[test]
fn reads_that_break_a_rule_are_refused_by_name() {
    let past = |range: RemoteRange| RemoteRange { length: range.length + 1, ..range };
    let beyond = |range: RemoteRange| RemoteRange { offset: u64::MAX, ..range };
    let stale =
        |range: RemoteRange| RemoteRange { generation: RegionGeneration(!range.generation.0), ..range };
    let strange = |range: RemoteRange| RemoteRange { region: RegionId(77), ..range };
    let rules: [(Change, u32, PeerViolation); 5] = [
        (past, 0, PeerViolation::NotExposed),
        (beyond, 0, PeerViolation::OutOfBounds),
        (stale, 0, PeerViolation::UnknownRegion),
        (strange, 0, PeerViolation::UnknownRegion),
        (|range| range, 1, PeerViolation::WrongKey),
    ];
    for (change, key_change, violation) in rules {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            let (_exposure, range, key) = rig.exposes(4096);
            rig.asks(change(range), key ^ key_change, 0);
            assert_eq!(rig.breaks(), violation);
            assert_eq!(rig.sees.descriptor(0), Ok(None), "nothing is answered");
        });
    }
}

#[test]
fn reads_and_answers_share_a_ring_that_is_full() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let (_exposure, range, key) = rig.exposes(64);
        // The victim's ring of eight is full of its own notifications.
        let notify = tensorwire_fabric::WorkRequest::Write {
            local: Buf::empty(),
            remote: None,
            immediate: Some(tensorwire_fabric::Immediate(1)),
        };
        let posted: Vec<_> = (0..8).map(|_| rig.victim.post_now(&notify).unwrap()).collect();
        rig.asks(range, key, 0);
        assert_ne!(rig.settle(), Look::Over);
        assert_eq!(rig.sees.descriptor(8), Ok(None), "there is no room for the answer yet");
        let first = rig.sees.descriptor(0).unwrap().unwrap();
        assert_eq!(first.source, Source::Nothing, "what is not executed is not overwritten");
        rig.page.forge(CONSUMED_AT, 1);
        assert_ne!(rig.settle(), Look::Over);
        assert!(rig.sees.descriptor(8).unwrap().is_some(), "one place suffices for it");
        rig.page.forge(CONSUMED_AT, 8);
        assert_ne!(rig.settle(), Look::Over);
        let answer = rig.sees.descriptor(8).unwrap().unwrap();
        assert!(matches!(answer.source, Source::Answer { tag: 0, .. }), "{answer:?}");
        assert_eq!(rig.victim.stats().operations, 8);
        drop(posted);
    });
}

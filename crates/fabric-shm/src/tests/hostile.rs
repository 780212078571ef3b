//! Neighbours that write nonsense into their own pages. They must break only their own connection: no panic, no access
//! out of bounds, no unbounded loop, and no change of memory that was not granted.

use std::os::fd::{AsFd, BorrowedFd};

use proptest::prelude::*;
use tensorwire_fabric::{FabricError, Immediate, Look, LossCause, PeerViolation, RemoteRange, WorkRequest};
use tensorwire_memory::{
    Buf, GrantEnd, Granted,
    copy::{CopyReason, copy_raw},
};

use super::{
    super::{
        frame::Frame,
        limits::{BLOCKS_MAX, CHUNK_BYTES},
        ring::{Descriptor, Source},
        sys,
    },
    IMPORTED_BYTES_MAX, Rig, memfd_of_sevens, on_a_runtime, sealed_block,
};

const CONSUMED_AT: usize = 128;
const CLOSED_AT: usize = 272;
const FIRST_SLOT_AT: usize = 4096;

fn expect_misbehaved(rig: &Rig, expected: PeerViolation) {
    match rig.failure() {
        FabricError::PeerMisbehaved { violation, .. } => assert_eq!(violation, expected),
        other => panic!("unexpected: {other}"),
    }
}

fn bytes_of(granted: &Granted) -> Vec<u8> {
    let mut bytes = vec![0xEE; granted.length()];
    granted.read_at(0, &mut bytes, CopyReason::Local).unwrap();
    bytes
}

fn notification(value: u32) -> Descriptor {
    Descriptor {
        immediate: Some(value),
        continues: false,
        is_quiet: false,
        remote: None,
        source: Source::Nothing,
    }
}

fn write_of(range: RemoteRange, key: u32, source: Source) -> Descriptor {
    Descriptor { immediate: Some(1), continues: false, is_quiet: false, remote: Some((range, key)), source }
}

#[test]
fn completions_that_were_never_earned_are_refused() {
    for count in [1, 9, u64::MAX, 1 << 63] {
        on_a_runtime(|| {
            let rig = Rig::new();
            rig.page.forge(CONSUMED_AT, count);
            expect_misbehaved(&rig, PeerViolation::Malformed);
        });
    }
}

#[test]
fn completions_taken_back_are_refused() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let request = WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(Immediate(1)) };
        let operations: Vec<_> = (0..3).map(|_| rig.victim.post_now(&request).unwrap()).collect();
        rig.page.forge(CONSUMED_AT, 2);
        assert_eq!(rig.settle(), Look::Idle);
        assert_eq!(rig.victim.stats().operations, 2);
        rig.page.forge(CONSUMED_AT, 1);
        expect_misbehaved(&rig, PeerViolation::Malformed);
        assert_eq!(rig.victim.stats().operations, 2, "each operation ends once");
        drop(operations);
    });
}

#[test]
fn a_sequence_word_out_of_turn_is_refused() {
    for sequence in [2, 8, 9, u64::MAX, 1 << 63] {
        on_a_runtime(|| {
            let rig = Rig::new();
            rig.page.forge(FIRST_SLOT_AT, sequence);
            expect_misbehaved(&rig, PeerViolation::Malformed);
        });
    }
}

#[test]
fn lengths_and_offsets_out_of_bounds_are_refused_before_anything_is_touched() {
    let huge = [1 << 20, 1 << 40, u64::MAX - 10, u64::MAX];
    for value in huge {
        on_a_runtime(|| {
            // In the destination's offset, in the length, in the source's offset.
            let mut rig = Rig::new();
            let (granted, range, key) = rig.lend(4096);
            let source = Source::Block { index: 0, offset: 0 };
            rig.send_block(0, 8192);
            rig.publish(&write_of(RemoteRange { offset: value, ..range }, key, source));
            expect_misbehaved(&rig, PeerViolation::OutOfBounds);
            assert_eq!(bytes_of(&granted), vec![0; 4096]);

            let mut rig = Rig::new();
            let (granted, range, key) = rig.lend(4096);
            rig.send_block(0, 8192);
            rig.publish(&write_of(RemoteRange { length: value, ..range }, key, source));
            assert!(matches!(rig.failure(), FabricError::PeerMisbehaved { .. }));
            assert_eq!(bytes_of(&granted), vec![0; 4096]);

            let mut rig = Rig::new();
            let (granted, range, key) = rig.lend(4096);
            rig.send_block(0, 8192);
            rig.publish(&write_of(range, key, Source::Block { index: 0, offset: value }));
            expect_misbehaved(&rig, PeerViolation::OutOfBounds);
            assert_eq!(bytes_of(&granted), vec![0; 4096]);
        });
    }
}

#[test]
fn a_source_that_reaches_past_its_block_is_refused() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let (granted, range, key) = rig.lend(4096);
        rig.send_block(0, 4096);
        rig.publish(&write_of(range, key, Source::Block { index: 0, offset: 1 }));
        expect_misbehaved(&rig, PeerViolation::OutOfBounds);
        assert_eq!(bytes_of(&granted), vec![0; 4096]);
    });
}

#[test]
fn a_block_that_was_never_sent_is_refused() {
    for index in [0, 1, u32::MAX] {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            let (_granted, range, key) = rig.lend(4096);
            rig.publish(&write_of(range, key, Source::Block { index, offset: 0 }));
            expect_misbehaved(&rig, PeerViolation::Malformed);
        });
    }
}

#[test]
fn a_well_formed_neighbour_is_served() {
    // A valid write succeeds with this rig, so the refusals above have the reasons that they name.
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let (granted, range, key) = rig.lend(4096);
        rig.send_block(0, 8192);
        rig.publish(&write_of(range, key, Source::Block { index: 0, offset: 4096 }));
        rig.publish(&notification(2));
        assert_eq!(rig.settle(), Look::Idle);
        assert_eq!(bytes_of(&granted), vec![7; 4096]);
        assert_eq!(rig.sees.consumed(), 2);
        assert_eq!(rig.victim.stats().arrivals, 2);
    });
}

/// Turns a write to memory that was written before into one that is refused.
type Spoil = fn(&Rig, &mut Option<Granted>, &mut RemoteRange, &mut u32);

#[test]
fn memory_that_was_written_before_is_checked_as_at_first() {
    const SPOILT: [(PeerViolation, Spoil); 6] = [
        (PeerViolation::WrongKey, |_, _, _, key| *key ^= 1),
        (PeerViolation::UnknownRegion, |_, _, range, _| range.generation.0 ^= 1),
        (PeerViolation::OutOfBounds, |_, _, range, _| range.offset = 1 << 40),
        (PeerViolation::NotGranted, |_, _, range, _| range.offset += 1),
        (PeerViolation::NotGranted, |_, granted, _, _| {
            drop(granted.take().unwrap().end(GrantEnd::Content).unwrap());
        }),
        (PeerViolation::UnknownRegion, |rig, granted, _, _| {
            rig.regions.deregister(granted.as_ref().unwrap().block().unwrap().id());
        }),
    ];
    for (violation, spoil) in SPOILT {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            let (granted, mut range, mut key) = rig.lend(4096);
            let mut granted = Some(granted);
            rig.send_block(0, 8192);
            for _ in 0..2 {
                rig.publish(&write_of(range, key, Source::Block { index: 0, offset: 0 }));
                assert_eq!(rig.settle(), Look::Idle);
            }
            spoil(&rig, &mut granted, &mut range, &mut key);
            rig.publish(&write_of(range, key, Source::Block { index: 0, offset: 0 }));
            expect_misbehaved(&rig, violation);
        });
    }
}

#[test]
fn memory_that_is_granted_again_is_written_again() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        rig.send_block(0, 8192);
        for length in [4096, 64, 8192, 4096] {
            let (granted, range, key) = rig.lend(length);
            rig.publish(&write_of(range, key, Source::Block { index: 0, offset: 0 }));
            assert_eq!(rig.settle(), Look::Idle);
            assert_eq!(granted.end(GrantEnd::Content).unwrap()[..], vec![7; length]);
        }
    });
}

#[test]
fn a_tiny_payload_is_copied_whole_whatever_the_budget_leaves() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let (granted, range, key) = rig.lend(CHUNK_BYTES + 64);
        rig.send_block(0, CHUNK_BYTES);
        // Ten bytes of the round's budget are left for a payload of 64.
        let most = RemoteRange { length: CHUNK_BYTES as u64 - 10, ..range };
        rig.publish(&write_of(most, key, Source::Block { index: 0, offset: 0 }));
        let bytes: Vec<u8> = (100..164).collect();
        let tiny = RemoteRange { offset: range.offset + CHUNK_BYTES as u64, length: 64, ..range };
        // SAFETY: the slot is not published yet, and has room for 64 bytes.
        unsafe { copy_raw(rig.page.inline_pointer(1), bytes.as_ptr(), 64, CopyReason::ShmInline) };
        rig.publish(&write_of(tiny, key, Source::Inline));
        assert_eq!(rig.link.turn(), Look::Worked);
        assert_eq!(rig.sees.consumed(), 2);
        assert_eq!(bytes_of(&granted)[CHUNK_BYTES..], bytes);
        assert_eq!(rig.settle(), Look::Idle);
    });
}

fn sent_on_the_socket(frame: &[u8], fds: &[BorrowedFd<'_>]) -> FabricError {
    let rig = Rig::new();
    sys::send(rig.socket.as_fd(), frame, fds).unwrap();
    rig.link.frames_came();
    rig.failure()
}

#[test]
fn frames_that_break_the_rules_end_the_connection() {
    on_a_runtime(|| {
        let block = sealed_block(4096);
        let fd = block.as_fd();
        let good = Frame::Block { index: 0, number: 0, length: 4096 }.encode();
        let skipped = Frame::Block { index: 1, number: 1, length: 4096 }.encode();
        let longer = [good.as_slice(), &[0; 100]].concat();
        let cases: [(&[u8], &[BorrowedFd<'_>]); 8] = [
            (&good, &[]),
            (&good, &[fd, fd]),
            (&skipped, &[fd]),
            (&good[..good.len() - 1], &[fd]),
            (&longer, &[fd]),
            (b"garbage", &[fd]),
            (&[0xFF; 64], &[]),
            (&Frame::Ready.encode(), &[]),
        ];
        for (number, (frame, fds)) in cases.into_iter().enumerate() {
            match sent_on_the_socket(frame, fds) {
                FabricError::PeerMisbehaved { violation, .. } => {
                    assert_eq!(violation, PeerViolation::Malformed, "case {number}");
                }
                other => panic!("case {number}: {other}"),
            }
        }
    });
}

#[test]
fn an_unsealed_block_ends_the_connection() {
    on_a_runtime(|| {
        let frame = Frame::Block { index: 0, number: 0, length: 4096 }.encode();
        let open = memfd_of_sevens(4096);
        let error = sent_on_the_socket(&frame, &[open.as_fd()]);
        let unsealed = PeerViolation::UnsealedBlock;
        assert!(
            matches!(error, FabricError::PeerMisbehaved { violation, .. } if violation == unsealed),
            "{error}"
        );
    });
}

#[test]
fn blocks_without_end_are_refused_at_the_cap() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let block = sealed_block(4096);
        for index in 0..=BLOCKS_MAX as u32 {
            let frame = Frame::Block { index, number: index.into(), length: 4096 }.encode();
            sys::send(rig.socket.as_fd(), &frame, &[block.as_fd()]).unwrap();
            rig.link.frames_came();
            let outcome = rig.settle();
            assert_eq!(outcome == Look::Over, index as usize == BLOCKS_MAX, "block {index}");
        }
        expect_misbehaved(&rig, PeerViolation::Malformed);
    });
}

#[test]
fn s4_memory_of_a_peer_is_mapped_up_to_the_cap() {
    const LENGTH: u64 = IMPORTED_BYTES_MAX / 4;
    on_a_runtime(|| {
        let rig = Rig::new();
        // The same memory again and again costs the peer nothing, and costs this side page tables.
        let block = sealed_block(LENGTH as usize);
        let send = |index| {
            let frame = Frame::Block { index, number: index.into(), length: LENGTH }.encode();
            sys::send(rig.socket.as_fd(), &frame, &[block.as_fd()]).unwrap();
            rig.link.frames_came();
        };
        for index in 0..4 {
            send(index);
            assert_eq!(rig.settle(), Look::Idle, "block {index}");
        }
        send(4);
        let error = rig.failure();
        assert!(error.to_string().contains("imported_bytes_per_connection_max"), "{error}");
        let told = (5 * LENGTH, IMPORTED_BYTES_MAX);
        let is_named =
            matches!(error, FabricError::ImportedBytesExhausted { shared, most } if (shared, most) == told);
        assert!(is_named, "{error}");
    });
}

#[test]
fn an_end_of_file_is_a_lost_peer() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let Rig { socket, link, victim, .. } = rig;
        drop(socket);
        link.frames_came();
        assert_eq!(link.turn(), Look::Over);
        let error = victim.failure().unwrap();
        let cause = LossCause::EndOfFile;
        assert!(matches!(error, FabricError::PeerLost { cause: seen, .. } if seen == cause), "{error}");
    });
}

#[test]
fn any_closed_word_ends_the_connection() {
    for code in [1, 2, 3, 4, 5, 0x100, 0x302, u64::MAX] {
        on_a_runtime(|| {
            let rig = Rig::new();
            rig.page.forge(CLOSED_AT, code);
            let _any_error_will_do = rig.failure();
        });
    }
}

#[test]
fn closing_in_the_middle_of_a_write_delivers_nothing() {
    const BYTES: usize = 4 * CHUNK_BYTES;
    for goes in 0..4 {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            let (granted, range, key) = rig.lend(BYTES);
            rig.send_block(0, BYTES);
            rig.publish(&write_of(range, key, Source::Block { index: 0, offset: 0 }));
            for _ in 0..goes {
                assert_eq!(rig.link.turn(), Look::More);
            }
            let landed = bytes_of(&granted).iter().filter(|&&byte| byte == 7).count();
            assert_eq!(landed, goes * CHUNK_BYTES, "one chunk per go");
            // From here on the source may be reused.
            rig.page.set_closed(1);
            assert_eq!(rig.settle(), Look::Over);
            assert_eq!(rig.victim.stats().arrivals, 0);
            assert_eq!(rig.sees.consumed(), 0);
            let error = rig.victim.failure().unwrap();
            let cause = LossCause::ClosedByPeer;
            assert!(matches!(error, FabricError::PeerLost { cause: seen, .. } if seen == cause), "{error}");
        });
    }
}

#[test]
fn closing_between_the_copy_and_the_delivery_delivers_nothing() {
    // The word is read again after the copy: a round that began before the close must see it.
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let (granted, range, key) = rig.lend(64);
        rig.publish(&write_of(RemoteRange { length: 64, ..range }, key, Source::Inline));
        let before = rig.link.connection().peer.closed();
        assert_eq!(before, 0);
        rig.page.set_closed(1);
        let mut target = super::super::target::Target::default();
        let end =
            target.run(rig.link.connection(), &tensorwire_testpoints::sync::Mutex::default()).unwrap_err();
        assert!(matches!(end.error, FabricError::PeerLost { .. }));
        assert_eq!(rig.victim.stats().arrivals, 0);
        drop(granted);
    });
}

/// One step of a fuzzing attacker.
#[derive(Debug, Clone)]
enum Mischief {
    /// Writes a word anywhere in the header or the ring.
    Word(usize, u64),
    /// Publishes a well-formed descriptor with arbitrary contents.
    Descriptor(Option<u32>, u64, u64, u8),
    /// Sends a block.
    Block,
    /// Sends bytes.
    Bytes(Vec<u8>),
}

fn mischief() -> impl Strategy<Value = Mischief> {
    let word = prop_oneof![any::<u64>(), 0_u64..20, Just(u64::MAX)];
    prop_oneof![
        1 => (0_usize..(4096 + 8 * 128) / 8, word).prop_map(|(at, word)| Mischief::Word(at * 8, word)),
        4 => (any::<Option<u32>>(), 0_u64..10_000, 0_u64..10_000, 0_u8..6)
            .prop_map(|(immediate, offset, length, kind)| Mischief::Descriptor(immediate, offset, length, kind)),
        2 => Just(Mischief::Block),
        1 => proptest::collection::vec(any::<u8>(), 0..64).prop_map(Mischief::Bytes),
    ]
}

fn commit(rig: &mut Rig, blocks: &mut u32, range: RemoteRange, key: u32, step: Mischief) {
    match step {
        Mischief::Word(at, value) => rig.page.forge(at, value),
        Mischief::Descriptor(immediate, offset, length, kind) => {
            let source = match kind {
                0 => Source::Inline,
                1 => Source::Nothing,
                2 => Source::Asked { tag: length as u32 },
                3 => Source::Answer { tag: 0, index: 0, offset: offset % 4096, length },
                _ => Source::Block { index: u32::from(kind - 4), offset: offset % 4096 },
            };
            let range = RemoteRange { offset: range.offset.wrapping_add(offset), length, ..range };
            let remote = (!matches!(source, Source::Answer { .. })).then_some((range, key));
            rig.publish(&Descriptor { immediate, continues: false, is_quiet: false, remote, source });
        }
        Mischief::Block => {
            rig.send_block(*blocks, 8192);
            *blocks += 1;
        }
        Mischief::Bytes(bytes) => {
            let _the_victim_may_have_hung_up = sys::send(rig.socket.as_fd(), &bytes, &[]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_neighbour_does_only_its_own_connection_suffers(
        steps in proptest::collection::vec(mischief(), 1..40),
        seed_block in any::<bool>(),
    ) {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            // Granted memory between memory that is not granted: only the middle may ever change.
            let before = rig.pool.try_alloc(4096).unwrap();
            let (granted, range, key) = rig.lend(4096);
            let after = rig.pool.try_alloc(4096).unwrap();
            let (before_copy, after_copy) = (before.to_vec(), after.to_vec());
            let mut blocks = 0;
            if seed_block {
                commit(&mut rig, &mut blocks, range, key, Mischief::Block);
            }
            for step in steps {
                if rig.link.turn() == Look::Over {
                    break;
                }
                commit(&mut rig, &mut blocks, range, key, step);
                rig.link.frames_came();
            }
            let outcome = rig.settle();
            assert_eq!(outcome == Look::Over, rig.victim.failure().is_some());
            assert_eq!(before[..], before_copy[..]);
            assert_eq!(after[..], after_copy[..]);
            // All landed bytes are of the attacker's blocks (7) or of its slots.
            assert_eq!(granted.length(), 4096);
            if outcome == Look::Over {
                let (left, right) = (rig.victim.stats(), rig.link.turn());
                assert_eq!(right, Look::Over);
                assert_eq!(left, rig.victim.stats(), "nothing moves after the end");
            }
        });
    }
}

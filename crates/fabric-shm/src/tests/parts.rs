//! Tests of single parts: layouts, frames, imports, doorbells and endings.

use std::{
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use proptest::prelude::*;
use rustix::fs::FallocateFlags;
use tensorwire_fabric::{
    ConnectionData, FabricError, LossCause, PeerViolation, RegionGeneration, RegionId, RemoteRange,
    TokioRuntime,
};

use super::{
    super::{
        doorbell::Ringer,
        ending::End,
        frame::{Address, Frame},
        import::{ImportError, ImportedBlock, map_sealed},
        limits::{CHUNK_BYTES, FRAME_BYTES, INLINE_BYTES, LEASES_MAX, SHORT_BYTES, SLOTS_MAX},
        ring::{Descriptor, OwnPage, PeerPage, Source, page_bytes},
        sys,
    },
    memfd_of_sevens, rings, sealed_block,
};

fn ranges() -> impl Strategy<Value = (RemoteRange, u32)> {
    let numbers = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>());
    numbers.prop_map(|(region, generation, key, offset, length)| {
        let (region, generation) = (RegionId(region), RegionGeneration(generation));
        (RemoteRange { region, generation, offset, length }, key)
    })
}

#[test]
fn a_peer_copies_the_bytes_of_writes_and_answers_alone() {
    let range =
        |length| RemoteRange { region: RegionId(1), generation: RegionGeneration(2), offset: 3, length };
    let (index, offset, tag) = (4, 5, 6);
    let lent = Source::Lent { index, offset, length: 70, slot: 7, generation: 8 };
    for (remote, source, copied) in [
        (None, Source::Nothing, 0),
        (Some(0), Source::Nothing, 0),
        (Some(7), Source::in_ring(&[1; 7]), 7),
        (Some(30), Source::Inline, 30),
        (Some(40), Source::Block { index, offset }, 40),
        (None, lent, 0),
        (Some(50), Source::Asked { tag }, 0),
        (None, Source::Answer { tag, index, offset, length: 60 }, 60),
    ] {
        let remote = remote.map(|length| (range(length), 9));
        let descriptor = Descriptor { immediate: None, continues: false, is_quiet: false, remote, source };
        assert_eq!(descriptor.copied(), copied, "{descriptor:?}");
    }
}

fn descriptors() -> impl Strategy<Value = Descriptor> {
    let bytes = proptest::collection::vec(any::<u8>(), 1..=INLINE_BYTES);
    let inline = (ranges(), bytes).prop_map(|((mut range, key), bytes)| {
        range.length = bytes.len() as u64;
        (Some((range, key)), Source::in_ring(&bytes))
    });
    let block = (ranges(), any::<u32>(), any::<u64>()).prop_map(|((mut range, key), index, offset)| {
        range.length = range.length.max(1);
        (Some((range, key)), Source::Block { index, offset })
    });
    let empty = ranges().prop_map(|(mut range, key)| {
        range.length = 0;
        (Some((range, key)), Source::Nothing)
    });
    let payload = prop_oneof![inline, block, empty, Just((None, Source::Nothing))];
    let asked = (ranges(), any::<u32>()).prop_map(|(remote, tag)| (Some(remote), Source::Asked { tag }));
    let answer = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>())
        .prop_map(|(tag, index, offset, length)| (None, Source::Answer { tag, index, offset, length }));
    let read = prop_oneof![asked, answer].prop_map(|(remote, source)| Descriptor {
        immediate: None,
        continues: false,
        is_quiet: false,
        remote,
        source,
    });
    let last = prop_oneof![
        any::<u32>().prop_map(|immediate| (Some(immediate), false)),
        any::<bool>().prop_map(|continues| (None, continues)),
    ];
    let write =
        (last, payload, any::<bool>()).prop_map(|((immediate, continues), (remote, source), is_quiet)| {
            Descriptor { immediate, continues, is_quiet, remote, source }
        });
    prop_oneof![write, read]
}

proptest! {
    #[test]
    fn a_descriptor_survives_its_encoding(descriptor in descriptors()) {
        prop_assert_eq!(Descriptor::decode(&descriptor.encode()), Ok(descriptor));
    }

    #[test]
    fn any_words_are_a_sound_descriptor_or_malformed(words in any::<[u64; 7]>(), flags in 0_u32..512) {
        let mut words = words;
        words[0] = words[0] >> 32 << 32 | u64::from(flags);
        if let Ok(descriptor) = Descriptor::decode(&words) {
            prop_assert!(descriptor.source != Source::Inline || descriptor.length() <= INLINE_BYTES as u64);
            let has_payload =
                matches!(descriptor.source, Source::Inline | Source::Short(_) | Source::Block { .. });
            prop_assert!(has_payload == (descriptor.length() > 0));
            let is_read = matches!(descriptor.source, Source::Asked { .. } | Source::Answer { .. });
            prop_assert!(!is_read || (descriptor.immediate.is_none() && !descriptor.continues));
        }
    }

    #[test]
    fn any_bytes_are_a_frame_or_malformed(bytes in proptest::collection::vec(any::<u8>(), 0..FRAME_BYTES)) {
        if let Ok(frame) = Frame::decode(&bytes) {
            prop_assert_eq!(frame.encode(), bytes);
        }
    }

    #[test]
    fn a_changed_frame_is_never_taken_for_longer_or_shorter(index in any::<u32>(), number in any::<u64>(), length in any::<u64>()) {
        let bytes = Frame::Block { index, number, length }.encode();
        for cut in 0..bytes.len() {
            prop_assert!(Frame::decode(&bytes[..cut]).is_err());
        }
        let longer = [bytes.as_slice(), &[0]].concat();
        prop_assert!(Frame::decode(&longer).is_err());
        prop_assert_eq!(Frame::decode(&bytes).map(|frame| frame.encode()), Ok(bytes));
    }
}

/// Whether words with these flags are a descriptor, by the format: a bit each for immediate, remote range, inline
/// bytes, bytes of a block, continuation, loan, question, answer and quiet.
fn is_sound(flags: u64, length: u64, region: u32) -> bool {
    let [immediate, remote, inline, block, continues, lent, asked, answer] =
        std::array::from_fn(|bit| flags >> bit & 1 == 1);
    let of_source = match [inline, block, lent, asked, answer].map(u8::from) {
        [0, 0, 0, 0, 0] => length == 0,
        [1, 0, 0, 0, 0] => remote && (1..=INLINE_BYTES as u64).contains(&length),
        [0, 1, 0, 0, 0] => remote && length > 0,
        [0, 0, 1, 0, 0] => immediate && !remote && length > 0 && region < LEASES_MAX,
        [0, 0, 0, 1, 0] => remote && !immediate && !continues,
        [0, 0, 0, 0, 1] => !remote && !immediate && !continues,
        _ => false,
    };
    of_source && flags < 512 && !(immediate && continues)
}

#[test]
fn every_set_of_flags_is_a_descriptor_or_malformed() {
    for flags in 0..1024_u64 {
        for length in [0, 1, INLINE_BYTES as u64, INLINE_BYTES as u64 + 1, u64::MAX] {
            for region in [0, LEASES_MAX - 1, LEASES_MAX] {
                let words = [flags, region.into(), 0, 0, length, 0, 0];
                let decoded = Descriptor::decode(&words);
                assert_eq!(decoded.is_ok(), is_sound(flags, length, region), "{flags:#x} {length} {region}");
                let Ok(descriptor) = decoded else { continue };
                assert_eq!(Descriptor::decode(&descriptor.encode()), Ok(descriptor));
                let is_written =
                    matches!(descriptor.source, Source::Inline | Source::Short(_) | Source::Block { .. });
                assert_eq!(descriptor.length(), if is_written { length } else { 0 }, "{flags:#x}");
            }
        }
    }
}

#[test]
fn what_a_descriptor_does_not_have_travels_as_zeros() {
    let of = |remote, source| {
        Descriptor { immediate: None, continues: false, is_quiet: false, remote, source }.encode()
    };
    let (region, generation) = (RegionId(2), RegionGeneration(3));
    let remote = Some((RemoteRange { region, generation, offset: 5, length: 6 }, 4));
    let range: u64 = 3 << 32 | 2;
    assert_eq!(of(None, Source::Nothing), [0; 7]);
    assert_eq!(of(remote, Source::Inline), [2 | 4, range, 4, 5, 6, 0, 0]);
    let short = Source::in_ring(&[8, 7, 6, 5, 4, 3]);
    assert_eq!(of(remote, short), [2 | 4, range, 4, 5, 6, u64::from_ne_bytes([8, 7, 6, 5, 4, 3, 0, 0]), 0]);
    let block = of(remote, Source::Block { index: 7, offset: 8 });
    assert_eq!(block, [2 | 8, range, 7 << 32 | 4, 5, 6, 8, 0]);
    let lent = of(None, Source::Lent { index: 7, offset: 8, length: 9, slot: 10, generation: 11 });
    assert_eq!(lent, [32, 10, 7 << 32, 0, 9, 8, 11]);
    assert_eq!(of(remote, Source::Asked { tag: 7 }), [2 | 64, range, 7 << 32 | 4, 5, 6, 0, 0]);
    let answer = of(None, Source::Answer { tag: 10, index: 7, offset: 8, length: 9 });
    assert_eq!(answer, [128, 10, 7 << 32, 0, 9, 8, 0]);
    let quiet = Descriptor {
        immediate: None,
        continues: false,
        is_quiet: true,
        remote: None,
        source: Source::Nothing,
    };
    assert_eq!(quiet.encode(), [256, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_payload_is_inline_where_it_is_too_long_for_the_descriptor_itself() {
    let range = RemoteRange { region: RegionId(1), generation: RegionGeneration(0), offset: 0, length: 0 };
    for (length, is_short) in [(SHORT_BYTES, true), (SHORT_BYTES + 1, false)] {
        let source = if is_short { Source::Short([1, 2]) } else { Source::Inline };
        let descriptor = Descriptor {
            immediate: None,
            continues: false,
            is_quiet: false,
            remote: Some((RemoteRange { length: length as u64, ..range }, 7)),
            source,
        };
        assert_eq!(Descriptor::decode(&descriptor.encode()), Ok(descriptor), "{length} bytes");
    }
}

#[test]
fn a_page_set_of_another_size_or_layout_is_refused() {
    let (own, fd) = OwnPage::new(64).unwrap();
    // 63 slots take as many pages as 64.
    for slots in [0, 3, 63, 32 * 1024, SLOTS_MAX * 2, u32::MAX] {
        assert!(PeerPage::import(fd.as_fd(), slots).is_err(), "{slots} slots");
    }
    assert!(PeerPage::import(fd.as_fd(), own.slots()).is_ok());
    own.forge(0, 0x1234);
    let refused = PeerPage::import(fd.as_fd(), own.slots()).unwrap_err();
    assert!(matches!(refused, ImportError::Refused(PeerViolation::Malformed)));
}

#[test]
fn a_page_set_has_at_most_so_many_slots() {
    let (own, fd) = OwnPage::new(SLOTS_MAX).unwrap();
    assert!(PeerPage::import(fd.as_fd(), own.slots()).is_ok());
    let length = page_bytes(2 * SLOTS_MAX);
    let fd = sys::memfd(c"too many slots").unwrap();
    sys::allocate(fd.as_fd(), length).unwrap();
    std::io::Write::write_all(&mut std::fs::File::from(fd.try_clone().unwrap()), b"TWSHM\0\0\x06").unwrap();
    sys::seal(fd.as_fd()).unwrap();
    let refused = PeerPage::import(fd.as_fd(), 2 * SLOTS_MAX).unwrap_err();
    assert!(matches!(refused, ImportError::Refused(PeerViolation::Malformed)));
}

#[test]
fn a_page_says_on_which_cpu_its_side_ran_last() {
    let (own, seen) = sleeper();
    assert!(!seen.is_here(), "it has not said");
    let stayed = (0..1000).any(|_| {
        let cpu = sys::current_cpu();
        own.set_cpu();
        let is_here = seen.is_here();
        let stayed = sys::current_cpu() == cpu;
        assert!(is_here || !stayed);
        stayed
    });
    assert!(stayed, "the thread never stays on its CPU");
    own.forge(280, u64::MAX);
    assert!(!seen.is_here(), "another CPU");
}

#[test]
fn a_release_rings_only_who_listens_and_sleeps() {
    let (own, seen) = sleeper();
    let rung = std::sync::atomic::AtomicU64::new(0);
    own.set_listens(true);
    assert!(!seen.must_be_rung_for_release(&rung), "it is awake");
    own.set_listens(false);
    own.set_sleep(1);
    assert!(!seen.must_be_rung_for_release(&rung), "it does not listen");
    own.set_listens(true);
    assert!(seen.must_be_rung_for_release(&rung));
    assert!(!seen.must_be_rung_for_release(&rung), "once a sleep");
}

#[test]
fn the_peer_cannot_map_our_pages_writable() {
    let (own, fd) = OwnPage::new(4).unwrap();
    let denied = sys::Mapping::new(fd.as_fd(), page_bytes(own.slots()), true).unwrap_err();
    assert_eq!(denied.raw_os_error(), Some(libc::EPERM));
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let reopened: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into();
    assert!(sys::Mapping::new(reopened.as_fd(), page_bytes(own.slots()), true).is_err());
}

#[test]
fn a_token_matches_itself_only() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let _guard = runtime.enter();
    let clock = TokioRuntime::current().unwrap();
    let (one, other) = (Address::random(&clock), Address::random(&clock));
    assert!(one.token.matches(&one.token.clone()));
    assert!(!one.token.matches(&other.token));
    assert_ne!(one.socket_name(), other.socket_name());
    assert!(!format!("{:?}", one.token).contains(|c: char| c.is_ascii_digit()), "a token is never printed");
    // Every single bit matters.
    let data = one.encode().0;
    for bit in (data.len() - 32) * 8..data.len() * 8 {
        let mut changed = data.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let changed = Address::decode(&ConnectionData(changed)).unwrap();
        assert!(!one.token.matches(&changed.token), "bit {bit}");
    }
}

#[test]
fn connection_data_of_another_version_length_or_fabric_is_refused_by_name() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let _guard = runtime.enter();
    let data = Address::random(&TokioRuntime::current().unwrap()).encode().0;
    let refused = |data: Vec<u8>| Address::decode(&ConnectionData(data)).unwrap_err().to_string();
    let of_version = |version| [&[version], &data[1..]].concat();
    assert!(refused(of_version(9)).contains("version 9"));
    // Pages of version 4 had no board.
    assert!(refused(of_version(4)).contains("version 4, this side 5: run the same release on both"));
    let mut other = data.clone();
    other[1] = b't';
    assert!(refused(other).contains("not that of a shared-memory queue pair"));
    assert!(refused(data[..49].to_vec()).contains("49 bytes"));
    assert!(refused([data.as_slice(), &[0]].concat()).contains("51 bytes"));
    assert!(refused(Vec::new()).contains("not that of"));
    assert!(Address::decode(&ConnectionData(data)).is_ok());
}

fn refused_as_unsealed(fd: &OwnedFd, length: u64) {
    let refused = map_sealed(fd.as_fd(), length).unwrap_err();
    assert!(matches!(refused, ImportError::Refused(PeerViolation::UnsealedBlock)), "{refused}");
}

fn add_seals(fd: &OwnedFd, seals: libc::c_int) {
    // SAFETY: no pointers are involved; the descriptor is ours.
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
}

#[test]
fn a_block_without_every_seal_is_refused() {
    refused_as_unsealed(&memfd_of_sevens(8192), 8192);
    let all = [libc::F_SEAL_FUTURE_WRITE, libc::F_SEAL_GROW, libc::F_SEAL_SHRINK, libc::F_SEAL_SEAL];
    for missing in all {
        let fd = memfd_of_sevens(8192);
        add_seals(&fd, all.into_iter().filter(|&seal| seal != missing).sum());
        refused_as_unsealed(&fd, 8192);
    }
    assert!(map_sealed(sealed_block(8192).as_fd(), 8192).is_ok());
}

#[test]
fn a_block_of_another_size_is_refused() {
    let fd = sealed_block(8192);
    for length in [0, 1, 4096, 8191, 8193, 12288, u64::MAX] {
        refused_as_unsealed(&fd, length);
    }
}

#[test]
fn a_block_that_is_not_allocated_is_refused() {
    let fd = sys::memfd(c"sparse").unwrap();
    // SAFETY: no pointers are involved; the descriptor is ours.
    assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), 1 << 20) }, 0);
    sys::seal(fd.as_fd()).unwrap();
    refused_as_unsealed(&fd, 1 << 20);
}

#[test]
fn e_a_block_with_a_hole_is_refused_whatever_lies_beyond_its_end() {
    const LENGTH: u64 = 1 << 20;
    let page = rustix::param::page_size() as u64;
    // The allocated parts: all except the first page, a middle one, or the last one; and none.
    let first = [0..0, page..LENGTH];
    let middle = [0..LENGTH / 2, LENGTH / 2 + page..LENGTH];
    let last = [0..LENGTH - page, 0..0];
    for there in [[0..0, 0..0], first, middle, last] {
        let fd = sys::memfd(c"holes").unwrap();
        let file = std::fs::File::from(fd.try_clone().unwrap());
        file.set_len(LENGTH).unwrap();
        for part in there {
            file.write_all_at(&vec![7; (part.end - part.start) as usize], part.start).unwrap();
        }
        // These blocks count as the file's, and a truncation to its present size removes them.
        rustix::fs::fallocate(&fd, FallocateFlags::KEEP_SIZE, LENGTH, LENGTH).unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 >= LENGTH, "the count of blocks shows the hole");
        sys::seal(fd.as_fd()).unwrap();
        refused_as_unsealed(&fd, LENGTH);
        file.set_len(LENGTH).unwrap();
        refused_as_unsealed(&fd, LENGTH);
    }
}

#[test]
fn a_whole_block_may_have_pages_beyond_its_end() {
    let fd = memfd_of_sevens(8192);
    rustix::fs::fallocate(&fd, FallocateFlags::KEEP_SIZE, 8192, 4096).unwrap();
    sys::seal(fd.as_fd()).unwrap();
    assert!(map_sealed(fd.as_fd(), 8192).is_ok());
}

#[test]
fn what_is_not_a_memfd_is_refused() {
    let (reader, writer) = std::io::pipe().unwrap();
    refused_as_unsealed(&reader.into(), 4096);
    refused_as_unsealed(&writer.into(), 4096);
    for path in ["/dev/zero", "/proc/self/maps", "/proc/self/exe"] {
        refused_as_unsealed(&std::fs::File::open(path).unwrap().into(), 4096);
    }
    refused_as_unsealed(&sys::eventfd().unwrap(), 4096);
}

#[test]
fn a_sealed_block_keeps_its_size_and_its_pages() {
    let fd = memfd_of_sevens(1 << 20);
    let writable = sys::Mapping::new(fd.as_fd(), 1 << 20, true).unwrap();
    sys::seal(fd.as_fd()).unwrap();
    // SAFETY: no pointers are involved in the first three; the last names a range of our own mapping, which
    // nobody reads through a reference.
    unsafe {
        assert_eq!(libc::ftruncate(fd.as_raw_fd(), 0), -1);
        assert_eq!(libc::ftruncate(fd.as_raw_fd(), 2 << 20), -1);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!(libc::fallocate(fd.as_raw_fd(), punch, 0, 1 << 20), -1);
        assert_eq!(libc::madvise(writable.base().as_ptr().cast(), 1 << 20, libc::MADV_REMOVE), -1);
    }
    assert!(sys::is_sealed(fd.as_fd(), 1 << 20).unwrap());
}

#[test]
fn an_imported_block_gives_only_what_lies_inside() {
    let length = 3 * CHUNK_BYTES + 4096;
    let block = ImportedBlock::new(sealed_block(length), length as u64).unwrap();
    let end = length as u64;
    for (offset, bytes) in [(0, 1), (CHUNK_BYTES as u64 - 1, 2), (end - 1, 1), (4096, CHUNK_BYTES)] {
        let pointer = block.resident(offset, bytes).unwrap().expect("inside");
        // SAFETY: `resident` promises that these bytes are readable; nobody writes them.
        let seen = unsafe { std::slice::from_raw_parts(pointer, bytes) };
        assert!(seen.iter().all(|&byte| byte == 7));
    }
    for (offset, bytes) in [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2), (1 << 62, 4096)] {
        assert!(block.resident(offset, bytes).unwrap().is_none(), "{bytes} bytes at {offset}");
    }
}

/// The page set of a sleeper, and its view by the ringer.
fn sleeper() -> (OwnPage, PeerPage) {
    let (own, fd) = OwnPage::new(1).unwrap();
    let seen = PeerPage::import(fd.as_fd(), 1).unwrap();
    (own, seen)
}

#[test]
fn a_bell_rings_once_per_sleep_and_not_for_the_awake() {
    let bell = sys::eventfd().unwrap();
    let ringer = Ringer::import(bell.try_clone().unwrap()).unwrap();
    let (own, seen) = sleeper();
    ringer.ring_if_asleep(&seen);
    assert_eq!(rings(&bell), 0, "never slept");
    for epoch in 1..5 {
        own.set_sleep(epoch);
        for _ in 0..10 {
            ringer.ring_if_asleep(&seen);
        }
        assert_eq!(rings(&bell), 1, "sleep {epoch}");
    }
}

/// Fills the counter, so that another ring waits, unless it must not wait.
fn fill(bell: &OwnedFd) {
    let full = (u64::MAX - 1).to_ne_bytes();
    // SAFETY: `full` is readable for its length.
    assert_eq!(unsafe { libc::write(bell.as_raw_fd(), full.as_ptr().cast(), 8) }, 8);
}

#[test]
fn e_a_thread_that_is_held_in_a_bell_is_let_go() {
    let bell = sys::eventfd().unwrap();
    let ringer = Arc::new(Ringer::import(bell.try_clone().unwrap()).unwrap());
    // No thread rings: nothing is done to the bell.
    ringer.free();
    fill(&bell);
    // The peer clears the flag between our check and our write. SAFETY: no pointers are involved.
    assert_eq!(unsafe { libc::fcntl(bell.as_raw_fd(), libc::F_SETFL, 0) }, 0);
    let (held, done) = (ringer.clone(), Arc::new(AtomicBool::new(false)));
    let is_done = done.clone();
    let thread = std::thread::spawn(move || {
        held.strike();
        is_done.store(true, Ordering::Release);
    });
    while !ringer.is_ringing() {
        std::thread::yield_now();
    }
    assert!(!done.load(Ordering::Acquire), "the write did not wait: the test proves nothing");
    ringer.free();
    thread.join().unwrap();
    assert!(ringer.is_spoilt(), "such a bell must not be rung again");
}

#[test]
fn a_full_bell_counts_as_rung() {
    let bell = sys::eventfd().unwrap();
    let ringer = Ringer::import(bell.try_clone().unwrap()).unwrap();
    let (own, seen) = sleeper();
    fill(&bell);
    for epoch in 1..100 {
        own.set_sleep(epoch);
        ringer.ring_if_asleep(&seen); // Neither blocks nor fails.
    }
    assert_eq!(rings(&bell), u64::MAX - 1);
}

#[test]
fn only_a_non_blocking_eventfd_is_a_bell() {
    let refused = |fd: OwnedFd| {
        assert!(matches!(Ringer::import(fd), Err(ImportError::Refused(PeerViolation::Malformed))));
    };
    let (reader, writer) = std::io::pipe().unwrap();
    refused(reader.into());
    refused(writer.into());
    refused(std::fs::File::open("/dev/null").unwrap().into());
    refused(sys::memfd(c"anon_inode:[eventfd]").unwrap());
    let blocking = sys::eventfd().unwrap();
    // SAFETY: no pointers are involved; the descriptor is ours.
    assert_eq!(unsafe { libc::fcntl(blocking.as_raw_fd(), libc::F_SETFL, 0) }, 0);
    refused(blocking);
}

#[test]
fn every_violation_is_told_to_the_peer_by_name() {
    let all = [
        PeerViolation::Malformed,
        PeerViolation::UnknownRegion,
        PeerViolation::WrongKey,
        PeerViolation::OutOfBounds,
        PeerViolation::NoRight,
        PeerViolation::NotGranted,
        PeerViolation::ReceiverNotReady,
        PeerViolation::UnsealedBlock,
        PeerViolation::BadToken,
    ];
    for violation in all {
        let received = End::from_peer(End::misbehaved(violation).code, 1).error;
        assert!(
            matches!(received, FabricError::RemoteRefused { reason, .. } if reason == violation),
            "{received}"
        );
    }
}

#[test]
fn a_closed_word_says_why_or_is_malformed() {
    let received = |code| End::from_peer(code, 77).error;
    let closed = LossCause::ClosedByPeer;
    assert!(matches!(received(End::closed().code), FabricError::PeerLost { cause, .. } if cause == closed));
    let not_ready = End::not_ready(FabricError::Closed).code;
    assert!(matches!(received(not_ready), FabricError::ReceiverNotReady { depth: 77, .. }));
    assert!(matches!(received(End::end_of_file("").code), FabricError::PeerLost { .. }));
    for code in [5, 0xFF, 2, 2 | 99 << 8, u64::MAX, 1 << 40] {
        let error = received(code);
        let malformed = PeerViolation::Malformed;
        assert!(matches!(error, FabricError::PeerMisbehaved { violation, .. } if violation == malformed));
    }
}

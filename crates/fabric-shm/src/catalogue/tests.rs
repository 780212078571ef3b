#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use tensorwire_fabric::{
    CELL_CONTENT_BYTES, CELL_WORDS, Catalogue, CellContent, CellNumber, PeerCatalogue, PeerViolation,
};
use tensorwire_memory::{Buf, Pool, PoolConfig, UserMemory};

use super::{
    BLOCK_AT, CATALOGUE_BYTES, Claims, HASH_AT, LENGTH_AT, NAMED, NAMELESS, NeighbourCatalogue, OFFSET_AT,
    OwnCatalogue, Reader, SEQUENCE_AT, name::NAME_BYTES,
};
use crate::{
    doorbell::Ringer,
    import::{ImportError, ImportedBlock, ImportedBlocks},
    lease::{Claimed, LeaseCaps, PeerProcess, Processes},
    rig::{memfd_of_sevens, sealed_block},
    ring::{OwnPage, PeerPage},
    sys,
};

/// A catalogue and its reader, as in two processes.
struct Sides {
    own: Arc<OwnCatalogue>,
    peer: NeighbourCatalogue,
    page: OwnPage,
    /// The reader, as the publisher knows it, and the page that it writes.
    reader: Arc<Reader>,
    reader_page: Arc<OwnPage>,
    blocks: Arc<ImportedBlocks>,
    pool: Pool,
}

const CAPS: LeaseCaps = LeaseCaps { leases: 4, bytes: 100_000 };

fn this_process() -> Arc<PeerProcess> {
    let name = format!("tensorwire-test-{}-{:?}", std::process::id(), thread::current().id());
    let listener = sys::listen(name.as_bytes(), 1).unwrap();
    let socket = sys::connect(name.as_bytes()).unwrap();
    drop(listener);
    let (id, pidfd) = sys::peer_process(socket.as_fd()).unwrap();
    Processes::new(CAPS).join(id, pidfd)
}

fn sides() -> Sides {
    let own = Arc::new(OwnCatalogue::new(CAPS).unwrap());
    let ((page, fd), (reader_page, reader_fd)) = (OwnPage::new(1).unwrap(), OwnPage::new(1).unwrap());
    let seen = Arc::new(PeerPage::import(fd.as_fd(), 1).unwrap());
    let seen_reader = Arc::new(PeerPage::import(reader_fd.as_fd(), 1).unwrap());
    let reader = own.join(seen_reader, this_process(), Arc::default());
    page.set_claimable();
    let blocks = Arc::<ImportedBlocks>::default();
    let peer = NeighbourCatalogue::import(own.fd(), seen.clone(), blocks.clone()).unwrap();
    let ringer = Arc::new(Ringer::import(sys::eventfd().unwrap()).unwrap());
    let reader_page = Arc::new(reader_page);
    let peer = peer.with_claims(Claims::new(reader_page.clone(), seen, ringer));
    let pool = Pool::new(PoolConfig { block_bytes: 1 << 20, ..PoolConfig::new("test") }).unwrap();
    Sides { own, peer, page, reader, reader_page, blocks, pool }
}

impl Sides {
    fn buffer(&self, length: usize, value: u8) -> Buf {
        let mut buffer = self.pool.try_alloc(length).unwrap();
        buffer.fill(value);
        buffer.freeze()
    }

    /// The reader maps the memory of `bytes`.
    fn share(&self, bytes: &Buf) {
        let block = bytes.block().unwrap();
        let fd = block.fd().unwrap().try_clone_to_owned().unwrap();
        let imported = ImportedBlock::new(fd, block.length() as u64).unwrap();
        self.blocks.insert(block.id().get(), Arc::new(imported));
    }

    fn write(&self, cell: CellNumber, word: u64, bytes: Buf) -> Vec<Buf> {
        self.own.write(cell, Some(CellContent { words: [word; CELL_WORDS], bytes }))
    }

    fn used(&self) -> u64 {
        self.pool.stats().used_bytes
    }

    /// A view of `name`, whose memory is resident.
    fn view(&self, name: &str) -> Option<Buf> {
        let reading = self.peer.find(name)?;
        let mut into = vec![0; reading.length as usize];
        assert!(self.peer.copy(&reading, 0, &mut into));
        self.peer.view(&reading)
    }

    /// The first word and the content of `name`, if the reader finds it.
    fn read(&self, name: &str) -> Option<(u64, Vec<u8>)> {
        let reading = self.peer.find(name)?;
        let mut into = vec![0; reading.length as usize];
        assert!(self.peer.copy(&reading, 0, &mut into));
        Some((reading.words[0], into))
    }
}

#[test]
fn what_is_written_is_found_until_it_is_emptied() {
    let sides = sides();
    assert!(sides.read("w").is_none());
    let cell = sides.own.cell("w").unwrap();
    assert!(sides.read("w").is_none(), "an assigned cell is empty");
    for length in [0, 1, 8, CELL_CONTENT_BYTES - 1, CELL_CONTENT_BYTES, CELL_CONTENT_BYTES + 1, 5000] {
        let bytes = sides.buffer(length.max(1), length as u8).slice(0..length).unwrap();
        if length == CELL_CONTENT_BYTES + 1 {
            let _before = sides.write(cell, 1, bytes.clone());
            assert!(sides.read("w").is_none(), "the reader has not mapped that memory");
            sides.share(&bytes);
        }
        let _before = sides.write(cell, length as u64, bytes);
        assert_eq!(sides.read("w"), Some((length as u64, vec![length as u8; length])));
    }
    assert_eq!(sides.own.cell("w"), Some(cell));
    assert_eq!(sides.own.write(cell, None).len(), 1);
    assert!(sides.read("w").is_none());
    // Memory that cannot be mapped.
    let joined = UserMemory::new().join(Arc::new(vec![7_u8; 100])).unwrap();
    let _nothing = sides.write(cell, 1, joined.buf().clone());
    assert!(sides.read("w").is_none());
    let _nothing = sides.write(cell, 1, joined.buf().slice(0..10).unwrap());
    assert_eq!(
        sides.read("w"),
        Some((1, vec![7; 10])),
        "a few bytes lie in the cell, wherever they come from"
    );
}

#[test]
fn a_part_of_a_content_is_copied_and_none_outside_of_it() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    for length in [40, 4000] {
        let mut buffer = sides.pool.try_alloc(length).unwrap();
        buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
        let bytes = buffer.freeze();
        sides.share(&bytes);
        let _before = sides.write(cell, 0, bytes.clone());
        let reading = sides.peer.find("w").unwrap();
        let mut into = [0; 16];
        assert!(sides.peer.copy(&reading, 8, &mut into));
        assert_eq!(into, bytes[8..24]);
        // 4 KiB from there on leave the content; the whole block is left by 1 MiB.
        let mut beyond = vec![0; 2 << 20];
        assert!(!sides.peer.copy(&reading, 30, &mut beyond));
        assert!(!sides.peer.copy(&reading, usize::MAX, &mut into));
    }
}

#[test]
fn s2_a_copy_of_a_replaced_content_or_of_a_closed_connection_does_not_count() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let (first, second) = (sides.buffer(100, 1), sides.buffer(100, 2));
    sides.share(&first);
    let _before = sides.write(cell, 1, first.clone());
    let reading = sides.peer.find("w").unwrap();
    let mut into = [0; 100];
    assert!(sides.peer.copy(&reading, 0, &mut into));
    let _before = sides.write(cell, 2, second);
    assert!(!sides.peer.copy(&reading, 0, &mut into));
    // Not even if the same content is there again.
    let _before = sides.write(cell, 1, first);
    assert!(!sides.peer.copy(&reading, 0, &mut into));
    let reading = sides.peer.find("w").unwrap();
    sides.page.set_closed(1);
    assert!(!sides.peer.copy(&reading, 0, &mut into));
    assert!(sides.peer.find("w").is_none());
}

#[test]
fn s1_the_catalogue_holds_the_memory_that_a_cell_names() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let used = || sides.pool.stats().used_bytes;
    let before = used();
    assert!(sides.write(cell, 1, sides.buffer(4096, 1)).is_empty());
    let one = used();
    assert!(one > before);
    let freed = sides.write(cell, 2, sides.buffer(4096, 2));
    assert!(freed.len() == 1 && used() > one);
    drop(freed);
    assert_eq!(used(), one);
    drop(sides.own.write(cell, None));
    assert_eq!(used(), before);
}

#[test]
fn every_name_has_a_cell_of_its_own_or_none() {
    let sides = sides();
    let mut cells = BTreeMap::new();
    let mut refused = 0;
    for number in 0..2 * NAMED as u64 {
        let name = format!("model.layers.{number}.weight");
        let Some(cell) = sides.own.cell(&name) else {
            refused += 1;
            assert!(sides.peer.find(&name).is_none());
            continue;
        };
        assert_eq!(cells.insert(cell.0, number), None, "{name} has the cell of another");
        let _before = sides.write(cell, number, Buf::empty());
    }
    // A full catalogue refuses; one that is half full does not.
    assert!(cells.len() > NAMED * 9 / 10 && refused > 0, "{} cells, {refused} refused", cells.len());
    for &number in cells.values() {
        assert_eq!(sides.read(&format!("model.layers.{number}.weight")), Some((number, Vec::new())));
    }
}

#[test]
fn s5_nameless_contents_are_found_by_any_number_that_has_one() {
    let sides = sides();
    let read = |number| sides.peer.find_nameless(number).map(|reading| reading.words[0]);
    let cells: Vec<_> = (0..NAMELESS as u32).map(|number| sides.own.nameless_cell(number).unwrap()).collect();
    assert!(cells.iter().all(|cell| read(cell.0).is_none()) && (0..300).all(|number| read(number).is_none()));
    for (number, cell) in (0..).zip(&cells) {
        let _before = sides.write(*cell, number, Buf::empty());
    }
    for number in 0..NAMELESS as u32 {
        assert_eq!(read(number), Some(number.into()));
    }
    for number in [NAMELESS as u32, NAMED as u32, u32::MAX - NAMED as u32 + 1, u32::MAX] {
        assert!(read(number).is_none() && sides.own.nameless_cell(number).is_none(), "{number}");
    }
    let _before = sides.own.write(cells[7], None);
    assert!(read(7).is_none() && read(8).is_some());
    // No name has such a cell.
    for number in 0..2 * NAMED {
        let cell = sides.own.cell(&number.to_string());
        assert!(cell.is_none_or(|cell| !cells.contains(&cell)));
    }
}

#[test]
fn s1_a_nameless_content_is_retired_while_it_is_viewed() {
    let sides = sides();
    let (cell, other) = (sides.own.nameless_cell(3).unwrap(), sides.own.nameless_cell(4).unwrap());
    let bytes = sides.buffer(5000, 1);
    sides.share(&bytes);
    let _before = sides.write(cell, 1, bytes);
    let _before = sides.write(other, 1, sides.buffer(5000, 2));
    let reading = sides.peer.find_nameless(3).unwrap();
    let mut into = vec![0; 5000];
    assert!(sides.peer.copy(&reading, 0, &mut into));
    let view = sides.peer.view(&reading).unwrap();
    let is_viewed = || sides.own.is_viewed_by(&sides.reader);
    assert!(is_viewed(), "its claim names the cell");
    assert_eq!(sides.own.write(other, None).len(), 1, "nobody views that one");
    assert!(sides.own.write(cell, None).is_empty() && sides.own.has_retired());
    assert!(sides.peer.view(&reading).is_none(), "it was replaced");
    assert!(is_viewed() && view.iter().all(|byte| *byte == 1));
    drop(view);
    assert!(!is_viewed());
    assert_eq!(sides.own.reclaim().len(), 1);
}

#[test]
fn names_differ_that_differ_in_length_or_in_one_byte() {
    let sides = sides();
    let longest = "x".repeat(NAME_BYTES);
    assert!(sides.own.cell(&format!("{longest}x")).is_none());
    assert!(sides.peer.find(&format!("{longest}x")).is_none());
    let names = [longest.as_str(), &longest[1..], "a", "b", "aaaaaaaa", "aaaaaaaab", "", "ä"];
    let cells = names.map(|name| sides.own.cell(name).unwrap());
    for (number, cell) in cells.into_iter().enumerate() {
        let _before = sides.write(cell, number as u64, Buf::empty());
    }
    for (number, name) in names.into_iter().enumerate() {
        assert_eq!(sides.read(name), Some((number as u64, Vec::new())), "{name}");
    }
}

#[test]
fn s2_no_reader_finds_a_mix_of_two_contents() {
    const LENGTH: usize = 3000;
    const READS: usize = 2000;
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    sides.share(&sides.buffer(LENGTH, 0));
    let done = AtomicBool::new(false);
    let (sides, done) = (&sides, &done);
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in 0.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                // The memory of the earlier content is reused for the next but one.
                drop(sides.write(
                    cell,
                    round,
                    sides.buffer(if round % 2 == 0 { LENGTH } else { 8 }, round as u8),
                ));
            }
        });
        let mut found = 0;
        while found < READS {
            let Some(reading) = sides.peer.find("w") else { continue };
            let mut into = vec![0; reading.length as usize];
            if !sides.peer.copy(&reading, 0, &mut into) {
                continue;
            }
            found += 1;
            let round = reading.words[0];
            assert_eq!(reading.words, [round; CELL_WORDS]);
            assert_eq!(reading.length, if round % 2 == 0 { LENGTH as u64 } else { 8 });
            assert!(into.iter().all(|&byte| byte == round as u8), "a mix of {round}");
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn s1_a_viewed_content_is_held_until_the_view_is_dropped() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let bytes = sides.buffer(5000, 1);
    sides.share(&bytes);
    let _nothing = sides.write(cell, 1, bytes);
    let (view, second) = (sides.view("w").unwrap(), sides.view("w").unwrap());
    assert!(view.is_foreign() && view.iter().all(|&byte| byte == 1));
    let one = sides.used();
    assert!(sides.write(cell, 2, sides.buffer(5000, 2)).is_empty(), "it is viewed");
    assert!(sides.own.has_retired() && sides.used() > one && sides.pool.stats().retired_bytes > 0);
    assert!(sides.own.reclaim().is_empty());
    drop(view);
    assert!(sides.own.reclaim().is_empty(), "another view is left");
    assert!(second.iter().all(|&byte| byte == 1));
    drop(second);
    assert_eq!(sides.own.reclaim().len(), 1);
    assert!(!sides.own.has_retired() && sides.used() == one);
    // The next publication frees a content that was viewed when its cell was emptied.
    let view = sides.view("w").unwrap();
    assert!(sides.own.write(cell, None).is_empty());
    drop(view);
    assert_eq!(sides.own.write(cell, None).len(), 1);
    assert_eq!(sides.used(), 0);
}

#[test]
fn s1_a_view_of_a_replaced_content_or_of_a_closed_connection_is_refused() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let bytes = sides.buffer(5000, 1);
    sides.share(&bytes);
    let _nothing = sides.write(cell, 1, bytes);
    let reading = sides.peer.find("w").unwrap();
    assert!(sides.peer.view(&reading).is_none(), "its pages are not resident yet");
    assert!(sides.view("w").is_some());
    drop(sides.write(cell, 2, sides.buffer(5000, 2)));
    assert!(sides.peer.view(&reading).is_none());
    let reading = sides.peer.find("w").unwrap();
    assert!(sides.peer.view(&reading).is_some());
    sides.page.set_closed(1);
    assert!(sides.peer.view(&reading).is_none());
    assert!(!sides.own.is_viewed_by(&sides.reader), "a claim that came too late is withdrawn");
}

#[test]
fn s4_a_reader_views_no_more_than_it_may_and_only_where_its_claims_are_looked_at() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let bytes = sides.buffer(30_000, 1);
    sides.share(&bytes);
    let _nothing = sides.write(cell, 1, bytes.slice(0..1000).unwrap());
    let mut few: Vec<_> = (0..CAPS.leases).map(|_| sides.view("w").unwrap()).collect();
    assert!(sides.view("w").is_none());
    few.pop();
    assert!(sides.view("w").is_some());
    few.clear();
    drop(sides.write(cell, 2, bytes));
    let large: Vec<_> = (0..3).map(|_| sides.view("w").unwrap()).collect();
    assert!(sides.view("w").is_none(), "{} bytes are viewed", 4 * 30_000);
    let process = sides.reader.process();
    assert_eq!(sides.own.claimed_by(process), Claimed { contents: 3, bytes: 90_000 });
    drop(large);
    assert!(sides.view("w").is_some());
    // Lent memory counts, too.
    let claims = sides.peer.claims().unwrap();
    claims.count(80_000);
    assert!(sides.view("w").is_none());
    claims.uncount(80_000);
    assert!(sides.view("w").is_some());
    assert_eq!(sides.own.claimed_by(process), Claimed::default());
    // A publisher that cannot watch the reader's process ignores its claims.
    let ((_, fd), (own, _)) = (OwnPage::new(1).unwrap(), OwnPage::new(1).unwrap());
    let unclaimable = Arc::new(PeerPage::import(fd.as_fd(), 1).unwrap());
    let ringer = Arc::new(Ringer::import(sys::eventfd().unwrap()).unwrap());
    let claims = Claims::new(Arc::new(own), unclaimable.clone(), ringer);
    let peer = NeighbourCatalogue::import(sides.own.fd(), unclaimable, sides.blocks.clone()).unwrap();
    let peer = peer.with_claims(claims);
    assert!(peer.view(&peer.find("w").unwrap()).is_none());
}

#[test]
fn s1_what_a_reader_views_outlives_its_connection_and_what_it_claims_at_random_holds_nothing() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let bytes = sides.buffer(5000, 1);
    sides.share(&bytes);
    let _nothing = sides.write(cell, 1, bytes);
    assert!(!sides.own.is_viewed_by(&sides.reader));
    let view = sides.view("w").unwrap();
    sides.page.set_closed(1);
    assert!(sides.own.is_viewed_by(&sides.reader));
    assert!(sides.own.write(cell, None).is_empty());
    assert!(sides.own.is_viewed_by(&sides.reader) && view.iter().all(|&byte| byte == 1));
    drop(view);
    assert!(!sides.own.is_viewed_by(&sides.reader));
    assert_eq!(sides.own.leave(&sides.reader).len(), 1);
    assert_eq!(sides.used(), 0);
    // A dead process views nothing, whatever it has claimed.
    let reader = sides.own.join(sides.reader.page().clone(), this_process(), Arc::default());
    let _nothing = sides.write(cell, 2, sides.buffer(5000, 2));
    for claim in [1, u64::MAX, u64::from(cell.0)] {
        sides.reader_page.claim(0, claim);
        assert!(!sides.own.is_viewed_by(&reader), "{claim:x}");
        assert_eq!(sides.write(cell, 2, sides.buffer(5000, 2)).len(), 1, "{claim:x}");
    }
    let edition = sides.own.cells.word(cell.0 as usize, SEQUENCE_AT).load(Ordering::SeqCst);
    sides.reader_page.claim(0, super::claim_of(cell.0, edition));
    assert!(sides.write(cell, 3, sides.buffer(5000, 3)).is_empty());
    assert_eq!(sides.own.leave(&reader).len(), 1);
}

#[test]
fn s5_what_is_no_catalogue_is_refused() {
    let (_page, fd) = OwnPage::new(1).unwrap();
    let seen = Arc::new(PeerPage::import(fd.as_fd(), 1).unwrap());
    let wrong = [
        (memfd_of_sevens(CATALOGUE_BYTES), PeerViolation::UnsealedBlock),
        (sealed_block(CATALOGUE_BYTES - 4096), PeerViolation::UnsealedBlock),
        (sealed_block(CATALOGUE_BYTES + 4096), PeerViolation::UnsealedBlock),
        // It has no magic.
        (sealed_block(CATALOGUE_BYTES), PeerViolation::Malformed),
    ];
    for (fd, expected) in wrong {
        let refused = NeighbourCatalogue::import(fd.as_fd(), seen.clone(), Arc::default()).unwrap_err();
        assert!(matches!(refused, ImportError::Refused(violation) if violation == expected), "{refused}");
    }
}

/// How many bytes of this mapping are resident in this process.
fn resident_bytes(mapping: &sys::Mapping) -> usize {
    let head = format!("{:x}-", mapping.base().as_ptr().addr());
    let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = mappings.lines().skip_while(|line| !line.starts_with(&head));
    let resident = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    resident.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn memory_a_peers_catalogue_is_resident_where_it_is_read() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let _before = sides.write(cell, 1, sides.buffer(10, 1));
    assert!(sides.peer.find("w").is_some());
    let resident = resident_bytes(&sides.peer.cells.mapping);
    // The kernel maps 64 KiB around a page that is read.
    assert!((1..=CATALOGUE_BYTES / 4).contains(&resident), "{resident} of {CATALOGUE_BYTES}");
}

#[test]
fn s5_a_peer_that_writes_nonsense_gets_nothing_out_of_its_reader() {
    let sides = sides();
    let cell = sides.own.cell("w").unwrap();
    let bytes = sides.buffer(1000, 1);
    sides.share(&bytes);
    let _before = sides.write(cell, 1, bytes);
    let reading = sides.peer.find("w").unwrap();
    let forge = |at, value| sides.own.cells.word(cell.0 as usize, at).store(value, Ordering::SeqCst);
    let number = reading.origin.edition;
    for (at, honest, lies) in [
        (LENGTH_AT, 1000, [u64::MAX - 1, (1 << 20) + 1, 1 << 63]),
        (OFFSET_AT, reading.origin.offset, [u64::MAX, (1 << 20) - 999, 1 << 63]),
        (BLOCK_AT, reading.origin.block, [0, u64::MAX, 1 << 40]),
        (SEQUENCE_AT, number, [number + 1, u64::MAX, 1]),
        (HASH_AT, sides.own.cells.word(cell.0 as usize, HASH_AT).load(Ordering::SeqCst), [0, 1, u64::MAX]),
    ] {
        for lie in lies {
            forge(at, lie);
            assert!(sides.peer.find("w").is_none(), "{at}: {lie}");
        }
        forge(at, honest);
        assert!(sides.peer.find("w").is_some());
    }
    // A reading that the caller has changed copies nothing, either.
    let mut into = vec![0; 1000];
    let mut changed = reading;
    changed.origin.offset = u64::MAX;
    assert!(!sides.peer.copy(&changed, 1, &mut into));
    changed.origin = reading.origin;
    changed.origin.cell = CellNumber(u32::MAX);
    assert!(!sides.peer.copy(&changed, 0, &mut into));
    // All cells belong to names, and all names have one hash: the search ends.
    for cell in 0..NAMED {
        sides.own.cells.word(cell, HASH_AT).store(u64::MAX, Ordering::SeqCst);
    }
    assert!(sides.peer.find("another").is_none() && sides.own.cell("another").is_none());
}

//! Descriptors, and the pages that hold them. Every page has one writer, so that a peer can spoil only what it sends.
//!
//! Each side makes one memfd. It holds that side's state as a consumer (how many of the peer's descriptors it has
//! executed, whether it sleeps), the state of the connection (`closed`), and the ring of its own descriptors:
//!
//! ```text
//! 0     magic and version
//! 64    sleep      epoch of the latest sleep of this side's driver
//! 128   consumed   descriptors of the peer that this side has executed. While nobody waits for it, it may be behind
//! 192   released   how many leases of the peer's memory this side has released
//! 256   listens    1 while this side wants to be rung for releases
//! 264   claimable  1 if this side looks at the peer's claims before it reuses memory that its catalogue named
//! 272   closed     0, or why this side ended the connection
//! 280   cpu        1 + the CPU on which this side last published or executed a descriptor
//! 4096  slots of 256 bytes: sequence word, descriptor of seven words, 192 bytes of inline payload. A payload of up to 16
//!       bytes is in the last two words of the descriptor instead, and so in the same cache line
//! then  lease words: for each slot of the peer's lease table, the generation that was released last
//! then  claim words: which contents of the peer's catalogue this side views
//! then  the board
//! ```
//!
//! A word that changes often has a cache line of its own: the words from 256 on, which the peer reads with every descriptor,
//! change rarely.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use tensorwire_fabric::{BOARD_WORDS, PeerViolation, RegionGeneration, RegionId, RemoteRange};

use crate::{
    limits::{CLAIMS_MAX, INLINE_BYTES, LEASES_MAX, SHORT_BYTES, SLOTS_MAX},
    sequence,
    sys::{self, Mapping},
    tail::Tail,
    words,
};

const MAGIC: u64 = u64::from_le_bytes(*b"TWSHM\0\0\x08");
const MAGIC_AT: usize = 0;
const SLEEP_AT: usize = 64;
const CONSUMED_AT: usize = 128;
const RELEASED_AT: usize = 192;
const LISTENS_AT: usize = 256;
const CLAIMABLE_AT: usize = 264;
const CLOSED_AT: usize = 272;
const CPU_AT: usize = 280;
const HEADER_BYTES: usize = 4096;
const SLOT_BYTES: usize = 256;
const WORD_BYTES: usize = 8;
const DESCRIPTOR_WORDS: usize = 7;
const SHORT_WORDS: usize = SHORT_BYTES / WORD_BYTES;
const INLINE_AT: usize = SLOT_BYTES - INLINE_BYTES;

/// A descriptor as the words of a slot.
pub(super) type Words = [u64; DESCRIPTOR_WORDS];

/// Where the bytes of a write are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// The write has none.
    Nothing,
    /// In the slot of the ring, beside the descriptor.
    Inline,
    /// In the descriptor's last words, in the order of memory, filled up with zeros.
    Short([u64; SHORT_WORDS]),
    /// In the writer's block of this number, from this offset on.
    Block { index: u32, offset: u64 },
    /// In the writer's block, too, but they are not copied: the target views them under this lease.
    Lent { index: u32, offset: u64, length: u64, slot: u32, generation: u64 },
    /// At the target: this is a read of the remote range, and the target answers it under this tag.
    Asked { tag: u32 },
    /// In the writer's block: this answers the read with this tag.
    Answer { tag: u32, index: u32, offset: u64, length: u64 },
}

/// One piece of a write, a notification, a loan, a read or the answer to a read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// Only the last piece of a write has one.
    pub(super) immediate: Option<u32>,
    /// Whether the next descriptor is a piece of the same logical write.
    pub(super) continues: bool,
    /// Whether the writer does not wait for its completion.
    pub(super) is_quiet: bool,
    /// Range and key; `None` for a notification without bytes, a loan and an answer.
    pub(super) remote: Option<(RemoteRange, u32)>,
    pub(super) source: Source,
}

// Without the key: keys are never logged.
impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Descriptor")
            .field("immediate", &self.immediate)
            .field("continues", &self.continues)
            .field("is_quiet", &self.is_quiet)
            .field("remote", &self.remote.map(|(range, _)| range))
            .field("source", &self.source)
            .finish()
    }
}

const HAS_IMMEDIATE: u32 = 1;
const HAS_REMOTE: u32 = 2;
const IS_INLINE: u32 = 4;
const IS_BLOCK: u32 = 8;
const CONTINUES: u32 = 16;
const IS_LENT: u32 = 32;
const IS_ASKED: u32 = 64;
const IS_ANSWER: u32 = 128;
const IS_QUIET: u32 = 256;
/// At most one of these is set. If none is, there are no bytes.
const SOURCES: u32 = IS_INLINE | IS_BLOCK | IS_LENT | IS_ASKED | IS_ANSWER;

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

impl Source {
    /// The source of a write whose bytes are in the ring: at most [`INLINE_BYTES`], which the caller copies into the
    /// slot if they are not in the result.
    pub(super) fn in_ring(bytes: &[u8]) -> Self {
        match bytes.len() {
            0 => Self::Nothing,
            1..=SHORT_BYTES => Self::Short(short(bytes)),
            _ => Self::Inline,
        }
    }
}

/// At most [`SHORT_BYTES`] bytes as words.
fn short(bytes: &[u8]) -> [u64; SHORT_WORDS] {
    let both = match (bytes.first_chunk(), bytes.last_chunk()) {
        // The two may overlap, so no length needs a copy of its own.
        (Some(first), Some(last)) => {
            let last = u128::from(u64::from_le_bytes(*last));
            u128::from(u64::from_le_bytes(*first)) | last << (8 * (bytes.len() - WORD_BYTES))
        }
        _ => bytes.iter().rev().fold(0, |word, byte| word << 8 | u128::from(*byte)),
    };
    [both as u64, (both >> 64) as u64].map(u64::to_le)
}

impl Descriptor {
    pub(super) fn encode(&self) -> Words {
        let mut flags = 0;
        if self.immediate.is_some() {
            flags |= HAS_IMMEDIATE;
        }
        if self.continues {
            flags |= CONTINUES;
        }
        if self.is_quiet {
            flags |= IS_QUIET;
        }
        let (mut region, mut generation, mut key, mut offset, mut length) = (0, 0, 0, 0, 0);
        let mut last = 0;
        if let Some((range, remote_key)) = self.remote {
            flags |= HAS_REMOTE;
            (region, generation, key) = (range.region.0, range.generation.0, remote_key);
            (offset, length) = (range.offset, range.length);
        }
        let (block, source_offset) = match self.source {
            Source::Nothing => (0, 0),
            Source::Inline => {
                flags |= IS_INLINE;
                (0, 0)
            }
            Source::Short([first, second]) => {
                flags |= IS_INLINE;
                last = second;
                (0, first)
            }
            Source::Block { index, offset } => {
                flags |= IS_BLOCK;
                (index, offset)
            }
            Source::Lent { index, offset, length: lent, slot, generation } => {
                flags |= IS_LENT;
                (region, length, last) = (slot, lent, generation);
                (index, offset)
            }
            Source::Asked { tag } => {
                flags |= IS_ASKED;
                (tag, 0)
            }
            Source::Answer { tag, index, offset, length: answered } => {
                flags |= IS_ANSWER;
                (region, length) = (tag, answered);
                (index, offset)
            }
        };
        let immediate = self.immediate.unwrap_or(0);
        [
            pair(flags, immediate),
            pair(region, generation),
            pair(key, block),
            offset,
            length,
            source_offset,
            last,
        ]
    }

    /// Parses words that the peer wrote.
    // Inlined, because a result in memory would also copy the fields that most descriptors lack.
    #[inline(always)]
    pub(super) fn decode(words: &Words) -> Result<Self, PeerViolation> {
        let [first, region, key, offset, length, source_offset, last] = *words;
        let (flags, immediate) = halves(first);
        let (region, generation) = halves(region);
        let (key, block) = halves(key);
        let range = RemoteRange {
            region: RegionId(region),
            generation: RegionGeneration(generation),
            offset,
            length,
        };
        let source = match flags & SOURCES {
            0 if length == 0 => Source::Nothing,
            IS_INLINE if (1..=SHORT_BYTES as u64).contains(&length) => Source::Short([source_offset, last]),
            IS_INLINE if (1..=INLINE_BYTES as u64).contains(&length) => Source::Inline,
            IS_BLOCK if length > 0 => Source::Block { index: block, offset: source_offset },
            IS_LENT if length > 0 && range.region.0 < LEASES_MAX => Source::Lent {
                index: block,
                offset: source_offset,
                length,
                slot: range.region.0,
                generation: last,
            },
            IS_ASKED => Source::Asked { tag: block },
            IS_ANSWER => Source::Answer { tag: range.region.0, index: block, offset: source_offset, length },
            _ => return Err(PeerViolation::Malformed),
        };
        let known = HAS_IMMEDIATE | HAS_REMOTE | CONTINUES | IS_QUIET | SOURCES;
        let has_remote = flags & HAS_REMOTE != 0;
        let has_immediate = flags & HAS_IMMEDIATE != 0;
        let continues = flags & CONTINUES != 0;
        let sound = match source {
            Source::Nothing => true,
            Source::Inline | Source::Short(_) | Source::Block { .. } => has_remote,
            Source::Lent { .. } => has_immediate && !has_remote,
            Source::Asked { .. } => has_remote && !has_immediate && !continues,
            Source::Answer { .. } => !has_remote && !has_immediate && !continues,
        };
        if flags & !known != 0 || !sound || (continues && has_immediate) {
            return Err(PeerViolation::Malformed);
        }
        Ok(Self {
            immediate: has_immediate.then_some(immediate),
            continues,
            is_quiet: flags & IS_QUIET != 0,
            remote: has_remote.then_some((range, key)),
            source,
        })
    }

    /// Whether it can be executed at once, because it has no payload outside the ring.
    pub(super) fn is_at_once(&self) -> bool {
        matches!(self.source, Source::Nothing | Source::Inline | Source::Short(_))
    }

    /// Bytes that the executing side copies.
    pub(super) fn copied(&self) -> u64 {
        match self.source {
            Source::Answer { length, .. } => length,
            Source::Nothing | Source::Lent { .. } | Source::Asked { .. } => 0,
            Source::Inline | Source::Short(_) | Source::Block { .. } => self.length(),
        }
    }

    /// Bytes that it writes at the target.
    pub(super) fn length(&self) -> u64 {
        match self.source {
            Source::Asked { .. } => 0,
            _ => self.remote.map_or(0, |(range, _)| range.length),
        }
    }
}

/// Bytes of a page set with `slots` slots.
pub(super) fn page_bytes(slots: u32) -> usize {
    (HEADER_BYTES
        + slots as usize * SLOT_BYTES
        + (LEASES_MAX as usize + CLAIMS_MAX as usize + BOARD_WORDS) * WORD_BYTES)
        .next_multiple_of(rustix::param::page_size())
}

/// A mapping with the layout above.
#[derive(Debug)]
struct Page {
    mapping: Mapping,
    slots: u32,
}

impl Page {
    /// The word at offset `at`, which is a multiple of 8 and less than `page_bytes(slots)`. `slots` is a power of two
    /// up to [`SLOTS_MAX`], and `mapping` has `page_bytes(slots)` bytes; `OwnPage::new` and `PeerPage::import` ensure
    /// both.
    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(WORD_BYTES) && at + WORD_BYTES <= self.mapping.length());
        // SAFETY: every `at` in this file is a multiple of 8 inside the mapping, which lives as long as `self`.
        // All words are accessed atomically by both processes; readers of a read-only mapping use relaxed loads
        // only, which work on read-only memory.
        unsafe { AtomicU64::from_ptr(self.mapping.base().as_ptr().add(at).cast()) }
    }

    fn slot_at(&self, position: u64) -> usize {
        let index = position as usize & (self.slots as usize - 1);
        HEADER_BYTES + index * SLOT_BYTES
    }

    /// `slot` is less than [`LEASES_MAX`].
    fn lease_at(&self, slot: u32) -> usize {
        HEADER_BYTES + self.slots as usize * SLOT_BYTES + (slot % LEASES_MAX) as usize * WORD_BYTES
    }

    /// `slot` is less than [`CLAIMS_MAX`].
    fn claim(&self, slot: u32) -> &AtomicU64 {
        let leases = HEADER_BYTES + self.slots as usize * SLOT_BYTES;
        self.word(leases + (LEASES_MAX + slot % CLAIMS_MAX) as usize * WORD_BYTES)
    }

    /// A word of the board.
    fn board(&self, at: usize) -> &AtomicU64 {
        let leases = HEADER_BYTES + self.slots as usize * SLOT_BYTES;
        self.word(leases + ((LEASES_MAX + CLAIMS_MAX) as usize + at % BOARD_WORDS) * WORD_BYTES)
    }

    /// The sequence word that a slot has once `position` is published in it.
    fn sequence(position: u64) -> u64 {
        position.wrapping_add(1)
    }
}

/// The page set that this side writes.
#[derive(Debug)]
pub(super) struct OwnPage {
    page: Page,
    /// The positions of its ring.
    pub(super) tail: Tail,
}

impl OwnPage {
    /// Makes, maps and seals a page set of at least `depth` slots, and returns it with its memfd, which the peer maps.
    pub(super) fn new(depth: u32) -> io::Result<(Self, OwnedFd)> {
        let slots = depth.clamp(1, SLOTS_MAX).next_power_of_two();
        let length = page_bytes(slots);
        let fd = sys::memfd(c"tensorwire-ring")?;
        sys::allocate(fd.as_fd(), length)?;
        let mapping = Mapping::new(fd.as_fd(), length, true)?;
        // The peer checks for holes, and pages that were never touched would count as holes.
        mapping.populate(0, length)?;
        sys::seal(fd.as_fd())?;
        let own = Self { page: Page { mapping, slots }, tail: Tail::new() };
        own.page.word(MAGIC_AT).store(MAGIC, Ordering::Release);
        Ok((own, fd))
    }

    /// Number of slots, a power of two.
    pub(super) fn slots(&self) -> u32 {
        self.page.slots
    }

    /// The address of the inline payload of `position`: [`INLINE_BYTES`] that the thread which took `position` may write
    /// until it is published.
    pub(super) fn inline_pointer(&self, position: u64) -> *mut u8 {
        // SAFETY: `slot_at` gives a slot of the page set for any position, and all slots lie inside the mapping.
        unsafe { self.page.mapping.base().as_ptr().add(self.page.slot_at(position) + INLINE_AT) }
    }

    /// Makes `words` visible to the peer as descriptor number `position`.
    pub(super) fn publish(&self, position: u64, words: &Words) {
        let slot = self.page.slot_at(position);
        let place = |(index, word): (usize, &u64)| (self.page.word(slot + (1 + index) * WORD_BYTES), *word);
        words::publish(self.page.word(slot), words.iter().enumerate().map(place), Page::sequence(position));
    }

    /// Stores on which CPU this side runs, as a hint for the peer.
    pub(super) fn set_cpu(&self) {
        let cpu = u64::from(sys::current_cpu()) + 1;
        if self.page.word(CPU_AT).load(Ordering::Relaxed) != cpu {
            self.page.word(CPU_AT).store(cpu, Ordering::Relaxed);
        }
    }

    /// Stores that `count` descriptors of the peer are executed.
    pub(super) fn set_consumed(&self, count: u64) {
        self.page.word(CONSUMED_AT).store(count, Ordering::Release);
    }

    /// Ends a lease, because this process no longer reads the bytes.
    pub(super) fn release(&self, slot: u32, generation: u64) {
        words::release(self.page.word(self.page.lease_at(slot)), self.page.word(RELEASED_AT), generation);
    }

    /// Stores that this side views `content` of the peer's catalogue. Valid only if the cell is unchanged afterwards.
    pub(super) fn claim(&self, slot: u32, content: u64) {
        sequence::claim(self.page.claim(slot), content);
    }

    /// Ends a claim, because this process no longer reads the bytes.
    pub(super) fn end_claim(&self, slot: u32) {
        words::release(self.page.claim(slot), self.page.word(RELEASED_AT), 0);
    }

    /// Stores that this side honours the peer's claims from now on.
    pub(super) fn set_claimable(&self) {
        self.page.word(CLAIMABLE_AT).store(1, Ordering::Release);
    }

    /// Stores whether the peer rings this side after a release. Called before [`set_sleep`](Self::set_sleep).
    pub(super) fn set_listens(&self, listens: bool) {
        let word = self.page.word(LISTENS_AT);
        if word.load(Ordering::Relaxed) != u64::from(listens) {
            word.store(u64::from(listens), Ordering::Relaxed);
        }
    }

    /// Announces that this side's driver is about to sleep for the `epoch`th time. It must look for work once more
    /// after this.
    pub(super) fn set_sleep(&self, epoch: u64) {
        words::fall_asleep(self.page.word(SLEEP_AT), epoch);
    }

    /// Marks the connection as over. Sources of unfinished writes may be reused after this: if the peer copies bytes
    /// that were written later, [`PeerPage::closed`] shows it the mark.
    pub(super) fn set_closed(&self, code: u64) {
        words::close(self.page.word(CLOSED_AT), code);
    }

    /// A word of this side's board.
    pub(super) fn board(&self, at: usize) -> &AtomicU64 {
        self.page.board(at)
    }

    /// Writes any word of the page, as a hostile peer would.
    #[cfg(any(test, fuzzing))]
    pub(super) fn forge(&self, at: usize, value: u64) {
        self.page.word(at).store(value, Ordering::SeqCst);
    }
}

/// The page set that the peer writes, mapped read-only. Nothing in it is trusted.
#[derive(Debug)]
pub(super) struct PeerPage {
    page: Page,
}

impl PeerPage {
    /// Checks and maps the peer's page set.
    pub(super) fn import(fd: BorrowedFd<'_>, slots: u32) -> Result<Self, super::import::ImportError> {
        if slots > SLOTS_MAX || !slots.is_power_of_two() {
            return Err(super::import::ImportError::Refused(PeerViolation::Malformed));
        }
        // Pages become resident when they are read: most of a page set is for more leases and notes than there ever are.
        let mapping = super::import::map_sealed(fd, page_bytes(slots) as u64)?;
        let peer = Self { page: Page { mapping, slots } };
        if peer.load(MAGIC_AT) != MAGIC {
            return Err(super::import::ImportError::Refused(PeerViolation::Malformed));
        }
        Ok(peer)
    }

    fn load(&self, at: usize) -> u64 {
        words::load(self.page.word(at))
    }

    /// Reads descriptor number `position` out of the ring, if it is published. Each word is read once, because the peer
    /// may change it.
    // As `Descriptor::decode`.
    #[inline(always)]
    pub(super) fn descriptor(&self, position: u64) -> Result<Option<Descriptor>, PeerViolation> {
        let slot = self.page.slot_at(position);
        let sequence = self.load(slot);
        if sequence != Page::sequence(position) {
            let previous = Page::sequence(position).saturating_sub(u64::from(self.page.slots));
            return if sequence == previous { Ok(None) } else { Err(PeerViolation::Malformed) };
        }
        let word = |index| self.page.word(slot + (1 + index) * WORD_BYTES).load(Ordering::Relaxed);
        Descriptor::decode(&std::array::from_fn(word)).map(Some)
    }

    /// Number of slots.
    pub(super) fn slots(&self) -> u32 {
        self.page.slots
    }

    /// The address of the inline payload of `position`, readable for [`INLINE_BYTES`].
    pub(super) fn inline_pointer(&self, position: u64) -> *const u8 {
        // SAFETY: `slot_at` gives a slot of the page set for any position, and all slots lie inside the mapping.
        unsafe { self.page.mapping.base().as_ptr().add(self.page.slot_at(position) + INLINE_AT) }
    }

    /// Whether [`descriptor`](Self::descriptor) may find something at `position`: one relaxed load.
    pub(super) fn may_have(&self, position: u64) -> bool {
        let sequence = self.page.word(self.page.slot_at(position)).load(Ordering::Relaxed);
        sequence != Page::sequence(position).saturating_sub(u64::from(self.page.slots))
    }

    /// Whether the peer last ran on this thread's CPU.
    pub(super) fn is_here(&self) -> bool {
        self.page.word(CPU_AT).load(Ordering::Relaxed) == u64::from(sys::current_cpu()) + 1
    }

    /// Number of our descriptors that the peer has executed, by its own count.
    pub(super) fn consumed(&self) -> u64 {
        self.load(CONSUMED_AT)
    }

    /// Number of our leases that the peer has released, by its own count.
    pub(super) fn released(&self) -> u64 {
        self.load(RELEASED_AT)
    }

    /// The generation of the lease in `slot` that the peer has released last, by its own account.
    pub(super) fn lease(&self, slot: u32) -> u64 {
        self.load(self.page.lease_at(slot))
    }

    /// Whether the peer honours this side's claims.
    pub(super) fn is_claimable(&self) -> bool {
        self.load(CLAIMABLE_AT) == 1
    }

    /// The peer's claims on contents of this side's catalogue.
    pub(super) fn claims(&self) -> impl Iterator<Item = u64> {
        let claimed = (0..CLAIMS_MAX).map(|slot| sequence::claimed(self.page.claim(slot)));
        claimed.filter(|content| *content != 0)
    }

    /// Whether the peer sleeps and was not rung for this sleep. `rung` is the latest epoch for which it was rung. The
    /// caller rings if this is true.
    pub(super) fn must_be_rung(&self, rung: &AtomicU64) -> bool {
        words::must_ring(self.page.word(SLEEP_AT), rung)
    }

    /// As [`must_be_rung`](Self::must_be_rung), after the release of a lease.
    pub(super) fn must_be_rung_for_release(&self, rung: &AtomicU64) -> bool {
        words::must_ring_for_release(self.page.word(LISTENS_AT), self.page.word(SLEEP_AT), rung)
    }

    /// The epoch of the peer's latest sleep.
    #[cfg(test)]
    pub(super) fn sleep(&self) -> u64 {
        self.page.word(SLEEP_AT).load(Ordering::Relaxed)
    }

    /// Whether the peer wants to be rung for releases.
    #[cfg(test)]
    pub(super) fn listens(&self) -> bool {
        self.page.word(LISTENS_AT).load(Ordering::Relaxed) != 0
    }

    /// A word of the peer's board, for relaxed loads alone.
    pub(super) fn board(&self, at: usize) -> &AtomicU64 {
        self.page.board(at)
    }

    /// Why the peer ended the connection; 0 while it has not.
    ///
    /// Called after a copy out of the peer's memory: if this is 0, the peer had not yet reused the bytes. The fence
    /// keeps the copy before the load, and pairs with the one in [`OwnPage::set_closed`].
    pub(super) fn closed(&self) -> u64 {
        words::is_closed(self.page.word(CLOSED_AT))
    }
}

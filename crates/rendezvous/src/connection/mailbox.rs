//! The mailbox of a connection between two workers of one host: short notes travel in boxes of shared memory, on its [`Board`], without a
//! message and without waiting for anything. *Nemesis* (Buntinas, Mercier and Gropp 2006) calls them fast boxes.
//!
//! Each side fills its boxes in turns, and counts what the peer has taken. What it writes for the peer is in these words:
//!
//! ```text
//! 0     parked   for each lane, how often it was parked
//! 16    taken    how many boxes of the peer were taken
//! 32    boxes    of 16 words each. Of the first box of a note:
//!       0        number of the box above 32 bits; number of notes by message before it above 12; lane above 8; bytes
//!       1        channel
//!       2        content
//!                Of each further box:
//!       0        number of the box above 32 bits; bytes of the note
//!       1        content
//! ```
//!
//! A note takes as many boxes as its content needs; [`LONG`] bytes in the first box mean that the second has their number. The number
//! shows that a box is filled anew, because an earlier note in the box has another one. The
//! [protocol](tensorwire_protocol::Mailbox) has the order between notes in the mailbox and notes by message. The simulator's boards run
//! this file, too, so it is not in the fabric for shared memory.

use std::sync::Arc;

use tensorwire_fabric::{BOARD_WORDS, Board, LINE_WORDS};
use tensorwire_protocol::{EagerContent, Note, limits::NOTE_BYTES_MAX};

use crate::sync::{AtomicU64, Ordering::Relaxed};

/// Lanes whose notes may travel in the mailbox.
pub(crate) const LANES: usize = 16;
/// Boxes of each side.
pub(crate) const BOXES: u64 = 128;
/// Words of a box, which are two cache lines. The header of a call and 8 bytes fit into the first.
const BOX_WORDS: usize = 2 * LINE_WORDS;
const CONTENT: usize = 2;
/// Bytes of the first box of a note.
pub(crate) const FIRST_BYTES: usize = (BOX_WORDS - CONTENT) * WORD_BYTES;
/// Bytes of each further box.
const MORE_BYTES: usize = (BOX_WORDS - 1) * WORD_BYTES;
/// The bytes in the first word of a note that takes several boxes.
const LONG: u64 = 0xff;
const WORD_BYTES: usize = size_of::<u64>();

const PARKED: usize = 0;
const TAKEN: usize = LANES;
const BOXES_AT: usize = 2 * LANES;
const _: () = assert!(FIRST_BYTES < LONG as usize && boxes_of(NOTE_BYTES_MAX) <= BOXES);
const _: () = assert!(BOXES_AT + BOXES as usize * BOX_WORDS <= BOARD_WORDS && BOXES.is_power_of_two());

const NUMBER_SHIFT: u32 = 32;
const MESSAGES_SHIFT: u32 = 12;
const LANE_SHIFT: u32 = 8;

/// This side of a mailbox. One thread at a time, which has the connection locked, calls `put`, `take`
/// and `park`.
#[derive(Debug)]
pub(crate) struct Mailbox {
    board: Arc<dyn Board>,
    /// A power of two.
    boxes: u64,
    /// How many boxes were filled.
    sent: AtomicU64,
    /// How many of these the peer has taken, as far as this side knows.
    taken_by_peer: AtomicU64,
    taken: AtomicU64,
    /// How often each lane was parked.
    parked: [AtomicU64; LANES],
    /// For which of its parkings each lane of the peer was woken last.
    woken: [AtomicU64; LANES],
}

impl Mailbox {
    pub(crate) fn new(board: Arc<dyn Board>) -> Self {
        Self::starting_at(board, BOXES, 0)
    }

    /// With `boxes` boxes, a power of two, after `filled` were filled each way.
    pub(crate) fn starting_at(board: Arc<dyn Board>, boxes: u64, filled: u64) -> Self {
        Self {
            board,
            boxes,
            sent: AtomicU64::new(filled),
            taken_by_peer: AtomicU64::new(filled),
            taken: AtomicU64::new(filled),
            parked: Default::default(),
            woken: Default::default(),
        }
    }

    /// Whether the next `count` boxes are empty. A peer that has taken more than was sent gets no more.
    fn has_room(&self, count: u64) -> bool {
        let sent = self.sent.load(Relaxed);
        let are_free = |taken: u64| {
            sent.checked_sub(taken).is_some_and(|untaken| untaken.saturating_add(count) <= self.boxes)
        };
        are_free(self.taken_by_peer.load(Relaxed)) || {
            let taken = self.board.peer(TAKEN);
            self.taken_by_peer.store(taken, Relaxed);
            are_free(taken)
        }
    }

    /// The number of the first box of the peer's next note and its first word, if it is here and follows `messages` notes by message.
    fn next(&self, messages: u64) -> Option<(u64, u64)> {
        let number = self.taken.load(Relaxed) + 1;
        let first = self.board.peer(self.box_at(number));
        (first >> MESSAGES_SHIFT == first_word(number, messages) >> MESSAGES_SHIFT).then_some((number, first))
    }

    /// Reads a note whose first word is known, and the number of its last box. Reads each word once, because the peer may change it.
    fn read(&self, number: u64, first: u64) -> (Note, u64) {
        let length = match first & LONG {
            LONG => (self.board.peer(self.box_at(number + 1)) as u32 as usize).min(NOTE_BYTES_MAX),
            length => (length as usize).min(FIRST_BYTES),
        };
        let mut bytes = EagerContent::from_elem(0, length.next_multiple_of(WORD_BYTES));
        let (words, _) = bytes.as_chunks_mut();
        let (head, rest) = words.split_at_mut(words.len().min(BOX_WORDS - CONTENT));
        let at = self.box_at(number);
        self.copy_out(at + CONTENT, head);
        for (further, part) in (number + 1..).zip(rest.chunks_mut(BOX_WORDS - 1)) {
            self.copy_out(self.box_at(further) + 1, part);
        }
        bytes.truncate(length);
        let note = Note { channel: self.board.peer(at + 1), lane: (first >> LANE_SHIFT) as u16 & 0xf, bytes };
        (note, number + boxes_of(length) - 1)
    }

    /// Copies the peer's words from `at` on.
    fn copy_out(&self, at: usize, into: &mut [[u8; WORD_BYTES]]) {
        (at..).zip(into).for_each(|(at, word)| *word = self.board.peer(at).to_ne_bytes());
    }

    /// Fills box `number` with the words of `head`, and then those of `content`.
    fn fill(&self, number: u64, head: &[u64], content: &[[u8; WORD_BYTES]]) {
        let (mut words, used) = ([0; BOX_WORDS], head.len() + content.len());
        let (first, rest) = words.split_at_mut(head.len());
        first.copy_from_slice(head);
        rest.iter_mut().zip(content).for_each(|(word, bytes)| *word = u64::from_ne_bytes(*bytes));
        self.board.publish(self.box_at(number), words.get(..used).unwrap_or_default());
    }

    fn box_at(&self, number: u64) -> usize {
        BOXES_AT + (number & (self.boxes - 1)) as usize * BOX_WORDS
    }
}

/// The first word of a box, without lane and length.
fn first_word(number: u64, messages: u64) -> u64 {
    (number << NUMBER_SHIFT) | ((messages << MESSAGES_SHIFT) & u64::from(u32::MAX))
}

/// How many boxes a note of `bytes` bytes takes.
const fn boxes_of(bytes: usize) -> u64 {
    1 + bytes.saturating_sub(FIRST_BYTES).div_ceil(MORE_BYTES) as u64
}

impl tensorwire_protocol::Mailbox for Mailbox {
    fn put(&self, (channel, lane): (u64, u16), parts: &[&[u8]], messages: u64) -> bool {
        let Some(Note { bytes: mut content, .. }) = Note::of(channel, lane, parts) else { return false };
        let (length, count) = (content.len(), boxes_of(content.len()));
        if usize::from(lane) >= LANES || !self.has_room(count) {
            return false;
        }
        content.resize(length.next_multiple_of(WORD_BYTES), 0);
        let (content, _) = content.as_chunks();
        let (head, rest) = content.split_at(content.len().min(BOX_WORDS - CONTENT));
        let number = self.sent.load(Relaxed) + 1;
        // The first box is visible last.
        for (further, part) in (number + 1..).zip(rest.chunks(BOX_WORDS - 1)) {
            self.fill(further, &[further << NUMBER_SHIFT | length as u64], part);
        }
        let bytes = if count == 1 { length as u64 } else { LONG };
        let first = first_word(number, messages) | u64::from(lane) << LANE_SHIFT | bytes;
        self.fill(number, &[first, channel], head);
        self.sent.store(number + count - 1, Relaxed);
        true
    }

    fn has_next(&self, messages: u64) -> bool {
        self.next(messages).is_some()
    }

    fn take(&self, messages: u64) -> Option<Note> {
        let (number, first) = self.next(messages)?;
        let (note, last) = self.read(number, first);
        self.taken.store(last, Relaxed);
        self.board.publish(TAKEN, &[last]);
        Some(note)
    }

    fn park(&self, lane: u16) {
        let Some(parked) = self.parked.get(usize::from(lane)) else { return };
        let next = parked.load(Relaxed) + 1;
        parked.store(next, Relaxed);
        self.board.announce(PARKED + usize::from(lane), next);
    }

    fn is_parked(&self, lane: u16) -> bool {
        let woken = self.woken.get(usize::from(lane)).map(|woken| woken.load(Relaxed));
        woken.is_some_and(|woken| self.board.peer(PARKED + usize::from(lane)) != woken)
    }

    fn must_wake(&self, lane: u16) -> bool {
        let Some(woken) = self.woken.get(usize::from(lane)) else { return false };
        let parked = self.board.peer_after_own(PARKED + usize::from(lane));
        woken.swap(parked, Relaxed) != parked
    }
}

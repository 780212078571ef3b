//! The mailbox of a connection between two workers of one host: short notes travel in boxes of shared memory, on its [`Board`], without a
//! message and without waiting for anything. *Nemesis* (Buntinas, Mercier and Gropp 2006) calls them fast boxes.
//!
//! Each side fills its boxes in turns, and counts what the peer has taken. What it writes for the peer is in these words:
//!
//! ```text
//! 0     parked   for each lane, how often it was parked
//! 16    taken    how many notes of the peer were taken
//! 32    boxes    of 16 words each:
//!       0        number of the note above 32 bits; number of notes by message before it above 12; lane above 8; bytes
//!       1        channel
//!       2        content
//! ```
//!
//! The number shows that a box is filled anew, because an earlier note in the box has another one. The
//! [protocol](tensorwire_protocol::Mailbox) has the order between notes in the mailbox and notes by message. The simulator's boards run
//! this file, too, so it is not in the fabric for shared memory.

use std::sync::Arc;

use tensorwire_fabric::{BOARD_WORDS, Board, LINE_WORDS};
use tensorwire_protocol::{EagerContent, MAIL_BYTES_MAX, Mail, Note};

use crate::sync::{AtomicU64, Ordering::Relaxed};

/// Lanes whose notes may travel in the mailbox.
pub(crate) const LANES: usize = 16;
/// Boxes of each side.
pub(crate) const BOXES: u64 = 128;
/// Words of a box, which are two cache lines. The header of a call and 8 bytes fit into the first.
const BOX_WORDS: usize = 2 * LINE_WORDS;
const CONTENT: usize = 2;
const WORD_BYTES: usize = size_of::<u64>();

const PARKED: usize = 0;
const TAKEN: usize = LANES;
const BOXES_AT: usize = 2 * LANES;
const _: () = assert!(CONTENT + MAIL_BYTES_MAX / WORD_BYTES == BOX_WORDS);
const _: () = assert!(BOXES_AT + BOXES as usize * BOX_WORDS <= BOARD_WORDS && BOXES.is_power_of_two());

const NUMBER_SHIFT: u32 = 32;
const MESSAGES_SHIFT: u32 = 12;
const LANE_SHIFT: u32 = 8;

/// This side of a mailbox. One thread at a time, which has the connection locked, calls `put`, `take`,
/// `take_peeked` and `park`.
#[derive(Debug)]
pub(crate) struct Mailbox {
    board: Arc<dyn Board>,
    /// A power of two.
    boxes: u64,
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

    /// With `boxes` boxes, a power of two, after as many notes each way.
    pub(crate) fn starting_at(board: Arc<dyn Board>, boxes: u64, notes: u64) -> Self {
        Self {
            board,
            boxes,
            sent: AtomicU64::new(notes),
            taken_by_peer: AtomicU64::new(notes),
            taken: AtomicU64::new(notes),
            parked: Default::default(),
            woken: Default::default(),
        }
    }

    /// Whether the next box is empty. A peer that has taken more than was sent gets no more.
    fn has_room(&self) -> bool {
        let sent = self.sent.load(Relaxed);
        let is_free = |taken: u64| sent.checked_sub(taken).is_some_and(|untaken| untaken < self.boxes);
        is_free(self.taken_by_peer.load(Relaxed)) || {
            let taken = self.board.peer(TAKEN);
            self.taken_by_peer.store(taken, Relaxed);
            is_free(taken)
        }
    }

    /// The number of the peer's next note and its first word, if it is here and follows `messages` notes by message.
    fn next(&self, messages: u64) -> Option<(u64, u64)> {
        let number = self.taken.load(Relaxed) + 1;
        let first = self.board.peer(self.box_at(number));
        (first >> MESSAGES_SHIFT == first_word(number, messages) >> MESSAGES_SHIFT).then_some((number, first))
    }

    /// Reads a note whose first word is known. Reads each word once, because the peer may change it.
    fn read(&self, number: u64, first: u64, into: &mut Mail) {
        let at = self.box_at(number);
        into.number = number;
        into.length = ((first & 0xff) as usize).min(MAIL_BYTES_MAX);
        into.place = (self.board.peer(at + 1), ((first >> LANE_SHIFT) & 0xf) as u16);
        let used = into.length.div_ceil(WORD_BYTES);
        for (index, bytes) in into.content.chunks_exact_mut(WORD_BYTES).take(used).enumerate() {
            bytes.copy_from_slice(&self.board.peer(at + CONTENT + index).to_ne_bytes());
        }
    }

    /// The peer's next note is taken. A thread that sees its box filled again sees that, too.
    fn took(&self, number: u64) {
        self.taken.store(number, Relaxed);
        self.board.publish(TAKEN, &[number]);
    }

    fn box_at(&self, number: u64) -> usize {
        BOXES_AT + (number & (self.boxes - 1)) as usize * BOX_WORDS
    }
}

/// The first word of a box, without lane and length.
fn first_word(number: u64, messages: u64) -> u64 {
    (number << NUMBER_SHIFT) | ((messages << MESSAGES_SHIFT) & u64::from(u32::MAX))
}

impl tensorwire_protocol::Mailbox for Mailbox {
    fn put(&self, (channel, lane): (u64, u16), parts: &[&[u8]], messages: u64) -> bool {
        let mut content = [0; MAIL_BYTES_MAX];
        let Some(length) = join(parts, &mut content).filter(|length| *length > 0) else { return false };
        if usize::from(lane) >= LANES || !self.has_room() {
            return false;
        }
        let number = self.sent.load(Relaxed) + 1;
        let mut words = [0; BOX_WORDS];
        words[0] = first_word(number, messages) | (u64::from(lane) << LANE_SHIFT) | length as u64;
        words[1] = channel;
        for (word, bytes) in words.iter_mut().skip(CONTENT).zip(content.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let used = CONTENT + length.div_ceil(WORD_BYTES);
        self.board.publish(self.box_at(number), words.get(..used).unwrap_or_default());
        self.sent.store(number, Relaxed);
        true
    }

    fn has_next(&self, messages: u64) -> bool {
        self.next(messages).is_some()
    }

    fn peek(&self, messages: u64, into: &mut Mail) -> bool {
        let Some((number, first)) = self.next(messages) else { return false };
        self.read(number, first, into);
        // Otherwise another thread has taken it, and the peer may have filled the box again. A word of the new note is read after that
        // was stored, because the peer has seen it before it filled the box (`Board::publish`).
        self.taken.load(Relaxed) + 1 == number
    }

    fn take(&self, messages: u64) -> Option<Note> {
        let (number, first) = self.next(messages)?;
        let mut mail = Mail::EMPTY;
        self.read(number, first, &mut mail);
        self.took(number);
        let (channel, lane) = mail.place;
        Some(Note { channel, lane, bytes: EagerContent::from_slice(mail.bytes()) })
    }

    fn take_peeked(&self, mail: &Mail) -> bool {
        let is_next = self.taken.load(Relaxed) + 1 == mail.number;
        if is_next {
            self.took(mail.number);
        }
        is_next
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

/// Copies all `parts`, one behind the other. Returns how many bytes they have; `None` if there is no room for them.
fn join(parts: &[&[u8]], into: &mut [u8]) -> Option<usize> {
    let mut length = 0;
    for part in parts {
        into.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    Some(length)
}

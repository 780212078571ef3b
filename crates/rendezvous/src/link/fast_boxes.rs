//! Fast boxes: how short notes travel between two workers of one host. The sender puts a note where the receiver looks, on its
//! [`Board`], without a message and without waiting for anything: *Nemesis* (Buntinas, Mercier and Gropp 2006) has the name.
//!
//! A side has a *set* of boxes for each open channel: two for each lane, which its notes fill in turns. So a box is filled again
//! by the note after the next. The sender does that only when the peer has taken the note that lies there: each note says how many
//! its sender has taken, and so does the lane's *state* when nothing was sent since. Until then, and where a note is too long or
//! a side has no set left, it goes by message.
//!
//! **Order.** The notes of a lane have numbers from 1, whichever way they travel. A box has its note's number; a message has none,
//! but everything before it was in a box before the message was posted. So the receiver looks for the number that is next in its box;
//! if it is not there, the next message is that note.
//!
//! **Sleep.** A receiver that is about to sleep says so in the lane's state and looks once more; a sender looks at that state after
//! it has put a note. Either sees what the other did, so a note is found, or its sender wakes the receiver, by a message of no bytes.
//! A sender may look later than it puts, if it looks before its task sleeps or goes on: then the store is not waited for.
//!
//! **Which sets belong together.** Each opening of a channel has a number. A side fills boxes only once the peer's set says that it
//! reads this opening. It reads a set of the same channel that reads its own, or none yet, and no other as long as its channel is
//! open: two openings that have met count alike. A set is used again when it is closed and the peer does not read it: the peer
//! says that it reads a set before it looks whether that is open, and the owner closes it before it looks whether it is read.

#[cfg(test)]
mod tests;

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use tensorwire_protocol::EagerContent;
use tensorwire_testpoints::sync::Mutex;
use tensorwire_verbs_reactor::{BOARD_WORDS, Board, LINE_WORDS};
use zerocopy::IntoBytes as _;

/// Lanes that have boxes.
const LANES: usize = 16;
/// Words of a box: its first has the note's number, its length, and how many notes its sender has taken.
const BOX_WORDS: usize = 2 * LINE_WORDS;
/// Boxes of a lane.
const BOXES: usize = 2;
/// The longest note that travels in a box.
const BYTES_MAX: usize = (BOX_WORDS - 1) * size_of::<u64>();

/// Words of a set's first line: the number of the opening, or 0; its channel; and the opening of the peer that it reads.
const OPENING: usize = 0;
const CHANNEL: usize = 1;
const READS: usize = 2;
/// The states of the lanes, and the boxes, in a set.
const STATES: usize = LINE_WORDS;
const BOXES_AT: usize = STATES + LANES.next_multiple_of(LINE_WORDS);
const SET_WORDS: usize = BOXES_AT + LANES * BOXES * BOX_WORDS;
/// Channels of a connection that have boxes.
const SETS: usize = BOARD_WORDS / SET_WORDS;

/// In a lane's state, besides how many notes were taken: the receiver sleeps.
const ASLEEP: u64 = 1 << 32;
/// How many notes were taken, in the first word of a box.
const TAKEN_MASK: u32 = (1 << 24) - 1;

/// The boxes of a connection.
#[derive(Debug)]
pub(crate) struct FastBoxes {
    board: Arc<dyn Board>,
    sets: Mutex<Sets>,
}

#[derive(Debug, Default)]
struct Sets {
    /// How many openings there were.
    openings: u64,
    /// The latest opening of each set, and whether that is open.
    latest: [(u64, bool); SETS],
}

/// The boxes of a channel, while it is open.
#[derive(Debug)]
pub(crate) struct ChannelBoxes {
    boxes: Arc<FastBoxes>,
    channel: u64,
    opening: u64,
    /// Where the own set begins.
    own: usize,
    /// Where the peer's set begins, once it is known.
    peer: OnceLock<usize>,
    lanes: [Mutex<Lane>; LANES],
}

#[derive(Debug, Default)]
struct Lane {
    /// Notes sent, in boxes and by messages.
    sent: u32,
    /// Notes taken.
    taken: u32,
    /// How many of the sent ones the peer has taken, as far as it has said.
    taken_by_peer: u32,
    /// Messages that are being sent, or were given up.
    in_line: u32,
    /// The peer was not told of notes that were taken since.
    is_untold: bool,
    /// The peer was told that this side sleeps.
    is_asleep: bool,
    /// The note that a sleeping peer was woken for.
    woken_for: u32,
}

/// A note as it lies in a box.
#[derive(Debug, Clone, Copy)]
pub struct BoxedNote {
    words: [u64; BOX_WORDS],
}

impl BoxedNote {
    /// No note.
    pub const EMPTY: Self = Self { words: [0; BOX_WORDS] };

    /// A note of all `parts`, one behind the other. `None` if it is too long for a box.
    pub fn of(parts: &[&[u8]]) -> Option<Self> {
        let mut note = Self::EMPTY;
        let (first, content) = note.words.split_first_mut()?;
        let content = content.as_mut_bytes();
        let mut length = 0;
        for part in parts {
            content.get_mut(length..length + part.len())?.copy_from_slice(part);
            length += part.len();
        }
        *first = first_word(0, 0, length);
        Some(note)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        let (first, content) = self.words.split_at(1);
        content.as_bytes().get(..length_of(first[0])).unwrap_or_default()
    }

    /// Whether it is as long as `other`, and begins with the same `bytes` bytes. Compares words: what was just stored as words
    /// is not loaded as anything else before the stores have left the core.
    pub fn is_like(&self, other: &Self, bytes: usize) -> bool {
        let (whole, rest) = (bytes / size_of::<u64>(), bytes % size_of::<u64>());
        let difference = |(own, other): (&u64, &u64)| u64::from_le(own ^ other);
        let mut differences = self.words.iter().zip(&other.words).skip(1).map(difference);
        length_of(self.words[0]) == length_of(other.words[0])
            && differences.by_ref().take(whole).all(|difference| difference == 0)
            && differences.next().is_none_or(|difference| difference & ((1 << (8 * rest)) - 1) == 0)
    }

    /// The words that are used.
    fn used(&self) -> usize {
        1 + length_of(self.words[0]).div_ceil(size_of::<u64>())
    }
}

fn first_word(number: u32, taken: u32, length: usize) -> u64 {
    u64::from(number) | u64::from(taken & TAKEN_MASK) << 32 | (length as u64) << 56
}

fn number_of(first: u64) -> u32 {
    first as u32
}

fn taken_of(first: u64) -> u32 {
    (first >> 32) as u32 & TAKEN_MASK
}

fn length_of(first: u64) -> usize {
    ((first >> 56) as usize).min(BYTES_MAX)
}

impl FastBoxes {
    pub(crate) fn new(board: Arc<dyn Board>) -> Arc<Self> {
        Arc::new(Self { board, sets: Mutex::default() })
    }

    /// Opens boxes for a channel; `None` if all sets are in use.
    pub(crate) fn open(self: &Arc<Self>, channel: u64) -> Option<ChannelBoxes> {
        let mut sets = self.sets();
        let is_free = |(latest, is_open): (u64, bool)| !is_open && !self.is_read(latest);
        let set = sets.latest.iter().position(|latest| is_free(*latest))?;
        sets.openings += 1;
        let opening = sets.openings;
        sets.latest[set] = (opening, true);
        let own = set * SET_WORDS;
        self.board.publish(own, &[0; SET_WORDS]);
        self.board.publish(own + OPENING, &[opening, channel, 0]);
        drop(sets);
        let lanes = std::array::from_fn(|_| Mutex::default());
        Some(ChannelBoxes { boxes: self.clone(), channel, opening, own, peer: OnceLock::new(), lanes })
    }

    /// Whether the peer reads an opening of this side.
    fn is_read(&self, opening: u64) -> bool {
        opening != 0 && (0..SETS).any(|set| self.board.peer_after_own(set * SET_WORDS + READS) == opening)
    }

    fn close(&self, own: usize) {
        let mut sets = self.sets();
        self.board.announce(own + READS, 0);
        self.board.announce(own + OPENING, 0);
        if let Some((_, is_open)) = sets.latest.get_mut(own / SET_WORDS) {
            *is_open = false;
        }
    }

    fn sets(&self) -> MutexGuard<'_, Sets> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChannelBoxes {
    /// An exchange of notes in `lane`; `None` if no note can be put into a box now: then it goes by
    /// [message](Self::begin_message).
    pub(crate) fn exchange(&self, lane: u16) -> Option<Exchange<'_>> {
        let (peer, mut state) = self.peer().zip(self.lane(lane))?;
        let board = &*self.boxes.board;
        if state.in_line > 0 || board.peer(peer + READS) != self.opening {
            return None;
        }
        if !state.has_room() {
            state.taken_by_peer = board.peer(peer + STATES + usize::from(lane)) as u32;
            if !state.has_room() {
                return None;
            }
        }
        Some(Exchange { boxes: self, lane, peer, state })
    }

    /// The next note of the peer, if it lies in a box. It stays there until it is [taken](Self::take).
    pub(crate) fn peek(&self, lane: u16) -> Option<BoxedNote> {
        let state = self.lane(lane)?;
        let mut note = BoxedNote::EMPTY;
        self.next(self.peer()?, lane, &state, &mut note).then_some(note)
    }

    /// The next note of the peer, if it lies in a box.
    pub(crate) fn take(&self, lane: u16) -> Option<BoxedNote> {
        let mut state = self.lane(lane)?;
        let mut note = BoxedNote::EMPTY;
        let is_here = self.next(self.peer()?, lane, &state, &mut note);
        is_here.then(|| {
            self.took_boxed(lane, &mut state, &note);
            note
        })
    }

    /// A note that came by message was taken.
    pub(crate) fn took_message(&self, lane: u16) {
        if let Some(mut state) = self.lane(lane) {
            self.took(lane, &mut state);
        }
    }

    /// Tells the peer that this side sleeps until the lane's next note comes. The caller looks once more.
    pub(crate) fn fall_asleep(&self, lane: u16) {
        let Some(mut state) = self.lane(lane) else { return };
        (state.is_asleep, state.is_untold) = (true, false);
        self.boxes.board.announce(self.state_at(lane), u64::from(state.taken) | ASLEEP);
    }

    /// A note goes by message, in `lane` or in all: until that is sent, no other of the lane is put into a box.
    pub(crate) fn begin_message(&self, lanes: std::ops::Range<u16>) -> MessageInLine<'_> {
        lanes.clone().filter_map(|lane| self.lane(lane)).for_each(|mut state| state.in_line += 1);
        MessageInLine { boxes: self, lanes, is_sent: false }
    }

    fn took_boxed(&self, lane: u16, state: &mut Lane, note: &BoxedNote) {
        state.taken_by_peer = taken_of(note.words[0]);
        self.took(lane, state);
    }

    fn took(&self, lane: u16, state: &mut Lane) {
        state.taken = state.taken.wrapping_add(1);
        // Mostly the next note says so.
        if std::mem::replace(&mut state.is_untold, true) || state.is_asleep {
            state.is_asleep = false;
            self.boxes.board.publish(self.state_at(lane), &[u64::from(state.taken)]);
        }
    }

    /// Copies the next note of the peer into `note`, if it lies in a box. Each word is read once, because the peer may change it.
    #[inline]
    fn next(&self, peer: usize, lane: u16, state: &Lane, note: &mut BoxedNote) -> bool {
        let (board, number) = (&*self.boxes.board, state.taken.wrapping_add(1));
        let at = box_at(peer, lane, number);
        let first = board.peer(at);
        if number_of(first) != number {
            return false;
        }
        note.words[0] = first;
        let used = note.used();
        let content = note.words.iter_mut().enumerate().take(used).skip(1);
        content.for_each(|(index, word)| *word = board.peer(at + index));
        true
    }

    /// Where the peer's set begins, which this side reads.
    fn peer(&self) -> Option<usize> {
        self.peer.get().copied().or_else(|| self.find_peer())
    }

    #[cold]
    fn find_peer(&self) -> Option<usize> {
        let _one_at_a_time = self.boxes.sets();
        let board = &*self.boxes.board;
        for set in (0..SETS).map(|set| set * SET_WORDS) {
            let opening = board.peer(set + OPENING);
            let reads = board.peer(set + READS);
            if opening == 0
                || board.peer(set + CHANNEL) != self.channel
                || reads != 0 && reads != self.opening
            {
                continue;
            }
            board.announce(self.own + READS, opening);
            if board.peer(set + OPENING) == opening {
                let _first = self.peer.set(set);
                return Some(set);
            }
            board.announce(self.own + READS, 0);
        }
        None
    }

    fn state_at(&self, lane: u16) -> usize {
        self.own + STATES + usize::from(lane)
    }

    fn lane(&self, lane: u16) -> Option<MutexGuard<'_, Lane>> {
        Some(self.lanes.get(usize::from(lane))?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A note that is put into a box, and the one that the peer puts for it. Nobody else sends or takes in the lane while this lives, which
/// is short. The peer may sleep until [`settle`](Self::settle).
#[must_use = "the peer may sleep"]
pub(crate) struct Exchange<'boxes> {
    boxes: &'boxes ChannelBoxes,
    lane: u16,
    peer: usize,
    state: MutexGuard<'boxes, Lane>,
}

impl Exchange<'_> {
    /// Puts a note into the box for which there is room. Once.
    #[inline]
    pub(crate) fn put(&mut self, note: &BoxedNote) {
        let number = self.state.sent.wrapping_add(1);
        let mut words = note.words;
        words[0] = first_word(number, self.state.taken, length_of(words[0]));
        (self.state.sent, self.state.is_untold) = (number, false);
        let words = words.get(..note.used()).unwrap_or_default();
        self.boxes.boxes.board.publish(box_at(self.boxes.own, self.lane, number), words);
    }

    /// Copies the next note of the peer into `note`, if it lies in a box.
    #[inline]
    pub(crate) fn peek(&self, note: &mut BoxedNote) -> bool {
        self.boxes.next(self.peer, self.lane, &self.state, note)
    }

    /// Whether the peer seems to sleep.
    pub(crate) fn seems_asleep(&self) -> bool {
        self.boxes.boxes.board.peer(self.peer + STATES + usize::from(self.lane)) & ASLEEP != 0
    }

    /// Takes the note that [`peek`](Self::peek) gave.
    pub(crate) fn take(&mut self, note: &BoxedNote) {
        self.boxes.took_boxed(self.lane, &mut self.state, note);
    }

    /// Ends it. Whether the peer sleeps, and must be woken for what was put. Each note is asked for once.
    pub(crate) fn settle(mut self) -> bool {
        let word = self.boxes.boxes.board.peer_after_own(self.peer + STATES + usize::from(self.lane));
        if word & ASLEEP == 0 {
            return false;
        }
        let awaited = (word as u32).wrapping_add(1);
        let is_sent = self.state.sent.wrapping_sub(awaited) < u32::MAX / 2;
        is_sent && std::mem::replace(&mut self.state.woken_for, awaited) != awaited
    }
}

impl Drop for ChannelBoxes {
    fn drop(&mut self) {
        self.boxes.close(self.own);
    }
}

impl Lane {
    /// Whether the note that lies in the next box was taken.
    fn has_room(&self) -> bool {
        self.sent.wrapping_sub(self.taken_by_peer) & TAKEN_MASK < BOXES as u32
    }
}

/// A note that is sent by message. It counts when it is sent. If it is given up before, it may have been sent by another task, so
/// the lane's numbers may differ from the peer's: from then on all its notes go by messages, which need none.
pub(crate) struct MessageInLine<'boxes> {
    boxes: &'boxes ChannelBoxes,
    lanes: std::ops::Range<u16>,
    is_sent: bool,
}

impl MessageInLine<'_> {
    pub(crate) fn sent(mut self) {
        self.is_sent = true;
    }
}

impl Drop for MessageInLine<'_> {
    fn drop(&mut self) {
        if !self.is_sent {
            return;
        }
        for mut state in self.lanes.clone().filter_map(|lane| self.boxes.lane(lane)) {
            state.in_line -= 1;
            state.sent = state.sent.wrapping_add(1);
        }
    }
}

/// Where a note's box begins.
fn box_at(set: usize, lane: u16, number: u32) -> usize {
    set + BOXES_AT + (usize::from(lane) * BOXES + number as usize % BOXES) * BOX_WORDS
}

impl From<BoxedNote> for EagerContent {
    fn from(note: BoxedNote) -> Self {
        Self::from_slice(note.bytes())
    }
}

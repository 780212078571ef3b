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
//! if it is not there, the next message is that note. Both sides must count alike for that. So a lane goes by messages for ever once
//! it is not known whether the peer counts a message: one that was given up, or was sent before the peer's set was known.
//!
//! **Sleep.** A receiver that is about to sleep says so in the lane's state and looks once more; a sender looks at that state after
//! it has put a note. Either sees what the other did, so a note is found, or its sender wakes the receiver, by a message of no bytes.
//! A sender may look later than it puts, if it looks before its task sleeps or goes on: then the store is not waited for.
//!
//! **Which sets belong together.** Each opening of a channel has a number. A side fills boxes only once the peer's set says that it
//! reads this opening. It reads a set of the same channel, and no other as long as its channel is open. A message has only its
//! channel's number: one that was sent to an earlier opening of the channel may come to a later one, which would count it. So a
//! channel that was open before has no boxes. A set is used again when it is closed and the peer does not read it: the peer says that
//! it reads a set before it looks whether that is open, and the owner closes it before it looks whether it is read.

#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::BTreeSet,
    sync::{Arc, MutexGuard, OnceLock, PoisonError},
};

use tensorwire_fabric::{BOARD_WORDS, Board, LINE_WORDS};
use tensorwire_protocol::{EagerContent, limits::NOTE_EVERY_LANE};
use tensorwire_testpoints::sync::Mutex;
use zerocopy::IntoBytes as _;

/// Lanes that have boxes.
pub(crate) const LANES: usize = 16;
/// Words of a box, which are two cache lines. The header of a call and 8 bytes fit into the first.
const BOX_WORDS: usize = 2 * LINE_WORDS;
/// Words of a box before the note's bytes: the note's number; and its length above how many notes its sender has taken.
const BOX_HEADER: usize = 2;
/// Where the length begins in the second word. No lane has as many notes as the bits below can count.
const LENGTH_SHIFT: u32 = 56;
/// Boxes of a lane.
const BOXES: usize = 2;
/// The longest note that travels in a box.
const BYTES_MAX: usize = (BOX_WORDS - BOX_HEADER) * size_of::<u64>();

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
/// Channels that a connection gives boxes to, one after the other.
const CHANNELS_MAX: usize = 4096;

/// In a lane's state: the receiver sleeps. The bits above say how many notes were taken.
const ASLEEP: u64 = 1;

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
    /// The channels that had boxes.
    channels: BTreeSet<u64>,
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
    lanes: Box<[Mutex<Lane>]>,
}

#[derive(Debug, Default)]
struct Lane {
    /// Notes sent, in boxes and by messages.
    sent: u64,
    /// Notes taken.
    taken: u64,
    /// How many of the sent ones the peer has taken, as far as it has said.
    taken_by_peer: u64,
    /// Messages that are being sent, or of which nobody knows whether the peer counts them.
    in_line: u64,
    /// Boxed notes taken after the connection's end.
    taken_at_end: usize,
    /// The peer was not told of notes that were taken since.
    is_untold: bool,
    /// The peer was told that this side sleeps.
    is_asleep: bool,
    /// The note that a sleeping peer was woken for.
    woken_for: u64,
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
        let content = note.words.get_mut(BOX_HEADER..)?.as_mut_bytes();
        let mut length = 0;
        for part in parts {
            content.get_mut(length..length + part.len())?.copy_from_slice(part);
            length += part.len();
        }
        note.words[1] = second_word(0, length);
        Some(note)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        let content = self.words.split_at(BOX_HEADER).1.as_bytes();
        content.get(..self.length()).unwrap_or_default()
    }

    /// Whether it is as long as `other`, and begins with the same `bytes` bytes. Compares words: what was just stored as words
    /// is not loaded as anything else before the stores have left the core.
    pub fn is_like(&self, other: &Self, bytes: usize) -> bool {
        let (whole, rest) = (bytes / size_of::<u64>(), bytes % size_of::<u64>());
        let difference = |(own, other): (&u64, &u64)| u64::from_le(own ^ other);
        let mut differences = self.words.iter().zip(&other.words).skip(BOX_HEADER).map(difference);
        self.length() == other.length()
            && differences.by_ref().take(whole).all(|difference| difference == 0)
            && differences.next().is_none_or(|difference| difference & ((1 << (8 * rest)) - 1) == 0)
    }

    fn length(&self) -> usize {
        ((self.words[1] >> LENGTH_SHIFT) as usize).min(BYTES_MAX)
    }

    /// The words that are used.
    fn used(&self) -> usize {
        BOX_HEADER + self.length().div_ceil(size_of::<u64>())
    }
}

fn second_word(taken: u64, length: usize) -> u64 {
    taken | (length as u64) << LENGTH_SHIFT
}

impl FastBoxes {
    pub(crate) fn new(board: Arc<dyn Board>) -> Arc<Self> {
        Arc::new(Self { board, sets: Mutex::default() })
    }

    /// Opens boxes for a channel of `lanes` lanes; `None` if it was open before, or all sets are in use.
    pub(crate) fn open(self: &Arc<Self>, channel: u64, lanes: u16) -> Option<ChannelBoxes> {
        let mut sets = self.sets();
        if sets.channels.len() >= CHANNELS_MAX || sets.channels.contains(&channel) {
            return None;
        }
        let is_free = |(latest, is_open): (u64, bool)| !is_open && !self.is_read(latest);
        let set = sets.latest.iter().position(|latest| is_free(*latest))?;
        sets.channels.insert(channel);
        sets.openings += 1;
        let opening = sets.openings;
        sets.latest[set] = (opening, true);
        let own = set * SET_WORDS;
        self.board.publish(own, &[0; SET_WORDS]);
        self.board.publish(own + OPENING, &[opening, channel, 0]);
        drop(sets);
        let lanes = (0..lanes.min(LANES as u16)).map(|_| Mutex::default()).collect();
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
            state.peer_took(board.peer(peer + STATES + usize::from(lane)) >> 1);
            if !state.has_room() {
                return None;
            }
        }
        Some(Exchange { boxes: self, lane, peer, state, is_put: false })
    }

    /// Whether the next note of the peer lies in a box.
    pub(crate) fn peek(&self, lane: u16) -> bool {
        let Some((peer, state)) = self.peer().zip(self.lane(lane)) else { return false };
        let mut note = BoxedNote::EMPTY;
        self.next(peer, lane, &state, &mut note)
    }

    /// The next note of the peer, if it lies in a box. Once the connection `is_over`, those are given that may have lain there, but
    /// not what a peer puts there without end.
    pub(crate) fn take(&self, lane: u16, is_over: bool) -> Option<BoxedNote> {
        let (peer, mut state) = self.peer().zip(self.lane(lane))?;
        let mut note = BoxedNote::EMPTY;
        if is_over && state.taken_at_end >= BOXES || !self.next(peer, lane, &state, &mut note) {
            return None;
        }
        state.taken_at_end += usize::from(is_over);
        self.took_boxed(lane, &mut state, note.words[1]);
        Some(note)
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
        self.boxes.board.announce(self.state_at(lane), state.taken << 1 | ASLEEP);
    }

    /// A note goes by message, in `lane` or in every: until that is [sent](MessageInLine::sent), no other of the lane is put into a
    /// box. `None` if it goes before the peer's set is known, so that the peer may ignore it: then none is put there any more.
    pub(crate) fn begin_message(&self, lane: u16) -> Option<MessageInLine<'_>> {
        let is_known = self.peer().is_some();
        let lanes = if lane == NOTE_EVERY_LANE { 0..LANES as u16 } else { lane..lane.saturating_add(1) };
        lanes.clone().filter_map(|lane| self.lane(lane)).for_each(|mut state| state.in_line += 1);
        is_known.then_some(MessageInLine { boxes: self, lanes })
    }

    /// The next note was taken from its box, where its second word says how many notes the peer has taken.
    fn took_boxed(&self, lane: u16, state: &mut Lane, second_word: u64) {
        state.peer_took(second_word & ((1 << LENGTH_SHIFT) - 1));
        self.took(lane, state);
    }

    fn took(&self, lane: u16, state: &mut Lane) {
        state.taken += 1;
        // Mostly the next note says so.
        if std::mem::replace(&mut state.is_untold, true) || state.is_asleep {
            state.is_asleep = false;
            self.boxes.board.publish(self.state_at(lane), &[state.taken << 1]);
        }
    }

    /// Copies the next note of the peer into `note`, if it lies in a box. Each word is read once, because the peer may change it.
    #[inline]
    fn next(&self, peer: usize, lane: u16, state: &Lane, note: &mut BoxedNote) -> bool {
        let Some((at, second)) = self.next_header(peer, lane, state) else { return false };
        note.words[1] = second;
        let board = &*self.boxes.board;
        let used = note.used();
        let content = note.words.iter_mut().enumerate().take(used).skip(BOX_HEADER);
        content.for_each(|(index, word)| *word = board.peer(at + index));
        true
    }

    /// Where the next note of the peer begins, and its second word, if it lies in a box.
    #[inline]
    fn next_header(&self, peer: usize, lane: u16, state: &Lane) -> Option<(usize, u64)> {
        let (board, number) = (&*self.boxes.board, state.taken + 1);
        let at = box_at(peer, lane, number);
        (board.peer(at) == number).then(|| (at, board.peer(at + 1)))
    }

    /// Where the peer's set begins, which this side reads.
    fn peer(&self) -> Option<usize> {
        self.peer.get().copied().or_else(|| self.find_peer())
    }

    #[cold]
    fn find_peer(&self) -> Option<usize> {
        let _sets = self.boxes.sets();
        // Another thread may have found it before this one had the lock.
        if let Some(peer) = self.peer.get() {
            return Some(*peer);
        }
        let found = (0..SETS).map(|set| set * SET_WORDS).find(|set| self.reads(*set));
        found.map(|set| *self.peer.get_or_init(|| set))
    }

    /// Begins to read a set of the peer, if it belongs to this channel.
    fn reads(&self, set: usize) -> bool {
        let board = &*self.boxes.board;
        let opening = board.peer(set + OPENING);
        if opening == 0 || board.peer(set + CHANNEL) != self.channel {
            return false;
        }
        board.announce(self.own + READS, opening);
        if board.peer(set + OPENING) != opening {
            board.announce(self.own + READS, 0);
            return false;
        }
        true
    }

    fn state_at(&self, lane: u16) -> usize {
        self.own + STATES + usize::from(lane)
    }

    /// A lane that the channel has, and has boxes for.
    fn lane(&self, lane: u16) -> Option<MutexGuard<'_, Lane>> {
        Some(self.lanes.get(usize::from(lane))?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A note that is put into a box, and the one that the peer puts for it. A thread that sends or takes in the lane waits until this is
/// dropped. The peer may sleep until [`settle`](Self::settle).
#[must_use = "the peer may sleep"]
pub(crate) struct Exchange<'boxes> {
    boxes: &'boxes ChannelBoxes,
    lane: u16,
    peer: usize,
    state: MutexGuard<'boxes, Lane>,
    is_put: bool,
}

impl Exchange<'_> {
    /// Puts a note into the box for which there is room. Does nothing the second time.
    #[inline]
    pub(crate) fn put(&mut self, note: &mut BoxedNote) {
        if std::mem::replace(&mut self.is_put, true) {
            return;
        }
        let number = self.state.sent + 1;
        (note.words[0], note.words[1]) = (number, second_word(self.state.taken, note.length()));
        (self.state.sent, self.state.is_untold) = (number, false);
        let words = note.words.get(..note.used()).unwrap_or_default();
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

    /// Takes the next note of the peer. Whether it lies in a box.
    pub(crate) fn take(&mut self) -> bool {
        let Some((_, second)) = self.boxes.next_header(self.peer, self.lane, &self.state) else {
            return false;
        };
        self.boxes.took_boxed(self.lane, &mut self.state, second);
        true
    }

    /// Ends it. Whether the peer sleeps, and must be woken for what was put. It is woken once for each note.
    pub(crate) fn settle(mut self) -> bool {
        let word = self.boxes.boxes.board.peer_after_own(self.peer + STATES + usize::from(self.lane));
        if word & ASLEEP == 0 {
            return false;
        }
        let awaited = (word >> 1) + 1;
        self.state.sent >= awaited && std::mem::replace(&mut self.state.woken_for, awaited) != awaited
    }
}

impl Drop for ChannelBoxes {
    fn drop(&mut self) {
        self.boxes.close(self.own);
    }
}

impl Lane {
    /// Whether the note that lies in the next box was taken. Not for a peer that has taken more than was sent.
    fn has_room(&self) -> bool {
        self.sent.wrapping_sub(self.taken_by_peer) < BOXES as u64
    }

    /// The peer says how many notes it has taken. What it said before may be more than what lies in an older place.
    fn peer_took(&mut self, taken: u64) {
        self.taken_by_peer = self.taken_by_peer.max(taken);
    }
}

/// A note that is sent by message. Nothing is done when this is dropped: a message in line may have been posted by another task though
/// its future was dropped, so nobody knows whether the peer counts it, and from then on the lane's notes go by messages.
#[must_use = "the lane goes by messages until it is sent"]
pub(crate) struct MessageInLine<'boxes> {
    boxes: &'boxes ChannelBoxes,
    lanes: std::ops::Range<u16>,
}

impl MessageInLine<'_> {
    /// It was sent, so it counts.
    pub(crate) fn sent(self) {
        for mut state in self.lanes.filter_map(|lane| self.boxes.lane(lane)) {
            state.in_line -= 1;
            state.sent += 1;
        }
    }
}

/// Where a note's box begins.
fn box_at(set: usize, lane: u16, number: u64) -> usize {
    set + BOXES_AT + (usize::from(lane) * BOXES + number as usize % BOXES) * BOX_WORDS
}

impl From<BoxedNote> for EagerContent {
    fn from(note: BoxedNote) -> Self {
        Self::from_slice(note.bytes())
    }
}

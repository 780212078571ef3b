//! Queue arithmetic: how deep queues must be, when a side may post an immediate, and where it may write in a message
//! ring. Plain data.
//!
//! # Mode counted
//!
//! Every immediate takes a receive at its target: messages and contents alike. Each side posts as many receives as was
//! agreed, its [depth](Agreed::depth). Two of them are reserved for the records below. The others are the peer's
//! *credits*: a message or a content is posted when a credit is left, and a message only if its ring has room too. What a
//! side has read is returned by cumulative [`Counts`] in every ring message; single messages are not acknowledged. When
//! half the depth or half the ring is unreturned and no message goes to the peer, a ring message of only counts is sent,
//! if a credit and room for it exist.
//!
//! Outside the ring there are exactly two records, each with a slot of its own at the peer, a receive of its own
//! and an entry of its own in the send queue:
//!
//! - [`Ask`] is sent when something cannot be posted for lack of a credit or of room; at most one is unanswered.
//! - [`Answer`] is sent for each ASK, at once.
//!
//! An ANSWER returns its ASK's receive, and the next ASK returns the receive of the ANSWER before it. So each has its
//! receive whenever it is posted, and no slot is overwritten unread. The ASK is read after everything that was posted
//! before it, so its ANSWER returns all of that: after one exchange every credit and the whole ring are free, and the side
//! that asked is not blocked any more. Messages of only counts, ASK and ANSWER never cause a return themselves, so two idle
//! peers are silent.
//!
//! Rings start at [`RING_BYTES_FIRST`] and grow: after an ASK for ring room the ring's owner offers one of twice the size,
//! up to the size in its [`Parameters`]. The writer sends RING_MOVED as its last message in the old ring, and continues at
//! the start of the new one.
//!
//! # Mode original
//!
//! One message in flight per direction, acknowledged by a bare notification; contents are not counted, since
//! they come only for own outstanding requests.
//!
//! # Queue depths
//!
//! A queue pair with [`Depths::of`] can never find its peer without a receive, nor its own send queue full, on a
//! fabric that reports the completion of a write before any arrival that the write caused. On a fabric that may
//! report it later (verbs: the peer's next message can overtake a transport acknowledgement), a post can find
//! the queue full for a moment. The [`Channel`](crate::Channel) then holds posts back, in order, until
//! completions come. At most [`Depths::send`] posts are held back, and they wait only for the transport.

mod flow;
mod ring;
#[cfg(test)]
mod tests;

pub use flow::{Answer, Ask, Blocked, Counts, Flow, Open};
pub use ring::{RingConsumer, RingPlace};

use crate::{
    Validation, WireError,
    limits::{
        CONTENTS_MAX, DEPTH_MAX, DEPTH_MIN, EAGER_BYTES_MAX, KNOWN_METADATA_MAX, NAMES_MAX, PIECE_BYTES_MAX,
        PIECE_BYTES_MIN, PIECES_MAX, REQUESTS_MAX, REQUESTS_PER_MESSAGE_MAX, RESULT_BYTES, RING_BYTES_FIRST,
        RING_BYTES_MAX, RING_BYTES_MIN,
    },
};

/// How messages are paced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Mode {
    /// One message in flight per direction, as in TensorFlow's verbs plugin.
    Original = 0,
    /// As many immediates in flight as the peer has receives, returned by counts that travel with messages.
    #[default]
    Counted = 1,
}

impl Mode {
    /// Whether messages carry counts. Otherwise each message is acknowledged, and contents are not counted.
    pub(crate) fn is_counted(self) -> bool {
        self == Self::Counted
    }
}

/// What one side offers for a connection. The values in use follow from both sides' offers ([`Agreed::of`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parameters {
    /// How messages are paced.
    pub mode: Mode,
    /// Receives for the peer's immediates: messages and contents in flight, and two for ASK and ANSWER.
    pub depth: u32,
    /// Size up to which this side's ring, which the peer writes, may grow, in bytes.
    pub ring_bytes: u32,
    /// Requests that one side may have outstanding at the other.
    pub requests_max: u32,
    /// Content writes that this side may have under way.
    pub contents_max: u32,
    /// Keys that may have a number, per direction; with 0, keys are always spelt out.
    pub names_max: u32,
    /// Longest content that travels inside a message, in bytes; 0 for none.
    pub eager_bytes_max: u32,
    /// Requests that one message may carry. Mode original has one in each.
    pub requests_per_message: u32,
    /// Length of the pieces in which a longer content is written, in bytes.
    pub piece_bytes: u32,
    /// The checksum with which contents are validated; see [`validation`](crate::validation).
    pub validation: Validation,
}

impl Default for Parameters {
    /// A depth of 256, rings of up to 256 KiB, 1024 requests, 64 contents, 1024 keys with a number, eager contents
    /// of up to 4 KiB, 128 requests in a message, pieces of 512 KiB.
    fn default() -> Self {
        Self {
            mode: Mode::Counted,
            depth: 256,
            ring_bytes: 256 << 10,
            requests_max: 1024,
            contents_max: 64,
            names_max: 1024,
            eager_bytes_max: EAGER_BYTES_MAX,
            requests_per_message: 128,
            // A shorter piece costs a long content more turns of the tasks that send it; a longer one lets others wait longer.
            piece_bytes: 512 << 10,
            validation: Validation::Off,
        }
    }
}

impl Parameters {
    /// Whether every number is within its [limits](crate::limits).
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] names the first that is not.
    pub fn check(&self) -> Result<(), WireError> {
        let ranges = [
            ("depth", self.depth, DEPTH_MIN, DEPTH_MAX),
            ("ring_bytes", self.ring_bytes, RING_BYTES_MIN, RING_BYTES_MAX),
            ("requests_max", self.requests_max, 1, REQUESTS_MAX),
            ("contents_max", self.contents_max, 1, CONTENTS_MAX),
            ("names_max", self.names_max, 0, NAMES_MAX),
            ("eager_bytes_max", self.eager_bytes_max, 0, EAGER_BYTES_MAX),
            ("requests_per_message", self.requests_per_message, 1, REQUESTS_PER_MESSAGE_MAX),
            ("piece_bytes", self.piece_bytes, PIECE_BYTES_MIN, PIECE_BYTES_MAX),
        ];
        for (field, value, minimum, maximum) in ranges {
            if !(minimum..=maximum).contains(&value) {
                return Err(WireError::OutOfRange { field, value, minimum, maximum });
            }
        }
        Ok(())
    }

    /// Size of this side's ring when the connection begins, in bytes.
    pub fn first_ring_bytes(&self) -> u32 {
        self.ring_bytes.min(RING_BYTES_FIRST)
    }
}

/// What two peers agreed on. Equal on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The mode: original if either side offers that.
    pub mode: Mode,
    /// Receives that each side posts: the smaller depth. Unused in mode original.
    pub depth: u32,
    /// Outstanding requests per direction: the smaller maximum.
    pub requests_max: u32,
    /// Keys that may have a number, per direction: the smaller maximum, 0 in mode original.
    pub names_max: u32,
    /// Longest content that travels inside a message: the smaller maximum, 0 in mode original.
    pub eager_bytes_max: u32,
    /// Requests that one message may carry: the smaller maximum, 1 in mode original.
    pub requests_per_message: u32,
    /// Length of the pieces in which a longer content is written: the smaller one. `None` in mode original, which writes it as a whole.
    pub piece_bytes: Option<u32>,
    /// Metadata that a request may name: 1 in mode original.
    pub known_max: u32,
    /// Whether requests may ask for views, and destinations have result slots: not in mode original.
    pub is_extended: bool,
    /// The checksum with which contents are validated: the stronger of the two offers.
    pub validation: Validation,
}

impl Agreed {
    /// Whether a destination names a result slot.
    pub fn has_result_slots(&self) -> bool {
        self.validation.is_on() && self.is_extended
    }

    /// Whether the write that notifies of a content of `content` bytes may have `length` bytes: all of them, or those of its last piece.
    /// A result that is written with the content counts.
    pub(crate) fn fits(&self, content: u64, length: u64) -> bool {
        let has_result = self.has_result_slots() && content > 0;
        let last = self.piece_bytes.and_then(|piece| last_piece(content, piece));
        let without_result = length.checked_sub(RESULT_BYTES as u64).filter(|_| has_result);
        [Some(length), without_result]
            .into_iter()
            .flatten()
            .any(|bytes| bytes == content || Some(bytes) == last)
    }

    /// Whether META_DATA_RESPONSE precedes every content, because the content's checksum has no other place.
    pub fn describes_first(&self) -> bool {
        self.validation.is_on() && !self.is_extended
    }

    /// From both sides' offers. Numbers outside the [limits](crate::limits) are replaced by the nearest limit.
    pub fn of(local: &Parameters, peer: &Parameters) -> Self {
        let requests = local.requests_per_message.min(peer.requests_per_message);
        let extended = Self {
            mode: Mode::Counted,
            depth: local.depth.min(peer.depth).clamp(DEPTH_MIN, DEPTH_MAX),
            requests_max: local.requests_max.min(peer.requests_max).clamp(1, REQUESTS_MAX),
            names_max: local.names_max.min(peer.names_max).min(NAMES_MAX),
            eager_bytes_max: local.eager_bytes_max.min(peer.eager_bytes_max).min(EAGER_BYTES_MAX),
            requests_per_message: requests.clamp(1, REQUESTS_PER_MESSAGE_MAX),
            piece_bytes: Some(
                local.piece_bytes.min(peer.piece_bytes).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX),
            ),
            known_max: KNOWN_METADATA_MAX as u32,
            is_extended: true,
            validation: local.validation.max(peer.validation),
        };
        if local.mode.is_counted() && peer.mode.is_counted() { extended } else { extended.as_original() }
    }

    /// Leaves out everything that TensorFlow's plugin does not have.
    fn as_original(self) -> Self {
        Self {
            mode: Mode::Original,
            names_max: 0,
            eager_bytes_max: 0,
            requests_per_message: 1,
            piece_bytes: None,
            known_max: 1,
            is_extended: false,
            ..self
        }
    }
}

/// The length of the last piece of a content of `content` bytes; `None` if it has only one.
fn last_piece(content: u64, piece_bytes: u32) -> Option<u64> {
    let piece = u64::from(piece_bytes);
    (content > piece).then(|| (content - 1) % piece + 1)
}

/// Depths that one side's queue pair needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depths {
    /// Operations that may be outstanding at once.
    pub send: u32,
    /// Immediates that may arrive before the first is taken.
    pub receive: u32,
}

impl Depths {
    /// The depths of the `local` side.
    pub fn of(local: &Parameters, peer: &Parameters) -> Self {
        let Agreed { mode, depth, requests_max, .. } = Agreed::of(local, peer);
        match mode {
            // Sent: a message, in two writes when the ring wraps inside it; an acknowledgement; contents.
            // Received: a message, an acknowledgement, and contents of own requests.
            Mode::Original => Self { send: 2 + 1 + contents_max(local), receive: 1 + 1 + requests_max },
            // Sent: messages and contents within the credits, ASK and ANSWER: as many as receives. One message of a ring may
            // wrap, and for a moment two rings are in use. Pieces of long contents take no credit. Contents of subscriptions take
            // none either; as many as the depth wait in line at most, where a send depth has room.
            Mode::Counted => Self { send: depth + 2 + PIECES_MAX as u32, receive: depth },
        }
    }

    /// Depths of the `local` side that suffice whatever a peer offers: what is agreed never exceeds the own
    /// offer, and the peer may choose mode original.
    pub fn for_any_peer(local: &Parameters) -> Self {
        let original = Self::of(local, &Parameters { mode: Mode::Original, ..*local });
        let own = Self::of(local, local);
        Self { send: own.send.max(original.send), receive: own.receive.max(original.receive) }
    }
}

pub(crate) fn contents_max(local: &Parameters) -> u32 {
    local.contents_max.clamp(1, CONTENTS_MAX)
}

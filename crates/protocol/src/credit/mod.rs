//! Queue arithmetic: how deep queues must be, who may post an immediate when, and who may write where in a
//! message ring. Plain data.
//!
//! # Mode counted
//!
//! Every immediate takes a receive at its target: messages and contents alike. Each end posts as many receives
//! as was agreed, its [depth](Agreed::depth), and keeps two of them apart, for the records below. The others are
//! the peer's *credits*: a message or a content goes out when a credit is left, and a message when its ring has
//! room besides. What was taken in is returned by cumulative [`Counts`] that travel in every ring message. There
//! is no acknowledgement of single messages. When half the depth or half the ring is unreturned and nothing goes
//! to the peer by itself, a ring message of nothing but counts does, if a credit and room for it exist.
//!
//! Outside the ring there are exactly two records, each with a slot of its own at the peer, a receive of its own
//! and an entry of its own in the send queue:
//!
//! - [`Ask`] goes out when something cannot be posted for want of a credit or of room; at most one is
//!   unanswered.
//! - [`Answer`] goes out for each ASK, at once.
//!
//! An ANSWER returns its ASK's receive, the next ASK returns the receive of the ANSWER before it. So each has its
//! receive whenever it is posted, and no slot is overwritten unread. The ASK is taken in after everything that
//! was posted before it, so its ANSWER returns all of that: after one exchange every credit and the whole ring
//! are free, and whoever was blocked is not. Messages of nothing but counts, ASK and ANSWER never cause a return
//! themselves, so two idle ends are silent.
//!
//! Rings start at [`RING_BYTES_FIRST`] and grow: an ASK for want of ring room makes the ring's owner offer one of
//! twice the size, up to the size in its [`Parameters`]. The writer says RING_MOVED in the old ring, as its last
//! message there, and goes on at the start of the new one.
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
//! completions come; that is at most [`Depths::send`] posts, and they wait for nothing but the transport.

mod flow;
mod ring;

pub use flow::{Answer, Ask, Blocked, Counts, Flow, Open};
pub use ring::{RingConsumer, RingPlace};

use crate::{
    Validation,
    limits::{
        CONTENTS_MAX, DEPTH_MAX, DEPTH_MIN, EAGER_BYTES_MAX, NAMES_MAX, REQUESTS_MAX,
        REQUESTS_PER_MESSAGE_MAX, RING_BYTES_FIRST, RING_BYTES_MAX, RING_BYTES_MIN,
    },
    wire::WireError,
};

/// How messages are paced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Mode {
    /// One message in flight per direction, as in `tensorflow-verbs.md` §3.8.
    Original = 0,
    /// As many immediates in flight as the peer has receives, returned by counts that travel with messages.
    #[default]
    Counted = 1,
}

/// What one end offers for a connection. What holds is agreed from both ends' ([`Agreed::of`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parameters {
    /// How messages are paced.
    pub mode: Mode,
    /// Receives for the peer's immediates: messages and contents in flight, and two for ASK and ANSWER.
    pub depth: u32,
    /// Size up to which this end's ring, which the peer writes, may grow, in bytes.
    pub ring_bytes: u32,
    /// Requests that one end may have outstanding at the other.
    pub requests_max: u32,
    /// Content writes that this end may have under way.
    pub contents_max: u32,
    /// Keys that may have a number per direction; 0 when keys are always to be spelt out.
    pub names_max: u32,
    /// Longest content that travels inside a message, in bytes; 0 for none.
    pub eager_bytes_max: u32,
    /// Requests that one message may carry. Mode original has one in each.
    pub requests_per_message: u32,
    /// By which checksum contents are validated; see [`validation`](crate::validation).
    pub validation: Validation,
}

impl Default for Parameters {
    /// A depth of 256, rings of up to 256 KiB, 1024 requests, 64 contents, 1024 keys with a number, eager contents
    /// of up to 4 KiB, 128 requests in a message.
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
        ];
        for (field, value, minimum, maximum) in ranges {
            if !(minimum..=maximum).contains(&value) {
                return Err(WireError::OutOfRange { field, value, minimum, maximum });
            }
        }
        Ok(())
    }

    /// Size of this end's ring when the connection begins, in bytes.
    pub fn first_ring_bytes(&self) -> u32 {
        self.ring_bytes.min(RING_BYTES_FIRST)
    }
}

/// What two ends agreed on. Equal at both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Original if either end wants that.
    pub mode: Mode,
    /// Receives that each end posts: the smaller depth. Unused in mode original.
    pub depth: u32,
    /// Outstanding requests per direction: the smaller maximum.
    pub requests_max: u32,
    /// Keys that may have a number, per direction: the smaller maximum, 0 in mode original.
    pub names_max: u32,
    /// Longest content that travels inside a message: the smaller maximum, 0 in mode original.
    pub eager_bytes_max: u32,
    /// Requests that one message may carry: the smaller maximum, 1 in mode original.
    pub requests_per_message: u32,
    /// By which checksum contents are validated: the stronger of the two wishes.
    pub validation: Validation,
}

impl Agreed {
    /// Whether a destination names a result slot.
    pub fn has_result_slots(&self) -> bool {
        self.validation.is_on() && self.mode != Mode::Original
    }

    /// Whether META_DATA_RESPONSE comes before every content, as the original does it when it validates.
    pub fn tells_first(&self) -> bool {
        self.validation.is_on() && self.mode == Mode::Original
    }

    /// From both ends' offers. Numbers outside the [limits](crate::limits) are brought inside.
    pub fn of(local: &Parameters, peer: &Parameters) -> Self {
        let original = local.mode == Mode::Original || peer.mode == Mode::Original;
        let mode = if original { Mode::Original } else { Mode::Counted };
        let depth = local.depth.min(peer.depth).clamp(DEPTH_MIN, DEPTH_MAX);
        let requests_max = local.requests_max.min(peer.requests_max).clamp(1, REQUESTS_MAX);
        let names_max = if original { 0 } else { local.names_max.min(peer.names_max).min(NAMES_MAX) };
        let smaller = local.eager_bytes_max.min(peer.eager_bytes_max).min(EAGER_BYTES_MAX);
        let eager_bytes_max = if original { 0 } else { smaller };
        let smaller = local.requests_per_message.min(peer.requests_per_message);
        let requests_per_message = if original { 1 } else { smaller.clamp(1, REQUESTS_PER_MESSAGE_MAX) };
        let validation = local.validation.max(peer.validation);
        Self { mode, depth, requests_max, names_max, eager_bytes_max, requests_per_message, validation }
    }
}

/// Depths that one end's queue pair needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depths {
    /// Operations that may be outstanding at once.
    pub send: u32,
    /// Immediates that may arrive before the first is taken.
    pub receive: u32,
}

impl Depths {
    /// The depths of the `local` end.
    pub fn of(local: &Parameters, peer: &Parameters) -> Self {
        let Agreed { mode, depth, requests_max, .. } = Agreed::of(local, peer);
        match mode {
            // Sent: a message, in two writes when the ring wraps inside it; an acknowledgement; contents.
            // Received: a message, an acknowledgement, and contents of own requests.
            Mode::Original => Self { send: 2 + 1 + contents_max(local), receive: 1 + 1 + requests_max },
            // Sent: what has credits, ASK and ANSWER: as many as receives. One message of a ring may wrap, and
            // for a moment two rings are in use.
            Mode::Counted => Self { send: depth + 2, receive: depth },
        }
    }

    /// Depths of the `local` end that suffice whatever a peer offers: what is agreed never exceeds the own
    /// offer, and the mode may be original.
    pub fn for_any_peer(local: &Parameters) -> Self {
        let original = Self::of(local, &Parameters { mode: Mode::Original, ..*local });
        let own = Self::of(local, local);
        Self { send: own.send.max(original.send), receive: own.receive.max(original.receive) }
    }
}

pub(crate) fn contents_max(local: &Parameters) -> u32 {
    local.contents_max.clamp(1, CONTENTS_MAX)
}

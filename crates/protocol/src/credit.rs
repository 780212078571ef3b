//! Queue arithmetic: how deep queues must be, and who may write where in a message ring. Plain data.
//!
//! The scheme: messages in flight per direction ≤ window, and each is acknowledged by exactly one bare
//! notification, which retires the oldest. Contents come only for own outstanding requests. So a queue pair
//! with the depths of [`Depths::of`] can never find its peer without a receive, nor its own send queue full,
//! on a fabric that reports the completion of a write before any arrival that the write caused.
//!
//! On a fabric that may report it later (verbs: the peer's next message can overtake a transport
//! acknowledgement), a post can find the queue full for a moment. The [`Channel`](crate::Channel) then holds
//! posts back, in order, until completions come; that is at most [`Depths::send`] posts, and they wait for
//! nothing but the transport.

use std::collections::VecDeque;

use crate::{
    RingSpan,
    limits::{CONTENTS_MAX, REQUESTS_MAX, RING_BYTES_MAX, RING_BYTES_MIN, WINDOW_MAX},
    wire::WireError,
};

/// How messages are paced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Mode {
    /// One message in flight per direction, as in `tensorflow-verbs.md` §3.8.
    Original = 0,
    /// A window of messages in flight per direction.
    #[default]
    Windowed = 1,
}

/// What one end offers for a connection. What holds is agreed from both ends' ([`Agreed::of`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Parameters {
    /// How messages are paced.
    pub mode: Mode,
    /// Messages in flight per direction.
    pub window: u32,
    /// Size of this end's ring, which the peer writes, in bytes.
    pub ring_bytes: u32,
    /// Requests that one end may have outstanding at the other.
    pub requests_max: u32,
    /// Content writes that this end may have under way.
    pub contents_max: u32,
}

impl Default for Parameters {
    /// A window of 64 messages in a ring of 256 KiB, 1024 requests, 64 contents.
    fn default() -> Self {
        Self { mode: Mode::Windowed, window: 64, ring_bytes: 256 << 10, requests_max: 1024, contents_max: 64 }
    }
}

impl Parameters {
    /// Whether every number is within its [limits](crate::limits).
    ///
    /// # Errors
    /// [`WireError::OutOfRange`] names the first that is not.
    pub fn check(&self) -> Result<(), WireError> {
        let ranges = [
            ("window", self.window, 1, WINDOW_MAX),
            ("ring_bytes", self.ring_bytes, RING_BYTES_MIN, RING_BYTES_MAX),
            ("requests_max", self.requests_max, 1, REQUESTS_MAX),
            ("contents_max", self.contents_max, 1, CONTENTS_MAX),
        ];
        for (field, value, minimum, maximum) in ranges {
            if !(minimum..=maximum).contains(&value) {
                return Err(WireError::OutOfRange { field, value, minimum, maximum });
            }
        }
        Ok(())
    }
}

/// What two ends agreed on. Equal at both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Original if either end wants that.
    pub mode: Mode,
    /// Messages in flight per direction: the smaller window, 1 in mode original.
    pub window: u32,
    /// Outstanding requests per direction: the smaller maximum.
    pub requests_max: u32,
}

impl Agreed {
    /// From both ends' offers. Numbers outside the [limits](crate::limits) are brought inside.
    pub fn of(local: &Parameters, peer: &Parameters) -> Self {
        let original = local.mode == Mode::Original || peer.mode == Mode::Original;
        let mode = if original { Mode::Original } else { Mode::Windowed };
        let window = if original { 1 } else { local.window.min(peer.window).clamp(1, WINDOW_MAX) };
        let requests_max = local.requests_max.min(peer.requests_max).clamp(1, REQUESTS_MAX);
        Self { mode, window, requests_max }
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
        let Agreed { window, requests_max, .. } = Agreed::of(local, peer);
        let contents_max = contents_max(local);
        // Sent: messages, in two writes each when the ring wraps inside one; acknowledgements of the peer's
        // messages; contents. Received: messages, acknowledgements, and contents of own requests.
        Self { send: 2 * window + window + contents_max, receive: window + window + requests_max }
    }
}

pub(crate) fn contents_max(local: &Parameters) -> u32 {
    local.contents_max.clamp(1, CONTENTS_MAX)
}

/// An acknowledgement came though no message was in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NothingInFlight;

/// The writing end of the ring at the peer.
#[derive(Debug)]
pub struct RingProducer {
    ring_bytes: u32,
    window: u32,
    /// Where the next message starts.
    position: u32,
    /// Bytes of messages in flight.
    used: u32,
    /// Lengths of messages in flight, oldest first.
    in_flight: VecDeque<u32>,
}

impl RingProducer {
    /// Of an empty ring of `ring_bytes`, with at most `window` messages in flight.
    pub fn new(ring_bytes: u32, window: u32) -> Self {
        let in_flight = VecDeque::with_capacity(window as usize);
        Self { ring_bytes, window, position: 0, used: 0, in_flight }
    }

    /// Whether another message may be in flight, room in the ring aside.
    pub fn has_window(&self) -> bool {
        self.in_flight() < self.window
    }

    /// Messages sent and not acknowledged.
    pub fn in_flight(&self) -> u32 {
        // Never more than the window, which is a u32.
        self.in_flight.len() as u32
    }

    /// Where a message of `length` bytes goes, if window and room allow it now. The second span is empty
    /// unless the ring ends inside the message.
    pub fn reserve(&mut self, length: u32) -> Option<(RingSpan, RingSpan)> {
        if !self.has_window() || length == 0 || length > self.ring_bytes - self.used {
            return None;
        }
        let spans = spans(self.ring_bytes, self.position, length);
        self.position = after(self.ring_bytes, self.position, length);
        self.used += length;
        self.in_flight.push_back(length);
        Some(spans)
    }

    /// The peer has taken the oldest message.
    ///
    /// # Errors
    /// [`NothingInFlight`]: the peer acknowledges what was not sent.
    pub fn retire(&mut self) -> Result<(), NothingInFlight> {
        let length = self.in_flight.pop_front().ok_or(NothingInFlight)?;
        self.used -= length;
        Ok(())
    }
}

/// The reading end of the own ring.
#[derive(Debug)]
pub struct RingConsumer {
    ring_bytes: u32,
    position: u32,
}

impl RingConsumer {
    /// Of an empty ring of `ring_bytes`.
    pub fn new(ring_bytes: u32) -> Self {
        Self { ring_bytes, position: 0 }
    }

    /// Size of the ring.
    pub fn ring_bytes(&self) -> u32 {
        self.ring_bytes
    }

    /// Where the next `length` bytes are; the second span is empty unless the ring ends inside them. `None`
    /// when the ring is smaller.
    pub fn spans(&self, length: u32) -> Option<(RingSpan, RingSpan)> {
        (length <= self.ring_bytes).then(|| spans(self.ring_bytes, self.position, length))
    }

    /// Goes past a message of `length` bytes, at most the ring's size.
    pub fn advance(&mut self, length: u32) {
        self.position = after(self.ring_bytes, self.position, length);
    }
}

fn spans(ring_bytes: u32, position: u32, length: u32) -> (RingSpan, RingSpan) {
    let first = length.min(ring_bytes - position);
    (RingSpan { offset: position, length: first }, RingSpan { offset: 0, length: length - first })
}

fn after(ring_bytes: u32, position: u32, length: u32) -> u32 {
    let to_end = ring_bytes - position;
    if length < to_end { position + length } else { length - to_end }
}

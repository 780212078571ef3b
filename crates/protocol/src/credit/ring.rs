//! Positions in a message ring.

use crate::RingSpan;

/// The position of a message. The second span is empty unless the message wraps around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// The span of its first bytes.
    pub first: RingSpan,
    /// The span of the other bytes.
    pub second: RingSpan,
}

/// The next position in a ring. Its caller knows how full the ring is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RingCursor {
    pub(super) ring_bytes: u32,
    position: u32,
}

impl RingCursor {
    pub(super) fn new(ring_bytes: u32) -> Self {
        Self { ring_bytes, position: 0 }
    }

    /// The position of the next `length` bytes, at most the ring's size.
    fn place(&self, length: u32) -> RingPlace {
        let first = length.min(self.ring_bytes - self.position);
        RingPlace {
            first: RingSpan { offset: self.position, length: first },
            second: RingSpan { offset: 0, length: length - first },
        }
    }

    /// Advances by `length` bytes, at most the ring's size, and returns their position.
    pub(super) fn advance(&mut self, length: u32) -> RingPlace {
        let place = self.place(length);
        let to_end = self.ring_bytes - self.position;
        self.position = if length < to_end { self.position + length } else { length - to_end };
        place
    }
}

/// The reader of the own ring.
#[derive(Debug, Clone)]
pub struct RingConsumer(RingCursor);

impl RingConsumer {
    /// A reader of an empty ring of `ring_bytes`.
    pub fn new(ring_bytes: u32) -> Self {
        Self(RingCursor::new(ring_bytes))
    }

    /// The position of the next `length` bytes; `None` when the ring is smaller.
    pub fn place(&self, length: u32) -> Option<RingPlace> {
        (length <= self.0.ring_bytes).then(|| self.0.place(length))
    }

    /// Advances by a message of `length` bytes, at most the ring's size.
    pub fn advance(&mut self, length: u32) {
        self.0.advance(length);
    }
}

//! Places in a message ring.

use crate::RingSpan;

/// Where a message goes. The second span is empty unless the ring ends inside the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// Its first bytes.
    pub first: RingSpan,
    /// The others.
    pub second: RingSpan,
}

/// Where the next message goes, in a ring of which somebody else knows how full it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RingCursor {
    pub(super) ring_bytes: u32,
    position: u32,
}

impl RingCursor {
    pub(super) fn new(ring_bytes: u32) -> Self {
        Self { ring_bytes, position: 0 }
    }

    /// Where `length` bytes from here are; the ring has at least that many.
    fn place(&self, length: u32) -> RingPlace {
        let first = length.min(self.ring_bytes - self.position);
        RingPlace {
            first: RingSpan { offset: self.position, length: first },
            second: RingSpan { offset: 0, length: length - first },
        }
    }

    /// Goes past `length` bytes, at most the ring's size, and gives where they are.
    pub(super) fn advance(&mut self, length: u32) -> RingPlace {
        let place = self.place(length);
        let to_end = self.ring_bytes - self.position;
        self.position = if length < to_end { self.position + length } else { length - to_end };
        place
    }
}

/// The reading end of the own ring.
#[derive(Debug)]
pub struct RingConsumer(RingCursor);

impl RingConsumer {
    /// Of an empty ring of `ring_bytes`.
    pub fn new(ring_bytes: u32) -> Self {
        Self(RingCursor::new(ring_bytes))
    }

    /// Size of the ring.
    pub fn ring_bytes(&self) -> u32 {
        self.0.ring_bytes
    }

    /// Where the next `length` bytes are; `None` when the ring is smaller.
    pub fn place(&self, length: u32) -> Option<RingPlace> {
        (length <= self.0.ring_bytes).then(|| self.0.place(length))
    }

    /// Goes past a message of `length` bytes, at most the ring's size.
    pub fn advance(&mut self, length: u32) {
        self.0.advance(length);
    }
}

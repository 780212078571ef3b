//! Request indices: slot and generation in one number, and the immediates made of them.

/// Immediates from this number on are never made of a request index.
const RESERVED_FROM: u32 = 0xFFFF_FFF0;

/// Bits of the index in an immediate. The two bits above name which of the listed metadata was written.
const INDEX_BITS: u32 = 30;

/// Slots are numbered below 2¹⁴ ([`REQUESTS_MAX`](crate::limits::REQUESTS_MAX)).
const SLOT_BITS: u32 = 14;

/// The largest generation, after which generations start over. It is one less than fits, so that no index makes a reserved
/// immediate.
const GENERATION_MAX: u32 = (1 << (INDEX_BITS - SLOT_BITS)) - 2;

/// Names one request of one connection and direction; also the immediate of its content. It
/// matches an arrival with its request and does not protect memory: bytes land before an immediate is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestIndex(pub u32);

impl RequestIndex {
    /// Whether this number is too large to name a request.
    pub fn is_reserved(self) -> bool {
        self.0 >> INDEX_BITS != 0
    }

    /// The immediate for a value with the listed metadata number `which`, 0 to 3.
    pub fn immediate(self, which: usize) -> u32 {
        // Two bits, by the limit of listed metadata.
        ((which as u32) << INDEX_BITS) | self.0
    }

    /// The index and metadata number in `immediate`; `None` when it is a marker or reserved for one.
    pub fn of_immediate(immediate: u32) -> Option<(Self, usize)> {
        let index = Self(immediate & ((1 << INDEX_BITS) - 1));
        (immediate < RESERVED_FROM).then_some((index, (immediate >> INDEX_BITS) as usize))
    }

    pub(crate) fn new(slot: u32, generation: u32) -> Self {
        Self(generation << SLOT_BITS | slot)
    }

    pub(crate) fn slot(self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }

    pub(crate) fn generation(self) -> u32 {
        self.0 >> SLOT_BITS
    }

    /// The generation of a slot's next use.
    pub(crate) fn generation_after(generation: u32) -> u32 {
        if generation >= GENERATION_MAX { 0 } else { generation + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{KNOWN_METADATA_MAX, REQUESTS_MAX};

    #[test]
    fn index_holds_every_slot_and_generation_and_is_never_reserved() {
        for slot in [0, 1, REQUESTS_MAX - 1] {
            for generation in [0, 1, GENERATION_MAX - 1, GENERATION_MAX] {
                let index = RequestIndex::new(slot, generation);
                assert!(!index.is_reserved(), "{index:?}");
                assert_eq!((index.slot(), index.generation()), (slot as usize, generation));
            }
        }
    }

    #[test]
    fn index_generation_starts_over_after_the_last() {
        assert_eq!(RequestIndex::generation_after(0), 1);
        assert_eq!(RequestIndex::generation_after(GENERATION_MAX - 1), GENERATION_MAX);
        assert_eq!(RequestIndex::generation_after(GENERATION_MAX), 0);
    }

    #[test]
    fn immediates_hold_an_index_and_a_choice_and_are_never_reserved() {
        for index in [0, 1, RequestIndex::new(REQUESTS_MAX - 1, GENERATION_MAX).0] {
            for which in 0..KNOWN_METADATA_MAX {
                let immediate = RequestIndex(index).immediate(which);
                assert_eq!(RequestIndex::of_immediate(immediate), Some((RequestIndex(index), which)));
            }
        }
        assert_eq!(RequestIndex::of_immediate(0xFFFF_FFF0), None);
        let (highest, _) = RequestIndex::of_immediate(0xFFFF_FFEF).unwrap();
        assert!(!highest.is_reserved() && highest.generation() > GENERATION_MAX);
        assert!(RequestIndex(1 << 30).is_reserved());
    }
}

//! Request indices: slot and generation in one number.

use crate::RequestIndex;

/// Immediates from here on are never a request index.
const RESERVED_FROM: u32 = 0xFFFF_FFF0;

/// Slots are numbered below 2¹⁴ ([`REQUESTS_MAX`](crate::limits::REQUESTS_MAX)).
const SLOT_BITS: u32 = 14;

/// Generations count to here and start over: one less than fits, so that no index is reserved.
const GENERATION_MAX: u32 = (1 << (32 - SLOT_BITS)) - 2;

impl RequestIndex {
    /// Whether this number is a marker or kept for one, and so never names a request.
    pub fn is_reserved(self) -> bool {
        self.0 >= RESERVED_FROM
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
    use crate::limits::REQUESTS_MAX;

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
    fn the_highest_possible_number_that_is_no_index_is_outside_every_table() {
        assert!(RequestIndex(0xFFFF_FFF0).is_reserved());
        assert!(!RequestIndex(0xFFFF_FFEF).is_reserved());
        assert!(RequestIndex(0xFFFF_FFEF).generation() > GENERATION_MAX);
    }
}

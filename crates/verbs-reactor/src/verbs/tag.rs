//! What a completion belongs to.

use crate::SlotKey;

/// Set in the index half of a `wr_id`, where no slot index reaches.
const SPECIAL: u64 = 1 << 31;
const PIECE: u64 = 1 << 30;

/// Slots a queue pair may have, so that their indices leave the bits above free.
pub(crate) const SLOTS_MAX: u32 = 1 << 30;

/// Travels with a work request as its `wr_id`: a slot's index and generation, never a pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tag {
    /// The whole write of that slot, or its last piece: its end is the operation's.
    Write(SlotKey),
    /// An earlier piece of that slot's write.
    Piece(SlotKey),
    /// One of the connection's own signals, of that value.
    Signal(u32),
    /// A posted receive. They are all alike.
    Receive,
}

impl Tag {
    pub(crate) fn to_bits(self) -> u64 {
        match self {
            Self::Write(key) => key.to_bits(),
            Self::Piece(key) => key.to_bits() | PIECE,
            Self::Signal(value) => SPECIAL | u64::from(value) << 32,
            Self::Receive => SPECIAL | PIECE,
        }
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        match (bits & SPECIAL != 0, bits & PIECE != 0) {
            (false, false) => Self::Write(SlotKey::from_bits(bits)),
            (false, true) => Self::Piece(SlotKey::from_bits(bits & !PIECE)),
            (true, false) => Self::Signal((bits >> 32) as u32),
            (true, true) => Self::Receive,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_survives_the_device() {
        for bits in [0, 7, u64::from(SLOTS_MAX - 1), u64::MAX << 32 | 3] {
            let key = SlotKey::from_bits(bits);
            for tag in [Tag::Write(key), Tag::Piece(key), Tag::Signal(2), Tag::Receive] {
                assert_eq!(Tag::from_bits(tag.to_bits()), tag);
            }
        }
    }
}

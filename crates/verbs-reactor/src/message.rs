//! Messages that frame a connection. They have no bytes. The opcode of their completions differs from that of writes
//! with immediate.

const GREETING: u32 = 1;
const FAREWELL: u32 = 2;
const OVERRUN: u32 = 3;
const EXTENT: u32 = 1 << 31;
const RESIDUE: u32 = 1 << 30;

/// Maximum number of outstanding messages in each direction, except extents and residues: a greeting, and either a
/// farewell or an overrun.
pub(super) const SIGNALS: u32 = 2;

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// The dialer's first message: its queue pair is ready.
    Greeting,
    /// The last message of an orderly close.
    Farewell,
    /// Sent instead of a farewell: the peer sent more immediates than this side has receives for.
    Overrun,
    /// How many whole pieces the write has before the piece with the next immediate. The target adds them to the
    /// write's length.
    Extent(u32),
    /// The bytes before that piece that are not part of whole pieces.
    Residue(u32),
}

impl Message {
    pub(super) fn to_bits(self) -> u32 {
        match self {
            Self::Greeting => GREETING,
            Self::Farewell => FAREWELL,
            Self::Overrun => OVERRUN,
            Self::Extent(pieces) => EXTENT | pieces.min(EXTENT - 1),
            Self::Residue(bytes) => RESIDUE | bytes.min(RESIDUE - 1),
        }
    }

    /// `None` for an immediate that no peer of this version sends.
    pub(super) fn from_bits(bits: u32) -> Option<Self> {
        match bits {
            GREETING => Some(Self::Greeting),
            FAREWELL => Some(Self::Farewell),
            OVERRUN => Some(Self::Overrun),
            extent if extent & EXTENT != 0 => Some(Self::Extent(extent & !EXTENT)),
            residue if residue & RESIDUE != 0 => Some(Self::Residue(residue & !RESIDUE)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_the_wire() {
        for message in [
            Message::Greeting,
            Message::Farewell,
            Message::Overrun,
            Message::Extent(1),
            Message::Extent(EXTENT - 1),
            Message::Residue(1),
            Message::Residue(RESIDUE - 1),
        ] {
            assert_eq!(Message::from_bits(message.to_bits()), Some(message));
        }
    }

    #[test]
    fn unknown_messages_are_none() {
        for bits in [0, 4, RESIDUE - 1] {
            assert_eq!(Message::from_bits(bits), None);
        }
    }
}

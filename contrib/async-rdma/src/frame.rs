//! The content of a slot of the landing area: a header of 64 bytes, little-endian, then the payload.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..4 | what it is: 1 part of a write, 2 farewell, 3 refusal |
//! | 4..8 | region |
//! | 8..12 | generation |
//! | 12..16 | key |
//! | 16..24 | offset in the region |
//! | 24..32 | bytes of this part |
//! | 32..40 | bytes of the whole operation |
//! | 40..44 | 1 if the peer gets an immediate |
//! | 44..48 | the immediate, or a refusal's reason |

use tensorwire_fabric::{Immediate, PeerViolation, RegionGeneration, RegionId, RemoteRange};

/// Bytes of a header.
pub(crate) const HEADER: usize = 64;
/// Maximum number of bytes that one frame carries.
pub(crate) const PAYLOAD: usize = 256 << 10;
/// Bytes of a slot.
pub(crate) const SLOT: usize = HEADER + PAYLOAD;
/// Slots of a landing area. With an acknowledgement and a farewell under way, fewer immediates than the ten receives
/// that the crate keeps posted.
pub(crate) const SLOTS: usize = 4;

/// A range of no bytes.
pub(crate) const NOWHERE: RemoteRange =
    RemoteRange { region: RegionId(0), generation: RegionGeneration(0), offset: 0, length: 0 };

/// One frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A part of a write.
    Part {
        range: RemoteRange,
        key: u32,
        /// Bytes of the whole operation.
        total: u64,
        immediate: Option<Immediate>,
    },
    /// The peer closes.
    Farewell,
    /// The peer refuses a write.
    Refusal(Reason),
}

/// The reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The access broke this rule.
    Violation(PeerViolation),
    /// An immediate found no receive.
    ReceiverNotReady,
}

/// The reasons, indexed by their numbers on the wire.
const REASONS: [Reason; 8] = [
    Reason::ReceiverNotReady,
    Reason::Violation(PeerViolation::Malformed),
    Reason::Violation(PeerViolation::UnknownRegion),
    Reason::Violation(PeerViolation::WrongKey),
    Reason::Violation(PeerViolation::OutOfBounds),
    Reason::Violation(PeerViolation::NoRight),
    Reason::Violation(PeerViolation::NotGranted),
    Reason::Violation(PeerViolation::NotExposed),
];

impl Frame {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut put = |at: usize, value: &[u8]| {
            if let Some(place) = bytes.get_mut(at..at + value.len()) {
                place.copy_from_slice(value);
            }
        };
        match self {
            Self::Part { range, key, total, immediate } => {
                put(0, &1_u32.to_le_bytes());
                put(4, &range.region.0.to_le_bytes());
                put(8, &range.generation.0.to_le_bytes());
                put(12, &key.to_le_bytes());
                put(16, &range.offset.to_le_bytes());
                put(24, &range.length.to_le_bytes());
                put(32, &total.to_le_bytes());
                put(40, &u32::from(immediate.is_some()).to_le_bytes());
                put(44, &immediate.map_or(0, |immediate| immediate.0).to_le_bytes());
            }
            Self::Farewell => put(0, &2_u32.to_le_bytes()),
            Self::Refusal(reason) => {
                put(0, &3_u32.to_le_bytes());
                // A reason without a number is sent as a malformed frame.
                let number = REASONS.iter().position(|known| known == reason).unwrap_or(1);
                put(44, &(number as u32).to_le_bytes());
            }
        }
        bytes
    }

    /// Parses a header; `None` if `bytes` are not one.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<4>();
        let word = |index: usize| words.get(index).map_or(0, |word| u32::from_le_bytes(*word));
        let long = |index: usize| u64::from(word(index)) | u64::from(word(index + 1)) << 32;
        match word(0) {
            1 => {
                let (region, generation) = (RegionId(word(1)), RegionGeneration(word(2)));
                let range = RemoteRange { region, generation, offset: long(4), length: long(6) };
                let immediate = (word(10) != 0).then(|| Immediate(word(11)));
                let fits = range.length <= PAYLOAD as u64;
                fits.then_some(Self::Part { range, key: word(3), total: long(8), immediate })
            }
            2 => Some(Self::Farewell),
            3 => REASONS.get(word(11) as usize).map(|reason| Self::Refusal(*reason)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let range = RemoteRange {
            region: RegionId(7),
            generation: RegionGeneration(u32::MAX),
            offset: 1 << 40,
            length: PAYLOAD as u64,
        };
        for immediate in [None, Some(Immediate(0)), Some(Immediate(u32::MAX))] {
            let frame = Frame::Part { range, key: 5, total: 1 << 33, immediate };
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
        for frame in REASONS.map(Frame::Refusal).into_iter().chain([Frame::Farewell]) {
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        assert_eq!(Frame::decode(&[0; HEADER]), None);
        assert_eq!(Frame::decode(&[0xFF; HEADER]), None);
        let long = RemoteRange { length: PAYLOAD as u64 + 1, ..NOWHERE };
        let frame = Frame::Part { range: long, key: 0, total: 0, immediate: None };
        assert_eq!(Frame::decode(&frame.encode()), None);
    }
}

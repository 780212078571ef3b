//! S2: contents that identify their transfer.

use crate::rng::mix;

/// Fills and checks contents that depend on (world seed, transfer): a receiver detects torn, mixed or stale bytes by
/// the first wrong one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    seed: u64,
}

/// Bytes that do not belong to the transfer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("transfer {transfer}: byte {at} of {length} is {found:#04x} instead of {wanted:#04x}{}", origin(*.other))]
pub struct Mismatch {
    /// The transfer whose content was expected.
    pub transfer: u64,
    /// First wrong byte.
    pub at: usize,
    /// Bytes checked.
    pub length: usize,
    /// The byte that is there.
    pub found: u8,
    /// The byte that should be there.
    pub wanted: u8,
    /// Another transfer whose content fits there: the bytes are stale or mixed, not torn.
    pub other: Option<u64>,
}

fn origin(other: Option<u64>) -> String {
    other.map_or_else(String::new, |other| format!("; these are bytes of transfer {other}"))
}

/// Earlier transfers that are compared with wrong bytes to find their origin.
const ORIGINS_TRIED: u64 = 4096;

impl Pattern {
    /// The contents of the world with `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Writes the content of `transfer` over `into`.
    pub fn fill(self, transfer: u64, into: &mut [u8]) {
        for (number, chunk) in into.chunks_mut(8).enumerate() {
            let word = self.word(transfer, number);
            chunk.iter_mut().zip(word).for_each(|(byte, wanted)| *byte = wanted);
        }
    }

    /// The content of `transfer` as a new vector.
    pub fn bytes(self, transfer: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.fill(transfer, &mut bytes);
        bytes
    }

    /// Checks that `bytes` are the content of `transfer`, whole and unmixed.
    ///
    /// # Errors
    /// The first byte that is not.
    pub fn verify(self, transfer: u64, bytes: &[u8]) -> Result<(), Mismatch> {
        for (number, chunk) in bytes.chunks(8).enumerate() {
            let word = self.word(transfer, number);
            if let Some(inside) = chunk.iter().zip(word).position(|(found, wanted)| *found != wanted) {
                return Err(Mismatch {
                    transfer,
                    at: number * 8 + inside,
                    length: bytes.len(),
                    found: chunk[inside],
                    wanted: word[inside],
                    other: self.origin_of(transfer, number, chunk),
                });
            }
        }
        Ok(())
    }

    fn origin_of(self, transfer: u64, number: usize, chunk: &[u8]) -> Option<u64> {
        let candidates = transfer.saturating_sub(ORIGINS_TRIED)..transfer.saturating_add(ORIGINS_TRIED);
        candidates.into_iter().find(|&other| self.word(other, number).starts_with(chunk))
    }

    fn word(self, transfer: u64, number: usize) -> [u8; 8] {
        mix(mix(self.seed ^ mix(transfer)).wrapping_add(number as u64)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s2_own_content_passes_at_every_length() {
        let pattern = Pattern::new(5);
        for length in [0, 1, 7, 8, 9, 64, 1001] {
            assert_eq!(pattern.verify(3, &pattern.bytes(3, length)), Ok(()));
        }
    }

    #[test]
    fn s2_torn_mixed_and_stale_bytes_are_told_apart() {
        let pattern = Pattern::new(5);
        let mut torn = pattern.bytes(3, 100);
        torn[99] ^= 1;
        let mismatch = pattern.verify(3, &torn).unwrap_err();
        assert_eq!((mismatch.at, mismatch.other), (99, None));

        let mut mixed = pattern.bytes(3, 100);
        mixed[48..].copy_from_slice(&pattern.bytes(9, 100)[48..]);
        let mismatch = pattern.verify(3, &mixed).unwrap_err();
        assert_eq!((mismatch.at, mismatch.other), (48, Some(9)));

        let stale = Pattern::new(6).bytes(3, 100);
        assert_eq!(pattern.verify(3, &stale).unwrap_err().at, 0);
    }
}

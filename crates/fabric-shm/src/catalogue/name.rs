//! Names as the words of a cell.

use super::WORD_BYTES;

/// Words of the longest name.
const NAME_WORDS: usize = 14;

/// The longest name in bytes.
pub(super) const NAME_BYTES: usize = NAME_WORDS * WORD_BYTES;

/// A name, and its hash, which is not 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Name<'a> {
    text: &'a str,
    hash: u64,
}

impl<'a> Name<'a> {
    /// `None` if it is too long.
    pub(super) fn new(text: &'a str) -> Option<Self> {
        (text.len() <= NAME_BYTES).then(|| Self { text, hash: hash(text) })
    }

    /// The words that have bytes of the name. After the last byte they have zeros.
    pub(super) fn words(&self) -> impl Iterator<Item = u64> {
        words(self.text)
    }

    /// Bytes of the name.
    pub(super) fn length(&self) -> u64 {
        self.text.len() as u64
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

fn words(text: &str) -> impl Iterator<Item = u64> {
    text.as_bytes().chunks(WORD_BYTES).map(|part| match part.try_into() {
        Ok(bytes) => u64::from_le_bytes(bytes),
        Err(_) => part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    })
}

/// Both processes must compute the same hash. It need not be secret: a peer whose names collide only keeps its own
/// names out of its own catalogue.
fn hash(text: &str) -> u64 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = words(text).fold(text.len() as u64, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(MULTIPLIER);
        mixed ^ mixed >> 32
    });
    mixed.wrapping_mul(MULTIPLIER).rotate_left(32) | 1 << 63
}

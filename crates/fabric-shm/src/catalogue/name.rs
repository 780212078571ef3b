//! Names as words, as they stand in a cell.

use super::WORD_BYTES;

/// Words of the longest name.
const NAME_WORDS: usize = 14;

/// The longest name in bytes.
pub(super) const NAME_BYTES: usize = NAME_WORDS * WORD_BYTES;

/// A name as words, and its hash, which is not 0.
#[derive(Debug)]
pub(super) struct Name {
    words: [u64; NAME_WORDS],
    length: usize,
    hash: u64,
}

impl Name {
    /// `None` if it is too long.
    pub(super) fn new(name: &str) -> Option<Self> {
        let mut words = [0; NAME_WORDS];
        if name.len() > NAME_BYTES {
            return None;
        }
        for (word, part) in words.iter_mut().zip(name.as_bytes().chunks(WORD_BYTES)) {
            let mut bytes = [0; WORD_BYTES];
            bytes.iter_mut().zip(part).for_each(|(into, from)| *into = *from);
            *word = u64::from_le_bytes(bytes);
        }
        let mut this = Self { words, length: name.len(), hash: 0 };
        this.hash = hash(this.words(), this.length);
        Some(this)
    }

    /// The words that have bytes of the name.
    pub(super) fn words(&self) -> &[u64] {
        self.words.get(..self.length.div_ceil(WORD_BYTES)).unwrap_or_default()
    }

    /// Bytes of the name.
    pub(super) fn length(&self) -> u64 {
        self.length as u64
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

/// Both processes must compute the same, and names are not secret: a peer that makes names collide keeps its own names
/// out of its own catalogue.
fn hash(words: &[u64], length: usize) -> u64 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = words.iter().fold(length as u64, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(MULTIPLIER);
        mixed ^ mixed >> 32
    });
    mixed.wrapping_mul(MULTIPLIER).rotate_left(32) | 1 << 63
}

//! A small content on its way from the task that finds it to the one that awaits it.

use crate::sync::{AtomicU64, Ordering};

const WORD_BYTES: usize = size_of::<u64>();
const WORDS: usize = 12;

/// The longest content that fits.
pub(crate) const CELL_BYTES: usize = WORDS * WORD_BYTES;

/// Room for one content. The table of requests assigns the cell, under its lock, to one request at a time, and only while
/// the cell is empty. The content is put in under that lock too, and taken out without it.
#[derive(Debug)]
pub(crate) struct ReplyCell {
    /// 0 while there is none; else its length and the number of its metadata, with the lowest bit set.
    content: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// A content of up to [`CELL_BYTES`].
pub(crate) struct InCell {
    /// The number of its metadata.
    pub(crate) which: usize,
    bytes: [u8; CELL_BYTES],
    length: usize,
}

impl InCell {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

impl ReplyCell {
    pub(crate) fn new() -> Self {
        Self { content: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Whether nobody takes a content out any more.
    pub(crate) fn is_empty(&self) -> bool {
        // Pairs with the last store of `take`: what comes next overwrites nothing that is still read.
        self.content.load(Ordering::Acquire) == 0
    }

    /// Puts in the content of metadata number `which`. False if it does not fit.
    pub(crate) fn put(&self, which: usize, content: &[u8]) -> bool {
        if content.len() > CELL_BYTES {
            return false;
        }
        for (word, bytes) in self.words.iter().zip(content.chunks(WORD_BYTES)) {
            let mut padded = [0; WORD_BYTES];
            padded.iter_mut().zip(bytes).for_each(|(into, byte)| *into = *byte);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        let described = (which as u64) << 32 | (content.len() as u64) << 1 | 1;
        self.content.store(described, Ordering::Release);
        true
    }

    /// The content, if it has come. The cell is empty then.
    pub(crate) fn take(&self) -> Option<InCell> {
        let described = self.content.load(Ordering::Acquire);
        if described == 0 {
            return None;
        }
        let (which, length) = ((described >> 32) as usize, (described as u32 >> 1) as usize);
        let mut bytes = [0; CELL_BYTES];
        for (into, word) in bytes.chunks_mut(WORD_BYTES).zip(&self.words).take(length.div_ceil(WORD_BYTES)) {
            into.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        self.content.store(0, Ordering::Release);
        Some(InCell { which, bytes, length })
    }
}

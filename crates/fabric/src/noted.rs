//! A few words that any thread reads without a lock.

use crate::sync::{AtomicU64, Ordering, fence};

/// Words that are written together and read together.
#[derive(Debug)]
pub(crate) struct Noted<const WORDS: usize> {
    /// Odd while words are being written; 0 until the first were.
    sequence: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Noted<WORDS> {
    pub(crate) fn new() -> Self {
        Self { sequence: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// The words written last; `None` if none were, or if others are being written.
    #[inline]
    pub(crate) fn read(&self) -> Option<[u64; WORDS]> {
        let number = self.sequence.load(Ordering::Acquire);
        if number == 0 || !number.is_multiple_of(2) {
            return None;
        }
        let words = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        // Orders the loads above before the next one.
        fence(Ordering::Acquire);
        (self.sequence.load(Ordering::Relaxed) == number).then_some(words)
    }

    /// Writes `words`, unless another thread is writing.
    pub(crate) fn note(&self, words: [u64; WORDS]) {
        let before = self.sequence.load(Ordering::Relaxed);
        let (odd, after) = (before.wrapping_add(1), before.wrapping_add(2));
        if !before.is_multiple_of(2)
            || self.sequence.compare_exchange(before, odd, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return;
        }
        // Pairs with the fence in `read`: a reader that sees one of the new words sees the odd number, too.
        fence(Ordering::Release);
        self.words.iter().zip(words).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        self.sequence.store(after, Ordering::Release);
    }
}

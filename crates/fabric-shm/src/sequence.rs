//! The steps of the two processes on one cell, independent of the pages that hold it. The test binary `models` of
//! `verbs-reactor` compiles them over loom's atomics and tries every interleaving.
//!
//! A cell and its content are replaced under a sequence word, which is odd meanwhile. A reader copies, and looks at the
//! word again: if it is as before, nothing that the reader copied was replaced. Memory that is mapped read-only is read by
//! relaxed loads alone.
//!
//! A view is not copied, so it is claimed: the reader stores in a word of its own which content it views, and looks whether
//! the cell is unchanged. The publisher replaces the cell, and looks whether the content before is claimed. At least one of
//! them sees what the other did.

use crate::sync::{AtomicU64, Ordering, fence};

/// Marks the cell as being replaced, and gives the number that [`close`] ends that with. The memory of the content before
/// may be reused, and words of the cell may be written, after this.
pub(crate) fn open(sequence: &AtomicU64) -> u64 {
    let before = sequence.load(Ordering::Relaxed);
    sequence.store(before.wrapping_add(1), Ordering::Relaxed);
    // Pairs with the fence in `is_unchanged`: a reader that finds anything that was written after this finds the odd
    // number, too.
    fence(Ordering::Release);
    before.wrapping_add(2)
}

/// Makes the cell and its content visible to readers.
pub(crate) fn close(sequence: &AtomicU64, number: u64) {
    sequence.store(number, Ordering::Release);
}

/// The number of the cell's content; `None` while it is being replaced.
pub(crate) fn begin(sequence: &AtomicU64) -> Option<u64> {
    let number = sequence.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    number.is_multiple_of(2).then_some(number)
}

/// Whether the content has still this number. Called after a copy: what was copied is of that content if this is true.
/// The fence keeps the copy before the load.
pub(crate) fn is_unchanged(sequence: &AtomicU64, number: u64) -> bool {
    fence(Ordering::Acquire);
    sequence.load(Ordering::Relaxed) == number
}

/// Claims a content. The reader may view it if the cell [is unchanged](is_unchanged) after this, and the peer had not
/// closed; else it ends the claim.
pub(crate) fn claim(word: &AtomicU64, content: u64) {
    word.store(content, Ordering::Relaxed);
    // Pairs with the fence in `replaced`, and with the one of a connection's close.
    fence(Ordering::SeqCst);
}

/// Called after a cell was replaced, and before claims are looked at.
pub(crate) fn replaced() {
    fence(Ordering::SeqCst);
}

/// What a reader claims. Whoever finds that a content is not claimed any more may reuse its memory: the reader has read
/// what it wanted.
pub(crate) fn claimed(word: &AtomicU64) -> u64 {
    let content = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    content
}

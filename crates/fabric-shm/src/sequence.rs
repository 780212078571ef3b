//! The steps of the two processes on one cell, independent of the pages that hold it. The test binary `models` of
//! `fabric` compiles them over loom's atomics and tries every interleaving.
//!
//! A cell and its content are replaced under a sequence word, which is odd meanwhile. A reader copies, and looks at the
//! word again: if it is as before, nothing that the reader copied was replaced. Memory that is mapped read-only is read by
//! relaxed loads alone.
//!
//! A view is not copied, so it is claimed: the reader stores in a word of its own which content it views, and looks whether
//! the cell is unchanged. The publisher replaces the cell, and looks whether the content before is claimed. At least one of
//! them sees what the other did.

use crate::sync::{AtomicU64, Ordering, fence};

/// Replaces the cell's content: `write` stores the new one, and then `look` looks at the claims of the content before, whose
/// memory may be reused for what no claim names. Copies of it may be reused at once: their readers see that it was replaced.
pub(crate) fn replace<R>(sequence: &AtomicU64, write: impl FnOnce(), look: impl FnOnce() -> R) -> R {
    let before = sequence.load(Ordering::Relaxed);
    sequence.store(before.wrapping_add(1), Ordering::Relaxed);
    // Pairs with the fence in `is_unchanged`: a reader that finds anything that was written after this finds the odd
    // number, too.
    fence(Ordering::Release);
    write();
    sequence.store(before.wrapping_add(2), Ordering::Release);
    // Pairs with the fence in `claim`: a reader that does not see the new number has claimed before `look`.
    fence(Ordering::SeqCst);
    look()
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

/// Views the content of this number: `claim` claims it, and only then the cell is looked at. Gives the claim if the cell is
/// unchanged and the connection is not over; else it drops it, which ends it.
pub(crate) fn view<C>(
    sequence: &AtomicU64,
    number: u64,
    claim: impl FnOnce() -> Option<C>,
    is_over: impl FnOnce() -> bool,
) -> Option<C> {
    let claim = claim()?;
    (is_unchanged(sequence, number) && !is_over()).then_some(claim)
}

/// Stores which content a reader claims, for [`view`].
pub(crate) fn claim(word: &AtomicU64, content: u64) {
    word.store(content, Ordering::Relaxed);
    // Pairs with the fence in `replace`, and with the one of a connection's close.
    fence(Ordering::SeqCst);
}

/// What a reader claims. Whoever finds that a content is not claimed any more may reuse its memory: the reader has read
/// what it wanted.
pub(crate) fn claimed(word: &AtomicU64) -> u64 {
    let content = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    content
}

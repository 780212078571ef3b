//! The steps of the two processes on one cell, independent of the pages that hold it. The test binary `models` of
//! `fabric` compiles them over loom's atomics and tries every interleaving.
//!
//! A cell and its content are replaced under a sequence word, which is odd meanwhile. A reader copies, and reads the
//! word again: if it is unchanged, nothing that the reader copied was replaced. Memory that is mapped read-only is read
//! by relaxed loads alone.
//!
//! A view is not copied, so it is claimed: the reader stores the viewed content in a word of its own, and checks that
//! the cell is unchanged. The publisher replaces the cell, and checks whether the earlier content is claimed. At least
//! one of them sees what the other did.

use crate::sync::{AtomicU64, Ordering, fence};

/// Replaces the cell's content: `write` stores the new one, and then `look` reads the claims on the earlier one. Its
/// memory may be reused at once if no claim names it: a reader that copies it sees that it was replaced.
pub(crate) fn replace<R>(sequence: &AtomicU64, write: impl FnOnce(), look: impl FnOnce() -> R) -> R {
    let before = sequence.load(Ordering::Relaxed);
    sequence.store(before.wrapping_add(1), Ordering::Relaxed);
    // Pairs with the fence in `is_unchanged`: a reader that sees anything written after this sees the odd number, too.
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

/// Whether the content still has this number. Called after a copy: if this is true, the copied bytes are of that
/// content. The fence keeps the copy before the load.
pub(crate) fn is_unchanged(sequence: &AtomicU64, number: u64) -> bool {
    fence(Ordering::Acquire);
    sequence.load(Ordering::Relaxed) == number
}

/// Views the content of this number: `claim` claims it, and then the cell is read. Returns the claim if the cell is
/// unchanged and the connection is not over; otherwise drops the claim, which ends it.
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

/// The claim of a reader. If a content is not claimed any more, its memory may be reused: the reader has finished
/// reading.
pub(crate) fn claimed(word: &AtomicU64) -> u64 {
    let content = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    content
}

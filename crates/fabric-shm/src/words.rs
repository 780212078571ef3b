//! The steps of the two processes on single shared words, independent of the pages that hold the words. The test binary
//! `models` of `fabric` compiles them over loom's atomics and tries every interleaving.
//!
//! Memory that is mapped read-only is read by relaxed loads alone, because only those are guaranteed to work there.
//! Fences give them the order that they need.

use crate::sync::{AtomicU64, Ordering, fence};

/// A load that synchronises with the store it reads.
pub(super) fn load(word: &AtomicU64) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

/// Stores `words` and then the sequence, which makes the words visible to a reader that finds it.
pub(super) fn publish<'page>(
    sequence: &AtomicU64,
    words: impl Iterator<Item = (&'page AtomicU64, u64)>,
    value: u64,
) {
    words.for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    sequence.store(value, Ordering::Release);
}

/// Announces that the caller is about to sleep for the `epoch`th time. It must look for work once more after this.
pub(super) fn fall_asleep(sleep: &AtomicU64, epoch: u64) {
    // Released, because an announcement on a board is ordered after the earlier reads of the peer's board.
    sleep.store(epoch, Ordering::Release);
    // Pairs with the fences in `must_ring` and `announced`: either the ringer sees the epoch, or the sleeper sees the ringer's work.
    fence(Ordering::SeqCst);
}

/// Whether the sleeper sleeps and was not rung since it fell asleep. Called after publishing work. The caller rings if
/// this is true.
///
/// `rung` never decreases: if a ringer stored an older epoch after another had rung for a newer one, the sleeper would
/// be rung twice.
pub(super) fn must_ring(sleep: &AtomicU64, rung: &AtomicU64) -> bool {
    fence(Ordering::SeqCst);
    let epoch = sleep.load(Ordering::Relaxed);
    rung.load(Ordering::Relaxed) < epoch && rung.fetch_max(epoch, Ordering::AcqRel) < epoch
}

/// The peer's latest announcement, by [`fall_asleep`] or the like. Called after publishing work.
pub(super) fn announced(word: &AtomicU64) -> u64 {
    // Pairs with the fence in `fall_asleep`.
    fence(Ordering::SeqCst);
    load(word)
}

/// Ends a lease, because this process no longer reads its bytes.
pub(super) fn release(lease: &AtomicU64, released: &AtomicU64, generation: u64) {
    lease.store(generation, Ordering::Release);
    released.fetch_add(1, Ordering::Release);
}

/// As [`must_ring`], after a release. False unless the lender wrote, before it fell asleep, that it waits for releases.
pub(super) fn must_ring_for_release(listens: &AtomicU64, sleep: &AtomicU64, rung: &AtomicU64) -> bool {
    fence(Ordering::SeqCst);
    listens.load(Ordering::Relaxed) != 0 && must_ring(sleep, rung)
}

/// Marks the connection as over. Sources of unfinished writes may be reused after this: a peer that copied bytes
/// written later sees the word ([`is_closed`]).
pub(super) fn close(closed: &AtomicU64, code: u64) {
    closed.store(code, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Why the peer ended the connection; 0 while it has not. Read after a copy out of its memory: the copy is valid if
/// this is 0. The fence keeps the copy before the load, and pairs with the one in [`close`].
pub(super) fn is_closed(closed: &AtomicU64) -> u64 {
    fence(Ordering::Acquire);
    load(closed)
}

//! Boards: each side of a connection has a small memory that the other side reads directly.
//!
//! A fabric that maps memory between processes may have a board for each connection. Its users decide what its words
//! mean.

use std::fmt;

/// Words of a board: a power of two.
pub const BOARD_WORDS: usize = 4096;

/// Words of a cache line.
pub const LINE_WORDS: usize = 8;

/// The words that this side writes, and those that the peer writes. Nothing that the peer writes is trusted. Positions
/// are taken modulo [`BOARD_WORDS`]; multiples of [`LINE_WORDS`] begin a cache line. At the beginning all words are 0.
pub trait Board: Send + Sync + fmt::Debug + 'static {
    /// Stores words of this side's board from position `at` on. The first becomes visible last: a peer that
    /// [reads](Self::peer) it can read the others, too. Two threads never write the same word at once.
    fn publish(&self, at: usize, words: &[u64]);

    /// Stores a word of this side's board. The store is ordered after this side's earlier reads of the peer's board,
    /// and before its later ones. So either the peer [sees](Self::peer_after_own) this word, or [`peer`](Self::peer)
    /// sees what the peer had published before its own read.
    fn announce(&self, at: usize, word: u64);

    /// A word of the peer's board. Later reads see all that the peer published before it.
    fn peer(&self, at: usize) -> u64;

    /// A word that the peer may have [announced](Self::announce). This read is ordered after everything that this side
    /// has published.
    fn peer_after_own(&self, at: usize) -> u64;
}

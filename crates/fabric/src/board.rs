//! Boards: a little memory of each side of a connection that the other side reads by itself.
//!
//! A fabric that maps memory between processes may have a board for each connection. What its words mean is decided by those
//! that use it.

use std::fmt;

/// Words of a board: a power of two.
pub const BOARD_WORDS: usize = 4096;

/// Words of a cache line.
pub const LINE_WORDS: usize = 8;

/// What this side writes, and what the peer does. Nothing that the peer writes is trusted. Positions are taken modulo
/// [`BOARD_WORDS`]; multiples of [`LINE_WORDS`] begin a cache line. At the beginning all words are 0.
pub trait Board: Send + Sync + fmt::Debug + 'static {
    /// Stores own words from position `at` on, of which the first becomes visible last: a peer that [finds](Self::peer) it finds
    /// the others, too. No two threads write a word at a time.
    fn publish(&self, at: usize, words: &[u64]);

    /// Stores an own word: after what this side has read of the peer's board so far, and before what it reads from now on. So either
    /// the peer [sees](Self::peer_after_own) this word, or [`peer`](Self::peer) sees what the peer had published before it looked.
    fn announce(&self, at: usize, word: u64);

    /// A word of the peer. What the peer had published before it is seen by later reads.
    fn peer(&self, at: usize) -> u64;

    /// A word of the peer that it may have [announced](Self::announce), looked at after all that this side has published.
    fn peer_after_own(&self, at: usize) -> u64;
}

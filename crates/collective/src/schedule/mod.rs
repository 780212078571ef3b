//! Who sends which elements to whom, and when: the algorithms of collectives as plans, without any communication.
//!
//! A plan is computed by every rank for itself. Two ranks that compute the plans of one collective agree on what passes between
//! them, because a plan depends on nothing but the number of ranks, the rank and the number of elements.

use std::ops::Range;

/// What a rank does with elements that it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Combines them with its own.
    Fold,
    /// Puts them in place of its own.
    Replace,
}

/// One step of one rank. Both parts are under way at the same time. The elements that are sent are those before this step's
/// receive changes any.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Exchange {
    /// To whom, and which elements. Never empty.
    pub send: Vec<(usize, Range<usize>)>,
    /// From whom, which elements, and what is done with them. Never empty; the ranges of one exchange do not overlap.
    pub receive: Vec<(usize, Range<usize>, Arrival)>,
}

/// What one rank does in a collective, in order. Steps in which it does nothing are left out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// The steps.
    pub exchanges: Vec<Exchange>,
}

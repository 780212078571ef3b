//! Who sends which elements to whom, and when: the algorithms of collectives as plans, without any communication.
//!
//! A plan is computed by every rank for itself. Two ranks that compute the plans of one collective agree on what passes between
//! them, because a plan depends on nothing but the number of ranks, the rank and the number of elements. Every function that makes
//! one takes a `rank` below `size`.
//!
//! Between two ranks messages are received in the order in which they are sent, with the same ranges on both sides. No element is
//! changed while it is on its way: a rank receives into a range that it has sent only after the message was received. So elements
//! can be sent from where they are.

mod algorithm;
pub mod bcube;
mod choice;
pub mod halving_doubling;
pub mod ring;
pub mod tree;

pub use algorithm::Algorithm;
pub use choice::choose;
pub(crate) use choice::{plan, reduce_plan, view_segments};

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
/// receive changes any. A step is over when its receives are: its sends may still be on their way, and nobody waits for them.
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

impl Plan {
    /// Adds a step without its empty ranges. The other side leaves them out as well, since it has the same ones.
    fn push(&mut self, mut exchange: Exchange) {
        exchange.send.retain(|(_, range)| !range.is_empty());
        exchange.receive.retain(|(_, range, _)| !range.is_empty());
        if !exchange.send.is_empty() || !exchange.receive.is_empty() {
            self.exchanges.push(exchange);
        }
    }
}

/// Part `index` of `pieces` parts of a range. The first ones have one element more where the range can't be divided.
fn part(whole: &Range<usize>, pieces: usize, index: usize) -> Range<usize> {
    let (length, more) = (whole.len() / pieces, whole.len() % pieces);
    let start = whole.start + index * length + index.min(more);
    start..start + length + usize::from(index < more)
}

fn parts(whole: Range<usize>, pieces: usize) -> Vec<Range<usize>> {
    (0..pieces).map(|index| part(&whole, pieces, index)).collect()
}

//! The algorithms of collectives as plans: which rank sends which elements to which other, and when. Plans do not communicate.
//!
//! Every rank computes its own plan. It depends only on the rank, the number of ranks and of elements, and the hosts of the ranks, so the
//! plans of two ranks match. Every function that makes a plan requires a `rank` below `size`.
//!
//! Messages between two ranks are received in the order in which they are sent, with the same ranges on both sides. No element
//! changes while it is in flight, except in [`doubling`] and [`direct::exchange`]: a rank receives into a range that it has sent only
//! after the message was received.

mod algorithm;
mod choice;
pub(crate) mod direct;
mod doubling;
pub(crate) mod halving_doubling;
pub(crate) mod hierarchical;
pub(crate) mod ring;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
mod views;

pub use algorithm::Algorithm;
pub(crate) use choice::{JOINED_BYTES_MAX, Plans, SEGMENT_BYTES, choose, plans, reduce_plan};
pub(crate) use doubling::{ComparedRanks, Round, rounds};
pub(crate) use tree::{Branch, branch};
pub(crate) use views::Segments;

use std::ops::Range;

/// How many messages are requested, and how many exchanges sent, ahead of the one that is combined: while it is combined, the
/// next ones are in flight in both directions.
pub(crate) const AHEAD: usize = 4;

/// What a rank does with received elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Combine its own with them, in this order.
    Fold,
    /// Combine them, which are of lower ranks, with its own, in this order.
    FoldLower,
    /// Combine them with its own and all others at once, in the order of the ranks, when all are there: all receives of the exchange
    /// are of this range, one from each other rank, beginning with the next one. A mean is divided then.
    FoldAll,
    /// Combine them with its own in a new message, which the next exchange that sends exactly these elements sends. Its own are
    /// undefined until they are replaced.
    Pass,
    /// Replace its own.
    Replace,
}

/// One step of one rank. Sends and receives happen at the same time. The sent elements are those before this step's receives
/// change any. A step is over when its receives are complete; its sends may still be in flight.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Exchange {
    /// The receiving rank and the elements. No range is empty.
    pub(crate) send: Vec<(usize, Range<usize>)>,
    /// The sending rank, the elements, and what is done with them. No range is empty, and the ranges of one exchange do not
    /// overlap, except those of [`Arrival::FoldAll`].
    pub(crate) receive: Vec<(usize, Range<usize>, Arrival)>,
}

/// The steps of one rank in a collective, in order. Empty steps are left out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plan {
    /// The steps.
    pub(crate) exchanges: Vec<Exchange>,
}

impl Plan {
    /// Whether a rank combines the elements of all others at once.
    pub(crate) fn combines_all_at_once(&self) -> bool {
        let mut arrivals = self.exchanges.iter().flat_map(|exchange| &exchange.receive);
        arrivals.any(|(_, _, arrival)| *arrival == Arrival::FoldAll)
    }

    /// Whether a rank receives at most one message of each other rank.
    pub(crate) fn receives_one_of_each(&self) -> bool {
        let senders = || self.exchanges.iter().flat_map(|exchange| &exchange.receive).map(|(from, ..)| from);
        senders().enumerate().all(|(count, from)| !senders().take(count).any(|earlier| earlier == from))
    }

    /// The elements of all messages that it sends.
    pub(crate) fn sent(&self) -> impl Iterator<Item = &Range<usize>> {
        self.exchanges.iter().flat_map(|exchange| &exchange.send).map(|(_, range)| range)
    }

    /// The ranks to which it sends, and those from which it receives.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> {
        self.exchanges.iter().flat_map(|exchange| {
            let sends = exchange.send.iter().map(|(to, _)| *to);
            sends.chain(exchange.receive.iter().map(|(from, ..)| *from))
        })
    }

    /// Adds a step without its empty ranges. The other rank leaves them out too, because it computes the same ranges.
    fn push(&mut self, mut exchange: Exchange) {
        exchange.send.retain(|(_, range)| !range.is_empty());
        exchange.receive.retain(|(_, range, _)| !range.is_empty());
        if !exchange.send.is_empty() || !exchange.receive.is_empty() {
            self.exchanges.push(exchange);
        }
    }
}

/// Part `index` of `pieces` parts of a range. If the range cannot be divided evenly, the first parts have one more element.
fn part(whole: &Range<usize>, pieces: usize, index: usize) -> Range<usize> {
    let (length, more) = (whole.len() / pieces, whole.len() % pieces);
    let start = whole.start + index * length + index.min(more);
    start..start + length + usize::from(index < more)
}

fn parts(whole: Range<usize>, pieces: usize) -> Vec<Range<usize>> {
    (0..pieces).map(|index| part(&whole, pieces, index)).collect()
}

/// Segments of at most `segment` elements (0 counts as 1), none of them empty.
pub(crate) fn segments(whole: &Range<usize>, segment: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let (end, segment) = (whole.end, segment.max(1));
    whole.clone().step_by(segment).map(move |start| start..start.saturating_add(segment).min(end))
}

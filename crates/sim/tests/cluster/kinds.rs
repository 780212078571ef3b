//! Kinds of transfers, of which every run must have at least one each.

use std::collections::BTreeMap;

use super::Run;

/// What a transfer was. One may be of several kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Of what is published.
    Published,
    /// Of a value of a step.
    Sent,
    /// Its content came inside a message.
    Eager,
    /// So large that two of them do not fit the smallest receive pool.
    Large,
    /// One of several that were asked for at once.
    OfMany,
    /// Into the user's buffer.
    Into,
    /// After a receive of its key was given up.
    Cancelled,
}

/// Bytes from which on a transfer is large.
pub(super) const LARGE: usize = 20_000;

/// The protocol's mark of content that arrived inside a message.
const EAGER: &str = "content arrived inside a message";

/// The protocol's mark of a message with several requests.
const SEVERAL: &str = "several keys in one message";

impl Kind {
    const ALL: [Self; 7] =
        [Self::Published, Self::Sent, Self::Eager, Self::Large, Self::OfMany, Self::Into, Self::Cancelled];
}

/// Transfers by kind.
pub(crate) type Kinds = BTreeMap<Kind, u64>;

/// How many transfers of each kind there were, the kinds without any included.
pub(super) fn counted(run: &Run) -> Kinds {
    let truth = run.truth();
    let of = |kind| match kind {
        Kind::Eager => run.handle.reached(EAGER),
        kind => truth.kinds.get(&kind).copied().unwrap_or_default(),
    };
    Kind::ALL.into_iter().map(|kind| (kind, of(kind))).collect()
}

/// Whether each kind was there, and several keys shared a message.
pub(super) fn are_complete(run: &Run) -> bool {
    counted(run).values().all(|count| *count > 0) && run.handle.reached(SEVERAL) > 0
}

//! Kinds of transfers, of which every run must have at least one each.

use std::collections::BTreeMap;

use super::Run;

/// The kind of a transfer, which may be of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Of a published tensor.
    Published,
    /// Of a value of a step.
    Sent,
    /// Its content came inside a message.
    Eager,
    /// So large that two of them do not fit the smallest receive pool.
    Large,
    /// One of several that one call requested.
    OfMany,
    /// Into the user's buffer.
    Into,
    /// After a cancelled receive of its key.
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

/// The number of transfers of each kind; 0 for kinds without any.
pub(super) fn counted(run: &Run) -> Kinds {
    let truth = run.truth();
    let of = |kind| match kind {
        Kind::Eager => run.handle.reached(EAGER),
        kind => truth.kinds.get(&kind).copied().unwrap_or_default(),
    };
    Kind::ALL.into_iter().map(|kind| (kind, of(kind))).collect()
}

/// Whether there was a transfer of each kind, and a message with several keys.
pub(super) fn are_complete(run: &Run) -> bool {
    counted(run).values().all(|count| *count > 0) && run.handle.reached(SEVERAL) > 0
}

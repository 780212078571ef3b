//! The errors of groups.

use std::{fmt, time::Duration};

use tensorwire_protocol::{Status, text::escaped};
use tensorwire_rendezvous::WorkerError;

use crate::{call::Call, launch::LaunchError, reduction::ReductionError, store::StoreError};

/// Why a group cannot be joined, or why a call failed. An error of a call ends the group for all its ranks: each gets an error in
/// its current or next call. [`Group::shrink`](crate::Group::shrink) makes a group of those that are left. An error of an
/// operation between [pairs](crate::pair) of ranks ends that operation alone.
///
/// A call with wrong arguments is no call: it returns [`Argument`](Self::Argument), or
/// [`Reduction`](Self::Reduction) for elements that cannot be reduced that way, before anything is sent, and the group goes on. Ranks
/// that pass the right ones wait for this rank to do so, too, at most for their time limit.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// An invalid argument.
    #[error("{field} = `{}`: {remedy}", escaped(value))]
    Argument {
        /// The argument.
        field: &'static str,
        /// Its value.
        value: String,
        /// What to use instead.
        remedy: String,
    },
    /// The elements cannot be reduced this way.
    #[error(transparent)]
    Reduction(#[from] ReductionError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Ranks did not join in time.
    #[error(
        "group `{group}`: ranks {missing:?} of {size} have not joined in {store} after {limit:?}; check that they run, and that they \
         use the same store, the same name and the same number of ranks"
    )]
    Missing {
        /// The group's name.
        group: String,
        /// The store, with the address that it is served at or was dialled at.
        store: String,
        /// The number of ranks.
        size: usize,
        /// The time limit.
        limit: Duration,
        /// The ranks without a record.
        missing: Vec<usize>,
    },
    /// Another process has this rank's number.
    #[error(
        "group `{group}`: rank {rank} is taken by worker {by}; give each process a rank of its own, and each job a name or a store of \
         its own"
    )]
    RankTaken {
        /// The group's name.
        group: String,
        /// The rank.
        rank: usize,
        /// The worker that has it, with its address.
        by: String,
    },
    /// Another process began a run of the group while this one joined.
    #[error(
        "group `{group}`: {by} has begun another run under this name; give each job a name or a store of its own"
    )]
    OtherRun {
        /// The group's name.
        group: String,
        /// The worker that began it.
        by: String,
    },
    /// The others formed a group without this rank.
    #[error(
        "group `{group}`: the others went on without rank {rank}, which did not answer in time; come back with \
         `rejoin`, or allow more time with `timeout`"
    )]
    LeftOut {
        /// The group's name.
        group: String,
        /// This rank.
        rank: usize,
    },
    /// Too few ranks are left to go on. Others may have gone on without them.
    #[error(
        "group `{group}`: only ranks {come:?} of {size} have come; to go on, more than half must, or half and the store{}, also of \
         newcomers that were admitted; start the job again, or come back with `rejoin` if others went on",
        of_store(store.as_deref())
    )]
    NoMajority {
        /// The group's name.
        group: String,
        /// The number of its ranks.
        size: usize,
        /// The ranks that have come, as far as this one knows.
        come: Vec<usize>,
        /// Why the store did not decide between two halves, if it was asked to.
        store: Option<Box<StoreError>>,
    },
    /// The group's ranks did not admit this worker in time.
    #[error(
        "group `{group}`: not admitted after {limit:?}; check that the group's ranks call `admit`, and that they use \
         the same store, name and job"
    )]
    NotAdmitted {
        /// The group's name.
        group: String,
        /// The time limit.
        limit: Duration,
    },
    /// Ranks made different calls.
    #[error(
        "rank {rank} called `{own}` where rank {other} called `{theirs}`: all ranks must make the same calls in the same order"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// Its call.
        own: Box<Call>,
        /// The other rank.
        other: usize,
        /// The other rank's call.
        theirs: Box<Call>,
    },
    /// A call was not complete in time.
    #[error("`{call}` was not complete after {limit:?}: {}", awaited(waiting_for, silent))]
    TimedOut {
        /// The call.
        call: Box<Call>,
        /// Its limit.
        limit: Duration,
        /// The ranks from which this one awaited a message.
        waiting_for: Vec<usize>,
        /// Those of them that have sent no message of the call, or fewer than others: they have not called it, or wait for other
        /// ranks.
        silent: Vec<usize>,
    },
    /// A rank has left the group: its last clone was dropped.
    #[error("`{call}`: rank {rank} has left the group ({why}); end with `close`, which waits for the others")]
    Left {
        /// The call.
        call: Box<Call>,
        /// The rank.
        rank: usize,
        /// The reason that its worker gave.
        why: String,
    },
    /// A rank is lost.
    #[error("`{call}`: rank {rank} is lost: {error}")]
    RankLost {
        /// The call.
        call: Box<Call>,
        /// The rank.
        rank: usize,
        /// The error that showed it.
        error: Box<WorkerError>,
    },
    /// A rank's call failed, and that ended the group. Also the error of all later calls of the group.
    #[error("the group is over: {why}")]
    Over {
        /// The rank that is lost, has left or broke a rule, or else the one whose call failed first, as far as this one knows.
        rank: Option<usize>,
        /// Its error.
        why: String,
    },
    /// A rank broke a rule of the protocol between ranks. Run the same version on all.
    #[error("`{call}`: rank {rank} broke a rule: {rule}")]
    Misbehaved {
        /// The call.
        call: Box<Call>,
        /// The rank.
        rank: usize,
        /// The rule.
        rule: &'static str,
    },
    /// An [`AbortHandle`](crate::pair::AbortHandle) ended this operation between ranks. The group and later operations go on.
    #[error("`{call}` was aborted by its handle; later operations work")]
    Aborted {
        /// The operation.
        call: Box<Call>,
    },
    /// A rank has dropped what an operation needs: a buffer or an export.
    #[error("`{call}`: rank {rank} has dropped its {what}; use one that it still has")]
    Gone {
        /// The operation.
        call: Box<Call>,
        /// The rank.
        rank: usize,
        /// What it has dropped.
        what: &'static str,
    },
    /// A rank has no memory for what it received. Its export is unchanged.
    #[error("`{call}`: rank {rank} has no memory for it; give its worker more, or drop what it holds")]
    NoMemory {
        /// The operation.
        call: Box<Call>,
        /// The rank.
        rank: usize,
    },
    /// This rank's worker failed.
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

/// The same text as `Display`, because `main` prints a returned error with `Debug`.
macro_rules! debug_as_display {
    ($($error:ty)*) => {
        $(impl fmt::Debug for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        })*
    };
}

debug_as_display! { GroupError LaunchError StoreError }

impl GroupError {
    /// The rank with which it began, if this is known: the one that is lost, has left or broke a rule.
    pub(crate) fn origin(&self) -> Option<usize> {
        match self {
            Self::RankLost { rank, .. } | Self::Left { rank, .. } | Self::Misbehaved { rank, .. } => {
                Some(*rank)
            }
            Self::Over { rank, .. } => *rank,
            _ => None,
        }
    }

    /// The error of a rank number outside `0..size`.
    pub(crate) fn no_such_rank(field: &'static str, rank: usize, size: usize) -> Self {
        let remedy = format!("ranks are numbered from 0 to {}", size.saturating_sub(1));
        Self::Argument { field, value: rank.to_string(), remedy }
    }

    /// The error of a message to or from `rank`.
    pub(crate) fn of_message(call: &Call, rank: usize, error: WorkerError) -> Self {
        match error {
            // The peer has noticed that the connection broke.
            error if error.is_step_broken() => {
                Self::RankLost { call: Box::new(*call), rank, error: Box::new(error) }
            }
            WorkerError::Remote { status, .. } => Self::of_status(call, rank, status),
            // `Aborted`: the connection broke before this message was sent.
            WorkerError::Aborted { .. }
            | WorkerError::PeerLost { .. }
            | WorkerError::NoFabric { .. }
            | WorkerError::NoAddress { .. }
            | WorkerError::Control(_) => {
                Self::RankLost { call: Box::new(*call), rank, error: Box::new(error) }
            }
            error => error.into(),
        }
    }

    /// The error of a call to which `from` answered with this status.
    pub(crate) fn of_status(call: &Call, from: usize, status: Status) -> Self {
        let rank = status.details.as_slice().try_into().map(u64::from_le_bytes);
        match rank.ok().and_then(|rank| usize::try_from(rank).ok()) {
            Some(rank) => Self::Over { rank: Some(rank), why: status.message },
            None => Self::Left { call: Box::new(*call), rank: from, why: status.to_string() },
        }
    }
}

fn of_store(error: Option<&StoreError>) -> String {
    error.map_or_else(String::new, |error| format!(", which did not vote ({error})"))
}

fn awaited(waiting_for: &[usize], silent: &[usize]) -> String {
    match (waiting_for, silent) {
        ([], _) => "it waited for earlier calls, which must be awaited as well, or for memory".to_owned(),
        (_, []) => format!("it waited for ranks {waiting_for:?}"),
        _ if waiting_for == silent => format!("ranks {silent:?} have sent no message of it"),
        _ => format!("it waited for ranks {waiting_for:?}, and received least from ranks {silent:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::CallKind;

    #[test]
    fn errors_that_main_returns_are_printed_as_text() {
        let call = Box::new(Call::plain(7, CallKind::Barrier));
        let lost = GroupError::RankLost { call, rank: 2, error: Box::new(WorkerError::ShutDown) };
        let store = StoreError::Lost { key: "ranks".to_owned() };
        assert_eq!(format!("{lost:?}"), "`barrier #7`: rank 2 is lost: this worker was shut down");
        assert_eq!(format!("{store:?}"), store.to_string());
        assert_eq!(format!("{:?}", GroupError::from(store.clone())), store.to_string());
        let launch = LaunchError::NoRanks { variable: "SIZE" };
        assert_eq!(format!("{launch:?}"), launch.to_string());
    }
}

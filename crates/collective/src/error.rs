//! The errors of groups.

use std::time::Duration;

use tensorwire_protocol::{Status, text::escaped};
use tensorwire_rendezvous::WorkerError;

use crate::{call::Call, reduction::ReductionError, store::StoreError};

/// Why a group cannot be joined, or why a call failed. After an error of a call, the group is over for all its ranks: each gets
/// an error in its current or next call. [`Group::shrink`](crate::Group::shrink) makes a group of those that are left. An error of an
/// operation between [pairs](crate::pair) of ranks ends that operation alone.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// An argument that cannot be used.
    #[error("{field} = `{}`: {remedy}", escaped(value))]
    Argument {
        /// The argument.
        field: &'static str,
        /// Its value.
        value: String,
        /// What to use instead.
        remedy: String,
    },
    /// The elements cannot be reduced so.
    #[error(transparent)]
    Reduction(#[from] ReductionError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Ranks did not join in time.
    #[error(
        "group `{group}`: after {limit:?} these ranks of {size} have not joined: {missing:?}; see whether they run, and whether they \
         use the same store, the same name and the same number of ranks"
    )]
    Missing {
        /// The group's name.
        group: String,
        /// The number of ranks.
        size: usize,
        /// How long was waited.
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
        /// Who began it.
        by: String,
    },
    /// The group was made without this rank.
    #[error(
        "group `{group}`: the others went on without rank {rank}, which they did not hear of in time; come back with \
         `rejoin`, or allow more time with `timeout`"
    )]
    LeftOut {
        /// The group's name.
        group: String,
        /// This rank.
        rank: usize,
    },
    /// Too few ranks are left to go on: others may have gone on without them.
    #[error(
        "group `{group}`: only ranks {come:?} of {size} have come, and to go on takes more than half, or half and the store{}, also of \
         newcomers that were admitted; start the job again, or come back with `rejoin` if others went on",
        of_store(store.as_deref())
    )]
    NoMajority {
        /// The group's name.
        group: String,
        /// The number of its ranks.
        size: usize,
        /// Those that have come, as far as this one knows.
        come: Vec<usize>,
        /// Why the store did not decide between two halves, if it was asked.
        store: Option<Box<StoreError>>,
    },
    /// The ranks of a group did not admit this one in time.
    #[error(
        "group `{group}`: nobody has admitted this rank after {limit:?}; see whether the group's ranks call `admit`, and whether they use \
         the same store, name and job"
    )]
    NotAdmitted {
        /// The group's name.
        group: String,
        /// How long was waited.
        limit: Duration,
    },
    /// Ranks called different things.
    #[error(
        "rank {rank} called `{own}` where rank {other} called `{theirs}`: all ranks must make the same calls in the same order"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// What it called.
        own: Box<Call>,
        /// The other rank.
        other: usize,
        /// What that called.
        theirs: Box<Call>,
    },
    /// A call was not complete in time.
    #[error("`{call}` was not complete after {limit:?}: {}", awaited(waiting_for, silent))]
    TimedOut {
        /// The call.
        call: Box<Call>,
        /// Its limit.
        limit: Duration,
        /// The ranks from which this one awaited something.
        waiting_for: Vec<usize>,
        /// Those of them of which no message of the call had come, or else fewer than of others: they have not called it, or wait for
        /// others themselves.
        silent: Vec<usize>,
    },
    /// A rank has left the group: its last clone was dropped.
    #[error("`{call}`: rank {rank} has left the group ({why}); end with `close`, which waits for the others")]
    Left {
        /// The call.
        call: Box<Call>,
        /// The rank.
        rank: usize,
        /// Its worker's words.
        why: String,
    },
    /// A rank is lost.
    #[error("`{call}`: rank {rank} is lost: {error}")]
    RankLost {
        /// The call.
        call: Box<Call>,
        /// The rank.
        rank: usize,
        /// How that was noticed.
        error: Box<WorkerError>,
    },
    /// A rank's call failed, and that ended the group. Also the error of all later calls of a group that is over.
    #[error("the group is over: {why}")]
    Over {
        /// The rank whose call failed first, as far as this one knows.
        rank: Option<usize>,
        /// Its error.
        why: String,
    },
    /// A rank broke the rules of groups. Run the same version everywhere.
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
    #[error("`{call}` was aborted by its handle; the next one may be awaited")]
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
    /// A rank has no memory for what it was sent. What was there before is unchanged.
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

impl GroupError {
    /// The error of a number that no rank of `size` has.
    pub(crate) fn no_such_rank(field: &'static str, rank: usize, size: usize) -> Self {
        let remedy = format!("ranks are numbered from 0 to {}", size.saturating_sub(1));
        Self::Argument { field, value: rank.to_string(), remedy }
    }

    /// The error of a message to or from `rank`.
    pub(crate) fn of_message(call: &Call, rank: usize, error: WorkerError) -> Self {
        match error {
            // The other has noticed that a connection broke.
            error if error.is_step_broken() => {
                Self::RankLost { call: Box::new(*call), rank, error: Box::new(error) }
            }
            WorkerError::Remote { status, .. } => Self::told(call, rank, status),
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

    /// The error of a call of which `from` has told this status.
    pub(crate) fn told(call: &Call, from: usize, status: Status) -> Self {
        let rank = status.details.as_slice().try_into().map(u64::from_le_bytes);
        match rank.ok().and_then(|rank| usize::try_from(rank).ok()) {
            Some(rank) => Self::Over { rank: Some(rank), why: status.message },
            None => Self::Left { call: Box::new(*call), rank: from, why: status.to_string() },
        }
    }
}

fn of_store(error: Option<&StoreError>) -> String {
    error.map_or_else(String::new, |error| format!(", which cannot be asked ({error})"))
}

fn awaited(waiting_for: &[usize], silent: &[usize]) -> String {
    match (waiting_for, silent) {
        ([], _) => "it waited for earlier calls, which must be awaited as well, or for memory".to_owned(),
        (_, []) => format!("it waited for ranks {waiting_for:?}"),
        _ if waiting_for == silent => format!("no message of it has come from ranks {silent:?}"),
        _ => format!("it waited for ranks {waiting_for:?}, and has heard least of ranks {silent:?}"),
    }
}

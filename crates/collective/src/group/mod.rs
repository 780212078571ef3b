//! A group: its ranks, its generation, and the calls that are under way.

mod builder;
pub(crate) mod calling;
pub(crate) mod dissemination;
mod joining;
mod member;
mod shrinking;

use std::{
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{DuplicatePolicy, Peer, Step, Worker};
use tensorwire_verbs_reactor::Runtime;
use tokio::sync::watch;

pub use self::builder::GroupBuilder;
use self::{joining::Identity, member::Member};
use crate::{call::Call, error::GroupError};

/// Calls of one group that may be under way at a time on a rank. A further call waits for the one that is this many before it.
pub const CALLS_UNDER_WAY: usize = 16;

/// A number of workers that make the same calls in the same order. Cheap to clone; all clones are one rank.
///
/// [`Group::builder`] joins one. Each method makes one call: it takes the call's number at once, in the order in which the methods
/// are invoked, and does the rest when it is awaited. So several calls may be under way at the same time, at most
/// [`CALLS_UNDER_WAY`], as long as all ranks invoke them in the same order.
///
/// # Failures
/// A call that fails, runs out of time or is dropped before it is complete ends the group for all ranks, because its other ranks
/// cannot complete either: each of them gets a [`GroupError`], those that wait at once. [`shrink`](Self::shrink) makes a group of
/// the ranks that are left.
///
/// # The end
/// Values that a rank sent and another has not received yet are dropped with the last clone. [`close`](Self::close) waits for
/// the others first.
#[derive(Clone)]
pub struct Group {
    pub(crate) state: Arc<GroupState>,
}

/// What all clones of a group share.
pub(crate) struct GroupState {
    pub(crate) worker: Worker,
    pub(crate) identity: Identity,
    pub(crate) rank: usize,
    members: Vec<Member>,
    /// One for each member; that of this rank is the worker itself.
    peers: Vec<Peer>,
    is_on_one_host: bool,
    step: Step,
    next_call: AtomicU64,
    /// For each lane, how many of its calls are complete.
    lanes: [watch::Sender<u64>; CALLS_UNDER_WAY],
    /// Why the group is over.
    over: OnceLock<GroupError>,
    is_over: watch::Sender<bool>,
    /// The group that this one has shrunk to. The lock is held while the ranks agree.
    shrunk: tokio::sync::Mutex<Weak<GroupState>>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

impl Group {
    /// The worker that is this rank.
    pub fn worker(&self) -> &Worker {
        &self.state.worker
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.state.identity.name
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.state.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.state.members.len()
    }

    /// How often the group has shrunk.
    pub fn generation(&self) -> u64 {
        self.state.identity.generation
    }

    /// The worker's name of each rank.
    pub fn members(&self) -> impl Iterator<Item = &str> {
        self.state.members.iter().map(|member| member.worker.as_str())
    }

    /// Whether all ranks reach one another by shared memory.
    pub fn is_on_one_host(&self) -> bool {
        self.state.is_on_one_host
    }

    /// Why the group is over, if it is.
    pub fn failure(&self) -> Option<GroupError> {
        self.state.over.get().cloned()
    }

    /// The time that a call may take unless it is given another.
    pub fn timeout(&self) -> Duration {
        self.state.identity.limit
    }
}

impl GroupState {
    pub(crate) fn new(
        worker: &Worker,
        identity: Identity,
        rank: usize,
        members: Vec<Member>,
    ) -> Result<Self, GroupError> {
        if worker.duplicates() != DuplicatePolicy::Queue {
            let remedy =
                "a group sends many values under one key: leave the worker's setting at `Queue`".to_owned();
            let value = format!("{:?}", worker.duplicates());
            return Err(GroupError::Argument { field: "duplicates", value, remedy });
        }
        for (at, member) in members.iter().enumerate() {
            if members.iter().take(at).any(|other| other.worker == member.worker) {
                let remedy = format!(
                    "rank {at} has the worker name of another rank: give each worker a name of its own"
                );
                return Err(GroupError::Argument { field: "worker", value: member.worker.clone(), remedy });
            }
        }
        let peers = members.iter().enumerate().map(|(at, member)| {
            if at == rank {
                worker.peer(worker.name())
            } else {
                worker.set_address(&member.worker, &member.address)
            }
        });
        let peers = peers.collect::<Result<Vec<_>, _>>()?;
        Ok(Self::with(worker, identity, rank, members, peers))
    }

    /// A group of some of this one's ranks, in this order, among which it is number `rank`. `number` is that of the call which makes it.
    ///
    /// # Errors
    /// [`GroupError::Argument`] for a name that no group may have.
    pub(crate) fn derived(
        &self,
        name: &str,
        number: u64,
        ranks: &[usize],
        rank: usize,
    ) -> Result<Self, GroupError> {
        builder::check_name(name)?;
        let identity = self.identity.derived(name, number);
        let members = ranks.iter().filter_map(|rank| self.members.get(*rank)).cloned().collect();
        let peers = ranks.iter().filter_map(|rank| self.peers.get(*rank)).cloned().collect();
        Ok(Self::with(&self.worker, identity, rank, members, peers))
    }

    fn with(
        worker: &Worker,
        identity: Identity,
        rank: usize,
        members: Vec<Member>,
        peers: Vec<Peer>,
    ) -> Self {
        let is_on_one_host = member::are_on_one_host(&members);
        let step = worker.step(identity.step());
        Self {
            worker: worker.clone(),
            identity,
            rank,
            members,
            peers,
            is_on_one_host,
            step,
            next_call: AtomicU64::new(0),
            lanes: std::array::from_fn(|_| watch::Sender::new(0)),
            over: OnceLock::new(),
            is_over: watch::Sender::new(false),
            shrunk: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn runtime(&self) -> &dyn Runtime {
        &**self.worker.runtime()
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// Ends the group with the error of this rank's call. The first error counts; returns it.
    pub(crate) fn fail(&self, error: GroupError) -> GroupError {
        let mut is_first = false;
        let first = self.over.get_or_init(|| {
            is_first = true;
            error
        });
        if is_first {
            tracing::warn!(group = self.identity.name, rank = self.rank, error = %first, "the group is over");
            // The peers' requests that wait are answered with it, and those that come later.
            self.step.abort(&self.told(first));
            self.is_over.send_replace(true);
        }
        first.clone()
    }

    /// What the other ranks are told: whose error ended the group, and its text.
    fn told(&self, error: &GroupError) -> Status {
        let (rank, why) = match error {
            GroupError::Over { rank: Some(rank), why } => (*rank, why.clone()),
            error => (self.rank, error.to_string()),
        };
        Status { code: Code::Unavailable, message: why, details: (rank as u64).to_le_bytes().to_vec() }
    }

    /// The error of a call of which `from` has told this status.
    fn heard(&self, from: usize, status: Status, call: &Call) -> GroupError {
        let rank = status.details.as_slice().try_into().map(u64::from_le_bytes);
        match rank.ok().and_then(|rank| usize::try_from(rank).ok()) {
            Some(rank) => GroupError::Over { rank: Some(rank), why: status.message },
            None => GroupError::Left { call: Box::new(*call), rank: from, why: status.to_string() },
        }
    }

    /// Completes when the group is over.
    async fn ended(&self) -> GroupError {
        // The sender lives as long as the group.
        let _ = self.is_over.subscribe().wait_for(|is_over| *is_over).await;
        self.over.get().cloned().unwrap_or(GroupError::Over { rank: None, why: String::new() })
    }

    /// The number of a new call.
    pub(crate) fn next_number(&self) -> u64 {
        self.next_call.fetch_add(1, Ordering::Relaxed)
    }
}

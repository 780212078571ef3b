//! The next generation of a group: without ranks that are lost, and with newcomers.

use std::sync::{Arc, Weak};

use tensorwire_rendezvous::{Worker, WorkerError};

use super::{
    Group, GroupBuilder, GroupState, agreeing::Agreeing, joining, joining::Identity, member::Member,
    newcomers,
};
use crate::error::GroupError;

/// How many earlier registers a rank publishes for ranks that come late.
const REMEMBERED: usize = 8;

/// How far this rank has come with the generation that follows.
#[derive(Default)]
pub(super) struct Following {
    /// Agreed on, but not all its ranks have joined it.
    forming: Option<Arc<GroupState>>,
    /// All its ranks have joined it.
    formed: Option<Weak<GroupState>>,
}

impl Group {
    /// Makes a group of the ranks that are left, after a call has failed. All of them must call this. The ranks keep their order:
    /// the lowest that is left becomes rank 0. If several clones of one rank call it, they get the same group.
    ///
    /// The ranks that are left must agree: more than half of this group's ranks, or half of them and the store, which decides
    /// between two halves. So the store may be lost, and two parts of a broken network never both go on. A rank that answers but
    /// does not call this is awaited for twice the group's [`timeout`](Self::timeout). If a rank is lost meanwhile, the ranks that are
    /// left of the new generation begin again.
    ///
    /// # Errors
    /// [`GroupError::NoMajority`] if too few ranks are left, after three and a half times the timeout at most;
    /// [`GroupError::LeftOut`] if the others went on without this rank, which may then [`rejoin`](crate::GroupBuilder::rejoin);
    /// [`GroupError::Worker`] if this rank's worker was shut down; another [`GroupError`] if ranks are lost again and again,
    /// after eight and a half times the timeout at most. `NoMajority` and `LeftOut` give the rank numbers of this group, also if
    /// a generation in between did not complete its join.
    ///
    /// # Cancel safety
    /// May be dropped and called again, as long as the others have not agreed without this rank.
    pub async fn shrink(&self) -> Result<Group, GroupError> {
        regroup(&self.state, false).await
    }

    /// Makes the next generation of this group: the ranks that are left, followed by the workers that wait in the store
    /// ([`rejoin`](crate::GroupBuilder::rejoin)), in the order in which they came. At most as many are admitted as there are
    /// ranks; the others wait for the next `admit`. All ranks must call this at the same point. Earlier calls are completed
    /// first, as by [`close`](Self::close). If one fails or ranks are lost, this [shrinks](Self::shrink) the group and admits
    /// newcomers at once. If no worker waits or the store is lost, the ranks stay as they are.
    ///
    /// A trainer that survives the loss of ranks, and takes them back at the end of an epoch. Under torchrun or srun, a process
    /// that is started again rejoins:
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use tensorwire::collective::{Group, GroupError, launch::Launch, store::Store};
    /// use tensorwire::Worker;
    ///
    /// async fn train(launch: Launch, store: Arc<dyn Store>, is_restarted: bool, worker: Worker) -> Result<(), GroupError> {
    ///     let builder = Group::builder(store, launch.rank, launch.size).name("trainers");
    ///     let builder = if let Some(job) = launch.job { builder.job(job) } else { builder };
    ///     let mut group = if is_restarted { builder.rejoin(&worker).await? } else { builder.join(&worker).await? };
    ///     let (mut gradient, mut epoch) = (vec![0.5f32; 1_000_000], 0);
    ///     while epoch < 10 {
    ///         match group.all_reduce(&mut gradient).await {
    ///             Ok(()) => epoch += 1,
    ///             // Load the values of the last checkpoint.
    ///             Err(_) => group = group.shrink().await?,
    ///         }
    ///         // Rank 0 decides, so that all ranks do the same.
    ///         let mut waiting = [if group.rank() == 0 { group.waiting().await.unwrap_or(0) as u64 } else { 0 }];
    ///         if group.all_reduce(&mut waiting).await.is_err() || waiting[0] > 0 {
    ///             group = group.admit().await?;
    ///             // Rank 0 broadcasts the epoch and the values to the newcomers.
    ///         }
    ///     }
    ///     group.close().await
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`shrink`](Self::shrink).
    ///
    /// # Cancel safety
    /// Dropping it ends this group. It may be called again.
    pub async fn admit(&self) -> Result<Group, GroupError> {
        if self.state.over.get().is_none()
            && let Err(error) = self.clone().close().await
        {
            log!(DEBUG, group = self.name(), %error, "admitting ranks to a group that is over");
        }
        regroup(&self.state, true).await
    }
}

impl GroupBuilder {
    /// Joins an existing group, and waits until its ranks [admit](Group::admit) this worker: one whose process was restarted, one
    /// that got [`GroupError::LeftOut`], or a new one. It gets the highest rank; the builder's rank and size are not used. Name,
    /// store and job must be those of the group.
    ///
    /// # Errors
    /// [`GroupError::NotAdmitted`] if that takes longer than the builder's timeout; [`GroupError::Store`] if the store fails;
    /// [`GroupError::Argument`].
    ///
    /// # Cancel safety
    /// May be dropped and called again. The ranks may admit the dropped one, and go on without it after their timeout.
    pub async fn rejoin(self, worker: &Worker) -> Result<Group, GroupError> {
        self.check(worker)?;
        let end = worker.runtime().now().saturating_add(self.limit);
        let run = self.run(worker.runtime().as_ref(), end).await?;
        let (identity, newcomer, reply) = newcomers::wait(&self, worker, &run, end).await?;
        let state = admitted(worker, identity, &newcomer, &reply)?;
        match joining::meet(&state, self.limit).await {
            Ok(()) => Ok(Group { state }),
            Err(error) if is_of_lost_rank(&error) => regroup(&state, false).await,
            Err(error) => Err(error),
        }
    }
}

/// The next generation that all its ranks join.
async fn regroup(state: &Arc<GroupState>, admits: bool) -> Result<Group, GroupError> {
    // Ends the calls of this group that still wait.
    let over =
        || GroupError::Over { rank: Some(state.rank), why: "the next generation is being formed".to_owned() };
    state.fail(over());
    let mut following = state.following.lock().await;
    if let Some(formed) = &following.formed {
        // A second group of this generation would need its step, which is over.
        return formed.upgrade().map(|state| Group { state }).ok_or_else(over);
    }
    let end = state.runtime().now().saturating_add(state.identity.limit.saturating_mul(4));
    loop {
        let last = following.forming.clone().unwrap_or_else(|| state.clone());
        // Newcomers are admitted to the first generation only, and not to one that makes up for losses.
        let next = agree(&last, admits && following.forming.is_none())
            .await
            .map_err(|error| in_numbers_of(state, &last, error))?;
        // If this future is dropped, the next call goes on from here.
        following.forming = Some(next.clone());
        match joining::meet(&next, state.identity.limit).await {
            Ok(()) => {
                *following = Following { forming: None, formed: Some(Arc::downgrade(&next)) };
                return Ok(Group { state: next });
            }
            Err(error) if !is_of_lost_rank(&error) || state.runtime().now() >= end => return Err(error),
            Err(_) => {}
        }
    }
}

/// Agrees on the generation after `last`.
async fn agree(last: &Arc<GroupState>, admits: bool) -> Result<Arc<GroupState>, GroupError> {
    let roster = Agreeing::new(last, admits).roster().await?;
    let Some(rank) = roster.staying.iter().position(|rank| *rank == last.rank) else {
        return Err(GroupError::LeftOut { group: last.identity.name.clone(), rank: last.rank });
    };
    let identity = last.identity.next(roster.considered);
    // Ranks that come late read the decisions in these.
    let before = [&last.register].into_iter().chain(&last.before).take(REMEMBERED).cloned().collect();
    Ok(Arc::new(GroupState::new(&last.worker, identity, rank, last.members_of(&roster), before)?))
}

/// Translates the error of an agreement in `last` into the rank numbers of the caller's group.
fn in_numbers_of(held: &GroupState, last: &GroupState, error: GroupError) -> GroupError {
    match error {
        GroupError::LeftOut { group, .. } => GroupError::LeftOut { group, rank: held.rank },
        GroupError::NoMajority { group, come, store, .. } => {
            let members = come.iter().filter_map(|rank| last.members.get(*rank));
            let number = |member| held.members.iter().position(|known| known == member);
            GroupError::NoMajority {
                group,
                size: held.size(),
                come: members.filter_map(number).collect(),
                store,
            }
        }
        error => error,
    }
}

/// The generation that admits this newcomer, from what the ranks wrote under its key.
fn admitted(
    worker: &Worker,
    identity: Identity,
    newcomer: &Member,
    reply: &[u8],
) -> Result<Arc<GroupState>, GroupError> {
    let key = identity.admission_key(newcomer);
    let decoded = newcomers::decode(reply, identity, newcomer);
    let (identity, rank, members) = decoded.ok_or_else(|| joining::foreign(&key, reply))?;
    Ok(Arc::new(GroupState::new(worker, identity, rank, members, Vec::new())?))
}

/// Whether a further generation may succeed.
fn is_of_lost_rank(error: &GroupError) -> bool {
    match error {
        GroupError::Worker(error) => !matches!(error, WorkerError::ShutDown),
        error => matches!(
            error,
            GroupError::RankLost { .. }
                | GroupError::TimedOut { .. }
                | GroupError::Over { .. }
                | GroupError::Left { .. }
        ),
    }
}

//! Going on in another generation: without ranks that are lost, and with ranks that have come.

use std::sync::{Arc, Weak};

use tensorwire_rendezvous::{Worker, WorkerError};

use super::{
    Group, GroupBuilder, GroupState, agreeing::Agreeing, joining, joining::Identity, member::Member,
    newcomers,
};
use crate::error::GroupError;

/// How many decisions a rank remembers for those that come late.
const REMEMBERED: usize = 8;

/// The generation that follows a group's, as far as this rank has come with it.
#[derive(Default)]
pub(super) struct Following {
    /// Agreed on, but its ranks have not met.
    forming: Option<Arc<GroupState>>,
    /// Its ranks have met.
    formed: Option<Weak<GroupState>>,
}

impl Group {
    /// A group of the ranks that are left, after a call has failed. All of them must call this. Ranks keep their order: the lowest
    /// that is left becomes rank 0. Calls of several clones of one rank return the same group.
    ///
    /// Those that are left agree among themselves: more than half of this group's ranks must be, or half of them if the
    /// store can be reached, whose word then decides between two halves. So the store may be gone, and two parts of a network that
    /// broke apart never both go on. They wait for a rank that answers and does not come for the group's
    /// [`timeout`](Self::timeout). If a rank is lost meanwhile, those that are left of the new generation begin again.
    ///
    /// # Errors
    /// [`GroupError::NoMajority`] if too few are left, after three and a half times the timeout at most; [`GroupError::LeftOut`] if the
    /// others went on without this rank, which may [`rejoin`](crate::GroupBuilder::rejoin); [`GroupError::Worker`] if this rank's worker
    /// was shut down; another [`GroupError`] if ranks are lost again and again, after eight and a half times the timeout at most. The
    /// numbers of the first two are those of this group, also if a generation in between has not met.
    ///
    /// # Cancel safety
    /// May be dropped and called again, as long as the others have not agreed without this rank.
    pub async fn shrink(&self) -> Result<Group, GroupError> {
        regroup(&self.state, false).await
    }

    /// The next generation of this group: the ranks that are left, and behind them the workers that wait in the store
    /// ([`rejoin`](crate::GroupBuilder::rejoin)), in the order in which they came. As many come at a time as there are ranks; the others wait
    /// for the next `admit`. All ranks must call this at the same point. Earlier
    /// calls are completed first, as by [`close`](Self::close); if one fails, or ranks are lost, this is a [`shrink`](Self::shrink)
    /// that admits others as well. Where nobody waits, or the store is gone, the ranks stay as they are.
    ///
    /// A trainer that goes on whatever ranks are lost, and takes them back at the end of an epoch. Under torchrun or srun, a process that is
    /// started again rejoins:
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use tensorwire_collective::{Group, GroupError, launch::Launch, store::Store};
    /// use tensorwire_rendezvous::Worker;
    ///
    /// async fn train(launch: Launch, store: Arc<dyn Store>, is_restarted: bool, worker: Worker) -> Result<(), GroupError> {
    ///     let builder = Group::builder(store, launch.rank, launch.size).name("trainers");
    ///     let builder = if let Some(job) = launch.job { builder.job(job) } else { builder };
    ///     let mut group = if is_restarted { builder.rejoin(&worker).await? } else { builder.join(&worker).await? };
    ///     let (mut gradient, mut epoch) = (vec![0.5f32; 1_000_000], 0);
    ///     while epoch < 10 {
    ///         match group.all_reduce(&mut gradient).await {
    ///             Ok(()) => epoch += 1,
    ///             // The values are those of the last checkpoint again.
    ///             Err(_) => group = group.shrink().await?,
    ///         }
    ///         // One rank looks, so that all do the same.
    ///         let mut waiting = [if group.rank() == 0 { group.waiting().await.unwrap_or(0) as u64 } else { 0 }];
    ///         if group.all_reduce(&mut waiting).await.is_err() || waiting[0] > 0 {
    ///             group = group.admit().await?;
    ///             // Rank 0 broadcasts the epoch and the values to those that have come.
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
    /// Dropping it ends the group. It may be called again.
    pub async fn admit(&self) -> Result<Group, GroupError> {
        if self.state.over.get().is_none()
            && let Err(error) = self.clone().close().await
        {
            tracing::debug!(group = self.name(), %error, "admitting ranks to a group that is over");
        }
        regroup(&self.state, true).await
    }
}

impl GroupBuilder {
    /// Joins a group that is there already, and waits until its ranks [admit](Group::admit) this one: a worker that comes back after its
    /// process was restarted, or after [`GroupError::LeftOut`], or one that was never there. It gets the highest rank; the rank
    /// and size that the builder was given are not used. Name, store and job are those of the others.
    ///
    /// # Errors
    /// [`GroupError::NotAdmitted`] if that takes longer than the builder's timeout; [`GroupError::Store`], without which nobody is
    /// admitted; [`GroupError::Argument`].
    ///
    /// # Cancel safety
    /// May be dropped and called again. The ranks may admit what was dropped, and go on without it after their timeout.
    pub async fn rejoin(self, worker: &Worker) -> Result<Group, GroupError> {
        self.check(worker)?;
        let end = worker.runtime().now().saturating_add(self.limit);
        let run = self.run(worker.runtime().as_ref(), end).await?;
        let (identity, newcomer, told) = newcomers::wait(&self, worker, &run, end).await?;
        let state = admitted(worker, identity, &newcomer, &told)?;
        match joining::meet(&state, self.limit).await {
            Ok(()) => Ok(Group { state }),
            Err(error) if is_of_lost_rank(&error) => regroup(&state, false).await,
            Err(error) => Err(error),
        }
    }
}

/// The next generation of `state` whose ranks all meet.
async fn regroup(state: &Arc<GroupState>, admits: bool) -> Result<Group, GroupError> {
    // Those that still wait in this group come to know that it is over.
    let over =
        || GroupError::Over { rank: Some(state.rank), why: "the next generation is being formed".to_owned() };
    state.fail(over());
    let mut following = state.following.lock().await;
    if let Some(formed) = &following.formed {
        // Its step cannot begin again.
        return formed.upgrade().map(|state| Group { state }).ok_or_else(over);
    }
    let end = state.runtime().now().saturating_add(state.identity.limit.saturating_mul(4));
    loop {
        let last = following.forming.clone().unwrap_or_else(|| state.clone());
        // Those that come are admitted to the first generation, and not to one that makes up for losses.
        let next = agree(&last, admits && following.forming.is_none())
            .await
            .map_err(|error| in_numbers_of(state, &last, error))?;
        // If this is dropped meanwhile, the next call goes on from there.
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

/// The generation behind that of `last`, as its ranks agree on it.
async fn agree(last: &Arc<GroupState>, admits: bool) -> Result<Arc<GroupState>, GroupError> {
    let roster = Agreeing::new(last, admits).roster().await?;
    let Some(rank) = roster.staying.iter().position(|rank| *rank == last.rank) else {
        return Err(GroupError::LeftOut { group: last.identity.name.clone(), rank: last.rank });
    };
    let (generation, considered) = (last.identity.generation + 1, roster.considered);
    let identity = Identity { generation, considered, ..last.identity.clone() };
    // Those that come late are told what was decided.
    let before = [&last.register].into_iter().chain(&last.before).take(REMEMBERED).cloned().collect();
    Ok(Arc::new(GroupState::new(&last.worker, identity, rank, last.members_of(&roster), before)?))
}

/// The error of an agreement in the generation `last`, with the numbers of the one that the caller has.
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

/// The generation that has admitted this newcomer, as it was told.
fn admitted(
    worker: &Worker,
    identity: Identity,
    newcomer: &Member,
    told: &[u8],
) -> Result<Arc<GroupState>, GroupError> {
    let key = identity.told(newcomer);
    let (numbers, members) = newcomers::decode(told).ok_or_else(|| joining::foreign(&key, told))?;
    let rank = members.iter().position(|member| member == newcomer);
    let rank = rank.ok_or_else(|| joining::foreign(&key, told))?;
    let [generation, considered] = numbers;
    let identity = Identity { generation, considered, ..identity };
    Ok(Arc::new(GroupState::new(worker, identity, rank, members, Vec::new())?))
}

/// Whether another generation may succeed.
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

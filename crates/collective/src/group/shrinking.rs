//! Going on without ranks that are lost.

use std::{sync::Arc, time::Duration};

use futures::future::try_join_all;
use tensorwire_rendezvous::WorkerError;
use tensorwire_verbs_reactor::timeout;

use super::{Group, GroupState, joining, joining::Identity, member::Member};
use crate::error::GroupError;

/// How often the store is looked at while ranks come.
const LOOK: Duration = Duration::from_millis(50);

/// How long a rank that has not come may take to answer before it counts as lost.
const PROBE: Duration = Duration::from_secs(2);

/// The name of a tensor that no worker publishes: a rank that says so is alive.
const PROBED: &str = "tensorwire: is this rank alive?";

impl Group {
    /// A group of the ranks that are left, after a call has failed. All of them must call this. Ranks keep their order: the lowest
    /// that is left becomes rank 0. Calls of several clones of one rank return the same group.
    ///
    /// Ranks that are left write themselves into the store. One that misses nobody who answers, and has at least half of the ranks
    /// with it, or that has waited for the group's [`timeout`](Self::timeout), writes down who has come, once for all: the others take
    /// over what it has written. If a rank is lost meanwhile, this begins again with the next generation.
    ///
    /// # Errors
    /// [`GroupError::LeftOut`] if the others went on without this rank; [`GroupError::Store`] if the store is gone;
    /// [`GroupError::Worker`] if this rank's worker was shut down; [`GroupError::TimedOut`] if ranks are lost again and again.
    ///
    /// # Cancel safety
    /// May be dropped and called again, as long as the others have not agreed without this rank.
    pub async fn shrink(&self) -> Result<Group, GroupError> {
        let state = &self.state;
        // Those that still wait in this group come to know that it is over.
        state.fail(GroupError::Over { rank: Some(state.rank), why: "the group is being shrunk".to_owned() });
        let mut shrunk = state.shrunk.lock().await;
        if let Some(known) = shrunk.upgrade() {
            return Ok(Group { state: known });
        }
        let mut generation = state.identity.generation + 1;
        let end = state.runtime().now().saturating_add(state.identity.limit.saturating_mul(4));
        loop {
            let identity = Identity { generation, ..state.identity.clone() };
            match state.agree(identity).await {
                Err(error) if is_of_lost_rank(&error) && state.runtime().now() < end => generation += 1,
                Err(error) => return Err(error),
                Ok(group) => {
                    *shrunk = Arc::downgrade(&group.state);
                    return Ok(group);
                }
            }
        }
    }
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

/// The records of one generation. They are named by worker, and not by rank: groups of several generations, in which a worker has
/// several ranks, may come to the same one.
struct Generation<'group> {
    group: &'group GroupState,
    identity: Identity,
    /// Where each rank writes itself.
    keys: Vec<String>,
    /// Where it is written who makes the group.
    decided: String,
}

impl GroupState {
    async fn agree(&self, identity: Identity) -> Result<Group, GroupError> {
        let keys = self.members.iter().map(|member| identity.key(&format!("worker {}", member.worker)));
        let (keys, decided) = (keys.collect(), identity.key("workers"));
        let generation = Generation { group: self, identity, keys, decided };
        let (rank, members) = generation.members().await?;
        let end = self.runtime().now().saturating_add(self.identity.limit);
        joining::meet(&self.worker, generation.identity, rank, members, end).await
    }
}

impl Generation<'_> {
    /// Who is left, as all agree, and which of them this rank is.
    async fn members(&self) -> Result<(usize, Vec<Member>), GroupError> {
        let Self { group, identity, keys, decided } = self;
        let own = keys.get(group.rank).map(String::as_str).unwrap_or_default();
        identity.store.set(own, &Member::of(&group.worker).encode()).await?;
        // Those who have come by then make the group.
        let come = match timeout(group.runtime(), identity.limit, Box::pin(self.who_comes())).await {
            Ok(come) => come?,
            Err(_) => self.come().await?,
        };
        let workers: Vec<&str> = come
            .iter()
            .filter_map(|rank| group.members.get(*rank))
            .map(|member| member.worker.as_str())
            .collect();
        let agreed = joining::write_once(&*identity.store, decided, workers.join("\n").as_bytes()).await?;
        let workers = std::str::from_utf8(&agreed).map_err(|_| joining::foreign(decided, &agreed))?;
        let workers: Vec<&str> = workers.split('\n').collect();
        let Some(rank) = workers.iter().position(|worker| *worker == group.worker.name()) else {
            return Err(GroupError::LeftOut { group: identity.name.clone(), rank: group.rank });
        };
        let theirs: Vec<String> =
            workers.iter().map(|worker| identity.key(&format!("worker {worker}"))).collect();
        let records = identity.store.wait(&theirs, identity.limit).await?;
        let members = theirs
            .iter()
            .zip(&records)
            .map(|(key, record)| Member::decode(record).ok_or_else(|| joining::foreign(key, record)));
        Ok((rank, members.collect::<Result<_, _>>()?))
    }

    /// The ranks that have come, once no other is alive or somebody has decided.
    async fn who_comes(&self) -> Result<Vec<usize>, GroupError> {
        let Self { group, identity, decided, .. } = self;
        loop {
            let come = self.come().await?;
            let known = identity.store.get(std::slice::from_ref(decided)).await?;
            if come.len() == group.size() || known.first().is_some_and(Option::is_some) {
                return Ok(come);
            }
            let missing = (0..group.size()).filter(|rank| !come.contains(rank));
            let alive = try_join_all(missing.map(|rank| group.is_alive(rank))).await?;
            // Fewer than half may be those that are cut off, and wait.
            if !alive.contains(&true) && 2 * come.len() >= group.size() {
                // One may have come while it was asked.
                return self.come().await;
            }
            group.runtime().sleep(LOOK).await;
        }
    }

    async fn come(&self) -> Result<Vec<usize>, GroupError> {
        let found = self.identity.store.get(&self.keys).await?;
        Ok(found.iter().enumerate().filter(|(_, record)| record.is_some()).map(|(rank, _)| rank).collect())
    }
}

impl GroupState {
    /// Whether the worker of a rank answers.
    ///
    /// # Errors
    /// This rank's own worker cannot ask.
    async fn is_alive(&self, rank: usize) -> Result<bool, GroupError> {
        let Some(peer) = self.peers.get(rank) else { return Ok(false) };
        let limit = PROBE.min(self.identity.limit);
        match peer.fetch(PROBED).timeout(limit).await {
            Ok(_) | Err(WorkerError::Remote { .. }) => Ok(true),
            Err(error @ (WorkerError::ShutDown | WorkerError::Limit { .. })) => Err(error.into()),
            Err(_) => Ok(false),
        }
    }
}

//! Going on without ranks that are lost.

use std::time::Duration;

use futures::future::join_all;
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
    /// that is left becomes rank 0.
    ///
    /// Ranks that are left write themselves into the store. The first rank that misses nobody who answers, or that has waited for the
    /// group's [`timeout`](Self::timeout), writes down who has come, once for all: the others take over what it has written. If a
    /// rank is lost meanwhile, this begins again with the next generation.
    ///
    /// # Errors
    /// [`GroupError::LeftOut`] if the others went on without this rank; [`GroupError::Store`] if the store is gone;
    /// [`GroupError::TimedOut`] if ranks are lost again and again.
    ///
    /// # Cancel safety
    /// May be dropped and called again, as long as the others have not agreed without this rank.
    pub async fn shrink(&self) -> Result<Group, GroupError> {
        let state = &self.state;
        // Those that still wait in this group come to know that it is over.
        state.fail(GroupError::Over { rank: Some(state.rank), why: "the group is being shrunk".to_owned() });
        let mut generation = state.identity.generation + 1;
        let end = state.runtime().now() + state.identity.limit.saturating_mul(4);
        loop {
            let identity = Identity { generation, ..state.identity.clone() };
            match state.agree(identity).await {
                Err(error) if is_of_lost_rank(&error) && state.runtime().now() < end => generation += 1,
                agreed => return agreed,
            }
        }
    }
}

/// Whether another generation may succeed.
fn is_of_lost_rank(error: &GroupError) -> bool {
    matches!(
        error,
        GroupError::RankLost { .. }
            | GroupError::TimedOut { .. }
            | GroupError::Over { .. }
            | GroupError::Worker(_)
    )
}

impl GroupState {
    async fn agree(&self, identity: Identity) -> Result<Group, GroupError> {
        let keys: Vec<String> = (0..self.size()).map(|rank| identity.key(&format!("rank {rank}"))).collect();
        let own = keys.get(self.rank).map(String::as_str).unwrap_or_default();
        identity.store.set(own, &Member::of(&self.worker).encode()).await?;
        let left = self.left(&identity, &keys).await?;
        let Some(rank) = left.iter().position(|(rank, _)| *rank == self.rank) else {
            return Err(GroupError::LeftOut { group: identity.name, rank: self.rank });
        };
        let members = left.into_iter().map(|(_, member)| member).collect();
        let end = self.runtime().now() + identity.limit;
        joining::meet(&self.worker, identity, rank, members, end).await
    }

    /// Who is left, as all agree: former ranks with their records.
    async fn left(&self, identity: &Identity, keys: &[String]) -> Result<Vec<(usize, Member)>, GroupError> {
        let decided = identity.key("ranks");
        let come = Box::pin(self.who_comes(identity, keys, &decided));
        // Those who have come by then make the group.
        let come = timeout(self.runtime(), identity.limit, come).await;
        let come = match come {
            Ok(come) => come?,
            Err(_) => self.come(identity, keys).await?,
        };
        let ranks: Vec<String> = come.iter().map(usize::to_string).collect();
        let proposed = ranks.join(",");
        let agreed = identity.store.compare_set(&decided, None, proposed.as_bytes()).await?;
        let agreed = agreed.unwrap_or_default();
        let text = std::str::from_utf8(&agreed).unwrap_or_default();
        let ranks = text.split(',').map(|rank| rank.parse::<usize>().ok().filter(|rank| *rank < self.size()));
        let Some(ranks) = ranks.collect::<Option<Vec<_>>>() else {
            return Err(joining::foreign(&decided, &agreed));
        };
        let theirs: Vec<String> = ranks.iter().filter_map(|rank| keys.get(*rank)).cloned().collect();
        let records = identity.store.wait(&theirs, identity.limit).await?;
        let members = ranks.iter().zip(theirs.iter().zip(&records)).map(|(rank, (key, record))| {
            Ok((*rank, Member::decode(record).ok_or_else(|| joining::foreign(key, record))?))
        });
        members.collect()
    }

    /// The ranks that have come, once no other is alive or another rank has decided.
    async fn who_comes(
        &self,
        identity: &Identity,
        keys: &[String],
        decided: &String,
    ) -> Result<Vec<usize>, GroupError> {
        loop {
            let come = self.come(identity, keys).await?;
            if come.len() == self.size() {
                return Ok(come);
            }
            let known = identity.store.get(std::slice::from_ref(decided)).await?;
            if known.first().is_some_and(Option::is_some) {
                return Ok(come);
            }
            let missing = (0..self.size()).filter(|rank| !come.contains(rank));
            let alive = join_all(missing.map(|rank| self.is_alive(rank))).await;
            if !alive.contains(&true) {
                // One may have come while it was asked.
                return self.come(identity, keys).await;
            }
            self.runtime().sleep(LOOK).await;
        }
    }

    async fn come(&self, identity: &Identity, keys: &[String]) -> Result<Vec<usize>, GroupError> {
        let found = identity.store.get(keys).await?;
        Ok(found.iter().enumerate().filter(|(_, record)| record.is_some()).map(|(rank, _)| rank).collect())
    }

    /// Whether the worker of a rank answers.
    async fn is_alive(&self, rank: usize) -> bool {
        let Some(peer) = self.peers.get(rank) else { return false };
        let limit = PROBE.min(self.identity.limit);
        matches!(peer.fetch(PROBED).timeout(limit).await, Ok(_) | Err(WorkerError::Remote { .. }))
    }
}

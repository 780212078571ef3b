//! Ranks that come to a group that is there already: they wait in the store until its ranks admit them.
//!
//! A newcomer writes itself into the first free place of a list, and waits for its own key. Whoever leads the agreement on the next
//! generation reads the list from where the last one stopped, and tells those that are admitted before the others learn of it.

use std::{collections::BTreeSet, time::Duration};

use futures::future::try_join_all;
use tensorwire_rendezvous::Worker;

use super::{
    Group, GroupState, joining, joining::Identity, member::Member, probing::is_alive, register::Roster,
};
use crate::error::GroupError;

/// Places of the list that are looked at together; so many are admitted to one generation at most.
const PLACES: u64 = 64;

impl Identity {
    /// The next places of the list.
    fn places(&self, considered: u64) -> Vec<String> {
        let places = considered.saturating_add(1)..=considered.saturating_add(PLACES);
        places.map(|place| format!("{}/{}/waiting/{place}", self.name, self.run)).collect()
    }

    /// Where a newcomer is told that it is admitted.
    pub(super) fn told(&self, newcomer: &Member) -> String {
        format!("{}/{}/admitted/{:016x}", self.name, self.run, newcomer.nonce)
    }
}

impl Group {
    /// How many workers wait in the store to be admitted, at most 64. One read of the store.
    ///
    /// # Errors
    /// [`GroupError::Store`]: without the store nobody can be admitted.
    ///
    /// # Cancel safety
    /// May be dropped.
    pub async fn waiting(&self) -> Result<usize, GroupError> {
        let identity = &self.state.identity;
        let found = identity.store.get(&identity.places(identity.considered)).await?;
        Ok(found.iter().flatten().filter(|record| Member::decode(record).is_some()).count())
    }
}

/// Writes the newcomer into the first free place.
pub(super) async fn take_place(identity: &Identity, newcomer: &Member) -> Result<String, GroupError> {
    let record = newcomer.encode();
    let mut considered = 0;
    loop {
        let places = identity.places(considered);
        let found = identity.store.get(&places).await?;
        let free = places.into_iter().zip(&found).filter(|(_, taken)| taken.is_none());
        for (place, _) in free {
            if joining::write_once(&*identity.store, &place, &record).await? == record {
                return Ok(place);
            }
        }
        considered += PLACES;
    }
}

/// A generation's number, how many newcomers were considered, and its members.
pub(super) fn decode(told: &[u8]) -> Option<([u64; 2], Vec<Member>)> {
    let mut lines = std::str::from_utf8(told).ok()?.strip_suffix('\n')?.split('\n').peekable();
    let numbers = [lines.next()?.parse().ok()?, lines.next()?.parse().ok()?];
    let mut members = Vec::new();
    while lines.peek().is_some() {
        members.push(Member::take(&mut lines)?);
    }
    Some((numbers, members))
}

/// Tells those that a decision admits. If the store fails, they do not come, and the others go on without them.
pub(super) async fn tell(group: &GroupState, roster: &Roster) {
    let Roster { newcomers, considered, .. } = roster;
    let members: String = group.members_of(roster).iter().map(Member::text).collect();
    let told = format!("{}\n{considered}\n{members}", group.identity.generation + 1);
    for newcomer in newcomers {
        if let Err(error) = group.identity.store.set(&group.identity.told(newcomer), told.as_bytes()).await {
            tracing::warn!(group = group.identity.name, newcomer = newcomer.worker, %error, "a rank cannot be admitted");
        }
    }
}

/// A generation of the ranks in `staying` and, if it admits any, of those that wait in the store and answer. If the store cannot
/// be read, nobody is admitted.
pub(super) async fn roster(
    group: &GroupState,
    staying: Vec<usize>,
    admits: bool,
) -> Result<Roster, GroupError> {
    let identity = &group.identity;
    let mut roster = Roster { staying, newcomers: Vec::new(), considered: identity.considered };
    if !admits {
        return Ok(roster);
    }
    let found = identity.store.get(&identity.places(identity.considered)).await.unwrap_or_else(|error| {
        tracing::warn!(group = identity.name, %error, "nobody is admitted, as the store cannot be read");
        Vec::new()
    });
    let records: Vec<Vec<u8>> = found.into_iter().map_while(|record| record).collect();
    roster.considered += records.len() as u64;
    let mut names: BTreeSet<String> =
        group.members_of(&roster).into_iter().map(|member| member.worker).collect();
    // Of a worker that has come several times, the last counts.
    let come = records.iter().rev().filter_map(|record| Member::decode(record));
    let mut come: Vec<Member> = come.filter(|member| names.insert(member.worker.clone())).collect();
    come.reverse();
    let limit = identity.limit;
    let alive = try_join_all(come.iter().map(|member| answers(&group.worker, member, limit))).await?;
    roster.newcomers =
        come.into_iter().zip(alive).filter_map(|(member, alive)| alive.then_some(member)).collect();
    Ok(roster)
}

async fn answers(worker: &Worker, newcomer: &Member, limit: Duration) -> Result<bool, GroupError> {
    match worker.set_address(&newcomer.worker, &newcomer.address) {
        Ok(peer) => is_alive(&peer, newcomer.incarnation, limit).await,
        // No name or address of a worker.
        Err(_) => Ok(false),
    }
}

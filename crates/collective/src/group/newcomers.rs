//! Ranks that come to a group that is there already: they wait in the store until its ranks admit them.
//!
//! A newcomer writes itself into the first free place of a list, and waits for its own key. Whoever leads the agreement on the next
//! generation reads the list from where the last one stopped, and tells those that are admitted before the others learn of it.

use std::{collections::BTreeSet, time::Duration};

use futures::future::{join_all, try_join_all};
use tensorwire_rendezvous::Worker;
use tensorwire_verbs_reactor::timeout;

use super::{
    Group, GroupBuilder, GroupState, joining,
    joining::{Identity, Witness},
    member::Member,
    probing::is_alive,
    register::Roster,
};
use crate::{error::GroupError, store::StoreError};

/// Places of the list that are looked at together; so many are admitted to one generation at most.
const PLACES: u64 = 64;

/// Places that one newcomer takes, one after the other, if it is passed over each time.
const PLACES_OF_ONE: u32 = 10;

/// What a newcomer is told that did not answer.
const PASSED_OVER: &[u8] = b"passed over";

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

/// Waits in the store until the group's ranks admit `worker`. Returns what it was told, and whom the ranks know it as.
///
/// One that was passed over, because it did not answer, takes another place: nobody looks at its first one again.
pub(super) async fn wait(
    settings: &GroupBuilder,
    worker: &Worker,
    run: &str,
    end: Duration,
) -> Result<(Identity, Member, Vec<u8>), GroupError> {
    loop {
        let newcomer = Member::of(worker);
        let witness = Witness { key: String::new(), record: newcomer.encode() };
        let mut identity = settings.identity(run.to_owned(), witness);
        take_place(&mut identity).await?;
        let left = end.saturating_sub(worker.runtime().now());
        let told = match identity.store.wait(&[identity.told(&newcomer)], left).await {
            Err(StoreError::TimedOut { .. }) => {
                // So that nobody waits for it. If this fails, they find out by themselves.
                let _ = identity.store.set(&identity.witness.key, b"").await;
                return Err(GroupError::NotAdmitted { group: identity.name, limit: settings.limit });
            }
            told => told?.pop().unwrap_or_default(),
        };
        if told != PASSED_OVER {
            return Ok((identity, newcomer, told));
        }
        // One that no rank can reach does not keep them busy.
        worker.runtime().sleep(settings.limit / PLACES_OF_ONE).await;
    }
}

/// Writes the newcomer's record into the first free place.
async fn take_place(identity: &mut Identity) -> Result<(), GroupError> {
    let mut considered = 0;
    loop {
        let places = identity.places(considered);
        let found = identity.store.get(&places).await?;
        let free = places.into_iter().zip(&found).filter(|(_, taken)| taken.is_none());
        for (place, _) in free {
            let record = &identity.witness.record;
            if joining::write_once(&*identity.store, &place, record).await? == *record {
                identity.witness.key = place;
                return Ok(());
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

/// Tells those that a decision admits, within `limit`. If the store fails, they do not come, and the others go on without them.
pub(super) async fn tell(group: &GroupState, roster: &Roster, limit: Duration) {
    let Roster { newcomers, considered, .. } = roster;
    let members: String = group.members_of(roster).iter().map(Member::text).collect();
    let told = format!("{}\n{considered}\n{members}", group.identity.generation + 1);
    tell_each(group, newcomers, told.as_bytes(), limit).await;
}

/// Tells newcomers that they are passed over. Only once that is decided: another leader may hear them.
pub(super) async fn pass_over(group: &GroupState, silent: &[Member], limit: Duration) {
    tell_each(group, silent, PASSED_OVER, limit).await;
}

async fn tell_each(group: &GroupState, newcomers: &[Member], told: &[u8], limit: Duration) {
    let telling = newcomers.iter().map(async |newcomer| {
        let (identity, key) = (&group.identity, group.identity.told(newcomer));
        let told = within(group, limit, identity.store.set(&key, told)).await;
        if let Err(error) = told {
            tracing::warn!(group = identity.name, newcomer = newcomer.worker, %error, "a rank cannot be told whether it is admitted");
        }
    });
    join_all(telling).await;
}

/// What the store answers within `limit`.
async fn within<T>(
    group: &GroupState,
    limit: Duration,
    asked: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    timeout(group.runtime(), limit, asked).await.unwrap_or_else(|_| Err(silent(group)))
}

/// The error of a store that does not answer.
pub(super) fn silent(group: &GroupState) -> StoreError {
    let store = format!("the store of group `{}`", group.identity.name);
    StoreError::Unreachable {
        store,
        detail: "it has not answered in time; see whether it can be reached".to_owned(),
    }
}

/// A generation of the ranks in `staying` and, if it admits any, of those that wait in the store and answer: of as many as there are
/// ranks, so that these can go on if all of them vanish. The others wait for the next generation. If the store cannot be read within
/// half of `limit`, nobody is admitted. Also gives those that are passed over, because they do not answer.
pub(super) async fn roster(
    group: &GroupState,
    staying: Vec<usize>,
    admits: bool,
    limit: Duration,
) -> Result<(Roster, Vec<Member>), GroupError> {
    let identity = &group.identity;
    let mut roster = Roster { staying, newcomers: Vec::new(), considered: identity.considered };
    if !admits {
        return Ok((roster, Vec::new()));
    }
    let places = identity.places(identity.considered);
    let found = within(group, limit / 2, identity.store.get(&places)).await.unwrap_or_else(|error| {
        tracing::warn!(group = identity.name, %error, "nobody is admitted, as the store cannot be read");
        Vec::new()
    });
    let records: Vec<Vec<u8>> = found.into_iter().map_while(|record| record).collect();
    let mut names: BTreeSet<String> =
        group.members_of(&roster).into_iter().map(|member| member.worker).collect();
    // Of a worker that has come several times, the last counts.
    let come =
        records.iter().enumerate().rev().filter_map(|(at, record)| Some((at, Member::decode(record)?)));
    let mut come: Vec<(usize, Member)> =
        come.filter(|(_, member)| names.insert(member.worker.clone())).collect();
    come.reverse();
    let alive = come.iter().map(|(_, member)| answers(&group.worker, member, limit / 2));
    let alive = try_join_all(alive).await?;
    let (come, silent): (Vec<_>, Vec<_>) = come.into_iter().zip(alive).partition(|(_, alive)| *alive);
    let room = roster.staying.len();
    let considered = come.get(room).map_or(records.len(), |((at, _), _)| *at);
    roster.considered += considered as u64;
    roster.newcomers = come.into_iter().take(room).map(|((_, member), _)| member).collect();
    let silent = silent.into_iter().filter(|((at, _), _)| *at < considered);
    Ok((roster, silent.map(|((_, member), _)| member).collect()))
}

async fn answers(worker: &Worker, newcomer: &Member, limit: Duration) -> Result<bool, GroupError> {
    match worker.set_address(&newcomer.worker, &newcomer.address) {
        Ok(peer) => is_alive(&peer, newcomer.incarnation, limit).await,
        // No name or address of a worker.
        Err(_) => Ok(false),
    }
}

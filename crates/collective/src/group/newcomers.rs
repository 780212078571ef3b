//! Workers that join an existing group: they wait in the store until its ranks admit them.
//!
//! A newcomer writes its record into the first free entry of a waiting list, and waits for a key of its own. The rank that leads
//! the agreement on the next generation reads the list from where the previous generation stopped. It writes the newcomers' keys
//! before the other ranks learn the decision.

use std::{collections::BTreeSet, time::Duration};

use futures::future::{join_all, try_join_all};
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_rendezvous::Worker;

use super::{
    Group, GroupBuilder, GroupState, joining,
    joining::{Identity, Witness},
    member::Member,
    probing::is_alive,
    register::Roster,
};
use crate::{error::GroupError, store::StoreError};

/// How many entries of the waiting list are read at a time. No more newcomers are admitted to one generation.
const ENTRIES: u64 = 64;

/// The pause between two reads of the waiting list, so that a long one is no load.
const LIST_PAUSE: Duration = Duration::from_millis(10);

/// A newcomer that is passed over pauses so that it writes at most this many entries within its time limit.
const ENTRIES_OF_ONE: u32 = 10;

/// The content of the key of a newcomer that was passed over because it did not answer.
const PASSED_OVER: &[u8] = b"passed over";

impl Identity {
    /// The keys of the next [`ENTRIES`] entries of the waiting list.
    fn entries(&self, considered: u64) -> Vec<String> {
        let entries = considered.saturating_add(1)..=considered.saturating_add(ENTRIES);
        entries.map(|entry| format!("{}/{}/waiting/{entry}", self.name, self.run)).collect()
    }

    /// The key under which a newcomer learns whether it is admitted.
    pub(super) fn admission_key(&self, newcomer: &Member) -> String {
        format!("{}/{}/admitted/{:016x}", self.name, self.run, newcomer.nonce)
    }
}

impl Group {
    /// The number of workers that wait in the store to be admitted, at most 64. Reads the store once.
    ///
    /// # Errors
    /// [`GroupError::Store`] if the store cannot be read.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn waiting(&self) -> Result<usize, GroupError> {
        let identity = &self.state.identity;
        let found = identity.store.get(&identity.entries(identity.considered)).await?;
        Ok(found.iter().flatten().filter(|record| Member::decode(record).is_some()).count())
    }
}

/// Waits in the store until the group's ranks admit `worker`. Returns the newcomer's identity, its record as the ranks know it,
/// and what they wrote under its key.
///
/// A newcomer that was passed over writes a further entry, because its earlier one is never read again.
pub(super) async fn wait(
    settings: &GroupBuilder,
    worker: &Worker,
    run: &str,
    end: Duration,
) -> Result<(Identity, Member, Vec<u8>), GroupError> {
    loop {
        let newcomer = Member::of(worker, &*settings.store)?;
        let witness = Witness { key: String::new(), record: newcomer.encode() };
        let mut identity = settings.identity(run.to_owned(), witness);
        let not_admitted = || GroupError::NotAdmitted { group: settings.name.clone(), limit: settings.limit };
        let runtime = worker.runtime();
        let left = end.saturating_sub(runtime.now());
        timeout(&**runtime, left, take_entry(&mut identity, &**runtime))
            .await
            .map_err(|_| not_admitted())??;
        let left = end.saturating_sub(runtime.now());
        let reply = match identity.store.wait(&[identity.admission_key(&newcomer)], left).await {
            Err(StoreError::TimedOut { .. }) => {
                // The empty record takes it off the list. If this fails, the ranks find out that it does not answer.
                let _ = identity.store.set(&identity.witness.key, b"").await;
                return Err(not_admitted());
            }
            reply => reply?.pop().unwrap_or_default(),
        };
        if reply != PASSED_OVER {
            return Ok((identity, newcomer, reply));
        }
        // The pause limits the work of the ranks if none of them can reach this newcomer.
        runtime.sleep(settings.limit / ENTRIES_OF_ONE).await;
        if runtime.now() >= end {
            return Err(not_admitted());
        }
    }
}

/// Writes the newcomer's record into the first free entry.
async fn take_entry(identity: &mut Identity, runtime: &dyn Runtime) -> Result<(), GroupError> {
    let mut considered = 0_u64;
    loop {
        let entries = identity.entries(considered);
        let found = identity.store.get(&entries).await?;
        let free = entries.into_iter().zip(&found).filter(|(_, taken)| taken.is_none());
        for (entry, _) in free {
            let record = &identity.witness.record;
            if joining::write_once(&*identity.store, &entry, record).await? == *record {
                identity.witness.key = entry;
                return Ok(());
            }
        }
        considered = considered.saturating_add(ENTRIES);
        runtime.sleep(LIST_PAUSE).await;
    }
}

/// Decodes the reply to a newcomer: its identity in the generation that admits it, its rank there, and the members. `None` if the
/// reply is of another version, run or generation, or the newcomer does not follow other ranks.
pub(super) fn decode(
    reply: &[u8],
    identity: Identity,
    newcomer: &Member,
) -> Option<(Identity, usize, Vec<Member>)> {
    let mut lines = std::str::from_utf8(reply).ok()?.strip_suffix('\n')?.split('\n');
    let step = lines.next()?;
    let (generation, considered) = (lines.next()?.parse().ok()?, lines.next()?.parse().ok()?);
    let identity = Identity { generation, considered, ..identity };
    let members = Member::take_all(lines)?;
    let rank = members.iter().position(|member| member == newcomer)?;
    let is_consistent = generation > 0 && rank > 0 && identity.step().to_string() == step;
    is_consistent.then_some((identity, rank, members))
}

/// Writes to the admitted newcomers, within `limit`. If the store fails, they do not come, and the ranks go on without them.
pub(super) async fn announce_admission(group: &GroupState, roster: &Roster, limit: Duration) {
    let Roster { newcomers, considered, .. } = roster;
    let members: String = group.members_of(roster).iter().map(Member::text).collect();
    let next = group.identity.next(*considered);
    let reply = format!("{}\n{}\n{considered}\n{members}", next.step(), next.generation);
    write_each(group, newcomers, reply.as_bytes(), limit).await;
}

/// Writes to newcomers that they are passed over. Only after the decision, because another leader may reach them.
pub(super) async fn pass_over(group: &GroupState, silent: &[Member], limit: Duration) {
    write_each(group, silent, PASSED_OVER, limit).await;
}

async fn write_each(group: &GroupState, newcomers: &[Member], reply: &[u8], limit: Duration) {
    let writing = newcomers.iter().map(async |newcomer| {
        let (identity, key) = (&group.identity, group.identity.admission_key(newcomer));
        let written = within(group, limit, identity.store.set(&key, reply)).await;
        if let Err(error) = written {
            log!(WARN, group = identity.name, newcomer = newcomer.worker, %error, "cannot write to the store whether this newcomer is admitted");
        }
    });
    join_all(writing).await;
}

/// The store's answer, or an error after `limit`.
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
        detail: "no answer in time; check that the store can be reached".to_owned(),
    }
}

/// The roster of the ranks in `staying` and, if `admits`, of the newcomers that answer. At most as many newcomers as there are
/// ranks: so the ranks are half of the new generation, and can go on with the store if all newcomers are lost. The others wait for the next
/// generation. Nobody is admitted if the store cannot be read within half of `limit`. Also returns the newcomers that are passed
/// over because they do not answer.
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
    let entries = identity.entries(identity.considered);
    let found = within(group, limit / 2, identity.store.get(&entries)).await.unwrap_or_else(|error| {
        log!(WARN, group = identity.name, %error, "cannot read the store, so no newcomer is admitted");
        Vec::new()
    });
    let records: Vec<Vec<u8>> = found.into_iter().map_while(|record| record).collect();
    let mut names: BTreeSet<String> =
        group.members_of(&roster).into_iter().map(|member| member.worker).collect();
    // If a worker has several entries, the last one counts.
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
    roster.considered = roster.considered.saturating_add(considered as u64);
    roster.newcomers = come.into_iter().take(room).map(|((_, member), _)| member).collect();
    let silent = silent.into_iter().filter(|((at, _), _)| *at < considered);
    Ok((roster, silent.map(|((_, member), _)| member).collect()))
}

async fn answers(worker: &Worker, newcomer: &Member, limit: Duration) -> Result<bool, GroupError> {
    match worker.hint_address(&newcomer.worker, &newcomer.address) {
        Ok((peer, _hint)) => is_alive(&peer, newcomer.incarnation, limit).await,
        // Not a valid name or address of a worker.
        Err(_) => Ok(false),
    }
}

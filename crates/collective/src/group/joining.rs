//! Joining a group: how its ranks find each other in the store, and make sure that they belong to one run.

use std::{sync::Arc, time::Duration};

use futures::future::{Either, select};
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_rendezvous::{Worker, WorkerError};

use super::{
    Group, GroupBuilder, GroupState,
    barrier::{self, meet_all},
    calling::Calling,
    member::Member,
    probing::is_gone,
};
use crate::{
    call::{Call, CallKind, hash},
    error::GroupError,
    store::{Store, StoreError},
};

/// How often a rank checks whether another run has replaced the one that it joins.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// What distinguishes a group from all others.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) name: String,
    /// The id of the run, the same for all generations.
    pub(crate) run: String,
    pub(crate) generation: u64,
    /// How many entries of the run's waiting list have been considered.
    pub(crate) considered: u64,
    pub(crate) limit: Duration,
    /// This rank's record in the store.
    pub(crate) witness: Witness,
}

/// This rank's record in the store, written once, before it was in any generation. While the store has it, the store has lost
/// nothing that was written later.
#[derive(Debug, Clone)]
pub(crate) struct Witness {
    pub(crate) key: String,
    pub(crate) record: Vec<u8>,
}

impl Witness {
    /// # Errors
    /// [`StoreError::Lost`] if the record is not there any more; other errors of the store.
    pub(super) async fn check(&self, store: &dyn Store) -> Result<(), StoreError> {
        let found = store.get(std::slice::from_ref(&self.key)).await?.pop().flatten();
        let is_there = found.as_ref() == Some(&self.record);
        if is_there { Ok(()) } else { Err(StoreError::Lost { key: self.key.clone() }) }
    }
}

impl Identity {
    /// The step in which the group's messages travel: a hash of 63 bits.
    pub(crate) fn step(&self) -> i64 {
        let text = format!("{}\n{}\n{}", self.name, self.run, self.generation);
        (hash(text.into_bytes()) >> 1) as i64
    }

    /// The identity of a group that call `number` of this one derives. Its run is a hash, so that its length does not grow with
    /// each derivation.
    pub(crate) fn derived(&self, name: &str, number: u64) -> Self {
        let text = format!("{}\n{}\n{}\n{number}", self.name, self.run, self.generation);
        let run = format!("{:016x}", hash(text.into_bytes()));
        Self { name: name.to_owned(), run, generation: 0, considered: 0, ..self.clone() }
    }

    /// The identity of the next generation.
    pub(super) fn next(&self, considered: u64) -> Self {
        let generation = self.generation.saturating_add(1);
        Self { generation, considered, ..self.clone() }
    }

    /// The key of this generation's agreement in the store.
    pub(super) fn agreement(&self) -> String {
        key(&self.name, &self.run, self.generation, "agreement")
    }
}

/// A key of a generation in the store.
fn key(group: &str, run: &str, generation: u64, of: &str) -> String {
    format!("{group}/{run}/{generation}/{of}")
}

impl GroupBuilder {
    /// Joins the group with `worker`: writes this rank's address into the store, reads those of the others, and waits until all
    /// have joined. Makes only the connections that this needs, at most one with another rank for each doubling of the ranks. Others
    /// are made when a call first needs them.
    ///
    /// Ranks recognise the records of an earlier run: nobody of their run answers there, and they read the store again.
    ///
    /// # Errors
    /// [`GroupError::Missing`] with the ranks that did not come in time; [`GroupError::RankTaken`], [`GroupError::OtherRun`],
    /// [`GroupError::Store`]; [`GroupError::Argument`], also if the worker's
    /// [`requests_max`](tensorwire_rendezvous::Flow::requests_max) is below 256.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the rank, and the others cannot complete the join either. Its record stays in the store. As long
    /// as other ranks are missing, this worker or a restarted process can take its place; later only another run can.
    pub async fn join(self, worker: &Worker) -> Result<Group, GroupError> {
        self.check(worker)?;
        join(self, worker).await
    }

    /// The identity of the first generation.
    pub(super) fn identity(&self, run: String, witness: Witness) -> Identity {
        let (store, name, limit) = (self.store.clone(), self.name.clone(), self.limit);
        Identity { store, name, run, generation: 0, considered: 0, limit, witness }
    }

    /// The id of the run: the launcher's job, or the one that rank 0 wrote into the store.
    pub(super) async fn run(&self, runtime: &dyn Runtime, end: Duration) -> Result<String, GroupError> {
        match &self.job {
            Some(job) => Ok(job.clone()),
            None => Ok(Runs::of(self, runtime).found(end).await?.nonce),
        }
    }
}

async fn join(settings: GroupBuilder, worker: &Worker) -> Result<Group, GroupError> {
    let runtime = worker.runtime().clone();
    let end = runtime.now().saturating_add(settings.limit);
    let member = Member::of(worker, &*settings.store)?;
    if let Some(job) = settings.job.clone() {
        return attempt(&settings, worker, &member, job, end).await;
    }
    let runs = Runs::of(&settings, &*runtime);
    let mut run = runs.first(&member, end).await?;
    loop {
        let replaced = async {
            let attempt = Box::pin(async {
                check_size(&settings, run.size, &run.by)?;
                attempt(&settings, worker, &member, run.nonce.clone(), end).await
            });
            let replaced = Box::pin(runs.replaced(&run));
            match select(attempt, replaced).await {
                // The records may be of an earlier run.
                Either::Left((Err(error), replaced))
                    if settings.rank != 0 && may_be_of_earlier_run(&error) =>
                {
                    let left = end.saturating_sub(runtime.now());
                    if is_late(&error) && !is_gone(worker, &run.by, left).await? {
                        return Err(error);
                    }
                    let left = end.saturating_sub(runtime.now());
                    timeout(&*runtime, left, replaced).await.map_err(|_| error)?.map(Either::Right)
                }
                Either::Left((joined, _)) => joined.map(Either::Left),
                // The run that this rank read was an earlier one.
                Either::Right((other, _)) => other.map(Either::Right),
            }
        };
        match replaced.await? {
            Either::Left(group) => return Ok(group),
            Either::Right(other) if settings.rank == 0 || runtime.now() >= end => {
                return Err(GroupError::OtherRun {
                    group: settings.name.clone(),
                    by: other.by.whereabouts(),
                });
            }
            Either::Right(other) => run = other,
        }
    }
}

/// Whether records of an earlier run may have caused `error`: their ranks are gone, or had other numbers.
fn may_be_of_earlier_run(error: &GroupError) -> bool {
    matches!(
        error,
        GroupError::RankLost { .. }
            | GroupError::RankTaken { .. }
            | GroupError::Over { .. }
            | GroupError::Left { .. }
            | GroupError::Argument { .. }
    ) || matches!(error, GroupError::Worker(error) if !matches!(error, WorkerError::Limit { .. } | WorkerError::ShutDown))
}

/// Writes `value` unless the key has one, and returns the stored value. Retries once if it is unknown whether the value was
/// written.
pub(super) async fn write_once(store: &dyn Store, key: &str, value: &[u8]) -> Result<Vec<u8>, StoreError> {
    let written = match store.compare_set(key, None, value).await {
        Err(StoreError::Unreachable { .. }) => store.compare_set(key, None, value).await?,
        written => written?,
    };
    Ok(written.unwrap_or_default())
}

/// A run of a group, as rank 0 writes it into the store.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    nonce: String,
    /// The number of ranks.
    size: usize,
    /// Rank 0, which began it.
    by: Member,
}

impl Run {
    fn decode(record: &[u8]) -> Option<Self> {
        let (nonce, rest) = std::str::from_utf8(record).ok()?.split_once('\n')?;
        let (by, size) = decode(rest.as_bytes())?;
        let is_nonce = nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_nonce.then(|| Self { nonce: nonce.to_owned(), size, by })
    }

    fn encode(&self) -> Vec<u8> {
        [format!("{}\n", self.nonce).into_bytes(), encode(&self.by, self.size)].concat()
    }
}

/// The runs of a group that has no job id.
struct Runs<'joining> {
    settings: &'joining GroupBuilder,
    runtime: &'joining dyn Runtime,
    key: String,
}

impl<'joining> Runs<'joining> {
    fn of(settings: &'joining GroupBuilder, runtime: &'joining dyn Runtime) -> Self {
        Self { settings, runtime, key: format!("{}/run", settings.name) }
    }

    /// Begins a run on rank 0, and finds it on the others.
    async fn first(&self, member: &Member, end: Duration) -> Result<Run, GroupError> {
        let GroupBuilder { store, rank, size, .. } = self.settings;
        if *rank == 0 {
            let nonce = format!("{:016x}", self.runtime.random());
            let run = Run { nonce, size: *size, by: member.clone() };
            store.set(&self.key, &run.encode()).await?;
            return Ok(run);
        }
        self.found(end).await
    }

    /// Waits until the store has a run.
    async fn found(&self, end: Duration) -> Result<Run, GroupError> {
        let left = end.saturating_sub(self.runtime.now());
        let found = self.settings.store.wait(std::slice::from_ref(&self.key), left).await;
        let found = found.map_err(|error| missing(self.settings, error, |_| Some(0)))?;
        self.decode(found.first().map(Vec::as_slice).unwrap_or_default())
    }

    /// Waits until the store has another run. A store that fails is read again: it may be gone with the rank that serves it, and the
    /// error of the attempt to join tells why that rank ended.
    async fn replaced(&self, run: &Run) -> Result<Run, GroupError> {
        loop {
            self.runtime.sleep(POLL_INTERVAL).await;
            let Ok(found) = self.settings.store.get(std::slice::from_ref(&self.key)).await else { continue };
            if let Some(Some(record)) = found.first() {
                let found = self.decode(record)?;
                if found != *run {
                    return Ok(found);
                }
            }
        }
    }

    fn decode(&self, record: &[u8]) -> Result<Run, GroupError> {
        Run::decode(record).ok_or_else(|| foreign(&self.key, record))
    }
}

/// The error of a record that is not of this version.
pub(super) fn foreign(key: &str, record: &[u8]) -> GroupError {
    GroupError::Argument {
        field: "store",
        value: format!("{key}: {} bytes", record.len()),
        remedy:
            "this record is of another version or program: use a store or a group name that nothing else uses"
                .to_owned(),
    }
}

/// The error of a wait for ranks.
fn missing(settings: &GroupBuilder, error: StoreError, rank: impl Fn(&str) -> Option<usize>) -> GroupError {
    let StoreError::TimedOut { missing, store, .. } = &error else { return error.into() };
    GroupError::Missing {
        group: settings.name.clone(),
        store: store.clone(),
        size: settings.size,
        limit: settings.limit,
        missing: missing.iter().filter_map(|key| rank(key)).collect(),
    }
}

/// Joins the group in the run `run`.
async fn attempt(
    settings: &GroupBuilder,
    worker: &Worker,
    member: &Member,
    run: String,
    end: Duration,
) -> Result<Group, GroupError> {
    let GroupBuilder { store, name, rank, size, .. } = settings;
    let keys: Vec<String> = (0..*size).map(|rank| key(name, &run, 0, &format!("rank {rank}"))).collect();
    let own = keys.get(*rank).cloned().unwrap_or_default();
    let witness = Witness { key: own.clone(), record: encode(member, *size) };
    let written = write_once(&**store, &own, &witness.record).await?;
    if written != witness.record {
        take_over(settings, worker, &keys, &written, &witness, end).await?;
    }
    let left = end.saturating_sub(worker.runtime().now());
    let found = store.wait(&keys, left).await;
    let found = found
        .map_err(|error| missing(settings, error, |missing| keys.iter().position(|key| key == missing)))?;
    let mut members = Vec::new();
    for (key, record) in keys.iter().zip(&found) {
        let (member, theirs) = decode(record).ok_or_else(|| foreign(key, record))?;
        check_size(settings, theirs, &member)?;
        members.push(member);
    }
    // Read while the store answers: it may be gone with the rank that serves it when the reason of a loss is asked for.
    let is_afar = store.own_address().is_some_and(|own| !own.is_loopback());
    // Another process has taken the rank over because this one did not answer.
    if let Some(holder) = members.get(*rank).filter(|holder| *holder != member) {
        return Err(GroupError::RankTaken { group: name.clone(), rank: *rank, by: holder.whereabouts() });
    }
    let identity = settings.identity(run, witness);
    let state = Arc::new(GroupState::new(worker, identity, *rank, members, Vec::new())?);
    let met = meet(&state, end.saturating_sub(worker.runtime().now())).await;
    met.map_err(|error| if is_afar { of_other_machine(&state, error) } else { error })?;
    Ok(Group { state })
}

/// The record of a rank: its member, and the number of ranks.
fn encode(member: &Member, size: usize) -> Vec<u8> {
    format!("{}{size}\n", member.text()).into_bytes()
}

fn decode(record: &[u8]) -> Option<(Member, usize)> {
    let mut lines = std::str::from_utf8(record).ok()?.strip_suffix('\n')?.split('\n');
    let decoded = (Member::take(&mut lines)?, lines.next()?.parse().ok()?);
    lines.next().is_none().then_some(decoded)
}

/// # Errors
/// [`GroupError::Argument`] if `by` is of a group of another size.
fn check_size(settings: &GroupBuilder, size: usize, by: &Member) -> Result<(), GroupError> {
    if size == settings.size {
        return Ok(());
    }
    Err(GroupError::Argument {
        field: "size",
        value: settings.size.to_string(),
        remedy: format!(
            "{} is of a group of {size} ranks under this name: give all ranks the same size, and each job a name or a store of its own",
            by.whereabouts()
        ),
    })
}

/// The argument that a restarted process cannot use any more.
const LATE: &str = "rank";

fn is_late(error: &GroupError) -> bool {
    matches!(error, GroupError::Argument { field: LATE, .. })
}

/// Replaces the record of an earlier process of this rank, if that process is gone and other ranks have still to come. `written` is
/// its record, and `keys` are those of all ranks.
///
/// # Errors
/// [`GroupError::RankTaken`] if its worker answers; [`GroupError::Argument`] if it is too late, because the others have read the
/// record.
async fn take_over(
    settings: &GroupBuilder,
    worker: &Worker,
    keys: &[String],
    written: &[u8],
    own: &Witness,
    end: Duration,
) -> Result<(), GroupError> {
    let GroupBuilder { store, name, rank, .. } = settings;
    let (holder, _) = decode(written).ok_or_else(|| foreign(&own.key, written))?;
    let by = holder.whereabouts();
    if is_gone(worker, &holder, end.saturating_sub(worker.runtime().now())).await? {
        if store.get(keys).await?.iter().all(Option::is_some) {
            let remedy = format!(
                "its earlier process, {by}, has ended after all ranks had come: start all ranks again, under another job id if one is \
                 given, or come back with `rejoin` if the others go on"
            );
            return Err(GroupError::Argument { field: LATE, value: rank.to_string(), remedy });
        }
        if store.compare_set(&own.key, Some(written), &own.record).await?.as_ref() == Some(&own.record) {
            log!(INFO, group = name, rank, by, "took the rank over from a process that has ended");
            return Ok(());
        }
    }
    Err(GroupError::RankTaken { group: name.clone(), rank: *rank, by })
}

/// Explains the loss of a rank whose worker only its own machine can reach, to a rank that reaches the store over a network.
fn of_other_machine(state: &GroupState, error: GroupError) -> GroupError {
    let GroupError::RankLost { rank, error: why, .. } = &error else { return error };
    match state.members.get(*rank) {
        Some(lost) if lost.is_on_loopback() => GroupError::Argument {
            field: "bind",
            value: lost.whereabouts(),
            remedy: format!(
                "rank {rank} cannot be reached there from another machine: bind the workers to an address of the machines' network, with \
                 a secret ({why})"
            ),
        },
        _ => error,
    }
}

/// Waits until all members have joined. Each has found the same members.
pub(super) async fn meet(state: &Arc<GroupState>, limit: Duration) -> Result<(), GroupError> {
    let mut calling = Calling::new(state, Call::plain(state.next_number(), CallKind::Join));
    calling.set_limit(limit);
    let work = meet_all(&calling);
    calling.complete(true, || barrier::peers(&calling), work).await.map_err(|error| match error {
        // The error names the limit that the user has set, of which `limit` is the rest.
        GroupError::TimedOut { call, waiting_for, silent, .. } => {
            GroupError::TimedOut { call, limit: state.identity.limit, waiting_for, silent }
        }
        error => error,
    })?;
    state.all_have_joined();
    Ok(())
}

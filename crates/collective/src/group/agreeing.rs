//! How the ranks agree on the next generation: who reads whose [register](super::register), who leads, and for how long.
//!
//! The lowest rank that answers leads, and reads the registers of all others. A rank that does not lead reads those of the lowest
//! ranks below it, and takes over when they are lost. Registers are published tensors: they survive broken connections, and a
//! late rank can still read them.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    future::{Future, pending},
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::future::{Either, select, try_join, try_join_all};
use tensorwire_fabric::timeout;
use tensorwire_memory::{Buf, copy::CopyReason};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Fetched, Peer, Tensor, Worker};
use tokio::sync::watch;

use super::{
    GroupState, joining,
    joining::Identity,
    member::Member,
    newcomers,
    newcomers::silent,
    probing::{is_alive, own_error},
    register::{Ballot, Register, Roster, highest_accepted, is_quorum},
};
use crate::{error::GroupError, store::StoreError};

/// How often a leader checks its votes if no register changes.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The pause before reading a rank's register again after an error, and between two probes of a rank.
const RETRY: Duration = Duration::from_millis(250);

/// The pause before a rank votes again in the store, after another rank changed the store's register.
const STORE_RETRY: Duration = Duration::from_millis(10);

/// How many lower ranks a rank reads while it does not lead.
const FOLLOWED: usize = 3;

/// This rank's register for the next generation. Its worker publishes it until this is dropped.
#[derive(Debug)]
pub(super) struct OwnRegister {
    worker: Worker,
    /// The name of the published tensor, the same on all ranks of the generation.
    name: String,
    register: Mutex<Register>,
}

impl OwnRegister {
    pub(super) fn new(worker: &Worker, identity: &Identity) -> Self {
        let name = format!("tensorwire: agreement of the group in step {}", identity.step());
        Self { worker: worker.clone(), name, register: Mutex::default() }
    }

    fn read<T>(&self, of: impl FnOnce(&Register) -> T) -> T {
        of(&self.lock())
    }

    fn write<T>(&self, change: impl FnOnce(&mut Register) -> T) -> Result<T, GroupError> {
        let mut register = self.lock();
        let done = change(&mut register);
        let bytes = register.encode();
        drop(register);
        // On the heap: the register can also be published when the pool is exhausted.
        let content = Buf::on_heap(&bytes, CopyReason::Import);
        let tensor = Tensor::shared(content, DataType::U8, &[bytes.len() as u64])?;
        self.worker.publish(&self.name, tensor)?;
        Ok(done)
    }

    /// Takes over what another register has promised, accepted or decided.
    fn merge(&self, other: &Register) -> Result<(), GroupError> {
        let mut merged = self.read(Register::clone);
        if merged.merge(other) { self.write(|register| *register = merged) } else { Ok(()) }
    }

    fn lock(&self) -> MutexGuard<'_, Register> {
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OwnRegister {
    fn drop(&mut self) {
        self.worker.withdraw(&self.name);
    }
}

/// One attempt of this rank to agree. It may be dropped and begun again: the register stays.
pub(super) struct Agreeing<'group> {
    group: &'group GroupState,
    /// Whether newcomers that wait in the store are admitted if this rank leads.
    admits: bool,
    begun: Duration,
    known: Mutex<Known>,
    changed: watch::Sender<()>,
}

/// What this rank knows of the others.
#[derive(Default)]
struct Known {
    /// The register of each rank that has published one.
    registers: BTreeMap<usize, Register>,
    /// Ranks that do not answer.
    lost: BTreeSet<usize>,
    store: Option<Result<Register, StoreError>>,
}

/// The votes for a ballot.
struct Tally {
    votes: usize,
    /// The other ranks that answer and have not voted.
    awaited: usize,
}

impl<'group> Agreeing<'group> {
    pub(super) fn new(group: &'group GroupState, admits: bool) -> Self {
        let begun = group.runtime().now();
        Self { group, admits, begun, known: Mutex::default(), changed: watch::Sender::new(()) }
    }

    /// The next generation's roster, on which all ranks agree.
    ///
    /// # Errors
    /// [`GroupError::NoMajority`]; [`GroupError::Worker`] if this rank's worker was shut down.
    pub(super) async fn roster(&self) -> Result<Roster, GroupError> {
        // Published: the other ranks see that this one takes part.
        self.own().write(|_| ())?;
        self.follow().await?;
        let others: Vec<usize> = (0..self.group.size()).filter(|rank| *rank != self.group.rank).collect();
        self.while_watching(&others, self.lead()).await
    }

    /// Waits while a lower rank answers and may still lead.
    async fn follow(&self) -> Result<(), GroupError> {
        loop {
            let is_left = |rank: &usize| !self.known().lost.contains(rank);
            let lower: Vec<usize> = (0..self.group.rank).filter(is_left).take(FOLLOWED).collect();
            let leader_deadline = self.leader_deadline(&lower);
            if lower.is_empty() || self.is_decided() || self.now() >= leader_deadline {
                return Ok(());
            }
            let is_lost = || lower.iter().any(|rank| self.known().lost.contains(rank));
            let ended = async {
                self.wait_until(leader_deadline, || self.is_decided() || is_lost()).await;
                Ok(())
            };
            self.while_watching(&lower, ended).await?;
        }
    }

    /// Until when one of these ranks may lead. A rank with a register waits for others until two limits are over, and then needs
    /// time to propose. A second leader beside it would take its votes.
    fn leader_deadline(&self, ranks: &[usize]) -> Duration {
        let known = self.known();
        let has_come = ranks.iter().any(|rank| known.registers.contains_key(rank));
        let half_limits = if has_come { 5 } else { 2 };
        self.half_limits(half_limits)
    }

    /// The time at which `count` halves of the limit are over.
    fn half_limits(&self, count: u32) -> Duration {
        self.begun.saturating_add(self.limit().saturating_mul(count) / 2)
    }

    /// When the agreement ends. A leader that has the votes after three limits has half a limit more to propose.
    fn deadline(&self) -> Duration {
        self.half_limits(7)
    }

    async fn lead(&self) -> Result<Roster, GroupError> {
        // A late leader has waited already: it only reads the registers.
        let waits_until = self.begun.saturating_add(self.limit().saturating_mul(2));
        let waits_until = waits_until.max(self.now().saturating_add(2 * POLL_INTERVAL));
        loop {
            if let Some(decided) = self.own().read(|own| own.decided().cloned()) {
                return Ok(decided);
            }
            let ballot = self.own().write(|own| own.start_ballot(self.group.rank))?;
            if self.has_votes(ballot, Register::has_promised, waits_until, Duration::ZERO).await? {
                // Accepting waits for no further ranks. Those that have promised get time to accept, also at the deadline.
                let end = self.now().saturating_add(self.limit() / 2).min(self.deadline());
                let (roster, silent) = self.proposal(ballot, end.saturating_sub(self.now()) / 2).await?;
                self.own().write(|own| own.propose(ballot, roster.clone()))?;
                if self.has_votes(ballot, Register::has_accepted, Duration::ZERO, end).await? {
                    let left = self.deadline().saturating_sub(self.now()).min(self.limit() / 2);
                    newcomers::announce_admission(self.group, &roster, left / 2).await;
                    newcomers::pass_over(self.group, &silent, left / 2).await;
                    self.own().write(|own| own.decide(ballot))?;
                    continue;
                }
            }
            if self.now() >= self.deadline() {
                return Err(self.no_majority());
            }
            self.give_way().await;
        }
    }

    /// Waits because another rank leads. A lower leader gets all the time it needs.
    async fn give_way(&self) {
        let leader = self.own().read(Register::promised).rank();
        let part = Duration::from_millis(self.group.runtime().random() % 64);
        // Random, so that two ranks that lead at the same time separate.
        let pause = self.now().saturating_add(POLL_INTERVAL + part);
        let until = if leader < self.group.rank { self.leader_deadline(&[leader]).max(pause) } else { pause };
        self.wait_until(until, || self.is_decided() || self.known().lost.contains(&leader)).await;
    }

    /// Waits for a quorum of votes for `ballot`: the votes of all ranks that answer or, after `waits_until`, of just a quorum.
    /// `false` if this rank has promised a higher ballot meanwhile or knows a decision. Gives up at the end of the agreement, but
    /// not before `earliest_end`.
    async fn has_votes(
        &self,
        ballot: Ballot,
        has_voted: fn(&Register, Ballot) -> bool,
        waits_until: Duration,
        earliest_end: Duration,
    ) -> Result<bool, GroupError> {
        let size = self.group.size();
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            if self.own().read(|own| own.promised() != ballot || own.decided().is_some()) {
                return Ok(false);
            }
            let Tally { votes, awaited } = self.tally(ballot, has_voted);
            if awaited == 0 || self.now() >= waits_until {
                if is_quorum(votes, false, size) {
                    return Ok(true);
                }
                let end = self.half_limits(6).max(earliest_end);
                // A newcomer that has met no rank of its group does not go on without them: only the store says that there is a group.
                let asks_store = self.group.has_met() && is_quorum(votes, true, size);
                if asks_store && self.has_vote_of_store(ballot, has_voted, end).await? {
                    return Ok(true);
                }
            }
            // Ranks that still join may complete a quorum.
            let half_limits = if awaited == 0 { 2 } else { 6 };
            if self.now() >= self.half_limits(half_limits).max(earliest_end) {
                return Err(self.no_majority());
            }
            let _ = timeout(self.group.runtime(), POLL_INTERVAL, changes.changed()).await;
        }
    }

    fn tally(&self, ballot: Ballot, has_voted: fn(&Register, Ballot) -> bool) -> Tally {
        let known = self.known();
        let voters: BTreeSet<usize> = known
            .registers
            .iter()
            .filter(|(_, register)| has_voted(register, ballot))
            .map(|(rank, _)| *rank)
            .collect();
        let others = (0..self.group.size()).filter(|rank| *rank != self.group.rank);
        let awaited = others.filter(|rank| !voters.contains(rank) && !known.lost.contains(rank)).count();
        Tally { votes: 1 + voters.len(), awaited }
    }

    /// Whether the store votes for `ballot`. An unreachable store and one that lost its data do not. Stops waiting at `end`, or
    /// when the vote is no longer needed.
    async fn has_vote_of_store(
        &self,
        ballot: Ballot,
        has_voted: fn(&Register, Ballot) -> bool,
        end: Duration,
    ) -> Result<bool, GroupError> {
        let is_over = || self.own().read(|own| own.promised() != ballot || own.decided().is_some());
        let is_settled =
            || is_over() || is_quorum(self.tally(ballot, has_voted).votes, false, self.group.size());
        let (asking, settled) = (pin!(self.ask_store()), pin!(self.wait_until(end, is_settled)));
        let asked = match select(asking, settled).await {
            Either::Left((Ok(register), _)) => Ok(register),
            Either::Left((Err(GroupError::Store(error)), _)) => Err(error),
            Either::Left((Err(error), _)) => return Err(error),
            Either::Right(_) => Err(silent(self.group)),
        };
        let is_for = asked.as_ref().is_ok_and(|register| has_voted(register, ballot));
        if let Ok(register) = &asked {
            self.own().merge(register)?;
        }
        self.known().store = Some(asked);
        Ok(is_for)
    }

    /// Merges the own register into the store's. Returns the store's register if the store has lost nothing since the group was
    /// joined.
    async fn ask_store(&self) -> Result<Register, GroupError> {
        let Identity { store, witness, .. } = &self.group.identity;
        let key = self.group.identity.agreement();
        let mut known = store.get(std::slice::from_ref(&key)).await?.pop().flatten();
        let register = loop {
            let register = known.as_deref().map(|record| {
                Register::decode(record, self.group.size()).ok_or_else(|| joining::foreign(&key, record))
            });
            let mut register = register.transpose()?.unwrap_or_default();
            if !self.own().read(|own| register.merge(own)) {
                break register;
            }
            let written = register.encode();
            let stored = store.compare_set(&key, known.as_deref(), &written).await?;
            if stored.as_ref() == Some(&written) {
                break register;
            }
            known = stored;
            self.group.runtime().sleep(STORE_RETRY).await;
        };
        // Checked after the vote was written: a store that lost data before has no valid vote.
        witness.check(&**store).await?;
        Ok(register)
    }

    /// The roster to propose: the one accepted before, or the ranks that have come. Also the newcomers that are passed over.
    async fn proposal(&self, ballot: Ballot, limit: Duration) -> Result<(Roster, Vec<Member>), GroupError> {
        let (accepted, come) = {
            let known = self.known();
            let store = known.store.iter().flatten();
            let own = self.own().read(Register::clone);
            let registers = known.registers.values().chain(store).chain([&own]);
            let accepted = highest_accepted(registers).cloned();
            let come = known.registers.iter();
            let come = come.filter(|(rank, _)| !known.lost.contains(rank));
            let come = come.filter(|(_, register)| register.has_promised(ballot));
            let come: BTreeSet<usize> = come.map(|(rank, _)| *rank).chain([self.group.rank]).collect();
            (accepted, come)
        };
        match accepted {
            Some(roster) => Ok((roster, Vec::new())),
            None => newcomers::roster(self.group, come.into_iter().collect(), self.admits, limit).await,
        }
    }

    fn no_majority(&self) -> GroupError {
        let known = self.known();
        let come = known.registers.keys().copied().chain([self.group.rank]).collect::<BTreeSet<_>>();
        GroupError::NoMajority {
            group: self.group.identity.name.clone(),
            size: self.group.size(),
            come: come.into_iter().collect(),
            store: known.store.as_ref().and_then(|asked| asked.as_ref().err().cloned()).map(Box::new),
        }
    }

    /// Runs `work` while reading the registers of these ranks.
    async fn while_watching<T>(
        &self,
        ranks: &[usize],
        work: impl Future<Output = Result<T, GroupError>>,
    ) -> Result<T, GroupError> {
        let watching = async {
            try_join_all(ranks.iter().map(|rank| self.watch(*rank))).await?;
            pending::<Result<T, GroupError>>().await
        };
        match select(pin!(work), pin!(watching)).await {
            Either::Left((ended, _)) | Either::Right((ended, _)) => ended,
        }
    }

    async fn watch(&self, rank: usize) -> Result<Infallible, GroupError> {
        let Some(peer) = self.group.peers.get(rank) else { return pending().await };
        let (never, _) = try_join(self.read_register(rank, peer), self.probe(rank, peer)).await?;
        Ok(never)
    }

    /// Reads a rank's register whenever it changes.
    async fn read_register(&self, rank: usize, peer: &Peer) -> Result<Infallible, GroupError> {
        let mut seen = None;
        loop {
            let fetch = peer.fetch(&self.own().name).timeout(self.limit());
            let fetch = match seen {
                Some(version) => fetch.newer_than(version),
                None => fetch.wait(),
            };
            match fetch.versioned().await {
                Ok(fetched) => {
                    seen = Some(fetched.version);
                    if self.record_register(rank, &fetched)? {
                        continue;
                    }
                }
                Err(error) => own_error(error)?,
            }
            self.group.runtime().sleep(RETRY).await;
        }
    }

    /// Returns whether it is a register of this rank.
    fn record_register(&self, rank: usize, fetched: &Fetched) -> Result<bool, GroupError> {
        let incarnation = self.group.members.get(rank).map(|member| member.incarnation);
        let register = Register::decode(fetched.tensor.bytes(), self.group.size());
        let Some(register) = register.filter(|_| incarnation == Some(fetched.version.incarnation())) else {
            log!(
                WARN,
                group = self.group.identity.name,
                rank,
                "ignored a register of another version or incarnation"
            );
            return Ok(false);
        };
        self.own().merge(&register)?;
        let mut known = self.known();
        known.registers.insert(rank, register);
        known.lost.remove(&rank);
        drop(known);
        self.changed.send_replace(());
        Ok(true)
    }

    /// Checks again and again whether a rank answers.
    async fn probe(&self, rank: usize, peer: &Peer) -> Result<Infallible, GroupError> {
        let incarnation = self.group.members.get(rank).map_or(0, |member| member.incarnation);
        loop {
            let is_alive = is_alive(peer, incarnation, self.limit()).await?;
            self.record_liveness(rank, is_alive);
            self.group.runtime().sleep(RETRY).await;
        }
    }

    fn record_liveness(&self, rank: usize, is_alive: bool) {
        let mut known = self.known();
        let has_changed = if is_alive { known.lost.remove(&rank) } else { known.lost.insert(rank) };
        drop(known);
        if has_changed {
            self.changed.send_replace(());
        }
    }

    /// Waits until `is_met`, at most until `end`.
    async fn wait_until(&self, end: Duration, is_met: impl Fn() -> bool) {
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            let left = end.saturating_sub(self.now());
            if is_met() || left.is_zero() {
                return;
            }
            let _ = timeout(self.group.runtime(), left, changes.changed()).await;
        }
    }

    fn own(&self) -> &'group OwnRegister {
        &self.group.register
    }

    fn is_decided(&self) -> bool {
        self.own().read(|own| own.decided().is_some())
    }

    fn now(&self) -> Duration {
        self.group.runtime().now()
    }

    fn limit(&self) -> Duration {
        self.group.identity.limit
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

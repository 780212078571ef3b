//! A group: its ranks, its generation, and its calls in progress.

mod agreeing;
pub(crate) mod barrier;
mod builder;
pub(crate) mod calling;
mod channels;
mod crowd;
mod joining;
mod member;
mod newcomers;
mod offers;
mod pairing;
mod probing;
mod register;
mod regrouping;

use std::{
    collections::HashSet,
    fmt,
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tensorwire_fabric::{Runtime, timeout};
use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{AddressHint, Notes, Peer, Step, Worker};
use tokio::sync::{Notify, watch};

pub use self::builder::GroupBuilder;
pub(crate) use self::builder::check_name;
use self::{
    agreeing::OwnRegister, channels::Channels, crowd::Crowd, joining::Identity, member::Member,
    offers::LastOffers, register::Roster, regrouping::Following,
};
use crate::{
    call::Call,
    error::GroupError,
    pair::Pairs,
    schedule::{self, Algorithm},
};

/// How many calls of one group may be in progress at a time on a rank. A further call waits for the one that is this many before
/// it.
pub const CALLS_UNDER_WAY: usize = 16;

/// A number of workers, its ranks, that make the same calls in the same order. Cheap to clone; all clones are one rank.
///
/// [`Group::builder`] joins one: the ranks find each other through a [store](crate::store). Each method makes one call. The call
/// gets its number when the method is invoked, and does the rest when it is awaited. So several calls may be in progress at the
/// same time, at most [`CALLS_UNDER_WAY`], as long as all ranks invoke them in the same order.
///
/// | what each rank gets | call |
/// | --- | --- |
/// | all values combined (sum, mean, minimum, …) | [`all_reduce`](Self::all_reduce), [`all_reduce_tensors`](Self::all_reduce_tensors) |
/// | all values combined, at the root; a part of them | [`reduce`](Self::reduce), [`reduce_scatter`](Self::reduce_scatter) |
/// | the root's tensor; its own part of the root's | [`broadcast`](Self::broadcast), [`scatter`](Self::scatter) |
/// | the tensors of all ranks; at the root | [`all_gather`](Self::all_gather), [`gather`](Self::gather) |
/// | one tensor from each rank | [`all_to_all`](Self::all_to_all) |
/// | nothing, when all ranks have called | [`barrier`](Self::barrier), [`close`](Self::close) |
/// | a group of some of the ranks | [`derive`](Self::derive), [`subgroup`](Self::subgroup) |
///
/// Two ranks alone use [`send`](Self::send) and [`recv`](Self::recv), buffers ([`send_buffer`](Self::send_buffer),
/// [`recv_buffer`](Self::recv_buffer)), and [`export`](Self::export), [`get`](Self::get) and [`put`](Self::put).
///
/// ```
/// use std::sync::Arc;
/// use tensorwire::Worker;
/// use tensorwire::collective::{Group, GroupError, Reduction, store::{MemoryStore, Store}};
///
/// async fn one_rank(store: Arc<dyn Store>, rank: usize) -> Result<f32, GroupError> {
///     let worker = Worker::builder(&format!("trainer_{rank}")).start().await?;
///     let group = Group::builder(store, rank, 2).join(&worker).await?;
///     let mut gradient = [rank as f32];
///     group.all_reduce(&mut gradient).reduction(Reduction::Mean).await?;
///     group.close().await?;
///     worker.shutdown().await;
///     Ok(gradient[0])
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), GroupError> {
/// // Both ranks in one process. Ranks of several processes meet in a store that all of them reach.
/// let runtime = tensorwire::fabric::TokioRuntime::current().expect("inside a runtime");
/// let store = Arc::new(MemoryStore::new(Arc::new(runtime)));
/// let means = tokio::try_join!(one_rank(store.clone(), 0), one_rank(store, 1))?;
/// assert_eq!(means, (0.5, 0.5));
/// # Ok(())
/// # }
/// ```
///
/// # Failures
/// A call that fails, runs out of time or is dropped before it is complete ends the group for all ranks, because the other ranks
/// cannot complete it either. All ranks get a [`GroupError`], a waiting rank at once. A call whose arguments are wrong is refused before it
/// sends anything, and the group goes on. [`shrink`](Self::shrink) makes a group of the ranks that are left, and
/// [`admit`](Self::admit) takes in ranks that come back.
///
/// # The end
/// Dropping the last clone drops the values that this rank sent and another has not received yet. [`close`](Self::close) waits
/// for the others first. Only results of an all-reduce on one host stay readable, until the other ranks have left, too, at most for
/// the group's [`timeout`](Self::timeout).
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
    /// One for each member. That of this rank is its own worker.
    peers: Vec<Peer>,
    /// The ranks on each host.
    hosts: Vec<Vec<usize>>,
    step: Step,
    /// Sends and receives between pairs of ranks, outside the calls. The user's buffers may outlive the group.
    pub(crate) pairs: Arc<Pairs>,
    next_call: AtomicU64,
    lanes: [Lane; CALLS_UNDER_WAY],
    offers: LastOffers,
    channels: Arc<Channels>,
    crowd: Crowd,
    /// Whether all ranks have joined, so that notes may carry calls.
    has_met: AtomicBool,
    /// Whether all ranks have closed the group and need nothing more from this one.
    pub(crate) is_closed: AtomicBool,
    /// Why the group is over.
    over: OnceLock<GroupError>,
    is_over: watch::Sender<bool>,
    /// This rank's register in the agreement on the next generation.
    register: Arc<OwnRegister>,
    /// Its registers of earlier generations, the latest first, for ranks that read them late.
    before: Vec<Arc<OwnRegister>>,
    /// Locked while the ranks agree.
    following: tokio::sync::Mutex<Following>,
    /// The members' addresses, which the store gave. Derived groups share them. Dropped last.
    hints: Arc<Vec<AddressHint>>,
}

/// The state shared by the calls that follow each other, every sixteenth.
pub(crate) struct Lane {
    pub(crate) number: u16,
    /// The number of its complete calls.
    complete: AtomicU64,
    completed: Notify,
    /// The number of tasks that wait for that.
    waiting: AtomicUsize,
    /// The key of contents that travel as values.
    pub(crate) key: String,
}

impl Lane {
    fn new(number: usize) -> Self {
        Self {
            number: number as u16,
            complete: AtomicU64::new(0),
            completed: Notify::new(),
            waiting: AtomicUsize::new(0),
            key: format!("content {number}"),
        }
    }

    pub(crate) fn end_call(&self) {
        self.complete.fetch_add(1, Ordering::SeqCst);
        // A task that counts as waiting later than this finds the call complete.
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.completed.notify_waiters();
        }
    }

    /// Waits until `calls` calls are complete.
    pub(crate) async fn wait_for(&self, calls: u64) {
        if self.complete.load(Ordering::Acquire) >= calls {
            return;
        }
        let _waiting = Waiting::begin(&self.waiting);
        while self.complete.load(Ordering::SeqCst) < calls {
            let mut completed = pin!(self.completed.notified());
            completed.as_mut().enable();
            // `enable` came after the first check: a call that completed in between woke nobody.
            if self.complete.load(Ordering::SeqCst) < calls {
                completed.await;
            }
        }
    }
}

/// Counts a task while it waits.
struct Waiting<'lane>(&'lane AtomicUsize);

impl<'lane> Waiting<'lane> {
    fn begin(waiting: &'lane AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::SeqCst);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
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
    /// This rank's worker.
    pub fn worker(&self) -> &Worker {
        &self.state.worker
    }

    /// The group's name.
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

    /// How many times the group was formed anew by [`shrink`](Self::shrink) or [`admit`](Self::admit).
    pub fn generation(&self) -> u64 {
        self.state.identity.generation
    }

    /// The worker names of all ranks, in their order.
    pub fn members(&self) -> impl Iterator<Item = &str> {
        self.state.members.iter().map(|member| member.worker.as_str())
    }

    /// The ranks of each host, the same on all ranks. Ranks share a host if they reach one another over shared memory. A rank whose
    /// worker does not offer it is on a host of its own. Hosts are in the order of their first ranks.
    pub fn hosts(&self) -> &[Vec<usize>] {
        &self.state.hosts
    }

    /// The algorithm of an [`all_reduce`](Self::all_reduce), or of [tensors](Self::all_reduce_tensors), of `bytes` bytes that names
    /// none. It depends on the bytes, the number of ranks and their [`hosts`](Self::hosts).
    pub fn default_algorithm(&self, bytes: usize) -> Algorithm {
        self.state.default_algorithm(bytes)
    }

    /// Why the group is over, if it is.
    pub fn failure(&self) -> Option<GroupError> {
        self.state.over.get().cloned()
    }

    /// The time limit of a call that sets none.
    pub fn timeout(&self) -> Duration {
        self.state.identity.limit
    }
}

impl GroupState {
    fn new(
        worker: &Worker,
        identity: Identity,
        rank: usize,
        members: Vec<Member>,
        before: Vec<Arc<OwnRegister>>,
    ) -> Result<Self, GroupError> {
        let mut names = HashSet::new();
        for (at, member) in members.iter().enumerate() {
            if !names.insert(member.worker.as_str()) {
                let remedy = format!(
                    "rank {at} has the same worker name as another rank: give each worker its own name"
                );
                return Err(GroupError::Argument { field: "worker", value: member.worker.clone(), remedy });
            }
        }
        let (mut peers, mut hints) = (Vec::new(), Vec::new());
        for (at, member) in members.iter().enumerate() {
            if at == rank {
                peers.push(worker.peer(worker.name())?);
                continue;
            }
            let (peer, hint) = worker.hint_address(&member.worker, &member.address)?;
            peers.push(peer);
            hints.push(hint);
        }
        let mut state = Self::with(worker, identity, rank, members, peers, Arc::new(hints));
        state.before = before;
        Ok(state)
    }

    /// The state of a group of some of this group's ranks, in this order, in which this worker is rank `rank`. `number` is that
    /// of the call that derives it.
    ///
    /// # Errors
    /// [`GroupError::Argument`] for an invalid name.
    pub(crate) fn derived(
        &self,
        name: &str,
        number: u64,
        ranks: &[usize],
        rank: usize,
    ) -> Result<Self, GroupError> {
        check_name(name)?;
        let identity = self.identity.derived(name, number);
        let members = ranks.iter().filter_map(|rank| self.members.get(*rank)).cloned().collect();
        let peers = ranks.iter().filter_map(|rank| self.peers.get(*rank)).cloned().collect();
        Ok(Self::with(&self.worker, identity, rank, members, peers, self.hints.clone()))
    }

    fn with(
        worker: &Worker,
        identity: Identity,
        rank: usize,
        members: Vec<Member>,
        peers: Vec<Peer>,
        hints: Arc<Vec<AddressHint>>,
    ) -> Self {
        let (hosts, crowd, size) = (member::hosts(&members), Crowd::new(rank, &members), members.len());
        let step = worker.step(identity.step());
        let register = Arc::new(OwnRegister::new(worker, &identity));
        let pairs = Arc::new(Pairs::new(worker, &peers, rank, identity.step(), identity.limit));
        Self {
            worker: worker.clone(),
            identity,
            rank,
            members,
            peers,
            hosts,
            step,
            pairs,
            next_call: AtomicU64::new(0),
            lanes: std::array::from_fn(Lane::new),
            offers: LastOffers::new(rank, size, CALLS_UNDER_WAY),
            channels: Channels::new(size),
            crowd,
            has_met: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            over: OnceLock::new(),
            is_over: watch::Sender::new(false),
            register,
            before: Vec::new(),
            following: tokio::sync::Mutex::default(),
            hints,
        }
    }

    /// Whether this rank has met others in this generation or an earlier one.
    fn has_met(&self) -> bool {
        self.has_met.load(Ordering::Acquire) || !self.before.is_empty()
    }

    pub(crate) fn runtime(&self) -> &dyn Runtime {
        &**self.worker.runtime()
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn default_algorithm(&self, bytes: usize) -> Algorithm {
        schedule::choose(self.size(), &self.hosts, bytes)
    }

    /// The members of the next generation.
    fn members_of(&self, roster: &Roster) -> Vec<Member> {
        let staying = roster.staying.iter().filter_map(|rank| self.members.get(*rank));
        staying.chain(&roster.newcomers).cloned().collect()
    }

    /// Ends the group with the error of this rank's call. Returns the error that ended it, which is the first one.
    pub(crate) fn fail(&self, error: GroupError) -> GroupError {
        let mut is_first = false;
        let first = self.over.get_or_init(|| {
            is_first = true;
            error
        });
        if is_first {
            log!(WARN, group = self.identity.name, rank = self.rank, error = %first, "the group is over");
            // Fails the peers' requests in this step, those that wait and later ones.
            let status = self.end_status(first);
            self.step.abort(&status);
            drop(self.offers.take());
            self.pairs.end(&calling::after(first), &status);
            self.announce_end(&status);
            self.is_over.send_replace(true);
        }
        first.clone()
    }

    /// Records that all ranks have joined.
    pub(crate) fn all_have_joined(&self) {
        self.has_met.store(true, Ordering::Release);
    }

    /// The channel to a rank that this one has met.
    pub(crate) fn notes(&self, rank: usize) -> Option<&Notes> {
        self.channels.with(rank)
    }

    /// Sends the end of the group to all ranks that have a channel. After `close` no rank waits for one.
    fn announce_end(&self, status: &Status) {
        if !self.is_closed.load(Ordering::Acquire) {
            self.channels.announce_end(status, self.runtime());
        }
    }

    /// Lets ranks that are slower read the last results of this one, until they have left the group, too.
    fn leave_last_results(&self) {
        let offers = self.offers.take();
        if offers.is_empty() {
            return;
        }
        let (runtime, channels) = (self.worker.runtime().clone(), self.channels.clone());
        let limit = self.identity.limit;
        let leave = async move {
            let _ = timeout(&*runtime, limit, channels.all_have_left()).await;
            drop(offers);
        };
        self.runtime().spawn("leave last results for slower ranks", Box::pin(leave));
    }

    /// The lane of a call.
    pub(crate) fn lane(&self, call: &Call) -> &Lane {
        &self.lanes[(call.number % CALLS_UNDER_WAY as u64) as usize]
    }

    /// The status that the other ranks receive: the rank with which the end began, and the text of the error.
    fn end_status(&self, error: &GroupError) -> Status {
        let (rank, why) = match error {
            GroupError::Over { rank: Some(rank), why } => (*rank, why.clone()),
            error => (error.origin().unwrap_or(self.rank), error.to_string()),
        };
        Status { code: Code::Unavailable, message: why, details: (rank as u64).to_le_bytes().to_vec() }
    }

    /// Completes when the group is over.
    async fn ended(&self) -> GroupError {
        // Cannot fail: the sender lives as long as the group.
        let _ = self.is_over.subscribe().wait_for(|is_over| *is_over).await;
        self.over.get().cloned().unwrap_or(GroupError::Over { rank: None, why: String::new() })
    }

    /// Assigns the number of a new call.
    pub(crate) fn next_number(&self) -> u64 {
        self.next_call.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes `number` the next one again, if no call has got a number since.
    pub(crate) fn take_back(&self, number: u64) -> bool {
        self.next_call.compare_exchange(number + 1, number, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Drop for GroupState {
    /// Dropping the step fails requests for its values. This ends waits for notes.
    fn drop(&mut self) {
        if self.over.get().is_none() {
            let why = format!("rank {} has dropped its last clone", self.rank);
            self.announce_end(&Status::new(Code::Aborted, why));
            self.leave_last_results();
        }
    }
}

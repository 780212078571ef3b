//! One call of this rank while it is under way: its turn, its limit, and the messages that pass between it and other ranks.
//!
//! Messages of a call travel in its lane: two keys for each pair of ranks and direction, on which values arrive in the order in which
//! they were sent. A lane carries one call at a time, so a message belongs to the call that its lane has come to. What a rank sends
//! another in a call begins with the [`Call`], which the other compares with its own. It has a key of its own: what is short is
//! received into little memory there, and the order between it and longer contents does not matter.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::{Either, select, try_join};
use tensorwire_memory::{
    Pool,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::{DataType, Sharing};
use tensorwire_rendezvous::{Tensor, WorkerError};
use tensorwire_verbs_reactor::timeout;

use super::{CALLS_UNDER_WAY, Group, GroupState};
use crate::{
    call::{Call, HEADER_BYTES},
    error::GroupError,
};

/// The key of calls, and that of contents.
const CALLS: usize = 0;
const CONTENTS: usize = 1;

/// The longest content that travels in one message with the call.
const JOINED_BYTES_MAX: usize = 2048;

/// A call that is under way. If it is dropped before it is complete, the group is over.
pub(crate) struct Calling {
    group: Arc<GroupState>,
    pub(crate) call: Call,
    limit: Duration,
    /// The keys of calls, and of contents that do not travel with one.
    keys: [String; 2],
    contacts: Mutex<Contacts>,
    is_complete: AtomicBool,
}

/// The ranks with which messages were exchanged.
#[derive(Default)]
struct Contacts {
    /// Which have this rank's call.
    told: BTreeSet<usize>,
    /// Whose call this rank has, or awaits with an earlier receive.
    heard: BTreeSet<usize>,
    /// Whose call has come.
    known: BTreeSet<usize>,
    /// How many messages are awaited from each rank.
    awaited: BTreeMap<usize, usize>,
}

/// The content of a message.
pub(crate) struct Arrived {
    tensor: Option<Tensor>,
    /// Where the content begins.
    at: usize,
}

impl Arrived {
    pub(crate) const EMPTY: Self = Self { tensor: None, at: 0 };

    pub(crate) fn bytes(&self) -> &[u8] {
        self.tensor.as_ref().and_then(|tensor| tensor.bytes().get(self.at..)).unwrap_or_default()
    }
}

impl Group {
    /// A new call, which has its number from here on.
    pub(crate) fn call(&self, call: impl FnOnce(u64) -> Call) -> Calling {
        Calling::new(&self.state, call(self.state.next_number()))
    }
}

impl Calling {
    pub(crate) fn new(group: &Arc<GroupState>, call: Call) -> Self {
        Self {
            keys: ["call", "content"].map(|key| format!("{key} {}", call.number % CALLS_UNDER_WAY as u64)),
            group: group.clone(),
            call,
            limit: group.identity.limit,
            contacts: Mutex::default(),
            is_complete: AtomicBool::new(false),
        }
    }

    pub(crate) fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    pub(crate) fn is_on_one_host(&self) -> bool {
        self.group.is_on_one_host
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.group.size()
    }

    pub(crate) fn pool(&self) -> &Pool {
        self.group.worker.pool()
    }

    /// The neighbour before this rank, and that behind it.
    pub(crate) fn neighbours(&self) -> (usize, usize) {
        let (rank, size) = (self.rank(), self.size());
        ((rank + size - 1) % size, (rank + 1) % size)
    }

    /// Does `work` in the call's turn and within its limit. Every call is compared along the ring of ranks, so that one that differs
    /// is noticed, whatever the ranks do then. Work that `opens_with_neighbours` sends to the one behind and receives from the one
    /// before at first, if it has anything for them: then the comparison takes no message of its own.
    pub(crate) async fn complete<T>(
        &self,
        opens_with_neighbours: bool,
        work: impl Future<Output = Result<T, GroupError>>,
    ) -> Result<T, GroupError> {
        if let Some(over) = self.group.over.get() {
            self.is_complete.store(true, Ordering::Relaxed);
            return Err(after(over));
        }
        let work = async {
            self.turn().await;
            if opens_with_neighbours {
                let value = work.await?;
                self.compare().await?;
                return Ok(value);
            }
            let ((), value) = try_join(self.compare(), work).await?;
            Ok(value)
        };
        // It lives on, so that what it waits for is known.
        let mut work = pin!(work);
        let ended = pin!(self.group.ended());
        let done = timeout(self.group.runtime(), self.limit, select(work.as_mut(), ended)).await;
        let done = match done {
            Ok(Either::Left((done, _))) => done,
            Ok(Either::Right((over, _))) => Err(after(&over)),
            Err(_) => Err(self.timed_out()),
        };
        self.is_complete.store(true, Ordering::Relaxed);
        match done {
            Ok(value) => {
                self.lane().send_modify(|complete| *complete += 1);
                Ok(value)
            }
            Err(error) => Err(self.group.fail(error)),
        }
    }

    fn lane(&self) -> &tokio::sync::watch::Sender<u64> {
        let at = (self.call.number % CALLS_UNDER_WAY as u64) as usize;
        &self.group.lanes[at]
    }

    /// Waits until the lane's earlier calls are complete.
    async fn turn(&self) {
        let turn = self.call.number / CALLS_UNDER_WAY as u64;
        // The sender lives as long as the group.
        let _ = self.lane().subscribe().wait_for(|complete| *complete == turn).await;
    }

    /// Tells the neighbour behind this rank what it calls, and awaits what the one before calls, unless that was done already.
    fn compare(&self) -> impl Future<Output = Result<(), GroupError>> + Send + '_ {
        let (before, behind) = self.neighbours();
        let is_alone = self.size() == 1;
        let mut contacts = self.contacts();
        let tells = !is_alone && contacts.told.insert(behind);
        let hears = !is_alone && contacts.heard.insert(before);
        drop(contacts);
        async move {
            let hear = async { if hears { self.hear(before).await } else { Ok(()) } };
            let tell = async {
                if tells {
                    self.post(behind, CALLS, self.message(&[], true).await?)?;
                }
                Ok(())
            };
            try_join(hear, tell).await.map(drop)
        }
    }

    /// Sends a copy of `bytes`.
    pub(crate) async fn send(&self, to: usize, bytes: &[u8]) -> Result<(), GroupError> {
        if self.contacts().told.insert(to) {
            if bytes.len() <= JOINED_BYTES_MAX {
                return self.post(to, CALLS, self.message(bytes, true).await?);
            }
            self.post(to, CALLS, self.message(&[], true).await?)?;
        }
        if bytes.is_empty() { Ok(()) } else { self.post(to, CONTENTS, self.message(bytes, false).await?) }
    }

    /// Sends one copy of `bytes` to all others, of whom none was sent anything yet.
    pub(crate) async fn send_to_all(&self, bytes: &[u8]) -> Result<(), GroupError> {
        let is_short = bytes.len() <= JOINED_BYTES_MAX;
        let call = self.message(if is_short { bytes } else { &[] }, true).await?;
        let content = if is_short { None } else { Some(self.message(bytes, false).await?) };
        for to in self.others() {
            self.contacts().told.insert(to);
            self.post(to, CALLS, call.clone())?;
            content.iter().try_for_each(|content| self.post(to, CONTENTS, content.clone()))?;
        }
        Ok(())
    }

    /// Sends a tensor as it is.
    pub(crate) async fn send_tensor(&self, to: usize, tensor: Tensor) -> Result<(), GroupError> {
        if self.contacts().told.insert(to) {
            self.post(to, CALLS, self.message(&[], true).await?)?;
        }
        self.post(to, CONTENTS, tensor)
    }

    /// The other ranks, beginning behind this one, so that not all send to the same at first.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |distance| (rank + distance) % size)
    }

    /// Connects to `rank`. Receives from one rank are requested in the order in which they are polled for the first time only if it is
    /// connected by then.
    pub(crate) async fn connect(&self, rank: usize) -> Result<(), GroupError> {
        let connected = self.peer(rank)?.connect().await;
        connected.map_err(|error| self.failed(rank, error))
    }

    /// `length` bytes, which `from` has [sent](Self::send). Receives from one rank are completed in the order of the calls of this
    /// method, if they are polled for the first time in that order.
    pub(crate) fn receive(
        &self,
        from: usize,
        length: usize,
    ) -> impl Future<Output = Result<Arrived, GroupError>> + Send + '_ {
        let is_first = self.contacts().heard.insert(from);
        async move {
            if is_first && length <= JOINED_BYTES_MAX {
                let message = self.next(from, CALLS).await?;
                self.check(from, &message, length)?;
                return self.content(from, message, HEADER_BYTES, length);
            }
            let call = async { if is_first { self.hear(from).await } else { Ok(()) } };
            let content = async {
                let content = if length == 0 { None } else { Some(self.next(from, CONTENTS).await?) };
                content.map_or(Ok(Arrived::EMPTY), |content| self.content(from, content, 0, length))
            };
            // Both are asked for at once.
            let (content, ()) = try_join(content, call).await?;
            Ok(content)
        }
    }

    /// A tensor that `from` has [sent](Self::send_tensor).
    pub(crate) fn receive_tensor(
        &self,
        from: usize,
    ) -> impl Future<Output = Result<Tensor, GroupError>> + Send + '_ {
        let is_first = self.contacts().heard.insert(from);
        async move {
            let call = async { if is_first { self.hear(from).await } else { Ok(()) } };
            let (tensor, ()) = try_join(self.next(from, CONTENTS), call).await?;
            Ok(tensor)
        }
    }

    /// Compares the call of `from`, which nothing follows in its message.
    async fn hear(&self, from: usize) -> Result<(), GroupError> {
        let message = self.next(from, CALLS).await?;
        self.check(from, &message, 0)
    }

    /// A message with a copy of `bytes`, behind the call if that is to be told.
    pub(crate) async fn message(&self, bytes: &[u8], tells_call: bool) -> Result<Tensor, GroupError> {
        let header = self.call.encode();
        let header: &[u8] = if tells_call { &header } else { &[] };
        let length = header.len() + bytes.len();
        let mut buffer = self.pool().alloc(length).await.map_err(WorkerError::from)?;
        let (place, rest) = buffer.split_at_mut(header.len());
        copy_bytes(place, header, CopyReason::Import);
        copy_bytes(rest, bytes, CopyReason::Import);
        Ok(Tensor::new(buffer, DataType::U8, &[length as u64])?)
    }

    fn post(&self, to: usize, key: usize, message: Tensor) -> Result<(), GroupError> {
        let peer = self.peer(to)?;
        self.group.step.to(peer).send(&self.keys[key], message).map_err(|error| self.failed(to, error))
    }

    /// The next message of `from` under one of the lane's keys.
    async fn next(&self, from: usize, key: usize) -> Result<Tensor, GroupError> {
        let peer = self.peer(from)?;
        let _awaited = Awaited::begin(self, from);
        // The call's own limit ends it, which knows all that is awaited.
        let receive = self.group.step.from(peer).recv(&self.keys[key]).timeout(self.limit.saturating_mul(2));
        receive.sharing(Sharing::View).await.map_err(|error| self.failed(from, error))
    }

    fn peer(&self, rank: usize) -> Result<&tensorwire_rendezvous::Peer, GroupError> {
        self.group.peers.get(rank).ok_or_else(|| GroupError::no_such_rank("rank", rank, self.size()))
    }

    /// Compares the call at the beginning of a message with the own one. `length` bytes are to follow it.
    fn check(&self, from: usize, message: &Tensor, length: usize) -> Result<(), GroupError> {
        let theirs = Call::decode(message.bytes());
        let theirs = theirs
            .ok_or_else(|| self.misbehaved(from, "the first message of a call begins with the call"))?;
        self.contacts().known.insert(from);
        if theirs != self.call {
            return Err(GroupError::Mismatch {
                rank: self.rank(),
                own: Box::new(self.call),
                other: from,
                theirs: Box::new(theirs),
            });
        }
        match message.bytes().len() == HEADER_BYTES + length {
            true => Ok(()),
            false => {
                Err(self
                    .misbehaved(from, "the first message of a call has the length that the call gives it"))
            }
        }
    }

    fn content(&self, from: usize, tensor: Tensor, at: usize, length: usize) -> Result<Arrived, GroupError> {
        if tensor.bytes().len() != at + length {
            return Err(self.misbehaved(from, "a message has the length that the call gives it"));
        }
        Ok(Arrived { tensor: Some(tensor), at })
    }

    pub(crate) fn misbehaved(&self, rank: usize, rule: &'static str) -> GroupError {
        GroupError::Misbehaved { call: Box::new(self.call), rank, rule }
    }

    /// The error of a message to or from `rank`.
    fn failed(&self, rank: usize, error: WorkerError) -> GroupError {
        match error {
            WorkerError::Remote { status, .. } => self.group.heard(rank, status, &self.call),
            // A process that was stopped finds all limits over at once.
            WorkerError::DeadlineExceeded { .. } => self.timed_out(),
            WorkerError::Aborted { .. } if let Some(over) = self.group.over.get() => after(over),
            // `Aborted`: the connection broke before this message was sent.
            WorkerError::Aborted { .. }
            | WorkerError::PeerLost { .. }
            | WorkerError::NoFabric { .. }
            | WorkerError::NoAddress { .. }
            | WorkerError::Control(_) => {
                GroupError::RankLost { call: Box::new(self.call), rank, error: Box::new(error) }
            }
            error => error.into(),
        }
    }

    fn timed_out(&self) -> GroupError {
        let contacts = self.contacts();
        let waiting_for: Vec<usize> = contacts.awaited.keys().copied().collect();
        let silent = waiting_for.iter().copied().filter(|rank| !contacts.known.contains(rank)).collect();
        GroupError::TimedOut { call: Box::new(self.call), limit: self.limit, waiting_for, silent }
    }

    fn contacts(&self) -> MutexGuard<'_, Contacts> {
        self.contacts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        if !*self.is_complete.get_mut() {
            let why = format!("`{}` was given up before it was complete", self.call);
            self.group.fail(GroupError::Over { rank: Some(self.group.rank), why });
        }
    }
}

/// The error of a call of a group that is over already.
fn after(over: &GroupError) -> GroupError {
    match over {
        GroupError::Over { .. } => over.clone(),
        first => GroupError::Over { rank: None, why: first.to_string() },
    }
}

/// Counts an awaited message while it lives.
struct Awaited<'calling> {
    calling: &'calling Calling,
    from: usize,
}

impl<'calling> Awaited<'calling> {
    fn begin(calling: &'calling Calling, from: usize) -> Self {
        *calling.contacts().awaited.entry(from).or_default() += 1;
        Self { calling, from }
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let mut contacts = self.calling.contacts();
        if let Some(count) = contacts.awaited.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                contacts.awaited.remove(&self.from);
            }
        }
    }
}

//! One call of this rank while it is under way: its turn, its limit, and the messages that pass between it and other ranks.
//!
//! Messages of a call travel in its lane, in the order in which they were sent. A lane carries one call at a time, so a message
//! belongs to the call that its lane has come to. What a rank sends another in a call begins with the [`Call`], which the other
//! compares with its own, and what is short goes with it: in a [note](super::telling), or under a key of the group's step. Longer
//! contents have another key, and the order between them and calls does not matter.

mod at_once;

use std::{
    future::{Future, poll_fn},
    iter, mem,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures::{
    FutureExt as _, StreamExt as _,
    future::{select, try_join},
    stream::FuturesUnordered,
};
use smallvec::SmallVec;
use tensorwire_memory::{
    Pool,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::{Code, DataType, EagerContent, Sharing};
use tensorwire_rendezvous::{Notes, Tensor, WorkerError};
use tensorwire_verbs_reactor::timeout;

use super::{CALLS_UNDER_WAY, Group, GroupState, telling::end_of};
use crate::{
    call::{Call, CallKind, HEADER_BYTES},
    error::GroupError,
};

/// The key of calls, and that of contents.
const CALLS: usize = 0;
const CONTENTS: usize = 1;

/// The key of the end, for those that ask for it.
const END: &str = "end";

/// A call that takes longer asks for the end of the group.
const SHORT: Duration = Duration::from_millis(250);

/// The longest content that travels in one message with the call.
const JOINED_BYTES_MAX: usize = 2048;

/// A call that is under way. If it is dropped before it is complete, the group is over.
pub(crate) struct Calling {
    group: Arc<GroupState>,
    pub(crate) call: Call,
    limit: Duration,
    contacts: Mutex<Contacts>,
    is_complete: AtomicBool,
}

/// What was exchanged with each rank. Most groups are small.
type Contacts = SmallVec<[Contact; 8]>;

#[derive(Clone, Copy, Default)]
struct Contact {
    /// It has this rank's call.
    is_told: bool,
    /// This rank has its call, or awaits it with an earlier receive.
    is_heard: bool,
    /// How many messages of it have come.
    messages: u32,
    /// How many messages of it are awaited.
    awaited: u32,
}

/// The content of a message.
pub(crate) struct Arrived {
    message: Received,
    /// Where the content begins.
    at: usize,
}

/// A message as it has come.
enum Received {
    Nothing,
    Value(Tensor),
    Note(EagerContent),
}

impl Received {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Nothing => &[],
            Self::Value(tensor) => tensor.bytes(),
            Self::Note(note) => note,
        }
    }
}

impl Arrived {
    pub(crate) const EMPTY: Self = Self { message: Received::Nothing, at: 0 };

    pub(crate) fn bytes(&self) -> &[u8] {
        self.message.bytes().get(self.at..).unwrap_or_default()
    }
}

impl AsRef<[u8]> for Arrived {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
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
            group: group.clone(),
            call,
            limit: group.identity.limit,
            contacts: Mutex::new(SmallVec::from_elem(Contact::default(), group.size())),
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
        let (work, ended) = (pin!(work), pin!(async { Err(after(&self.group.ended().await)) }));
        let mut done = pin!(async { select(work, ended).await.factor_first().0 });
        let short = self.limit.min(SHORT);
        let done = match timeout(self.group.runtime(), short, done.as_mut()).await {
            Ok(done) => done,
            Err(_) => Box::pin(self.complete_long(done, self.limit - short)).await,
        };
        self.end(done)
    }

    fn end<T>(&self, done: Result<T, GroupError>) -> Result<T, GroupError> {
        self.is_complete.store(true, Ordering::Relaxed);
        match done {
            Ok(value) => {
                self.group.lane(&self.call).end_call();
                if self.call.kind == CallKind::Close {
                    self.group.is_closed.store(true, Ordering::Release);
                }
                Ok(value)
            }
            Err(error) => Err(self.group.fail(error)),
        }
    }

    /// A call that takes long asks for the end of the group as well.
    async fn complete_long<T>(
        &self,
        done: impl Future<Output = Result<T, GroupError>>,
        limit: Duration,
    ) -> Result<T, GroupError> {
        let (done, asked) = (pin!(done), pin!(self.asked_end()));
        let done = timeout(self.group.runtime(), limit, select(done, asked)).await;
        let Ok(done) = done else { return Err(self.timed_out()) };
        done.factor_first().0
    }

    /// Completes with the end of the group, once a rank from which something is awaited answers that it is over there. A rank that is
    /// awaited in the group's step answers so by itself; one that is awaited in a channel of notes may have sent its end before the
    /// channel was open, or over another connection.
    async fn asked_end<T>(&self) -> Result<T, GroupError> {
        let has_notes = |rank: &usize| self.group.notes(*rank).is_some();
        let mut asked: FuturesUnordered<_> =
            self.others().filter(has_notes).map(|rank| self.end_of(rank)).collect();
        let mut ends = Vec::new();
        // Polled whenever the work is, which may have come to await a rank whose end is known.
        poll_fn(|context| {
            while let Poll::Ready(Some(end)) = asked.poll_next_unpin(context) {
                ends.push(end);
            }
            let contacts = self.contacts();
            let is_awaited = |rank: usize| contacts.get(rank).is_some_and(|contact| contact.awaited > 0);
            let end = ends.iter().find(|(rank, _)| is_awaited(*rank));
            end.map_or(Poll::Pending, |(_, end): &(usize, GroupError)| Poll::Ready(Err(end.clone())))
        })
        .await
    }

    /// The end of the group on another rank, in whose step nobody ever sends anything under this key.
    async fn end_of(&self, rank: usize) -> (usize, GroupError) {
        // One that has closed the group has no step any more, and its messages of that call may be under way.
        let closes = self.call.kind == CallKind::Close;
        loop {
            if let Ok(peer) = self.peer(rank)
                && let Err(error) = self.group.step.from(peer).recv(END).timeout(self.limit).await
                && let WorkerError::Remote { status, .. } = &error
                && (!status.details.is_empty() || status.code == Code::Aborted && !closes)
            {
                return (rank, GroupError::of_message(&self.call, rank, error));
            }
            // The connection broke, or the rank is gone, which those notice that wait for it.
            self.group.runtime().sleep(SHORT).await;
        }
    }

    /// Waits until the lane's earlier calls are complete; before the group is closed, those of all lanes.
    async fn turn(&self) {
        let lanes = CALLS_UNDER_WAY as u64;
        let own = self.call.number % lanes;
        let is_awaited = |at: u64| at == own || self.call.kind == CallKind::Close;
        for (at, lane) in (0..lanes).zip(&self.group.lanes).filter(|(at, _)| is_awaited(*at)) {
            lane.wait_for((self.call.number + lanes - 1 - at) / lanes).await;
        }
    }

    /// Tells the neighbour behind this rank what it calls, and awaits what the one before calls, unless that was done already.
    fn compare(&self) -> impl Future<Output = Result<(), GroupError>> + Send + '_ {
        let (before, behind) = self.neighbours();
        let is_alone = self.size() == 1;
        let (tells, hears) = (!is_alone && self.tells(behind), !is_alone && self.hears(before));
        async move {
            let hear = async { if hears { self.hear(before).await } else { Ok(()) } };
            let tell = async { if tells { self.tell(behind, &[]).await } else { Ok(()) } };
            try_join(hear, tell).await.map(drop)
        }
    }

    /// Whether `to` was not told the call yet. The caller tells it.
    fn tells(&self, to: usize) -> bool {
        let mut contacts = self.contacts();
        contacts.get_mut(to).is_some_and(|contact| !mem::replace(&mut contact.is_told, true))
    }

    /// Whether nobody awaits the call of `from` yet. The caller does.
    fn hears(&self, from: usize) -> bool {
        let mut contacts = self.contacts();
        contacts.get_mut(from).is_some_and(|contact| !mem::replace(&mut contact.is_heard, true))
    }

    /// Sends the call, and a short content with it.
    async fn tell(&self, to: usize, content: &[u8]) -> Result<(), GroupError> {
        match self.group.notes(to) {
            Some(notes) => {
                let (lane, call) = (self.group.lane(&self.call).number, self.call.encode());
                let sent = notes.send(lane, &[&call, content]).await;
                // Why the other has gone may lie there already.
                sent.map_err(|error| self.end_told(to, notes).unwrap_or_else(|| self.failed(to, error)))
            }
            None => self.post(to, CALLS, self.message(content, true).await?),
        }
    }

    /// The end of the group, if that is among the notes that `from` has sent before its connection ended.
    fn end_told(&self, from: usize, notes: &Notes) -> Option<GroupError> {
        let lane = self.group.lane(&self.call).number;
        let mut left = iter::from_fn(|| notes.recv(lane).now_or_never()?.ok());
        left.find_map(|note| end_of(&note)).map(|status| GroupError::told(&self.call, from, status))
    }

    /// Sends a copy of `bytes`.
    pub(crate) async fn send(&self, to: usize, bytes: &[u8]) -> Result<(), GroupError> {
        if self.tells(to) {
            if self.is_short(bytes.len()) {
                return self.tell(to, bytes).await;
            }
            self.tell(to, &[]).await?;
        }
        if bytes.is_empty() { Ok(()) } else { self.post(to, CONTENTS, self.message(bytes, false).await?) }
    }

    /// Whether a content of this many bytes travels with the call, if it is the first one.
    pub(crate) fn is_short(&self, bytes: usize) -> bool {
        bytes <= JOINED_BYTES_MAX
    }

    /// Sends `bytes`, which are [short](Self::is_short), with the call: `to` was sent nothing yet.
    pub(crate) async fn send_short(&self, to: usize, bytes: &[u8]) -> Result<(), GroupError> {
        if self.tells(to) { self.tell(to, bytes).await } else { Ok(()) }
    }

    /// `length` bytes that `from` has [sent](Self::send_short) with the call.
    pub(crate) async fn receive_short(&self, from: usize, length: usize) -> Result<Arrived, GroupError> {
        self.hears(from);
        let message = self.next_call(from).await?;
        self.check(from, message.bytes(), length)?;
        Ok(Arrived { message, at: HEADER_BYTES })
    }

    /// Sends a tensor as it is.
    pub(crate) async fn send_tensor(&self, to: usize, tensor: Tensor) -> Result<(), GroupError> {
        if self.tells(to) {
            self.tell(to, &[]).await?;
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
        let is_first = self.hears(from);
        async move {
            if is_first && self.is_short(length) {
                return self.receive_short(from, length).await;
            }
            let call = async { if is_first { self.hear(from).await } else { Ok(()) } };
            let content = async {
                let content = if length == 0 { None } else { Some(self.next(from, CONTENTS).await?) };
                content.map_or(Ok(Arrived::EMPTY), |content| self.content(from, content, length))
            };
            // Both are asked for at once.
            // The call is compared first, as it tells why a content has another length.
            let ((), content) = try_join(call, content).await?;
            Ok(content)
        }
    }

    /// A tensor that `from` has [sent](Self::send_tensor).
    pub(crate) fn receive_tensor(
        &self,
        from: usize,
    ) -> impl Future<Output = Result<Tensor, GroupError>> + Send + '_ {
        let is_first = self.hears(from);
        async move {
            let call = async { if is_first { self.hear(from).await } else { Ok(()) } };
            let ((), tensor) = try_join(call, self.next(from, CONTENTS)).await?;
            Ok(tensor)
        }
    }

    /// Compares the call of `from`, which nothing follows in its message.
    async fn hear(&self, from: usize) -> Result<(), GroupError> {
        let message = self.next_call(from).await?;
        self.check(from, message.bytes(), 0)
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
        let key = &self.group.lane(&self.call).keys[key];
        self.group.step.to(peer).send(key, message).map_err(|error| self.failed(to, error))
    }

    /// The next message of `from` that begins with a call.
    async fn next_call(&self, from: usize) -> Result<Received, GroupError> {
        let Some(notes) = self.group.notes(from) else {
            return self.next(from, CALLS).await.map(Received::Value);
        };
        let _awaited = Awaited::begin(self, from);
        let note = notes.recv(self.group.lane(&self.call).number).await;
        let note = note.map_err(|error| self.failed(from, error))?;
        self.has_come(from);
        match end_of(&note) {
            Some(status) => Err(GroupError::told(&self.call, from, status)),
            None => Ok(Received::Note(note)),
        }
    }

    /// The next message of `from` under one of the lane's keys.
    async fn next(&self, from: usize, key: usize) -> Result<Tensor, GroupError> {
        let peer = self.peer(from)?;
        let _awaited = Awaited::begin(self, from);
        // The call's own limit ends it, which knows all that is awaited.
        let key = &self.group.lane(&self.call).keys[key];
        let receive = self.group.step.from(peer).recv(key).timeout(self.limit.saturating_mul(2));
        let received = receive.sharing(Sharing::View).await.map_err(|error| self.failed(from, error))?;
        self.has_come(from);
        Ok(received)
    }

    fn peer(&self, rank: usize) -> Result<&tensorwire_rendezvous::Peer, GroupError> {
        self.group.peers.get(rank).ok_or_else(|| GroupError::no_such_rank("rank", rank, self.size()))
    }

    /// Compares the call at the beginning of a message with the own one. `length` bytes are to follow it.
    fn check(&self, from: usize, message: &[u8], length: usize) -> Result<(), GroupError> {
        let theirs = Call::decode(message);
        let theirs = theirs
            .ok_or_else(|| self.misbehaved(from, "the first message of a call begins with the call"))?;
        if theirs != self.call {
            return Err(GroupError::Mismatch {
                rank: self.rank(),
                own: Box::new(self.call),
                other: from,
                theirs: Box::new(theirs),
            });
        }
        match message.len() == HEADER_BYTES + length {
            true => Ok(()),
            false => {
                Err(self
                    .misbehaved(from, "the first message of a call has the length that the call gives it"))
            }
        }
    }

    fn content(&self, from: usize, tensor: Tensor, length: usize) -> Result<Arrived, GroupError> {
        if tensor.bytes().len() != length {
            return Err(self.misbehaved(from, "a message has the length that the call gives it"));
        }
        Ok(Arrived { message: Received::Value(tensor), at: 0 })
    }

    pub(crate) fn misbehaved(&self, rank: usize, rule: &'static str) -> GroupError {
        GroupError::Misbehaved { call: Box::new(self.call), rank, rule }
    }

    /// The error of a message to or from `rank`.
    pub(crate) fn failed(&self, rank: usize, error: WorkerError) -> GroupError {
        match error {
            // A process that was stopped finds all limits over at once.
            WorkerError::DeadlineExceeded { .. } => self.timed_out(),
            WorkerError::Aborted { .. } if let Some(over) = self.group.over.get() => after(over),
            error => GroupError::of_message(&self.call, rank, error),
        }
    }

    fn timed_out(&self) -> GroupError {
        let contacts = self.contacts();
        let awaited = contacts.iter().enumerate().filter(|(_, contact)| contact.awaited > 0);
        let messages = awaited.clone().map(|(_, contact)| contact.messages);
        let (fewest, most) = (messages.clone().min().unwrap_or_default(), messages.max().unwrap_or_default());
        let is_silent = |contact: &Contact| contact.messages == fewest && (fewest == 0 || fewest < most);
        let silent =
            awaited.clone().filter(|(_, contact)| is_silent(contact)).map(|(rank, _)| rank).collect();
        let waiting_for = awaited.map(|(rank, _)| rank).collect();
        GroupError::TimedOut { call: Box::new(self.call), limit: self.limit, waiting_for, silent }
    }

    fn has_come(&self, from: usize) {
        if let Some(contact) = self.contacts().get_mut(from) {
            contact.messages += 1;
        }
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
pub(super) fn after(over: &GroupError) -> GroupError {
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
        if let Some(contact) = calling.contacts().get_mut(from) {
            contact.awaited += 1;
        }
        Self { calling, from }
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        if let Some(contact) = self.calling.contacts().get_mut(self.from) {
            contact.awaited -= 1;
        }
    }
}

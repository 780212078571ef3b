//! One call of this rank while it is in progress: its turn, its time limit, and its messages to and from other ranks.
//!
//! A call's messages travel in its lane, in the order they are sent. A lane carries one call at a time, so a message belongs to
//! the lane's current call. The first message a rank sends another in a call begins with the [`Call`] header, which the receiver
//! compares with its own, and a short content follows in the same [note](super::channels). A longer content is a value of the
//! group's step, and may arrive before or after the header; or it is [offered](offering), and a later note has its ticket.

mod arrived;
mod at_once;
mod offering;
mod refusing;
mod span;
mod yielding;

use std::{
    future::{Future, poll_fn},
    iter, mem,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures::{
    FutureExt as _, StreamExt as _,
    future::{select, try_join, try_join_all},
    stream::FuturesUnordered,
};
use smallvec::SmallVec;
use tensorwire_fabric::timeout;
use tensorwire_memory::{
    Buf, BufMut,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::{Code, DataType, EagerContent, Sharing};
use tensorwire_rendezvous::{Notes, Tensor, WorkerError};
use tracing::{Instrument as _, Span};

use self::arrived::{Awaited, Received};
pub(crate) use self::{arrived::Arrived, offering::Offers};
use super::{CALLS_UNDER_WAY, Group, GroupState, channels::decode_end};
use crate::{
    call::{Call, CallKind, HEADER_BYTES},
    error::GroupError,
    schedule::{self, Algorithm, ComparedRanks, Round},
};

/// The key under which a peer requests the end of the group. Nothing is ever sent under it.
const END: &str = "end";

/// A call that takes longer than this also requests the end of the group from the other ranks.
const SHORT: Duration = Duration::from_millis(250);

/// A call in progress. Dropping it before it is complete ends the group.
pub(crate) struct Calling {
    group: Arc<GroupState>,
    pub(crate) call: Call,
    limit: Duration,
    contacts: Mutex<Contacts>,
    /// Notes that were taken at once, of which the call did not become complete: their ranks, and what is still to be received.
    taken: Mutex<Vec<(usize, EagerContent)>>,
    is_complete: AtomicBool,
    /// Whether this rank polls again before it sleeps.
    is_awake: AtomicBool,
    /// Why this rank does not make the call.
    refused: Option<GroupError>,
    /// From when the call is first polled.
    span: OnceLock<Span>,
}

/// Ranks, inline for most groups.
pub(crate) type Ranks = SmallVec<[usize; 8]>;

/// The state of the exchange with each rank, inline for most groups.
type Contacts = SmallVec<[Contact; 8]>;

#[derive(Clone, Copy, Default)]
struct Contact {
    /// This rank has sent its call header, or a caller has claimed to.
    is_call_sent: bool,
    /// Its first content was sent with that, before the call asked for it.
    is_content_sent: bool,
    /// A receive of that rank's call header is done, or a caller has claimed it.
    is_call_requested: bool,
    /// Messages received.
    messages: u32,
    /// Messages awaited now.
    awaited: u32,
    /// Contents were posted, which that rank requests.
    has_posted: bool,
}

impl Group {
    /// A new call. Its number is assigned here.
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
            taken: Mutex::default(),
            is_complete: AtomicBool::new(false),
            is_awake: AtomicBool::new(false),
            refused: None,
            span: OnceLock::new(),
        }
    }

    pub(crate) fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// The ranks on each host.
    pub(crate) fn hosts(&self) -> &[Vec<usize>] {
        &self.group.hosts
    }

    pub(crate) fn default_algorithm(&self, bytes: usize) -> Algorithm {
        self.group.default_algorithm(bytes)
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.group.size()
    }

    /// The root of a call that has one.
    pub(crate) fn root(&self) -> usize {
        self.call.root.unwrap_or_default() as usize
    }

    /// Whether the ranks share memory.
    pub(crate) fn is_on_one_host(&self) -> bool {
        self.hosts().len() == 1
    }

    /// Memory that ranks of the same host can map.
    pub(crate) async fn buffer(&self, bytes: usize) -> Result<BufMut, GroupError> {
        Ok(self.group.worker.pool().alloc(bytes).await.map_err(WorkerError::from)?)
    }

    /// The rounds of a call that travels by doubling.
    pub(crate) fn rounds(&self) -> impl Iterator<Item = Round> + use<> {
        schedule::rounds(self.rank(), self.size())
    }

    /// Runs `work` in the call's turn and within its limit. Before it, this rank meets its `peers`: the ranks with which `work` has
    /// messages, all of which name this one. Each rank compares every call with its [`ComparedRanks`], so a mismatch is found whatever
    /// `work` does. If `is_compared_by_work`, the first messages of `work` to and from these carry the header, so the comparison needs
    /// no message of its own.
    pub(crate) async fn complete<T>(
        &self,
        is_compared_by_work: bool,
        peers: impl FnOnce() -> Ranks,
        work: impl Future<Output = Result<T, GroupError>>,
    ) -> Result<T, GroupError> {
        let span = self.span().clone();
        if let Some(refused) = self.refused.as_ref().filter(|_| self.is_complete.load(Ordering::Relaxed)) {
            return Err(refused.clone());
        }
        if let Some(over) = self.group.over.get() {
            self.is_complete.store(true, Ordering::Relaxed);
            return Err(after(over));
        }
        let work = async {
            self.turn().await;
            if let Some(refused) = &self.refused {
                return Err(refused.clone());
            }
            if !self.group.channels.has_met_all()
                && let unmet = self.unmet(peers())
                && !unmet.is_empty()
            {
                Box::pin(self.meet(unmet)).await?;
            }
            if is_compared_by_work {
                let value = work.await?;
                self.compare().await?;
                return Ok(value);
            }
            let ((), value) = try_join(self.compare(), work).await?;
            Ok(value)
        };
        // `work` must outlive the time limit, because `timed_out` reads what it awaits.
        let (work, ended) =
            (pin!(self.yielding(work)), pin!(async { Err(after(&self.group.ended().await)) }));
        let done = async { select(work, ended).await.factor_first().0 };
        let mut done = pin!(done.instrument(span));
        let short = self.limit.min(SHORT);
        let done = match timeout(self.group.runtime(), short, done.as_mut()).await {
            Ok(done) => done,
            Err(_) => Box::pin(self.complete_long(done, self.limit - short)).await,
        };
        self.end(done)
    }

    fn end<T>(&self, done: Result<T, GroupError>) -> Result<T, GroupError> {
        self.is_complete.store(true, Ordering::Relaxed);
        if let Err(error) = &done {
            self.span().record("error", tracing::field::display(error));
        }
        match done {
            Ok(value) => {
                self.group.lane(&self.call).end_call();
                if self.call.kind == CallKind::Close {
                    drop(self.group.offers.take());
                    self.group.is_closed.store(true, Ordering::Release);
                }
                Ok(value)
            }
            Err(refused @ (GroupError::Argument { .. } | GroupError::Reduction(_))) if self.is_refused() => {
                self.group.lane(&self.call).end_call();
                Err(refused)
            }
            Err(error) => Err(self.group.fail(error)),
        }
    }

    /// Also requests the end of the group.
    async fn complete_long<T>(
        &self,
        done: impl Future<Output = Result<T, GroupError>>,
        limit: Duration,
    ) -> Result<T, GroupError> {
        let (done, asked) = (pin!(done), pin!(self.requested_end()));
        let done = timeout(self.group.runtime(), limit, select(done, asked)).await;
        let Ok(done) = done else { return Err(self.timed_out()) };
        done.factor_first().0
    }

    /// Completes with the end of the group when a rank answers with it while something is awaited from that rank. A receive in
    /// the group's step fails with the end by itself. A receive from a channel of notes may miss it: the end may have been sent
    /// over another connection.
    async fn requested_end<T>(&self) -> Result<T, GroupError> {
        let mut asked = FuturesUnordered::new();
        let (mut are_asked, mut ends) = (SmallVec::<[bool; 8]>::from_elem(false, self.size()), Vec::new());
        // Polled whenever `work` is, because `work` may have begun to await a rank, or one whose end is already known.
        poll_fn(|context| {
            for (rank, is_asked) in are_asked.iter_mut().enumerate() {
                if self.is_awaited(rank) && !mem::replace(is_asked, true) {
                    asked.push(self.end_of(rank));
                }
            }
            while let Poll::Ready(Some(end)) = asked.poll_next_unpin(context) {
                ends.push(end);
            }
            let end = ends.iter().find(|(rank, _)| self.is_awaited(*rank));
            end.map_or(Poll::Pending, |(_, end): &(usize, GroupError)| Poll::Ready(Err(end.clone())))
        })
        .await
    }

    /// The end of the group on another rank, with which the receive of `END` fails.
    async fn end_of(&self, rank: usize) -> (usize, GroupError) {
        // A rank that has completed `close` aborts its step while its last messages may still be in flight: that is no end.
        let closes = self.call.kind == CallKind::Close;
        loop {
            if let Ok(peer) = self.peer(rank)
                && let Err(error) = self.group.step.from(peer).recv(END).timeout(self.limit).await
                && let WorkerError::Remote { status, .. } = &error
                && (!status.details.is_empty() || status.code == Code::Aborted && !closes)
            {
                return (rank, GroupError::of_message(&self.call, rank, error));
            }
            // The connection broke or the rank is gone. The receives of `work` report that.
            self.group.runtime().sleep(SHORT).await;
        }
    }

    /// Waits until the lane's earlier calls are complete, and for `close` those of all lanes.
    async fn turn(&self) {
        let lanes = CALLS_UNDER_WAY as u64;
        let own = self.call.number % lanes;
        let is_awaited = |at: u64| at == own || self.call.kind == CallKind::Close;
        for (at, lane) in (0..lanes).zip(&self.group.lanes).filter(|(at, _)| is_awaited(*at)) {
            lane.wait_for((self.call.number + lanes - 1 - at) / lanes).await;
        }
    }

    /// The ranks that this one has not met, of `peers` and those with which it compares its calls.
    fn unmet(&self, mut peers: Ranks) -> Ranks {
        let ComparedRanks { to, from } = ComparedRanks::of(self.rank(), self.size());
        peers.extend(to.into_iter().chain(from));
        peers.retain(|rank| self.group.notes(*rank).is_none());
        peers
    }

    async fn meet(&self, ranks: Ranks) -> Result<(), GroupError> {
        try_join_all(ranks.into_iter().map(|rank| self.channel(rank))).await.map(drop)
    }

    /// The channel to `rank`. Meets it if need be.
    async fn channel(&self, rank: usize) -> Result<&Notes, GroupError> {
        if let Some(notes) = self.group.notes(rank) {
            return Ok(notes);
        }
        let peer = self.peer(rank)?;
        let _awaited = Awaited::begin(self, rank);
        // The call's own limit is over first. Its error lists everything that was awaited.
        let limit = self.limit.saturating_mul(2);
        let met = Box::pin(self.group.channels.meet(&self.group.step, (rank, peer), limit)).await;
        met.map_err(|error| self.failed(rank, error))
    }

    /// Sends the call header to the ranks with which this one compares its calls, and compares theirs, unless `work` has claimed these.
    fn compare(&self) -> impl Future<Output = Result<(), GroupError>> + Send + '_ {
        let ComparedRanks { mut to, mut from } = ComparedRanks::of(self.rank(), self.size());
        to.retain(|to| self.claim_send(*to));
        from.retain(|from| self.claim_receive(*from));
        async move {
            if to.is_empty() && from.is_empty() {
                return Ok(());
            }
            let receive = try_join_all(from.into_iter().map(|from| self.receive_call(from)));
            let send = try_join_all(to.into_iter().map(|to| self.send_call(to, &[])));
            try_join(receive, send).await.map(drop)
        }
    }

    /// Whether the call header has still to be sent to `to`. If so, the caller must send it.
    fn claim_send(&self, to: usize) -> bool {
        let mut contacts = self.contacts();
        contacts.get_mut(to).is_some_and(|contact| !mem::replace(&mut contact.is_call_sent, true))
    }

    /// Whether the content that is now to be sent to `to` was sent with the call header already.
    fn was_content_sent(&self, to: usize) -> bool {
        let mut contacts = self.contacts();
        contacts.get_mut(to).is_some_and(|contact| mem::replace(&mut contact.is_content_sent, false))
    }

    /// Whether the call header of `from` has still to be received. If so, the caller must receive it.
    fn claim_receive(&self, from: usize) -> bool {
        let mut contacts = self.contacts();
        contacts.get_mut(from).is_some_and(|contact| !mem::replace(&mut contact.is_call_requested, true))
    }

    /// Sends the call header, and a short content with it.
    async fn send_call(&self, to: usize, content: &[u8]) -> Result<(), GroupError> {
        self.note(to, &[&self.call.encode(), content]).await
    }

    /// Sends a note of all `parts`.
    async fn note(&self, to: usize, parts: &[&[u8]]) -> Result<(), GroupError> {
        let notes = self.channel(to).await?;
        let sent = notes.send(self.group.lane(&self.call).number, parts).await;
        // The peer may have sent the end of the group before its connection ended.
        sent.map_err(|error| self.received_end(to, notes).unwrap_or_else(|| self.failed(to, error)))
    }

    /// The end of the group, if a note received from `from` contains it.
    fn received_end(&self, from: usize, notes: &Notes) -> Option<GroupError> {
        let lane = self.group.lane(&self.call).number;
        let mut left = iter::from_fn(|| notes.recv(lane).now_or_never()?.ok());
        left.find_map(|note| decode_end(&note)).map(|status| GroupError::of_status(&self.call, from, status))
    }

    /// Sends a copy of `bytes`.
    pub(crate) async fn send(&self, to: usize, bytes: &[u8]) -> Result<(), GroupError> {
        if self.claim_send(to) {
            if self.is_short(bytes.len()) {
                return self.send_call(to, bytes).await;
            }
            self.send_call(to, &[]).await?;
        } else if self.was_content_sent(to) {
            return Ok(());
        }
        if bytes.is_empty() { Ok(()) } else { self.post(to, self.message(bytes).await?) }
    }

    /// Whether a content of this many bytes travels with the call header, if it is the first one.
    pub(crate) fn is_short(&self, bytes: usize) -> bool {
        bytes <= schedule::JOINED_BYTES_MAX
    }

    /// Receives `length` [short](Self::is_short) bytes that `from` sent with the call header.
    async fn receive_short(&self, from: usize, length: usize) -> Result<Arrived, GroupError> {
        let note = self.next_note(from, true).await?;
        self.check(from, &note, length)?;
        Ok(Arrived { message: Received::Note(note), at: HEADER_BYTES })
    }

    /// Sends a tensor without a copy.
    pub(crate) async fn send_tensor(&self, to: usize, tensor: Tensor) -> Result<(), GroupError> {
        if self.claim_send(to) {
            self.send_call(to, &[]).await?;
        }
        self.post(to, tensor)
    }

    /// The other ranks, beginning with the next one, so that the ranks do not all send to the same one first.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank(), self.size());
        (rank + 1..rank + size).map(move |at| if at < size { at } else { at - size })
    }

    /// What came from the ranks before this one, and from those behind it. `arrived` has an item for each of the
    /// [others](Self::others), in their order.
    pub(crate) fn before_and_behind<'a, T>(&self, arrived: &'a [T]) -> (&'a [T], &'a [T]) {
        let (behind, before) = arrived.split_at(self.size() - 1 - self.rank());
        (before, behind)
    }

    /// Receives `length` bytes that `from` sent with [`send`](Self::send). Receives from one rank complete in the order of the
    /// calls of this method, if they are first polled in that order.
    pub(crate) fn receive(
        &self,
        from: usize,
        length: usize,
    ) -> impl Future<Output = Result<Arrived, GroupError>> + Send + '_ {
        let is_first = self.claim_receive(from);
        async move {
            if is_first && self.is_short(length) {
                return self.receive_short(from, length).await;
            }
            let call = async { if is_first { self.receive_call(from).await } else { Ok(()) } };
            let content = async {
                let content = if length == 0 { None } else { Some(self.next(from).await?) };
                content.map_or(Ok(Arrived::EMPTY), |content| self.content(from, content, length))
            };
            // Both are requested at once. The header is compared first, because a mismatch explains a content of another length.
            let ((), content) = try_join(call, content).await?;
            Ok(content)
        }
    }

    /// Receives a tensor that `from` sent with [`send_tensor`](Self::send_tensor).
    pub(crate) fn receive_tensor(
        &self,
        from: usize,
    ) -> impl Future<Output = Result<Tensor, GroupError>> + Send + '_ {
        let is_first = self.claim_receive(from);
        async move {
            let call = async { if is_first { self.receive_call(from).await } else { Ok(()) } };
            let ((), tensor) = try_join(call, self.next(from)).await?;
            Ok(tensor)
        }
    }

    /// Receives the call header of `from` without a content, and compares it. Contents are sent and awaited at the same time, so this
    /// never looks for the header.
    async fn receive_call(&self, from: usize) -> Result<(), GroupError> {
        let note = self.next_note(from, false).await?;
        self.check(from, &note, 0)
    }

    /// A message with a copy of `bytes`.
    pub(crate) async fn message(&self, bytes: &[u8]) -> Result<Tensor, GroupError> {
        let mut buffer = self.buffer(bytes.len()).await?;
        copy_bytes(&mut buffer, bytes, CopyReason::Import);
        message_of(buffer.freeze())
    }

    fn post(&self, to: usize, message: Tensor) -> Result<(), GroupError> {
        let peer = self.peer(to)?;
        let key = &self.group.lane(&self.call).key;
        if let Some(contact) = self.contacts().get_mut(to) {
            contact.has_posted = true;
        }
        self.group.step.to(peer).send(key, message).map_err(|error| self.failed(to, error))
    }

    /// The next note of `from`. Polls for it only if this rank `may_look`.
    async fn next_note(&self, from: usize, may_look: bool) -> Result<EagerContent, GroupError> {
        let notes = self.channel(from).await?;
        let _awaited = Awaited::begin(self, from);
        let note = match self.taken_of(from) {
            Some(note) => note,
            None => self.await_note(notes, may_look).await.map_err(|error| self.failed(from, error))?,
        };
        self.has_come(from);
        match decode_end(&note) {
            Some(status) => Err(GroupError::of_status(&self.call, from, status)),
            None => Ok(note),
        }
    }

    /// The next content of `from` that travels as a value.
    async fn next(&self, from: usize) -> Result<Tensor, GroupError> {
        let peer = self.peer(from)?;
        let _awaited = Awaited::begin(self, from);
        // The call's own limit is over first. Its error lists everything that was awaited.
        let key = &self.group.lane(&self.call).key;
        let receive = self.group.step.from(peer).recv(key).timeout(self.limit.saturating_mul(2));
        let received =
            receive.sharing(Sharing::View).beside().await.map_err(|error| self.failed(from, error))?;
        self.has_come(from);
        Ok(received)
    }

    fn peer(&self, rank: usize) -> Result<&tensorwire_rendezvous::Peer, GroupError> {
        self.group.peers.get(rank).ok_or_else(|| GroupError::no_such_rank("rank", rank, self.size()))
    }

    /// Compares the call header of a message with this rank's call. `length` bytes must follow it.
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
        match (error, self.group.over.get()) {
            // In a process that was stopped, this limit and the call's may both be over.
            (WorkerError::DeadlineExceeded { .. }, _) => self.timed_out(),
            (WorkerError::Aborted { .. }, Some(over)) => after(over),
            (error, _) => GroupError::of_message(&self.call, rank, error),
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

    fn is_awaited(&self, rank: usize) -> bool {
        self.contacts().get(rank).is_some_and(|contact| contact.awaited > 0)
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

/// A message with these bytes.
pub(crate) fn message_of(bytes: Buf) -> Result<Tensor, GroupError> {
    let length = bytes.len() as u64;
    Ok(Tensor::shared(bytes, DataType::U8, &[length])?)
}

/// The error of a call in a group that is already over.
pub(super) fn after(over: &GroupError) -> GroupError {
    match over {
        GroupError::Over { .. } => over.clone(),
        first => GroupError::Over { rank: first.origin(), why: first.to_string() },
    }
}

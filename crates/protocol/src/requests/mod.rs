//! The receiver's table of requests. It holds granted memory from allocation until there is evidence that the grant is over.

mod arrivals;
mod entry;
mod given_up;
mod metadata_cache;
mod stash;
mod subscribed;
mod subscription;
#[cfg(test)]
mod tests;

use std::{collections::VecDeque, task::Waker};

use crate::{
    Agreed, LentEnd, Metadata, RequestIndex, Status, StepId, TensorRequest, Waiting, Want,
    after::After,
    limits::{METADATA_CACHE_MAX, PULLS_MAX, STASH_MAX},
    queue::WaitQueue,
};
pub(crate) use arrivals::{Arrived, ArrivedResult};
use entry::{RequestEntry, RequestPhase, StoredAnswer, Version};
pub use metadata_cache::MetadataCache;
use stash::Stash;
pub(crate) use stash::{Check, Content, Landed, StepKey};
pub(crate) use subscribed::{Needed, SequencedValue};

/// What the peer answered.
#[derive(Debug)]
pub(crate) enum Reply<L> {
    /// A content has landed, with metadata that the request named or META_DATA_RESPONSE announced.
    Content(Landed<L>),
    /// The value has other metadata.
    MetaDataResponse(Metadata),
    /// There is no value.
    ErrorStatus(Status),
}

#[derive(Debug)]
struct Slot<L> {
    generation: u32,
    entry: Option<RequestEntry<L>>,
}

/// Requests of this side, at most as many as agreed.
#[derive(Debug)]
pub(crate) struct Requests<L> {
    agreed: Agreed,
    capacity: u32,
    slots: Vec<Slot<L>>,
    free: Vec<u32>,
    /// Slots whose CANCEL is owed, each once.
    cancels: VecDeque<u32>,
    /// Slots whose memory is to be taken back, each once.
    returns: VecDeque<u32>,
    /// Subscriptions that owe BUFFER_RESPONSE or BUFFER_IDLE, each once.
    owed_buffers: VecDeque<RequestIndex>,
    /// The receives that wait for a free entry.
    pub(crate) queue: WaitQueue,
    pub(crate) cache: MetadataCache,
    /// Contents of receives that were given up.
    pub(crate) stash: Stash<L>,
    /// Entries for which it is not known yet whether a content comes.
    unresolved: usize,
    /// Steps of contents outside the table that may come back: values whose call waits for others, or that are validated.
    held: Vec<StepId>,
    /// Whether several requests were outstanding at once since the table was last empty.
    has_several: bool,
    /// The value of `has_several` when the table was last empty.
    had_several: bool,
    opened: u64,
    landed: u64,
}

impl<L> Requests<L> {
    pub(crate) fn new(agreed: Agreed) -> Self {
        Self {
            agreed,
            capacity: agreed.requests_max,
            slots: Vec::new(),
            free: Vec::new(),
            cancels: VecDeque::new(),
            returns: VecDeque::new(),
            owed_buffers: VecDeque::new(),
            queue: WaitQueue::default(),
            cache: MetadataCache::new(METADATA_CACHE_MAX, agreed.known_max as usize),
            stash: Stash::new(),
            unresolved: 0,
            held: Vec::new(),
            has_several: false,
            had_several: false,
            opened: 0,
            landed: 0,
        }
    }

    /// Wakes the first receive that waits for an entry, if there is one now.
    pub(crate) fn wake_next(&mut self, after: &mut After<L>) {
        if !self.queue.is_empty() && self.has_room() {
            after.wake(self.queue.take_first());
        }
    }

    /// Whether another request may be outstanding.
    pub(crate) fn has_room(&self) -> bool {
        self.outstanding() < self.capacity as usize
    }

    /// Whether another request that the peer has asked for may be outstanding.
    pub(crate) fn has_room_for_pull(&self) -> bool {
        self.outstanding() < (self.capacity + PULLS_MAX) as usize
    }

    fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The number of held contents, if it is so large that no request of a step may be added, because its content might have to be
    /// held, too. Waiting would not help: perhaps no receive ever takes the held contents.
    pub(crate) fn stash_in_excess(&self) -> Option<usize> {
        Some(self.stash.len()).filter(|&stashed| stashed >= STASH_MAX)
    }

    /// Whether it is not known yet if a content comes for a receive of `step_key` that was given up.
    pub(crate) fn is_unresolved(&self, step_key: &StepKey) -> bool {
        let entries = || self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        self.unresolved > 0
            && entries().any(|entry| entry.is_unresolved && entry.step_key.as_ref() == Some(step_key))
    }

    /// The requests that the peer has not answered and that a receive awaits.
    pub(crate) fn waiting(&self) -> Waiting {
        let entries = self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        Waiting::of(entries.filter(|entry| entry.is_waiting()).map(|entry| entry.number))
    }

    /// Entries in use.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A new request that the peer has asked for, unless as many as may be are outstanding.
    pub(crate) fn open_pull(&mut self) -> Option<RequestIndex> {
        if self.has_room_for_pull() { self.add(None) } else { None }
    }

    /// A new request, unless as many as agreed are outstanding.
    pub(crate) fn open(&mut self, step_key: Option<StepKey>) -> Option<RequestIndex> {
        if self.has_room() { self.add(step_key) } else { None }
    }

    fn add(&mut self, step_key: Option<StepKey>) -> Option<RequestIndex> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.grow()?,
        };
        let outstanding = self.outstanding();
        if outstanding == 1 {
            self.had_several = self.has_several;
        }
        self.has_several = outstanding > 1;
        self.stash.reserve(outstanding + self.held.len());
        self.opened += 1;
        let opened = self.slots.get_mut(slot as usize)?;
        opened.entry = Some(RequestEntry::new(self.opened, step_key));
        Some(RequestIndex::new(slot, opened.generation))
    }

    fn grow(&mut self) -> Option<u32> {
        let slot = u32::try_from(self.slots.len()).ok().filter(|&slot| slot < self.capacity + PULLS_MAX)?;
        self.slots.push(Slot { generation: 0, entry: None });
        // Reserves room for every slot in each queue, so that a drop need not allocate.
        let slots = self.slots.len();
        self.free.reserve(slots - self.free.len());
        self.cancels.reserve(slots - self.cancels.len());
        self.returns.reserve(slots - self.returns.len());
        Some(slot)
    }

    fn entry(&mut self, index: RequestIndex) -> Option<&mut RequestEntry<L>> {
        let slot = self.slots.get_mut(index.slot())?;
        if slot.generation == index.generation() { slot.entry.as_mut() } else { None }
    }

    /// Frees a slot whose entry is not needed any more.
    fn free_finished(&mut self, slot: usize) {
        let Some(step_key) = self.slots.get_mut(slot) else { return };
        if step_key.entry.as_ref().is_some_and(RequestEntry::is_finished) {
            step_key.entry = None;
            step_key.generation = RequestIndex::generation_after(step_key.generation);
            self.free.push(slot as u32);
        }
    }

    /// Stores memory for the request. The peer does not know of it yet.
    pub(crate) fn store_memory(&mut self, index: RequestIndex, lent: L) {
        if let Some(entry) = self.entry(index) {
            entry.end = Some(LentEnd::NeverSent);
            entry.lent = Some(lent);
        }
    }

    /// TENSOR_REQUEST is being posted.
    pub(crate) fn asked(&mut self, request: &TensorRequest) {
        let Some(entry) = self.entry(request.index) else { return };
        if let Want::Each(_) = request.want {
            entry.phase = RequestPhase::Subscribed;
            return;
        }
        let known = if request.want == Want::Eager { None } else { Some(request.known.clone()) };
        entry.phase = RequestPhase::Asked { known, is_view: request.want == Want::View };
        entry.version = if request.scope.is_versioned() { Version::Wanted } else { Version::Unwanted };
        entry.end = None;
    }

    /// TENSOR_RE_REQUEST is being posted.
    pub(crate) fn asked_again(&mut self, index: RequestIndex) {
        if let Some(entry) = self.entry(index)
            && let RequestPhase::Described { metadata } = &entry.phase
        {
            entry.phase = RequestPhase::ReAsked { metadata: metadata.clone() };
            entry.end = None;
        }
    }

    /// Takes the peer's answer, if it has come.
    pub(crate) fn take_reply(&mut self, index: RequestIndex) -> Option<Reply<L>> {
        let entry = self.entry(index)?;
        if let Some(given) = entry.given.take() {
            return Some(Reply::Content(given));
        }
        Some(match entry.reply.take()? {
            StoredAnswer::Content { number, metadata, eager, check } => {
                Reply::Content(entry.landed(number, metadata, eager, check))
            }
            StoredAnswer::MetaDataResponse(metadata) => Reply::MetaDataResponse(metadata),
            StoredAnswer::ErrorStatus(status) => Reply::ErrorStatus(status),
        })
    }

    /// The version of the request's value, if VERSION came.
    pub(crate) fn version(&mut self, index: RequestIndex) -> Option<u64> {
        match self.entry(index)?.version {
            Version::Known(version) => Some(version),
            Version::Wanted | Version::Unwanted => None,
        }
    }

    /// Stores `waker` for the connection's end. Returns the waker that it replaces.
    pub(crate) fn store_waker(&mut self, index: RequestIndex, waker: &Waker) -> Option<Waker> {
        self.hand_over_waker(index, waker.clone())
    }

    /// As [`store_waker`](Self::store_waker), with a waker that was left elsewhere before.
    pub(crate) fn hand_over_waker(&mut self, index: RequestIndex, waker: Waker) -> Option<Waker> {
        self.entry(index)?.waker.replace(waker)
    }

    /// Whether META_DATA_RESPONSE came and TENSOR_RE_REQUEST is due.
    pub(crate) fn is_described(&mut self, index: RequestIndex) -> bool {
        self.entry(index).is_some_and(|entry| matches!(entry.phase, RequestPhase::Described { .. }))
    }

    /// Whether the task that waits for a reply may poll for it: there is no other request, and no reply has come. After several
    /// requests at once, the same task usually makes further ones, which would wait while it polls.
    pub(crate) fn may_help(&mut self, index: RequestIndex) -> bool {
        let is_alone = self.slots.len() - self.free.len() == 1 && !self.had_several;
        is_alone && self.entry(index).is_some_and(|entry| entry.given.is_none() && entry.reply.is_none())
    }

    /// Takes memory whose grant has ended.
    pub(crate) fn take_ended(&mut self, index: RequestIndex) -> Option<(L, LentEnd)> {
        self.entry(index)?.take_ended()
    }

    /// Takes memory that a returned content did not need. Another content may still be in it.
    pub(crate) fn take_unneeded(&mut self, index: RequestIndex) -> Option<(L, LentEnd)> {
        let entry = self.entry(index)?;
        if entry.reply.is_some() { None } else { entry.take_ended() }
    }

    /// The content of another receive that was assigned to this one, if any.
    pub(crate) fn take_given(&mut self, index: RequestIndex) -> Option<Landed<L>> {
        self.entry(index)?.given.take()
    }

    /// Whether another receive's content was assigned to this one.
    pub(crate) fn is_given(&mut self, index: RequestIndex) -> bool {
        let has_arrived = |entry: &RequestEntry<L>| {
            entry.subscribed.as_ref().is_some_and(|subscribed| subscribed.has_arrived())
        };
        self.entry(index).is_some_and(|entry| entry.given.is_some() || has_arrived(entry))
    }

    /// Whether a value was announced to a receive that has not ended.
    pub(crate) fn is_transferring(&self) -> bool {
        let entries = self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        let is_announced = |phase: &RequestPhase| {
            matches!(
                phase,
                RequestPhase::Described { .. } | RequestPhase::Promised { .. } | RequestPhase::ReAsked { .. }
            )
        };
        let has_view = |entry: &RequestEntry<L>| {
            entry.subscribed.as_ref().is_some_and(|subscribed| subscribed.is_announced())
        };
        entries.filter(|entry| entry.is_awaited).any(|entry| is_announced(&entry.phase) || has_view(entry))
    }

    /// Whether no request must be answered on this connection: those that are under way are for published values, none of which is on its
    /// way yet. A subscription would lose the values that are.
    pub(crate) fn may_move(&self) -> bool {
        let mut entries = self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        let has_none_of_steps = self.queue.is_empty() && self.held.is_empty() && self.stash.is_unused();
        let may_move = |entry: &RequestEntry<L>| entry.step_key.is_none() && entry.subscribed.is_none();
        has_none_of_steps && !self.is_transferring() && entries.all(may_move)
    }

    /// Steps that have a request under way here, or a content that was not returned yet: one that waits for its receive, or is
    /// [held](crate::ReceivedGuard).
    pub(crate) fn steps(&self) -> impl Iterator<Item = StepId> {
        let entries = self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        let sent =
            entries.filter(|entry| !matches!(entry.phase, RequestPhase::Unsent) && !entry.is_discarded);
        sent.filter_map(|entry| entry.step_key.as_ref())
            .map(|step_key| step_key.step)
            .chain(self.stash.steps())
            .chain(self.held.iter().copied())
    }

    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        let entries = self.slots.iter_mut().filter_map(|step_key| step_key.entry.as_mut());
        let waiting = entries.filter_map(|entry| entry.waker.take());
        waiting.chain(self.stash.wakers()).chain(self.queue.wakers())
    }
}

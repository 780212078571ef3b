//! The receiver's table of requests: a home for lent memory from allocation to evidence.

use std::{
    collections::VecDeque,
    task::{Poll, Waker},
};

use crate::{LentEnd, Metadata, PeerMisbehaved, RequestIndex, Status};

/// What the peer answered.
#[derive(Debug)]
pub(crate) enum Reply {
    /// The content has landed; it is what the request believed, or what META_DATA_RESPONSE said.
    Content(Metadata),
    /// The value is something else.
    MetaDataResponse(Metadata),
    /// There is no value.
    ErrorStatus(Status),
}

/// How far the exchange with the peer has come.
///
/// ```text
/// Unsent ──TENSOR_REQUEST──▶ Asked ──META_DATA_RESPONSE──▶ Told ──TENSOR_RE_REQUEST──▶ ReAsked
///                              │                             │                            │
///                              └──content or ERROR_STATUS────┴──ERROR_STATUS──────────────┴──▶ Answered
/// ```
#[derive(Debug)]
enum Phase {
    /// Nothing was posted.
    Unsent,
    /// TENSOR_REQUEST was posted. Content is a legal answer if the request said what it expects.
    Asked { known: Option<Metadata> },
    /// META_DATA_RESPONSE came.
    Told,
    /// TENSOR_RE_REQUEST was posted.
    ReAsked { metadata: Metadata },
    /// Content or ERROR_STATUS came.
    Answered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cancel {
    /// None was needed so far.
    None,
    /// In the queue of those to send.
    Owed,
    /// Posted. The entry stays until its CANCEL_ACK, so that entries bound what the peer owes.
    Sent,
    /// CANCEL_ACK came.
    Acknowledged,
}

#[derive(Debug)]
struct Entry<L> {
    phase: Phase,
    cancel: Cancel,
    /// The receive future is still there.
    is_awaited: bool,
    /// In the queue of those whose memory goes back.
    is_returning: bool,
    lent: Option<L>,
    /// Why `lent` may be taken back; `None` while the peer may write it.
    end: Option<LentEnd>,
    reply: Option<Reply>,
    waker: Option<Waker>,
}

impl<L> Entry<L> {
    fn new() -> Self {
        Self {
            phase: Phase::Unsent,
            cancel: Cancel::None,
            is_awaited: true,
            is_returning: false,
            lent: None,
            end: None,
            reply: None,
            waker: None,
        }
    }

    /// Whether nobody needs the entry any more.
    fn is_finished(&self) -> bool {
        let settled = match self.cancel {
            Cancel::None => matches!(self.phase, Phase::Unsent | Phase::Answered),
            Cancel::Owed | Cancel::Sent => false,
            Cancel::Acknowledged => true,
        };
        settled && !self.is_awaited && !self.is_returning && self.lent.is_none()
    }

    /// Takes the memory if the peer can no longer write it.
    fn take_ended(&mut self) -> Option<(L, LentEnd)> {
        let end = self.end?;
        self.lent.take().map(|lent| (lent, end))
    }

    /// The peer answered, which is the evidence `end`.
    fn answer(&mut self, reply: Reply, end: LentEnd) -> Arrived<L> {
        self.end = Some(end);
        if self.is_awaited {
            self.reply = Some(reply);
            return Arrived { wake: self.waker.take(), ..Arrived::HANDLED };
        }
        let returned = if self.is_returning { None } else { self.take_ended() };
        Arrived { returned, ..Arrived::HANDLED }
    }
}

#[derive(Debug)]
struct Slot<L> {
    generation: u32,
    entry: Option<Entry<L>>,
}

/// What an arrival did.
#[derive(Debug)]
pub(crate) struct Arrived<L> {
    /// Whom to wake.
    pub(crate) wake: Option<Waker>,
    /// Memory to take back.
    pub(crate) returned: Option<(L, LentEnd)>,
    /// The index is unknown or its request finished.
    pub(crate) is_ignored: bool,
}

impl<L> Arrived<L> {
    const HANDLED: Self = Self { wake: None, returned: None, is_ignored: false };
    const IGNORED: Self = Self { wake: None, returned: None, is_ignored: true };
}

type ArrivedResult<L> = Result<Arrived<L>, PeerMisbehaved>;

/// Requests of this end, at most as many as agreed.
#[derive(Debug)]
pub(crate) struct Requests<L> {
    capacity: u32,
    slots: Vec<Slot<L>>,
    free: Vec<u32>,
    /// Slots whose CANCEL is owed, each once.
    cancels: VecDeque<u32>,
    /// Slots whose memory is to be taken back, each once.
    returns: VecDeque<u32>,
}

impl<L> Requests<L> {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            capacity,
            slots: Vec::new(),
            free: Vec::new(),
            cancels: VecDeque::new(),
            returns: VecDeque::new(),
        }
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < self.capacity as usize
    }

    /// Entries in use.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A new request, unless as many as agreed are outstanding.
    pub(crate) fn open(&mut self) -> Option<RequestIndex> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.grow()?,
        };
        let place = self.slots.get_mut(slot as usize)?;
        place.entry = Some(Entry::new());
        Some(RequestIndex::new(slot, place.generation))
    }

    fn grow(&mut self) -> Option<u32> {
        let slot = u32::try_from(self.slots.len()).ok().filter(|&slot| slot < self.capacity)?;
        self.slots.push(Slot { generation: 0, entry: None });
        // Every slot has its place in each queue from now on, so that a drop need not allocate.
        let slots = self.slots.len();
        self.free.reserve(slots - self.free.len());
        self.cancels.reserve(slots - self.cancels.len());
        self.returns.reserve(slots - self.returns.len());
        Some(slot)
    }

    fn entry(&mut self, index: RequestIndex) -> Option<&mut Entry<L>> {
        let slot = self.slots.get_mut(index.slot())?;
        if slot.generation == index.generation() { slot.entry.as_mut() } else { None }
    }

    /// Frees a slot whose entry has no business left.
    fn free_finished(&mut self, slot: usize) {
        let Some(place) = self.slots.get_mut(slot) else { return };
        if place.entry.as_ref().is_some_and(Entry::is_finished) {
            place.entry = None;
            place.generation = RequestIndex::generation_after(place.generation);
            self.free.push(slot as u32);
        }
    }

    /// Keeps memory for the request; the peer does not know of it yet.
    pub(crate) fn keep(&mut self, index: RequestIndex, lent: L) {
        if let Some(entry) = self.entry(index) {
            entry.end = Some(LentEnd::NeverSent);
            entry.lent = Some(lent);
        }
    }

    /// TENSOR_REQUEST is being posted.
    pub(crate) fn asked(&mut self, index: RequestIndex, known: Option<Metadata>) {
        if let Some(entry) = self.entry(index) {
            entry.phase = Phase::Asked { known };
            entry.end = None;
        }
    }

    /// TENSOR_RE_REQUEST is being posted.
    pub(crate) fn asked_again(&mut self, index: RequestIndex, metadata: Metadata) {
        if let Some(entry) = self.entry(index) {
            entry.phase = Phase::ReAsked { metadata };
            entry.end = None;
        }
    }

    /// What the peer answered, if it has; else `waker` is kept. Gives the waker that it replaces.
    pub(crate) fn poll_reply(&mut self, index: RequestIndex, waker: &Waker) -> (Poll<Reply>, Option<Waker>) {
        let Some(entry) = self.entry(index) else { return (Poll::Pending, None) };
        match entry.reply.take() {
            Some(reply) => (Poll::Ready(reply), None),
            None => (Poll::Pending, entry.waker.replace(waker.clone())),
        }
    }

    /// Keeps `waker` for the connection's end. Gives the waker that it replaces.
    pub(crate) fn keep_waker(&mut self, index: RequestIndex, waker: &Waker) -> Option<Waker> {
        self.entry(index)?.waker.replace(waker.clone())
    }

    /// Whether META_DATA_RESPONSE came and TENSOR_RE_REQUEST is due.
    pub(crate) fn is_told(&mut self, index: RequestIndex) -> bool {
        self.entry(index).is_some_and(|entry| matches!(entry.phase, Phase::Told))
    }

    /// Takes memory whose loan has ended.
    pub(crate) fn take_ended(&mut self, index: RequestIndex) -> Option<(L, LentEnd)> {
        self.entry(index)?.take_ended()
    }

    /// Content of `length` bytes has landed.
    pub(crate) fn content(&mut self, index: RequestIndex, length: u64) -> ArrivedResult<L> {
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        let metadata = match &mut entry.phase {
            Phase::Asked { known } => known.take().ok_or(PeerMisbehaved::ContentUnasked)?,
            Phase::ReAsked { metadata } => metadata.clone(),
            Phase::Answered => return Ok(Arrived::IGNORED),
            Phase::Unsent | Phase::Told => return Err(PeerMisbehaved::ContentUnasked),
        };
        if metadata.byte_length != length {
            return Err(PeerMisbehaved::ContentLength);
        }
        entry.phase = Phase::Answered;
        let arrived = entry.answer(Reply::Content(metadata), LentEnd::Content);
        self.free_finished(index.slot());
        Ok(arrived)
    }

    /// META_DATA_RESPONSE came.
    pub(crate) fn meta_data_response(&mut self, index: RequestIndex, metadata: Metadata) -> ArrivedResult<L> {
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        match entry.phase {
            Phase::Asked { .. } => {}
            Phase::Answered => return Ok(Arrived::IGNORED),
            Phase::Unsent => return Err(PeerMisbehaved::AnswerUnasked),
            Phase::Told | Phase::ReAsked { .. } => return Err(PeerMisbehaved::MetaDataTwice),
        }
        entry.phase = Phase::Told;
        Ok(entry.answer(Reply::MetaDataResponse(metadata), LentEnd::MetaDataResponse))
    }

    /// ERROR_STATUS came.
    pub(crate) fn error_status(&mut self, index: RequestIndex, status: Status) -> ArrivedResult<L> {
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        match entry.phase {
            Phase::Asked { .. } | Phase::Told | Phase::ReAsked { .. } => {}
            Phase::Answered => return Ok(Arrived::IGNORED),
            Phase::Unsent => return Err(PeerMisbehaved::AnswerUnasked),
        }
        entry.phase = Phase::Answered;
        let arrived = entry.answer(Reply::ErrorStatus(status), LentEnd::ErrorStatus);
        self.free_finished(index.slot());
        Ok(arrived)
    }

    /// CANCEL_ACK came.
    pub(crate) fn cancel_ack(&mut self, index: RequestIndex) -> ArrivedResult<L> {
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        if entry.cancel != Cancel::Sent {
            return Err(PeerMisbehaved::CancelAckUnasked);
        }
        entry.cancel = Cancel::Acknowledged;
        entry.end.get_or_insert(LentEnd::CancelAck);
        let returned = if entry.is_returning { None } else { entry.take_ended() };
        self.free_finished(index.slot());
        Ok(Arrived { returned, ..Arrived::HANDLED })
    }

    /// The receive future is gone. Queues what is to be done; allocates nothing. Gives the future's waker.
    pub(crate) fn release(&mut self, index: RequestIndex) -> Option<Waker> {
        let entry = self.entry(index)?;
        entry.is_awaited = false;
        entry.reply = None;
        let waker = entry.waker.take();
        #[cfg(feature = "planted-bugs")]
        if crate::planted::is_planted(crate::planted::Bug::GrantFreedEarly) {
            entry.end.get_or_insert(LentEnd::CancelAck);
        }
        let is_returning = entry.lent.is_some() && entry.end.is_some();
        entry.is_returning = is_returning;
        let is_owed = !matches!(entry.phase, Phase::Unsent | Phase::Answered);
        if is_owed {
            entry.cancel = Cancel::Owed;
        }
        let slot = index.slot();
        if is_returning {
            self.returns.push_back(slot as u32);
        }
        if is_owed {
            self.cancels.push_back(slot as u32);
        }
        self.free_finished(slot);
        waker
    }

    pub(crate) fn has_returns(&self) -> bool {
        !self.returns.is_empty()
    }

    /// The next memory to take back.
    pub(crate) fn next_return(&mut self) -> Option<(L, LentEnd)> {
        while let Some(slot) = self.returns.pop_front() {
            let entry = self.slots.get_mut(slot as usize).and_then(|place| place.entry.as_mut());
            let returned = entry.and_then(|entry| {
                entry.is_returning = false;
                entry.take_ended()
            });
            self.free_finished(slot as usize);
            if returned.is_some() {
                return returned;
            }
        }
        None
    }

    pub(crate) fn has_cancels(&self) -> bool {
        !self.cancels.is_empty()
    }

    /// The next request to cancel. Those that were answered meanwhile need none.
    pub(crate) fn next_cancel(&mut self) -> Option<RequestIndex> {
        while let Some(&slot) = self.cancels.front() {
            let place = self.slots.get_mut(slot as usize)?;
            if let Some(entry) = &mut place.entry {
                if !matches!(entry.phase, Phase::Answered) {
                    return Some(RequestIndex::new(slot, place.generation));
                }
                entry.cancel = Cancel::None;
            }
            self.cancels.pop_front();
            self.free_finished(slot as usize);
        }
        None
    }

    /// The CANCEL that [`next_cancel`](Self::next_cancel) named is being posted.
    pub(crate) fn cancel_posted(&mut self, index: RequestIndex) {
        self.cancels.pop_front();
        if let Some(entry) = self.entry(index) {
            entry.cancel = Cancel::Sent;
        }
    }

    /// Takes all memory that a peer might have written, and all that nobody awaits.
    pub(crate) fn drain(&mut self) -> Vec<L> {
        let entries = self.slots.iter_mut().filter_map(|place| place.entry.as_mut());
        let over = entries.filter(|entry| !entry.is_awaited || entry.end.is_none());
        over.filter_map(|entry| entry.lent.take()).collect()
    }

    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        let entries = self.slots.iter_mut().filter_map(|place| place.entry.as_mut());
        entries.filter_map(|entry| entry.waker.take())
    }
}

#[cfg(test)]
mod tests;

//! The receiver's table of requests. It holds granted memory from allocation until there is evidence that the grant is over.

mod company;
mod entry;
mod of_step;
mod stash;
#[cfg(test)]
mod tests;
mod version;

use std::{collections::VecDeque, sync::Arc, task::Waker};

use crate::{
    Agreed, EagerContent, LentEnd, Metadata, PeerMisbehaved, RequestIndex, Status, StepId,
    limits::{RESULT_BYTES, STASH_MAX},
};
use company::Company;
use entry::{Cancel, RequestEntry, RequestPhase, StoredAnswer, Version};
use stash::Stash;
pub(crate) use stash::{Check, Content, Landed, StepKey};

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

/// The effects of an arrival.
#[derive(Debug)]
pub(crate) struct Arrived<L> {
    /// Whom to wake.
    pub(crate) wake: Option<Waker>,
    /// The first receive in line for a key for which it is now known whether a content comes.
    pub(crate) next: Option<Waker>,
    /// Memory to take back.
    pub(crate) returned: Option<(L, LentEnd)>,
    /// The index is unknown, or its request has finished.
    pub(crate) is_ignored: bool,
    /// Bytes of the content that was written or lent.
    pub(crate) bytes: u64,
}

impl<L> Arrived<L> {
    const HANDLED: Self = Self { wake: None, next: None, returned: None, is_ignored: false, bytes: 0 };
    const IGNORED: Self = Self { wake: None, next: None, returned: None, is_ignored: true, bytes: 0 };
}

type ArrivedResult<L> = Result<Arrived<L>, PeerMisbehaved>;

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
    /// Contents of receives that were given up.
    pub(crate) stash: Stash<L>,
    /// Entries for which it is not known yet whether a content comes.
    unresolved: usize,
    /// Steps of contents outside the table that may come back: values whose call waits for others, or that are validated.
    held: Vec<StepId>,
    company: Company,
    opened: u64,
    landed: u64,
}

/// The wakers that a receive which was given up concerns.
#[derive(Debug, Default)]
pub(crate) struct Released {
    /// The future's own waker, to be dropped.
    pub(crate) own: Option<Waker>,
    /// To be woken.
    pub(crate) wake: [Option<Waker>; 2],
}

impl Released {
    pub(crate) fn wake(self) {
        drop(self.own);
        let [given, content] = self.wake;
        given.into_iter().for_each(Waker::wake);
        content.into_iter().for_each(Waker::wake);
    }
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
            stash: Stash::new(),
            unresolved: 0,
            held: Vec::new(),
            company: Company::default(),
            opened: 0,
            landed: 0,
        }
    }

    /// Whether another request may be outstanding.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < self.capacity as usize
    }

    /// How many contents are held, if these are so many that no request of a step may be added, because its content might
    /// have to be held too. Waiting would not help: perhaps no receive ever asks for them.
    pub(crate) fn kept_in_excess(&self) -> Option<usize> {
        Some(self.stash.len()).filter(|&kept| kept >= STASH_MAX)
    }

    /// Whether it is not known yet if a content comes for a receive of `step_key` that was given up.
    pub(crate) fn is_unresolved(&self, step_key: &StepKey) -> bool {
        let entries = || self.slots.iter().filter_map(|slot| slot.entry.as_ref());
        self.unresolved > 0
            && entries().any(|entry| entry.is_unresolved && entry.step_key.as_ref() == Some(step_key))
    }

    /// Entries in use.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A new request, unless as many as agreed are outstanding.
    pub(crate) fn open(&mut self, step_key: Option<StepKey>) -> Option<RequestIndex> {
        if !self.has_room() {
            return None;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.grow()?,
        };
        let outstanding = self.slots.len() - self.free.len();
        self.company.opened(outstanding);
        self.stash.reserve(outstanding + self.held.len());
        self.opened += 1;
        let opened = self.slots.get_mut(slot as usize)?;
        opened.entry = Some(RequestEntry::new(self.opened, step_key));
        Some(RequestIndex::new(slot, opened.generation))
    }

    fn grow(&mut self) -> Option<u32> {
        let slot = u32::try_from(self.slots.len()).ok().filter(|&slot| slot < self.capacity)?;
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
    pub(crate) fn keep(&mut self, index: RequestIndex, lent: L) {
        if let Some(entry) = self.entry(index) {
            entry.end = Some(LentEnd::NeverSent);
            entry.lent = Some(lent);
        }
    }

    /// TENSOR_REQUEST is being posted.
    pub(crate) fn asked(
        &mut self,
        index: RequestIndex,
        known: Option<Arc<[Metadata]>>,
        is_view: bool,
        is_versioned: bool,
    ) {
        if let Some(entry) = self.entry(index) {
            entry.phase = RequestPhase::Asked { known, is_view };
            entry.version = if is_versioned { Version::Wanted } else { Version::Unwanted };
            entry.end = None;
        }
    }

    /// TENSOR_RE_REQUEST is being posted.
    pub(crate) fn asked_again(&mut self, index: RequestIndex, metadata: Metadata) {
        if let Some(entry) = self.entry(index) {
            entry.phase = RequestPhase::ReAsked { metadata };
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

    /// Stores `waker` for the connection's end. Returns the waker that it replaces.
    pub(crate) fn keep_waker(&mut self, index: RequestIndex, waker: &Waker) -> Option<Waker> {
        self.leave_waker(index, waker.clone())
    }

    /// As [`keep_waker`](Self::keep_waker), with a waker that was left elsewhere before.
    pub(crate) fn leave_waker(&mut self, index: RequestIndex, waker: Waker) -> Option<Waker> {
        self.entry(index)?.waker.replace(waker)
    }

    /// Whether META_DATA_RESPONSE came and TENSOR_RE_REQUEST is due.
    pub(crate) fn is_told(&mut self, index: RequestIndex) -> bool {
        self.entry(index).is_some_and(|entry| matches!(entry.phase, RequestPhase::Described))
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

    /// Content of `length` bytes has landed, of the listed metadata number `which`.
    pub(crate) fn content(&mut self, index: RequestIndex, which: usize, length: u64) -> ArrivedResult<L> {
        let (tells_first, has_slots) = (self.agreed.tells_first(), self.agreed.has_result_slots());
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        entry.check_version()?;
        let metadata = match &mut entry.phase {
            RequestPhase::Asked { .. } if tells_first => return Err(PeerMisbehaved::ContentUnasked),
            RequestPhase::Asked { known, is_view } => {
                let named = known.as_ref().and_then(|known| known.get(which));
                let written = named.filter(|metadata| !*is_view || metadata.byte_length == 0);
                written.cloned().ok_or(PeerMisbehaved::ContentUnasked)?
            }
            RequestPhase::ReAsked { metadata } if which == 0 => metadata.clone(),
            RequestPhase::ReAsked { .. } => return Err(PeerMisbehaved::ContentUnasked),
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent | RequestPhase::Described | RequestPhase::Promised { .. } => {
                return Err(PeerMisbehaved::ContentUnasked);
            }
        };
        let has_slot = has_slots && metadata.byte_length > 0;
        let is_with_result = has_slot && length == metadata.byte_length.saturating_add(RESULT_BYTES as u64);
        if metadata.byte_length != length && !is_with_result {
            return Err(PeerMisbehaved::ContentLength);
        }
        Ok(self.landed(index, metadata, has_slot))
    }

    /// A loan of `length` bytes has come, of the listed metadata number `which`. Takes it out of `lent` if it was asked for.
    pub(crate) fn loan(
        &mut self,
        index: RequestIndex,
        which: usize,
        length: u64,
        lent: &mut Option<L>,
    ) -> ArrivedResult<L> {
        let is_validated = self.agreed.validation.is_on();
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        entry.check_version()?;
        let metadata = match &entry.phase {
            // The checksum of a loan comes before it, in META_DATA_RESPONSE.
            RequestPhase::Asked { .. } if is_validated => None,
            RequestPhase::Asked { known: Some(known), is_view: true } => known.get(which),
            RequestPhase::Promised { metadata } if which == 0 => Some(metadata),
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            _ => None,
        };
        let metadata = metadata.cloned().ok_or(PeerMisbehaved::LoanUnasked)?;
        if metadata.byte_length != length {
            return Err(PeerMisbehaved::ContentLength);
        }
        // A request for a view has no memory of its own.
        entry.lent = lent.take();
        Ok(self.landed(index, metadata, false))
    }

    /// The content of an open request is here.
    fn landed(&mut self, index: RequestIndex, metadata: Metadata, has_slot: bool) -> Arrived<L> {
        let mut check = if has_slot { Check::Slot } else { Check::None };
        if let Some(entry) = self.entry(index) {
            entry.phase = RequestPhase::Answered;
            check = entry.checksum.map_or(check, Check::InMessage);
        }
        self.landed += 1;
        let bytes = metadata.byte_length;
        let answer = StoredAnswer::Content { number: self.landed, metadata, eager: None, check };
        Arrived { bytes, ..self.answer(index, answer, LentEnd::Content) }
    }

    /// The peer answered, which is the evidence `end`.
    fn answer(&mut self, index: RequestIndex, answer: StoredAnswer, end: LentEnd) -> Arrived<L> {
        let Some(entry) = self.entry(index) else { return Arrived::IGNORED };
        entry.end = Some(end);
        let is_final = matches!(entry.phase, RequestPhase::Answered);
        entry.reply = Some(answer);
        if entry.is_awaited {
            return Arrived { wake: entry.waker.take(), ..Arrived::HANDLED };
        }
        let mut arrived = Arrived::HANDLED;
        let step_key = entry.step_key_to_keep();
        let landed = if entry.is_returning { None } else { entry.take_content() };
        entry.reply = None;
        match (step_key, landed) {
            (Some(step_key), Some(landed)) => {
                // Memory that an eager content left unused.
                arrived.returned = entry.take_ended();
                arrived.wake = self.stash_or_give(step_key, landed);
            }
            (None, Some(landed)) => arrived.returned = landed.returned().or_else(|| entry.take_ended()),
            (_, None) if entry.is_returning => {}
            (_, None) => arrived.returned = entry.take_ended(),
        }
        if is_final {
            arrived.next = self.resolve(index);
        }
        self.free_finished(index.slot());
        arrived
    }

    /// Gives a content of a receive that was given up to the oldest receive of its key, or holds it for the next one.
    /// Returns the waker to call; allocates nothing.
    pub(crate) fn stash_or_give(&mut self, step_key: StepKey, landed: Landed<L>) -> Option<Waker> {
        let entries = self.slots.iter_mut().filter_map(|slot| slot.entry.as_mut());
        let waits = |entry: &&mut RequestEntry<L>| {
            entry.is_awaited
                && entry.given.is_none()
                && !matches!(entry.reply, Some(StoredAnswer::Content { .. }))
                && entry.step_key.as_ref() == Some(&step_key)
        };
        if let Some(oldest) = entries.filter(waits).min_by_key(|entry| entry.number) {
            oldest.given = Some(landed);
            return oldest.waker.take();
        }
        let next = self.stash.first_in_line(&step_key);
        self.stash.put(step_key, landed);
        next
    }

    /// It is known now whether a content comes for a receive that was given up. Returns the waker that this concerns.
    fn resolve(&mut self, index: RequestIndex) -> Option<Waker> {
        let entry = self.entry(index)?;
        if !std::mem::take(&mut entry.is_unresolved) {
            return None;
        }
        let step_key = entry.step_key.clone();
        self.unresolved -= 1;
        step_key.and_then(|step_key| self.stash.first_in_line(&step_key))
    }

    /// META_DATA_RESPONSE came, perhaps with the content.
    pub(crate) fn meta_data_response(
        &mut self,
        index: RequestIndex,
        metadata: Metadata,
        content: Option<EagerContent>,
        checksum: Option<u64>,
    ) -> ArrivedResult<L> {
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        entry.check_version()?;
        match entry.phase {
            RequestPhase::Asked { .. } => {}
            // The announced loan has failed.
            RequestPhase::Promised { .. } if content.is_none() => {}
            RequestPhase::Promised { .. } => return Err(PeerMisbehaved::MetaDataTwice),
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent => return Err(PeerMisbehaved::AnswerUnasked),
            RequestPhase::Described | RequestPhase::ReAsked { .. } => {
                return Err(PeerMisbehaved::MetaDataTwice);
            }
        }
        entry.checksum = checksum;
        if content.is_some() {
            entry.phase = RequestPhase::Answered;
            self.landed += 1;
            let check = checksum.map_or(Check::None, Check::InMessage);
            let answer = StoredAnswer::Content { number: self.landed, metadata, eager: content, check };
            return Ok(self.answer(index, answer, LentEnd::MetaDataResponse));
        }
        entry.phase = RequestPhase::Described;
        Ok(self.answer(index, StoredAnswer::MetaDataResponse(metadata), LentEnd::MetaDataResponse))
    }

    /// META_DATA_RESPONSE came and announces a loan.
    pub(crate) fn loan_promised(
        &mut self,
        index: RequestIndex,
        metadata: Metadata,
        checksum: Option<u64>,
    ) -> ArrivedResult<L> {
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        entry.check_version()?;
        match entry.phase {
            RequestPhase::Asked { is_view: true, .. } => entry.phase = RequestPhase::Promised { metadata },
            RequestPhase::Asked { .. } => return Err(PeerMisbehaved::LoanUnasked),
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent => return Err(PeerMisbehaved::AnswerUnasked),
            RequestPhase::Described | RequestPhase::Promised { .. } | RequestPhase::ReAsked { .. } => {
                return Err(PeerMisbehaved::MetaDataTwice);
            }
        }
        entry.checksum = checksum;
        Ok(Arrived::HANDLED)
    }

    /// ERROR_STATUS came.
    pub(crate) fn error_status(&mut self, index: RequestIndex, status: Status) -> ArrivedResult<L> {
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        match entry.phase {
            RequestPhase::Asked { .. }
            | RequestPhase::Described
            | RequestPhase::Promised { .. }
            | RequestPhase::ReAsked { .. } => {}
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent => return Err(PeerMisbehaved::AnswerUnasked),
        }
        entry.phase = RequestPhase::Answered;
        Ok(self.answer(index, StoredAnswer::ErrorStatus(status), LentEnd::ErrorStatus))
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
        let next = self.resolve(index);
        self.free_finished(index.slot());
        Ok(Arrived { returned, next, ..Arrived::HANDLED })
    }

    /// The receive future was dropped. Queues its CANCEL and its memory, and holds a content that has come; allocates nothing.
    pub(crate) fn release(&mut self, index: RequestIndex) -> Released {
        let Some(entry) = self.entry(index) else { return Released::default() };
        entry.is_awaited = false;
        let own = entry.waker.take();
        if tensorwire_testpoints::planted!("a receive's memory is freed while the peer may write it") {
            entry.end.get_or_insert(LentEnd::CancelAck);
        }
        let wake = self.hold_contents(index);
        let Some(entry) = self.entry(index) else { return Released { own, wake } };
        entry.reply = None;
        let is_returning = entry.has_unwanted();
        entry.is_returning = is_returning;
        let is_owed = !matches!(entry.phase, RequestPhase::Unsent | RequestPhase::Answered);
        if is_owed {
            entry.cancel = Cancel::Owed;
            entry.is_unresolved = entry.step_key.is_some();
            self.unresolved += usize::from(entry.step_key.is_some());
        }
        self.queue_released(index.slot(), is_returning, is_owed);
        self.free_finished(index.slot());
        Released { own, wake }
    }

    fn queue_released(&mut self, slot: usize, is_returning: bool, is_owed: bool) {
        if is_returning {
            self.returns.push_back(slot as u32);
        }
        if is_owed {
            self.cancels.push_back(slot as u32);
        }
    }

    pub(crate) fn has_returns(&self) -> bool {
        !self.returns.is_empty()
    }

    /// The next memory to take back.
    pub(crate) fn next_return(&mut self) -> Option<(L, LentEnd)> {
        while let Some(slot) = self.returns.pop_front() {
            let entry = self.slots.get_mut(slot as usize).and_then(|step_key| step_key.entry.as_mut());
            let (returned, has_more) = entry.map_or((None, false), |entry| {
                let returned = entry.take_unwanted();
                entry.is_returning = entry.has_unwanted();
                (returned, entry.is_returning)
            });
            if has_more {
                self.returns.push_back(slot);
            }
            self.free_finished(slot as usize);
            if returned.is_some() {
                return returned;
            }
        }
        None
    }

    /// After the connection's end: the next memory to take back, including contents that were held.
    pub(crate) fn next_unwanted(&mut self) -> Option<(L, LentEnd)> {
        let returned = self.next_return();
        returned.or_else(|| std::iter::from_fn(|| self.stash.take_any()).find_map(Landed::returned))
    }

    pub(crate) fn has_cancels(&self) -> bool {
        !self.cancels.is_empty()
    }

    /// The next request to cancel. Requests that were answered meanwhile are skipped.
    pub(crate) fn next_cancel(&mut self) -> Option<RequestIndex> {
        while let Some(&slot) = self.cancels.front() {
            let at = self.slots.get_mut(slot as usize)?;
            if let Some(entry) = &mut at.entry {
                if !matches!(entry.phase, RequestPhase::Answered) {
                    return Some(RequestIndex::new(slot, at.generation));
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

    /// Takes all memory that a peer might have written, and all contents that no receive awaits.
    pub(crate) fn drain(&mut self) -> Vec<L> {
        let entries = self.slots.iter_mut().filter_map(|step_key| step_key.entry.as_mut());
        let over = entries.filter(|entry| !entry.is_awaited || entry.end.is_none());
        let lent = over.flat_map(|entry| {
            let given = if entry.is_awaited { None } else { entry.given.take() };
            [given.and_then(|landed| landed.content.lent()), entry.lent.take()].into_iter().flatten()
        });
        lent.chain(std::iter::from_fn(|| self.stash.take_any()).filter_map(|landed| landed.content.lent()))
            .collect()
    }

    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        let entries = self.slots.iter_mut().filter_map(|step_key| step_key.entry.as_mut());
        entries.filter_map(|entry| entry.waker.take()).chain(self.stash.wakers())
    }
}

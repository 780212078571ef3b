//! The sender's table of responses, and the replies it owes.

mod subscription;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasherDefault, Hasher},
    task::Waker,
};

pub(crate) use subscription::Room;
use subscription::Subscribed;

use crate::{
    Agreed, Code, Destination, ErrorStatus, Message, PeerMisbehaved, RequestIndex, Status, StepId,
    TensorRequest, Waiting, Want, limits::PULLS_MAX,
};

/// How many replies may be owed above the agreed number of requests before the peer is refused.
const OWED_SLACK: usize = 64;

/// The state of a response.
///
/// ```text
/// Waiting ──META_DATA_RESPONSE──▶ Described ──TENSOR_RE_REQUEST──▶ ReRequested
///    ├────────────────────content posted──────────────────────────────┼──▶ Writing
///    └────────────────────piece posted────────▶ Begun ◀───────────────┘       ▲
///                                                 └──────content posted───────┘
/// ```
///
/// A META_DATA_RESPONSE that announces a loan does not change the state.
#[derive(Debug, Clone, Copy)]
enum ResponsePhase {
    /// Waits for the value, or for its turn to be written.
    Waiting,
    /// META_DATA_RESPONSE was posted; the value has that many bytes.
    Described { bytes: u64 },
    /// TENSOR_RE_REQUEST came.
    ReRequested(Option<Destination>),
    /// Pieces of the content are being posted. The peer still waits, and may cancel.
    Begun,
    /// The content was posted. The peer may regard the request as finished.
    Writing,
    /// It is a subscription, which has states of its own.
    Subscribed,
}

#[derive(Debug)]
struct ResponseEntry {
    phase: ResponsePhase,
    /// Grows with every response of the connection.
    number: u64,
    /// `None` for published values.
    step: Option<StepId>,
    is_cancelled: bool,
    /// Boxed, because most requests are none.
    subscribed: Option<Box<Subscribed>>,
    waker: Option<Waker>,
}

impl ResponseEntry {
    /// Whether the peer still waits for a message or content.
    fn is_unanswered(&self) -> bool {
        self.is_cancelled || !matches!(self.phase, ResponsePhase::Writing)
    }
}

/// A reply whose response future is gone.
#[derive(Debug, Clone, Copy)]
enum Owed {
    CancelAck(RequestIndex),
    /// The response future was dropped.
    GivenUp(RequestIndex),
}

/// What a response waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResponseState {
    /// Neither of the states below.
    Open,
    /// The peer has named a destination.
    ReRequested(Option<Destination>),
    /// The peer has sent CANCEL.
    Cancelled,
}

/// Hashes request indices. A peer chooses its own, but their number is bounded. Maps with it have the same order in every
/// run.
#[derive(Debug, Default)]
struct IndexHasher(u64);

/// The hasher of maps by request index.
type IndexHash = BuildHasherDefault<IndexHasher>;

impl Hasher for IndexHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(byte.into()));
    }

    /// Multiplies by the golden ratio, because a map uses the highest bits of a hash and the lowest.
    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

/// Requests of the peer that are being answered.
#[derive(Debug)]
pub(crate) struct Responses {
    /// Most unanswered requests and cancels together.
    unanswered_max: usize,
    has_result_slots: bool,
    entries: HashMap<RequestIndex, ResponseEntry, IndexHash>,
    /// Responses begun so far.
    opened: u64,
    owed: VecDeque<Owed>,
    /// Entries that the peer still waits for, and owed replies.
    unanswered: usize,
    /// Values of steps that were written and that the peer may not have taken in yet, oldest first.
    written: VecDeque<Written>,
}

/// A value that was written and that the peer may not have read yet.
#[derive(Debug)]
struct Written {
    step: StepId,
    /// The peer has read the value once it has returned this many immediates. `None` in mode original, where the peer has read it
    /// once it uses the slot again.
    returned: Option<u64>,
    slot: usize,
}

impl Responses {
    pub(crate) fn new(agreed: Agreed) -> Self {
        Self {
            unanswered_max: (agreed.requests_max + PULLS_MAX) as usize + OWED_SLACK,
            has_result_slots: agreed.has_result_slots(),
            entries: HashMap::default(),
            opened: 0,
            owed: VecDeque::new(),
            unanswered: 0,
            written: VecDeque::new(),
        }
    }

    /// Counts one more reply that the peer waits for.
    fn count_unanswered(&mut self) -> Result<(), PeerMisbehaved> {
        if self.unanswered >= self.unanswered_max {
            return Err(PeerMisbehaved::Flood);
        }
        self.unanswered += 1;
        // Reserves room for the reply, so that a drop need not allocate.
        self.owed.reserve(self.unanswered.saturating_sub(self.owed.len()));
        Ok(())
    }

    /// TENSOR_REQUEST came.
    pub(crate) fn open(&mut self, request: &TensorRequest) -> Result<(), PeerMisbehaved> {
        let &TensorRequest { index, scope, want, .. } = request;
        if let Want::Write(destination) = want {
            self.check_result_slot(destination)?;
        }
        if self.entries.contains_key(&index) {
            return Err(PeerMisbehaved::DuplicateRequest);
        }
        self.count_unanswered()?;
        if self.written.front().is_some_and(|oldest| oldest.returned.is_none()) {
            self.written.retain(|written| written.slot != index.slot());
        }
        let (phase, subscribed) = match want {
            Want::Each(terms) => (ResponsePhase::Subscribed, Some(Box::new(Subscribed::new(terms)))),
            _ => (ResponsePhase::Waiting, None),
        };
        self.opened += 1;
        let (number, step) = (self.opened, scope.step());
        let entry = ResponseEntry { phase, number, step, is_cancelled: false, subscribed, waker: None };
        self.entries.insert(index, entry);
        Ok(())
    }

    /// Whether a destination names a result slot exactly if that was agreed.
    fn check_result_slot(&self, destination: Option<Destination>) -> Result<(), PeerMisbehaved> {
        let fits =
            destination.is_none_or(|destination| destination.result.is_some() == self.has_result_slots);
        if fits { Ok(()) } else { Err(PeerMisbehaved::ResultSlotUnfit) }
    }

    /// The requests of the peer whose content was not posted. A subscription waits for none in particular.
    pub(crate) fn waiting(&self) -> Waiting {
        let waiting = self.entries.values().filter(|entry| {
            entry.subscribed.is_none()
                && !entry.is_cancelled
                && !matches!(entry.phase, ResponsePhase::Writing)
        });
        Waiting::of(waiting.map(|entry| entry.number))
    }

    /// Whether a value is on its way to the peer, or was announced to it.
    pub(crate) fn is_transferring(&self) -> bool {
        self.entries.values().any(|entry| match &entry.subscribed {
            Some(subscribed) => subscribed.is_transferring(),
            None => !matches!(entry.phase, ResponsePhase::Waiting),
        })
    }

    /// Steps that have a response under way, or a value written that the peer may not have yet.
    pub(crate) fn steps(&self) -> impl Iterator<Item = StepId> {
        self.entries
            .values()
            .filter_map(|entry| entry.step)
            .chain(self.written.iter().map(|written| written.step))
    }

    /// TENSOR_RE_REQUEST came. `None`: the index is unknown.
    pub(crate) fn re_request(
        &mut self,
        index: RequestIndex,
        destination: Option<Destination>,
    ) -> Result<Option<Option<Waker>>, PeerMisbehaved> {
        self.check_result_slot(destination)?;
        let Some(entry) = self.entries.get_mut(&index) else { return Ok(None) };
        let ResponsePhase::Described { bytes } = entry.phase else {
            return Err(PeerMisbehaved::ReRequestUnasked);
        };
        if entry.is_cancelled {
            return Err(PeerMisbehaved::ReRequestUnasked);
        }
        let fits = match destination {
            Some(destination) => bytes > 0 && destination.capacity >= bytes,
            None => bytes == 0,
        };
        if !fits {
            return Err(PeerMisbehaved::DestinationMismatch);
        }
        entry.phase = ResponsePhase::ReRequested(destination);
        Ok(Some(entry.waker.take()))
    }

    /// CANCEL came. Returns the waker to call; without a response, the acknowledgement is owed at once.
    pub(crate) fn cancel(&mut self, index: RequestIndex) -> Result<Option<Waker>, PeerMisbehaved> {
        let Some(entry) = self.entries.get(&index) else {
            self.count_unanswered()?;
            self.owed.push_back(Owed::CancelAck(index));
            return Ok(None);
        };
        if entry.is_cancelled {
            return Err(PeerMisbehaved::DuplicateCancel);
        }
        if !entry.is_unanswered() {
            self.count_unanswered()?;
        }
        Ok(self.entries.get_mut(&index).and_then(|entry| {
            entry.is_cancelled = true;
            entry.waker.take()
        }))
    }

    /// The state of the response. Stores `waker` for a change and returns the waker that it replaces.
    pub(crate) fn watch(&mut self, index: RequestIndex, waker: &Waker) -> (ResponseState, Option<Waker>) {
        let Some(entry) = self.entries.get_mut(&index) else { return (ResponseState::Open, None) };
        let state = match entry.phase {
            _ if entry.is_cancelled => ResponseState::Cancelled,
            ResponsePhase::ReRequested(destination) => ResponseState::ReRequested(destination),
            ResponsePhase::Waiting
            | ResponsePhase::Described { .. }
            | ResponsePhase::Begun
            | ResponsePhase::Writing
            | ResponsePhase::Subscribed => ResponseState::Open,
        };
        (state, entry.waker.replace(waker.clone()))
    }

    /// META_DATA_RESPONSE is being posted for a value of `bytes` bytes.
    pub(crate) fn described(&mut self, index: RequestIndex, bytes: u64) {
        if let Some(entry) = self.entries.get_mut(&index) {
            entry.phase = ResponsePhase::Described { bytes };
        }
    }

    /// Whether the content may still be posted: the peer has not sent CANCEL.
    pub(crate) fn may_write(&self, index: RequestIndex) -> bool {
        self.entries.get(&index).is_some_and(|entry| !entry.is_cancelled)
    }

    /// The first piece of the content is being posted. A subscription does not wait for one content alone.
    pub(crate) fn begun(&mut self, index: RequestIndex) {
        if let Some(entry) = self.entries.get_mut(&index).filter(|entry| entry.subscribed.is_none()) {
            entry.phase = ResponsePhase::Begun;
        }
    }

    /// The content is being posted, unless the peer has sent CANCEL.
    pub(crate) fn start_writing(&mut self, index: RequestIndex) -> bool {
        let Some(entry) = self.entries.get_mut(&index).filter(|entry| !entry.is_cancelled) else {
            return false;
        };
        entry.phase = ResponsePhase::Writing;
        self.unanswered -= 1;
        true
    }

    /// The value belongs to the peer from here on. The peer has read the value once it has returned `returned` immediates.
    pub(crate) fn wrote(&mut self, index: RequestIndex, returned: Option<u64>) {
        if let Some(step) = self.entries.get(&index).and_then(|entry| entry.step) {
            self.written.push_back(Written { step, returned, slot: index.slot() });
        }
    }

    /// The peer has returned `returned` immediates: it has read the values that came with them.
    pub(crate) fn taken_in(&mut self, returned: u64) {
        let has = |written: &Written| written.returned.is_some_and(|needed| needed <= returned);
        while self.written.front().is_some_and(has) {
            self.written.pop_front();
        }
    }

    /// The peer has taken in all values that were written.
    pub(crate) fn forget_written(&mut self) {
        self.written.clear();
    }

    /// The response is over: ERROR_STATUS is being posted, the content is written locally, or the future is
    /// dropped. A CANCEL that came is acknowledged now.
    pub(crate) fn close(&mut self, index: RequestIndex, is_answered: bool) -> Option<Waker> {
        let entry = self.entries.remove(&index)?;
        if entry.is_cancelled {
            self.owed.push_back(Owed::CancelAck(index));
        } else if entry.is_unanswered() {
            if is_answered {
                self.unanswered -= 1;
            } else {
                self.owed.push_back(Owed::GivenUp(index));
            }
        }
        entry.waker
    }

    /// As [`close`](Self::close), of an answered response. Its task is running, so the waker is dropped.
    pub(crate) fn answered(&mut self, index: RequestIndex) {
        let _ = self.close(index, true);
    }

    pub(crate) fn has_owed(&self) -> bool {
        !self.owed.is_empty()
    }

    /// The next owed reply.
    pub(crate) fn next_owed(&self) -> Option<Message> {
        self.owed.front().map(|owed| match *owed {
            Owed::CancelAck(index) => Message::CancelAck(index),
            Owed::GivenUp(index) => {
                let status = Status::new(Code::Cancelled, "the sender gave the answer up");
                Message::ErrorStatus(ErrorStatus { index, status })
            }
        })
    }

    /// The reply that [`next_owed`](Self::next_owed) gave is being posted.
    pub(crate) fn owed_posted(&mut self) {
        if self.owed.pop_front().is_some() {
            self.unanswered -= 1;
        }
    }

    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        self.entries.values_mut().filter_map(|entry| entry.waker.take())
    }

    /// Entries and owed replies.
    #[cfg(test)]
    pub(crate) fn len(&self) -> (usize, usize) {
        (self.entries.len(), self.owed.len())
    }
}

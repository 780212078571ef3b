//! What the peer answers to requests.

use std::task::Waker;

use super::{
    Check, Requests,
    entry::{Cancel, RequestPhase, StoredAnswer, Version},
};
use crate::{LentEnd, MetaDataResponse, Metadata, PeerMisbehaved, RequestIndex, Status, VersionNotice};

/// The effects of an arrival.
#[derive(Debug)]
pub(crate) struct Arrived<L> {
    /// The task to wake.
    pub(crate) wake: Option<Waker>,
    /// The first receive that waits for a key, for which it is now known whether a content comes.
    pub(crate) next: Option<Waker>,
    /// Memory to take back.
    pub(crate) returned: Option<(L, LentEnd)>,
    /// The index is unknown, or its request has finished.
    pub(crate) is_ignored: bool,
    /// Bytes of the content that was written or lent.
    pub(crate) bytes: u64,
}

impl<L> Arrived<L> {
    pub(super) const HANDLED: Self =
        Self { wake: None, next: None, returned: None, is_ignored: false, bytes: 0 };
    pub(super) const IGNORED: Self =
        Self { wake: None, next: None, returned: None, is_ignored: true, bytes: 0 };
}

pub(crate) type ArrivedResult<L> = Result<Arrived<L>, PeerMisbehaved>;

impl<L> Requests<L> {
    /// Content of `length` bytes has landed, of the listed metadata number `which`.
    pub(crate) fn content(&mut self, index: RequestIndex, which: usize, length: u64) -> ArrivedResult<L> {
        let (describes_first, has_slots) = (self.agreed.describes_first(), self.agreed.has_result_slots());
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        entry.check_version()?;
        let metadata = match &mut entry.phase {
            RequestPhase::Asked { .. } if describes_first => return Err(PeerMisbehaved::ContentUnasked),
            RequestPhase::Asked { known, is_view } => {
                let named = known.as_ref().and_then(|known| known.get(which));
                let written = named.filter(|metadata| !*is_view || metadata.byte_length == 0);
                written.cloned().ok_or(PeerMisbehaved::ContentUnasked)?
            }
            RequestPhase::ReAsked { metadata } if which == 0 => metadata.clone(),
            RequestPhase::ReAsked { .. } => return Err(PeerMisbehaved::ContentUnasked),
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent
            | RequestPhase::Described { .. }
            | RequestPhase::Promised { .. }
            | RequestPhase::Subscribed => return Err(PeerMisbehaved::ContentUnasked),
        };
        if !self.agreed.fits(metadata.byte_length, length) {
            return Err(PeerMisbehaved::ContentLength);
        }
        let has_slot = has_slots && metadata.byte_length > 0;
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
            RequestPhase::Subscribed if which == 0 => {
                self.subscribed_view(index, length, lent)?;
                return Ok(Arrived { bytes: length, ..Arrived::HANDLED });
            }
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

    /// META_DATA_RESPONSE came.
    pub(crate) fn meta_data_response(&mut self, response: MetaDataResponse) -> ArrivedResult<L> {
        let is_final = response.content.is_some() || response.loan_follows;
        self.check_response(&response, is_final || self.agreed.describes_first())?;
        if response.loan_follows { self.loan_promised(response) } else { self.described(response) }
    }

    /// Whether a content inside the message, and a checksum where it `may_be_checked`, are as agreed.
    pub(super) fn check_response(
        &self,
        response: &MetaDataResponse,
        may_be_checked: bool,
    ) -> Result<(), PeerMisbehaved> {
        let eager = response.content.as_ref().map(|content| content.len() as u64);
        let most = self.agreed.eager_bytes_max;
        if eager.is_some() && !(most > 0 && eager <= Some(most.into())) {
            return Err(PeerMisbehaved::EagerUnasked);
        }
        if response.checksum.is_some() != (self.agreed.validation.is_on() && may_be_checked) {
            return Err(PeerMisbehaved::ChecksumUnfit);
        }
        Ok(())
    }

    /// META_DATA_RESPONSE came, perhaps with the content.
    fn described(&mut self, response: MetaDataResponse) -> ArrivedResult<L> {
        let MetaDataResponse { index, metadata, content, checksum, .. } = response;
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        entry.check_version()?;
        match entry.phase {
            RequestPhase::Asked { .. } => {}
            // The announced loan has failed.
            RequestPhase::Promised { .. } if content.is_none() => {}
            RequestPhase::Promised { .. } => return Err(PeerMisbehaved::MetaDataTwice),
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent | RequestPhase::Subscribed => return Err(PeerMisbehaved::AnswerUnasked),
            RequestPhase::Described { .. } | RequestPhase::ReAsked { .. } => {
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
        entry.phase = RequestPhase::Described { metadata: metadata.clone() };
        Ok(self.answer(index, StoredAnswer::MetaDataResponse(metadata), LentEnd::MetaDataResponse))
    }

    /// META_DATA_RESPONSE came and announces a loan.
    fn loan_promised(&mut self, response: MetaDataResponse) -> ArrivedResult<L> {
        let MetaDataResponse { index, metadata, checksum, .. } = response;
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        entry.check_version()?;
        match entry.phase {
            RequestPhase::Asked { is_view: true, .. } => entry.phase = RequestPhase::Promised { metadata },
            RequestPhase::Asked { .. } => return Err(PeerMisbehaved::LoanUnasked),
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent | RequestPhase::Subscribed => return Err(PeerMisbehaved::AnswerUnasked),
            RequestPhase::Described { .. } | RequestPhase::Promised { .. } | RequestPhase::ReAsked { .. } => {
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
            | RequestPhase::Described { .. }
            | RequestPhase::Promised { .. }
            | RequestPhase::ReAsked { .. }
            | RequestPhase::Subscribed => {}
            RequestPhase::Answered => return Ok(Arrived::IGNORED),
            RequestPhase::Unsent => return Err(PeerMisbehaved::AnswerUnasked),
        }
        entry.phase = RequestPhase::Answered;
        self.end_subscription(index, LentEnd::ErrorStatus);
        Ok(self.answer(index, StoredAnswer::ErrorStatus(status), LentEnd::ErrorStatus))
    }

    /// VERSION came.
    pub(crate) fn version_came(&mut self, notice: VersionNotice) -> ArrivedResult<L> {
        let Some(entry) = self.entry(notice.index) else { return Ok(Arrived::IGNORED) };
        match (&entry.phase, entry.version) {
            (RequestPhase::Asked { .. }, Version::Wanted) => entry.version = Version::Known(notice.version),
            _ => return Err(PeerMisbehaved::VersionUnasked),
        }
        Ok(Arrived::HANDLED)
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
        self.end_subscription(index, LentEnd::CancelAck);
        let next = self.resolve(index);
        self.free_finished(index.slot());
        Ok(Arrived { returned, next, ..Arrived::HANDLED })
    }

    /// Stores the peer's answer, which is the evidence `end`.
    fn answer(&mut self, index: RequestIndex, answer: StoredAnswer, end: LentEnd) -> Arrived<L> {
        let Some(entry) = self.entry(index) else { return Arrived::IGNORED };
        entry.end = Some(end);
        let is_final = matches!(entry.phase, RequestPhase::Answered);
        entry.reply = Some(answer);
        if entry.is_awaited {
            return Arrived { wake: entry.waker.take(), ..Arrived::HANDLED };
        }
        let mut arrived = Arrived::HANDLED;
        let step_key = entry.step_key_to_stash();
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

    /// Records that it is now known whether a content comes for a receive that was given up. Returns the waker of the next receive
    /// of its key.
    fn resolve(&mut self, index: RequestIndex) -> Option<Waker> {
        let entry = self.entry(index)?;
        if !std::mem::take(&mut entry.is_unresolved) {
            return None;
        }
        let step_key = entry.step_key.clone();
        self.unresolved -= 1;
        step_key.and_then(|step_key| self.stash.first_in_line(&step_key))
    }
}

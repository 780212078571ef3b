//! One request of the receiver's table.

use std::{sync::Arc, task::Waker};

use super::{
    stash::{Check, Content, Landed, StepKey},
    subscribed::Subscribed,
};
use crate::{EagerContent, LentEnd, Metadata, PeerMisbehaved, Status};

/// The state of the exchange with the peer.
///
/// ```text
/// Unsent ──TENSOR_REQUEST──▶ Asked ──META_DATA_RESPONSE──▶ Described ──TENSOR_RE_REQUEST──▶ ReAsked
///                              │                               │                              │
///                              └──content or ERROR_STATUS──────┴──ERROR_STATUS────────────────┴──▶ Answered
/// ```
///
/// A loan comes instead of a written content. Or META_DATA_RESPONSE announces it (Promised); then the loan comes, or a
/// META_DATA_RESPONSE without that announcement (Described).
#[derive(Debug)]
pub(super) enum RequestPhase {
    /// Nothing was posted.
    Unsent,
    /// TENSOR_REQUEST was posted.
    Asked {
        /// A written content is a legal answer if it has one of these metadata; none is if there are none.
        known: Option<Arc<[Metadata]>>,
        /// A view was asked for: a content comes as a loan. A content of no bytes comes as a bare notification.
        is_view: bool,
    },
    /// META_DATA_RESPONSE came and announced a loan.
    Promised { metadata: Metadata },
    /// META_DATA_RESPONSE came.
    Described { metadata: Metadata },
    /// TENSOR_RE_REQUEST was posted.
    ReAsked { metadata: Metadata },
    /// TENSOR_REQUEST was posted for a subscription, which has states of its own.
    Subscribed,
    /// Content or ERROR_STATUS came.
    Answered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cancel {
    /// None was needed so far.
    None,
    /// In the queue of cancels to send.
    Owed,
    /// Posted. The entry stays until its CANCEL_ACK, so that entries bound what the peer owes.
    Sent,
    /// CANCEL_ACK came.
    Acknowledged,
}

#[derive(Debug)]
pub(super) struct RequestEntry<L> {
    pub(super) phase: RequestPhase,
    pub(super) cancel: Cancel,
    /// Grows with every request of the connection.
    pub(super) number: u64,
    /// The key and step whose values have an order; `None` for published values.
    pub(super) step_key: Option<StepKey>,
    /// The receive future is still there.
    pub(super) is_awaited: bool,
    /// Given up, and it is not known yet whether a content comes. Other receives of its key wait for that.
    pub(super) is_unresolved: bool,
    /// Its step is over: a content that no receive awaits is dropped.
    pub(super) is_discarded: bool,
    /// The content of another receive of its key that was given up.
    pub(super) given: Option<Landed<L>>,
    /// In the queue of entries whose memory goes back.
    pub(super) is_returning: bool,
    pub(super) lent: Option<L>,
    /// Why `lent` may be taken back; `None` while the peer may write it.
    pub(super) end: Option<LentEnd>,
    /// The checksum in META_DATA_RESPONSE.
    pub(super) checksum: Option<u64>,
    pub(super) version: Version,
    pub(super) reply: Option<StoredAnswer>,
    /// Boxed, because most requests are none.
    pub(super) subscribed: Option<Box<Subscribed<L>>>,
    pub(super) waker: Option<Waker>,
}

/// What is known of the version of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    /// It was not asked for.
    Unwanted,
    /// VERSION must come before any value.
    Wanted,
    /// VERSION came.
    Known(u64),
}

/// The peer's answer, as the table stores it.
#[derive(Debug)]
pub(super) enum StoredAnswer {
    Content { number: u64, metadata: Metadata, eager: Option<EagerContent>, check: Check },
    MetaDataResponse(Metadata),
    ErrorStatus(Status),
}

impl<L> RequestEntry<L> {
    /// Whether a value may come now: its version has come, if that was asked for.
    pub(super) fn check_version(&self) -> Result<(), PeerMisbehaved> {
        let is_due = self.version == Version::Wanted
            && !matches!(self.phase, RequestPhase::Answered | RequestPhase::Unsent);
        if is_due { Err(PeerMisbehaved::VersionMissing) } else { Ok(()) }
    }

    /// Whether a receive awaits an answer that has not come. A subscription awaits none in particular.
    pub(super) fn is_waiting(&self) -> bool {
        let is_answered = matches!(self.phase, RequestPhase::Answered | RequestPhase::Subscribed);
        self.is_awaited && !is_answered
    }

    pub(super) fn new(number: u64, step_key: Option<StepKey>) -> Self {
        Self {
            phase: RequestPhase::Unsent,
            cancel: Cancel::None,
            number,
            step_key,
            is_awaited: true,
            is_unresolved: false,
            is_discarded: false,
            given: None,
            is_returning: false,
            lent: None,
            end: None,
            checksum: None,
            version: Version::Unwanted,
            reply: None,
            subscribed: None,
            waker: None,
        }
    }

    /// Whether the entry is not needed any more.
    pub(super) fn is_finished(&self) -> bool {
        let settled = match self.cancel {
            Cancel::None => matches!(self.phase, RequestPhase::Unsent | RequestPhase::Answered),
            Cancel::Owed | Cancel::Sent => false,
            Cancel::Acknowledged => true,
        };
        let is_empty = self.subscribed.as_ref().is_none_or(|subscribed| subscribed.is_empty());
        settled && !self.is_awaited && !self.is_returning && self.lent.is_none() && is_empty
    }

    /// Takes the memory if the peer can no longer write it.
    pub(super) fn take_ended(&mut self) -> Option<(L, LentEnd)> {
        let end = self.end?;
        self.lent.take().map(|lent| (lent, end))
    }

    /// Whether there is memory to give back.
    pub(super) fn has_unwanted(&self) -> bool {
        let has_ended = self.subscribed.as_ref().is_some_and(|subscribed| subscribed.has_ended());
        self.given.is_some() || (self.lent.is_some() && self.end.is_some()) || has_ended
    }

    /// Takes memory to give back.
    pub(super) fn take_unwanted(&mut self) -> Option<(L, LentEnd)> {
        let returned = self.given.take().and_then(Landed::returned).or_else(|| self.take_ended());
        returned.or_else(|| self.subscribed.as_mut()?.take_ended())
    }

    /// Whether it may be given the content of another receive of its key.
    pub(super) fn may_be_given(&self) -> bool {
        let may_be = match self.subscribed {
            Some(_) => !matches!(self.phase, RequestPhase::Answered),
            None => self.given.is_none() && !matches!(self.reply, Some(StoredAnswer::Content { .. })),
        };
        self.is_awaited && may_be
    }

    /// Gives it the content of another receive of its key. Returns the waker to call.
    pub(super) fn give(&mut self, landed: Landed<L>) -> Option<Waker> {
        match &mut self.subscribed {
            Some(subscribed) => subscribed.give(landed),
            None => self.given = Some(landed),
        }
        self.waker.take()
    }

    /// The content that was not returned to a caller, if there is one.
    pub(super) fn take_content(&mut self) -> Option<Landed<L>> {
        match self.reply.take()? {
            StoredAnswer::Content { number, metadata, eager, check } => {
                Some(self.landed(number, metadata, eager, check))
            }
            StoredAnswer::MetaDataResponse(_) | StoredAnswer::ErrorStatus(_) => None,
        }
    }

    pub(super) fn landed(
        &mut self,
        number: u64,
        metadata: Metadata,
        eager: Option<EagerContent>,
        check: Check,
    ) -> Landed<L> {
        let content = match eager {
            Some(bytes) if bytes.is_empty() => Content::None,
            Some(bytes) => Content::Eager(bytes),
            None => self.take_ended().map(|(lent, _)| lent).into(),
        };
        Landed { number, metadata, content, check }
    }

    /// The key and step whose next receive gets a content that no receive awaits, if any.
    pub(super) fn step_key_to_stash(&self) -> Option<StepKey> {
        self.step_key.clone().filter(|_| !self.is_discarded)
    }
}

//! What is posted: messages, counts, ASK, and the offer of a larger ring.

use std::slice;

use super::{Connection, State, Turnstile};
use crate::{
    Channel, ChannelError, Message, Mode, RecordSlot, RequestIndex, TensorRequest,
    credit::{Blocked, Counts, RingPlace},
    names::{Defined, NameForm},
    wire::{
        EagerResponse,
        record::{self, Control},
    },
};

/// The counts of a record, and how its requests name their keys.
type Counted<'a> = (Counts, &'a [NameForm]);

impl<L> State<L> {
    /// How the keys of `requests` are named, one after the other, as if they were posted now. Gives what to take back
    /// if they aren't.
    fn name_keys(&mut self, requests: &[TensorRequest]) -> Vec<Defined> {
        self.forms.clear();
        let mut defined = Vec::new();
        for request in requests {
            let form = self.names.form(&request.key);
            self.forms.push(form);
            defined.extend(self.names.named(&request.key, form));
        }
        defined
    }

    /// The content of request `index` is being posted, in its [turn](Connection::content_turn).
    pub(crate) fn count_content(&mut self, index: RequestIndex) {
        // It was found possible under this lock.
        let _ = self.flow.post_content();
        self.is_content_due = false;
        self.contents_in_flight += 1;
        self.count_written(index);
    }

    /// What was posted last is the value of request `index`.
    pub(crate) fn count_written(&mut self, index: RequestIndex) {
        self.responses.wrote(index, self.flow.posted());
    }

    /// The peer's counts were taken in: the values they cover are its own.
    pub(super) fn forget_taken_in(&mut self) {
        self.responses.taken_in(self.flow.returned());
    }
}

impl<C: Channel> Connection<C> {
    pub(super) fn try_post_owed(&self, state: &mut State<C::Lent>) -> Option<Result<(), ChannelError>> {
        if let Some(message) = state.responses.next_owed() {
            let posted = self.try_post(state, &message)?;
            state.responses.owed_posted();
            return Some(posted);
        }
        let Some(index) = state.requests.next_cancel() else { return Some(Ok(())) };
        let posted = self.try_post(state, &Message::Cancel(index))?;
        state.requests.cancel_posted(index);
        Some(posted)
    }

    /// Sends `message` when it is its turn; `posted` runs as it is posted.
    pub(crate) async fn send(
        &self,
        message: &Message,
        mut posted: impl FnMut(&mut State<C::Lent>),
    ) -> Result<(), ChannelError> {
        let sent = self.turn(Turnstile::Messages, |state| {
            let result = self.try_post(state, message)?;
            posted(state);
            Some(result)
        });
        self.over_if_failed(sent.await?)
    }

    /// Posts `message` if credits and ring allow it now; else asks the peer for them.
    pub(crate) fn try_post(
        &self,
        state: &mut State<C::Lent>,
        message: &Message,
    ) -> Option<Result<(), ChannelError>> {
        let encode =
            |counted: Option<Counted<'_>>, into: &mut Vec<u8>| record::encode_message(counted, message, into);
        let posted = self.try_post_naming(state, message.requests(), encode)?;
        if posted.is_ok() {
            state.counters.sent.count(message);
        }
        Some(posted)
    }

    /// As [`try_post`](Self::try_post), for one request.
    pub(super) fn try_post_request(
        &self,
        state: &mut State<C::Lent>,
        request: &TensorRequest,
    ) -> Option<Result<(), ChannelError>> {
        let encode =
            |counted: Option<Counted<'_>>, into: &mut Vec<u8>| record::encode_request(counted, request, into);
        let posted = self.try_post_naming(state, slice::from_ref(request), encode)?;
        state.counters.sent.tensor_request += u64::from(posted.is_ok());
        Some(posted)
    }

    /// As [`try_post`](Self::try_post), for a message with `requests`, which `encode` appends.
    fn try_post_naming(
        &self,
        state: &mut State<C::Lent>,
        requests: &[TensorRequest],
        encode: impl FnOnce(Option<Counted<'_>>, &mut Vec<u8>),
    ) -> Option<Result<(), ChannelError>> {
        if let Err(error) = self.may_post(state)? {
            return Some(Err(error));
        }
        let defined = state.name_keys(requests);
        let counts = state.flow.counts();
        state.scratch.clear();
        let counted = (self.agreed.mode != Mode::Original).then_some((counts, &state.forms[..]));
        encode(counted, &mut state.scratch);
        match self.post_encoded(state) {
            Ok(posted) => Some(posted),
            Err(blocked) => {
                defined.into_iter().rev().for_each(|defined| state.names.take_back(defined));
                self.ask(state, blocked)
            }
        }
    }

    /// As [`try_post`](Self::try_post), for META_DATA_RESPONSE with a content, which `content` appends.
    pub(crate) fn try_post_content(
        &self,
        state: &mut State<C::Lent>,
        response: EagerResponse<'_>,
        content: impl FnOnce(&mut Vec<u8>),
    ) -> Option<Result<(), ChannelError>> {
        if let Err(error) = self.may_post(state)? {
            return Some(Err(error));
        }
        let counts = (self.agreed.mode != Mode::Original).then_some(state.flow.counts());
        state.scratch.clear();
        record::encode_content(counts, response, content, &mut state.scratch);
        match self.post_encoded(state) {
            Ok(posted) => {
                state.counters.sent.meta_data_response += 1;
                Some(posted)
            }
            Err(blocked) => self.ask(state, blocked),
        }
    }

    /// Whether a message may be posted, ring room aside; else asks the peer for credit.
    pub(super) fn may_post(&self, state: &mut State<C::Lent>) -> Option<Result<(), ChannelError>> {
        if state.flow.has_ring_offer()
            && let Err(error) = self.try_move_ring(state)?
        {
            return Some(Err(error));
        }
        let may_post = state.flow.has_credit() && !state.is_credit_for_content();
        if may_post { Some(Ok(())) } else { self.ask(state, Blocked { wanted: 0 }) }
    }

    /// Posts the message that was encoded last.
    fn post_encoded(&self, state: &mut State<C::Lent>) -> Result<Result<(), ChannelError>, Blocked> {
        let place = state.flow.post_message(state.scratch.len() as u32)?;
        state.counters.message_bytes_sent += state.scratch.len() as u64;
        Ok(self.post_scratch(state, place))
    }

    fn post_scratch(&self, state: &State<C::Lent>, place: RingPlace) -> Result<(), ChannelError> {
        self.channel.post_message(state.rings.peer, place.first, place.second, &state.scratch)
    }

    /// Posts a message about flow control if credits and ring allow it now.
    pub(super) fn try_post_control(
        &self,
        state: &mut State<C::Lent>,
        control: Control,
    ) -> Result<Result<(), ChannelError>, Blocked> {
        state.scratch.clear();
        record::encode_control(state.flow.counts(), control, &mut state.scratch);
        let place = state.flow.post_message(state.scratch.len() as u32)?;
        Ok(self.post_scratch(state, place))
    }

    /// Sends ASK unless one is unanswered.
    pub(super) fn ask<T>(
        &self,
        state: &mut State<C::Lent>,
        blocked: Blocked,
    ) -> Option<Result<T, ChannelError>> {
        let ask = state.flow.ask(blocked)?;
        state.counters.asks_sent += 1;
        self.channel.post_record(RecordSlot::Ask, &record::encode_ask(ask)).err().map(Err)
    }

    /// Goes over to the larger ring that the peer has offered: from here on messages go there. `None` when that must wait.
    fn try_move_ring(&self, state: &mut State<C::Lent>) -> Option<Result<(), ChannelError>> {
        match self.try_post_control(state, Control::RingMoved) {
            Ok(Ok(())) => {
                state.counters.rings_moved += 1;
                if let Some(ring) = state.flow.move_ring() {
                    state.rings.peer = ring;
                }
                Some(Ok(()))
            }
            Ok(Err(error)) => Some(Err(error)),
            Err(blocked) => self.ask(state, blocked),
        }
    }

    /// Runs `post` as soon as it is its turn and a content may be posted. An ASK that can't be posted ends the connection:
    /// it would stay unanswered, and nobody would ask again.
    ///
    /// # Cancel safety
    /// As [`turn`](Self::turn).
    pub(crate) async fn content_turn<T>(
        &self,
        mut post: impl FnMut(&mut State<C::Lent>) -> T,
    ) -> Result<T, ChannelError> {
        let turn = self.turn(Turnstile::Contents, |state| {
            if state.contents_in_flight >= self.contents_max() {
                return None;
            }
            if !state.flow.has_content_credit() {
                state.is_content_due = true;
                return self.ask(state, Blocked { wanted: 0 });
            }
            Some(Ok(post(state)))
        });
        turn.await?.inspect_err(|error| self.fail(&error.0))
    }

    /// After an arrival: returns what was taken in, if that is due and credit and room allow. Else the peer asks.
    pub(super) fn return_if_due(&self, state: &mut State<C::Lent>) -> Result<(), ChannelError> {
        if !state.flow.is_return_due()
            || tensorwire_testpoints::chance!("credits are returned only when the peer asks")
        {
            return Ok(());
        }
        match self.try_post_control(state, Control::CountOnly) {
            Ok(posted) => {
                state.counters.count_only_sent += 1;
                posted
            }
            Err(Blocked { .. }) => Ok(()),
        }
    }
}

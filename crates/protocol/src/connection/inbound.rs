//! What arrives: ring records, ASK and ANSWER.

use std::{sync::MutexGuard, task::Waker};

use super::{Connection, State};
use crate::{
    Agreed, Channel, ChannelError, Destination, LentEnd, Message, MetaDataResponse, Mode, PeerMisbehaved,
    RecordSlot, TensorRequest, Want,
    credit::{Counts, RingConsumer},
    names::NameTable,
    requests::Arrived,
    wire::{
        WireError,
        record::{self, ANSWER_BYTES, ASK_BYTES, Control, RECORD_BYTES_MAX, Record},
    },
};

/// Why an arrival cannot be taken in. The connection is over.
pub(super) enum ArrivalError {
    /// What lies in the ring is no message.
    Malformed(WireError),
    /// The peer broke another rule.
    Broken(PeerMisbehaved),
    /// The channel is over.
    Lost(ChannelError),
}

impl From<PeerMisbehaved> for ArrivalError {
    fn from(rule: PeerMisbehaved) -> Self {
        Self::Broken(rule)
    }
}

impl From<ChannelError> for ArrivalError {
    fn from(error: ChannelError) -> Self {
        Self::Lost(error)
    }
}

impl From<WireError> for ArrivalError {
    fn from(error: WireError) -> Self {
        match error {
            WireError::UnknownName(_) => Self::Broken(PeerMisbehaved::UnknownName),
            error => Self::Malformed(error),
        }
    }
}

/// Bytes of a record that tell its length.
const PREFIX_BYTES: usize = 4;

/// The own ring, read by the driver.
pub(super) struct Inbound {
    consumer: RingConsumer,
    bytes: Vec<u8>,
    names: NameTable,
}

impl Inbound {
    pub(super) fn new(ring_bytes: u32, names_max: u32) -> Self {
        Self {
            consumer: RingConsumer::new(ring_bytes),
            bytes: vec![0; RECORD_BYTES_MAX],
            names: NameTable::new(names_max),
        }
    }
}

impl<C: Channel> Connection<C> {
    /// Reads and parses a record, counts its credit and ring room as returned, then acts on it: what is sent in reply
    /// carries the new counts.
    ///
    /// `written` bytes were written last: the whole record, or what of it lies at the start of the ring.
    #[inline(always)]
    pub(super) fn on_message(
        &self,
        written: u64,
        requested: impl FnMut(TensorRequest),
    ) -> Result<(), ArrivalError> {
        let Some(mut state) = self.lock_open() else { return Ok(()) };
        let (length, counts, record) = self.next_record(&mut state, written)?;
        match self.agreed.mode {
            Mode::Original => self.acknowledge(&mut state)?,
            Mode::Counted => state.flow.take_message(length, counts)?,
        }
        state.forget_taken_in();
        match record {
            Record::Message(message) => {
                state.counters.received.count(&message);
                state.counters.message_bytes_received += u64::from(length);
                self.return_if_due(&mut state)?;
                self.act(state, message, requested)
            }
            Record::Control(control) => self.on_control(state, control),
        }
    }

    /// The next record of the ring, its length and its counts.
    #[inline(always)]
    fn next_record(
        &self,
        state: &mut State<C::Lent>,
        written: u64,
    ) -> Result<(u32, Counts, Record), ArrivalError> {
        let State { inbound: Inbound { consumer, bytes, names }, rings, .. } = state;
        let Agreed { mode, requests_per_message, .. } = self.agreed;
        let mut prefix = [0; PREFIX_BYTES];
        // Most records were written at once, and are read at once.
        let at_once = usize::try_from(written).unwrap_or(usize::MAX).clamp(PREFIX_BYTES, bytes.len());
        let at_once = if consumer.place(at_once as u32).is_some() { at_once } else { PREFIX_BYTES };
        let read = bytes.get_mut(..at_once).unwrap_or_default();
        self.read_ring(rings, consumer, read)?;
        read.iter().zip(&mut prefix).for_each(|(byte, into)| *into = *byte);
        let length = record::record_length(mode, prefix)?;
        let bytes = bytes.get_mut(..length).ok_or(WireError::Truncated { field: "ring" })?;
        if length > at_once {
            self.read_ring(rings, consumer, bytes)?;
        }
        let (counts, record) = record::decode_record(mode, bytes, names, requests_per_message)?;
        let length = length as u32; // at most that of the largest record
        consumer.advance(length);
        Ok((length, counts, record))
    }

    /// The acknowledgement of mode original.
    fn acknowledge(&self, state: &mut State<C::Lent>) -> Result<(), ChannelError> {
        if tensorwire_testpoints::planted!("some messages are not acknowledged")
            && state.counters.received.total() % 8 == 7
        {
            return Ok(());
        }
        state.counters.acknowledgements_sent += 1;
        self.channel.post_acknowledgement()
    }

    /// An arrival with immediate [`ACKNOWLEDGEMENT_IMMEDIATE`](super::ACKNOWLEDGEMENT_IMMEDIATE): in mode
    /// original an acknowledgement, in mode counted ASK or ANSWER, which have different lengths.
    pub(super) fn on_return(&self, length: u64) -> Result<(), ArrivalError> {
        if self.agreed.mode == Mode::Original {
            return self.on_acknowledgement().map_err(ArrivalError::from);
        }
        match usize::try_from(length) {
            Ok(ASK_BYTES) => self.on_ask(),
            Ok(ANSWER_BYTES) => self.on_answer(),
            _ => self.lock_open().map_or(Ok(()), |_| Err(PeerMisbehaved::UnknownRecord.into())),
        }
    }

    fn on_acknowledgement(&self) -> Result<(), PeerMisbehaved> {
        let Some(mut state) = self.lock_open() else { return Ok(()) };
        state.flow.acknowledged()?;
        state.counters.acknowledgements_received += 1;
        self.unlock(state);
        Ok(())
    }

    /// Answers at once, and has a larger ring made if the peer's messages do not fit.
    fn on_ask(&self) -> Result<(), ArrivalError> {
        let Some(mut state) = self.lock_open() else { return Ok(()) };
        let mut bytes = [0; ASK_BYTES];
        self.read_record(&state, RecordSlot::Ask, &mut bytes)?;
        let ask = record::decode_ask(bytes);
        let answer = state.flow.take_ask(ask)?;
        state.forget_taken_in();
        state.counters.asks_received += 1;
        state.counters.answers_sent += 1;
        self.channel.post_record(RecordSlot::Answer, &record::encode_answer(answer))?;
        if !state.is_ring_growing
            && let Some(ring_bytes) = state.flow.growth(ask.wanted, self.own_ring_bytes_max)
        {
            state.ring_wanted = Some(ring_bytes);
            state.is_ring_growing = true;
        }
        self.unlock(state);
        Ok(())
    }

    fn on_answer(&self) -> Result<(), ArrivalError> {
        let Some(mut state) = self.lock_open() else { return Ok(()) };
        let mut bytes = [0; ANSWER_BYTES];
        self.read_record(&state, RecordSlot::Answer, &mut bytes)?;
        state.flow.take_answer(record::decode_answer(bytes))?;
        state.forget_taken_in();
        state.counters.answers_received += 1;
        self.unlock(state);
        Ok(())
    }

    fn on_control(
        &self,
        mut state: MutexGuard<'_, State<C::Lent>>,
        control: Control,
    ) -> Result<(), ArrivalError> {
        match control {
            Control::CountOnly => state.counters.count_only_received += 1,
            Control::RingOffer(ring) => {
                state.flow.take_ring_offer(ring)?;
                self.return_if_due(&mut state)?;
            }
            Control::RingMoved => {
                let ring_bytes = state.flow.take_ring_move()?;
                state.is_ring_growing = false;
                self.return_if_due(&mut state)?;
                state.inbound.consumer = RingConsumer::new(ring_bytes);
                let left = state.rings.moved().map(|ring| (ring, LentEnd::RingMoved));
                self.settle(state, None, left);
                return Ok(());
            }
        }
        self.unlock(state);
        Ok(())
    }

    /// Whether a destination names a result slot exactly if that was agreed.
    fn check_result_slot(&self, destination: Option<Destination>) -> Result<(), PeerMisbehaved> {
        let fits = destination
            .is_none_or(|destination| destination.result.is_some() == self.agreed.has_result_slots());
        if fits { Ok(()) } else { Err(PeerMisbehaved::ResultSlotUnfit) }
    }

    fn take_meta_data_response(
        &self,
        state: &mut State<C::Lent>,
        response: MetaDataResponse,
    ) -> Result<Arrived<C::Lent>, PeerMisbehaved> {
        let MetaDataResponse { index, metadata, content, loan_follows, checksum } = response;
        let eager = content.as_ref().map(|content| content.len() as u64);
        if self.agreed.eager_bytes_max == 0 && eager.is_some()
            || eager > Some(self.agreed.eager_bytes_max.into())
        {
            return Err(PeerMisbehaved::EagerUnasked);
        }
        let is_final = content.is_some() || loan_follows;
        let has_checksum = self.agreed.validation.is_on() && (is_final || self.agreed.describes_first());
        if checksum.is_some() != has_checksum {
            return Err(PeerMisbehaved::ChecksumUnfit);
        }
        if loan_follows {
            return state.requests.loan_promised(index, metadata, checksum);
        }
        let arrived = state.requests.meta_data_response(index, metadata, content, checksum)?;
        if let Some(bytes) = eager.filter(|_| !arrived.is_ignored) {
            tensorwire_testpoints::mark!("content arrived inside a message");
            state.counters.eager_received += 1;
            state.counters.eager_bytes_received += bytes;
        }
        Ok(arrived)
    }

    fn take_request(
        &self,
        state: &mut State<C::Lent>,
        request: &TensorRequest,
    ) -> Result<(), PeerMisbehaved> {
        if let Want::Write(destination) = request.want {
            self.check_result_slot(destination)?;
        }
        state.responses.open(request.index, request.scope)
    }

    #[inline(always)]
    fn act(
        &self,
        mut state: MutexGuard<'_, State<C::Lent>>,
        message: Message,
        mut requested: impl FnMut(TensorRequest),
    ) -> Result<(), ArrivalError> {
        let arrived = match message {
            Message::TensorRequest(request) => {
                self.take_request(&mut state, &request)?;
                self.unlock(state);
                requested(request);
                return Ok(());
            }
            Message::TensorRequests(requests) => {
                tensorwire_testpoints::mark!("several keys in one message");
                for request in &requests {
                    self.take_request(&mut state, request)?;
                }
                self.unlock(state);
                requests.into_iter().for_each(requested);
                return Ok(());
            }
            Message::TensorReRequest(request) => {
                self.check_result_slot(request.destination)?;
                let woken = state.responses.re_request(request.index, request.destination)?;
                state.counters.ignored += u64::from(woken.is_none());
                self.settle(state, woken.flatten(), None);
                return Ok(());
            }
            Message::Cancel(index) => {
                let woken = state.responses.cancel(index)?;
                self.settle(state, woken, None);
                return Ok(());
            }
            Message::Note(note) => {
                let woken = state.notes.arrived(note)?;
                state.counters.ignored += u64::from(woken.is_none());
                let mut woken = woken.unwrap_or_default().into_iter();
                self.settle(state, woken.next(), None);
                woken.for_each(Waker::wake);
                return Ok(());
            }
            Message::MetaDataResponse(response) => self.take_meta_data_response(&mut state, response)?,
            Message::ErrorStatus(error) => state.requests.error_status(error.index, error.status)?,
            Message::CancelAck(index) => state.requests.cancel_ack(index)?,
            Message::Version(notice) => state.requests.version_came(notice)?,
        };
        self.settle_arrival(state, arrived);
        Ok(())
    }
}

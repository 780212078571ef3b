//! What arrives by the rings and the slots: records, acknowledgements, ASK and ANSWER.

use super::{Line, rings::RingsInUse};
use crate::{
    Agreed, Channel, ChannelError, LentEnd, PeerMisbehaved, RecordSlot,
    after::After,
    credit::{Counts, RingConsumer},
    names::NameTable,
    wire::{
        WireError,
        record::{self, ANSWER_BYTES, ASK_BYTES, Control, RECORD_BYTES_MAX, Record},
    },
};

/// Why an arrival cannot be processed. The connection is over.
pub(crate) enum ArrivalError {
    /// The bytes in the ring are not a message.
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

/// Bytes of the length at the start of a record.
const PREFIX_BYTES: usize = 4;

/// The reader of the own ring.
pub(super) struct Reader {
    consumer: RingConsumer,
    bytes: Vec<u8>,
    names: NameTable,
}

/// A record that was read.
struct ReadRecord {
    length: u32,
    counts: Counts,
    record: Record,
}

impl Reader {
    pub(super) fn new(ring_bytes: u32, names_max: u32) -> Self {
        Self {
            consumer: RingConsumer::new(ring_bytes),
            bytes: vec![0; RECORD_BYTES_MAX],
            names: NameTable::new(names_max),
        }
    }

    /// The next record of the ring. `written` bytes were written last: the whole record, or the part of it at the start of
    /// the ring.
    #[inline(always)]
    fn next<C: Channel>(
        &mut self,
        channel: &C,
        rings: &RingsInUse<C::Lent>,
        agreed: &Agreed,
        written: u64,
    ) -> Result<ReadRecord, ArrivalError> {
        let Self { consumer, bytes, names } = self;
        let mut prefix = [0; PREFIX_BYTES];
        // Most records were written at once, and are read at once.
        let at_once = usize::try_from(written).unwrap_or(usize::MAX).clamp(PREFIX_BYTES, bytes.len());
        let at_once = if consumer.place(at_once as u32).is_some() { at_once } else { PREFIX_BYTES };
        let read = bytes.get_mut(..at_once).unwrap_or_default();
        rings.read(channel, consumer, read)?;
        read.iter().zip(&mut prefix).for_each(|(byte, into)| *into = *byte);
        let length = record::record_length(agreed.mode, prefix)?;
        let bytes = bytes.get_mut(..length).ok_or(WireError::Truncated { field: "ring" })?;
        if length > at_once {
            rings.read(channel, consumer, bytes)?;
        }
        let (counts, record) = record::decode_record(agreed.mode, bytes, names, agreed.requests_per_message)?;
        let length = length as u32; // at most that of the largest record
        consumer.advance(length);
        Ok(ReadRecord { length, counts, record })
    }
}

impl<C: Channel> Line<C> {
    /// Reads and parses a record, and counts its credit and ring space as returned, so that a reply carries the new counts.
    #[inline(always)]
    pub(crate) fn read_record(&mut self, written: u64) -> Result<Record, ArrivalError> {
        let ReadRecord { length, counts, record } =
            self.reader.next(&*self.channel, &self.rings, &self.agreed, written)?;
        if self.agreed.mode.is_counted() {
            self.flow.take_message(length, counts)?;
        } else {
            self.acknowledge()?;
        }
        if let Record::Message(message) = &record {
            self.counters.received.count(message);
            self.counters.message_bytes_received += u64::from(length);
        }
        Ok(record)
    }

    /// The acknowledgement of mode original.
    fn acknowledge(&mut self) -> Result<(), ChannelError> {
        if tensorwire_testpoints::planted!("some messages are not acknowledged")
            && self.counters.received.total() % 8 == 7
        {
            return Ok(());
        }
        self.counters.acknowledgements_sent += 1;
        self.channel.post_acknowledgement()
    }

    /// An arrival with immediate [`ACKNOWLEDGEMENT_IMMEDIATE`](crate::ACKNOWLEDGEMENT_IMMEDIATE): in mode
    /// original an acknowledgement, in mode counted ASK or ANSWER, which have different lengths.
    pub(crate) fn on_return(&mut self, length: u64) -> Result<(), ArrivalError> {
        if !self.agreed.mode.is_counted() {
            self.flow.acknowledged()?;
            self.counters.acknowledgements_received += 1;
            return Ok(());
        }
        match usize::try_from(length) {
            Ok(ASK_BYTES) => self.on_ask(),
            Ok(ANSWER_BYTES) => self.on_answer(),
            _ => Err(PeerMisbehaved::UnknownRecord.into()),
        }
    }

    /// Answers at once, and has a larger ring made if the peer's messages do not fit.
    fn on_ask(&mut self) -> Result<(), ArrivalError> {
        let ask = record::decode_ask(self.rings.read_slot(&*self.channel, RecordSlot::Ask)?);
        let answer = self.flow.take_ask(ask)?;
        self.counters.asks_received += 1;
        self.counters.answers_sent += 1;
        self.channel.post_record(RecordSlot::Answer, &record::encode_answer(answer))?;
        self.growth.on_ask(&self.flow, ask.wanted);
        Ok(())
    }

    fn on_answer(&mut self) -> Result<(), ArrivalError> {
        let bytes = self.rings.read_slot(&*self.channel, RecordSlot::Answer)?;
        self.flow.take_answer(record::decode_answer(bytes))?;
        self.counters.answers_received += 1;
        Ok(())
    }

    pub(crate) fn on_control(
        &mut self,
        control: Control,
        after: &mut After<C::Lent>,
    ) -> Result<(), ArrivalError> {
        match control {
            Control::CountOnly => self.counters.count_only_received += 1,
            Control::RingOffer(ring) => {
                self.flow.take_ring_offer(ring)?;
                self.return_if_due()?;
            }
            Control::RingMoved => {
                let ring_bytes = self.flow.take_ring_move()?;
                self.growth.end();
                self.return_if_due()?;
                self.reader.consumer = RingConsumer::new(ring_bytes);
                after.take_back(self.rings.moved().map(|ring| (ring, LentEnd::RingMoved)));
            }
        }
        Ok(())
    }

    /// A written or lent content has arrived, which takes a credit.
    pub(crate) fn on_content(&mut self) -> Result<(), ArrivalError> {
        self.flow.take_content()?;
        Ok(self.return_if_due()?)
    }
}

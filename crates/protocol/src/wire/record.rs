//! The records of a message ring, and the two records outside it.
//!
//! In mode original a ring record is the frame of its message. In mode counted it is a `u32` total length (prefix
//! included), a `u32` of receives and a `u32` of ring bytes (the writer's [`Counts`]), a `u8` kind and
//! the fields of that kind. ASK and ANSWER have different fixed lengths, which distinguish them.

use super::{
    EagerResponse, FRAME_BYTES_MIN, WireError,
    codec::{Reader, Writer, frame},
    open_frame, read_message, write_eager, write_message,
};
use crate::{
    Destination, Message,
    credit::{Answer, Ask, Counts, Mode},
    limits::{MESSAGE_BYTES_MAX, RING_BYTES_MAX},
    names::{NameForm, NameTable},
};

/// Length of an encoded ASK, and of its write.
pub const ASK_BYTES: usize = 16;
/// Length of an encoded ANSWER, and of its write.
pub const ANSWER_BYTES: usize = 12;

const COUNTS_BYTES: usize = 8;
/// Bytes of the prefix, counts, kind and number of requests in a record with several requests.
pub(crate) const SEVERAL_BYTES: usize = 4 + COUNTS_BYTES + 1 + 4;
/// Bytes of the form and number of a key.
const NAME_FORM_BYTES: usize = 3;
/// Largest record of a ring, in bytes.
pub const RECORD_BYTES_MAX: usize = MESSAGE_BYTES_MAX + COUNTS_BYTES + NAME_FORM_BYTES;

const COUNT_ONLY: u8 = 32;
const RING_OFFER: u8 = 33;
const RING_MOVED: u8 = 34;

/// A ring record of flow control. Only in mode counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Control {
    /// Only counts.
    CountOnly,
    /// A larger ring that the peer may move to; its capacity is the ring's size.
    RingOffer(Destination),
    /// The last record of this ring: the next one is at the start of the ring that was offered.
    RingMoved,
}

/// A record of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A message of a transfer.
    Message(Message),
    /// Flow control.
    Control(Control),
}

/// Appends the ring record of `message`; `counted` is `None` in mode original. Each request names its key in its form among those
/// given with the counts. A request without a form names the key in full.
pub fn encode_message(counted: Option<(Counts, &[NameForm])>, message: &Message, into: &mut Vec<u8>) {
    frame(into, |writer| {
        write_counts(writer, counted.map(|(counts, _)| counts));
        write_message(writer, message, counted.map(|(_, forms)| forms));
    });
}

/// Appends the ring record of META_DATA_RESPONSE with a content, which `content` appends: as many bytes as the response declares.
/// `counts` is `None` in mode original.
pub(crate) fn encode_content(
    counts: Option<Counts>,
    response: EagerResponse<'_>,
    content: impl FnOnce(&mut Vec<u8>),
    into: &mut Vec<u8>,
) {
    frame(into, |writer| {
        write_counts(writer, counts);
        write_eager(writer, response, content);
    });
}

/// Appends a ring record about flow control.
pub fn encode_control(counts: Counts, control: Control, into: &mut Vec<u8>) {
    frame(into, |writer| {
        write_counts(writer, Some(counts));
        match control {
            Control::CountOnly => writer.u8(COUNT_ONLY),
            Control::RingOffer(ring) => {
                writer.u8(RING_OFFER);
                writer.destination(ring);
            }
            Control::RingMoved => writer.u8(RING_MOVED),
        }
    });
}

fn write_counts(writer: &mut Writer<'_>, counts: Option<Counts>) {
    if let Some(counts) = counts {
        writer.u32(counts.receives);
        writer.u32(counts.ring_bytes);
    }
}

/// The length of the ring record that starts with `prefix`, prefix included.
///
/// # Errors
/// [`WireError::Truncated`] or [`WireError::TooLong`] when no record is that long.
pub fn record_length(mode: Mode, prefix: [u8; 4]) -> Result<usize, WireError> {
    let length = super::frame_length(prefix, record_bytes_max(mode))?;
    let shortest = FRAME_BYTES_MIN + if mode.is_counted() { COUNTS_BYTES } else { 0 };
    if length < shortest { Err(WireError::Truncated { field: "frame" }) } else { Ok(length) }
}

fn record_bytes_max(mode: Mode) -> usize {
    if mode.is_counted() { RECORD_BYTES_MAX } else { MESSAGE_BYTES_MAX }
}

/// The ring record that `bytes` encode, all of them, and its counts, which are 0 in mode original. Numbers that it
/// defines for keys are stored in `names`, and keys that it names by a number are looked up there. It carries at most
/// `requests_per_message` requests.
///
/// # Errors
/// [`WireError`] names what is wrong; the peer is faulty or hostile.
#[inline(always)]
pub fn decode_record(
    mode: Mode,
    bytes: &[u8],
    names: &mut NameTable,
    requests_per_message: u32,
) -> Result<(Counts, Record), WireError> {
    let mut reader = open_frame(bytes, record_bytes_max(mode))?;
    let counts = if mode.is_counted() { read_counts(&mut reader)? } else { Counts::default() };
    let kind = reader.u8("kind")?;
    let record = match kind {
        COUNT_ONLY..=RING_MOVED if mode.is_counted() => Record::Control(read_control(kind, &mut reader)?),
        kind => {
            let names = mode.is_counted().then_some(names);
            Record::Message(read_message(kind, &mut reader, names, requests_per_message)?)
        }
    };
    reader.end()?;
    Ok((counts, record))
}

fn read_control(kind: u8, reader: &mut Reader<'_>) -> Result<Control, WireError> {
    match kind {
        COUNT_ONLY => Ok(Control::CountOnly),
        RING_MOVED => Ok(Control::RingMoved),
        _ => {
            let ring = reader.destination()?;
            if ring.capacity > u64::from(RING_BYTES_MAX) {
                return Err(WireError::Inconsistent { field: "ring" });
            }
            Ok(Control::RingOffer(ring))
        }
    }
}

fn read_counts(reader: &mut Reader<'_>) -> Result<Counts, WireError> {
    Ok(Counts { receives: reader.u32("receives")?, ring_bytes: reader.u32("ring bytes")? })
}

/// The bytes of `ask`.
pub fn encode_ask(ask: Ask) -> [u8; ASK_BYTES] {
    words([ask.counts.receives, ask.counts.ring_bytes, ask.answers, ask.wanted])
}

/// The bytes of `answer`.
pub fn encode_answer(answer: Answer) -> [u8; ANSWER_BYTES] {
    words([answer.counts.receives, answer.counts.ring_bytes, answer.asks])
}

/// Decodes an ASK. All bytes of this length are an ASK; [`Flow`](crate::credit::Flow) checks its numbers.
pub fn decode_ask(bytes: [u8; ASK_BYTES]) -> Ask {
    let [receives, ring_bytes, answers, wanted] = numbers(bytes);
    Ask { counts: Counts { receives, ring_bytes }, answers, wanted }
}

/// Decodes an ANSWER. All bytes of this length are an ANSWER; [`Flow`](crate::credit::Flow) checks its numbers.
pub fn decode_answer(bytes: [u8; ANSWER_BYTES]) -> Answer {
    let [receives, ring_bytes, asks] = numbers(bytes);
    Answer { counts: Counts { receives, ring_bytes }, asks }
}

fn words<const WORDS: usize, const BYTES: usize>(numbers: [u32; WORDS]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (word, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
        *word = number.to_le_bytes();
    }
    bytes
}

fn numbers<const WORDS: usize, const BYTES: usize>(bytes: [u8; BYTES]) -> [u32; WORDS] {
    let mut numbers = [0; WORDS];
    for (number, word) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        *number = u32::from_le_bytes(*word);
    }
    numbers
}

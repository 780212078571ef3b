//! Bytes that decode are encoded to the same bytes, except for texts that decoding escapes. All other bytes are refused with an
//! error.

use tensorwire_protocol::{
    Message, Mode, Status, TensorList, WireError,
    limits::{MESSAGE_BYTES_MAX, NAMES_MAX, REQUESTS_PER_MESSAGE_MAX, STATUS_MESSAGE_BYTES_MAX},
    names::NameTable,
    text::is_active,
    wire::{
        self,
        control::{self, ControlFrame},
        record::{self, ANSWER_BYTES, ASK_BYTES, RECORD_BYTES_MAX, Record},
    },
};

use crate::input::{Input, framed};

/// An error has a text, and the same bytes get the same error.
fn displayed(error: &WireError) {
    let shown = error.to_string();
    assert!(!shown.is_empty() && !shown.contains(is_active));
}

/// A message of a ring, without and with a length that fits.
pub(crate) fn message(data: &[u8]) {
    for bytes in [data.to_vec(), framed(data)] {
        tensors(&bytes);
        match wire::decode(&bytes) {
            Ok(message) => {
                let again = wire::encode(&message);
                if again != bytes {
                    assert!(is_escaped(&message), "{message:?}");
                    assert_eq!(wire::decode(&again).as_ref(), Ok(&message));
                }
                assert_eq!(wire::encoded_length(*bytes.first_chunk().unwrap()), Ok(bytes.len()));
            }
            Err(error) => displayed(&error),
        }
    }
}

/// A list of tensors.
fn tensors(bytes: &[u8]) {
    match TensorList::read(bytes) {
        Ok(list) => {
            assert!(bytes.starts_with(&list.head()) && list.byte_length() == bytes.len() as u64);
            assert!(list.tensors().all(|(metadata, place)| place.end - place.start == metadata.byte_length));
        }
        Err(error) => displayed(&error),
    }
}

/// A frame of the control plane, likewise.
pub(crate) fn control_frame(data: &[u8]) {
    for bytes in [data.to_vec(), framed(data)] {
        match ControlFrame::decode(&bytes) {
            Ok(frame) => {
                let again = frame.encode();
                if again != bytes {
                    assert!(status_of(&frame).is_some_and(was_escaped), "{frame:?}");
                    assert_eq!(ControlFrame::decode(&again).as_ref(), Ok(&frame));
                }
                let shown = format!("{frame:?}");
                assert!(!shown.is_empty() && !shown.contains(is_active), "frames are logged");
                assert_eq!(control::encoded_length(*bytes.first_chunk().unwrap()), Ok(bytes.len()));
            }
            Err(error) => displayed(&error),
        }
    }
}

/// The records of one ring, as long as they decode, and the two records beside it.
pub(crate) fn record(data: &[u8]) {
    let mut input = Input::new(data);
    let mode = input.pick(&[Mode::Counted, Mode::Original]);
    let mut names = NameTable::new(input.below(NAMES_MAX as usize + 2) as u32);
    let most = 1 + input.below(REQUESTS_PER_MESSAGE_MAX as usize) as u32;
    let (ask, answer): ([u8; ASK_BYTES], [u8; ANSWER_BYTES]) = (input.array(), input.array());
    assert_eq!(record::encode_ask(record::decode_ask(ask)), ask);
    assert_eq!(record::encode_answer(record::decode_answer(answer)), answer);
    while !input.is_empty() {
        let bytes = match input.flag() {
            true => framed(input.bytes(RECORD_BYTES_MAX)),
            false => input.bytes(RECORD_BYTES_MAX + 1).to_vec(),
        };
        match record::decode_record(mode, &bytes, &mut names, most) {
            Ok((counts, record)) => {
                let length = record::record_length(mode, *bytes.first_chunk().unwrap());
                assert_eq!(length, Ok(bytes.len()));
                let again = plain(mode, counts, &record);
                let longest = if mode == Mode::Original { MESSAGE_BYTES_MAX } else { RECORD_BYTES_MAX };
                if again.len() <= longest {
                    let mut none = NameTable::new(0);
                    let decoded = record::decode_record(mode, &again, &mut none, most);
                    assert_eq!(decoded.as_ref(), Ok(&(counts, record.clone())));
                }
                if !names_keys(&record) && !matches!(&record, Record::Message(message) if is_escaped(message))
                {
                    assert_eq!(again, bytes);
                }
            }
            Err(error) => return displayed(&error),
        }
    }
}

fn is_escaped(message: &Message) -> bool {
    matches!(message, Message::ErrorStatus(error) if was_escaped(&error.status))
}

/// Whether decoding may have changed the text of a status: an escape begins with a backslash.
fn was_escaped(status: &Status) -> bool {
    assert!(!status.message.contains(is_active) && status.message.len() <= STATUS_MESSAGE_BYTES_MAX);
    status.message.contains('\\')
}

fn status_of(frame: &ControlFrame) -> Option<&Status> {
    match frame {
        ControlFrame::Refused { status, .. }
        | ControlFrame::Disconnected { status, .. }
        | ControlFrame::Goodbye { status } => Some(status),
        _ => None,
    }
}

fn names_keys(record: &Record) -> bool {
    matches!(record, Record::Message(message) if !message.requests().is_empty())
}

/// The record with all its keys written out.
fn plain(mode: Mode, counts: tensorwire_protocol::credit::Counts, record: &Record) -> Vec<u8> {
    let mut bytes = Vec::new();
    match record {
        Record::Message(message) => {
            let counted = (mode == Mode::Counted).then_some((counts, &[][..]));
            record::encode_message(counted, message, &mut bytes);
        }
        Record::Control(control) => record::encode_control(counts, *control, &mut bytes),
    }
    bytes
}

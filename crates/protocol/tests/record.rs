//! The records of a ring: round trips, refusals, and keys by number.

#![allow(clippy::unwrap_used, reason = "the lints spare test functions, not their helpers")]

use tensorwire_protocol::{
    Destination, Message, Mode, RequestIndex, Scope, TensorRequest, Want, WireError,
    credit::{Answer, Ask, Counts},
    limits::{MESSAGE_BYTES_MAX, SLOT_BYTES},
    names::{NameForm, NameTable},
    wire::{
        self,
        record::{
            ANSWER_BYTES, ASK_BYTES, Control, RECORD_BYTES_MAX, Record, decode_answer, decode_ask,
            decode_record, encode_answer, encode_ask, encode_control, encode_message, record_length,
        },
    },
};

fn decode(mode: Mode, bytes: &[u8]) -> Result<(Counts, Record), WireError> {
    decode_record(mode, bytes, &mut NameTable::new(4), 4)
}

#[test]
fn ring_records_name_keys_by_number() {
    let key = "a key that is spelt out once".into();
    let request = TensorRequest {
        index: RequestIndex(1),
        scope: Scope::Published,
        key,
        known: [].into(),
        want: Want::Write(None),
        arguments: None,
    };
    let message = Message::TensorRequest(request);
    let counts = Counts::default();
    let encoded = |form| {
        let mut bytes = Vec::new();
        encode_message(Some((counts, &[form])), &message, &mut bytes);
        bytes
    };
    let mut names = NameTable::new(4);
    let whole = Ok((counts, Record::Message(message.clone())));
    for form in [NameForm::Plain, NameForm::Define(3), NameForm::Number(3), NameForm::Number(3)] {
        assert_eq!(decode_record(Mode::Counted, &encoded(form), &mut names, 1), whole, "{form:?}");
    }
    assert_eq!(encoded(NameForm::Plain).len() - encoded(NameForm::Number(3)).len(), 2 + 28 - 2);
    for form in [NameForm::Number(2), NameForm::Number(4), NameForm::Define(4)] {
        let refused = decode_record(Mode::Counted, &encoded(form), &mut names, 1);
        assert!(matches!(refused, Err(WireError::UnknownName(_))), "{form:?}: {refused:?}");
    }
}

#[test]
fn ring_records_come_back_with_their_counts() {
    let counts = Counts { receives: 7, ring_bytes: u32::MAX };
    let ring = Destination { region: 1, generation: 2, offset: 3, capacity: 32 << 10, result: None };
    for control in [Control::CountOnly, Control::RingOffer(ring), Control::RingMoved] {
        let mut bytes = Vec::new();
        encode_control(counts, control, &mut bytes);
        let length = record_length(Mode::Counted, *bytes.first_chunk().unwrap()).unwrap();
        assert_eq!(length, bytes.len());
        assert_eq!(decode(Mode::Counted, &bytes), Ok((counts, Record::Control(control))));
        assert!(decode(Mode::Original, &bytes).is_err(), "mode original has no counts");
        for cut in 4..bytes.len() {
            let mut short = bytes[..cut].to_vec();
            short[..4].copy_from_slice(&(cut as u32).to_le_bytes());
            assert!(decode(Mode::Counted, &short).is_err(), "{control:?} cut at {cut}");
        }
    }
    let message = Message::Cancel(RequestIndex(5));
    let mut bytes = Vec::new();
    encode_message(Some((counts, &[NameForm::Plain])), &message, &mut bytes);
    assert_eq!(decode(Mode::Counted, &bytes), Ok((counts, Record::Message(message.clone()))));
    bytes.clear();
    encode_message(None, &message, &mut bytes);
    assert_eq!(bytes, wire::encode(&message), "in mode original a ring holds bare messages");
    assert_eq!(decode(Mode::Original, &bytes), Ok((Counts::default(), Record::Message(message))));
}

#[test]
fn d_ring_records_of_impossible_lengths_are_refused() {
    for mode in [Mode::Original, Mode::Counted] {
        let most = if mode == Mode::Original { MESSAGE_BYTES_MAX } else { RECORD_BYTES_MAX };
        let least = if mode == Mode::Original { 5 } else { 13 };
        for length in [0, 4, least - 1, most + 1, u32::MAX as usize] {
            assert!(record_length(mode, (length as u32).to_le_bytes()).is_err(), "{mode:?} {length}");
        }
        for length in [least, most] {
            assert_eq!(record_length(mode, (length as u32).to_le_bytes()), Ok(length));
        }
    }
}

#[test]
fn asks_and_answers_come_back() {
    let counts = Counts { receives: 1, ring_bytes: 2 };
    let ask = Ask { counts, answers: 3, wanted: 4 };
    assert_eq!(decode_ask(encode_ask(ask)), ask);
    let answer = Answer { counts, asks: u32::MAX };
    assert_eq!(decode_answer(encode_answer(answer)), answer);
    assert_ne!(ASK_BYTES, ANSWER_BYTES, "lengths tell them apart");
    assert!(ASK_BYTES.max(ANSWER_BYTES) <= SLOT_BYTES as usize);
}

#[test]
fn ring_records_hold_several_requests_each_with_its_form_and_at_most_as_many_as_agreed() {
    let request = |index, key: &str| TensorRequest {
        index: RequestIndex(index),
        scope: Scope::Published,
        key: key.into(),
        known: [].into(),
        want: Want::Write(None),
        arguments: None,
    };
    let requests = vec![request(1, "a"), request(2, "b"), request(3, "a"), request(4, "c")];
    let message = Message::TensorRequests(requests);
    let forms = [NameForm::Define(0), NameForm::Plain, NameForm::Number(0), NameForm::Define(3)];
    let mut bytes = Vec::new();
    encode_message(Some((Counts::default(), &forms)), &message, &mut bytes);
    let decode = |bytes: &[u8], most| decode_record(Mode::Counted, bytes, &mut NameTable::new(4), most);
    assert_eq!(decode(&bytes, 4), Ok((Counts::default(), Record::Message(message.clone()))));
    let too_long = WireError::TooLong { field: "requests", length: 4, limit: 3 };
    assert_eq!(decode(&bytes, 3), Err(too_long), "before any is read");
    for cut in 4..bytes.len() {
        let mut short = bytes[..cut].to_vec();
        short[..4].copy_from_slice(&(cut as u32).to_le_bytes());
        assert!(decode(&short, 4).is_err(), "cut at {cut}");
    }
    // An impossible number of requests allocates nothing. Fewer than two requests have another kind.
    let count_at = 4 + 8 + 1;
    for (count, error) in [
        (0u32, WireError::Inconsistent { field: "requests" }),
        (1, WireError::Inconsistent { field: "requests" }),
        (500, WireError::Truncated { field: "requests" }),
        (u32::MAX, WireError::TooLong { field: "requests", length: u32::MAX as usize, limit: 512 }),
    ] {
        let mut other = bytes.clone();
        other[count_at..count_at + 4].copy_from_slice(&count.to_le_bytes());
        assert_eq!(decode(&other, 512), Err(error), "{count} requests");
    }
    let mut fewer = bytes;
    fewer[count_at] = 3;
    assert!(matches!(decode(&fewer, 4), Err(WireError::Trailing { .. })));
}

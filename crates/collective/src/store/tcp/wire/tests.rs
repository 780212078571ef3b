use proptest::prelude::*;

use super::*;

fn requests() -> Vec<Request> {
    let key = || "rank/0".to_owned();
    let longest = || "k".repeat(KEY_BYTES_MAX);
    vec![
        Request::Set { key: key(), value: vec![] },
        Request::Set { key: longest(), value: vec![7; VALUE_BYTES_MAX] },
        Request::Get { keys: vec![] },
        Request::Get { keys: vec!["k".to_owned(); KEYS_MAX] },
        Request::Wait { limit: u64::MAX, keys: vec![key(), longest()] },
        Request::Add { key: key(), delta: i64::MIN },
        Request::CompareSet { key: key(), expected: None, value: vec![1] },
        Request::CompareSet {
            key: longest(),
            expected: Some(vec![1; VALUE_BYTES_MAX]),
            value: vec![2; VALUE_BYTES_MAX],
        },
        Request::Delete { key: key() },
        Request::Cancel,
    ]
}

fn answers() -> Vec<Answer> {
    let value = |bytes: usize| Some(Value::from(vec![3; bytes]));
    let refusals = (1..=6).map(|code| Answer::Refused(why(code).unwrap(), 9));
    let mut answers = vec![
        Answer::Done,
        Answer::Values(vec![]),
        Answer::Values(vec![None, value(0), value(VALUE_BYTES_MAX)]),
        Answer::Missing(vec![]),
        Answer::Missing((0..KEYS_MAX as u32).collect()),
        Answer::Number(-1),
        Answer::Value(None),
        Answer::Value(value(VALUE_BYTES_MAX)),
        Answer::Deleted(true),
        Answer::Deleted(false),
    ];
    answers.extend(refusals);
    answers
}

/// Where to cut a frame: everywhere, but few positions within long values.
fn cuts(frame: &[u8]) -> impl Iterator<Item = usize> {
    let length = frame.len();
    (0..length.min(64)).chain((64..length).step_by(65_537)).chain(length.saturating_sub(8).max(64)..length)
}

#[test]
fn what_is_encoded_is_decoded_and_no_part_of_it() {
    for request in requests() {
        let frame = request.encode(5);
        assert_eq!(frame_length(&frame), Ok(Some(frame.len() - LENGTH_BYTES)));
        let body = &frame[LENGTH_BYTES..];
        assert_eq!(Request::decode(body), Ok((5, request)));
        assert!(cuts(body).all(|cut| Request::decode(&body[..cut]).is_err()));
        assert!(Request::decode(&[body, &[0]].concat()).is_err());
    }
    for answer in answers() {
        let frame = answer.encode(u64::MAX);
        assert_eq!(frame_length(&frame), Ok(Some(frame.len() - LENGTH_BYTES)));
        let body = &frame[LENGTH_BYTES..];
        assert_eq!(Answer::decode(body), Ok((u64::MAX, answer)));
        assert!(cuts(body).all(|cut| Answer::decode(&body[..cut]).is_err()));
        assert!(Answer::decode(&[body, &[0]].concat()).is_err());
    }
}

#[test]
fn a_frame_has_a_length_from_the_least_to_the_most() {
    let of = |length: usize| frame_length(&(length as u32).to_le_bytes());
    assert!(of(0).is_err() && of(FRAME_BYTES_MIN - 1).is_err());
    assert_eq!(of(FRAME_BYTES_MIN), Ok(Some(FRAME_BYTES_MIN)));
    assert_eq!(of(FRAME_BYTES_MAX), Ok(Some(FRAME_BYTES_MAX)));
    assert!(of(FRAME_BYTES_MAX + 1).is_err() && of(u32::MAX as usize).is_err());
    for cut in 0..LENGTH_BYTES {
        assert_eq!(frame_length(&[0xff; LENGTH_BYTES][..cut]), Ok(None));
    }
}

/// A frame of `kind` without its length.
fn body(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    [&[0; 8][..], &[kind], &fields.concat()].concat()
}

#[test]
fn a_key_has_a_length_from_1_to_the_most() {
    let of = |length: usize| {
        let key = vec![b'k'; length];
        Request::decode(&body(DELETE, &[&(length as u16).to_le_bytes(), &key]))
    };
    assert_eq!(of(0), Err(Malformed("a key of a length that no key has")));
    assert!(of(1).is_ok() && of(KEY_BYTES_MAX).is_ok());
    assert_eq!(of(KEY_BYTES_MAX + 1), Err(Malformed("a key of a length that no key has")));
    let not_text = Request::decode(&body(DELETE, &[&1u16.to_le_bytes(), &[0xff]]));
    assert_eq!(not_text, Err(Malformed("a key that is not UTF-8")));
}

#[test]
fn a_value_has_a_length_from_0_to_the_most() {
    let of = |length: usize| {
        let value = vec![1; length];
        let request = body(SET, &[&1u16.to_le_bytes(), b"k", &(length as u32).to_le_bytes(), &value]);
        let answer = body(VALUE, &[&[1], &(length as u32).to_le_bytes(), &value]);
        (Request::decode(&request).map(drop), Answer::decode(&answer).map(drop))
    };
    let too_long = Err(Malformed("a value longer than values are"));
    assert_eq!(of(0), (Ok(()), Ok(())));
    assert_eq!(of(VALUE_BYTES_MAX), (Ok(()), Ok(())));
    assert_eq!(of(VALUE_BYTES_MAX + 1), (too_long, too_long));
}

#[test]
fn a_request_has_at_most_so_many_keys() {
    let of = |count: usize| {
        let keys = [1u8, 0, b'k'].repeat(count);
        let get = Request::decode(&body(GET, &[&(count as u32).to_le_bytes(), &keys])).map(drop);
        let values = vec![0; count];
        let values = Answer::decode(&body(VALUES, &[&(count as u32).to_le_bytes(), &values])).map(drop);
        let indices = vec![0; 4 * count];
        (get, values, Answer::decode(&body(MISSING, &[&(count as u32).to_le_bytes(), &indices])).map(drop))
    };
    let too_many = Err(Malformed("more keys than a request has"));
    assert_eq!(of(0), (Ok(()), Ok(()), Ok(())));
    assert_eq!(of(KEYS_MAX), (Ok(()), Ok(()), Ok(())));
    assert_eq!(of(KEYS_MAX + 1), (too_many, too_many, too_many));
    // A count that the frame does not have allocates nothing for it.
    let claimed = body(GET, &[&(KEYS_MAX as u32).to_le_bytes()]);
    assert_eq!(Request::decode(&claimed), Err(Malformed("a frame that ends too early")));
}

#[test]
fn kinds_flags_and_reasons_that_are_none_are_refused() {
    for kind in [0, 8, 128, 136, 255] {
        assert!(Request::decode(&body(kind, &[])).is_err() && Answer::decode(&body(kind, &[])).is_err());
    }
    assert!(Answer::decode(&body(DELETED, &[&[2]])).is_err());
    for code in [0, 7, 255] {
        assert!(Answer::decode(&body(REFUSED, &[&[code], &[0; 8]])).is_err());
    }
}

#[test]
fn values_that_fit_into_no_frame_are_left_out() {
    let value = || Some(Value::from(vec![0; VALUE_BYTES_MAX]));
    let Answer::Values(values) = Answer::values(vec![value(), None, value(), value(), value(), None]) else {
        panic!("values are answered by values");
    };
    assert_eq!(values.len(), 4);
    let frame = Answer::Values(values).encode(1);
    assert!(frame_length(&frame).is_ok());
    assert_eq!(Answer::values(vec![None; KEYS_MAX]), Answer::Values(vec![None; KEYS_MAX]));
}

#[test]
fn a_hello_names_its_version_and_its_limit() {
    for full in [None, Some(0), Some(u32::MAX)] {
        let welcome = Welcome { version: 3, full, instance: 11 };
        assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    }
    assert_eq!(client_version(&client_hello()), Ok(VERSION));
    assert!(client_version(b"GET / HTTP/1.1\r\nHost: x\r").is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_are_what_they_encode(
        number in any::<[u8; 8]>(),
        kind in prop_oneof![0u8..10, 128u8..140, any::<u8>()],
        rest in proptest::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..40),
    ) {
        let body = [&number[..], &[kind], &rest].concat();
        if let Ok((number, request)) = Request::decode(&body) {
            prop_assert_eq!(&request.encode(number)[LENGTH_BYTES..], &body[..]);
        }
        if let Ok((number, answer)) = Answer::decode(&body) {
            prop_assert_eq!(&answer.encode(number)[LENGTH_BYTES..], &body[..]);
        }
    }

    #[test]
    fn any_bytes_at_all_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = (frame_length(&bytes), Request::decode(&bytes), Answer::decode(&bytes));
        if let Some(hello) = bytes.first_chunk() {
            let _ = Welcome::decode(hello);
        }
    }
}

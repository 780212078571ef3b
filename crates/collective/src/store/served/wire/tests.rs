use proptest::prelude::*;
use tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;

use super::*;

/// The fields of a store frame beside its body.
const FRAME_BYTES: usize = 16;

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
    ]
}

fn responses() -> Vec<Response> {
    let value = |bytes: usize| Some(Value::from(vec![3; bytes]));
    let answers = vec![
        Answer::Done,
        Answer::Values(vec![]),
        Answer::Values(vec![None, value(0), value(VALUE_BYTES_MAX)]),
        Answer::Sum(-1),
        Answer::Value(None),
        Answer::Value(value(VALUE_BYTES_MAX)),
        Answer::Deleted(true),
        Answer::Deleted(false),
    ];
    let missing = [vec![], (0..KEYS_MAX as u32).collect()].into_iter().map(Response::Missing);
    let refusals = (1..=5).map(|code| Response::Refused(why(code).unwrap(), 9));
    answers.into_iter().map(Response::Answer).chain(missing).chain(refusals).collect()
}

/// Where to cut a body: everywhere, but few positions within long values.
fn cuts(body: &[u8]) -> impl Iterator<Item = usize> {
    let length = body.len();
    (0..length.min(64)).chain((64..length).step_by(65_537)).chain(length.saturating_sub(8).max(64)..length)
}

#[test]
fn what_is_encoded_is_decoded_and_no_part_of_it() {
    for request in requests() {
        let body = &*request.encode();
        assert!(body.len() < CONTROL_FRAME_BYTES_MAX - FRAME_BYTES, "{request:?}");
        assert_eq!(Request::decode(body), Ok(request));
        assert!(cuts(body).all(|cut| Request::decode(&body[..cut]).is_err()));
        assert!(Request::decode(&[body, &[0]].concat()).is_err());
    }
    for answer in responses() {
        let body = &*answer.encode();
        assert!(body.len() < CONTROL_FRAME_BYTES_MAX - FRAME_BYTES, "{answer:?}");
        assert_eq!(Response::decode(body), Ok(answer));
        assert!(cuts(body).all(|cut| Response::decode(&body[..cut]).is_err()));
        assert!(Response::decode(&[body, &[0]].concat()).is_err());
    }
}

/// A body of `kind`.
fn body(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    [&[kind][..], &fields.concat()].concat()
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
        (Request::decode(&request).map(drop), Response::decode(&answer).map(drop))
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
        let values = Response::decode(&body(VALUES, &[&(count as u32).to_le_bytes(), &values])).map(drop);
        let indices = vec![0; 4 * count];
        (get, values, Response::decode(&body(MISSING, &[&(count as u32).to_le_bytes(), &indices])).map(drop))
    };
    let too_many = Err(Malformed("more keys than a request has"));
    assert_eq!(of(0), (Ok(()), Ok(()), Ok(())));
    assert_eq!(of(KEYS_MAX), (Ok(()), Ok(()), Ok(())));
    assert_eq!(of(KEYS_MAX + 1), (too_many, too_many, too_many));
    // A count that the body does not have allocates nothing for it.
    let claimed = body(GET, &[&(KEYS_MAX as u32).to_le_bytes()]);
    assert_eq!(Request::decode(&claimed), Err(Malformed("a body that ends too early")));
}

#[test]
fn kinds_flags_and_reasons_that_are_none_are_refused() {
    for kind in [0, 7, 128, 136, 255] {
        assert!(Request::decode(&body(kind, &[])).is_err() && Response::decode(&body(kind, &[])).is_err());
    }
    assert!(Response::decode(&body(DELETED, &[&[2]])).is_err());
    for code in [0, 6, 255] {
        assert!(Response::decode(&body(REFUSED, &[&[code], &[0; 8]])).is_err());
    }
}

#[test]
fn values_that_fit_into_no_answer_are_left_out() {
    let value = || Some(Value::from(vec![0; VALUE_BYTES_MAX]));
    let Response::Answer(Answer::Values(values)) =
        Response::values(vec![value(), None, value(), value(), None])
    else {
        panic!("values are answered by values");
    };
    assert_eq!(values.len(), 2);
    assert!(Response::Answer(Answer::Values(values)).encode().len() < CONTROL_FRAME_BYTES_MAX - FRAME_BYTES);
    let none = vec![None; KEYS_MAX];
    assert_eq!(Response::values(none.clone()), Response::Answer(Answer::Values(none)));
}

#[test]
fn a_part_has_its_number_of_keys_and_bytes_at_most_and_one_at_least() {
    let keys = |length: usize| vec!["k".repeat(length); 2 * KEYS_MAX];
    for (part, count, longest) in [(Part::READ, KEYS_MAX, 256), (Part::WAIT, 256, 64)] {
        assert_eq!((part.of(&keys(1)).len(), part.of(&keys(KEY_BYTES_MAX)).len()), (count, longest));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_are_what_they_encode(
        kind in prop_oneof![0u8..10, 128u8..140, any::<u8>()],
        rest in proptest::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..40),
    ) {
        let body = [&[kind][..], &rest].concat();
        if let Ok(request) = Request::decode(&body) {
            prop_assert_eq!(&request.encode(), &body);
        }
        if let Ok(answer) = Response::decode(&body) {
            prop_assert_eq!(&answer.encode(), &body);
        }
    }

    #[test]
    fn any_bytes_at_all_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = (Request::decode(&bytes), Response::decode(&bytes));
    }
}

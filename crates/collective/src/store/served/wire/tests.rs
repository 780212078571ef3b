use proptest::prelude::*;
use tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;

use super::{
    super::super::{KEY_BYTES_MAX, board::Counted, rules::NoSum},
    *,
};

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
    let sums = [NoSum::NotANumber, NoSum::Overflow].map(Refused::NoSum);
    let limits = [Counted::Keys, Counted::Bytes, Counted::Waits].map(Refused::Full);
    let refusals = sums.into_iter().chain(limits).map(|why| Response::Refused(why, 9));
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

#[test]
fn a_key_has_a_length_from_1_to_the_most() {
    let of = |length: usize| Request::decode(&Request::Delete { key: "k".repeat(length) }.encode());
    let wrong = Err(Malformed("a key or a value of a length that none has"));
    assert_eq!(of(0), wrong);
    assert!(of(1).is_ok() && of(KEY_BYTES_MAX).is_ok());
    assert_eq!(of(KEY_BYTES_MAX + 1), wrong);
    let mut not_text = Request::Delete { key: "k".to_owned() }.encode();
    *not_text.last_mut().unwrap() = 0xff;
    assert!(Request::decode(&not_text).is_err());
    let keys = vec!["k".to_owned(), String::new()];
    assert_eq!(Request::decode(&Request::Get { keys: keys.clone() }.encode()), wrong);
    assert_eq!(Request::decode(&Request::Wait { limit: 1, keys }.encode()), wrong);
}

#[test]
fn a_value_has_a_length_from_0_to_the_most() {
    let of = |length: usize| {
        let value = vec![1; length];
        let set = Request::Set { key: "k".to_owned(), value: value.clone() };
        let answers = [Answer::value(Some(value.clone())), Answer::values(vec![None, Some(value)])];
        let answers = answers.map(|answer| Response::decode(&Response::Answer(answer).encode()).map(drop));
        (Request::decode(&set.encode()).map(drop), answers)
    };
    assert_eq!(of(0), (Ok(()), [Ok(()), Ok(())]));
    assert_eq!(of(VALUE_BYTES_MAX), (Ok(()), [Ok(()), Ok(())]));
    let (set, answers) = of(VALUE_BYTES_MAX + 1);
    assert!(set.is_err());
    assert_eq!(answers, [Err(Malformed("a value longer than values are")); 2]);
}

#[test]
fn a_request_has_at_most_so_many_keys() {
    let of = |count: usize| {
        let keys = vec!["k".to_owned(); count];
        [
            Request::decode(&Request::Get { keys: keys.clone() }.encode()).is_ok(),
            Request::decode(&Request::Wait { limit: 1, keys }.encode()).is_ok(),
            Response::decode(&Response::Answer(Answer::Values(vec![None; count])).encode()).is_ok(),
            Response::decode(&Response::Missing(vec![0; count]).encode()).is_ok(),
        ]
    };
    assert_eq!((of(0), of(KEYS_MAX), of(KEYS_MAX + 1)), ([true; 4], [true; 4], [false; 4]));
    // A count that the body does not have allocates nothing for it.
    let mut claimed = Request::Get { keys: vec![] }.encode();
    claimed.splice(1.., [0xff, 0xff, 0xff, 0xff, 0x0f]);
    assert!(Request::decode(&claimed).is_err());
}

#[test]
fn kinds_flags_and_reasons_that_are_none_are_refused() {
    for kind in [6, 7, 128, 136, 255] {
        assert!(Request::decode(&[kind]).is_err() && Response::decode(&[kind]).is_err());
    }
    let mut deleted = Response::Answer(Answer::Deleted(true)).encode();
    *deleted.last_mut().unwrap() = 2;
    assert!(Response::decode(&deleted).is_err());
    let refused = Response::Refused(Refused::Full(Counted::Waits), 0).encode();
    let none = (3..=u8::MAX).map(|reason| [&refused[..2], &[reason], &refused[3..]].concat());
    assert!(none.into_iter().all(|body| Response::decode(&body).is_err()));
}

#[test]
fn a_number_is_encoded_in_one_way_alone() {
    let short = Request::Get { keys: vec!["k".to_owned()] }.encode();
    assert_eq!(short, [1, 1, 1, b'k']);
    assert!(Request::decode(&[1, 0x81, 0, 1, b'k']).is_err());
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
        kind in prop_oneof![0u8..7, any::<u8>()],
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

//! The wire format: round trips, refusals, and limits at their edges.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the lints spare test functions, not their helpers"
)]

mod control;
mod shown;
mod subscriptions;
mod tensors;
mod values;

use proptest::prelude::*;
use tensorwire_protocol::{
    CallTerms, Code, DataType, ErrorStatus, Message, MetaDataResponse, Metadata, RequestIndex, Scope, Shape,
    Status, TensorRequest, TraceContext, Want, WireError,
    limits::{
        EAGER_BYTES_MAX, MESSAGE_BYTES_MAX, NAME_BYTES_MAX, RANK_MAX, STATUS_DETAILS_BYTES_MAX,
        STATUS_MESSAGE_BYTES_MAX, TENSOR_BYTES_MAX,
    },
    wire::{self, control::ControlFrame},
};

use values::*;

proptest! {
    #[test]
    fn message_round_trip(message in message()) {
        let bytes = wire::encode(&message);
        prop_assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        prop_assert_eq!(wire::encoded_length(bytes[..4].try_into().unwrap()), Ok(bytes.len()));
        prop_assert_eq!(wire::decode(&bytes), Ok(message));
    }

    #[test]
    fn control_round_trip(frame in control_frame()) {
        let bytes = frame.encode();
        let length = wire::control::encoded_length(bytes[..4].try_into().unwrap());
        prop_assert_eq!(length, Ok(bytes.len()));
        prop_assert_eq!(ControlFrame::decode(&bytes), Ok(frame));
    }

    #[test]
    fn s5_arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = wire::decode(&bytes);
        let _ = ControlFrame::decode(&bytes);
        // With an honest length, the fields are reached.
        let mut framed = u32::try_from(bytes.len() + 4).unwrap().to_le_bytes().to_vec();
        framed.extend_from_slice(&bytes);
        let _ = wire::decode(&framed);
        let _ = ControlFrame::decode(&framed);
    }

    #[test]
    fn s5_damaged_frames_never_panic_and_cut_ones_are_refused(
        message in message(), frame in control_frame(), at: prop::sample::Index, bits in 1u8..,
    ) {
        for bytes in [wire::encode(&message), frame.encode()] {
            let cut = &bytes[..at.index(bytes.len())];
            prop_assert!(wire::decode(cut).is_err() && ControlFrame::decode(cut).is_err());
            let mut damaged = bytes.clone();
            damaged[at.index(bytes.len())] ^= bits;
            let _ = wire::decode(&damaged);
            let _ = ControlFrame::decode(&damaged);
        }
    }

    #[test]
    fn status_text_is_cut_at_a_character(fill in 0usize..8, extra in 1usize..100) {
        let mut message = "x".repeat(STATUS_MESSAGE_BYTES_MAX - fill);
        message.push_str(&"\u{1F980}".repeat(extra));
        let details = vec![0; STATUS_DETAILS_BYTES_MAX + 1];
        let long = Status { code: Code::Internal, message: message.clone(), details };
        let error = ErrorStatus { index: RequestIndex(1), status: long };
        let decoded = wire::decode(&wire::encode(&Message::ErrorStatus(error))).unwrap();
        let Message::ErrorStatus(ErrorStatus { status, .. }) = decoded else { panic!("{decoded:?}") };
        prop_assert!(message.starts_with(&status.message));
        prop_assert!(status.message.len() > STATUS_MESSAGE_BYTES_MAX - 4);
        prop_assert!(status.details.is_empty());
    }
}

fn request_for(key: &str, known: &[Metadata]) -> Message {
    let capacity = largest(known);
    let destination = (capacity > 0).then(|| plain(0, capacity));
    request_with(key, known, Want::Write(destination))
}

fn request_with(key: &str, known: &[Metadata], want: Want) -> Message {
    let (index, scope) = (RequestIndex(0), Scope::Published);
    Message::TensorRequest(TensorRequest {
        index,
        scope,
        key: key.into(),
        known: known.into(),
        want,
        arguments: None,
    })
}

fn response_of(metadata: Metadata) -> Message {
    Message::MetaDataResponse(MetaDataResponse {
        index: RequestIndex(0),
        metadata,
        content: None,
        loan_follows: false,
        checksum: None,
    })
}

fn round_trip(message: &Message) -> Result<Message, WireError> {
    wire::decode(&wire::encode(message))
}

#[test]
fn s12_key_of_512_513_1024_bytes_travels_and_1025_is_refused() {
    for length in [0, 1, 512, 513, NAME_BYTES_MAX] {
        let message = request_for(&"k".repeat(length), &[]);
        assert_eq!(round_trip(&message), Ok(message));
    }
    let too_long = WireError::TooLong { field: "key", length: 1025, limit: NAME_BYTES_MAX };
    assert_eq!(round_trip(&request_for(&"k".repeat(1025), &[])), Err(too_long));
}

#[test]
fn s12_rank_0_6_7_254_travels_and_255_is_refused() {
    for rank in [0, 6, 7, RANK_MAX] {
        let metadata = Metadata::new(DataType::F32, Shape::new(vec![1; rank]).unwrap()).unwrap();
        let request = request_for("k", std::slice::from_ref(&metadata));
        for message in [request, response_of(metadata)] {
            assert_eq!(round_trip(&message), Ok(message));
        }
    }
    assert_eq!(Shape::new(vec![1; 255]), None);
    let widest = Metadata::new(DataType::U8, Shape::new(vec![1; RANK_MAX]).unwrap()).unwrap();
    let mut bytes = wire::encode(&response_of(widest));
    let rank_at = 4 + 1 + 4 + 2 + 1;
    assert_eq!(bytes[rank_at], 254);
    bytes[rank_at] = 255;
    let too_long = WireError::TooLong { field: "rank", length: 255, limit: RANK_MAX };
    assert_eq!(wire::decode(&bytes), Err(too_long));
}

#[test]
fn s12_dimensions_65534_65535_and_2_to_the_32_travel() {
    for dimension in [65534, 65535, 65536, 1 << 32] {
        for dimensions in [vec![dimension], vec![2, dimension], vec![1, 1, 1, dimension]] {
            let metadata = Metadata::new(DataType::I8, Shape::new(dimensions).unwrap()).unwrap();
            let message = response_of(metadata);
            assert_eq!(round_trip(&message), Ok(message));
        }
    }
}

#[test]
fn the_largest_message_fits() {
    let widest = Metadata::new(DataType::U8, Shape::new(vec![1; RANK_MAX]).unwrap()).unwrap();
    // As many metadata of this rank as a receiver remembers.
    let known = [widest.clone(), widest.clone(), widest.clone()];
    let mut eager = widest;
    let mut dimensions = eager.shape.dimensions().to_vec();
    dimensions[0] = EAGER_BYTES_MAX.into();
    (eager.shape, eager.byte_length) = (Shape::new(dimensions).unwrap(), EAGER_BYTES_MAX.into());
    let content = Some(vec![1; EAGER_BYTES_MAX as usize].into());
    let response = MetaDataResponse {
        index: RequestIndex(0),
        metadata: eager,
        content,
        loan_follows: false,
        checksum: None,
    };
    // Only lists of tensors answer calls, so their metadata are short.
    let lists = [4097, 5000, 6000, 7000]
        .map(|bytes| Metadata::new(DataType::U8, Shape::new([bytes]).unwrap()).unwrap());
    let Message::TensorRequest(request) = request_for(&"k".repeat(NAME_BYTES_MAX), &lists) else { panic!() };
    let scope = Scope::Call(CallTerms { limit_ms: 1, offered: None, trace: TraceContext::new(1, 2, 3) });
    let arguments = Some(vec![1; EAGER_BYTES_MAX as usize].into());
    let call = Message::TensorRequest(TensorRequest { scope, arguments, ..request });
    let requests = [request_for(&"k".repeat(NAME_BYTES_MAX), &known), call];
    let largest = requests.into_iter().chain([Message::MetaDataResponse(response)]);
    for message in largest {
        let bytes = wire::encode(&message);
        assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{}", bytes.len());
        assert_eq!(wire::decode(&bytes), Ok(message));
    }
}

#[test]
fn byte_length_must_be_that_of_type_and_shape() {
    let live = |byte_length| Metadata {
        dtype: DataType::F32,
        shape: Shape::new([2, 3]).unwrap(),
        is_dead: false,
        byte_length,
    };
    assert!(round_trip(&response_of(live(24))).is_ok());
    for byte_length in [0, 23, 25, u64::MAX] {
        let expected = Err(WireError::Inconsistent { field: "byte length" });
        assert_eq!(round_trip(&response_of(live(byte_length))), expected);
    }
    let dead = Metadata { is_dead: true, ..live(24) };
    assert_eq!(round_trip(&response_of(dead)), Err(WireError::Inconsistent { field: "byte length" }));
}

#[test]
fn a_loan_of_no_bytes_is_refused() {
    let of = |bytes| Metadata::new(DataType::U8, Shape::new([bytes]).unwrap()).unwrap();
    let lent = |metadata| {
        let index = RequestIndex(0);
        Message::MetaDataResponse(MetaDataResponse {
            index,
            metadata,
            content: None,
            loan_follows: true,
            checksum: None,
        })
    };
    assert_eq!(round_trip(&lent(of(1))), Ok(lent(of(1))));
    assert_eq!(round_trip(&lent(of(0))), Err(WireError::Inconsistent { field: "content" }));
    let mut bytes = wire::encode(&lent(of(1)));
    *bytes.last_mut().unwrap() = 3;
    assert_eq!(wire::decode(&bytes), Err(WireError::Unknown { field: "content", value: 3 }));
}

#[test]
fn tensors_above_the_limit_are_refused() {
    let of = |bytes| Metadata::new(DataType::U8, Shape::new([bytes]).unwrap()).unwrap();
    assert!(round_trip(&response_of(of(TENSOR_BYTES_MAX))).is_ok());
    let refused = round_trip(&response_of(of(TENSOR_BYTES_MAX + 1)));
    assert!(matches!(refused, Err(WireError::TooLong { field: "byte length", .. })), "{refused:?}");
}

#[test]
fn a_destination_comes_with_known_bytes_and_takes_the_most_of_them() {
    let of = |bytes| Metadata::new(DataType::U8, Shape::new([bytes]).unwrap()).unwrap();
    let at = |capacity| Want::Write(Some(plain(0, capacity)));
    let beyond = plain(u64::MAX - 7, 8);
    let refused: [(&[Metadata], Want); 8] = [
        (&[of(8)], Want::Write(None)),
        (&[of(8)], at(7)),
        (&[of(7), of(8), of(0)], at(7)),
        (&[of(0)], at(8)),
        (&[], at(8)),
        (&[of(8)], Want::Write(Some(beyond))),
        (&[], Want::Eager),
        (&[of(8), of(4097)], Want::Eager),
    ];
    for (known, want) in refused {
        let result = round_trip(&request_with("k", known, want));
        assert!(matches!(result, Err(WireError::Inconsistent { .. })), "{want:?}: {result:?}");
    }
    for (known, want) in [(vec![of(7), of(8), of(0)], at(8)), (vec![of(4096), of(0)], Want::Eager)] {
        assert!(round_trip(&request_with("k", &known, want)).is_ok());
    }
}

#[test]
fn more_than_four_known_metadata_are_refused() {
    let known = vec![Metadata::dead(DataType::U8, Shape::default()); 5];
    let refused = WireError::TooLong { field: "known metadata", length: 5, limit: 4 };
    assert_eq!(round_trip(&request_with("k", &known, Want::Write(None))), Err(refused));
}

#[test]
fn reserved_indices_are_refused() {
    for index in [1 << 30, 0xFFFF_FFEF, 0xFFFF_FFF0, 0xFFFF_FFFE, 0xFFFF_FFFF] {
        let refused = round_trip(&Message::Cancel(RequestIndex(index)));
        assert_eq!(refused, Err(WireError::ReservedIndex(index)));
    }
    assert!(round_trip(&Message::Cancel(RequestIndex(0x3FFF_FFFF))).is_ok());
}

#[test]
fn frame_lengths_are_checked_before_anything_is_allocated() {
    for length in [0u32, 4] {
        let prefix = length.to_le_bytes();
        assert_eq!(wire::encoded_length(prefix), Err(WireError::Truncated { field: "frame" }));
        assert!(wire::control::encoded_length(prefix).is_err());
    }
    let longest = MESSAGE_BYTES_MAX as u32;
    assert_eq!(wire::encoded_length(longest.to_le_bytes()), Ok(MESSAGE_BYTES_MAX));
    assert!(wire::encoded_length((longest + 1).to_le_bytes()).is_err());
    assert!(wire::encoded_length(u32::MAX.to_le_bytes()).is_err());
    assert!(wire::control::encoded_length((1u32 << 20).to_le_bytes()).is_ok());
    assert!(wire::control::encoded_length(((1u32 << 20) + 1).to_le_bytes()).is_err());
}

#[test]
fn unknown_enums_and_trailing_bytes_are_refused() {
    let cancel = wire::encode(&Message::Cancel(RequestIndex(3)));
    for kind in [0, 31, 255] {
        let mut bytes = cancel.clone();
        bytes[4] = kind;
        let expected = WireError::Unknown { field: "kind", value: kind.into() };
        assert_eq!(wire::decode(&bytes), Err(expected));
    }
    let mut longer = cancel;
    longer.push(0);
    assert_eq!(wire::decode(&longer), Err(WireError::Trailing { bytes: 1 }));
    longer[0] += 1;
    assert_eq!(wire::decode(&longer), Err(WireError::Trailing { bytes: 1 }));
}

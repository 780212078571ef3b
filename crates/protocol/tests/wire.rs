//! The wire format: round trips, refusals, and limits at their edges.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the lints spare test functions, not their helpers"
)]

use proptest::prelude::*;
use protocol::{
    Code, DataType, Destination, ErrorStatus, Message, MetaDataResponse, Metadata, Mode, Parameters,
    RequestIndex, ResultSlot, Scope, Shape, Status, StepId, TensorReRequest, TensorRequest, Validation, Want,
    WireError,
    limits::{
        CONTENTS_MAX, DEPTH_MAX, DEPTH_MIN, EAGER_BYTES_MAX, MESSAGE_BYTES_MAX, NAME_BYTES_MAX, NAMES_MAX,
        RANK_MAX, REQUESTS_MAX, REQUESTS_PER_MESSAGE_MAX, RESULT_SLOT_BYTES, RING_BYTES_MAX, RING_BYTES_MIN,
        SLOT_BYTES, STATUS_DETAILS_BYTES_MAX, STATUS_MESSAGE_BYTES_MAX, TENSOR_BYTES_MAX, WIRE_VERSION,
    },
    wire::{
        self,
        control::{Connect, ControlFrame, FabricOffer, ListEntry, RegionRecord, RingOffer},
    },
};

fn index() -> impl Strategy<Value = RequestIndex> {
    (0u32..1 << 30).prop_map(RequestIndex)
}

fn metadata() -> impl Strategy<Value = Metadata> {
    let dtype = proptest::sample::select(DataType::ALL);
    let dimensions = proptest::collection::vec(0u64..9, 0..8);
    (dtype, dimensions, any::<bool>()).prop_map(|(dtype, dimensions, is_dead)| {
        let shape = Shape::new(dimensions).unwrap();
        if is_dead {
            return Metadata::dead(dtype, shape);
        }
        let encoded = Metadata::encoded(dtype, shape.clone(), 77);
        encoded.unwrap_or_else(|| Metadata::new(dtype, shape).unwrap())
    })
}

fn destination(capacity: u64) -> impl Strategy<Value = Destination> {
    let result = proptest::option::of(result_slot());
    (any::<u32>(), any::<u32>(), 0..u64::MAX - capacity, result).prop_map(
        move |(region, generation, offset, result)| {
            let plain = plain(offset, capacity);
            Destination { region, generation, result, ..plain }
        },
    )
}

fn plain(offset: u64, capacity: u64) -> Destination {
    Destination { region: 0, generation: 0, offset, capacity, result: None }
}

fn result_slot() -> impl Strategy<Value = ResultSlot> {
    let offset = 0..u64::MAX - u64::from(RESULT_SLOT_BYTES);
    let slot = |(region, generation, offset)| ResultSlot { region, generation, offset };
    (any::<u32>(), any::<u32>(), offset).prop_map(slot)
}

fn scope() -> impl Strategy<Value = Scope> {
    prop_oneof![any::<i64>().prop_map(|step| Scope::Step(StepId(step))), Just(Scope::Published)]
}

fn text(bytes_max: usize) -> impl Strategy<Value = String> {
    ".{0,300}".prop_map(move |mut text: String| {
        text.truncate(text.floor_char_boundary(bytes_max));
        text
    })
}

fn status() -> impl Strategy<Value = Status> {
    let details = proptest::collection::vec(any::<u8>(), 0..STATUS_DETAILS_BYTES_MAX);
    (1u32..=16, text(STATUS_MESSAGE_BYTES_MAX), details).prop_map(|(code, message, details)| Status {
        code: Code::from_number(code).unwrap(),
        message,
        details,
    })
}

fn request() -> impl Strategy<Value = TensorRequest> {
    let known = proptest::collection::vec(metadata(), 0..=4);
    (index(), scope(), text(NAME_BYTES_MAX), known).prop_flat_map(|(index, scope, key, known)| {
        let needed = largest(&known);
        let written = move || destination(needed).prop_map(|destination| Want::Write(Some(destination)));
        let want = match needed {
            0 => Just(Want::Write(None)).boxed(),
            1..=4096 => prop_oneof![Just(Want::Eager), written()].boxed(),
            _ => written().boxed(),
        };
        let want = prop_oneof![3 => want, 1 => Just(Want::View)];
        want.prop_map(move |want| TensorRequest {
            index,
            scope,
            key: key.as_str().into(),
            known: known.clone().into(),
            want,
        })
    })
}

fn largest(known: &[Metadata]) -> u64 {
    known.iter().map(|metadata| metadata.byte_length).max().unwrap_or(0)
}

/// As many of `requests` as one message takes.
fn several(mut requests: Vec<TensorRequest>) -> Message {
    while wire::encode(&Message::TensorRequests(requests.clone())).len() > MESSAGE_BYTES_MAX {
        requests.pop();
    }
    match requests.len() {
        1 => Message::TensorRequest(requests.remove(0)),
        _ => Message::TensorRequests(requests),
    }
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        request().prop_map(Message::TensorRequest),
        proptest::collection::vec(request(), 2..8).prop_map(several),
        (index(), metadata(), any::<bool>(), any::<bool>(), any::<Option<u64>>()).prop_map(
            |(index, metadata, is_eager, is_lent, checksum)| {
                let is_eager = is_eager && metadata.byte_length <= u64::from(EAGER_BYTES_MAX);
                let content = is_eager.then(|| vec![7; metadata.byte_length as usize].into());
                let loan_follows = is_lent && content.is_none() && metadata.byte_length > 0;
                let response = MetaDataResponse { index, metadata, content, loan_follows, checksum };
                Message::MetaDataResponse(response)
            }
        ),
        (index(), proptest::option::of(destination(64))).prop_map(|(index, destination)| {
            Message::TensorReRequest(TensorReRequest { index, destination })
        }),
        (index(), status()).prop_map(|(index, status)| Message::ErrorStatus(ErrorStatus { index, status })),
        index().prop_map(Message::Cancel),
        index().prop_map(Message::CancelAck),
    ]
}

fn parameters() -> impl Strategy<Value = Parameters> {
    let mode = proptest::sample::select(&[Mode::Original, Mode::Counted][..]);
    let validation = proptest::sample::select(&Validation::ALL[..]);
    let numbers = (
        DEPTH_MIN..=DEPTH_MAX,
        RING_BYTES_MIN..=RING_BYTES_MAX,
        1..=REQUESTS_MAX,
        1..=CONTENTS_MAX,
        0..=NAMES_MAX,
        0..=EAGER_BYTES_MAX,
        1..=REQUESTS_PER_MESSAGE_MAX,
    );
    (mode, numbers, validation).prop_map(|(mode, numbers, validation)| {
        let (depth, ring_bytes, requests_max, contents_max, names_max, eager_bytes_max, per_message) =
            numbers;
        let requests_per_message = per_message;
        Parameters {
            mode,
            depth,
            ring_bytes,
            requests_max,
            contents_max,
            names_max,
            eager_bytes_max,
            requests_per_message,
            validation,
        }
    })
}

fn ring_offer(parameters: Parameters) -> RingOffer {
    let (ring, slots) = (parameters.first_ring_bytes().into(), (2 * SLOT_BYTES).into());
    RingOffer { destination: plain(64, ring), slots: plain(0, slots) }
}

fn region() -> impl Strategy<Value = RegionRecord> {
    any::<(u32, u32, u64, u64, u32)>().prop_map(|(region, generation, base, length, key)| RegionRecord {
        region,
        generation,
        base,
        length,
        key,
    })
}

fn connect(agreed: bool) -> impl Strategy<Value = ControlFrame> {
    let data = proptest::collection::vec(any::<u8>(), 0..100);
    let regions = proptest::collection::vec(region(), 0..5);
    let fields = (any::<u32>(), any::<u8>(), data, parameters(), regions);
    fields.prop_map(move |(connection, kind, data, parameters, regions)| {
        let ring = ring_offer(parameters);
        if agreed {
            ControlFrame::Connected(Connect { connection, kind, data, parameters, ring, regions })
        } else {
            ControlFrame::Connect(Connect { connection, kind, data, parameters, ring, regions })
        }
    })
}

fn greeting() -> impl Strategy<Value = ControlFrame> {
    let fabric = (any::<u8>(), proptest::collection::vec(any::<u8>(), 0..40));
    let fabrics =
        proptest::collection::vec(fabric.prop_map(|(kind, reach)| FabricOffer { kind, reach }), 0..16);
    prop_oneof![
        (text(256), any::<u64>(), proptest::option::of(text(256)), any::<[u8; 32]>()).prop_map(
            |(worker, incarnation, listen_address, nonce)| ControlFrame::Hello {
                wire_version: WIRE_VERSION,
                worker,
                incarnation,
                listen_address,
                nonce,
            }
        ),
        any::<[u8; 32]>().prop_map(|proof| ControlFrame::Proof { proof }),
        (text(256), any::<u64>(), fabrics).prop_map(|(worker, incarnation, fabrics)| ControlFrame::Welcome {
            worker,
            incarnation,
            fabrics
        }),
    ]
}

fn list() -> impl Strategy<Value = ControlFrame> {
    let entry = (text(NAME_BYTES_MAX), metadata(), any::<u64>(), any::<Option<u64>>())
        .prop_map(|(name, metadata, version, checksum)| ListEntry { name, metadata, version, checksum });
    let request = (any::<u32>(), proptest::option::of(text(NAME_BYTES_MAX)), any::<bool>());
    let response = (any::<u32>(), proptest::collection::vec(entry, 0..6), any::<bool>());
    prop_oneof![
        request.prop_map(|(request, after, with_checksums)| ControlFrame::ListRequest {
            request,
            after,
            with_checksums
        }),
        response.prop_map(|(request, entries, more)| ControlFrame::ListResponse { request, entries, more }),
    ]
}

fn control_frame() -> impl Strategy<Value = ControlFrame> {
    prop_oneof![
        greeting(),
        connect(false),
        connect(true),
        list(),
        (any::<u32>(), status())
            .prop_map(|(connection, status)| ControlFrame::Refused { connection, status }),
        (any::<u32>(), region())
            .prop_map(|(connection, region)| ControlFrame::RegionAdd { connection, region }),
        any::<(u32, u32)>().prop_map(|(connection, region)| ControlFrame::RegionAck { connection, region }),
        any::<(u32, u32)>()
            .prop_map(|(connection, region)| ControlFrame::RegionRemove { connection, region }),
        any::<u64>().prop_map(|nonce| ControlFrame::Ping { nonce }),
        any::<u64>().prop_map(|nonce| ControlFrame::Pong { nonce }),
        status().prop_map(|status| ControlFrame::Goodbye { status }),
    ]
}

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
    Message::TensorRequest(TensorRequest { index, scope, key: key.into(), known: known.into(), want })
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
    // As many as a receiver keeps of this rank.
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
    let largest = [request_for(&"k".repeat(NAME_BYTES_MAX), &known), Message::MetaDataResponse(response)];
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
    for kind in [0, 8, 255] {
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

#[test]
fn d_another_wire_version_is_refused_with_both_named() {
    let hello = ControlFrame::Hello {
        wire_version: WIRE_VERSION + 1,
        worker: "/job:a/replica:0/task:0".to_owned(),
        incarnation: 1,
        listen_address: None,
        nonce: [0; 32],
    };
    let error = ControlFrame::decode(&hello.encode()).unwrap_err();
    assert_eq!(error, WireError::Version { peer: WIRE_VERSION + 1, own: WIRE_VERSION });
    for version in [WIRE_VERSION + 1, WIRE_VERSION] {
        assert!(error.to_string().contains(&version.to_string()), "{error}");
    }
}

#[test]
fn d_parameters_outside_their_limits_are_refused() {
    let good = Parameters::default();
    let bad = [
        Parameters { depth: DEPTH_MIN - 1, ..good },
        Parameters { depth: DEPTH_MAX + 1, ..good },
        Parameters { ring_bytes: RING_BYTES_MIN - 1, ..good },
        Parameters { ring_bytes: RING_BYTES_MAX + 1, ..good },
        Parameters { requests_max: 0, ..good },
        Parameters { requests_max: REQUESTS_MAX + 1, ..good },
        Parameters { contents_max: 0, ..good },
        Parameters { contents_max: CONTENTS_MAX + 1, ..good },
        Parameters { names_max: NAMES_MAX + 1, ..good },
        Parameters { eager_bytes_max: EAGER_BYTES_MAX + 1, ..good },
        Parameters { requests_per_message: 0, ..good },
        Parameters { requests_per_message: REQUESTS_PER_MESSAGE_MAX + 1, ..good },
    ];
    assert_eq!(good.check(), Ok(()));
    for parameters in bad {
        let (data, regions, ring) = (Vec::new(), Vec::new(), ring_offer(parameters));
        let frame =
            ControlFrame::Connect(Connect { connection: 1, kind: 1, data, parameters, ring, regions });
        let error = ControlFrame::decode(&frame.encode()).unwrap_err();
        assert!(matches!(error, WireError::OutOfRange { .. }), "{error}");
    }
}

#[test]
fn d_rings_and_slots_of_other_sizes_are_refused() {
    let parameters = Parameters::default();
    let good = ring_offer(parameters);
    let sized = |destination: Destination, capacity| Destination { capacity, ..destination };
    let first = u64::from(parameters.first_ring_bytes());
    let bad = [
        RingOffer { destination: sized(good.destination, first - 1), ..good },
        RingOffer { destination: sized(good.destination, first + 1), ..good },
        RingOffer { slots: sized(good.slots, 2 * u64::from(SLOT_BYTES) - 1), ..good },
    ];
    for ring in bad {
        let (data, regions) = (Vec::new(), Vec::new());
        let frame =
            ControlFrame::Connect(Connect { connection: 1, kind: 1, data, parameters, ring, regions });
        let error = ControlFrame::decode(&frame.encode()).unwrap_err();
        assert_eq!(error, WireError::Inconsistent { field: "ring" });
    }
}

#[test]
fn list_entries_say_how_long_they_are() {
    let entry = |name: &str, checksum| ListEntry {
        name: name.to_owned(),
        metadata: Metadata::new(DataType::F32, Shape::new([2]).unwrap()).unwrap(),
        version: 1,
        checksum,
    };
    let entries = vec![entry("a", None), entry("bcd", Some(1))];
    let sum: usize = entries.iter().map(ListEntry::encoded_length).sum();
    let frame = |entries| ControlFrame::ListResponse { request: 1, entries, more: false }.encode().len();
    assert_eq!(frame(entries) - frame(Vec::new()), sum);
}

#[test]
fn keys_proofs_and_connection_data_are_not_in_debug() {
    let region = RegionRecord { region: 1, generation: 2, base: 0, length: 4096, key: 0xDEAD_BEEF };
    let parameters = Parameters::default();
    let ring = ring_offer(parameters);
    let data = vec![0xAB; 4];
    let regions = vec![region];
    let frames = [
        ControlFrame::Proof { proof: [0xAB; 32] },
        ControlFrame::Connect(Connect {
            connection: 1,
            kind: 1,
            data: data.clone(),
            parameters,
            ring,
            regions: regions.clone(),
        }),
        ControlFrame::Connected(Connect { connection: 1, kind: 1, data, parameters, ring, regions }),
        ControlFrame::RegionAdd { connection: 1, region },
    ];
    for frame in frames {
        let debug = format!("{frame:?} {frame:#?}");
        for secret in ["171", "3735928559", "deadbeef", "DEADBEEF", "0xab"] {
            assert!(!debug.contains(secret), "{debug}");
        }
    }
}

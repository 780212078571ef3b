//! Values of every kind, for properties.

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use proptest::prelude::*;
use tensorwire_protocol::{
    BufferRequest, Buffers, CallTerms, Code, DataType, Destination, ErrorStatus, Message, MetaDataResponse,
    Metadata, Mode, Note, OfferedArguments, PageWrite, Parameters, RequestIndex, ResultSlot, Scope,
    SetContent, Shape, Status, StepId, SubscriptionTerms, TensorReRequest, TensorRequest, TensorWrite,
    TraceContext, Validation, VersionNotice, Waiting, Want, Wanted,
    limits::{
        CONTENTS_MAX, DEPTH_MAX, DEPTH_MIN, EAGER_BYTES_MAX, MESSAGE_BYTES_MAX, NAME_BYTES_MAX, NAMES_MAX,
        NOTE_BYTES_MAX, PIECE_BYTES_MAX, PIECE_BYTES_MIN, REQUESTS_MAX, REQUESTS_PER_MESSAGE_MAX,
        RESULT_SLOT_BYTES, RING_BYTES_MAX, RING_BYTES_MIN, SLOT_BYTES, STATUS_DETAILS_BYTES_MAX,
        STATUS_MESSAGE_BYTES_MAX, SUBSCRIPTION_VALUES_MAX, TENSOR_BYTES_MAX, WIRE_VERSION,
    },
    report::{PeerReport, PoolReport, SetReport, Traffic, WorkerReport},
    text::escaped,
    wire::{
        self,
        control::{Connect, ControlFrame, FabricOffer, ListEntry, RegionRecord, RingOffer},
    },
};

pub(crate) fn index() -> impl Strategy<Value = RequestIndex> {
    (0u32..1 << 30).prop_map(RequestIndex)
}

pub(crate) fn metadata() -> impl Strategy<Value = Metadata> {
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

pub(crate) fn destination(capacity: u64) -> impl Strategy<Value = Destination> {
    let result = proptest::option::of(result_slot());
    (any::<u32>(), any::<u32>(), 0..u64::MAX - capacity, result).prop_map(
        move |(region, generation, offset, result)| {
            let plain = plain(offset, capacity);
            Destination { region, generation, result, ..plain }
        },
    )
}

pub(crate) fn plain(offset: u64, capacity: u64) -> Destination {
    Destination { region: 0, generation: 0, offset, capacity, result: None }
}

pub(crate) fn result_slot() -> impl Strategy<Value = ResultSlot> {
    let offset = 0..u64::MAX - u64::from(RESULT_SLOT_BYTES);
    let slot = |(region, generation, offset)| ResultSlot { region, generation, offset };
    (any::<u32>(), any::<u32>(), offset).prop_map(slot)
}

pub(crate) fn scope() -> impl Strategy<Value = Scope> {
    let newer = |(incarnation, version)| Scope::Versioned(Wanted::NewerThan { incarnation, version });
    let content =
        |(edition, number, is_last): (u64, u32, bool)| SetContent { edition, number: number >> 1, is_last };
    let newer_set = |(incarnation, version): (u64, u32)| {
        Scope::Set(Wanted::NewerThan { incarnation, version: version.into() })
    };
    prop_oneof![
        any::<i64>().prop_map(|step| Scope::Step(StepId(step))),
        any::<i64>().prop_map(|step| Scope::StepNow(StepId(step))),
        Just(Scope::Published),
        Just(Scope::Versioned(Wanted::Now)),
        any::<(u64, u64)>().prop_map(newer),
        Just(Scope::Set(Wanted::Now)),
        any::<(u64, u32)>().prop_map(newer_set),
        any::<(u64, u32, bool)>().prop_map(content).prop_map(Scope::SetContent),
        any::<(u64, u32, bool)>().prop_map(content).prop_map(Scope::SetSlice),
        Just(Scope::Slice),
        any::<u64>().prop_map(|write| Scope::Pages(NonZeroU64::new(write))),
        any::<(NonZeroU64, Option<u64>)>()
            .prop_map(|(number, note)| Scope::PageWrite(PageWrite { number, note })),
        any::<NonZeroU64>().prop_map(Scope::Arguments),
        call().prop_map(Scope::Call),
    ]
}

fn call() -> impl Strategy<Value = CallTerms> {
    let offered = proptest::option::of((any::<NonZeroU64>(), 0..=TENSOR_BYTES_MAX));
    (any::<u32>(), offered, any::<(u128, u64, u8)>(), any::<bool>()).prop_map(
        |(limit_ms, offered, (trace, span, flags), is_traced)| {
            let offered = offered.map(|(number, bytes)| OfferedArguments { number, bytes });
            let trace = TraceContext::new(trace, span, flags).filter(|_| is_traced);
            CallTerms { limit_ms, offered, trace }
        },
    )
}

/// Text that is safe to show, and so travels as it is.
pub(crate) fn text(bytes_max: usize) -> impl Strategy<Value = String> {
    ".{0,300}".prop_map(move |text: String| {
        let mut text = escaped(&text).into_owned();
        while text.len() > bytes_max {
            text.pop();
        }
        text
    })
}

pub(crate) fn status() -> impl Strategy<Value = Status> {
    let details = proptest::collection::vec(any::<u8>(), 0..STATUS_DETAILS_BYTES_MAX);
    (1u32..=16, text(STATUS_MESSAGE_BYTES_MAX), details).prop_map(|(code, message, details)| Status {
        code: Code::from_number(code).unwrap(),
        message,
        details,
    })
}

pub(crate) fn request() -> impl Strategy<Value = TensorRequest> {
    let known = proptest::collection::vec(metadata(), 0..=4);
    let arguments = proptest::collection::vec(any::<u8>(), 0..=4096);
    let parts = (index(), scope(), text(NAME_BYTES_MAX), known, arguments);
    parts.prop_flat_map(|(index, scope, key, known, arguments)| {
        let has_arguments = matches!(scope, Scope::Call(CallTerms { offered: None, .. }));
        let arguments: Option<Arc<[u8]>> = has_arguments.then(|| arguments.into());
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
            arguments: arguments.clone(),
        })
    })
}

/// A request for a subscription, which names no metadata.
pub(crate) fn subscription() -> impl Strategy<Value = TensorRequest> {
    let terms = (1..=SUBSCRIPTION_VALUES_MAX, any::<bool>(), any::<bool>());
    (request(), terms).prop_map(|(request, (values, every, view))| TensorRequest {
        known: [].into(),
        want: Want::Each(SubscriptionTerms { values, every, view }),
        ..request
    })
}

pub(crate) fn meta_data_response() -> impl Strategy<Value = MetaDataResponse> {
    let fields = (index(), metadata(), any::<bool>(), any::<bool>(), any::<Option<u64>>());
    fields.prop_map(|(index, metadata, is_eager, is_lent, checksum)| {
        let is_eager = is_eager && metadata.byte_length <= u64::from(EAGER_BYTES_MAX);
        let content = is_eager.then(|| vec![7; metadata.byte_length as usize].into());
        let loan_follows = is_lent && content.is_none() && metadata.byte_length > 0;
        MetaDataResponse { index, metadata, content, loan_follows, checksum }
    })
}

pub(crate) fn buffers() -> impl Strategy<Value = Buffers> {
    let most = SUBSCRIPTION_VALUES_MAX;
    let destinations = proptest::collection::vec(destination(64), 0..=most.into());
    (index(), 0..=most, destinations).prop_map(|(index, values, destinations)| Buffers {
        index,
        values,
        destinations: destinations.into(),
    })
}

/// The messages of subscriptions, besides their requests.
pub(crate) fn subscribed() -> impl Strategy<Value = Message> {
    let buffer_request =
        (index(), metadata().prop_filter("a value with bytes", |value| value.byte_length > 0))
            .prop_map(|(index, metadata)| Message::BufferRequest(BufferRequest { index, metadata }));
    let write = (any::<(u64, u64)>(), meta_data_response()).prop_map(|((version, sequence), value)| {
        Message::TensorWrite(TensorWrite { version, sequence, began: version / 2, value })
    });
    prop_oneof![
        buffer_request,
        buffers().prop_map(Message::BufferResponse),
        buffers().prop_map(Message::BufferIdle),
        write,
    ]
}

pub(crate) fn largest(known: &[Metadata]) -> u64 {
    known.iter().map(|metadata| metadata.byte_length).max().unwrap_or(0)
}

/// As many of `requests` as one message takes.
pub(crate) fn several(mut requests: Vec<TensorRequest>) -> Message {
    while wire::encode(&Message::TensorRequests(requests.clone())).len() > MESSAGE_BYTES_MAX {
        requests.pop();
    }
    match requests.len() {
        1 => Message::TensorRequest(requests.remove(0)),
        _ => Message::TensorRequests(requests),
    }
}

pub(crate) fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        request().prop_map(Message::TensorRequest),
        proptest::collection::vec(request(), 2..8).prop_map(several),
        subscription().prop_map(Message::TensorRequest),
        subscribed(),
        meta_data_response().prop_map(Message::MetaDataResponse),
        (index(), proptest::option::of(destination(64))).prop_map(|(index, destination)| {
            Message::TensorReRequest(TensorReRequest { index, destination })
        }),
        (index(), status()).prop_map(|(index, status)| Message::ErrorStatus(ErrorStatus { index, status })),
        index().prop_map(Message::Cancel),
        index().prop_map(Message::CancelAck),
        (index(), any::<u64>())
            .prop_map(|(index, version)| Message::Version(VersionNotice { index, version })),
        (any::<u64>(), any::<u16>(), 0..=NOTE_BYTES_MAX).prop_map(|(channel, lane, length)| {
            Message::Note(Note { channel, lane, bytes: vec![7; length].into() })
        }),
    ]
}

pub(crate) fn parameters() -> impl Strategy<Value = Parameters> {
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
        PIECE_BYTES_MIN..=PIECE_BYTES_MAX,
    );
    (mode, numbers, validation).prop_map(|(mode, numbers, validation)| {
        let (
            depth,
            ring_bytes,
            requests_max,
            contents_max,
            names_max,
            eager_bytes_max,
            requests_per_message,
            piece_bytes,
        ) = numbers;
        Parameters {
            mode,
            depth,
            ring_bytes,
            requests_max,
            contents_max,
            names_max,
            eager_bytes_max,
            requests_per_message,
            piece_bytes,
            validation,
        }
    })
}

pub(crate) fn ring_offer(parameters: Parameters) -> RingOffer {
    let (ring, slots) = (parameters.first_ring_bytes().into(), (2 * SLOT_BYTES).into());
    RingOffer { destination: plain(64, ring), slots: plain(0, slots) }
}

pub(crate) fn region() -> impl Strategy<Value = RegionRecord> {
    any::<(u32, u32, u64, u64, u32)>().prop_map(|(region, generation, base, length, key)| RegionRecord {
        region,
        generation,
        base,
        length,
        key,
    })
}

/// A frame with one side of a data connection.
pub(crate) fn connect(frame: fn(Connect) -> ControlFrame) -> impl Strategy<Value = ControlFrame> {
    let data = proptest::collection::vec(any::<u8>(), 0..100);
    let regions = proptest::collection::vec(region(), 0..5);
    let fields = (any::<u32>(), any::<u8>(), data, parameters(), regions);
    fields.prop_map(move |(connection, kind, data, parameters, regions)| {
        let ring = ring_offer(parameters);
        frame(Connect { connection, kind, data, parameters, ring, regions })
    })
}

pub(crate) fn greeting() -> impl Strategy<Value = ControlFrame> {
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
        (fabrics, any::<[u8; 32]>()).prop_map(|(fabrics, proof)| ControlFrame::Welcome { fabrics, proof }),
    ]
}

pub(crate) fn list() -> impl Strategy<Value = ControlFrame> {
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

fn traffic() -> impl Strategy<Value = Traffic> {
    proptest::array::uniform8(any::<u64>()).prop_map(|numbers| {
        let mut traffic = Traffic::default();
        [
            &mut traffic.values_received,
            &mut traffic.bytes_received,
            &mut traffic.values_sent,
            &mut traffic.bytes_sent,
            &mut traffic.errors,
            &mut traffic.connects,
            &mut traffic.reconnects,
            &mut traffic.losses,
        ]
        .into_iter()
        .zip(numbers)
        .for_each(|(field, number)| *field = number);
        traffic
    })
}

fn waiting() -> impl Strategy<Value = Waiting> {
    (any::<u64>(), any::<Option<u64>>()).prop_map(|(requests, oldest)| {
        let mut waiting = Waiting::default();
        (waiting.requests, waiting.oldest) = (requests, oldest);
        waiting
    })
}

fn peer_report() -> impl Strategy<Value = PeerReport> {
    let texts = (text(256), proptest::option::of(text(256)), proptest::option::of(text(64)));
    let stalled = proptest::option::of(any::<u64>().prop_map(Duration::from_nanos));
    (texts, traffic(), waiting(), waiting(), stalled).prop_map(
        |((name, address, transport), traffic, waiting_at_peer, waiting_here, stalled)| {
            let mut peer = PeerReport::default();
            (peer.name, peer.address, peer.transport) = (name, address, transport);
            (peer.traffic, peer.stalled) = (traffic, stalled);
            (peer.waiting_at_peer, peer.waiting_here) = (waiting_at_peer, waiting_here);
            peer
        },
    )
}

fn set_report() -> impl Strategy<Value = SetReport> {
    (text(NAME_BYTES_MAX), any::<[u64; 3]>()).prop_map(|(name, [version, tensors, bytes])| {
        let mut set = SetReport::default();
        (set.name, set.version, set.tensors, set.bytes) = (name, version, tensors, bytes);
        set
    })
}

fn pool_report() -> impl Strategy<Value = PoolReport> {
    (text(64), any::<[u64; 5]>()).prop_map(|(name, numbers)| {
        let mut pool = PoolReport::default();
        pool.name = name;
        [pool.block_bytes, pool.used_bytes, pool.leaked_bytes, pool.retired_bytes, pool.waiting] = numbers;
        pool
    })
}

pub(crate) fn report() -> impl Strategy<Value = WorkerReport> {
    let own = (text(256), text(256), any::<u64>(), text(64), any::<u64>());
    let all = (proptest::option::of(traffic()), any::<Option<u64>>(), any::<[u64; 2]>());
    let several = (
        proptest::collection::vec(peer_report(), 0..4),
        proptest::collection::vec(set_report(), 0..4),
        proptest::collection::vec(pool_report(), 0..4),
    );
    (own, all, several).prop_map(|(own, (total, sessions, left_out), (peers, sets, pools))| {
        let mut report = WorkerReport::default();
        let clock;
        (report.name, report.address, report.incarnation, report.version, clock) = own;
        (report.clock, report.total, report.sessions) = (Duration::from_nanos(clock), total, sessions);
        [report.peers_left_out, report.sets_left_out] = left_out;
        (report.peers, report.sets, report.pools) = (peers, sets, pools);
        report
    })
}

fn report_frame() -> impl Strategy<Value = ControlFrame> {
    prop_oneof![
        any::<u32>().prop_map(|request| ControlFrame::ReportRequest { request }),
        (any::<u32>(), report())
            .prop_map(|(request, report)| ControlFrame::ReportResponse { request, report: Box::new(report) }),
    ]
}

pub(crate) fn store() -> impl Strategy<Value = ControlFrame> {
    let body = || proptest::collection::vec(any::<u8>(), 0..100);
    prop_oneof![
        (any::<u32>(), body()).prop_map(|(request, body)| ControlFrame::StoreRequest { request, body }),
        (any::<u32>(), proptest::option::of(body()))
            .prop_map(|(request, body)| ControlFrame::StoreResponse { request, body }),
        any::<u32>().prop_map(|request| ControlFrame::StoreCancel { request }),
    ]
}

pub(crate) fn control_frame() -> impl Strategy<Value = ControlFrame> {
    prop_oneof![
        greeting(),
        connect(ControlFrame::Connect),
        connect(ControlFrame::Connected),
        connect(|offer| ControlFrame::Standby { replaces: 7, offer }),
        list(),
        report_frame(),
        store(),
        (any::<u32>(), status())
            .prop_map(|(connection, status)| ControlFrame::Refused { connection, status }),
        (any::<u32>(), status())
            .prop_map(|(connection, status)| ControlFrame::Disconnected { connection, status }),
        any::<u32>().prop_map(|connection| ControlFrame::Retired { connection }),
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

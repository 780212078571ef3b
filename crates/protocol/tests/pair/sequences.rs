//! The sequences of a transfer, message by message.

use crate::support::{
    STEP,
    Side::{self, A, B},
    bytes_of, dead,
    pair::{Pair, original, settled, small},
};
use tensorwire_protocol::{
    Code, DataType, LentEnd, Metadata, Shape, Status, TransferError, limits::RANK_MAX,
};

/// What a pair posted since `from`, as text.
fn trace(pair: &Pair, from: usize) -> Vec<String> {
    pair.wire.trace()[from..].iter().map(|(side, name)| format!("{side:?} {name}")).collect()
}

/// The long sequence: the sender's value has another form than the receiver believes.
const LONG: [&str; 7] = [
    "A TENSOR_REQUEST",
    "B ack",
    "B META_DATA_RESPONSE",
    "A ack",
    "A TENSOR_RE_REQUEST",
    "B ack",
    "B content",
];
const SHORT: [&str; 3] = ["A TENSOR_REQUEST", "B ack", "B content"];
const ERROR: [&str; 4] = ["A TENSOR_REQUEST", "B ack", "B ERROR_STATUS", "A ack"];

/// One transfer of `metadata`; its trace.
fn transfer(pair: &mut Pair, key: &str, metadata: Metadata, fill: u8) -> Vec<String> {
    let from = pair.wire.trace().len();
    let bytes = vec![fill; metadata.byte_length as usize];
    pair.b.source.send(STEP, key, metadata.clone(), bytes.clone());
    assert_eq!(pair.pull(STEP, key), Ok((metadata, bytes)));
    pair.assert_clean();
    trace(pair, from)
}

#[test]
fn s3_6_miss() {
    let mut pair = Pair::new(original());
    assert_eq!(transfer(&mut pair, "k", bytes_of(24), 5), LONG);
    let (a, b) = pair.counters();
    assert_eq!((a.sent.total() + b.sent.total(), a.acknowledgements_sent + b.acknowledgements_sent), (3, 3));
    assert_eq!((b.contents_sent, a.contents_received, a.content_bytes_received), (1, 1, 24));
}

#[test]
fn s3_6_hit() {
    let mut pair = Pair::new(original());
    transfer(&mut pair, "k", bytes_of(24), 5);
    let before = pair.counters();
    assert_eq!(transfer(&mut pair, "k", bytes_of(24), 6), SHORT);
    let (a, b) = pair.counters();
    assert_eq!(a.sent.total() - before.0.sent.total(), 1);
    assert_eq!(b.acknowledgements_sent - before.1.acknowledgements_sent, 1);
    assert_eq!(b.contents_sent - before.1.contents_sent, 1);
    assert_eq!(b.sent.total(), before.1.sent.total());
    assert_eq!(a.acknowledgements_sent, before.0.acknowledgements_sent);
}

#[test]
fn s3_6_change() {
    let mut pair = Pair::new(original());
    transfer(&mut pair, "k", bytes_of(24), 5);
    assert_eq!(transfer(&mut pair, "k", bytes_of(25), 6), LONG);
    assert_eq!(pair.a.memory.ended(LentEnd::MetaDataResponse), 1, "the old destination went back");
    let other_type = Metadata::new(DataType::I8, Shape::new([25]).unwrap()).unwrap();
    assert_eq!(transfer(&mut pair, "k", other_type.clone(), 7), LONG);
    assert_eq!(transfer(&mut pair, "k", other_type, 8), SHORT);
}

#[test]
fn s3_6_dead_costs_a_round_trip_at_each_flip() {
    let mut pair = Pair::new(original());
    assert_eq!(transfer(&mut pair, "k", dead(), 0), LONG);
    assert_eq!(transfer(&mut pair, "k", dead(), 0), SHORT);
    assert_eq!(transfer(&mut pair, "k", bytes_of(8), 1), LONG);
    assert_eq!(transfer(&mut pair, "k", bytes_of(8), 2), SHORT);
    assert_eq!(transfer(&mut pair, "k", dead(), 0), LONG);
    assert_eq!(transfer(&mut pair, "k", bytes_of(8), 3), LONG);
}

#[test]
fn s3_6_empty() {
    let mut pair = Pair::new(original());
    assert_eq!(transfer(&mut pair, "k", bytes_of(0), 0), LONG);
    assert_eq!(transfer(&mut pair, "k", bytes_of(0), 0), SHORT);
    assert_eq!(pair.counters().0.content_bytes_received, 0);
}

#[test]
fn s3_6_error() {
    let mut pair = Pair::new(original());
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    assert!(!handle.is_done(), "nothing to send yet");
    let status =
        Status { code: Code::Aborted, message: "step 7 was aborted".to_owned(), details: vec![1, 2] };
    assert!(pair.b.source.refuse(STEP, "k", status.clone()));
    pair.run();
    assert_eq!(settled(&handle), Err(TransferError::Remote(status)));
    assert_eq!(trace(&pair, 0), ERROR);
    assert_eq!(pair.counters().1.contents_sent, 0);
    pair.assert_clean();
}

#[test]
fn s3_6_error_with_a_destination_lent_takes_it_back() {
    let mut pair = Pair::new(original());
    transfer(&mut pair, "k", bytes_of(24), 5);
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    assert_eq!(pair.a.memory.lent(), 1);
    let from = pair.wire.trace().len();
    assert!(pair.b.source.refuse(STEP, "k", Status::new(Code::NotFound, "no")));
    pair.run();
    assert_eq!(settled(&handle), Err(TransferError::Remote(Status::new(Code::NotFound, "no"))));
    assert_eq!(trace(&pair, from), ERROR[2..]);
    assert_eq!(pair.a.memory.ended(LentEnd::ErrorStatus), 1);
    pair.assert_clean();
}

#[test]
fn s3_6_not_ready_sends_nothing_until_the_value_is_there() {
    let mut pair = Pair::new(original());
    transfer(&mut pair, "k", bytes_of(24), 5);
    let from = pair.wire.trace().len();
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    assert_eq!(trace(&pair, from), SHORT[..2]);
    pair.b.source.send_bytes(STEP, "k", 24, 9);
    pair.run();
    assert_eq!(settled(&handle), Ok((bytes_of(24), vec![9; 24])));
    assert_eq!(trace(&pair, from), SHORT);
}

#[test]
fn s3_12_both_directions_use_the_same_indices_without_mixing() {
    let mut pair = Pair::new(small());
    for side in Side::BOTH {
        pair.end(side).source.send_bytes(STEP, "k", 10, side as u8);
    }
    let handles = [pair.receive(A, STEP, "k"), pair.receive(B, STEP, "k")];
    pair.run();
    assert_eq!(pair.a.requests[0].index, pair.b.requests[0].index);
    assert_eq!(settled(&handles[0]), Ok((bytes_of(10), vec![B as u8; 10])));
    assert_eq!(settled(&handles[1]), Ok((bytes_of(10), vec![A as u8; 10])));
    pair.assert_clean();
}

#[test]
fn values_of_one_key_come_in_the_order_of_the_receives() {
    let mut pair = Pair::new(small());
    let handles: Vec<_> = (0..6).map(|_| pair.receive(A, STEP, "k")).collect();
    pair.run();
    for fill in 0..6 {
        pair.b.source.send_bytes(STEP, "k", 16, fill);
    }
    pair.run();
    for (fill, handle) in (0..6).zip(&handles) {
        assert_eq!(settled(handle), Ok((bytes_of(16), vec![fill; 16])));
    }
    pair.assert_clean();
}

#[test]
fn s12_keys_up_to_the_limit_travel_and_longer_ones_are_refused_here() {
    let mut pair = Pair::new(small());
    for length in [1, 512, 513, 1024] {
        transfer(&mut pair, &"k".repeat(length), bytes_of(3), 1);
    }
    let sent = pair.counters().0.sent;
    assert_eq!(pair.pull(STEP, &"k".repeat(1025)), Err(TransferError::KeyTooLong { length: 1025 }));
    let active = TransferError::KeyActive { shown: r"a\u{1b}b".to_owned() };
    assert_eq!(pair.pull(STEP, "a\u{1b}b"), Err(active));
    assert_eq!(pair.counters().0.sent, sent, "nothing was sent");
    pair.assert_clean();
}

#[test]
fn s12_rank_0_6_7_254_travels() {
    let mut pair = Pair::new(small());
    for rank in [0, 6, 7, RANK_MAX] {
        let metadata = Metadata::new(DataType::F64, Shape::new(vec![1; rank]).unwrap()).unwrap();
        transfer(&mut pair, "k", metadata, 1);
    }
}

#[test]
fn s12_long_dimensions_travel() {
    let mut pair = Pair::new(small());
    for dimension in [65534, 65535, 1 << 32] {
        let metadata = Metadata::new(DataType::I64, Shape::new([0, dimension]).unwrap()).unwrap();
        transfer(&mut pair, "k", metadata, 1);
        transfer(&mut pair, "d", Metadata::dead(DataType::I64, Shape::new([dimension]).unwrap()), 0);
    }
    transfer(&mut pair, "k", bytes_of(65534), 1);
    transfer(&mut pair, "k", bytes_of(65535), 1);
}

#[test]
fn a_value_that_cannot_travel_is_an_error_at_the_receiver() {
    let mut pair = Pair::new(small());
    let wrong = Metadata { byte_length: 23, ..bytes_of(24) };
    pair.b.source.send(STEP, "k", wrong, vec![0; 23]);
    let Err(TransferError::Remote(status)) = pair.pull(STEP, "k") else { panic!("an error status") };
    assert_eq!(status.code, Code::Internal);
    pair.b.source.send(STEP, "k", bytes_of(24), Vec::new());
    let Err(TransferError::Remote(status)) = pair.pull(STEP, "k") else { panic!("an error status") };
    assert!(status.message.contains("no bytes"), "{status}");
    pair.assert_clean();
}

#[test]
fn an_allocation_that_fails_ends_the_receive_and_frees_the_sender() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    pair.a.memory.refuse(crate::support::memory::exhausted());
    assert_eq!(pair.pull(STEP, "k"), Err(TransferError::Local(crate::support::memory::exhausted())));
    assert_eq!(pair.b.source.stored(STEP, "k"), 1, "the value was put back");
    assert_eq!(pair.counters().0.sent.cancel, 1);
    assert_eq!(pair.counters().1.sent.cancel_ack, 1);
    pair.assert_clean();
}

#[test]
fn s3_7_an_update_does_not_change_what_a_request_under_way_believes() {
    let mut pair = Pair::new(small());
    transfer(&mut pair, "k", bytes_of(24), 1);
    let handles = [pair.receive(A, STEP, "k"), pair.receive(A, STEP, "k")];
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 30, 2);
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    pair.run();
    assert_eq!(settled(&handles[0]), Ok((bytes_of(30), vec![2; 30])));
    assert_eq!(settled(&handles[1]), Ok((bytes_of(24), vec![3; 24])));
    assert_eq!(pair.counters().1.sent.meta_data_response, 2, "one for the first, one at the start");
    pair.assert_clean();
}

//! The buffers of TensorFlow's older verbs design, state by state, in mode original: none, idle and busy at both ends.

use tensorwire_protocol::{Code, LentEnd, Status, TransferError};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of, dead,
    memory::exhausted,
    pair::{Pair, original, settled},
    subscriber::{Subscriber, Value, delivered, every},
};

fn value(length: u64, fill: u8) -> Value {
    (bytes_of(length), vec![fill; length as usize])
}

/// A subscription that has taken its first value, of 24 bytes.
fn set_up(values: u8) -> (Pair, Subscriber) {
    let mut pair = Pair::new(original());
    let subscriber = pair.subscribe(STEP, "k", every(values));
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 1)));
    (pair, subscriber)
}

#[test]
fn s4_none_the_first_value_has_its_buffers_set_up() {
    let mut pair = Pair::new(original());
    let subscriber = pair.subscribe(STEP, "k", every(1));
    let next = subscriber.next(&mut pair.tasks);
    pair.run();
    assert_eq!(pair.posted_with_acks(0), [(A, "TENSOR_REQUEST"), (B, "ack")]);
    assert_eq!(pair.a.memory.lent(), 0, "no buffer before a value");
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    while pair.counters().0.received.tensor_write == 0 {
        assert!(pair.step());
    }
    let set_up = [(B, "BUFFER_REQUEST"), (A, "ack"), (A, "BUFFER_RESPONSE"), (B, "ack")];
    assert_eq!(pair.posted_with_acks(2)[..4], set_up);
    assert_eq!(pair.posted_with_acks(6), [(B, "content"), (B, "TENSOR_WRITE"), (A, "ack")]);
    pair.run();
    assert_eq!(delivered(&next), Ok(value(24, 1)));
    assert_eq!(pair.posted_with_acks(9), [(A, "BUFFER_IDLE"), (B, "ack")], "once the value is taken");
    pair.end_of(subscriber);
}

#[test]
fn s4_idle_to_busy_each_later_value_is_a_content_a_write_and_an_idle() {
    for values in [1, 2] {
        let (mut pair, subscriber) = set_up(values);
        for fill in 2..9 {
            let from = pair.wire.trace().len();
            pair.b.source.send_bytes(STEP, "k", 24, fill);
            assert_eq!(pair.next_of(&subscriber), Ok(value(24, fill)));
            let steady = [(B, "content"), (B, "TENSOR_WRITE"), (A, "ack"), (A, "BUFFER_IDLE"), (B, "ack")];
            assert_eq!(pair.posted_with_acks(from), steady);
        }
        pair.end_of(subscriber);
    }
}

#[test]
fn s4_idle_the_buffers_are_granted_while_nothing_is_sent() {
    let (mut pair, subscriber) = set_up(2);
    assert_eq!(pair.a.memory.lent(), 2, "both, though a value was taken");
    let from = pair.wire.trace().len();
    let next = subscriber.next(&mut pair.tasks);
    pair.run();
    assert!(next.is_pending() && pair.posted(from).is_empty());
    assert_eq!(pair.b.source.waiting(STEP, "k"), 1);
    pair.tasks.cancel(next.task);
    pair.end_of(subscriber);
    assert_eq!(pair.a.memory.ended(LentEnd::CancelAck), 2);
}

#[test]
fn s4_busy_at_the_sender_values_wait_until_a_buffer_is_idle() {
    let (mut pair, subscriber) = set_up(2);
    for fill in 2..9 {
        pair.b.source.send_bytes(STEP, "k", 24, fill);
    }
    pair.run();
    let counters = pair.counters().1;
    assert_eq!((counters.contents_sent, counters.sent.tensor_write), (3, 3), "two more than were taken");
    assert_eq!(pair.b.source.stored(STEP, "k"), 5, "the others wait in the queue of the source");
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 2)));
    assert_eq!((pair.counters().1.contents_sent, pair.b.source.stored(STEP, "k")), (4, 4));
    for fill in 3..9 {
        assert_eq!(pair.next_of(&subscriber), Ok(value(24, fill)), "in order, and none is lost");
    }
    assert_eq!(pair.counters().1.contents_sent, 8);
    pair.end_of(subscriber);
}

#[test]
fn s4_busy_at_the_receiver_a_buffer_is_not_written_while_its_value_is_in_use() {
    let (mut pair, subscriber) = set_up(1);
    for fill in 2..6 {
        pair.b.source.send_bytes(STEP, "k", 24, fill);
        let next = subscriber.next(&mut pair.tasks);
        pair.run();
        let delivery = next.take().unwrap().unwrap();
        // Another buffer is granted meanwhile, and written.
        pair.b.source.send_bytes(STEP, "k", 24, 100 + fill);
        pair.run();
        assert_eq!(pair.a.memory.lent(), 2);
        assert_eq!(delivery.received.lent.unwrap().finish(24), vec![fill; 24]);
        assert_eq!(pair.next_of(&subscriber), Ok(value(24, 100 + fill)));
    }
    pair.end_of(subscriber);
}

#[test]
fn s4_a_value_that_outgrew_its_buffer_has_buffers_set_up_again() {
    let (mut pair, subscriber) = set_up(2);
    let from = pair.wire.trace().len();
    pair.b.source.send_bytes(STEP, "k", 48, 2);
    assert_eq!(pair.next_of(&subscriber), Ok(value(48, 2)));
    let again = ["BUFFER_REQUEST", "BUFFER_RESPONSE", "content", "TENSOR_WRITE", "BUFFER_IDLE"];
    assert_eq!(pair.posted(from), again);
    assert_eq!(pair.a.memory.ended(LentEnd::MetaDataResponse), 2, "the buffers that are too small");
    assert_eq!(pair.a.memory.lent(), 2);
    pair.end_of(subscriber);
}

#[test]
fn s4_a_smaller_value_uses_the_same_buffer() {
    let (mut pair, subscriber) = set_up(2);
    for length in [24, 8, 1, 16, 24] {
        let from = pair.wire.trace().len();
        pair.b.source.send_bytes(STEP, "k", length, length as u8);
        assert_eq!(pair.next_of(&subscriber), Ok(value(length, length as u8)));
        assert_eq!(pair.posted(from), ["content", "TENSOR_WRITE", "BUFFER_IDLE"]);
    }
    pair.end_of(subscriber);
}

#[test]
fn s4_dead_and_empty_values_need_no_buffer() {
    let mut pair = Pair::new(original());
    let subscriber = pair.subscribe(STEP, "k", every(1));
    for metadata in [dead(), bytes_of(0), dead()] {
        let from = pair.wire.trace().len();
        pair.b.source.send(STEP, "k", metadata.clone(), Vec::new());
        assert_eq!(pair.next_of(&subscriber), Ok((metadata, Vec::new())));
        let asked = if from == 0 { &["TENSOR_REQUEST"][..] } else { &[] };
        assert_eq!(pair.posted(from), [asked, &["TENSOR_WRITE", "BUFFER_IDLE"]].concat());
        assert_eq!(pair.a.memory.lent(), 0);
    }
    // Between values with bytes, they leave the buffers as they are.
    for length in [24, 0, 0, 24] {
        pair.b.source.send_bytes(STEP, "k", length, 3);
        assert_eq!(pair.next_of(&subscriber), Ok(value(length, 3)));
    }
    assert_eq!(pair.counters().1.sent.buffer_request, 1);
    pair.end_of(subscriber);
}

#[test]
fn s4_an_error_of_the_source_ends_the_subscription_with_its_status() {
    let (mut pair, subscriber) = set_up(2);
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.run();
    let status = Status::new(Code::Aborted, "the step is over");
    assert!(pair.b.source.refuse(STEP, "k", status.clone()));
    pair.run();
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 2)), "a value that came before");
    for _ in 0..2 {
        assert_eq!(pair.next_of(&subscriber), Err(TransferError::Remote(status.clone())));
    }
    assert_eq!(pair.posted(0).last(), Some(&"ERROR_STATUS"));
    assert_eq!(pair.a.memory.lent(), 0, "the buffers are back, though the subscription is not dropped");
    pair.end_of(subscriber);
    assert_eq!(pair.counters().0.sent.cancel, 0);
}

#[test]
fn s4_a_failed_lookup_at_the_sender_ends_only_that_request() {
    let (mut pair, subscriber) = set_up(2);
    let other = pair.subscribe(STEP, "other", every(2));
    let (next, receive) = (other.next(&mut pair.tasks), pair.receive(A, STEP, "l"));
    pair.run();
    let status = Status::new(Code::NotFound, "no such buffer");
    assert!(pair.b.source.refuse(STEP, "other", status.clone()));
    pair.run();
    assert_eq!(delivered(&next), Err(TransferError::Remote(status)));
    pair.b.source.send_bytes(STEP, "l", 8, 3);
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 2)));
    assert_eq!(settled(&receive), Ok(value(8, 3)));
    drop(other);
    pair.end_of(subscriber);
}

#[test]
fn s4_a_failed_allocation_at_the_receiver_ends_only_that_request() {
    let (mut pair, subscriber) = set_up(2);
    let other = pair.subscribe(STEP, "other", every(2));
    let next = other.next(&mut pair.tasks);
    pair.run();
    pair.a.memory.refuse(exhausted());
    pair.b.source.send_bytes(STEP, "other", 8, 2);
    pair.run();
    assert_eq!(delivered(&next), Err(TransferError::Local(exhausted())));
    drop(other);
    pair.run();
    pair.a.memory.allow();
    assert_eq!(pair.b.source.stored(STEP, "other"), 1, "the value went back");
    assert_eq!(pair.pull(STEP, "other"), Ok(value(8, 2)));
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 2)));
    pair.end_of(subscriber);
}

//! What the receiver of a subscription may do wrong: the script subscribes to what side A sends.

use std::sync::Arc;

use tensorwire_protocol::{
    Buffers, Destination, Message, Parameters, PeerMisbehaved, RequestIndex, ResultSlot, TensorReRequest,
    TensorRequest, Want,
};

use crate::support::{STEP, lone::Lone, pair::small, subscriber::every};

const INDEX: RequestIndex = RequestIndex(5);

fn request(want: Want) -> TensorRequest {
    TensorRequest { index: INDEX, scope: STEP, key: "k".into(), known: Arc::default(), want, arguments: None }
}

/// A subscription of the script's, with `values` ahead.
fn subscribed(values: u8) -> Lone {
    let mut lone = Lone::new(Parameters { depth: 16, ..small() });
    lone.request(request(Want::Each(every(values))));
    lone
}

fn at(capacity: u64) -> Destination {
    Destination { region: 1, generation: 1, offset: 0, capacity, result: None }
}

fn buffers(values: u8, capacities: &[u64]) -> Buffers {
    Buffers { index: INDEX, values, destinations: capacities.iter().map(|&capacity| at(capacity)).collect() }
}

fn response(capacities: &[u64]) -> Message {
    Message::BufferResponse(buffers(0, capacities))
}

fn idle(values: u8, capacities: &[u64]) -> Message {
    Message::BufferIdle(buffers(values, capacities))
}

fn assert_breaks(mut lone: Lone, message: &Message, rule: PeerMisbehaved) {
    let stored = lone.source.stored(STEP, "k");
    assert_eq!(lone.message(message), Err(rule));
    lone.assert_over(rule);
    assert!(lone.source.stored(STEP, "k") >= stored, "what was not sent stays");
    assert_eq!(lone.source.waiting(STEP, "k"), 0);
}

/// A subscription whose first value waits for a buffer.
fn requested(values: u8) -> Lone {
    let mut lone = subscribed(values);
    lone.source.send_bytes(STEP, "k", 8, 1);
    lone.tasks.run();
    assert_eq!(lone.connection.counters().sent.buffer_request, 1);
    lone
}

#[test]
fn d_buffers_that_were_not_requested_are_unasked() {
    assert_breaks(subscribed(2), &response(&[8]), PeerMisbehaved::SubscriptionUnasked);
    assert_breaks(subscribed(2), &idle(0, &[8]), PeerMisbehaved::SubscriptionUnasked);
    let mut answered = requested(2);
    assert_eq!(answered.message(&response(&[8])), Ok(None));
    assert_breaks(answered, &response(&[8]), PeerMisbehaved::SubscriptionUnasked);
}

#[test]
fn d_a_response_without_buffers_or_with_values_is_unasked() {
    assert_breaks(requested(2), &response(&[]), PeerMisbehaved::SubscriptionUnasked);
    let with_values = Message::BufferResponse(buffers(1, &[8]));
    assert_breaks(requested(2), &with_values, PeerMisbehaved::SubscriptionUnasked);
}

#[test]
fn d_a_buffer_that_is_too_small_does_not_match() {
    assert_breaks(requested(2), &response(&[8, 7]), PeerMisbehaved::DestinationMismatch);
    let mut answered = requested(2);
    assert_eq!(answered.message(&response(&[8])), Ok(None));
    assert_breaks(answered, &idle(1, &[7]), PeerMisbehaved::DestinationMismatch);
}

#[test]
fn d_more_values_or_buffers_than_the_terms_allow_are_an_overrun() {
    assert_breaks(subscribed(2), &idle(1, &[]), PeerMisbehaved::SubscriptionOverrun);
    assert_breaks(requested(2), &response(&[8, 8, 8]), PeerMisbehaved::SubscriptionOverrun);
    let mut answered = requested(2);
    assert_eq!(answered.message(&response(&[8, 8])), Ok(None));
    assert_eq!(answered.message(&idle(1, &[8])), Ok(None));
    assert_breaks(answered, &idle(0, &[8]), PeerMisbehaved::SubscriptionOverrun);
}

#[test]
fn d_a_buffer_with_a_result_slot_that_was_not_agreed_is_unfit() {
    let slot = ResultSlot { region: 2, generation: 1, offset: 64 };
    let destination = Destination { result: Some(slot), ..at(8) };
    let with_slot = Buffers { index: INDEX, values: 0, destinations: vec![destination].into() };
    let message = Message::BufferResponse(with_slot.clone());
    assert_breaks(requested(2), &message, PeerMisbehaved::ResultSlotUnfit);
    assert_breaks(requested(2), &Message::BufferIdle(with_slot), PeerMisbehaved::ResultSlotUnfit);
}

#[test]
fn d_buffers_for_a_plain_request_are_unasked() {
    for message in [response(&[8]), idle(1, &[])] {
        let mut lone = Lone::new(small());
        lone.request(request(Want::Write(None)));
        assert_breaks(lone, &message, PeerMisbehaved::SubscriptionUnasked);
    }
}

#[test]
fn d_a_re_request_for_a_subscription_is_unasked() {
    let again = Message::TensorReRequest(TensorReRequest { index: INDEX, destination: Some(at(8)) });
    assert_breaks(requested(2), &again, PeerMisbehaved::ReRequestUnasked);
}

#[test]
fn buffers_that_cross_a_request_may_be_too_small() {
    let mut lone = requested(2);
    assert_eq!(lone.message(&response(&[8, 8])), Ok(None));
    lone.source.send_bytes(STEP, "k", 16, 2);
    lone.tasks.run();
    lone.absorb();
    assert_eq!(lone.connection.counters().sent.buffer_request, 2);
    assert_eq!(lone.message(&idle(1, &[8])), Ok(None));
    assert_eq!(lone.connection.counters().contents_sent, 1, "the second waits for BUFFER_RESPONSE");
    assert_eq!(lone.message(&response(&[16])), Ok(None));
    lone.absorb();
    let counters = lone.connection.counters();
    assert_eq!((counters.contents_sent, counters.sent.tensor_write), (2, 2));
    assert_eq!(lone.connection.failure(), None);
}

#[test]
fn a_sender_never_sends_more_than_it_may() {
    let mut lone = requested(3);
    (0..10).for_each(|fill| lone.source.send_bytes(STEP, "k", 8, fill));
    assert_eq!(lone.message(&response(&[8])), Ok(None));
    lone.absorb();
    lone.tasks.run();
    let counters = lone.connection.counters();
    assert_eq!((counters.contents_sent, counters.sent.buffer_request), (1, 2), "one buffer");
    assert_eq!(lone.message(&response(&[8, 8])), Ok(None));
    for _ in 0..3 {
        lone.absorb();
        lone.tasks.run();
    }
    assert_eq!(lone.connection.counters().contents_sent, 3, "three values");
    assert_eq!(lone.message(&idle(1, &[8])), Ok(None));
    lone.absorb();
    lone.tasks.run();
    assert_eq!(lone.connection.counters().contents_sent, 4);
    assert_eq!(lone.connection.failure(), None);
}

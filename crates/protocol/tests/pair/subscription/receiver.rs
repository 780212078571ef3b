//! What the sender of a subscription may do wrong, and what it may do without breaking a rule: side B is a script.

use tensorwire_protocol::{
    BufferRequest, Buffers, Code, Destination, ErrorStatus, LentEnd, Message, MetaDataResponse, Metadata,
    Parameters, PeerMisbehaved, RequestIndex, Status, TensorWrite, TransferError, Validation, VersionNotice,
};

use crate::support::{
    STEP, bytes_of,
    lone::Lone,
    pair::small,
    subscriber::{Next, Subscriber, delivered, every, value_of, views},
};

const INDEX: RequestIndex = RequestIndex(0);

fn subscribe(lone: &mut Lone, terms: tensorwire_protocol::SubscriptionTerms) -> (Subscriber, Next) {
    let subscriber = Subscriber::new(&lone.connection, &lone.memory, (STEP, "k"), terms);
    let next = subscriber.next(&mut lone.tasks);
    lone.tasks.run();
    (subscriber, next)
}

fn response(metadata: Metadata) -> MetaDataResponse {
    MetaDataResponse { index: INDEX, metadata, content: None, loan_follows: false, checksum: None }
}

fn write_of(value: MetaDataResponse) -> Message {
    Message::TensorWrite(TensorWrite { version: 0, sequence: 1, began: 0, value })
}

fn tensor_write(length: u64) -> Message {
    write_of(response(bytes_of(length)))
}

fn buffer_request(index: RequestIndex, length: u64) -> Message {
    Message::BufferRequest(BufferRequest { index, metadata: bytes_of(length) })
}

/// A subscription to which `messages` come in this order; the last breaks `rule`.
fn assert_breaks(terms: tensorwire_protocol::SubscriptionTerms, messages: &[Message], rule: PeerMisbehaved) {
    let mut lone = Lone::new(Parameters { depth: 16, ..small() });
    let (subscriber, next) = subscribe(&mut lone, terms);
    let (last, before) = messages.split_last().unwrap();
    for message in before {
        assert_eq!(lone.message(message), Ok(None), "{message:?}");
    }
    assert_eq!(lone.message(last), Err(rule));
    if let Some(Ok(delivery)) = next.take() {
        value_of(delivery);
    }
    drop(subscriber);
    lone.assert_over(rule);
}

#[test]
fn d_a_value_without_an_allowance_is_an_overrun() {
    let dead = || write_of(response(crate::support::dead()));
    // The first is taken and returned; the next two are not taken.
    let messages = [dead(), dead(), dead()];
    assert_breaks(every(1), &messages, PeerMisbehaved::SubscriptionOverrun);
}

#[test]
fn d_a_value_without_a_buffer_is_unasked() {
    assert_breaks(every(2), &[tensor_write(8)], PeerMisbehaved::ContentUnasked);
}

#[test]
fn d_a_value_longer_than_its_buffer_has_the_wrong_length() {
    let messages = [buffer_request(INDEX, 8), tensor_write(9)];
    assert_breaks(every(2), &messages, PeerMisbehaved::ContentLength);
}

#[test]
fn d_a_second_buffer_request_before_the_response_is_unasked() {
    let mut lone = Lone::new(small());
    let (subscriber, _next) = subscribe(&mut lone, every(2));
    lone.memory.stick(true);
    assert_eq!(lone.message(&buffer_request(INDEX, 8)), Ok(None));
    let again = lone.message(&buffer_request(INDEX, 9));
    assert_eq!(again, Err(PeerMisbehaved::SubscriptionUnasked));
    drop(subscriber);
    lone.assert_over(PeerMisbehaved::SubscriptionUnasked);
}

#[test]
fn d_a_value_before_the_buffers_that_were_requested_is_unasked() {
    for value in [write_of(response(crate::support::dead())), tensor_write(8)] {
        let mut lone = Lone::new(small());
        let (subscriber, _next) = subscribe(&mut lone, every(1));
        lone.memory.stick(true);
        assert_eq!(lone.message(&buffer_request(INDEX, 8)), Ok(None));
        assert_eq!(lone.message(&value), Err(PeerMisbehaved::SubscriptionUnasked));
        drop(subscriber);
        lone.assert_over(PeerMisbehaved::SubscriptionUnasked);
    }
}

#[test]
fn d_a_buffer_request_without_an_allowance_is_unasked() {
    let dead = || write_of(response(crate::support::dead()));
    let messages = [dead(), dead(), buffer_request(INDEX, 8)];
    assert_breaks(every(1), &messages, PeerMisbehaved::SubscriptionUnasked);
}

#[test]
fn d_messages_of_a_subscription_for_a_plain_request_are_unasked() {
    for message in [buffer_request(INDEX, 8), tensor_write(0)] {
        let mut lone = Lone::new(small());
        let _handle = lone.receive(STEP, "k");
        assert_eq!(lone.message(&message), Err(PeerMisbehaved::SubscriptionUnasked));
        lone.assert_over(PeerMisbehaved::SubscriptionUnasked);
    }
}

#[test]
fn d_answers_of_a_plain_request_for_a_subscription_are_unasked() {
    let described = Message::MetaDataResponse(response(bytes_of(8)));
    assert_breaks(every(2), &[described], PeerMisbehaved::AnswerUnasked);
    let version = Message::Version(VersionNotice { index: INDEX, version: 1 });
    assert_breaks(every(2), &[version], PeerMisbehaved::VersionUnasked);
    // A content with an immediate, before and after there are buffers.
    for has_buffers in [false, true] {
        let mut lone = Lone::new(small());
        let (subscriber, _next) = subscribe(&mut lone, every(2));
        if has_buffers {
            assert_eq!(lone.message(&buffer_request(INDEX, 8)), Ok(None));
        }
        assert_eq!(lone.immediate(INDEX.0, 8), Err(PeerMisbehaved::ContentUnasked));
        drop(subscriber);
        lone.assert_over(PeerMisbehaved::ContentUnasked);
    }
}

#[test]
fn d_a_loan_that_was_not_asked_for_or_comes_twice_is_unasked() {
    let lent = || write_of(MetaDataResponse { loan_follows: true, ..response(bytes_of(8)) });
    assert_breaks(views(2), &[lent()], PeerMisbehaved::LoanUnasked);
    assert_breaks(every(2), &[lent()], PeerMisbehaved::LoanUnasked);
    for (terms, loans) in [(every(2), 1), (views(2), 2)] {
        let mut lone = Lone::new(small());
        let (subscriber, _next) = subscribe(&mut lone, terms);
        for number in 1..=loans {
            let expected = if number == loans { Err(PeerMisbehaved::LoanUnasked) } else { Ok(()) };
            assert_eq!(lone.loan(INDEX.0, &[5; 8]), expected);
        }
        drop(subscriber);
        lone.assert_over(PeerMisbehaved::LoanUnasked);
    }
}

#[test]
fn d_a_loan_of_another_length_than_its_message_says_has_the_wrong_length() {
    let mut lone = Lone::new(small());
    let (subscriber, _next) = subscribe(&mut lone, views(2));
    assert_eq!(lone.loan(INDEX.0, &[5; 7]), Ok(()));
    let lent = write_of(MetaDataResponse { loan_follows: true, ..response(bytes_of(8)) });
    assert_eq!(lone.message(&lent), Err(PeerMisbehaved::ContentLength));
    drop(subscriber);
    lone.assert_over(PeerMisbehaved::ContentLength);
}

#[test]
fn d_contents_and_checksums_in_a_value_are_agreed_on() {
    let eager = MetaDataResponse { content: Some(vec![7; 8].into()), ..response(bytes_of(8)) };
    assert_breaks(every(2), &[write_of(eager)], PeerMisbehaved::EagerUnasked);
    let summed = MetaDataResponse { checksum: Some(5), ..response(bytes_of(0)) };
    assert_breaks(every(2), &[write_of(summed)], PeerMisbehaved::ChecksumUnfit);
    let mut lone = Lone::new(Parameters { validation: Validation::Crc32c, ..small() });
    let (subscriber, _next) = subscribe(&mut lone, every(2));
    assert_eq!(lone.message(&tensor_write(0)), Err(PeerMisbehaved::ChecksumUnfit));
    drop(subscriber);
    lone.assert_over(PeerMisbehaved::ChecksumUnfit);
}

#[test]
fn messages_for_unknown_and_ended_subscriptions_are_ignored_and_counted() {
    let mut lone = Lone::new(Parameters { depth: 64, ..small() });
    let (subscriber, next) = subscribe(&mut lone, every(2));
    let status = Status::new(Code::NotFound, "no such thing");
    let ended = Message::ErrorStatus(ErrorStatus { index: INDEX, status: status.clone() });
    assert_eq!(lone.message(&ended), Ok(None));
    assert_eq!(delivered(&next), Err(TransferError::Remote(status)));
    let mut ignored = 0;
    for is_dropped in [false, true] {
        for message in [buffer_request(INDEX, 8), tensor_write(8), tensor_write(0), ended.clone()] {
            assert_eq!(lone.message(&message), Ok(None));
            ignored += 1;
            assert_eq!(lone.connection.counters().ignored, ignored, "{is_dropped}: {message:?}");
        }
        assert_eq!(lone.loan(INDEX.0, &[5; 8]), Ok(()));
        ignored += 1;
        if !is_dropped {
            subscriber.next(&mut lone.tasks);
        }
    }
    let destination = Destination { region: 1, generation: 1, offset: 0, capacity: 8, result: None };
    for destinations in [vec![destination], Vec::new()] {
        let buffers = Buffers { index: RequestIndex(3), values: 0, destinations: destinations.into() };
        assert_eq!(lone.message(&Message::BufferResponse(buffers.clone())), Ok(None));
        assert_eq!(lone.message(&Message::BufferIdle(buffers)), Ok(None));
        ignored += 2;
    }
    assert_eq!(lone.connection.counters().ignored, ignored);
    drop(subscriber);
    lone.tasks.run();
    assert_eq!((lone.memory.lent(), lone.memory.leaked()), (0, 0));
    assert_eq!(lone.connection.failure(), None);
}

#[test]
fn an_end_behind_a_buffer_request_ends_the_subscription_and_no_buffer_is_made() {
    let mut lone = Lone::new(small());
    let (subscriber, next) = subscribe(&mut lone, every(2));
    assert_eq!(lone.message_before_tasks_run(&buffer_request(INDEX, 8)), Ok(None));
    let status = Status::new(Code::Cancelled, "the sender gave the answer up");
    let ended = Message::ErrorStatus(ErrorStatus { index: INDEX, status: status.clone() });
    assert_eq!(lone.message_before_tasks_run(&ended), Ok(None));
    lone.tasks.run();
    assert_eq!(delivered(&next), Err(TransferError::Remote(status)));
    assert_eq!(lone.connection.counters().sent.buffer_response, 0);
    assert_eq!(lone.memory.lent(), 0);
    drop(subscriber);
}

#[test]
fn messages_between_cancel_and_its_acknowledgement_are_taken_in_and_those_behind_it_ignored() {
    let mut lone = Lone::new(Parameters { depth: 64, ..small() });
    let (subscriber, next) = subscribe(&mut lone, views(2));
    assert_eq!(lone.message(&buffer_request(INDEX, 8)), Ok(None));
    assert_eq!(lone.memory.lent(), 2);
    lone.tasks.cancel(next.task);
    drop(subscriber);
    lone.tasks.run();
    assert_eq!(lone.connection.counters().sent.cancel, 1);
    assert_eq!(lone.loan(INDEX.0, &[5; 8]), Ok(()));
    assert_eq!(lone.message_before_tasks_run(&Message::CancelAck(INDEX)), Ok(None));
    // Its memory is still on its way back.
    let ignored = lone.connection.counters().ignored;
    assert_eq!(lone.loan(INDEX.0, &[5; 8]), Ok(()));
    assert_eq!(lone.message_before_tasks_run(&tensor_write(8)), Ok(None));
    assert_eq!(lone.message_before_tasks_run(&buffer_request(INDEX, 8)), Ok(None));
    assert_eq!(lone.connection.counters().ignored, ignored + 3);
    lone.tasks.run();
    assert_eq!((lone.memory.lent(), lone.memory.leaked()), (0, 0));
    assert_eq!(lone.memory.ended(LentEnd::CancelAck), 2);
    assert_eq!(lone.connection.failure(), None);
}

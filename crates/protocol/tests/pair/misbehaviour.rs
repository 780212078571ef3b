//! One test for each rule that a peer can break, and for what it may do without breaking one.

use std::{collections::BTreeSet, sync::Arc};

use tensorwire_protocol::{
    Code, Destination, ErrorStatus, Message, MetaDataResponse, Metadata, Parameters, PeerMisbehaved,
    RequestIndex, Status, TensorReRequest, TensorRequest, TransferError, Want, limits::PULLS_MAX,
};

use super::rules::RULES;
use crate::support::{
    STEP, bytes_of,
    lone::Lone,
    pair::{original, settled, small},
};

fn meta_data_response(index: u32, metadata: Metadata) -> Message {
    Message::MetaDataResponse(MetaDataResponse {
        index: RequestIndex(index),
        metadata,
        content: None,
        loan_follows: false,
        checksum: None,
    })
}

fn error_status(index: u32) -> Message {
    let status = Status::new(Code::NotFound, "no such thing");
    Message::ErrorStatus(ErrorStatus { index: RequestIndex(index), status })
}

fn at(capacity: u64) -> Option<Destination> {
    Some(Destination { region: 1, generation: 1, offset: 0, capacity, result: None })
}

fn re_request(index: u32, destination: Option<Destination>) -> Message {
    Message::TensorReRequest(TensorReRequest { index: RequestIndex(index), destination })
}

fn request(index: u32) -> TensorRequest {
    let key = "k".into();
    TensorRequest {
        index: RequestIndex(index),
        scope: STEP,
        key,
        known: Arc::default(),
        want: Want::Write(None),
        arguments: None,
    }
}

#[test]
fn d_malformed() {
    let too_long = 4097u32.to_le_bytes();
    let unknown_kind = [5, 0, 0, 0, 99];
    let reserved_index = [9, 0, 0, 0, 5, 0xF0, 0xFF, 0xFF, 0xFF];
    for bytes in [&[0u8; 8][..], &too_long, &unknown_kind, &reserved_index] {
        let mut lone = Lone::new(small());
        let handle = lone.receive(STEP, "k");
        assert_eq!(lone.raw_message(bytes), Err(PeerMisbehaved::Malformed), "{bytes:?}");
        assert_eq!(lone.connection.counters().acknowledgements_sent, 0, "not acknowledged");
        lone.assert_over(PeerMisbehaved::Malformed);
        assert!(matches!(settled(&handle), Err(TransferError::PeerLost { .. })));
    }
}

#[test]
fn d_reserved_immediate() {
    for immediate in 0xFFFF_FFF0..=0xFFFF_FFFD {
        let mut lone = Lone::new(small());
        assert_eq!(lone.immediate(immediate, 0), Err(PeerMisbehaved::ReservedImmediate));
        lone.assert_over(PeerMisbehaved::ReservedImmediate);
    }
}

#[test]
fn d_acknowledgement_unasked() {
    let mut lone = Lone::new(original());
    let _handle = lone.receive(STEP, "k");
    assert_eq!(lone.immediate(0xFFFF_FFFE, 0), Ok(()));
    assert_eq!(lone.immediate(0xFFFF_FFFE, 0), Err(PeerMisbehaved::AcknowledgementUnasked));
    lone.assert_over(PeerMisbehaved::AcknowledgementUnasked);
}

#[test]
fn d_answer_unasked() {
    for message in [meta_data_response(1, bytes_of(8)), error_status(1)] {
        let mut lone = Lone::new(original());
        let _first = lone.receive(STEP, "k");
        // The window is taken, so the second request has an index and is not sent.
        let second = lone.receive(STEP, "k");
        lone.wire.land(crate::support::Side::A);
        assert_eq!(lone.message_without_acknowledging(&message), Err(PeerMisbehaved::AnswerUnasked));
        lone.assert_over(PeerMisbehaved::AnswerUnasked);
        assert!(matches!(settled(&second), Err(TransferError::PeerLost { .. })));
    }
}

#[test]
fn d_content_unasked() {
    // Without a destination.
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    assert_eq!(lone.immediate(0, 8), Err(PeerMisbehaved::ContentUnasked));
    lone.assert_over(PeerMisbehaved::ContentUnasked);
    // Between META_DATA_RESPONSE and TENSOR_RE_REQUEST.
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    lone.memory.stick(true);
    assert_eq!(lone.message(&meta_data_response(0, bytes_of(8))), Ok(None));
    assert_eq!(lone.immediate(0, 8), Err(PeerMisbehaved::ContentUnasked));
    lone.assert_over(PeerMisbehaved::ContentUnasked);
}

#[test]
fn d_content_length() {
    for length in [0, 7, 9, u64::MAX] {
        let mut lone = Lone::new(small());
        let handle = lone.receive(STEP, "k");
        assert_eq!(lone.message(&meta_data_response(0, bytes_of(8))), Ok(None));
        assert_eq!(lone.immediate(0, length), Err(PeerMisbehaved::ContentLength));
        lone.assert_over(PeerMisbehaved::ContentLength);
        assert!(matches!(settled(&handle), Err(TransferError::PeerLost { .. })));
    }
}

#[test]
fn d_meta_data_twice() {
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&meta_data_response(0, bytes_of(8))), Ok(None));
    assert_eq!(lone.message(&meta_data_response(0, bytes_of(9))), Err(PeerMisbehaved::MetaDataTwice));
    lone.assert_over(PeerMisbehaved::MetaDataTwice);
}

#[test]
fn d_cancel_ack_unasked() {
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    let message = Message::CancelAck(RequestIndex(0));
    assert_eq!(lone.message(&message), Err(PeerMisbehaved::CancelAckUnasked));
    lone.assert_over(PeerMisbehaved::CancelAckUnasked);
}

#[test]
fn d_duplicate_request() {
    let mut lone = Lone::new(small());
    lone.request(request(5));
    let again = Message::TensorRequest(request(5));
    assert_eq!(lone.message(&again), Err(PeerMisbehaved::DuplicateRequest));
    lone.assert_over(PeerMisbehaved::DuplicateRequest);
}

#[test]
fn d_re_request_unasked() {
    // Before META_DATA_RESPONSE.
    let mut lone = Lone::new(small());
    lone.request(request(5));
    assert_eq!(lone.message(&re_request(5, at(8))), Err(PeerMisbehaved::ReRequestUnasked));
    lone.assert_over(PeerMisbehaved::ReRequestUnasked);
    // A second one; the contents under way are at their maximum, so the first still waits.
    let mut lone = Lone::new(Parameters { depth: 16, ..small() });
    for index in 5..8 {
        lone.source.send_bytes(STEP, "k", 8, 1);
        lone.request_without_acknowledging(request(index));
        assert_eq!(lone.message_without_acknowledging(&re_request(index, at(8))), Ok(None));
    }
    assert_eq!(lone.connection.counters().contents_sent, 2);
    let again = re_request(7, at(8));
    assert_eq!(lone.message_without_acknowledging(&again), Err(PeerMisbehaved::ReRequestUnasked));
    lone.assert_over(PeerMisbehaved::ReRequestUnasked);
    // After CANCEL, before the response has noticed.
    let mut lone = Lone::new(small());
    lone.source.send_bytes(STEP, "k", 8, 1);
    lone.request(request(5));
    assert_eq!(lone.message_before_tasks_run(&Message::Cancel(RequestIndex(5))), Ok(None));
    assert_eq!(lone.message(&re_request(5, at(8))), Err(PeerMisbehaved::ReRequestUnasked));
    lone.assert_over(PeerMisbehaved::ReRequestUnasked);
}

#[test]
fn d_destination_mismatch() {
    for (length, destination) in [(8, None), (8, at(7)), (0, at(8))] {
        let mut lone = Lone::new(small());
        lone.source.send_bytes(STEP, "k", length, 1);
        lone.request(request(5));
        assert_eq!(lone.message(&re_request(5, destination)), Err(PeerMisbehaved::DestinationMismatch));
        lone.assert_over(PeerMisbehaved::DestinationMismatch);
        assert_eq!(lone.source.stored(STEP, "k"), 1, "the value was not written, so it stays");
    }
}

#[test]
fn d_duplicate_cancel() {
    let mut lone = Lone::new(small());
    lone.request(request(5));
    let cancel = Message::Cancel(RequestIndex(5));
    assert_eq!(lone.message_before_tasks_run(&cancel), Ok(None));
    assert_eq!(lone.message(&cancel), Err(PeerMisbehaved::DuplicateCancel));
    lone.assert_over(PeerMisbehaved::DuplicateCancel);
}

#[test]
fn d_flood_of_requests() {
    let mut lone = Lone::new(small());
    let most = small().requests_max + PULLS_MAX + 64;
    for index in 0..most {
        lone.request(request(index));
    }
    assert_eq!(lone.source.waiting(STEP, "k"), most as usize);
    let one_more = Message::TensorRequest(request(most));
    assert_eq!(lone.message(&one_more), Err(PeerMisbehaved::Flood));
    lone.assert_over(PeerMisbehaved::Flood);
    assert_eq!(lone.source.waiting(STEP, "k"), 0, "every response ended");
}

#[test]
fn d_flood_of_cancels() {
    let mut lone = Lone::new(small());
    let most = small().requests_max + PULLS_MAX + 64;
    let mut last = Ok(None);
    for index in 0..=most {
        assert_eq!(last, Ok(None));
        last = lone.message_before_tasks_run(&Message::Cancel(RequestIndex(index)));
    }
    assert_eq!(last, Err(PeerMisbehaved::Flood));
    lone.assert_over(PeerMisbehaved::Flood);
}

#[test]
fn a_peer_that_stays_within_the_agreed_requests_never_floods() {
    let mut lone = Lone::new(small());
    for index in 0..1000 {
        lone.request(request(index));
        assert_eq!(lone.message(&Message::Cancel(RequestIndex(index))), Ok(None));
    }
    assert_eq!(lone.connection.failure(), None);
}

#[test]
fn unknown_late_and_doubled_indices_are_ignored_and_counted() {
    let mut lone = Lone::new(small());
    let handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&meta_data_response(0, bytes_of(0))), Ok(None));
    assert_eq!(lone.immediate(0, 0), Ok(()));
    assert_eq!(settled(&handle), Ok((bytes_of(0), Vec::new())));
    let unknown = [0, 1, 7, 1 << 14, 2 << 14, 0x3FFF, 0x3FFF_FFFF];
    for index in unknown {
        assert_eq!(lone.immediate(index, 0), Ok(()));
        assert_eq!(lone.message(&meta_data_response(index, bytes_of(8))), Ok(None));
        assert_eq!(lone.message(&error_status(index)), Ok(None));
        assert_eq!(lone.message(&Message::CancelAck(RequestIndex(index))), Ok(None));
        assert_eq!(lone.message(&re_request(index, at(8))), Ok(None));
    }
    assert_eq!(lone.connection.counters().ignored, 5 * unknown.len() as u64);
    assert_eq!(lone.connection.failure(), None);
    assert_eq!((lone.memory.lent(), lone.memory.leaked()), (0, 0));
}

#[test]
fn doubled_answers_before_the_receive_has_run_are_ignored() {
    let mut lone = Lone::new(small());
    let handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&meta_data_response(0, bytes_of(0))), Ok(None));
    assert_eq!(lone.taken_in(0, 0), Ok(None));
    assert_eq!(lone.taken_in(0, 0), Ok(None));
    assert_eq!(lone.message_before_tasks_run(&error_status(0)), Ok(None));
    assert_eq!(lone.message_before_tasks_run(&meta_data_response(0, bytes_of(1))), Ok(None));
    assert_eq!(lone.connection.counters().ignored, 3);
    lone.tasks.run();
    assert_eq!(settled(&handle), Ok((bytes_of(0), Vec::new())));
}

#[test]
fn an_error_between_meta_data_response_and_re_request_ends_the_receive() {
    let mut lone = Lone::new(small());
    let handle = lone.receive(STEP, "k");
    lone.memory.stick(true);
    assert_eq!(lone.message(&meta_data_response(0, bytes_of(8))), Ok(None));
    assert_eq!(lone.message(&error_status(0)), Ok(None));
    lone.memory.stick(false);
    lone.tasks.run();
    let status = Status::new(Code::NotFound, "no such thing");
    assert_eq!(settled(&handle), Err(TransferError::Remote(status)));
    assert_eq!(lone.connection.counters().sent.tensor_re_request, 0);
    assert_eq!((lone.memory.lent(), lone.memory.leaked()), (0, 0));
}

/// The rules in the source of `PeerMisbehaved`, which code outside of its crate cannot match exhaustively.
fn rules_in_the_source() -> BTreeSet<&'static str> {
    let (_, body) = include_str!("../../src/error.rs").split_once("pub enum PeerMisbehaved {").unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let rules = body.lines().map(str::trim).filter_map(|line| line.strip_suffix(','));
    rules.filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase())).collect()
}

#[test]
fn every_rule_has_its_own_words() {
    let names: Vec<_> = RULES.iter().map(|rule| format!("{rule:?}")).collect();
    assert_eq!(names.iter().map(String::as_str).collect::<BTreeSet<_>>(), rules_in_the_source());
    let words: BTreeSet<_> = RULES.iter().map(ToString::to_string).collect();
    assert_eq!(words.len(), RULES.len());
}

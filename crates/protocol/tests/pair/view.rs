//! Views: contents that the peer reads where they are, instead of having them written.

use tensorwire_protocol::{
    Code, ErrorStatus, LentEnd, Message, MetaDataResponse, Metadata, Parameters, PeerMisbehaved,
    RequestIndex, Status, TransferError, Want,
};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of, dead,
    lone::Lone,
    pair::{Pair, ReceiveResult, original, settled, small},
    tasks::Handle,
};

/// What was posted for transfers from the trace's entry `from` on.
fn names(pair: &Pair, from: usize) -> Vec<&'static str> {
    let transfers = [
        "TENSOR_REQUEST",
        "META_DATA_RESPONSE",
        "TENSOR_RE_REQUEST",
        "ERROR_STATUS",
        "content",
        "loan",
        "CANCEL",
        "CANCEL_ACK",
    ];
    let trace = pair.wire.trace();
    trace[from..].iter().map(|(_, name)| *name).filter(|name| transfers.contains(name)).collect()
}

/// A pair whose sender may lend `loans` times.
fn lending(loans: u32) -> Pair {
    let pair = Pair::new(small());
    pair.wire.allow_loans(B, loans);
    pair
}

/// Sends a value and receives it as a view. Returns what was posted for that.
fn transfer(pair: &mut Pair, metadata: Metadata, fill: u8) -> Vec<&'static str> {
    let bytes = vec![fill; metadata.byte_length as usize];
    let from = pair.wire.trace().len();
    pair.b.source.send(STEP, "k", metadata.clone(), bytes.clone());
    let handle = pair.view(STEP, "k");
    pair.run();
    assert_eq!(settled(&handle), Ok((metadata, bytes)));
    pair.assert_clean();
    names(pair, from)
}

const MISS: [&str; 3] = ["TENSOR_REQUEST", "META_DATA_RESPONSE", "loan"];
const HIT: [&str; 2] = ["TENSOR_REQUEST", "loan"];
const COPY: [&str; 4] = ["TENSOR_REQUEST", "META_DATA_RESPONSE", "TENSOR_RE_REQUEST", "content"];

#[test]
fn a_view_of_unknown_metadata_is_announced_and_then_lent() {
    let mut pair = lending(10);
    assert_eq!(transfer(&mut pair, bytes_of(24), 1), MISS);
    assert_eq!(pair.b.requests.last().unwrap().want, Want::View);
    assert_eq!(transfer(&mut pair, bytes_of(24), 2), HIT);
    assert_eq!(pair.a.memory.ended(LentEnd::Content), 2, "the two views, and nothing was allocated");
    let (a, b) = pair.counters();
    assert_eq!((b.loans_sent, b.loan_bytes_sent, a.loans_received, a.loan_bytes_received), (2, 48, 2, 48));
    assert_eq!((b.contents_sent, a.contents_received), (0, 0));
}

#[test]
fn a_view_of_any_listed_metadata_comes_at_once() {
    let mut pair = lending(100);
    let shapes = [bytes_of(8), bytes_of(24), bytes_of(40)];
    for shape in &shapes {
        assert_eq!(transfer(&mut pair, shape.clone(), 1), MISS);
    }
    for round in 0..9 {
        assert_eq!(transfer(&mut pair, shapes[round * 2 % 3].clone(), round as u8), HIT);
    }
}

#[test]
fn a_value_of_no_bytes_is_not_lent() {
    let mut pair = lending(10);
    assert_eq!(transfer(&mut pair, bytes_of(24), 1), MISS);
    assert_eq!(transfer(&mut pair, dead(), 0), COPY);
    assert_eq!(transfer(&mut pair, dead(), 0), ["TENSOR_REQUEST", "content"]);
    assert_eq!(pair.counters().1.loans_sent, 1);
}

#[test]
fn a_small_value_travels_in_the_message() {
    let mut pair = Pair::new(Parameters { eager_bytes_max: 64, ..small() });
    pair.wire.allow_loans(B, 10);
    assert_eq!(transfer(&mut pair, bytes_of(100), 1), MISS);
    assert_eq!(transfer(&mut pair, bytes_of(64), 2), ["TENSOR_REQUEST", "META_DATA_RESPONSE"]);
    assert_eq!(transfer(&mut pair, bytes_of(65), 3), MISS);
}

#[test]
fn a_sender_that_cannot_lend_sends_a_copy() {
    let mut pair = Pair::new(small());
    for fill in 1..4 {
        assert_eq!(transfer(&mut pair, bytes_of(24), fill), COPY);
    }
    assert_eq!(pair.b.requests.last().unwrap().want, Want::View);
    assert_eq!(pair.counters().1.loans_sent, 0);
}

#[test]
fn a_sender_at_its_cap_sends_a_copy() {
    let mut pair = lending(1);
    assert_eq!(transfer(&mut pair, bytes_of(24), 1), MISS);
    assert_eq!(transfer(&mut pair, bytes_of(24), 2), COPY);
    // The sender had promised a loan already.
    let withdrawn =
        ["TENSOR_REQUEST", "META_DATA_RESPONSE", "META_DATA_RESPONSE", "TENSOR_RE_REQUEST", "content"];
    assert_eq!(transfer(&mut pair, bytes_of(25), 3), withdrawn);
    pair.wire.allow_loans(B, 1);
    assert_eq!(transfer(&mut pair, bytes_of(25), 4), HIT);
}

#[test]
fn s3_6_mode_original_never_asks_for_a_view() {
    let mut pair = Pair::new(original());
    pair.wire.allow_loans(B, 10);
    assert_eq!(transfer(&mut pair, bytes_of(24), 1), COPY);
    assert_eq!(transfer(&mut pair, bytes_of(24), 2), ["TENSOR_REQUEST", "content"]);
}

/// A receiver that waits for a view of `k`, whose metadata it knows or not.
fn waiting(is_known: bool) -> (Pair, Handle<ReceiveResult>) {
    let mut pair = lending(10);
    if is_known {
        transfer(&mut pair, bytes_of(24), 1);
    }
    let handle = pair.view(STEP, "k");
    pair.run();
    (pair, handle)
}

#[test]
fn a_loan_that_comes_after_the_cancel_serves_the_next_receive() {
    for is_known in [false, true] {
        let (mut pair, handle) = waiting(is_known);
        let asked = pair.counters().0.sent.tensor_request;
        pair.b.source.send_bytes(STEP, "k", 24, 2);
        pair.tasks.run();
        pair.tasks.cancel(handle.task);
        pair.run();
        assert_eq!(pair.a.memory.viewed(), 1, "it is kept");
        assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(24), vec![2; 24])));
        assert_eq!(pair.counters().0.sent.tensor_request, asked);
        pair.assert_clean();
    }
}

#[test]
fn a_cancel_before_the_loan_leaves_the_value_with_its_sender() {
    for is_known in [false, true] {
        let (mut pair, handle) = waiting(is_known);
        pair.tasks.cancel(handle.task);
        pair.run();
        pair.b.source.send_bytes(STEP, "k", 24, 2);
        pair.run();
        assert_eq!((pair.b.source.stored(STEP, "k"), pair.a.memory.viewed()), (1, 0));
        let handle = pair.view(STEP, "k");
        pair.run();
        assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
        pair.assert_clean();
    }
}

#[test]
fn a_loan_of_a_discarded_step_ends() {
    let (mut pair, handle) = waiting(true);
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.a.connection.discard(tensorwire_protocol::StepId(7));
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!(pair.a.memory.viewed(), 0);
    pair.assert_clean();
}

#[test]
fn a_view_outlives_the_connection() {
    let (mut pair, handle) = waiting(true);
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.run();
    let (kept, second) = (pair.view(STEP, "k"), pair.view(STEP, "k"));
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    pair.run();
    pair.break_down();
    assert!(matches!(settled(&second), Err(TransferError::PeerLost { .. })));
    assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
    assert_eq!(settled(&kept), Ok((bytes_of(24), vec![3; 24])));
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
}

#[test]
fn many_views_keep_to_the_depths_and_their_order() {
    let mut pair = lending(u32::MAX);
    let handles: Vec<_> = (0..100).map(|_| pair.view(STEP, "k")).collect();
    for fill in 0..100 {
        pair.b.source.send_bytes(STEP, "k", 24, fill);
    }
    pair.run();
    for (fill, handle) in (0..).zip(&handles) {
        assert_eq!(settled(handle), Ok((bytes_of(24), vec![fill; 24])));
    }
    pair.assert_clean();
    let seen = pair.wire.seen(A).1;
    assert!(seen <= small().depth, "{seen}");
}

fn promise(metadata: Metadata) -> Message {
    let index = RequestIndex(0);
    Message::MetaDataResponse(MetaDataResponse {
        index,
        metadata,
        content: None,
        loan_follows: true,
        checksum: None,
    })
}

fn described(metadata: Metadata) -> Message {
    let index = RequestIndex(0);
    Message::MetaDataResponse(MetaDataResponse {
        index,
        metadata,
        content: None,
        loan_follows: false,
        checksum: None,
    })
}

#[test]
fn d_loan_unasked() {
    // A loan for a request that wants a copy, at each stage of the request.
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    assert_eq!(lone.loan(0, &[1; 8]), Err(PeerMisbehaved::LoanUnasked));
    lone.assert_over(PeerMisbehaved::LoanUnasked);
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&described(bytes_of(8))), Ok(None));
    assert_eq!(lone.loan(0, &[1; 8]), Err(PeerMisbehaved::LoanUnasked));
    lone.assert_over(PeerMisbehaved::LoanUnasked);
    // A loan for a view whose metadata is not known, before the promise, and after the promise was withdrawn.
    let mut lone = Lone::new(small());
    let _handle = lone.view(STEP, "k");
    assert_eq!(lone.loan(0, &[1; 8]), Err(PeerMisbehaved::LoanUnasked));
    lone.assert_over(PeerMisbehaved::LoanUnasked);
    let mut lone = Lone::new(small());
    let _handle = lone.view(STEP, "k");
    assert_eq!(lone.message(&promise(bytes_of(8))), Ok(None));
    assert_eq!(lone.message(&described(bytes_of(8))), Ok(None));
    assert_eq!(lone.loan(0, &[1; 8]), Err(PeerMisbehaved::LoanUnasked));
    lone.assert_over(PeerMisbehaved::LoanUnasked);
    // A loan that is promised where a copy is wanted.
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&promise(bytes_of(8))), Err(PeerMisbehaved::LoanUnasked));
    lone.assert_over(PeerMisbehaved::LoanUnasked);
}

#[test]
fn d_loan_of_another_length_or_listed_metadata() {
    for (immediate, length, rule) in
        [(0, 7, PeerMisbehaved::ContentLength), (1 << 30, 8, PeerMisbehaved::LoanUnasked)]
    {
        let mut lone = Lone::new(small());
        let handle = lone.view(STEP, "k");
        assert_eq!(lone.message(&promise(bytes_of(8))), Ok(None));
        assert_eq!(lone.loan(immediate, &vec![1; length]), Err(rule));
        lone.assert_over(rule);
        assert!(matches!(settled(&handle), Err(TransferError::PeerLost { .. })));
    }
}

#[test]
fn d_content_written_for_a_view() {
    let mut lone = Lone::new(small());
    lone.know("k", &bytes_of(8));
    let _handle = lone.view(STEP, "k");
    assert_eq!(lone.immediate(1 << 14, 8), Err(PeerMisbehaved::ContentUnasked));
    lone.assert_over(PeerMisbehaved::ContentUnasked);
}

#[test]
fn d_promise_of_a_loan_twice() {
    let mut lone = Lone::new(small());
    let _handle = lone.view(STEP, "k");
    assert_eq!(lone.message(&promise(bytes_of(8))), Ok(None));
    assert_eq!(lone.message(&promise(bytes_of(8))), Err(PeerMisbehaved::MetaDataTwice));
    lone.assert_over(PeerMisbehaved::MetaDataTwice);
}

#[test]
fn d_loan_with_a_reserved_immediate() {
    for immediate in 0xFFFF_FFF0..=0xFFFF_FFFF {
        let mut lone = Lone::new(small());
        assert_eq!(lone.loan(immediate, &[1]), Err(PeerMisbehaved::ReservedImmediate));
        lone.assert_over(PeerMisbehaved::ReservedImmediate);
    }
}

#[test]
fn a_loan_for_an_unknown_or_finished_request_ends_at_once() {
    let mut lone = Lone::new(small());
    let handle = lone.view(STEP, "k");
    assert_eq!(lone.message(&promise(bytes_of(8))), Ok(None));
    assert_eq!(lone.loan(0, &[5; 8]), Ok(()));
    assert_eq!(settled(&handle), Ok((bytes_of(8), vec![5; 8])));
    for index in [0, 5] {
        let ignored = lone.connection.counters().ignored;
        assert_eq!(lone.loan(index, &[1; 8]), Ok(()));
        assert_eq!((lone.memory.viewed(), lone.connection.counters().ignored), (0, ignored + 1));
    }
}

#[test]
fn an_error_may_follow_the_promise_of_a_loan() {
    let mut lone = Lone::new(small());
    let handle = lone.view(STEP, "k");
    assert_eq!(lone.message(&promise(bytes_of(8))), Ok(None));
    let status = Status::new(Code::Cancelled, "given up");
    let error = ErrorStatus { index: RequestIndex(0), status: status.clone() };
    assert_eq!(lone.message(&Message::ErrorStatus(error)), Ok(None));
    assert_eq!(settled(&handle).unwrap_err(), TransferError::Remote(status));
}

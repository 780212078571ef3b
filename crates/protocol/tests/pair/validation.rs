//! Contents that are validated by checksums.

use tensorwire_protocol::{
    Agreed, Damage, Destination, EagerContent, LentEnd, Message, MetaDataResponse, Metadata, Parameters,
    PeerMisbehaved, RequestIndex, ResultSlot, Scope, TensorReRequest, TransferError, Validation, Want,
    limits::RESULT_BYTES,
};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of, dead,
    flip::Flip,
    lone::Lone,
    pair::{Pair, original, settled, small},
};

const ON: [Validation; 2] = [Validation::Crc32c, Validation::Xxh3];

fn validating(validation: Validation) -> Parameters {
    Parameters { validation, ..small() }
}

fn eager(validation: Validation) -> Parameters {
    Parameters { eager_bytes_max: 64, ..validating(validation) }
}

/// What was posted since `from`, flow control aside.
fn names(pair: &Pair, from: usize) -> Vec<&'static str> {
    let flow_control = ["ack", "counts", "ASK", "ANSWER", "RING_OFFER", "RING_MOVED"];
    let trace = pair.wire.trace();
    trace[from..].iter().map(|&(_, name)| name).filter(|name| !flow_control.contains(name)).collect()
}

fn transfer(pair: &mut Pair, scope: Scope, metadata: Metadata) -> Vec<&'static str> {
    let from = pair.wire.trace().len();
    let bytes: Vec<u8> = (0..metadata.byte_length).map(|at| (at * 7) as u8).collect();
    pair.b.source.send(scope, "k", metadata.clone(), bytes.clone());
    assert_eq!(pair.pull(scope, "k"), Ok((metadata, bytes)));
    pair.assert_clean();
    names(pair, from)
}

const HIT: [&str; 2] = ["TENSOR_REQUEST", "content"];
const TOLD: [&str; 4] = ["TENSOR_REQUEST", "META_DATA_RESPONSE", "TENSOR_RE_REQUEST", "content"];

#[test]
fn the_stronger_of_both_wishes_holds() {
    for one in Validation::ALL {
        for other in Validation::ALL {
            let agreed = Agreed::of(&validating(one), &validating(other));
            assert_eq!(agreed.validation, one.max(other));
            assert_eq!(agreed.has_result_slots(), agreed.validation.is_on());
            assert!(!agreed.describes_first());
        }
        let agreed = Agreed::of(&validating(one), &original());
        assert_eq!((agreed.has_result_slots(), agreed.describes_first()), (false, one.is_on()));
    }
    // Either side may request the validation.
    for (a, b) in [(Validation::Xxh3, Validation::Off), (Validation::Off, Validation::Crc32c)] {
        let mut pair = Pair::with(validating(a), validating(b), 64);
        assert_eq!(transfer(&mut pair, STEP, bytes_of(24)), TOLD);
        assert_eq!(pair.counters().0.checksums_matched, 1);
    }
}

#[test]
fn s3_11_a_validated_hit_stays_one_message() {
    for validation in ON {
        let mut pair = Pair::new(validating(validation));
        for scope in [STEP, Scope::Published] {
            assert_eq!(transfer(&mut pair, scope, bytes_of(24)), TOLD);
            assert_eq!(transfer(&mut pair, scope, bytes_of(24)), HIT);
            // Memory for both is as large as the larger.
            assert_eq!(transfer(&mut pair, scope, bytes_of(40)), TOLD);
            assert_eq!(transfer(&mut pair, scope, bytes_of(24)), HIT);
        }
        let (a, b) = pair.counters();
        assert_eq!((a.checksums_matched, a.checksums_mismatched, a.checksums_computed), (8, 0, 0));
        assert_eq!((b.checksums_matched, b.checksums_mismatched, b.checksums_computed), (0, 0, 8));
        assert_eq!(
            (a.content_bytes_received, b.content_bytes_sent),
            (224, 224),
            "result slots are not content"
        );
    }
}

#[test]
fn contents_of_no_bytes_cost_what_they_do_without() {
    let mut pair = Pair::new(validating(Validation::Xxh3));
    for metadata in [bytes_of(0), dead()] {
        assert_eq!(transfer(&mut pair, STEP, metadata.clone()), TOLD);
        assert_eq!(transfer(&mut pair, STEP, metadata), HIT);
    }
}

#[test]
fn s3_11_in_mode_original_each_request_is_told_the_checksum_first() {
    for validation in ON {
        let mut pair = Pair::new(Parameters { validation, ..original() });
        for metadata in [bytes_of(24), bytes_of(24), bytes_of(0), bytes_of(0), dead(), dead()] {
            assert_eq!(transfer(&mut pair, STEP, metadata), TOLD);
        }
        assert_eq!(pair.counters().0.checksums_matched, 6);
    }
}

#[test]
fn without_validation_nothing_is_computed_or_carried() {
    for parameters in [small(), original(), eager(Validation::Off)] {
        let mut pair = Pair::new(parameters);
        transfer(&mut pair, STEP, bytes_of(24));
        transfer(&mut pair, STEP, bytes_of(24));
        let is_plain =
            |want: Want| !matches!(want, Want::Write(Some(destination)) if destination.result.is_some());
        assert!(pair.b.requests.iter().all(|request| is_plain(request.want)));
        let (a, b) = pair.counters();
        assert_eq!((b.checksums_computed, a.checksums_matched, a.checksums_mismatched), (0, 0, 0));
    }
}

#[test]
fn views_bring_their_checksum_in_a_message() {
    for validation in ON {
        let mut pair = Pair::new(validating(validation));
        pair.wire.allow_loans(B, 9);
        for _ in 0..2 {
            let from = pair.wire.trace().len();
            pair.b.source.send_bytes(Scope::Published, "k", 500, 5);
            let handle = pair.view(Scope::Published, "k");
            pair.run();
            assert_eq!(settled(&handle), Ok((bytes_of(500), vec![5; 500])));
            assert_eq!(names(&pair, from), ["TENSOR_REQUEST", "META_DATA_RESPONSE", "loan"]);
        }
        assert_eq!(pair.counters().0.checksums_matched, 2);
        // The promise is withdrawn: the copy has a checksum of its own.
        pair.wire.allow_loans(B, 0);
        pair.b.source.send_bytes(Scope::Published, "k", 500, 6);
        let handle = pair.view(Scope::Published, "k");
        pair.run();
        assert_eq!(settled(&handle), Ok((bytes_of(500), vec![6; 500])));
        assert_eq!(pair.counters().0.checksums_matched, 3);
        pair.assert_clean();
    }
}

/// Receives a value of `length` bytes that `flip` changes on its way.
fn flipped(pair: &mut Pair, length: u64, flip: Flip) -> TransferError {
    pair.b.source.send_bytes(STEP, "k", length, 9);
    pair.wire.flip(flip);
    let error = pair.pull(STEP, "k").unwrap_err();
    assert!(!pair.wire.has_flip(), "nothing was changed");
    pair.assert_clean();
    error
}

fn assert_corrupted(error: &TransferError, expected: Validation, expected_damage: Option<Damage>) {
    let TransferError::Corrupted { validation, sent, received, damage } = error else { panic!("{error}") };
    assert_eq!(*validation, expected);
    match expected_damage {
        Some(expected) => assert_eq!(*damage, expected),
        None => assert!(*damage == Damage::ResultSlot || sent != received),
    }
    if *damage == Damage::Content {
        assert_ne!(sent, received);
    }
}

#[test]
fn s3_11_each_flip_of_a_content_or_its_result_is_an_error_and_the_connection_goes_on() {
    for validation in ON {
        let mut pair = Pair::new(validating(validation));
        transfer(&mut pair, STEP, bytes_of(9));
        for bit in 0..9 * 8 {
            let error = flipped(&mut pair, 9, Flip::Content(bit));
            assert_corrupted(&error, validation, Some(Damage::Content));
        }
        for bit in 0..RESULT_BYTES * 8 {
            let damage = if bit < 16 * 8 { Damage::ResultSlot } else { Damage::Content };
            assert_corrupted(&flipped(&mut pair, 9, Flip::Result(bit)), validation, Some(damage));
        }
        assert_eq!(transfer(&mut pair, STEP, bytes_of(9)), HIT);
        let (a, _) = pair.counters();
        assert_eq!(a.checksums_mismatched, (9 + RESULT_BYTES as u64) * 8);
        // The memory of a damaged content is returned like that of an undamaged one.
        assert_eq!(pair.a.memory.ended(LentEnd::Content), a.contents_received);
    }
}

#[test]
fn s3_11_each_flip_is_an_error_in_mode_original_and_of_eager_contents_and_views() {
    for validation in ON {
        let mut pair = Pair::new(Parameters { validation, ..original() });
        for bit in 0..5 * 8 {
            let error = flipped(&mut pair, 5, Flip::Content(bit));
            assert_corrupted(&error, validation, Some(Damage::Content));
        }
        for bit in 0..5 * 8 {
            // A new connection for each bit, because a receiver that knows the key's metadata requests the content by a write.
            let mut pair = Pair::new(eager(validation));
            let error = flipped(&mut pair, 5, Flip::Message(bit));
            assert_corrupted(&error, validation, Some(Damage::Content));
        }
        let mut pair = Pair::new(validating(validation));
        pair.wire.allow_loans(B, u32::MAX);
        for bit in [0, 999, 500 * 8 - 1] {
            pair.b.source.send_bytes(Scope::Published, "k", 500, 5);
            pair.wire.flip(Flip::Loan(bit));
            let handle = pair.view(Scope::Published, "k");
            pair.run();
            assert_corrupted(&settled(&handle).unwrap_err(), validation, Some(Damage::Content));
            assert_eq!(pair.a.memory.viewed(), 0);
        }
        pair.assert_clean();
    }
}

#[test]
fn without_validation_a_flip_goes_unseen() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 3, 9);
    pair.wire.flip(Flip::Content(8));
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(3), vec![9, 8, 9])));
}

#[test]
fn a_receive_dropped_while_it_validates_leaves_its_value_to_the_next() {
    const LONG: u64 = 600 << 10;
    for drops in 1..3 {
        let mut pair = Pair::new(validating(Validation::Xxh3));
        pair.b.source.send_bytes(STEP, "k", LONG, 3);
        pair.b.source.send_bytes(STEP, "k", LONG, 4);
        let handle = pair.receive(A, STEP, "k");
        while pair.a.connection.counters().contents_received == 0 {
            assert!(pair.step());
        }
        for _ in 0..drops {
            pair.tasks.poll(handle.task);
        }
        assert!(!handle.is_done());
        pair.tasks.cancel(handle.task);
        for fill in [3, 4] {
            assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(LONG), vec![fill; LONG as usize])));
        }
        assert_eq!(pair.counters().0.checksums_matched, 2);
        pair.assert_clean();
    }
}

#[test]
fn a_response_cancelled_while_it_sums_puts_its_value_back() {
    const LONG: u64 = 600 << 10;
    let mut pair = Pair::new(validating(Validation::Crc32c));
    pair.b.source.send_bytes(STEP, "k", LONG, 3);
    let handle = pair.receive(A, STEP, "k");
    while pair.b.responses.is_empty() {
        assert!(pair.step());
    }
    let response = pair.b.responses[0];
    pair.tasks.poll(response);
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!(pair.b.source.stored(STEP, "k"), 1);
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(LONG), vec![3; LONG as usize])));
    pair.assert_clean();
}

fn described(content: Option<&[u8; 8]>, checksum: Option<u64>) -> Message {
    let (index, metadata) = (RequestIndex(0), bytes_of(8));
    let content = content.map(|bytes| EagerContent::from_slice(bytes));
    Message::MetaDataResponse(MetaDataResponse { index, metadata, content, loan_follows: false, checksum })
}

#[test]
fn s10_checksums_against_the_agreement_are_misbehaviour() {
    let content = || Some(&[0; 8]);
    let cases = [
        (eager(Validation::Off), described(None, Some(1))),
        (eager(Validation::Off), described(content(), Some(1))),
        (eager(Validation::Xxh3), described(content(), None)),
        (eager(Validation::Xxh3), described(None, Some(1))),
        (Parameters { validation: Validation::Xxh3, ..original() }, described(None, None)),
    ];
    for (parameters, message) in cases {
        let mut lone = Lone::new(parameters);
        lone.receive(STEP, "k");
        assert_eq!(lone.message(&message), Err(PeerMisbehaved::ChecksumUnfit), "{parameters:?}");
    }
}

#[test]
fn s10_result_slots_against_the_agreement_are_misbehaviour() {
    let slot = Some(ResultSlot { region: 1, generation: 1, offset: 64 });
    for (validation, result) in [(Validation::Off, slot), (Validation::Xxh3, None)] {
        let destination = Some(Destination { region: 1, generation: 1, offset: 0, capacity: 8, result });
        let mut lone = Lone::new(validating(validation));
        let request = Message::TensorReRequest(TensorReRequest { index: RequestIndex(0), destination });
        assert_eq!(lone.message(&request), Err(PeerMisbehaved::ResultSlotUnfit));
    }
}

#[test]
fn s10_a_loan_or_content_whose_checksum_was_not_told_is_misbehaviour() {
    // In mode original no content comes before the checksum, even if the metadata is known.
    let mut lone = Lone::new(Parameters { validation: Validation::Xxh3, ..original() });
    let handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&described(None, Validation::Xxh3.checksum(&[0xDD; 8]))), Ok(None));
    assert_eq!(lone.immediate(0, 8), Ok(()));
    settled(&handle).unwrap();
    let _again = lone.receive(STEP, "k");
    assert_eq!(lone.immediate(1 << 14, 8), Err(PeerMisbehaved::ContentUnasked));
    lone.assert_over(PeerMisbehaved::ContentUnasked);
    // No loan comes without a checksum either.
    let mut lone = Lone::new(validating(Validation::Xxh3));
    let _view = lone.view(Scope::Published, "k");
    assert_eq!(lone.loan(0, &[1; 8]), Err(PeerMisbehaved::LoanUnasked));
    lone.assert_over(PeerMisbehaved::LoanUnasked);
}

#[test]
fn s10_a_content_that_comes_without_its_result_is_damaged() {
    let mut lone = Lone::new(validating(Validation::Xxh3));
    let handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&described(None, None)), Ok(None));
    // A fabric that writes in two operations reports the content alone.
    assert_eq!(lone.immediate(0, 8), Ok(()));
    let error = settled(&handle).unwrap_err();
    assert!(matches!(error, TransferError::Corrupted { damage: Damage::ResultSlot, .. }), "{error}");
    assert_eq!((lone.memory.lent(), lone.memory.leaked()), (0, 0));
    for length in [7, 9, 8 + RESULT_BYTES as u64 - 1, 8 + RESULT_BYTES as u64 + 1] {
        let mut lone = Lone::new(validating(Validation::Xxh3));
        let _receive = lone.receive(STEP, "k");
        assert_eq!(lone.message(&described(None, None)), Ok(None));
        assert_eq!(lone.immediate(0, length), Err(PeerMisbehaved::ContentLength));
    }
}

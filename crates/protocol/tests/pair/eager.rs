//! Contents that travel inside META_DATA_RESPONSE.

use std::sync::Arc;

use tensorwire_protocol::{
    LentEnd, Message, MetaDataResponse, Metadata, Parameters, PeerMisbehaved, RequestIndex, Scope,
    TransferError, Want, WireError, wire,
};

use crate::support::{
    STEP,
    Side::A,
    bytes_of, dead,
    lone::Lone,
    memory::exhausted,
    pair::{Pair, settled, small},
    random::Random,
};

fn eager() -> Parameters {
    Parameters { eager_bytes_max: 64, ..small() }
}

/// What was posted since `from`, flow control aside.
fn names(pair: &Pair, from: usize) -> Vec<&'static str> {
    let trace = pair.wire.trace();
    let messages =
        ["TENSOR_REQUEST", "META_DATA_RESPONSE", "TENSOR_RE_REQUEST", "content", "CANCEL", "CANCEL_ACK"];
    trace[from..].iter().map(|&(_, name)| name).filter(|name| messages.contains(name)).collect()
}

fn transfer(pair: &mut Pair, scope: Scope, metadata: Metadata) -> Vec<&'static str> {
    let from = pair.wire.trace().len();
    let bytes = vec![7; metadata.byte_length as usize];
    pair.b.source.send(scope, "k", metadata.clone(), bytes.clone());
    assert_eq!(pair.pull(scope, "k"), Ok((metadata, bytes)));
    pair.assert_clean();
    names(pair, from)
}

const SHORT: [&str; 2] = ["TENSOR_REQUEST", "META_DATA_RESPONSE"];
const LONG: [&str; 4] = ["TENSOR_REQUEST", "META_DATA_RESPONSE", "TENSOR_RE_REQUEST", "content"];

#[test]
fn the_first_request_for_a_small_value_costs_one_round_trip() {
    for scope in [STEP, Scope::Published] {
        for metadata in [bytes_of(1), bytes_of(64), bytes_of(0), dead()] {
            let mut pair = Pair::new(eager());
            assert_eq!(transfer(&mut pair, scope, metadata.clone()), SHORT);
            // The receiver knows its metadata the second time.
            assert_eq!(transfer(&mut pair, scope, metadata), ["TENSOR_REQUEST", "content"]);
        }
        assert_eq!(transfer(&mut Pair::new(eager()), scope, bytes_of(65)), LONG);
        // The smaller offer is used.
        let mut pair = Pair::with(eager(), Parameters { eager_bytes_max: 8, ..eager() }, 64);
        assert_eq!(transfer(&mut pair, scope, bytes_of(9)), LONG);
    }
    let mut pair = Pair::new(eager());
    transfer(&mut pair, STEP, bytes_of(24));
    let (a, b) = pair.counters();
    assert_eq!((a.eager_received, a.eager_bytes_received, a.contents_received), (1, 24, 0));
    assert_eq!((b.eager_sent, b.eager_bytes_sent, b.contents_sent), (1, 24, 0));
}

#[test]
fn a_known_small_value_is_written_while_memory_can_be_lent_and_else_comes_eagerly() {
    for scope in [STEP, Scope::Published] {
        let mut pair = Pair::new(eager());
        transfer(&mut pair, scope, bytes_of(24));
        assert_eq!(transfer(&mut pair, scope, bytes_of(24)), ["TENSOR_REQUEST", "content"]);
        pair.a.memory.stick(true);
        let handle = pair.receive(A, scope, "k");
        pair.run();
        pair.b.source.send_bytes(scope, "k", 24, 9);
        pair.run();
        assert_eq!(pair.b.requests.last().unwrap().want, Want::Eager);
        assert_eq!(pair.counters().0.eager_received, 2);
        // Such a content needs no memory of the pool.
        assert_eq!(settled(&handle), Ok((bytes_of(24), vec![9; 24])));
        pair.assert_clean();
    }
}

#[test]
fn a_value_that_has_grown_is_told_though_it_was_wanted_eagerly() {
    let mut pair = Pair::new(eager());
    transfer(&mut pair, STEP, bytes_of(24));
    pair.a.memory.stick(true);
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    pair.a.memory.stick(false);
    pair.b.source.send_bytes(STEP, "k", 65, 9);
    pair.run();
    assert_eq!(pair.b.requests.last().unwrap().want, Want::Eager);
    assert_eq!(settled(&handle), Ok((bytes_of(65), vec![9; 65])));
    pair.assert_clean();
}

#[test]
fn memory_lent_for_another_value_goes_back_when_the_content_comes_eagerly() {
    let mut pair = Pair::new(eager());
    transfer(&mut pair, STEP, bytes_of(24));
    assert_eq!(transfer(&mut pair, STEP, bytes_of(30)), SHORT);
    assert_eq!(pair.a.memory.ended(LentEnd::MetaDataResponse), 1);
}

#[test]
fn an_eager_content_comes_although_the_pool_refuses_memory() {
    let mut pair = Pair::new(eager());
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    pair.a.memory.refuse(exhausted());
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(24), vec![1; 24])));
    assert_eq!(pair.b.source.stored(STEP, "k"), 0);
    pair.assert_clean();
}

#[test]
fn a_known_small_value_comes_eagerly_if_the_receiver_prefers_that() {
    for scope in [STEP, Scope::Published] {
        let mut pair = Pair::new(eager());
        pair.a.memory.prefer_eager(true);
        for _ in 0..3 {
            assert_eq!(transfer(&mut pair, scope, bytes_of(24)), SHORT);
        }
        assert_eq!(pair.b.requests.last().unwrap().want, Want::Eager);
        assert_eq!(pair.counters().0.eager_received, 3);
        // A value that has grown needs a second request, and is written the next time.
        assert_eq!(transfer(&mut pair, scope, bytes_of(65)), LONG);
        assert_eq!(transfer(&mut pair, scope, bytes_of(65)), ["TENSOR_REQUEST", "content"]);
        pair.assert_clean();
    }
}

#[test]
fn small_values_that_find_no_credit_are_asked_for_in_turn() {
    let mut pair = Pair::new(Parameters { requests_max: 40, ..eager() });
    pair.a.memory.prefer_eager(true);
    transfer(&mut pair, Scope::Published, bytes_of(24));
    let handles: Vec<_> = (0..40).map(|_| pair.receive(A, Scope::Published, "k")).collect();
    pair.tasks.run();
    let (posted, _) = pair.counters();
    assert!(posted.asks_sent > 0, "some find no credit");
    (0..40).for_each(|_| pair.b.source.send_bytes(Scope::Published, "k", 24, 9));
    pair.run();
    for handle in &handles {
        assert_eq!(settled(handle).map(|(metadata, _)| metadata), Ok(bytes_of(24)));
    }
    pair.assert_clean();
}

#[test]
fn s3_a_receive_of_an_eager_value_can_be_given_up_at_every_step() {
    for seed in 0..16 {
        for steps in 0.. {
            let mut random = Random::new(seed);
            let mut pair = Pair::new(eager());
            pair.b.source.send_bytes(STEP, "k", 24, 3);
            pair.a.memory.stick(random.one_in(2));
            let handle = pair.receive(A, STEP, "k");
            for _ in 0..steps {
                let events = pair.enabled();
                if !events.is_empty() {
                    pair.fire(events[random.below(events.len())]);
                }
            }
            let is_done = handle.is_done() || pair.enabled().is_empty();
            if !handle.is_done() {
                pair.tasks.cancel(handle.task);
                pair.run();
                pair.a.memory.stick(false);
                pair.run();
                assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(24), vec![3; 24])));
            } else {
                assert_eq!(settled(&handle), Ok((bytes_of(24), vec![3; 24])));
            }
            pair.run();
            pair.assert_clean();
            if is_done {
                break;
            }
        }
    }
}

fn response(length: u64) -> Message {
    let content = Some(vec![1; length as usize].into());
    let metadata = bytes_of(length);
    Message::MetaDataResponse(MetaDataResponse {
        index: RequestIndex(0),
        metadata,
        content,
        loan_follows: false,
        checksum: None,
    })
}

#[test]
fn d_eager_unasked() {
    for (parameters, length) in [(eager(), 65), (small(), 8), (small(), 0)] {
        let mut lone = Lone::new(parameters);
        let handle = lone.receive(STEP, "k");
        assert_eq!(lone.message(&response(length)), Err(PeerMisbehaved::EagerUnasked));
        lone.assert_over(PeerMisbehaved::EagerUnasked);
        assert!(matches!(settled(&handle), Err(TransferError::PeerLost { .. })));
    }
}

#[test]
fn d_eager_content_twice_is_ignored_and_content_after_it_too() {
    let mut lone = Lone::new(eager());
    let handle = lone.receive(STEP, "k");
    assert_eq!(lone.message(&response(8)), Ok(None));
    assert_eq!(settled(&handle), Ok((bytes_of(8), vec![1; 8])));
    assert_eq!(lone.message(&response(8)), Ok(None));
    assert_eq!(lone.immediate(0, 8), Ok(()));
    assert_eq!(lone.connection.counters().ignored, 2);
    assert_eq!(lone.connection.failure(), None);
}

#[test]
fn d_content_written_though_it_was_wanted_eagerly() {
    let mut lone = Lone::new(eager());
    let first = lone.receive(STEP, "k");
    assert_eq!(lone.message(&response(8)), Ok(None));
    settled(&first).unwrap();
    lone.memory.stick(true);
    let _second = lone.receive(STEP, "k");
    let index = 1 << 14;
    assert_eq!(lone.immediate(index, 8), Err(PeerMisbehaved::ContentUnasked));
    lone.assert_over(PeerMisbehaved::ContentUnasked);
}

#[test]
fn a_request_without_memory_lists_nothing_when_the_value_is_large() {
    let mut pair = Pair::new(eager());
    transfer(&mut pair, STEP, bytes_of(65));
    pair.a.memory.stick(true);
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    let request = pair.b.requests.last().unwrap();
    assert_eq!((request.known.clone(), request.want), (Arc::default(), Want::Write(None)));
    pair.a.memory.stick(false);
    pair.tasks.cancel(handle.task);
    pair.run();
    pair.assert_clean();
}

fn round_trip(message: &Message) -> Result<Message, WireError> {
    wire::decode(&wire::encode(message))
}

#[test]
fn eager_content_must_have_the_length_of_its_metadata_within_the_limit() {
    let message = |length: u64, content: usize| {
        let metadata = bytes_of(length);
        let content = Some(vec![1; content].into());
        Message::MetaDataResponse(MetaDataResponse {
            index: RequestIndex(0),
            metadata,
            content,
            loan_follows: false,
            checksum: None,
        })
    };
    for length in [0, 1, 4096] {
        assert!(round_trip(&message(length, length as usize)).is_ok());
        assert_eq!(
            round_trip(&message(length + 1, length as usize)),
            Err(WireError::Inconsistent { field: "content" })
        );
    }
    let too_long = WireError::TooLong { field: "content", length: 4097, limit: 4096 };
    assert_eq!(round_trip(&message(4097, 4097)), Err(too_long));
    let mut lying = wire::encode(&message(8, 8));
    let length_at = lying.len() - 8 - 2;
    lying[length_at] = 9;
    assert_eq!(wire::decode(&lying), Err(WireError::Truncated { field: "content" }));
}

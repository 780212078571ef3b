//! Contents that consist of pages: one write, into the room that the request names.

use std::num::NonZeroU64;

use tensorwire_protocol::{
    CallTerms, Code, Destination, Metadata, OfferedArguments, Parameters, RequestIndex, Scope, Status,
    TensorRequest, TransferError, Validation, Want, limits::PULLS_MAX,
};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of,
    lone::Lone,
    pair::{Pair, original, settled, small},
};

const PAGES: Scope = Scope::Pages(None);
const KEY: &str = "kv{0>0+3}";
/// Three pages of 8 bytes, of which the last one ends here.
const ROOM: u64 = 40;

fn into(capacity: u64) -> Want {
    Want::Write(Some(Destination { region: 0, generation: 0, offset: 0, capacity, result: None }))
}

fn request(known: &[Metadata], want: Want) -> TensorRequest {
    TensorRequest {
        index: RequestIndex(0),
        scope: PAGES,
        key: KEY.into(),
        known: known.into(),
        want,
        arguments: None,
    }
}

/// A sender with pages, which are asked for.
fn asked(parameters: Parameters, pages: u64, request: TensorRequest) -> Lone {
    let mut lone = Lone::new(parameters);
    lone.source.send_bytes(PAGES, KEY, 8 * pages, 7);
    lone.request(request);
    lone.absorb();
    lone
}

/// Whether the pages went out. What was refused was answered with one ERROR_STATUS, and nothing was written.
fn are_sent(lone: &Lone) -> bool {
    let counters = lone.connection.counters();
    let written = lone.wire.trace().contains(&(A, "pages"));
    assert_eq!(counters.sent.error_status, u64::from(!written));
    assert_eq!(counters.sent.meta_data_response, 0);
    written
}

#[test]
fn pages_are_one_write_and_no_message() {
    let lone = asked(small(), 3, request(&[bytes_of(24)], into(ROOM)));
    assert!(are_sent(&lone));
    assert_eq!(lone.connection.counters().sent.total(), 0);
}

#[test]
fn pages_without_room_are_refused_and_none_is_written() {
    let eager = Parameters { eager_bytes_max: 4096, ..small() };
    for parameters in [small(), eager] {
        for request in [
            // A page would end one byte behind the room.
            request(&[bytes_of(24)], into(ROOM - 1)),
            // Room for other pages than the key names, for one of two contents, or none.
            request(&[bytes_of(32)], into(ROOM)),
            request(&[bytes_of(24), bytes_of(8)], into(ROOM)),
            request(&[], Want::Write(None)),
            request(&[bytes_of(24)], Want::Eager),
            request(&[bytes_of(24)], Want::View),
        ] {
            let what = format!("{request:?}");
            assert!(!are_sent(&asked(parameters, 3, request)), "{what}");
        }
    }
}

#[test]
fn what_the_fabric_cannot_write_at_once_and_what_must_be_validated_is_refused() {
    assert!(!are_sent(&asked(small(), 5, request(&[bytes_of(40)], into(100)))));
    let validated = Parameters { validation: Validation::Xxh3, ..original() };
    assert!(!are_sent(&asked(validated, 3, request(&[bytes_of(24)], into(ROOM)))));
}

#[test]
fn pieces_of_an_answer_to_a_call_go_to_known_room_or_ask_for_some() {
    let offered = Some(OfferedArguments { number: NonZeroU64::MIN, bytes: 9 });
    let call = Scope::Call(CallTerms { limit_ms: 7, offered, trace: None });
    for parameters in [small(), original()] {
        let mut pair = Pair::new(parameters);
        for round in 0..3 {
            pair.b.source.send_bytes(call, "f", 24, round);
            let before = pair.counters().1.sent.meta_data_response;
            assert_eq!(pair.pull(call, "f"), Ok((bytes_of(24), vec![round; 24])));
            let asked = pair.counters().1.sent.meta_data_response - before;
            assert_eq!(asked, u64::from(round == 0), "round {round}");
            assert!(pair.wire.trace().contains(&(B, "pages")));
            pair.assert_clean();
        }
    }
}

#[test]
fn an_operation_that_stays_keeps_the_connection_from_being_retired() {
    let lone = Lone::new(small());
    let stays = [lone.connection.stay().unwrap(), lone.connection.stay().unwrap()];
    for stay in stays {
        assert!(!lone.connection.retire());
        drop(stay);
    }
    assert!(lone.connection.retire());
    assert!(lone.connection.stay().is_none());
}

#[test]
fn a_pull_waits_for_no_other_receive_and_not_for_a_retired_connection() {
    let write = Scope::Pages(Some(NonZeroU64::MIN));
    let mut pair = Pair::new(Parameters { requests_max: 1, ..small() });
    let _waits = [(); 3].map(|()| pair.receive(A, STEP, "later"));
    pair.run();
    let pull = |pair: &mut Pair| {
        let handle = pair.receive(A, write, KEY);
        pair.run();
        // Refused, because nothing is known of it; but it was asked.
        assert!(pair.b.source.refuse(write, KEY, Status::new(Code::NotFound, "gone")));
        pair.run();
        assert!(matches!(settled(&handle), Err(TransferError::Remote(_))));
    };
    pull(&mut pair);
    let mut pair = Pair::new(small());
    assert!(pair.a.connection.retire());
    pull(&mut pair);
    let other = pair.receive(A, PAGES, KEY);
    pair.run();
    assert!(matches!(settled(&other), Err(TransferError::PeerLost { .. })));
}

#[test]
fn pulls_in_excess_are_refused_here() {
    let write = Scope::Pages(Some(NonZeroU64::MIN));
    let mut pair = Pair::new(Parameters { requests_max: 2, ..small() });
    let _pulls: Vec<_> = (0..2 + PULLS_MAX).map(|_| pair.receive(A, write, KEY)).collect();
    pair.run();
    let refused = pair.receive(A, write, KEY);
    pair.run();
    let is_refused = matches!(settled(&refused), Err(TransferError::Local(status)) if status.code == Code::ResourceExhausted);
    assert!(is_refused && pair.b.misbehaviour.is_none());
}

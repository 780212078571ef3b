//! Refusals that wait for their turn: they delay only the peer that is refused, and end with the connection.

use tensorwire_protocol::{Code, Parameters, Scope, Status, TransferError};

use crate::support::{
    STEP,
    Side::A,
    bytes_of,
    pair::{Pair, ReceiveResult, settled, small},
    tasks::Handle,
};

fn not_found() -> Status {
    Status::new(Code::NotFound, "no such value")
}

/// A request whose refusal waits, and the sender that gives the refusal its turn. A has `requests_max` entries.
fn held(requests_max: u32) -> (Pair, Handle<ReceiveResult>, impl FnOnce()) {
    let mut pair = Pair::new(Parameters { requests_max, ..small() });
    let turn = pair.b.source.hold_refusal();
    let handle = pair.receive(A, STEP, "missing");
    pair.run();
    assert!(pair.b.source.refuse(STEP, "missing", not_found()));
    pair.run();
    assert!(handle.is_pending(), "it is refused before its turn");
    (pair, handle, move || turn.send(()).unwrap())
}

fn assert_refused(handle: &Handle<ReceiveResult>) {
    assert_eq!(settled(handle), Err(TransferError::Remote(not_found())));
}

#[test]
fn a_refusal_waits_for_its_turn_and_answers_with_values_do_not() {
    let (mut pair, handle, give_turn) = held(2);
    for fill in 0..20 {
        pair.b.source.send_bytes(Scope::Published, "k", 24, fill);
        assert_eq!(pair.pull(Scope::Published, "k"), Ok((bytes_of(24), vec![fill; 24])));
    }
    assert!(handle.is_pending());
    give_turn();
    pair.run();
    assert_refused(&handle);
    pair.assert_clean();
}

#[test]
fn s6_a_cancel_does_not_bring_the_next_refusal_forward() {
    let (mut pair, handle, give_turn) = held(1);
    pair.tasks.cancel(handle.task);
    let next = pair.receive(A, STEP, "missing");
    pair.run();
    assert_eq!(pair.b.source.waiting(STEP, "missing"), 0, "the only entry is taken");
    assert_eq!(pair.counters().1.sent.total(), 0);
    give_turn();
    pair.run();
    assert_eq!(pair.counters().1.sent.cancel_ack, 1);
    assert!(pair.b.source.refuse(STEP, "missing", not_found()));
    pair.run();
    assert_refused(&next);
    pair.assert_clean();
}

#[test]
fn a_refusal_that_waits_ends_with_the_connection() {
    let (mut pair, handle, _turn) = held(1);
    pair.break_down();
    assert!(matches!(settled(&handle), Err(TransferError::PeerLost { .. })));
    assert!(pair.tasks.all_finished());
}

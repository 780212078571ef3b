//! The connection fails, in every state: everything ends, memory comes back when the queue pair is gone.

use tensorwire_protocol::{Parameters, Scope, TransferError};

use crate::support::{
    STEP,
    Side::{self, A, B},
    bytes_of,
    memory::values,
    pair::{Pair, ReceiveResult, original, settled, small},
    random::Random,
    tasks::Handle,
};

fn assert_lost(handle: &Handle<ReceiveResult>) {
    match settled(handle) {
        Err(TransferError::PeerLost { reason }) => assert_eq!(reason, "the wire was cut"),
        other => panic!("{other:?}"),
    }
}

/// After a failure: every task of both sides is over, all memory is back, nothing can start.
fn assert_ended(pair: &mut Pair) {
    for side in Side::BOTH {
        let end = pair.end(side);
        assert_eq!((end.memory.lent(), end.memory.leaked()), (0, 0), "{side:?}");
        assert!(values(end.connection.drain()).is_empty());
        let responses = end.responses.clone();
        assert!(responses.into_iter().all(|task| pair.tasks.is_finished(task)), "{side:?}");
        let late = pair.receive(side, STEP, "late");
        pair.tasks.run();
        assert_lost(&late);
    }
    assert!(pair.tasks.all_finished(), "housekeeping ends too");
}

#[test]
fn while_waiting_for_an_entry_a_window_an_answer_and_memory() {
    let mut pair = Pair::new(Parameters { requests_max: 3, ..original() });
    pair.b.source.send_bytes(Scope::Published, "known", 24, 1);
    assert!(pair.pull(Scope::Published, "known").is_ok());
    pair.a.memory.stick(true);
    let allocating = pair.receive(A, Scope::Published, "known");
    let asking = pair.receive(A, STEP, "k");
    let for_the_window = pair.receive(A, STEP, "k");
    let for_an_entry = pair.receive(A, STEP, "k");
    pair.tasks.run();
    pair.break_down();
    for handle in [allocating, asking, for_the_window, for_an_entry] {
        assert_lost(&handle);
    }
    pair.a.memory.stick(false);
    assert_ended(&mut pair);
}

#[test]
fn the_first_reason_stays_and_drain_gives_once() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert!(pair.pull(STEP, "k").is_ok());
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    pair.wire.cut();
    pair.a.connection.fail("the wire was cut");
    pair.a.connection.fail("something else");
    assert_eq!(pair.a.connection.failure().as_deref(), Some("the wire was cut"));
    pair.tasks.run();
    assert_lost(&handle);
    assert_eq!(pair.a.memory.lent(), 1, "until the queue pair is gone");
    let drained = values(pair.a.connection.drain());
    assert_eq!(drained.len(), 1);
    assert!(values(pair.a.connection.drain()).is_empty());
    drained.into_iter().for_each(|lent| lent.end_drained());
    assert_eq!((pair.a.memory.lent(), pair.a.memory.drained()), (0, 1));
}

/// A receive whose content has arrived; its task has not run since.
fn delivered() -> (Pair, Handle<ReceiveResult>) {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert!(pair.pull(STEP, "k").is_ok());
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.deliver(B);
    (pair, handle)
}

#[test]
fn content_that_came_before_the_failure_counts_even_after_drain() {
    let (mut pair, handle) = delivered();
    pair.a.connection.fail("the wire was cut");
    assert!(values(pair.a.connection.drain()).is_empty());
    pair.tasks.run();
    assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
}

#[test]
fn content_that_nobody_awaits_any_more_comes_back_without_housekeeping() {
    let (mut pair, handle) = delivered();
    pair.a.connection.fail("the wire was cut");
    assert!(values(pair.a.connection.drain()).is_empty());
    pair.tasks.cancel(handle.task);
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
}

#[test]
fn memory_on_its_way_back_is_drained_when_housekeeping_has_ended() {
    let (mut pair, handle) = delivered();
    pair.tasks.cancel(handle.task);
    // Housekeeping does not run before the failure.
    pair.break_down();
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
}

#[test]
fn an_allocation_that_ends_after_the_failure_goes_straight_back() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(Scope::Published, "k", 24, 1);
    assert!(pair.pull(Scope::Published, "k").is_ok());
    pair.a.memory.stick(true);
    let handle = pair.receive(A, Scope::Published, "k");
    pair.tasks.run();
    pair.a.memory.stick(false);
    pair.break_down();
    assert_lost(&handle);
    assert_ended(&mut pair);
}

#[test]
fn a_channel_that_refuses_a_post_fails_the_connection() {
    let mut pair = Pair::new(small());
    pair.wire.cut();
    let handle = pair.receive(A, STEP, "k");
    pair.tasks.run();
    assert_lost(&handle);
    assert_eq!(pair.a.connection.failure().as_deref(), Some("the wire was cut"));
}

#[test]
fn a_write_that_fails_fails_the_connection() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    let _handle = pair.receive(A, STEP, "k");
    while pair.counters().1.contents_sent == 0 {
        assert!(pair.step());
    }
    pair.wire.cut();
    pair.tasks.run();
    assert_eq!(pair.b.connection.failure().as_deref(), Some("the wire was cut"));
    assert_eq!(pair.b.source.stored(STEP, "k"), 0, "whether it was delivered is unknown");
}

/// Fails both sides after `steps` random events; false once everything had ended by itself.
fn fail_after(parameters: Parameters, steps: usize, seed: u64) -> bool {
    let mut pair = Pair::with(parameters, parameters, 3);
    let mut random = Random::new(seed);
    let mut handles = Vec::new();
    for key in ["k", "l"] {
        pair.b.source.send_bytes(STEP, key, 24, 0);
        assert!(pair.pull(STEP, key).is_ok());
    }
    for key in ["k", "l"] {
        for round in 0..3 {
            pair.b.source.send_bytes(STEP, key, 24 + round / 2, 1);
            pair.a.source.send_bytes(STEP, key, 24, 2);
            handles.extend(Side::BOTH.map(|side| pair.receive(side, STEP, key)));
        }
    }
    let mut is_idle = false;
    for _ in 0..steps {
        let events = pair.enabled();
        is_idle = events.is_empty();
        if !is_idle {
            pair.fire(events[random.below(events.len())]);
        }
        if random.one_in(40) {
            pair.tasks.cancel(handles[random.below(handles.len())].task);
        }
    }
    pair.break_down();
    for handle in &handles {
        match handle.take() {
            Some(Ok(received)) => drop(received.lent.map(|lent| lent.finish(0))),
            Some(Err(error)) => assert!(matches!(error, TransferError::PeerLost { .. }), "{error}"),
            None => assert!(pair.tasks.is_finished(handle.task), "a receive is still waiting"),
        }
    }
    assert_ended(&mut pair);
    !is_idle
}

#[test]
fn l1_at_every_step_of_many_schedules() {
    for parameters in [small(), original()] {
        for seed in 0..6 {
            let mut steps = 0;
            while fail_after(parameters, steps, seed) {
                steps += 1;
                assert!(steps < 2000, "the pair never comes to rest");
            }
        }
    }
}

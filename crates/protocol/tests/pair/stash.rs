//! Contents that arrive for cancelled receives: stashed for the next receive, in order, until the step is over.

use tensorwire_protocol::{Parameters, Scope, StepId, TransferError, limits::STASH_MAX};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of,
    pair::{Pair, ReceiveResult, original, settled, small},
    random::Random,
    tasks::Handle,
};

const STEP_ID: StepId = StepId(7);

/// A pair whose receiver knows `k` to have 24 bytes, and whose sender has a receive of `k` waiting.
fn waiting() -> (Pair, Handle<ReceiveResult>) {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert!(pair.pull(STEP, "k").is_ok());
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    (pair, handle)
}

/// As [`waiting`]; then the value is written and the receive given up while it is on its way.
fn written_and_given_up(fill: u8) -> Pair {
    let (mut pair, handle) = waiting();
    pair.b.source.send_bytes(STEP, "k", 24, fill);
    pair.tasks.run();
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    pair
}

#[test]
fn a_receive_waits_for_the_outcome_of_a_cancel_before_it_asks() {
    let mut pair = written_and_given_up(2);
    let asked = pair.counters().0.sent.tensor_request;
    let (next, other) = (pair.receive(A, STEP, "k"), pair.receive(A, STEP, "other"));
    pair.tasks.run();
    assert_eq!(pair.counters().0.sent.tensor_request, asked + 1, "only that of the other key");
    pair.b.source.send_bytes(STEP, "other", 8, 9);
    pair.run();
    assert_eq!(settled(&next), Ok((bytes_of(24), vec![2; 24])));
    assert_eq!(settled(&other), Ok((bytes_of(8), vec![9; 8])));
    pair.assert_clean();
}

#[test]
fn receives_of_a_key_wait_for_an_outcome_in_order() {
    let (mut pair, handle) = waiting();
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    let handles: Vec<_> = (0..5).map(|_| pair.receive(A, STEP, "k")).collect();
    pair.tasks.run();
    for fill in 2..7 {
        pair.b.source.send_bytes(STEP, "k", 24, fill);
    }
    pair.run();
    for (fill, handle) in (2..).zip(&handles) {
        assert_eq!(settled(handle), Ok((bytes_of(24), vec![fill; 24])));
    }
    pair.assert_clean();
}

#[test]
fn a_content_nobody_awaits_goes_to_a_receive_that_is_outstanding() {
    let (mut pair, first) = waiting();
    let second = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.tasks.cancel(first.task);
    pair.run();
    // There is one value only, and the second would wait for ever for another.
    assert_eq!(settled(&second), Ok((bytes_of(24), vec![2; 24])));
    pair.run();
    assert_eq!(pair.counters().0.sent.cancel, 2, "its own request is given up");
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(24), vec![3; 24])));
    pair.assert_clean();
}

#[test]
fn a_content_goes_to_a_receive_that_waits_for_memory() {
    let (mut pair, first) = waiting();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    let second = pair.receive(A, STEP, "k");
    pair.tasks.run();
    pair.a.memory.stick(true);
    pair.b.source.send_bytes(STEP, "k", 30, 3);
    pair.deliver(A);
    pair.tasks.run();
    pair.tasks.cancel(first.task);
    pair.run();
    assert_eq!(settled(&second), Ok((bytes_of(24), vec![2; 24])));
    pair.a.memory.stick(false);
    pair.run();
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(30), vec![3; 30])));
    pair.assert_clean();
}

#[test]
fn what_was_given_to_a_receive_that_is_given_up_too_is_kept() {
    let (mut pair, first) = waiting();
    let second = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.tasks.cancel(first.task);
    pair.deliver(B);
    pair.tasks.cancel(second.task);
    pair.run();
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(24), vec![2; 24])));
    pair.assert_clean();
}

#[test]
fn the_end_of_a_step_gives_back_what_is_kept_and_what_still_comes() {
    let mut pair = written_and_given_up(2);
    pair.run();
    assert_eq!(pair.a.memory.lent(), 1);
    pair.a.connection.discard(StepId(8));
    assert_eq!(pair.a.memory.lent(), 1, "that is another step");
    pair.a.connection.discard(STEP_ID);
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
    pair.assert_clean();

    let mut pair = written_and_given_up(2);
    pair.a.connection.discard(STEP_ID);
    pair.run();
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
    pair.assert_clean();

    let (mut pair, handle) = waiting();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.a.connection.discard(STEP_ID);
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0), "given up after the step's end");
    pair.assert_clean();
}

/// Receives `key`, gives the receive up once its content has come, and so leaves the content in the stash.
fn keep(pair: &mut Pair, key: &str) {
    pair.b.source.send_bytes(STEP, key, 24, 1);
    let handle = pair.receive(A, STEP, key);
    let received = pair.counters().0.contents_received;
    while pair.counters().0.contents_received == received {
        assert!(pair.step());
    }
    pair.tasks.cancel(handle.task);
    pair.run();
}

#[test]
fn what_is_kept_for_nobody_holds_no_other_receive_up() {
    let parameters = Parameters { requests_max: 2, ..small() };
    let mut pair = Pair::with(parameters, parameters, 64);
    for key in ["a", "b", "c", "d"] {
        keep(&mut pair, key);
    }
    assert_eq!(pair.a.memory.lent(), 4, "more than may be outstanding");
    pair.b.source.send_bytes(STEP, "e", 24, 3);
    assert_eq!(pair.pull(STEP, "e"), Ok((bytes_of(24), vec![3; 24])));
    assert_eq!(pair.pull(STEP, "a"), Ok((bytes_of(24), vec![1; 24])));
    pair.a.connection.discard(STEP_ID);
    pair.assert_clean();
}

#[test]
fn over_the_most_that_is_kept_receives_are_refused_and_fetches_go_on() {
    let mut pair = Pair::with(small(), small(), 2 * STASH_MAX);
    for number in 0..STASH_MAX {
        keep(&mut pair, &number.to_string());
    }
    assert_eq!(pair.pull(STEP, "other"), Err(TransferError::StashFull { stashed: STASH_MAX }));
    pair.b.source.send_bytes(Scope::Published, "weights", 24, 2);
    assert_eq!(pair.pull(Scope::Published, "weights"), Ok((bytes_of(24), vec![2; 24])));
    assert_eq!(pair.pull(STEP, "7"), Ok((bytes_of(24), vec![1; 24])), "what is kept can be had");
    pair.b.source.send_bytes(STEP, "other", 24, 3);
    assert_eq!(pair.pull(STEP, "other"), Ok((bytes_of(24), vec![3; 24])), "and makes room");
    pair.a.connection.discard(STEP_ID);
    pair.assert_clean();
}

#[test]
fn a_published_value_that_nobody_awaits_is_dropped() {
    let mut pair = Pair::new(small());
    let handle = pair.receive(A, Scope::Published, "k");
    pair.b.source.send_bytes(Scope::Published, "k", 24, 1);
    while pair.counters().0.contents_received == 0 {
        assert!(pair.step());
    }
    pair.tasks.cancel(handle.task);
    pair.run();
    pair.assert_clean();
}

#[test]
fn a_written_value_is_the_peers_as_soon_as_its_counts_say_so() {
    let mut pair = Pair::new(small());
    let (first, second) = (Scope::Step(StepId(1)), Scope::Step(StepId(2)));
    let waiting = pair.receive(A, first, "k");
    pair.run();
    pair.b.source.send_bytes(second, "k", 24, 1);
    assert!(pair.pull(second, "k").is_ok());
    assert_eq!(pair.b.connection.steps_under_way(), [StepId(1), StepId(2)]);
    // The next message is about another request, and no slot is used again.
    pair.tasks.cancel(waiting.task);
    pair.run();
    assert!(pair.b.connection.steps_under_way().is_empty());
    pair.assert_clean();
}

#[test]
fn in_mode_original_a_written_value_is_the_peers_once_its_slot_is_used_again() {
    let mut pair = Pair::new(original());
    let waiting = pair.receive(A, Scope::Step(StepId(1)), "k");
    pair.run();
    for step in 2..5 {
        let scope = Scope::Step(StepId(step));
        pair.b.source.send_bytes(scope, "k", 24, 1);
        assert!(pair.pull(scope, "k").is_ok());
        assert_eq!(pair.b.connection.steps_under_way(), [StepId(1), StepId(step)]);
    }
    pair.tasks.cancel(waiting.task);
    pair.run();
    assert_eq!(pair.b.connection.steps_under_way(), [StepId(4)], "a message about another slot says nothing");
}

#[test]
fn steps_under_way_are_those_whose_values_a_break_may_lose() {
    let (mut pair, handle) = waiting();
    let step = vec![STEP_ID];
    assert_eq!(pair.a.connection.steps_under_way(), step);
    assert_eq!(
        pair.b.connection.steps_under_way(),
        step,
        "a response waits, and an earlier value was written"
    );
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.run();
    assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
    assert!(pair.a.connection.steps_under_way().is_empty());
    assert_eq!(pair.b.connection.steps_under_way(), step, "whether the last value has come is unknown here");
    // The next request shows that it has.
    pair.b.source.send_bytes(Scope::Published, "p", 24, 2);
    assert!(pair.pull(Scope::Published, "p").is_ok());
    assert!(pair.b.connection.steps_under_way().is_empty());

    let mut pair = written_and_given_up(2);
    assert_eq!(pair.a.connection.steps_under_way(), step);
    pair.run();
    assert_eq!(pair.a.connection.steps_under_way(), step, "it is kept here");
    pair.break_down();
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
}

/// Receives of one key, most of them given up after some random events, until all values are there.
fn impatient(parameters: Parameters, seed: u64) {
    let mut random = Random::new(seed);
    let mut pair = Pair::with(parameters, parameters, 8);
    let values = 30u64;
    let (mut sent, mut received) = (0u64, 0u64);
    while received < values {
        let handle = pair.receive(A, STEP, "k");
        for _ in 0..random.below(40) {
            if sent < values && random.one_in(6) {
                let length = 8 * (1 + random.below(3) as u64);
                pair.b.source.send(
                    STEP,
                    "k",
                    bytes_of(length),
                    sent.to_le_bytes().repeat(length as usize / 8),
                );
                sent += 1;
            }
            let events = pair.enabled();
            if !events.is_empty() {
                pair.fire(events[random.below(events.len())]);
            }
        }
        if handle.is_done() {
            let (_, bytes) = settled(&handle).unwrap();
            assert_eq!(bytes[..8], received.to_le_bytes(), "seed {seed}");
            received += 1;
        } else {
            pair.tasks.cancel(handle.task);
        }
    }
    pair.run();
    pair.assert_clean();
}

#[test]
fn s3_impatient_receives_lose_nothing_double_nothing_and_keep_the_order() {
    for seed in 0..200 {
        impatient(small(), seed);
        impatient(original(), seed);
        impatient(Parameters { requests_max: 1, depth: 4, contents_max: 1, ..small() }, seed);
    }
}

/// Receives that wait, and answers, are woken when the connection fails, and give up before the lost steps are read.
#[test]
fn steps_under_way_when_it_failed_stay_so() {
    let (mut pair, handle) = waiting();
    for end in [&pair.a, &pair.b] {
        assert_eq!(end.connection.steps_under_way(), [STEP_ID]);
        end.connection.fail("the wire was cut");
    }
    pair.tasks.run();
    assert!(settled(&handle).is_err());
    for end in [&pair.a, &pair.b] {
        assert_eq!(end.connection.steps_under_way(), [STEP_ID]);
    }
    pair.break_down();
}

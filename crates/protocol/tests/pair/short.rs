//! Small published values: an answer is posted as its request is taken in, and its content comes inside a message.

use tensorwire_protocol::{Parameters, Scope, TransferError, Want};

use crate::support::{
    Side::{self, A, B},
    bytes_of,
    pair::{Pair, settled, small},
    random::Random,
};

const SCOPE: Scope = Scope::Published;

/// A pair whose receiver knows `k` to have 24 bytes, and prefers them in a message.
fn primed(gives_now: bool) -> Pair {
    let mut pair = Pair::new(Parameters { eager_bytes_max: 128, ..small() });
    for side in Side::BOTH {
        pair.end(side).memory.prefer_eager(true);
        pair.end(side).source.give_now(gives_now);
    }
    pair.b.source.send_bytes(SCOPE, "k", 24, 1);
    assert_eq!(pair.pull(SCOPE, "k"), Ok((bytes_of(24), vec![1; 24])));
    pair
}

/// The next arrival of A is taken in, and no task of A has run since.
fn take_before_its_task(pair: &mut Pair) {
    while !pair.wire.has_arrivals(A) {
        assert!(pair.step());
    }
    pair.take(A);
}

#[test]
fn a_small_value_is_sent_as_its_request_is_taken_in() {
    let mut pair = primed(true);
    pair.b.source.send_bytes(SCOPE, "k", 24, 2);
    let handle = pair.receive(A, SCOPE, "k");
    pair.tasks.run();
    pair.deliver(A);
    assert!(pair.b.responses.is_empty() && pair.b.source.stored(SCOPE, "k") == 0);
    pair.run();
    assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
    // A task answers a request whose value does not exist, or is too long for a message.
    let handle = pair.receive(A, SCOPE, "k");
    pair.run();
    pair.b.source.send_bytes(SCOPE, "k", 200, 3);
    pair.run();
    assert_eq!(settled(&handle), Ok((bytes_of(200), vec![3; 200])));
    assert_eq!(pair.b.responses.len(), 1);
    pair.assert_clean();
}

#[test]
fn a_small_value_that_finds_no_credit_is_sent_in_its_turn() {
    let mut pair = primed(true);
    // B uses up its credits by requests that A does not take in.
    let own: Vec<_> = (0..8).map(|_| pair.receive(B, SCOPE, "l")).collect();
    pair.tasks.run();
    pair.b.source.send_bytes(SCOPE, "k", 24, 2);
    let handle = pair.receive(A, SCOPE, "k");
    pair.tasks.run();
    pair.deliver(A);
    assert_eq!(pair.b.responses.len(), 1, "it finds no credit");
    (0..8).for_each(|_| pair.a.source.send_bytes(SCOPE, "l", 8, 3));
    pair.run();
    assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
    for handle in &own {
        assert_eq!(settled(handle), Ok((bytes_of(8), vec![3; 8])));
    }
    pair.assert_clean();
}

#[test]
fn a_request_goes_out_before_the_task_of_the_one_before_has_taken_its_content() {
    let mut pair = primed(false);
    pair.b.source.send_bytes(SCOPE, "k", 24, 2);
    let first = pair.receive(A, SCOPE, "k");
    pair.tasks.run();
    take_before_its_task(&mut pair);
    // The next request is posted before the first task has polled.
    pair.b.source.send_bytes(SCOPE, "k", 24, 3);
    let second = pair.receive(A, SCOPE, "k");
    pair.tasks.poll(second.task);
    assert_eq!(pair.counters().0.sent.tensor_request, 3);
    pair.run();
    assert_eq!(settled(&first), Ok((bytes_of(24), vec![2; 24])));
    assert_eq!(settled(&second), Ok((bytes_of(24), vec![3; 24])));
    assert_eq!(pair.b.requests.last().unwrap().want, Want::Eager);
    pair.assert_clean();
}

#[test]
fn a_content_that_has_come_is_received_though_the_connection_fails() {
    let mut pair = primed(false);
    pair.b.source.send_bytes(SCOPE, "k", 24, 2);
    let handle = pair.receive(A, SCOPE, "k");
    pair.tasks.run();
    take_before_its_task(&mut pair);
    pair.a.connection.fail("the cable is cut");
    pair.tasks.run();
    assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
    // A receive that begins later fails.
    let late = pair.receive(A, SCOPE, "k");
    pair.tasks.run();
    assert!(matches!(settled(&late), Err(TransferError::PeerLost { .. })));
}

#[test]
fn s3_a_receive_of_a_small_value_can_be_given_up_at_every_step() {
    for seed in 0..16 {
        for steps in 0.. {
            let mut random = Random::new(seed);
            let mut pair = primed(random.one_in(2));
            pair.b.source.send_bytes(SCOPE, "k", 24, 2);
            let handle = pair.receive(A, SCOPE, "k");
            for _ in 0..steps {
                let events = pair.enabled();
                if !events.is_empty() {
                    pair.fire(events[random.below(events.len())]);
                }
            }
            let is_done = handle.is_done();
            if is_done {
                assert_eq!(settled(&handle), Ok((bytes_of(24), vec![2; 24])));
            } else {
                pair.tasks.cancel(handle.task);
            }
            pair.run();
            // The test's source has no value any more once an answer has taken it, even if no receive got the value.
            if pair.b.source.stored(SCOPE, "k") == 0 {
                pair.b.source.send_bytes(SCOPE, "k", 24, 2);
            }
            assert_eq!(pair.pull(SCOPE, "k"), Ok((bytes_of(24), vec![2; 24])));
            pair.assert_clean();
            if is_done {
                break;
            }
        }
    }
}

/// Pulls of values of several lengths from both sides, and cancels, on a random schedule.
fn random_traffic(seed: u64) {
    let mut random = Random::new(seed);
    let mut pair = primed(random.one_in(2));
    let mut handles = Vec::new();
    for _ in 0..200 {
        let (side, key) = (Side::BOTH[random.below(2)], ["k", "l"][random.below(2)]);
        match random.below(8) {
            0 | 1 => handles.push(pair.receive(side, SCOPE, key)),
            2 | 3 => {
                let length = [0, 8, 24, 96, 97, 128, 129][random.below(7)];
                pair.end(side).source.send_bytes(SCOPE, key, length, length as u8);
            }
            4 if !handles.is_empty() => {
                let given_up = handles.swap_remove(random.below(handles.len()));
                if given_up.is_done() {
                    settled(&given_up).unwrap();
                } else {
                    pair.tasks.cancel(given_up.task);
                }
            }
            _ => {
                let events = pair.enabled();
                if !events.is_empty() {
                    pair.fire(events[random.below(events.len())]);
                }
            }
        }
    }
    for side in Side::BOTH {
        for key in ["k", "l"] {
            (0..200).for_each(|_| pair.end(side).source.send_bytes(SCOPE, key, 24, 24));
        }
    }
    pair.run();
    for handle in &handles {
        let (metadata, bytes) = settled(handle).unwrap();
        assert_eq!(bytes, vec![metadata.byte_length as u8; metadata.byte_length as usize], "seed {seed}");
    }
    pair.assert_clean();
}

#[test]
fn s2_s3_random_pulls_with_cancels_on_random_schedules() {
    (0..300).for_each(random_traffic);
}

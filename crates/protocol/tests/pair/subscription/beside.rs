//! Subscriptions beside receives of their key, and takes that are dropped.

use tensorwire_protocol::{Parameters, Validation};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of,
    pair::{Pair, original, settled, small},
    subscriber::{Value, delivered, every, value_of},
};

fn value(length: u64, fill: u8) -> Value {
    (bytes_of(length), vec![fill; length as usize])
}

#[test]
fn the_content_of_a_receive_that_was_given_up_comes_to_the_subscription_of_its_key() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 0);
    assert_eq!(pair.pull(STEP, "k"), Ok(value(24, 0)));
    let receives = [pair.receive(A, STEP, "k"), pair.receive(A, STEP, "k")];
    pair.run();
    let subscriber = pair.subscribe(STEP, "k", every(2));
    let next = subscriber.next(&mut pair.tasks);
    pair.run();
    (1..6).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    pair.tasks.run();
    // Both contents are on their way.
    receives.iter().for_each(|receive| pair.tasks.cancel(receive.task));
    pair.run();
    let delivery = next.take().unwrap().unwrap();
    assert_eq!((delivery.sequence, value_of(delivery)), (None, value(24, 1)));
    for fill in 2..6 {
        assert_eq!(pair.next_of(&subscriber), Ok(value(24, fill)));
    }
    pair.end_of(subscriber);
}

#[test]
fn a_value_in_the_stash_comes_before_the_subscription_is_opened() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 0);
    assert_eq!(pair.pull(STEP, "k"), Ok(value(24, 0)));
    let receive = pair.receive(A, STEP, "k");
    pair.run();
    (1..3).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    pair.tasks.run();
    pair.tasks.cancel(receive.task);
    pair.run();
    let subscriber = pair.subscribe(STEP, "k", every(2));
    let requests = pair.counters().0.sent.tensor_request;
    let next = subscriber.next(&mut pair.tasks);
    pair.run();
    let delivery = next.take().unwrap().unwrap();
    assert_eq!((delivery.sequence, value_of(delivery)), (None, value(24, 1)));
    assert_eq!(pair.counters().0.sent.tensor_request, requests);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 2)));
    pair.end_of(subscriber);
}

#[test]
fn a_receive_beside_a_subscription_gets_what_the_source_gives_it() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(1));
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 1)));
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.run();
    let receive = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    pair.run();
    assert_eq!(settled(&receive), Ok(value(24, 3)));
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 2)));
    pair.end_of(subscriber);
}

#[test]
fn a_content_that_is_given_while_the_request_waits_is_taken_as_soon_as_that_is_posted() {
    let mut pair = Pair::new(original());
    pair.b.source.send_bytes(STEP, "k", 24, 0);
    assert_eq!(pair.pull(STEP, "k"), Ok(value(24, 0)));
    let receive = pair.receive(A, STEP, "k");
    pair.run();
    // The window is taken, so the subscription's request waits.
    let other = pair.receive(A, STEP, "other");
    pair.tasks.run();
    let subscriber = pair.subscribe(STEP, "k", every(2));
    let next = subscriber.next(&mut pair.tasks);
    pair.tasks.run();
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    pair.tasks.run();
    pair.tasks.cancel(receive.task);
    pair.deliver(B);
    pair.run();
    let delivery = next.take().expect("the value was given").unwrap();
    assert_eq!((delivery.sequence, value_of(delivery)), (None, value(24, 1)));
    pair.tasks.cancel(other.task);
    pair.end_of(subscriber);
}

#[test]
fn a_take_that_is_dropped_when_another_task_has_posted_its_request_does_not_post_it_twice() {
    let mut pair = Pair::new(original());
    let other = pair.receive(A, STEP, "other");
    pair.tasks.run();
    let subscriber = pair.subscribe(STEP, "k", every(2));
    let next = subscriber.next(&mut pair.tasks);
    pair.tasks.run();
    assert_eq!(pair.counters().0.sent.tensor_request, 1, "the second waits for the window");
    pair.deliver(A);
    pair.deliver(B);
    pair.tasks.run();
    assert_eq!(pair.counters().0.sent.tensor_request, 2, "housekeeping has posted it");
    pair.tasks.cancel(next.task);
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 1)));
    assert_eq!(pair.counters().0.sent.tensor_request, 2);
    pair.tasks.cancel(other.task);
    pair.end_of(subscriber);
}

#[test]
fn a_value_whose_validation_is_dropped_comes_again_before_those_behind_it() {
    // Long enough to be validated in several polls.
    const LENGTH: u64 = 1 << 20;
    let mut pair = Pair::new(Parameters { validation: Validation::Crc32c, ..small() });
    let subscriber = pair.subscribe(STEP, "k", every(3));
    (1..4).for_each(|fill| pair.b.source.send_bytes(STEP, "k", LENGTH, fill));
    let first = subscriber.next(&mut pair.tasks);
    while pair.counters().0.received.tensor_write < 3 {
        assert!(pair.step());
    }
    pair.run();
    assert_eq!(delivered(&first), Ok(value(LENGTH, 1)));
    let dropped = subscriber.next(&mut pair.tasks);
    pair.tasks.poll(dropped.task);
    assert!(dropped.is_pending(), "it is being validated");
    pair.tasks.cancel(dropped.task);
    let next = subscriber.next(&mut pair.tasks);
    pair.run();
    let delivery = next.take().unwrap().unwrap();
    assert_eq!((delivery.sequence, value_of(delivery)), (None, value(LENGTH, 2)));
    assert_eq!(pair.next_of(&subscriber), Ok(value(LENGTH, 3)));
    pair.end_of(subscriber);
}

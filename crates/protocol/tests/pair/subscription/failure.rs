//! The connection fails while subscriptions are in any state: everything ends, and memory comes back when the queue pair is gone.

use tensorwire_protocol::{Parameters, SubscriptionTerms, TransferError, Validation};

use crate::support::{
    STEP,
    Side::{self, A, B},
    bytes_of,
    memory::values,
    pair::{Pair, original, small},
    random::Random,
    subscriber::{Next, Subscriber, delivered, every, views},
};

fn assert_lost(next: &Next) {
    match delivered(next) {
        Err(TransferError::PeerLost { reason }) => assert_eq!(reason, "the wire was cut"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn before_the_first_value() {
    for parameters in [small(), original()] {
        let mut pair = Pair::new(parameters);
        let subscriber = pair.subscribe(STEP, "k", every(2));
        let next = subscriber.next(&mut pair.tasks);
        pair.run();
        pair.break_down();
        assert_lost(&next);
        let later = subscriber.next(&mut pair.tasks);
        pair.tasks.run();
        assert_lost(&later);
        drop(subscriber);
        assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
        assert!(pair.tasks.all_finished());
    }
}

#[test]
fn values_that_came_before_count_and_granted_buffers_are_drained() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(4));
    (1..4).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    assert!(pair.next_of(&subscriber).is_ok());
    pair.break_down();
    for fill in 2..4 {
        let next = subscriber.next(&mut pair.tasks);
        pair.tasks.run();
        assert_eq!(delivered(&next), Ok((bytes_of(24), vec![fill; 24])));
    }
    let next = subscriber.next(&mut pair.tasks);
    pair.tasks.run();
    assert_lost(&next);
    assert!(pair.a.memory.drained() > 0);
    drop(subscriber);
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
}

#[test]
fn values_that_nobody_takes_come_back_with_the_subscription() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(4));
    (1..4).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    assert!(pair.next_of(&subscriber).is_ok());
    pair.break_down();
    assert_eq!(pair.a.memory.lent(), 2, "two values");
    drop(subscriber);
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
}

#[test]
fn while_the_buffers_are_allocated() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(2));
    let next = subscriber.next(&mut pair.tasks);
    pair.a.memory.stick(true);
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    pair.run();
    pair.a.memory.stick(false);
    pair.break_down();
    assert_lost(&next);
    drop(subscriber);
    assert_eq!((pair.a.memory.lent(), pair.a.memory.leaked()), (0, 0));
    assert!(pair.tasks.all_finished());
}

/// Fails both sides after `steps` random events; false once everything had ended by itself.
fn fail_after((parameters, terms): (Parameters, SubscriptionTerms), steps: usize, seed: u64) -> bool {
    let mut pair = Pair::with(parameters, parameters, 3);
    pair.wire.allow_loans(B, 2);
    let mut random = Random::new(seed);
    let mut subscribers: Vec<(Subscriber, Option<Next>)> = Vec::new();
    for key in ["k", "l"] {
        (0..4).for_each(|at| pair.b.source.send_bytes(STEP, key, 24 + at / 2 * 8, 1));
        subscribers.push((pair.subscribe(STEP, key, terms), None));
    }
    let (mut is_idle, mut taken) = (false, 0);
    for _ in 0..steps {
        for (subscriber, next) in &mut subscribers {
            if let Some(one) = next.take_if(|next| next.is_done()) {
                assert!(delivered(&one).is_ok());
                taken += 1;
            }
            next.get_or_insert_with(|| subscriber.next(&mut pair.tasks));
        }
        let events = pair.enabled();
        is_idle = events.is_empty();
        if !is_idle {
            pair.fire(events[random.below(events.len())]);
        }
        if random.one_in(120) && !subscribers.is_empty() {
            let (_, next) = subscribers.swap_remove(random.below(subscribers.len()));
            next.into_iter().for_each(|next| give_up(&mut pair, &next));
        }
    }
    pair.break_down();
    for (_, next) in &subscribers {
        next.iter().for_each(|next| give_up(&mut pair, next));
    }
    drop(subscribers);
    assert_ended(&mut pair);
    !is_idle && taken < 8
}

/// A value that has come is used; the task of another is dropped.
fn give_up(pair: &mut Pair, next: &Next) {
    match next.is_done() {
        true => {
            if let Err(error) = delivered(next) {
                assert!(matches!(error, TransferError::PeerLost { .. }), "{error}");
            }
        }
        false => pair.tasks.cancel(next.task),
    }
}

/// Every task of both sides is over, and all memory is back.
fn assert_ended(pair: &mut Pair) {
    for side in Side::BOTH {
        let end = pair.end(side);
        assert_eq!((end.memory.lent(), end.memory.leaked()), (0, 0), "{side:?}");
        assert!(values(end.connection.drain()).is_empty());
    }
    assert!(pair.tasks.all_finished(), "responses and housekeeping end, too");
    assert_eq!(pair.a.connection.failure().as_deref(), Some("the wire was cut"));
    let late = pair.receive(A, STEP, "late");
    pair.tasks.run();
    assert!(late.take().is_some_and(|result| result.is_err()));
}

#[test]
fn l1_at_every_step_of_many_schedules() {
    let validation = Validation::Crc32c;
    let ways = [
        (small(), every(2)),
        (original(), every(2)),
        (Parameters { validation, ..small() }, views(3)),
        (Parameters { eager_bytes_max: 24, ..small() }, every(1)),
    ];
    for way in ways {
        for seed in 0..6 {
            let mut steps = 0;
            while fail_after(way, steps, seed) {
                steps += 1;
                assert!(steps < 3000, "the pair never comes to rest");
            }
        }
    }
}

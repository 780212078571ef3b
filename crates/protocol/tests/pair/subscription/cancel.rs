//! A subscription that is dropped, in every state: its memory is not reused before the peer can no longer write it, and each value of its
//! key is delivered once, in order.

use std::collections::BTreeSet;

use tensorwire_protocol::{LentEnd, Metadata, Parameters, Scope, SubscriptionTerms, Validation};

use crate::support::{
    STEP,
    Side::{self, A, B},
    bytes_of, dead,
    pair::{Pair, original, settled, small},
    random::Random,
    subscriber::{Next, Subscriber, Value, delivered, every, latest, views},
};

fn value(length: u64, fill: u8) -> Value {
    (bytes_of(length), vec![fill; length as usize])
}

/// A subscription whose buffers are granted.
fn granted(parameters: Parameters, terms: SubscriptionTerms) -> (Pair, Subscriber) {
    let mut pair = Pair::new(parameters);
    let subscriber = pair.subscribe(STEP, "k", terms);
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 1)));
    (pair, subscriber)
}

#[test]
fn before_its_request_nothing_is_sent() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(2));
    pair.end_of(subscriber);
    assert!(pair.posted(0).is_empty());
}

#[test]
fn while_its_request_waits_nothing_is_sent() {
    let mut pair = Pair::new(original());
    let first = pair.receive(A, STEP, "other");
    let subscriber = pair.subscribe(STEP, "k", every(2));
    let next = subscriber.next(&mut pair.tasks);
    pair.tasks.run();
    pair.tasks.cancel(next.task);
    drop(subscriber);
    pair.b.source.send_bytes(STEP, "other", 8, 3);
    pair.run();
    assert_eq!(settled(&first), Ok(value(8, 3)));
    assert_eq!((pair.counters().0.sent.tensor_request, pair.counters().0.sent.cancel), (1, 0));
    pair.assert_clean();
}

#[test]
fn while_it_awaits_a_value_its_buffers_stay_until_cancel_ack() {
    for parameters in [small(), original()] {
        let (mut pair, subscriber) = granted(parameters, every(2));
        let next = subscriber.next(&mut pair.tasks);
        pair.run();
        pair.tasks.cancel(next.task);
        drop(subscriber);
        pair.tasks.run();
        assert_eq!(pair.a.memory.lent(), 2, "the peer may still write");
        pair.deliver(A);
        pair.tasks.run();
        assert_eq!(pair.a.memory.lent(), 2, "until its CANCEL_ACK is here");
        pair.run();
        assert_eq!((pair.a.memory.ended(LentEnd::CancelAck), pair.a.memory.lent()), (2, 0));
        assert_eq!(pair.b.source.waiting(STEP, "k"), 0);
        pair.assert_clean();
    }
}

#[test]
fn cancel_ack_waits_for_the_local_completion_of_each_content() {
    let (mut pair, subscriber) = granted(small(), every(2));
    (2..4).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    pair.tasks.run();
    assert_eq!(pair.counters().1.contents_sent, 3, "two are under way");
    drop(subscriber);
    pair.tasks.run();
    let from = pair.wire.trace().len();
    // CANCEL is taken in while the contents are posted and not complete.
    pair.deliver(A);
    for _ in 0..2 {
        pair.tasks.run();
        assert!(pair.posted(from).is_empty());
        // A content and its TENSOR_WRITE.
        (0..2).for_each(|_| pair.wire.land(B));
        (0..2).for_each(|_| pair.wire.complete(B));
    }
    pair.run();
    assert_eq!(pair.posted(from), ["CANCEL_ACK"]);
    (2..4).for_each(|fill| assert_eq!(pair.pull(STEP, "k"), Ok(value(24, fill))));
    pair.assert_clean();
}

#[test]
fn a_value_whose_content_is_written_and_whose_message_is_not_posted_goes_back() {
    let (mut pair, subscriber) = granted(original(), every(2));
    // A request of B occupies the window.
    let other = pair.receive(B, STEP, "other");
    pair.tasks.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    assert_eq!(pair.posted(0).last(), Some(&"content"));
    drop(subscriber);
    pair.tasks.run();
    let from = pair.wire.trace().len();
    pair.deliver(A);
    pair.tasks.run();
    assert_eq!((pair.b.source.stored(STEP, "k"), pair.a.memory.lent()), (1, 2));
    pair.run();
    assert_eq!(pair.posted(from), ["CANCEL_ACK"]);
    assert_eq!(pair.pull(STEP, "k"), Ok(value(24, 2)));
    pair.tasks.cancel(other.task);
    pair.run();
    pair.assert_clean();
}

#[test]
fn values_that_have_arrived_go_to_the_next_receives_in_order() {
    let (mut pair, subscriber) = granted(small(), every(3));
    (2..8).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    pair.run();
    let receives: Vec<_> = (0..2).map(|_| pair.receive(A, STEP, "k")).collect();
    let contents = pair.counters().1.contents_sent;
    drop(subscriber);
    pair.run();
    // Two of the three that have arrived; the receives, which had requests, got them without those.
    for (fill, receive) in (2..4).zip(&receives) {
        assert_eq!(settled(receive), Ok(value(24, fill)));
    }
    assert_eq!(pair.counters().1.contents_sent, contents);
    (4..8).for_each(|fill| assert_eq!(pair.pull(STEP, "k"), Ok(value(24, fill))));
    pair.assert_clean();
}

#[test]
fn values_of_no_step_are_dropped_and_their_memory_comes_back() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(Scope::Published, "k", every(3));
    (1..8).for_each(|fill| pair.b.source.send_bytes(Scope::Published, "k", 24, fill));
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 1)));
    assert_eq!(pair.a.memory.lent(), 2, "two values have arrived");
    pair.end_of(subscriber);
}

#[test]
fn a_step_that_is_discarded_leaves_no_values() {
    let (mut pair, subscriber) = granted(small(), every(3));
    (2..8).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    pair.run();
    let Scope::Step(step) = STEP else { panic!("a step") };
    pair.a.connection.discard(step);
    pair.end_of(subscriber);
    assert!(pair.a.connection.steps_under_way().is_empty());
}

#[test]
fn a_dropped_answer_is_an_error_at_the_receiver() {
    for steps in 0..60 {
        // Contents whose answer is dropped count among those under way until the connection ends.
        let mut pair = Pair::new(Parameters { contents_max: 8, ..small() });
        let subscriber = pair.subscribe(STEP, "k", every(2));
        (1..4).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
        let mut next = subscriber.next(&mut pair.tasks);
        for _ in 0..steps {
            pair.step();
        }
        if let Some(task) = pair.b.responses.first().copied() {
            pair.tasks.cancel(task);
        }
        pair.run();
        let mut fill = 1;
        while let Ok(taken) = delivered(&next) {
            assert_eq!(taken, value(24, fill));
            fill += 1;
            next = subscriber.next(&mut pair.tasks);
            pair.run();
            if next.is_pending() {
                // The answer was not dropped: it began after these steps.
                pair.tasks.cancel(next.task);
                break;
            }
        }
        drop(subscriber);
        pair.run();
        (fill..4).for_each(|fill| assert_eq!(pair.pull(STEP, "k"), Ok(value(24, fill)), "{steps} steps"));
        pair.assert_clean();
    }
}

/// What a run has sent and taken.
struct Run {
    pair: Pair,
    sent: Vec<Value>,
    taken: Vec<Value>,
}

/// How values travel, in all ways.
fn ways() -> Vec<(Parameters, SubscriptionTerms, usize)> {
    let validation = Validation::Crc32c;
    let eager = Parameters { eager_bytes_max: 8, ..small() };
    vec![
        (small(), every(1), 64),
        (small(), every(3), 64),
        (small(), every(3), 2),
        (original(), every(2), 64),
        (Parameters { validation, ..original() }, every(2), 2),
        (eager, every(2), 3),
        (Parameters { validation, ..eager }, views(2), 3),
        (small(), views(3), 3),
        (Parameters { depth: 4, contents_max: 1, ..small() }, every(3), 3),
    ]
}

impl Run {
    fn new((parameters, _, blocks): (Parameters, SubscriptionTerms, usize)) -> Self {
        let pair = Pair::with(parameters, parameters, blocks);
        pair.wire.allow_loans(B, 3);
        Self { pair, sent: Vec::new(), taken: Vec::new() }
    }

    fn send(&mut self, metadata: Metadata) {
        let bytes = vec![self.sent.len() as u8 + 1; metadata.byte_length as usize];
        self.pair.b.source.send(STEP, "k", metadata.clone(), bytes.clone());
        self.sent.push((metadata, bytes));
    }

    /// A random event, if there is one.
    fn step(&mut self, random: &mut Random) {
        let events = self.pair.enabled();
        if !events.is_empty() {
            self.pair.fire(events[random.below(events.len())]);
        }
    }

    /// Takes the value of a task that has ended.
    fn collect(&mut self, next: &Next) -> bool {
        next.is_done() && {
            self.taken.push(delivered(next).unwrap());
            true
        }
    }

    /// Everything that the subscription left is received, and each value came once, in order.
    fn end(mut self) {
        self.pair.run();
        let (a, b) = self.pair.counters();
        assert_eq!(a.sent.cancel, b.sent.cancel_ack);
        assert_eq!(self.pair.b.source.waiting(STEP, "k"), 0);
        while self.taken.len() < self.sent.len() {
            let pulled = self.pair.pull(STEP, "k").unwrap();
            self.taken.push(pulled);
        }
        assert_eq!(self.taken, self.sent);
        self.pair.assert_clean();
    }
}

const LENGTHS: [u64; 9] = [24, 8, 0, 16, 30, 30, 8, 1, 40];

/// Runs `steps` random events, then drops the subscription; false once it has taken all values.
fn drop_after(way: (Parameters, SubscriptionTerms, usize), steps: usize, seed: u64) -> bool {
    let mut run = Run::new(way);
    let mut random = Random::new(seed);
    let subscriber = run.pair.subscribe(STEP, "k", way.1);
    let mut next = None;
    let mut lengths = LENGTHS.iter();
    for _ in 0..steps {
        if random.one_in(6)
            && let Some(&length) = lengths.next()
        {
            run.send(if length == 16 { dead() } else { bytes_of(length) });
        }
        if next.as_ref().is_none_or(|next| run.collect(next)) {
            next = random.one_in(3).then(|| subscriber.next(&mut run.pair.tasks));
        }
        run.step(&mut random);
    }
    let is_over = run.taken.len() == LENGTHS.len();
    if let Some(next) = next.filter(|next| !run.collect(next)) {
        run.pair.tasks.cancel(next.task);
    }
    drop(subscriber);
    run.end();
    !is_over
}

#[test]
fn s1_s3_at_every_step_in_every_way_and_many_schedules() {
    for way in ways() {
        for seed in 0..8 {
            let mut steps = 0;
            while drop_after(way, steps, seed) {
                steps += 1;
                assert!(steps < 2000, "the subscription never takes all values");
            }
        }
    }
}

/// Drops the futures of takes at random, and never the subscription before it has all values.
fn take_with_drops(way: (Parameters, SubscriptionTerms, usize), seed: u64) {
    let mut run = Run::new(way);
    let mut random = Random::new(seed);
    let subscriber = run.pair.subscribe(STEP, "k", way.1);
    let mut next: Option<Next> = None;
    for at in 0.. {
        assert!(at < 100_000, "seed {seed}: values are missing");
        if run.sent.len() < 2 * LENGTHS.len() && random.one_in(6) {
            run.send(bytes_of(LENGTHS[run.sent.len() % LENGTHS.len()]));
        }
        match &next {
            Some(one) if run.collect(one) => next = None,
            Some(one) if random.one_in(12) => {
                run.pair.tasks.cancel(one.task);
                next = None;
            }
            Some(_) => {}
            None => next = Some(subscriber.next(&mut run.pair.tasks)),
        }
        if run.taken.len() == 2 * LENGTHS.len() {
            break;
        }
        run.step(&mut random);
    }
    assert_eq!(run.pair.counters().0.sent.tensor_request, 1, "one request");
    next.into_iter().for_each(|next| run.pair.tasks.cancel(next.task));
    drop(subscriber);
    run.end();
}

#[test]
fn a_take_can_be_dropped_at_any_time_and_loses_nothing() {
    for way in ways() {
        for seed in 0..40 {
            take_with_drops(way, seed);
        }
    }
}

/// One side's subscriptions and receives of random traffic.
struct Traffic {
    pair: Pair,
    subscribers: Vec<(Side, Subscriber, Option<Next>)>,
    receives: Vec<(Side, super::super::load::Receive)>,
    sent: [u64; 2],
    /// The numbers of the values that each side's peer has sent and that were taken.
    taken: [BTreeSet<u64>; 2],
}

const KEYS: [&str; 3] = ["a", "b", "c"];

impl Traffic {
    fn take(&mut self, side: Side, (metadata, bytes): Value) {
        assert_eq!(metadata.byte_length, bytes.len() as u64);
        assert!(bytes.chunks(8).all(|chunk| chunk == &bytes[..8]), "S2: a torn value");
        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(self.taken[side as usize].insert(number), "a value came twice");
    }

    fn send(&mut self, side: Side, key: &str, length: usize) {
        self.sent[side as usize] += 1;
        let bytes = self.sent[side as usize].to_le_bytes().repeat(length / 8);
        self.pair.end(side).source.send(STEP, key, bytes_of(length as u64), bytes);
    }

    fn subscribe(&mut self, side: Side, key: &str, terms: SubscriptionTerms) {
        let end = self.pair.end(side);
        let subscriber = Subscriber::new(&end.connection, &end.memory, (STEP, key), terms);
        self.subscribers.push((side, subscriber, None));
    }

    /// Takes all that has come, and has each subscription wait for more. Returns the number.
    fn collect(&mut self) -> usize {
        let mut taken = Vec::new();
        for (side, subscriber, next) in &mut self.subscribers {
            match next {
                Some(one) if one.is_done() => {
                    taken.push((side.other(), delivered(one).unwrap()));
                    *next = None;
                }
                Some(_) => {}
                None => *next = Some(subscriber.next(&mut self.pair.tasks)),
            }
        }
        self.receives.retain(|(side, receive)| {
            if receive.is_done() {
                taken.push((side.other(), settled(receive).unwrap()));
                return false;
            }
            receive.is_pending()
        });
        let count = taken.len();
        taken.into_iter().for_each(|(side, value)| self.take(side, value));
        count
    }

    fn give_up(&mut self, at: usize) {
        let (side, subscriber, next) = self.subscribers.swap_remove(at);
        if let Some(next) = next {
            match next.is_done() {
                true => self.take(side.other(), delivered(&next).unwrap()),
                false => self.pair.tasks.cancel(next.task),
            }
        }
        drop(subscriber);
    }

    /// All subscriptions and receives end, and what they left is received.
    fn end(mut self) {
        while { self.collect() + usize::from(self.pair.step()) } > 0 {}
        (0..self.subscribers.len()).rev().for_each(|at| self.give_up(at));
        self.receives.iter().for_each(|(_, receive)| self.pair.tasks.cancel(receive.task));
        self.pair.run();
        for side in Side::BOTH {
            for key in KEYS {
                let mut receive = self.pair.receive(side, STEP, key);
                self.pair.run();
                while receive.is_done() {
                    self.take(side.other(), settled(&receive).unwrap());
                    receive = self.pair.receive(side, STEP, key);
                    self.pair.run();
                }
                self.pair.tasks.cancel(receive.task);
                self.pair.run();
            }
            assert_eq!(self.taken[side.other() as usize].len() as u64, self.sent[side.other() as usize]);
        }
        self.pair.assert_clean();
    }
}

/// Random subscriptions, receives, sends and drops on few keys in both directions, and a random schedule of everything.
fn churn(parameters: Parameters, seed: u64) {
    let mut random = Random::new(seed);
    let pair = Pair::with(parameters, parameters, 6);
    Side::BOTH.into_iter().for_each(|side| pair.wire.allow_loans(side, 20));
    let (subscribers, receives) = (Vec::new(), Vec::new());
    let mut traffic = Traffic { pair, subscribers, receives, sent: [0; 2], taken: Default::default() };
    for _ in 0..1500 {
        let (side, key) = (Side::BOTH[random.below(2)], KEYS[random.below(3)]);
        match random.below(24) {
            0 if traffic.subscribers.len() < 4 => {
                let terms = [every(1), every(2), every(5), views(2)];
                traffic.subscribe(side, key, terms[random.below(4)]);
            }
            1 => {
                let receive = traffic.pair.receive(side, STEP, key);
                traffic.receives.push((side, receive));
            }
            2..=3 => traffic.send(side, key, 8 * (1 + random.below(3))),
            4 if !traffic.subscribers.is_empty() && random.one_in(3) => {
                traffic.give_up(random.below(traffic.subscribers.len()));
            }
            5 if !traffic.receives.is_empty() && random.one_in(2) => {
                let (_, receive) = &traffic.receives[random.below(traffic.receives.len())];
                if !receive.is_done() {
                    traffic.pair.tasks.cancel(receive.task);
                }
            }
            _ => {
                let events = traffic.pair.enabled();
                if !events.is_empty() {
                    traffic.pair.fire(events[random.below(events.len())]);
                }
            }
        }
        if random.one_in(4) {
            traffic.collect();
        }
    }
    traffic.end();
}

#[test]
fn s2_s3_random_traffic_with_drops_on_random_schedules() {
    for seed in 0..40 {
        churn(small(), seed);
        churn(original(), seed);
        churn(Parameters { eager_bytes_max: 8, ..small() }, seed);
        churn(Parameters { requests_max: 2, depth: 4, contents_max: 1, ..small() }, seed);
        churn(Parameters { validation: Validation::Xxh3, ..small() }, seed);
    }
}

/// A subscription to the newest value always comes to rest with it.
fn newest(seed: u64) {
    let mut pair = Pair::new(small());
    let mut random = Random::new(seed);
    let subscriber = pair.subscribe(Scope::Published, "k", latest(1 + random.below(3) as u8));
    let mut next = subscriber.next(&mut pair.tasks);
    let mut last = 0;
    for fill in 1..40 {
        pair.b.source.send_bytes(Scope::Published, "k", 8 + random.below(2) as u64, fill);
        for _ in 0..random.below(30) {
            let events = pair.enabled();
            if !events.is_empty() {
                pair.fire(events[random.below(events.len())]);
            }
        }
        while next.is_done() || fill == 39 && pair.step() {
            if let Some(Ok(delivery)) = next.take() {
                let sequence = delivery.sequence.unwrap();
                assert!(sequence > last, "newer than all before");
                last = sequence;
                assert_eq!(crate::support::subscriber::value_of(delivery).1[0], sequence as u8);
                next = subscriber.next(&mut pair.tasks);
            }
        }
    }
    assert_eq!(last, 39, "seed {seed}");
    pair.tasks.cancel(next.task);
    pair.end_of(subscriber);
}

#[test]
fn a_subscription_to_the_newest_value_comes_to_rest_with_it() {
    (0..100).for_each(newest);
}

//! Many receives, small limits.

use std::pin::pin;

use futures::poll;
use tensorwire_protocol::{Depths, Parameters, Scope, limits::RING_BYTES_MIN};

use crate::support::{
    STEP,
    Side::{self, A, B},
    bytes_of,
    pair::{Pair, original, settled, small},
    random::Random,
};

#[test]
fn s12_ten_thousand_outstanding_receives_over_a_small_cap() {
    let mut pair = Pair::with(small(), small(), 10_000);
    let handles: Vec<_> = (0..10_000).map(|key| pair.receive(A, STEP, &key.to_string())).collect();
    pair.run();
    assert_eq!(pair.counters().0.sent.tensor_request, u64::from(small().requests_max));
    assert_eq!(pair.a.memory.lent(), 0, "nothing is known, so nothing is lent");
    // The senders come in the order of the receives, each just before or after its request.
    for key in 0..10_000u64 {
        pair.b.source.send_bytes(STEP, &key.to_string(), key % 50, (key % 251) as u8);
        if key % 64 == 0 {
            pair.run();
        }
    }
    pair.run();
    for (key, handle) in (0u64..).zip(&handles) {
        let length = key % 50;
        assert_eq!(settled(handle), Ok((bytes_of(length), vec![(key % 251) as u8; length as usize])));
    }
    pair.assert_clean();
}

#[test]
fn a_small_pool_serves_many_receives_in_reverse_order_of_production() {
    let parameters = Parameters { requests_max: 100, ..small() };
    let mut pair = Pair::with(parameters, parameters, 4);
    // The first round knows nothing; the second could lend the whole pool to values that come last.
    for round in 0..2 {
        let handles: Vec<_> = (0..100).map(|key| pair.receive(A, STEP, &key.to_string())).collect();
        pair.run();
        assert_eq!(pair.counters().0.sent.tensor_request, 100 * (round + 1));
        for key in (0..100u8).rev() {
            pair.b.source.send_bytes(STEP, &key.to_string(), 64, key);
        }
        while handles.iter().any(|handle| handle.is_pending()) {
            assert!(pair.step(), "receives starve");
            for (key, handle) in (0..).zip(&handles).filter(|(_, handle)| handle.is_done()) {
                assert_eq!(settled(handle), Ok((bytes_of(64), vec![key; 64])));
            }
        }
        pair.run();
        pair.assert_clean();
    }
    assert!(pair.counters().1.sent.meta_data_response < 200, "some went out with a destination");
}

#[test]
fn a_fetch_waits_for_memory_and_then_costs_no_round_trip() {
    let mut pair = Pair::with(small(), small(), 1);
    pair.b.source.send_bytes(Scope::Published, "k", 8, 1);
    assert!(pair.pull(Scope::Published, "k").is_ok());
    let handles: Vec<_> = (0..4).map(|_| pair.receive(A, Scope::Published, "k")).collect();
    for fill in 0..4 {
        pair.b.source.send_bytes(Scope::Published, "k", 8, fill);
    }
    for handle in &handles {
        pair.run();
        settled(handle).unwrap();
    }
    assert_eq!(pair.counters().1.sent.meta_data_response, 1, "that of the first fetch");
    pair.assert_clean();
}

#[test]
fn credits_exhausted_both_ways_still_move() {
    let parameters = Parameters { depth: 4, requests_max: 64, contents_max: 1, ..small() };
    let mut pair = Pair::new(parameters);
    let mut handles = Vec::new();
    for key in 0..64u8 {
        for side in Side::BOTH {
            pair.end(side).source.send_bytes(STEP, &key.to_string(), 16, key);
            handles.push((key, pair.receive(side, STEP, &key.to_string())));
        }
    }
    // Both sides have posted what they may, and neither has taken anything in.
    pair.tasks.run();
    let (a, b) = pair.counters();
    assert_eq!((a.sent.total(), b.sent.total(), a.asks_sent, b.asks_sent), (2, 2, 1, 1));
    pair.run();
    for (key, handle) in &handles {
        assert_eq!(settled(handle), Ok((bytes_of(16), vec![*key; 16])));
    }
    pair.assert_clean();
}

#[test]
fn messages_are_sent_in_the_order_of_the_receives_whoever_is_polled_first() {
    let mut pair = Pair::new(original());
    let handles: Vec<_> = ["a", "b", "c"].map(|key| pair.receive(A, STEP, key)).into();
    pair.tasks.run();
    pair.deliver(A);
    pair.deliver(B);
    // The window is free and the second receive is woken; the third is polled before it, for no reason, and sends what
    // is first in line.
    pair.tasks.poll(handles[2].task);
    assert_eq!(pair.counters().0.sent.tensor_request, 2);
    pair.run();
    let keys: Vec<_> = pair.b.requests.iter().map(|request| &*request.key).collect();
    assert_eq!(keys, ["a", "b", "c"]);
    // Newcomers are served in order, too.
    let late = pair.receive(A, STEP, "d");
    pair.run();
    for (handle, key) in handles.iter().chain([&late]).zip(["a", "b", "c", "d"]) {
        pair.b.source.send_bytes(STEP, key, 0, 0);
        pair.run();
        settled(handle).unwrap();
    }
    pair.assert_clean();
}

#[test]
fn housekeeping_that_is_dropped_after_it_was_woken_in_line_leaves_its_turn_to_the_next() {
    let mut pair = Pair::new(original());
    let given_up = pair.receive(A, STEP, "a");
    pair.tasks.run();
    pair.tasks.cancel(given_up.task);
    pair.tasks.run();
    // Housekeeping waits for the window, to send CANCEL, and a request waits behind it.
    let next = pair.receive(A, STEP, "b");
    pair.tasks.run();
    pair.deliver(A);
    pair.deliver(B);
    let housekeeping = pair.tasks.first_woken().expect("the first in line is woken");
    pair.tasks.cancel(housekeeping);
    pair.run();
    assert_eq!((pair.counters().0.sent.tensor_request, pair.counters().0.sent.cancel), (2, 0));
    pair.tasks.spawn(pair.a.connection.clone().housekeeping());
    pair.run();
    assert_eq!(pair.counters().0.sent.cancel, 1);
    pair.b.source.send_bytes(STEP, "b", 8, 1);
    pair.run();
    assert_eq!(settled(&next), Ok((bytes_of(8), vec![1; 8])));
    pair.assert_clean();
}

#[test]
fn the_ring_wraps_inside_messages() {
    let parameters = Parameters { ring_bytes: RING_BYTES_MIN, depth: 64, requests_max: 64, ..small() };
    let mut pair = Pair::new(parameters);
    for round in 0..40 {
        let handles: Vec<_> = (0..20)
            .map(|key| {
                let key = format!("{round} {key} {}", "x".repeat(900 + 5 * key));
                pair.b.source.send_bytes(STEP, &key, 8, round);
                pair.receive(A, STEP, &key)
            })
            .collect();
        pair.run();
        for handle in &handles {
            assert_eq!(settled(handle), Ok((bytes_of(8), vec![round; 8])));
        }
    }
    assert!(pair.wire.wrapped() > 50, "{}", pair.wire.wrapped());
    pair.assert_clean();
}

#[test]
fn s12_request_indices_wrap_around() {
    let mut pair = Pair::new(Parameters { requests_max: 1, ..original() });
    pair.b.source.send_bytes(Scope::Published, "k", 8, 0);
    assert!(pair.pull(Scope::Published, "k").is_ok());
    // One slot has 2¹⁶ − 1 generations. Most are used up by receives that are dropped while they allocate.
    pair.a.memory.stick(true);
    let (connection, memory) = (pair.a.connection.clone(), pair.a.memory.clone());
    let used_up = pair.tasks.spawn(async move {
        for _ in 0..(1 << 16) - 7 {
            let receive = pin!(connection.receive(Scope::Published, "k", &memory));
            assert!(poll!(receive).is_pending());
        }
    });
    pair.tasks.run();
    assert!(used_up.is_done());
    pair.a.memory.stick(false);
    for fill in 0..10 {
        pair.b.source.send_bytes(Scope::Published, "k", 8, fill);
        assert_eq!(pair.pull(Scope::Published, "k"), Ok((bytes_of(8), vec![fill; 8])));
    }
    let indices: Vec<_> = pair.b.requests.iter().map(|request| request.index.0 >> 14).collect();
    assert_eq!(indices, [0, 0xFFFA, 0xFFFB, 0xFFFC, 0xFFFD, 0xFFFE, 0, 1, 2, 3, 4]);
    pair.assert_clean();
}

/// Random sends, receives and cancels on few keys in both directions, and a random schedule of everything.
fn churn(parameters: Parameters, seed: u64) {
    let mut random = Random::new(seed);
    let mut pair = Pair::with(parameters, parameters, 6);
    let mut handles = Vec::new();
    let mut sent = [0u64; 2];
    for round in 0..1500u64 {
        let side = Side::BOTH[random.below(2)];
        let key = ["a", "b", "c"][random.below(3)];
        match random.below(12) {
            0 => handles.push((side, pair.receive(side, STEP, key))),
            1 => {
                let length = 8 * (1 + random.below(2) as u64);
                let bytes = round.to_le_bytes().repeat(length as usize / 8);
                pair.end(side).source.send(STEP, key, bytes_of(length), bytes);
                sent[side as usize] += 1;
            }
            2 if !handles.is_empty() && random.one_in(4) => {
                let (_, handle) = &handles[random.below(handles.len())];
                pair.tasks.cancel(handle.task);
            }
            _ => {
                let events = pair.enabled();
                if !events.is_empty() {
                    pair.fire(events[random.below(events.len())]);
                }
            }
        }
        // Values are taken as they come: otherwise the pool would stay empty.
        if random.one_in(8) {
            collect(&mut handles);
        }
    }
    while { collect(&mut handles) + usize::from(pair.step()) } > 0 {}
    for (_, handle) in &handles {
        pair.tasks.cancel(handle.task);
    }
    pair.run();
    for side in Side::BOTH {
        // Contents that were written for cancelled receives are stashed, and count as received.
        let Scope::Step(step) = STEP else { panic!("a step") };
        pair.end(side).connection.discard(step);
    }
    for side in Side::BOTH {
        let stored: usize = ["a", "b", "c"].iter().map(|key| pair.end(side).source.stored(STEP, key)).sum();
        let sender = pair.end(side).connection.counters();
        let receiver = pair.end(side.other()).connection.counters();
        let written = sender.contents_sent + sender.eager_sent;
        assert_eq!(stored as u64 + written, sent[side as usize], "each value is kept, or written once");
        assert_eq!(receiver.contents_received + receiver.eager_received, written);
        let (send, receive) = pair.wire.seen(side);
        let depths = Depths::of(&parameters, &parameters);
        assert!(send <= depths.send && receive <= depths.receive);
    }
    pair.assert_clean();
}

pub(crate) type Receive = crate::support::tasks::Handle<crate::support::pair::ReceiveResult>;
type Handles = Vec<(Side, Receive)>;

/// Takes the values that have arrived, each of which must be whole. Returns their number.
fn collect(handles: &mut Handles) -> usize {
    let before = handles.len();
    handles.retain(|(_, handle)| {
        if handle.is_done() {
            let (metadata, bytes) = settled(handle).unwrap();
            assert_eq!(bytes.len() as u64, metadata.byte_length);
            assert!(bytes.chunks(8).all(|chunk| chunk == &bytes[..8]), "S2: a torn value");
        }
        !handle.is_done() && handle.is_pending()
    });
    before - handles.len()
}

#[test]
fn s2_s3_random_traffic_with_cancels_on_random_schedules() {
    for seed in 0..60 {
        churn(small(), seed);
        churn(original(), seed);
        churn(Parameters { eager_bytes_max: 8, ..small() }, seed);
        churn(Parameters { requests_max: 2, depth: 4, contents_max: 1, ..small() }, seed);
        churn(Parameters { depth: 4, requests_per_message: 3, names_max: 2, ..small() }, seed);
    }
}

#[test]
fn counters_can_be_read() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert!(pair.pull(STEP, "k").is_ok());
    let text = pair.counters().0.to_string();
    assert!(text.contains("2 messages (TENSOR_REQUEST 1, TENSOR_RE_REQUEST 1)"), "{text}");
    assert!(text.contains("1 contents with 24 bytes"), "{text}");
    let idle = Pair::new(small()).end(B).connection.counters().to_string();
    assert!(idle.starts_with("sent 0 messages with 0 bytes"), "{idle}");
}

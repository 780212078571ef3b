//! Subscriptions in mode counted: how many messages, small contents, validation, views, shortage, and values that are left out.

use tensorwire_protocol::{Damage, LentEnd, Metadata, Parameters, Scope, Status, TransferError, Validation};

use crate::support::{
    STEP,
    Side::B,
    bytes_of, dead,
    flip::Flip,
    pair::{Pair, original, small},
    subscriber::{Subscriber, Value, delivered, every, latest, value_of, views},
};

fn value(length: u64, fill: u8) -> Value {
    (bytes_of(length), vec![fill; length as usize])
}

/// Sends a value and takes it. Returns what was posted for that.
fn transfer(pair: &mut Pair, subscriber: &Subscriber, metadata: Metadata, fill: u8) -> Vec<&'static str> {
    let bytes = vec![fill; metadata.byte_length as usize];
    let from = pair.wire.trace().len();
    pair.b.source.send(STEP, "k", metadata.clone(), bytes.clone());
    assert_eq!(pair.next_of(subscriber), Ok((metadata, bytes)));
    pair.posted(from)
}

const FIRST: [&str; 6] =
    ["TENSOR_REQUEST", "BUFFER_REQUEST", "BUFFER_RESPONSE", "content", "TENSOR_WRITE", "BUFFER_IDLE"];
const LATER: [&str; 3] = ["content", "TENSOR_WRITE", "BUFFER_IDLE"];

#[test]
fn a_value_is_one_content_and_one_message_and_several_are_returned_by_one() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(8));
    (0..64).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    let taken = subscriber.take_many(64, &mut pair.tasks);
    pair.run();
    assert_eq!(taken.take().unwrap(), (0..64).map(|fill| value(24, fill)).collect::<Vec<_>>());
    let (a, b) = pair.counters();
    assert_eq!((b.contents_sent, b.content_bytes_sent, b.sent.tensor_write), (64, 64 * 24, 64));
    assert_eq!((a.contents_received, a.content_bytes_received), (64, 64 * 24));
    assert_eq!((a.sent.tensor_request, a.sent.buffer_response, b.sent.buffer_request), (1, 1, 1));
    assert_eq!(a.sent.buffer_idle, 64 / 4, "each returns half of the terms");
    pair.end_of(subscriber);
}

#[test]
fn values_that_have_all_arrived_are_returned_by_half_the_terms_at_once() {
    let mut pair = Pair::new(Parameters { depth: 64, ..small() });
    let subscriber = pair.subscribe(STEP, "k", every(8));
    pair.b.source.send_bytes(STEP, "k", 24, 0);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 0)));
    for round in 0..5 {
        let before = pair.counters().0.sent.buffer_idle;
        for _ in 0..8 {
            pair.b.source.send_bytes(STEP, "k", 24, round);
        }
        pair.run();
        (0..8).for_each(|_| assert_eq!(pair.next_of(&subscriber), Ok(value(24, round))));
        let returned = pair.counters().0.sent.buffer_idle - before;
        assert!(returned <= 3, "{returned}");
    }
    pair.end_of(subscriber);
}

#[test]
fn small_contents_travel_inside_the_message_and_need_no_buffer() {
    let mut pair = Pair::new(Parameters { eager_bytes_max: 64, ..small() });
    let subscriber = pair.subscribe(STEP, "k", every(2));
    let eager = ["TENSOR_WRITE", "BUFFER_IDLE"];
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(64), 1), [&["TENSOR_REQUEST"], &eager[..]].concat());
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(1), 2), eager);
    assert_eq!(transfer(&mut pair, &subscriber, dead(), 0), eager);
    assert_eq!(pair.a.memory.lent(), 0);
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(65), 3), FIRST[1..]);
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(8), 4), eager, "though there are buffers");
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(65), 5), LATER);
    let (a, b) = pair.counters();
    assert_eq!((b.eager_sent, b.eager_bytes_sent, b.contents_sent), (3, 73, 2));
    assert_eq!((a.eager_received, a.eager_bytes_received, a.contents_received), (3, 73, 2));
    pair.end_of(subscriber);
}

#[test]
fn values_are_validated_by_the_checksum_in_the_message() {
    for validation in [Validation::Crc32c, Validation::Xxh3] {
        for parameters in [small(), original(), Parameters { eager_bytes_max: 16, ..small() }] {
            let mut pair = Pair::new(Parameters { validation, ..parameters });
            let subscriber = pair.subscribe(STEP, "k", every(2));
            for metadata in [bytes_of(24), bytes_of(24), bytes_of(0), bytes_of(8), dead(), bytes_of(40)] {
                transfer(&mut pair, &subscriber, metadata, 7);
            }
            let (a, b) = pair.counters();
            assert_eq!((a.checksums_matched, a.checksums_mismatched, b.checksums_computed), (6, 0, 6));
            pair.end_of(subscriber);
        }
    }
}

#[test]
fn s3_11_a_changed_bit_is_an_error_of_one_value_and_the_subscription_goes_on() {
    for (flip, length) in [(Flip::Content(77), 24), (Flip::Message(5), 8)] {
        let validation = Validation::Crc32c;
        let mut pair = Pair::new(Parameters { validation, eager_bytes_max: 16, ..small() });
        let subscriber = pair.subscribe(STEP, "k", every(2));
        transfer(&mut pair, &subscriber, bytes_of(length), 1);
        pair.wire.flip(flip);
        (2..6).for_each(|fill| pair.b.source.send_bytes(STEP, "k", length, fill));
        match pair.next_of(&subscriber) {
            Err(TransferError::Corrupted { damage, .. }) => assert_eq!(damage, Damage::Content),
            other => panic!("{other:?}"),
        }
        for fill in 3..6 {
            assert_eq!(pair.next_of(&subscriber), Ok(value(length, fill)));
        }
        let counters = pair.counters().0;
        assert_eq!((counters.checksums_matched, counters.checksums_mismatched), (4, 1));
        pair.end_of(subscriber);
    }
}

#[test]
fn views_are_lent_before_their_message() {
    for validation in [Validation::Off, Validation::Crc32c] {
        let mut pair = Pair::new(Parameters { validation, ..small() });
        pair.wire.allow_loans(B, 10);
        let subscriber = pair.subscribe(STEP, "k", views(2));
        let lent = ["loan", "TENSOR_WRITE", "BUFFER_IDLE"];
        let first = transfer(&mut pair, &subscriber, bytes_of(24), 1);
        assert_eq!(first, [&["TENSOR_REQUEST"], &lent[..]].concat());
        for length in [24, 8, 100] {
            assert_eq!(transfer(&mut pair, &subscriber, bytes_of(length), 2), lent);
        }
        assert_eq!(transfer(&mut pair, &subscriber, dead(), 0), lent[1..]);
        let (a, b) = pair.counters();
        assert_eq!((b.loans_sent, b.loan_bytes_sent, b.contents_sent), (4, 156, 0));
        assert_eq!((a.loans_received, a.loan_bytes_received, a.contents_received), (4, 156, 0));
        assert_eq!(a.sent.buffer_response, 0);
        pair.end_of(subscriber);
    }
}

#[test]
fn values_that_cannot_be_lent_are_written() {
    let mut pair = Pair::new(small());
    pair.wire.allow_loans(B, 1);
    let subscriber = pair.subscribe(STEP, "k", views(2));
    let first = transfer(&mut pair, &subscriber, bytes_of(24), 1);
    assert_eq!(first, ["TENSOR_REQUEST", "loan", "TENSOR_WRITE", "BUFFER_IDLE"]);
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(24), 2), FIRST[1..]);
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(24), 3), LATER);
    pair.wire.allow_loans(B, 1);
    let lent = transfer(&mut pair, &subscriber, bytes_of(24), 4);
    assert_eq!(lent, ["loan", "TENSOR_WRITE", "BUFFER_IDLE"], "though there are buffers");
    assert_eq!(transfer(&mut pair, &subscriber, bytes_of(24), 5), LATER);
    pair.end_of(subscriber);
    // A sender that can never lend, and mode original, which has no loans.
    for parameters in [small(), original()] {
        let mut pair = Pair::new(parameters);
        let subscriber = pair.subscribe(STEP, "k", views(2));
        assert_eq!(transfer(&mut pair, &subscriber, bytes_of(24), 1), FIRST);
        pair.end_of(subscriber);
    }
}

#[test]
fn views_may_be_held_while_others_come() {
    let mut pair = Pair::new(small());
    pair.wire.allow_loans(B, 10);
    let subscriber = pair.subscribe(STEP, "k", views(3));
    (0..5).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    let mut held = Vec::new();
    for _ in 0..5 {
        let next = subscriber.next(&mut pair.tasks);
        pair.run();
        held.push(next.take().unwrap().unwrap());
    }
    assert_eq!(pair.a.memory.viewed(), 5);
    for (fill, delivery) in (0..).zip(held) {
        assert_eq!(value_of(delivery), value(24, fill));
    }
    pair.end_of(subscriber);
}

#[test]
fn the_buffers_of_an_idle_that_crosses_a_request_are_ignored_and_its_values_are_not() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(2));
    transfer(&mut pair, &subscriber, bytes_of(24), 1);
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.run();
    // BUFFER_REQUEST is posted, and BUFFER_IDLE is posted before that arrives.
    pair.b.source.send_bytes(STEP, "k", 48, 3);
    pair.tasks.run();
    let next = subscriber.next(&mut pair.tasks);
    pair.tasks.run();
    assert_eq!(delivered(&next), Ok(value(24, 2)));
    let from = pair.posted(0).len() - 2;
    assert_eq!(pair.posted(0)[from..], ["BUFFER_REQUEST", "BUFFER_IDLE"]);
    let ended = pair.a.memory.ended(LentEnd::MetaDataResponse);
    pair.run();
    assert_eq!(pair.a.memory.ended(LentEnd::MetaDataResponse) - ended, 2, "those of BUFFER_IDLE, too");
    assert_eq!(pair.next_of(&subscriber), Ok(value(48, 3)));
    // Both values may be sent again.
    (4..6).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 48, fill));
    pair.run();
    assert_eq!(pair.b.source.stored(STEP, "k"), 0);
    (4..6).for_each(|fill| assert_eq!(pair.next_of(&subscriber), Ok(value(48, fill))));
    pair.end_of(subscriber);
}

#[test]
fn one_free_block_is_enough_for_any_terms() {
    for parameters in [small(), original()] {
        for values in [1, 2, 8] {
            let mut pair = Pair::with(parameters, parameters, 1);
            let subscriber = pair.subscribe(STEP, "k", every(values));
            // Each is taken out of the only block before the next can come. Some are larger than all before, some have no bytes.
            let lengths = [24, 24, 24, 0, 24, 8, 48, 0, 0, 48, 24, 100, 100];
            lengths.iter().for_each(|&length| pair.b.source.send_bytes(STEP, "k", length, length as u8));
            let taken = subscriber.take_many(lengths.len(), &mut pair.tasks);
            pair.run();
            let taken = taken.take().expect("the values have come");
            assert_eq!(taken, lengths.map(|length| value(length, length as u8)));
            pair.end_of(subscriber);
        }
    }
}

#[test]
fn a_value_waits_while_the_only_block_is_in_use() {
    let mut pair = Pair::with(small(), small(), 1);
    let subscriber = pair.subscribe(STEP, "k", every(2));
    (1..4).for_each(|fill| pair.b.source.send_bytes(STEP, "k", 24, fill));
    let mut next = subscriber.next(&mut pair.tasks);
    pair.run();
    for fill in 1..4 {
        let delivery = next.take().unwrap().unwrap();
        next = subscriber.next(&mut pair.tasks);
        pair.run();
        assert!(next.is_pending(), "the block is in use");
        assert_eq!(value_of(delivery), value(24, fill));
        pair.run();
    }
    pair.tasks.cancel(next.task);
    pair.end_of(subscriber);
}

#[test]
fn fewer_blocks_than_the_terms_are_enough() {
    let mut pair = Pair::with(small(), small(), 2);
    let subscriber = pair.subscribe(STEP, "k", every(8));
    for fill in 1..30 {
        transfer(&mut pair, &subscriber, bytes_of(24), fill);
    }
    pair.end_of(subscriber);
    pair.b.source.send_bytes(STEP, "l", 24, 3);
    assert_eq!(pair.pull(STEP, "l"), Ok(value(24, 3)));
}

#[test]
fn a_subscription_to_the_newest_value_leaves_others_out_and_the_sequence_shows_it() {
    for parameters in [small(), original()] {
        let mut pair = Pair::new(parameters);
        let subscriber = pair.subscribe(Scope::Published, "k", latest(1));
        let mut sequences = Vec::new();
        for round in 0..4 {
            for fill in 0..3 {
                pair.b.source.send_bytes(Scope::Published, "k", 24, 10 * round + fill);
                if round == 2 {
                    pair.run();
                }
            }
            let next = subscriber.next(&mut pair.tasks);
            pair.run();
            let delivery = next.take().unwrap().unwrap();
            let sequence = delivery.sequence.unwrap();
            assert_eq!(delivery.received.version, Some(sequence));
            let fill = 10 * ((sequence - 1) / 3) + (sequence - 1) % 3;
            assert_eq!(value_of(delivery), value(24, fill as u8));
            sequences.push(sequence);
        }
        // In the third round the first value was sent as soon as it existed, and the newest one when that was taken.
        assert_eq!(sequences, [3, 6, 7, 9]);
        pair.end_of(subscriber);
    }
}

#[test]
fn a_subscription_to_every_value_has_each_sequence_once() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(Scope::Published, "k", every(3));
    for round in 0..3u8 {
        (0..4).for_each(|at| pair.b.source.send_bytes(Scope::Published, "k", 24, 4 * round + at));
        for at in 0..4 {
            let next = subscriber.next(&mut pair.tasks);
            pair.run();
            let delivery = next.take().unwrap().unwrap();
            assert_eq!(delivery.sequence, Some(u64::from(4 * round + at) + 1));
            assert_eq!(value_of(delivery), value(24, 4 * round + at));
        }
    }
    pair.end_of(subscriber);
}

#[test]
fn a_value_that_cannot_be_sent_ends_the_subscription_after_those_before_it() {
    let mut pair = Pair::new(small());
    let subscriber = pair.subscribe(STEP, "k", every(4));
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    // It has fewer bytes than its metadata declares.
    pair.b.source.send(STEP, "k", bytes_of(24), vec![2; 8]);
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    assert_eq!(pair.next_of(&subscriber), Ok(value(24, 1)));
    match pair.next_of(&subscriber) {
        Err(TransferError::Remote(Status { message, .. })) => {
            assert_eq!(message, "the sender's value has no bytes");
        }
        other => panic!("{other:?}"),
    }
    drop(subscriber);
    pair.run();
    assert_eq!(pair.pull(STEP, "k"), Ok(value(24, 3)), "the next one");
    pair.assert_clean();
}

#[test]
fn subscriptions_of_several_keys_and_receives_share_a_connection() {
    for parameters in [small(), original()] {
        let mut pair = Pair::new(parameters);
        let keys = ["a", "b", "c", "d"];
        let subscribers = keys.map(|key| pair.subscribe(STEP, key, every(2)));
        for fill in 0..20 {
            keys.iter().for_each(|key| pair.b.source.send_bytes(STEP, key, 8 + u64::from(fill % 3), fill));
            pair.b.source.send_bytes(STEP, "e", 8, fill);
        }
        let taken = subscribers.iter().map(|subscriber| subscriber.take_many(20, &mut pair.tasks));
        let taken: Vec<_> = taken.collect();
        for fill in 0..20 {
            assert_eq!(pair.pull(STEP, "e"), Ok(value(8, fill)));
        }
        for taken in taken {
            let expected: Vec<_> = (0..20).map(|fill| value(8 + u64::from(fill % 3), fill)).collect();
            assert_eq!(taken.take().unwrap(), expected);
        }
        drop(subscribers);
        pair.run();
        pair.assert_clean();
    }
}

//! Several keys in one TENSOR_REQUEST.

use tensorwire_protocol::{
    Code, Message, Mode, Parameters, PeerMisbehaved, RequestIndex, Status, TensorRequest, TransferError,
    Want, credit::Counts, limits::PULLS_MAX, names::NameForm, wire::record,
};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of,
    lone::Lone,
    pair::{Pair, ReceiveResult, original, settled, small},
    tasks::Handle,
};

/// Parameters of four requests in a message, whose other limits are not reached.
fn four() -> Parameters {
    Parameters { requests_per_message: 4, requests_max: 100, depth: 40, contents_max: 20, ..small() }
}

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("key {number}")).collect()
}

/// Sends a value for each of `keys`, receives them together, and returns the number of TENSOR_REQUESTs.
fn cost(pair: &mut Pair, keys: &[String]) -> u64 {
    let before = pair.counters().0.sent.tensor_request;
    for (fill, key) in (1..).zip(keys) {
        pair.b.source.send_bytes(STEP, key, 40, fill);
    }
    let all = pair.receive_many(STEP, keys);
    pair.run();
    for (fill, outcome) in (1..).zip(all.take().unwrap()) {
        let received = outcome.unwrap();
        assert_eq!(received.lent.unwrap().finish(40), vec![fill; 40]);
    }
    pair.assert_clean();
    pair.counters().0.sent.tensor_request - before
}

#[test]
fn s5_keys_asked_for_together_take_as_few_messages_as_their_number_allows() {
    for count in [1, 2, 3, 4, 5, 8, 9, 33] {
        let mut pair = Pair::new(four());
        let keys = keys(count);
        let messages = count.div_ceil(4) as u64;
        // Unknown, then known, with their metadata and destinations.
        assert_eq!([(); 2].map(|()| cost(&mut pair, &keys)), [messages; 2], "{count} keys");
        assert_eq!(pair.b.requests.len(), 2 * count, "each is answered for itself");
        assert_eq!(pair.counters().1.sent.meta_data_response, count as u64);
    }
}

#[test]
fn s5_keys_asked_for_together_take_as_few_messages_as_their_length_allows() {
    let parameters = Parameters { requests_per_message: 100, names_max: 0, ..four() };
    let mut pair = Pair::new(parameters);
    let long: Vec<String> = (0..20).map(|number| format!("{number:01000}")).collect();
    // 7 of them take 7 × (4 + 9 + 5 + 1000 + 3) bytes, 8 are longer than the longest message.
    assert_eq!(cost(&mut pair, &long), 3);
}

/// A receive of several values holds their memory until the last has come, and other receives wait for that memory.
#[test]
fn l1_values_wanted_together_do_not_lie_in_memory_for_much_larger_ones() {
    let mut pair = Pair::new(small());
    let capacity = |pair: &Pair| match pair.b.requests.last().unwrap().want {
        Want::Write(destination) => destination.map(|destination| destination.capacity),
        other => panic!("{other:?}"),
    };
    for length in [100, 49, 50, 0] {
        pair.b.source.send_bytes(STEP, "k", length, 1);
        pair.pull(STEP, "k").unwrap();
    }
    // A value that needs no memory, or at least half of it, may come at once.
    pair.b.source.send_bytes(STEP, "k", 50, 2);
    let handle = pair.together(STEP, "k");
    pair.run();
    let received = handle.take().unwrap().unwrap();
    assert_eq!(received.lent.unwrap().finish(50), [2; 50]);
    let request = pair.b.requests.last().unwrap();
    assert_eq!(*request.known, [bytes_of(100), bytes_of(50), bytes_of(0)]);
    assert_eq!(capacity(&pair), Some(100));
    // A smaller value comes after its metadata, into memory of its own size.
    let before = pair.counters().1.sent.meta_data_response;
    pair.b.source.send_bytes(STEP, "k", 49, 3);
    let handle = pair.together(STEP, "k");
    pair.run();
    let received = handle.take().unwrap().unwrap();
    assert_eq!(received.lent.unwrap().finish(49), [3; 49]);
    assert_eq!(pair.counters().1.sent.meta_data_response, before + 1);
    // A receive of one value holds no other value while it waits.
    pair.b.source.send_bytes(STEP, "k", 49, 4);
    pair.pull(STEP, "k").unwrap();
    assert_eq!(pair.b.requests.last().unwrap().known.len(), 4);
    assert_eq!(pair.counters().1.sent.meta_data_response, before + 1);
    pair.assert_clean();
}

#[test]
fn the_smaller_number_of_requests_in_a_message_holds_at_both_ends() {
    let mut pair = Pair::with(Parameters { requests_per_message: 3, ..four() }, four(), 64);
    assert_eq!(cost(&mut pair, &keys(12)), 4);
    let mut pair = Pair::with(four(), Parameters { requests_per_message: 1, ..four() }, 64);
    assert_eq!(cost(&mut pair, &keys(12)), 12);
}

#[test]
fn s3_6_mode_original_has_one_request_in_each_message() {
    let mut pair = Pair::new(Parameters { requests_per_message: 4, requests_max: 20, ..original() });
    assert_eq!(cost(&mut pair, &keys(6)), 6);
    assert_eq!(cost(&mut pair, &keys(6)), 6);
}

#[test]
fn requests_that_wait_for_a_credit_go_together_whoever_made_them() {
    let mut pair = Pair::new(Parameters { depth: 4, ..four() });
    let handles: Vec<_> = keys(10).iter().map(|key| pair.receive(A, STEP, key)).collect();
    pair.tasks.run();
    assert_eq!(pair.counters().0.sent.tensor_request, 2, "the credits of a depth of 4");
    pair.run();
    assert_eq!(pair.counters().0.sent.tensor_request, 2 + 2, "the other 8 in two messages of 4");
    for (key, handle) in keys(10).iter().zip(&handles) {
        pair.b.source.send_bytes(STEP, key, 5, 1);
        pair.run();
        assert_eq!(settled(handle), Ok((bytes_of(5), vec![1; 5])));
    }
    pair.assert_clean();
}

#[test]
fn a_post_for_several_that_fails_ends_them_all() {
    for (per_message, posts) in [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1)] {
        let parameters = Parameters { depth: 4, requests_per_message: per_message, ..four() };
        let mut pair = Pair::new(parameters);
        let handles: Vec<_> = keys(10).iter().map(|key| pair.receive(A, STEP, key)).collect();
        // The first two go out; the others wait for credits, which is all that wakes them.
        pair.tasks.run();
        pair.wire.allow_posts(A, posts);
        pair.run();
        for (number, handle) in handles.iter().enumerate() {
            assert!(handle.is_done(), "receive {number} of {per_message} a message, after {posts} posts");
            assert!(matches!(handle.take(), Some(Err(_))));
        }
        pair.break_down();
    }
}

/// Four receives whose requests wait in the queue and are not posted.
fn gathered(pair: &mut Pair) -> [Handle<ReceiveResult>; 4] {
    let handles = ["a", "b", "c", "d"].map(|key| pair.together(STEP, key));
    let before = pair.counters().0.sent;
    handles.iter().for_each(|handle| pair.tasks.poll(handle.task));
    assert_eq!(pair.counters().0.sent, before);
    handles
}

#[test]
fn one_of_several_is_given_up_alone() {
    let mut pair = Pair::new(four());
    let [a, b, c, d] = gathered(&mut pair);
    pair.run();
    assert_eq!(pair.counters().0.sent.tensor_request, 1);
    pair.tasks.cancel(b.task);
    pair.run();
    assert_eq!(pair.counters().0.sent.cancel, 1);
    for key in ["d", "c", "b", "a"] {
        pair.b.source.send_bytes(STEP, key, 7, key.as_bytes()[0]);
        pair.run();
    }
    for (handle, fill) in [(a, b'a'), (c, b'c'), (d, b'd')] {
        assert_eq!(settled(&handle), Ok((bytes_of(7), vec![fill; 7])));
    }
    assert_eq!(pair.b.source.stored(STEP, "b"), 1, "it stayed with its sender");
    pair.assert_clean();
}

#[test]
fn one_of_several_is_refused_alone_and_another_has_changed() {
    let mut pair = Pair::new(four());
    assert_eq!(cost(&mut pair, &["a", "b", "c", "d"].map(String::from)), 1);
    let [a, b, c, d] = gathered(&mut pair);
    pair.run();
    let status = Status::new(Code::Aborted, "no more");
    assert!(pair.b.source.refuse(STEP, "a", status.clone()));
    pair.b.source.send_bytes(STEP, "b", 41, 2);
    pair.b.source.send_bytes(STEP, "c", 40, 3);
    pair.run();
    assert_eq!(settled(&a), Err(TransferError::Remote(status)));
    assert_eq!(settled(&b), Ok((bytes_of(41), vec![2; 41])));
    assert_eq!(settled(&c), Ok((bytes_of(40), vec![3; 40])));
    let (requests, again) = (pair.counters().0.sent.tensor_request, pair.counters().0.sent.tensor_re_request);
    assert_eq!((requests, again), (2, 4 + 1));
    pair.break_down();
    assert!(matches!(settled(&d), Err(TransferError::PeerLost { .. })), "the connection's end is each one's");
}

#[test]
fn a_request_that_is_dropped_before_its_message_is_never_sent() {
    let mut pair = Pair::new(four());
    let [a, b, c, d] = gathered(&mut pair);
    for handle in [a, c] {
        pair.tasks.cancel(handle.task);
    }
    pair.run();
    let asked: Vec<_> = pair.b.requests.iter().map(|request| &*request.key).collect();
    assert_eq!((asked, pair.counters().0.sent.total()), (vec!["b", "d"], 1));
    for handle in [b, d] {
        pair.tasks.cancel(handle.task);
    }
    pair.run();
    pair.assert_clean();
}

#[test]
fn receives_that_are_not_polled_again_hold_nobody_up_and_keep_their_order() {
    let mut pair = Pair::new(four());
    let waiting = gathered(&mut pair);
    let late = pair.receive(A, STEP, "a");
    pair.tasks.poll(late.task);
    assert_eq!(pair.counters().0.sent.tensor_request, 2, "the four, and the late one");
    // A message of another kind is posted behind them, too.
    let more = pair.together(STEP, "e");
    pair.tasks.poll(more.task);
    pair.tasks.cancel(late.task);
    let housekeeping = pair.tasks.woken()[0];
    pair.tasks.poll(housekeeping);
    assert_eq!((pair.counters().0.sent.tensor_request, pair.counters().0.sent.cancel), (3, 1));
    let keys = ["a", "b", "c", "d", "e"];
    keys.iter().for_each(|key| pair.b.source.send_bytes(STEP, key, 3, 9));
    pair.run();
    for handle in waiting.iter().chain([&more]) {
        assert_eq!(settled(handle), Ok((bytes_of(3), vec![9; 3])));
    }
    let asked: Vec<_> = pair.b.requests.iter().map(|request| &*request.key).collect();
    assert_eq!(asked, ["a", "b", "c", "d", "a", "e"]);
    pair.assert_clean();
}

#[test]
fn a_key_may_be_asked_for_twice_in_one_message_and_its_values_come_in_order() {
    let mut pair = Pair::new(Parameters { names_max: 1, ..four() });
    for round in 0..2 {
        let all = pair.receive_many(STEP, &["k", "other", "k", "k"].map(String::from));
        pair.run();
        for fill in 1..4 {
            pair.b.source.send_bytes(STEP, "k", 8, fill);
        }
        pair.b.source.send_bytes(STEP, "other", 8, 9);
        pair.run();
        let fills = all.take().unwrap().into_iter().map(|one| one.unwrap().lent.unwrap().finish(1)[0]);
        assert_eq!(fills.collect::<Vec<_>>(), [1, 9, 2, 3], "round {round}");
    }
    assert_eq!(pair.counters().0.sent.tensor_request, 2);
    pair.assert_clean();
}

fn request(index: u32, key: &str) -> TensorRequest {
    let (index, key) = (RequestIndex(index), key.into());
    TensorRequest { index, scope: STEP, key, known: [].into(), want: Want::Write(None), arguments: None }
}

#[test]
fn s4_more_requests_in_a_message_than_agreed_end_the_connection() {
    for mode in [Mode::Counted, Mode::Original] {
        let most = if mode == Mode::Counted { 4 } else { 1 };
        let mut lone = Lone::new(Parameters { mode, ..four() });
        let requests: Vec<_> = (0..=most).map(|index| request(index, "k")).collect();
        let counted = (mode == Mode::Counted).then_some((Counts::default(), &[][..]));
        let mut bytes = Vec::new();
        record::encode_message(counted, &Message::TensorRequests(requests), &mut bytes);
        assert_eq!(lone.raw_message(&bytes), Err(PeerMisbehaved::Malformed), "{mode:?}");
        lone.assert_over(PeerMisbehaved::Malformed);
        assert!(lone.source.waiting(STEP, "k") == 0, "none of them was looked at");
    }
}

#[test]
fn s5_each_request_of_a_message_keeps_the_rules() {
    let twice = vec![request(1, "a"), request(2, "b"), request(1, "c")];
    let mut lone = Lone::new(four());
    assert_eq!(lone.message(&Message::TensorRequests(twice)), Err(PeerMisbehaved::DuplicateRequest));
    lone.assert_over(PeerMisbehaved::DuplicateRequest);

    let mut lone = Lone::new(four());
    let unknown = Message::TensorRequests(vec![request(1, "a"), request(2, "b")]);
    assert_eq!(lone.named(&unknown, NameForm::Number(0)), Err(PeerMisbehaved::UnknownName));
    lone.assert_over(PeerMisbehaved::UnknownName);

    // More requests than may be outstanding, in messages of the legal size.
    let mut lone = Lone::new(four());
    let mut ended = Ok(None);
    let most = four().requests_max + PULLS_MAX;
    for first in (0..2 * most).step_by(4) {
        let four = (first..first + 4).map(|index| request(index, "k")).collect();
        ended = lone.message(&Message::TensorRequests(four));
        if ended.is_err() {
            break;
        }
    }
    assert_eq!(ended, Err(PeerMisbehaved::Flood));
    lone.assert_over(PeerMisbehaved::Flood);
}

#[test]
fn requests_of_one_message_reach_the_source_in_their_order() {
    let mut pair = Pair::new(four());
    let _many = pair.receive_many(STEP, &keys(4));
    pair.run();
    let asked: Vec<_> = pair.b.requests.iter().map(|request| request.key.to_string()).collect();
    assert_eq!(asked, keys(4));
}

/// The housekeeping task has posted both, so their task has not been polled since, when the connection fails.
#[test]
fn answers_that_came_before_the_end_count_for_requests_that_another_task_has_posted() {
    let (mut pair, keys) = (Pair::new(four()), keys(2));
    let _ = [(); 2].map(|()| cost(&mut pair, &keys));
    for (fill, key) in (1..).zip(&keys) {
        pair.b.source.send_bytes(STEP, key, 40, fill);
    }
    let both = pair.receive_many(STEP, &keys);
    pair.tasks.run();
    pair.deliver(A);
    pair.tasks.run();
    pair.deliver(B);
    assert!(both.is_pending(), "it is not polled yet");
    pair.a.connection.fail("the wire was cut");
    pair.tasks.run();
    for (fill, outcome) in (1..).zip(both.take().unwrap()) {
        assert_eq!(outcome.unwrap().lent.unwrap().finish(40), vec![fill; 40]);
    }
}

#[test]
fn a_request_in_line_whose_receive_was_given_a_content_is_woken_when_it_is_posted() {
    let (mut pair, keys) = (Pair::new(four()), keys(1));
    let _ = [(); 2].map(|()| cost(&mut pair, &keys));
    let first = pair.receive(A, STEP, &keys[0]);
    pair.tasks.run();
    pair.deliver(A);
    pair.b.source.send_bytes(STEP, &keys[0], 40, 7);
    pair.tasks.run();
    let second = pair.together(STEP, &keys[0]);
    pair.tasks.poll(second.task);
    pair.deliver(B);
    pair.tasks.cancel(first.task);
    pair.run();
    assert_eq!(settled(&second).unwrap().1, [7; 40]);
}

/// The owner may drop the value only after the failure, and then the value is lost: later receives must not continue behind it.
#[test]
fn a_step_of_which_a_value_is_held_was_under_way_when_the_connection_failed() {
    let (mut pair, keys) = (Pair::new(four()), keys(1));
    pair.b.source.send_bytes(STEP, &keys[0], 40, 7);
    let handle = pair.receive(A, STEP, &keys[0]);
    pair.run();
    let received = handle.take().unwrap().unwrap();
    assert_eq!(pair.a.connection.steps_under_way(), []);
    let held = pair.a.connection.hold(received);
    assert_eq!(pair.a.connection.steps_under_way(), [STEP.step().unwrap()]);
    pair.a.connection.fail("the wire was cut");
    drop(held);
    assert_eq!(pair.a.connection.steps_under_way(), [STEP.step().unwrap()]);
}

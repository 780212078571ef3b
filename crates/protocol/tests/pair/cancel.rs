//! A receive that is cancelled, in every state: its memory is not reused before the peer can no longer write it. A value
//! that was not written goes back to the sender's queue; one that was written is stashed for the next receive. CANCEL is
//! always answered.

use tensorwire_protocol::{Code, LentEnd, Metadata, Parameters, Scope, Status, TransferError};

use crate::support::{
    STEP,
    Side::{A, B},
    bytes_of, dead,
    pair::{Pair, ReceiveResult, original, settled, small},
    random::Random,
    tasks::Handle,
};

/// A pair whose receiver knows `k` to have 24 bytes.
fn primed(parameters: Parameters) -> Pair {
    let mut pair = Pair::new(parameters);
    pair.b.source.send_bytes(STEP, "k", 24, 1);
    assert!(pair.pull(STEP, "k").is_ok());
    pair
}

fn names(pair: &Pair, from: usize) -> Vec<&'static str> {
    let trace = pair.wire.trace();
    trace[from..].iter().map(|&(_, name)| name).filter(|&name| name != "ack").collect()
}

/// The next receive gets the value that `k` still has.
fn assert_value_is_back(pair: &mut Pair, length: u64, fill: u8) {
    assert_eq!(pair.b.source.stored(STEP, "k"), 1);
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(length), vec![fill; length as usize])));
    pair.assert_clean();
}

#[test]
fn waiting_for_an_entry() {
    let mut pair = Pair::new(Parameters { requests_max: 1, ..small() });
    let first = pair.receive(A, STEP, "k");
    let second = pair.receive(A, STEP, "k");
    let third = pair.receive(A, STEP, "k");
    pair.run();
    pair.tasks.cancel(second.task);
    for fill in [1, 2] {
        pair.b.source.send_bytes(STEP, "k", 8, fill);
    }
    pair.run();
    assert_eq!(settled(&first), Ok((bytes_of(8), vec![1; 8])));
    assert_eq!(settled(&third), Ok((bytes_of(8), vec![2; 8])));
    assert_eq!(pair.counters().0.sent.cancel, 0);
    pair.assert_clean();
}

#[test]
fn the_first_in_line_for_an_entry_after_it_was_woken() {
    let mut pair = Pair::new(Parameters { requests_max: 1, ..small() });
    let first = pair.receive(A, STEP, "k");
    pair.run();
    let second = pair.receive(A, STEP, "k");
    let third = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 0, 0);
    pair.b.source.send_bytes(STEP, "k", 0, 0);
    // The second is woken when the first is done; it is dropped before it runs.
    while !first.is_done() {
        assert!(pair.step());
    }
    assert!(pair.tasks.woken().contains(&second.task));
    pair.tasks.cancel(second.task);
    pair.run();
    assert!(third.is_done(), "the place went to the next in line");
    settled(&third).unwrap();
    pair.assert_clean();
}

#[test]
fn while_allocating() {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(Scope::Published, "k", 24, 1);
    assert!(pair.pull(Scope::Published, "k").is_ok());
    pair.a.memory.stick(true);
    let from = pair.wire.trace().len();
    let handle = pair.receive(A, Scope::Published, "k");
    pair.run();
    pair.tasks.cancel(handle.task);
    pair.run();
    assert!(names(&pair, from).is_empty(), "nothing was sent");
    pair.a.memory.stick(false);
    pair.b.source.send_bytes(Scope::Published, "k", 24, 2);
    assert_eq!(pair.pull(Scope::Published, "k"), Ok((bytes_of(24), vec![2; 24])));
    pair.assert_clean();
}

#[test]
fn before_the_request_is_sent() {
    let mut pair = primed(original());
    let from = pair.wire.trace().len();
    let first = pair.receive(A, STEP, "other");
    let second = pair.receive(A, STEP, "k");
    pair.tasks.run();
    assert_eq!((names(&pair, from), pair.a.memory.lent()), (vec!["TENSOR_REQUEST"], 1));
    pair.tasks.cancel(second.task);
    pair.tasks.run();
    assert_eq!((pair.a.memory.ended(LentEnd::NeverSent), pair.a.memory.lent()), (1, 0));
    pair.b.source.send_bytes(STEP, "other", 8, 3);
    pair.run();
    assert_eq!(settled(&first), Ok((bytes_of(8), vec![3; 8])));
    assert_eq!(pair.counters().0.sent.cancel, 0);
    pair.assert_clean();
}

#[test]
fn while_the_value_is_awaited() {
    let mut pair = primed(small());
    let from = pair.wire.trace().len();
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    assert_eq!(pair.b.source.waiting(STEP, "k"), 1);
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    assert_eq!(pair.a.memory.lent(), 1, "the peer may still write");
    pair.deliver(A);
    pair.tasks.run();
    assert_eq!(pair.a.memory.lent(), 1, "until its CANCEL_ACK is here");
    pair.run();
    assert_eq!((pair.a.memory.ended(LentEnd::CancelAck), pair.a.memory.lent()), (1, 0));
    assert_eq!(names(&pair, from), ["TENSOR_REQUEST", "CANCEL", "CANCEL_ACK"]);
    assert_eq!(pair.b.source.waiting(STEP, "k"), 0);
    pair.assert_clean();
}

#[test]
fn before_the_response_has_run() {
    let mut pair = primed(small());
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    let handle = pair.receive(A, STEP, "k");
    pair.tasks.run();
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    // TENSOR_REQUEST and CANCEL are taken in before the response runs for the first time.
    pair.deliver(A);
    pair.run();
    assert_eq!(pair.counters().1.contents_sent, 1, "only that of the first receive");
    assert_value_is_back(&mut pair, 24, 2);
}

/// The value that was written is stashed here: the next receive gets it and sends no request.
fn assert_value_is_kept(pair: &mut Pair, length: u64, fill: u8) {
    let sent = pair.counters().0.sent;
    assert_eq!(pair.b.source.stored(STEP, "k"), 0, "it was written");
    assert_eq!(pair.a.memory.lent(), 1, "its memory is still lent");
    assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(length), vec![fill; length as usize])));
    assert_eq!(pair.counters().0.sent, sent);
    pair.assert_clean();
}

/// A receive of `k` by a receiver that knows nothing, up to where META_DATA_RESPONSE is posted.
fn described() -> (Pair, Handle<ReceiveResult>) {
    let mut pair = Pair::new(small());
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    let handle = pair.receive(A, STEP, "k");
    pair.tasks.run();
    pair.deliver(A);
    pair.tasks.run();
    assert_eq!(names(&pair, 0), ["TENSOR_REQUEST", "META_DATA_RESPONSE"]);
    (pair, handle)
}

#[test]
fn while_meta_data_response_is_under_way() {
    let (mut pair, handle) = described();
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!(names(&pair, 0)[2..], ["CANCEL", "CANCEL_ACK"]);
    assert_value_is_back(&mut pair, 24, 2);
}

#[test]
fn after_meta_data_response_has_arrived() {
    let (mut pair, handle) = described();
    pair.deliver(B);
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!(names(&pair, 0)[2..], ["CANCEL", "CANCEL_ACK"]);
    assert_value_is_back(&mut pair, 24, 2);
}

#[test]
fn while_allocating_for_the_re_request() {
    let (mut pair, handle) = described();
    pair.a.memory.stick(true);
    pair.run();
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!(names(&pair, 0)[2..], ["CANCEL", "CANCEL_ACK"]);
    pair.a.memory.stick(false);
    assert_value_is_back(&mut pair, 24, 2);
}

#[test]
fn before_the_re_request_is_sent() {
    let mut pair = Pair::new(original());
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    let handle = pair.receive(A, STEP, "k");
    let other = pair.receive(A, STEP, "other");
    while pair.counters().0.received.meta_data_response == 0 {
        assert!(pair.step());
    }
    // The other request has the window now; the re-request waits with its destination granted.
    pair.tasks.run();
    assert_eq!((pair.a.memory.lent(), pair.counters().0.sent.tensor_re_request), (1, 0));
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    assert_eq!((pair.a.memory.ended(LentEnd::NeverSent), pair.a.memory.lent()), (1, 0));
    pair.tasks.cancel(other.task);
    pair.run();
    assert_eq!(pair.counters().0.sent.tensor_re_request, 0);
    assert_value_is_back(&mut pair, 24, 2);
}

#[test]
fn after_the_re_request_before_the_content() {
    let (mut pair, handle) = described();
    pair.deliver(B);
    pair.tasks.run();
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    assert_eq!(names(&pair, 0)[2..], ["TENSOR_RE_REQUEST", "CANCEL"]);
    // Both are taken in before the response runs.
    pair.deliver(A);
    pair.tasks.run();
    assert_eq!(pair.a.memory.lent(), 1);
    pair.run();
    assert_eq!(names(&pair, 0)[4..], ["CANCEL_ACK"]);
    assert_eq!(pair.a.memory.ended(LentEnd::CancelAck), 1);
    assert_value_is_back(&mut pair, 24, 2);
}

#[test]
fn while_the_content_is_under_way() {
    let mut pair = primed(small());
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    assert_eq!(pair.a.memory.lent(), 1);
    let from = pair.wire.trace().len();
    // CANCEL is taken in while the content is posted and not complete.
    pair.deliver(A);
    pair.tasks.run();
    assert!(names(&pair, from).is_empty(), "no CANCEL_ACK before the local completion");
    pair.wire.land(B);
    pair.take(A);
    pair.run();
    assert_eq!(names(&pair, from), ["CANCEL_ACK"]);
    assert_value_is_kept(&mut pair, 24, 2);
}

#[test]
fn when_the_content_comes_before_cancel_is_sent() {
    let mut pair = primed(small());
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.tasks.cancel(handle.task);
    pair.deliver(B);
    pair.run();
    assert_eq!(pair.counters().0.sent.cancel, 0, "there is nothing to cancel");
    assert_value_is_kept(&mut pair, 24, 2);
}

#[test]
fn when_the_content_is_here_already() {
    let mut pair = primed(small());
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.deliver(B);
    assert_eq!(pair.a.memory.lent(), 1);
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!(pair.counters().0.sent.cancel, 0);
    assert_value_is_kept(&mut pair, 24, 2);
}

#[test]
fn while_error_status_is_under_way() {
    for is_cancelled_first in [true, false] {
        let mut pair = primed(small());
        let handle = pair.receive(A, STEP, "k");
        pair.run();
        assert!(pair.b.source.refuse(STEP, "k", Status::new(Code::Aborted, "no")));
        if is_cancelled_first {
            pair.tasks.cancel(handle.task);
            pair.tasks.run();
        } else {
            pair.tasks.run();
            pair.tasks.cancel(handle.task);
        }
        pair.run();
        assert_eq!(pair.counters().1.sent.error_status, 1);
        assert_eq!(pair.counters().1.sent.cancel_ack, pair.counters().0.sent.cancel);
        assert_eq!(pair.a.memory.ended(LentEnd::ErrorStatus), 1);
        pair.assert_clean();
    }
}

#[test]
fn while_the_content_waits_for_its_turn() {
    let mut pair = primed(Parameters { contents_max: 1, ..small() });
    let handles = [pair.receive(A, STEP, "k"), pair.receive(A, STEP, "k")];
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    pair.tasks.run();
    assert_eq!(pair.counters().1.contents_sent, 2, "the second of these waits");
    pair.tasks.cancel(handles[1].task);
    pair.tasks.run();
    pair.deliver(A);
    pair.tasks.run();
    assert_eq!(pair.counters().1.sent.cancel_ack, 1, "it need not wait for the first content");
    pair.run();
    assert_eq!(settled(&handles[0]), Ok((bytes_of(24), vec![2; 24])));
    assert_value_is_back(&mut pair, 24, 3);
}

#[test]
fn while_the_re_requested_content_waits_for_its_turn() {
    let mut pair = primed(Parameters { contents_max: 1, ..small() });
    let first = pair.receive(A, STEP, "k");
    let second = pair.receive(A, STEP, "unknown");
    pair.run();
    pair.b.source.send_bytes(STEP, "unknown", 24, 3);
    pair.tasks.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    // META_DATA_RESPONSE lands. The content behind it does not, and so stays posted.
    pair.wire.land(B);
    pair.take(A);
    pair.tasks.run();
    pair.deliver(A);
    pair.tasks.run();
    let before = pair.counters().1;
    assert_eq!((before.received.tensor_re_request, before.contents_sent), (2, 2));
    pair.tasks.cancel(second.task);
    pair.tasks.run();
    pair.deliver(A);
    pair.tasks.run();
    assert_eq!(pair.counters().1.sent.cancel_ack, 1, "it need not wait for the first content");
    assert_eq!(pair.b.source.stored(STEP, "unknown"), 1);
    pair.run();
    assert_eq!(settled(&first), Ok((bytes_of(24), vec![2; 24])));
    pair.assert_clean();
}

#[test]
fn the_entry_is_kept_until_cancel_ack_though_the_content_has_come() {
    let mut pair = primed(Parameters { requests_max: 1, ..small() });
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.tasks.run();
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    pair.deliver(B);
    assert_eq!((pair.counters().0.sent.cancel, pair.a.memory.lent()), (1, 1));
    let kept = pair.receive(A, STEP, "k");
    let next = pair.receive(A, STEP, "k");
    pair.tasks.run();
    assert_eq!(settled(&kept), Ok((bytes_of(24), vec![2; 24])));
    assert_eq!(pair.counters().0.sent.tensor_request, 2, "the peer still owes an answer");
    pair.run();
    assert_eq!(pair.counters().0.sent.tensor_request, 3);
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    pair.run();
    assert_eq!(settled(&next), Ok((bytes_of(24), vec![3; 24])));
    pair.assert_clean();
}

#[test]
fn a_put_back_value_is_the_next_one_of_its_key() {
    let mut pair = primed(small());
    pair.b.source.send_bytes(STEP, "k", 24, 2);
    pair.b.source.send_bytes(STEP, "k", 24, 3);
    let handle = pair.receive(A, STEP, "k");
    pair.tasks.run();
    pair.tasks.cancel(handle.task);
    pair.tasks.run();
    // The response has already taken the value when CANCEL comes.
    pair.deliver(A);
    assert_eq!(pair.b.source.stored(STEP, "k"), 1);
    pair.run();
    for fill in [2, 3] {
        assert_eq!(pair.pull(STEP, "k"), Ok((bytes_of(24), vec![fill; 24])));
    }
    pair.assert_clean();
}

#[test]
fn entries_are_all_free_after_many_cancels() {
    let mut pair = primed(small());
    for round in 0..100 {
        let handle = pair.receive(A, STEP, "k");
        for _ in 0..round % 7 {
            pair.step();
        }
        pair.tasks.cancel(handle.task);
        pair.run();
    }
    let handles: Vec<_> = (0..small().requests_max).map(|_| pair.receive(A, STEP, "k")).collect();
    pair.run();
    assert_eq!(pair.b.source.waiting(STEP, "k"), handles.len(), "each has an entry");
    for handle in &handles {
        pair.tasks.cancel(handle.task);
    }
    pair.run();
    pair.assert_clean();
}

#[test]
fn a_dropped_response_is_an_error_at_the_receiver() {
    for steps in 0.. {
        let mut pair = Pair::new(small());
        pair.b.source.send_bytes(STEP, "k", 24, 2);
        let handle = pair.receive(A, STEP, "k");
        let mut random = Random::new(steps);
        while pair.b.responses.is_empty() {
            pair.step();
        }
        for _ in 0..steps {
            let events = pair.enabled();
            if events.is_empty() {
                break;
            }
            pair.fire(events[random.below(events.len())]);
        }
        let response = pair.b.responses[0];
        let is_over = pair.tasks.is_finished(response);
        pair.tasks.cancel(response);
        pair.run();
        let was_written = pair.counters().1.contents_sent == 1;
        match settled(&handle) {
            Err(TransferError::Remote(status)) => {
                assert_eq!((status.code, was_written), (Code::Cancelled, false));
                assert_eq!(pair.b.source.stored(STEP, "k"), 1, "the value went back");
            }
            other => assert_eq!((other, was_written), (Ok((bytes_of(24), vec![2; 24])), true)),
        }
        pair.assert_clean();
        if is_over {
            assert!(steps > 10, "the response had states to be dropped in");
            return;
        }
    }
}

/// The sender's value and what the receiver believes of it.
const SCENARIOS: [&str; 6] = ["miss", "hit", "change", "dead", "empty", "error"];

fn begin(scenario: &str, parameters: Parameters) -> (Pair, Option<Metadata>) {
    let mut pair = Pair::new(parameters);
    if scenario != "miss" {
        pair.b.source.send_bytes(STEP, "k", 24, 1);
        assert!(pair.pull(STEP, "k").is_ok());
    }
    let metadata = match scenario {
        "miss" | "hit" => bytes_of(24),
        "change" => bytes_of(30),
        "dead" => dead(),
        "empty" => bytes_of(0),
        _ => return (pair, None),
    };
    let bytes = vec![9; metadata.byte_length as usize];
    pair.b.source.send(STEP, "k", metadata.clone(), bytes);
    (pair, Some(metadata))
}

/// Runs `steps` random events, then gives the receive up; false once it has ended by itself.
fn give_up_after(scenario: &str, parameters: Parameters, steps: usize, seed: u64) -> bool {
    let (mut pair, metadata) = begin(scenario, parameters);
    let contents = pair.counters().1.contents_sent;
    let handle = pair.receive(A, STEP, "k");
    let mut random = Random::new(seed);
    for _ in 0..steps {
        let events = pair.enabled();
        if !events.is_empty() {
            pair.fire(events[random.below(events.len())]);
        } else if scenario == "error" {
            pair.b.source.refuse(STEP, "k", Status::new(Code::NotFound, "no"));
        }
    }
    if handle.is_done() {
        let _ = settled(&handle);
        return false;
    }
    pair.tasks.cancel(handle.task);
    pair.run();
    assert_eq!(pair.b.source.waiting(STEP, "k"), 0);
    assert_eq!(pair.counters().0.sent.cancel, pair.counters().1.sent.cancel_ack);
    if let Some(metadata) = metadata {
        let was_written = pair.counters().1.contents_sent - contents;
        assert_eq!(was_written + pair.b.source.stored(STEP, "k") as u64, 1, "stayed, or written once");
        let bytes = vec![9; metadata.byte_length as usize];
        assert_eq!(pair.pull(STEP, "k"), Ok((metadata, bytes)));
    }
    pair.assert_clean();
    true
}

#[test]
fn s1_at_every_step_of_every_scenario_and_many_schedules() {
    for scenario in SCENARIOS {
        for parameters in [small(), original()] {
            for seed in 0..16 {
                let mut steps = 0;
                while give_up_after(scenario, parameters, steps, seed) {
                    steps += 1;
                    assert!(steps < 1000, "{scenario} never ends");
                }
            }
        }
    }
}

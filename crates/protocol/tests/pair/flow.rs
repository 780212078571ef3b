//! Flow control of mode counted: its cost, blocking and its end, rings that grow, and one test for each of its rules that a peer
//! can break.

use tensorwire_protocol::{
    Code, Counters, Destination, Message, Metadata, Parameters, PeerMisbehaved, RequestIndex, Scope, Status,
    TensorRequest,
    credit::{Answer, Ask, Counts},
    limits::{RING_BYTES_FIRST, RING_BYTES_MIN},
    names::NameForm,
    wire::record::Control,
};

use crate::support::{
    STEP,
    Side::{self, A, B},
    bytes_of, dead,
    lone::Lone,
    pair::{Pair, original, settled, small},
    random::Random,
};

/// What a kind of transfer costs on both sides: messages, flow control, contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cost {
    messages: u64,
    flow_control: u64,
    contents: u64,
}

fn cost(pair: &Pair, before: (Counters, Counters)) -> Cost {
    let (a, b) = pair.counters();
    let sum = |figure: fn(&Counters) -> u64| figure(&a) + figure(&b) - figure(&before.0) - figure(&before.1);
    Cost {
        messages: sum(|counters| counters.sent.total()),
        flow_control: sum(Counters::flow_control_sent),
        contents: sum(|counters| counters.contents_sent),
    }
}

fn transfer(pair: &mut Pair, metadata: Metadata) -> Cost {
    let before = pair.counters();
    let bytes = vec![7; metadata.byte_length as usize];
    pair.b.source.send(STEP, "k", metadata.clone(), bytes.clone());
    assert_eq!(pair.pull(STEP, "k"), Ok((metadata, bytes)));
    cost(pair, before)
}

fn error(pair: &mut Pair) -> Cost {
    let before = pair.counters();
    let handle = pair.receive(A, STEP, "k");
    pair.run();
    assert!(pair.b.source.refuse(STEP, "k", Status::new(Code::Aborted, "no")));
    pair.run();
    assert!(settled(&handle).is_err());
    cost(pair, before)
}

fn cancel(pair: &mut Pair) -> Cost {
    let before = pair.counters();
    let handle = pair.receive(A, STEP, "never");
    pair.run();
    pair.tasks.cancel(handle.task);
    pair.run();
    cost(pair, before)
}

/// The cases in order: each leaves behind what the next one finds in the metadata cache.
fn table(parameters: Parameters) -> Vec<(&'static str, Cost)> {
    let mut pair = Pair::new(parameters);
    let pair = &mut pair;
    let table = vec![
        ("miss", transfer(pair, bytes_of(24))),
        ("hit", transfer(pair, bytes_of(24))),
        ("change", transfer(pair, bytes_of(25))),
        ("dead", transfer(pair, dead())),
        ("dead again", transfer(pair, dead())),
        ("empty", transfer(pair, bytes_of(0))),
        ("empty again", transfer(pair, bytes_of(0))),
        ("error", error(pair)),
        ("cancel", cancel(pair)),
    ];
    pair.assert_clean();
    table
}

#[test]
fn s3_6_no_case_costs_more_than_in_mode_original() {
    // Without eager answers, which save messages and contents; flow control is what is compared here.
    let own = table(Parameters { eager_bytes_max: 0, ..Parameters::default() });
    for ((case, own), (_, original)) in own.iter().zip(table(original())) {
        assert_eq!((own.messages, own.contents), (original.messages, original.contents), "{case}");
        assert_eq!(original.flow_control, original.messages, "{case}");
        assert_eq!(own.flow_control, 0, "{case}: a few messages return with the next ones");
    }
    let costs: Vec<_> = own.iter().map(|(case, cost)| (*case, cost.messages, cost.contents)).collect();
    let expected = [
        ("miss", 3, 1),
        ("hit", 1, 1),
        ("change", 3, 1),
        ("dead", 3, 1),
        ("dead again", 1, 1),
        ("empty", 3, 1),
        ("empty again", 1, 1),
        ("error", 2, 0),
        ("cancel", 3, 0),
    ];
    assert_eq!(costs, expected);
}

#[test]
fn a_thousand_hits_cost_ten_returns_at_most() {
    let mut pair = Pair::new(Parameters { eager_bytes_max: 0, ..Parameters::default() });
    pair.b.source.send_bytes(Scope::Published, "k", 8, 1);
    assert!(pair.pull(Scope::Published, "k").is_ok());
    let before = pair.counters();
    for _ in 0..1000 {
        pair.b.source.send_bytes(Scope::Published, "k", 8, 1);
        assert!(pair.pull(Scope::Published, "k").is_ok());
    }
    let cost = cost(&pair, before);
    assert_eq!((cost.messages, cost.contents), (1000, 1000));
    assert!((1000 / 128..=1000 / 100).contains(&cost.flow_control), "{cost:?}");
    // A returns credits with its requests, and B with counts alone when half the depth or half the first ring is used.
    assert_eq!(pair.counters().1.count_only_sent, cost.flow_control);
    pair.assert_clean();
}

fn long_key(key: usize) -> String {
    format!("{key} {}", "x".repeat(900))
}

fn receive_long_keys(pair: &mut Pair, side: Side, keys: usize) -> Vec<super::load::Receive> {
    let receive = |key| {
        let name = long_key(key);
        pair.end(side.other()).source.send_bytes(STEP, &name, 8, key as u8);
        pair.receive(side, STEP, &name)
    };
    (0..keys).map(receive).collect()
}

fn assert_all(handles: &[super::load::Receive]) {
    for (key, handle) in handles.iter().enumerate() {
        assert_eq!(settled(handle), Ok((bytes_of(8), vec![key as u8; 8])));
    }
}

#[test]
fn rings_full_in_both_directions_come_free() {
    let parameters = Parameters { ring_bytes: RING_BYTES_MIN, depth: 64, requests_max: 64, ..small() };
    let mut pair = Pair::new(parameters);
    let handles = Side::BOTH.map(|side| receive_long_keys(&mut pair, side, 64));
    // Both sides have filled the other's ring, and neither has taken anything in.
    pair.tasks.run();
    let (a, b) = pair.counters();
    assert_eq!((a.sent, a.asks_sent, b.asks_sent), (b.sent, 1, 1));
    assert!(a.sent.total() < 10 && a.message_bytes_sent + 1000 > u64::from(RING_BYTES_MIN));
    pair.run();
    handles.iter().for_each(|handles| assert_all(handles));
    assert_eq!(pair.wire.ring_lengths(A), [RING_BYTES_MIN as usize], "it may not grow");
    pair.assert_clean();
}

/// Rings may grow twice, and credits never run out before room does.
fn growing() -> Parameters {
    Parameters { ring_bytes: 4 * RING_BYTES_FIRST, depth: 400, requests_max: 300, ..small() }
}

#[test]
fn a_ring_grows_when_messages_find_no_room_and_stays_within_its_maximum() {
    let mut pair = Pair::with(growing(), growing(), 300);
    let handles = receive_long_keys(&mut pair, A, 300);
    pair.run();
    assert_all(&handles);
    let first = RING_BYTES_FIRST as usize;
    assert_eq!(pair.wire.ring_lengths(B), [first, 2 * first, 4 * first]);
    assert_eq!(pair.wire.ring_lengths(A), [first], "B's answers are short");
    let (a, b) = pair.counters();
    assert_eq!((a.rings_moved, b.rings_offered), (2, 2));
    assert!(a.asks_sent >= 2);
    assert_eq!(pair.b.memory.rings_ended("RingMoved"), 2, "the rings that A has left are free");
    // The same messages find room at once now, without an ASK.
    let handles = receive_long_keys(&mut pair, A, 60);
    pair.run();
    assert_all(&handles);
    assert_eq!(pair.counters().0.asks_sent, a.asks_sent);
    pair.assert_clean();
}

#[test]
fn without_memory_for_a_larger_ring_the_connection_goes_on_with_the_one_it_has() {
    let mut pair = Pair::with(growing(), growing(), 300);
    pair.wire.refuse_rings(B);
    let handles = receive_long_keys(&mut pair, A, 300);
    pair.run();
    assert_all(&handles);
    assert_eq!(pair.counters().1.rings_offered, 0);
    assert!(pair.counters().0.asks_sent > 10);
    pair.assert_clean();
}

#[test]
fn rings_grow_on_any_schedule() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let parameters = Parameters { depth: [64, 400][seed as usize % 2], ..growing() };
        let mut pair = Pair::with(parameters, parameters, 120);
        let handles = Side::BOTH.map(|side| receive_long_keys(&mut pair, side, 60));
        loop {
            let events = pair.enabled();
            if events.is_empty() {
                break;
            }
            pair.fire(events[random.below(events.len())]);
        }
        handles.iter().for_each(|handles| assert_all(handles));
        assert!(pair.wire.ring_lengths(A).len() > 1 && pair.wire.ring_lengths(B).len() > 1, "seed {seed}");
        pair.assert_clean();
    }
}

#[test]
fn s4_a_hundred_thousand_receives_against_a_reader_that_stopped_stay_in_their_futures() {
    let parameters = Parameters { requests_max: 1000, ..Parameters::default() };
    let mut pair = Pair::with(parameters, parameters, 16);
    let mut handles: Vec<_> = (0..100_000).map(|key| pair.receive(A, STEP, &key.to_string())).collect();
    pair.tasks.run();
    let (a, _) = pair.counters();
    assert_eq!(a.sent.tensor_request, 254, "the credits of a depth of 256");
    assert_eq!(pair.wire.seen(A).0, 255, "and one ASK");
    assert_eq!(pair.a.memory.lent(), 0);
    // The requests of receives that are given up now are never sent, except those that were sent before.
    let last = handles.split_off(99_990);
    handles.iter().for_each(|handle| pair.tasks.cancel(handle.task));
    for key in 99_990..100_000u64 {
        pair.b.source.send_bytes(STEP, &key.to_string(), 8, key as u8);
    }
    pair.run();
    for (key, handle) in (99_990u64..).zip(&last) {
        assert_eq!(settled(handle), Ok((bytes_of(8), vec![key as u8; 8])));
    }
    let (a, _) = pair.counters();
    assert_eq!((a.sent.tensor_request, a.sent.cancel), (254 + 1, 254), "those that waited went together");
    pair.assert_clean();
}

#[test]
fn contents_wait_for_credits_too() {
    let parameters = Parameters { depth: 4, requests_max: 8, contents_max: 8, ..small() };
    let mut pair = Pair::new(parameters);
    let handles: Vec<_> = (0..8).map(|key| pair.receive(A, Scope::Published, &key.to_string())).collect();
    pair.run();
    for key in 0..8u8 {
        pair.b.source.send_bytes(Scope::Published, &key.to_string(), 0, key);
    }
    pair.run();
    handles.iter().for_each(|handle| assert!(settled(handle).is_ok()));
    let handles: Vec<_> = (0..8).map(|key| pair.receive(A, Scope::Published, &key.to_string())).collect();
    pair.run();
    for key in 0..8u8 {
        pair.b.source.send_bytes(Scope::Published, &key.to_string(), 0, key);
    }
    let before = pair.counters().1;
    pair.tasks.run();
    let after = pair.counters().1;
    assert!(after.contents_sent - before.contents_sent <= 2, "two credits");
    assert_eq!(after.asks_sent, before.asks_sent + 1);
    pair.run();
    handles.iter().for_each(|handle| assert!(settled(handle).is_ok()));
    pair.assert_clean();
}

fn broken(result: Result<(), PeerMisbehaved>, lone: &mut Lone, rule: PeerMisbehaved) {
    assert_eq!(result, Err(rule));
    lone.assert_over(rule);
}

#[test]
fn d_unknown_record() {
    for length in [0, 1, 11, 13, 15, 17, 64, u64::MAX] {
        let mut lone = Lone::new(small());
        let result = lone.immediate(0xFFFF_FFFE, length);
        broken(result, &mut lone, PeerMisbehaved::UnknownRecord);
    }
}

#[test]
fn d_returned_too_much() {
    for counts in [Counts { receives: 2, ring_bytes: 0 }, Counts { receives: 1, ring_bytes: 1000 }] {
        let mut lone = Lone::new(small());
        let _handle = lone.receive(STEP, "k");
        let result = lone.control(counts, Control::CountOnly);
        broken(result, &mut lone, PeerMisbehaved::ReturnedTooMuch);
        let mut lone = Lone::new(small());
        let _handle = lone.receive(STEP, "k");
        let result = lone.ask(Ask { counts, answers: 0, wanted: 0 });
        broken(result, &mut lone, PeerMisbehaved::ReturnedTooMuch);
    }
    // Counts that take back what was returned.
    let mut lone = Lone::new(small());
    let _handle = lone.receive(STEP, "k");
    lone.absorb();
    let counts = lone.taken();
    assert_eq!(lone.control(counts, Control::CountOnly), Ok(()));
    let result = lone.control(Counts::default(), Control::CountOnly);
    broken(result, &mut lone, PeerMisbehaved::ReturnedTooMuch);
}

#[test]
fn d_overrun() {
    let mut lone = Lone::new(small());
    // All credits of A are used, so that it cannot return anything.
    let _handles: Vec<_> = (0..8).map(|_| lone.receive(STEP, "k")).collect();
    for _ in 0..8 {
        assert_eq!(lone.immediate(100, 0), Ok(()));
    }
    let result = lone.immediate(100, 0);
    broken(result, &mut lone, PeerMisbehaved::Overrun);
}

#[test]
fn d_asked_twice() {
    let ask = Ask { counts: Counts::default(), answers: 0, wanted: 0 };
    let mut lone = Lone::new(small());
    assert_eq!(lone.ask(ask), Ok(()));
    assert_eq!(lone.connection.counters().answers_sent, 1, "at once");
    let result = lone.ask(ask);
    broken(result, &mut lone, PeerMisbehaved::AskedTwice);
    let mut lone = Lone::new(small());
    assert_eq!(lone.ask(ask), Ok(()));
    assert_eq!(lone.ask(Ask { answers: 1, ..ask }), Ok(()));
    let result = lone.ask(Ask { answers: 3, ..ask });
    broken(result, &mut lone, PeerMisbehaved::AskedTwice);
}

/// A has used its 8 credits and asked for more.
fn asking() -> Lone {
    let mut lone = Lone::new(Parameters { requests_max: 20, ..small() });
    for _ in 0..10 {
        drop(lone.receive(STEP, "k"));
    }
    assert_eq!(lone.connection.counters().asks_sent, 1);
    lone.absorb();
    assert_eq!((lone.asks, lone.taken().receives), (1, 8));
    lone
}

#[test]
fn d_answer_without_ask() {
    for asks in [0, 1] {
        let mut lone = Lone::new(small());
        let result = lone.answer_with(Answer { counts: Counts::default(), asks });
        broken(result, &mut lone, PeerMisbehaved::AnswerWithoutAsk);
    }
    let mut lone = asking();
    assert_eq!(lone.answer(), Ok(()));
    assert_eq!(lone.connection.counters().sent.tensor_request, 10);
    let result = lone.answer();
    broken(result, &mut lone, PeerMisbehaved::AnswerWithoutAsk);
    let mut lone = asking();
    let counts = lone.taken();
    let result = lone.answer_with(Answer { counts, asks: 2 });
    broken(result, &mut lone, PeerMisbehaved::AnswerWithoutAsk);
}

#[test]
fn d_answer_short() {
    let Counts { receives, ring_bytes } = asking().taken();
    let short = [
        Counts { receives: receives - 1, ring_bytes },
        Counts { receives, ring_bytes: ring_bytes - 1 },
        Counts::default(),
    ];
    for counts in short {
        let mut lone = asking();
        let result = lone.answer_with(Answer { counts, asks: 1 });
        broken(result, &mut lone, PeerMisbehaved::AnswerShort);
    }
}

fn ring(capacity: u32) -> Control {
    let capacity = capacity.into();
    Control::RingOffer(Destination { region: 1, generation: 1, offset: 0, capacity, result: None })
}

#[test]
fn d_ring_offered_twice() {
    let mut lone = Lone::new(growing());
    assert_eq!(lone.control(Counts::default(), ring(2 * RING_BYTES_FIRST)), Ok(()));
    let result = lone.control(Counts::default(), ring(4 * RING_BYTES_FIRST));
    broken(result, &mut lone, PeerMisbehaved::RingOfferedTwice);
}

#[test]
fn d_ring_offer_unfit() {
    for capacity in [1, RING_BYTES_FIRST - 1, RING_BYTES_FIRST, 4 * RING_BYTES_FIRST + 1, 16 << 20] {
        let mut lone = Lone::new(growing());
        let result = lone.control(Counts::default(), ring(capacity));
        broken(result, &mut lone, PeerMisbehaved::RingOfferUnfit);
    }
}

#[test]
fn d_ring_move_unasked() {
    let mut lone = Lone::new(growing());
    let result = lone.control(Counts::default(), Control::RingMoved);
    broken(result, &mut lone, PeerMisbehaved::RingMoveUnasked);
}

fn request(index: u32, key: &str) -> Message {
    Message::TensorRequest(TensorRequest {
        index: RequestIndex(index),
        scope: STEP,
        key: key.into(),
        known: [].into(),
        want: tensorwire_protocol::Want::Write(None),
        arguments: None,
    })
}

#[test]
fn d_unknown_name() {
    for form in [NameForm::Number(0), NameForm::Number(u16::MAX), NameForm::Define(4)] {
        let mut lone = Lone::new(small());
        let result = lone.named(&request(1, "k"), form).map(drop);
        broken(result, &mut lone, PeerMisbehaved::UnknownName);
    }
    let mut lone = Lone::new(small());
    assert!(lone.named(&request(1, "k"), NameForm::Define(3)).is_ok());
    let known = lone.named(&request(2, "another"), NameForm::Number(3)).unwrap().unwrap();
    assert_eq!(&*known.key, "k", "the number says which");
}

#[test]
fn a_key_is_spelt_out_once_unless_more_are_in_use_than_have_numbers() {
    let mut pair = Pair::new(small());
    let sent = |pair: &Pair| pair.counters().0.message_bytes_sent;
    let mut costs = Vec::new();
    for key in [0, 1, 0, 1, 2, 3, 4, 0, 4] {
        let before = sent(&pair);
        let name = long_key(key);
        pair.b.source.send_bytes(Scope::Published, &name, 0, 0);
        assert!(pair.pull(Scope::Published, &name).is_ok());
        costs.push(sent(&pair) - before > 900);
    }
    // There are four numbers: the fifth key takes that of the first, which is spelt out again.
    assert_eq!(costs, [true, true, false, false, true, true, true, true, false]);
    let keys: Vec<_> = pair.b.requests.iter().map(|request| request.key.to_string()).collect();
    assert_eq!(keys, [0, 1, 0, 1, 2, 3, 4, 0, 4].map(long_key));
    pair.assert_clean();
}

#[test]
fn in_mode_original_every_key_is_spelt_out() {
    let mut pair = Pair::new(original());
    for round in 1..=3 {
        pair.b.source.send_bytes(Scope::Published, &long_key(0), 0, 0);
        assert!(pair.pull(Scope::Published, &long_key(0)).is_ok());
        assert!(pair.counters().0.message_bytes_sent > 900 * round);
    }
}

#[test]
fn counts_alone_ask_and_answer_are_never_returned() {
    let mut lone = Lone::new(small());
    for answers in 0..100 {
        assert_eq!(lone.ask(Ask { counts: Counts::default(), answers, wanted: 0 }), Ok(()));
        assert_eq!(lone.control(Counts::default(), Control::CountOnly), Ok(()));
        lone.absorb();
    }
    assert_eq!(lone.connection.counters().count_only_sent, 0);
    assert_eq!(lone.connection.counters().answers_sent, 100);
    // The receives of messages that A takes in are returned.
    for index in 0..5 {
        assert_eq!(lone.message(&Message::Cancel(RequestIndex(index))), Ok(None));
    }
    assert_eq!(lone.connection.counters().flow_control_sent(), 100, "they went with the CANCEL_ACKs");
}

//! Queue arithmetic against a model of two queue pairs: whatever the schedule, no receive is missing, no send
//! queue is full, no ring byte is overwritten unread; and some schedule needs every entry.

#![allow(clippy::unwrap_used, reason = "the lints spare test functions, not their helpers")]

use std::collections::VecDeque;

use proptest::prelude::*;
use protocol::{
    Agreed, Depths, Mode, Parameters,
    credit::{NothingInFlight, RingConsumer, RingProducer},
    limits::{RING_BYTES_MIN, WINDOW_MAX},
};

#[derive(Debug, Clone)]
enum What {
    /// Message number and length.
    Message(u8, u32),
    Acknowledgement,
    Content,
}

#[derive(Debug)]
struct Posted {
    what: What,
    ring: Vec<(usize, Vec<u8>)>,
    entries: u32,
    at: u64,
}

/// One end: what it has posted, what has landed at it.
struct End {
    depths: Depths,
    contents_max: u32,
    requests_max: u32,
    producer: RingProducer,
    consumer: RingConsumer,
    ring: Vec<u8>,
    next_message: u8,
    posted: VecDeque<Posted>,
    /// Landed at the peer, completion not seen: when, entries, whether content.
    landed: VecDeque<(u64, u32, bool)>,
    arrivals: VecDeque<(What, u64)>,
    send_used: u32,
    send_most: u32,
    receive_most: u32,
    contents_in_flight: u32,
    /// Own requests that the peer has not written yet.
    asked: u32,
    /// Own requests without their content taken.
    outstanding: u32,
}

impl End {
    fn new(local: &Parameters, peer: &Parameters) -> Self {
        let agreed = Agreed::of(local, peer);
        Self {
            depths: Depths::of(local, peer),
            contents_max: local.contents_max,
            requests_max: agreed.requests_max,
            producer: RingProducer::new(peer.ring_bytes, agreed.window),
            consumer: RingConsumer::new(local.ring_bytes),
            ring: vec![0; local.ring_bytes as usize],
            next_message: 0,
            posted: VecDeque::new(),
            landed: VecDeque::new(),
            arrivals: VecDeque::new(),
            send_used: 0,
            send_most: 0,
            receive_most: 0,
            contents_in_flight: 0,
            asked: 0,
            outstanding: 0,
        }
    }

    fn post(&mut self, posted: Posted) {
        self.send_used += posted.entries;
        self.send_most = self.send_most.max(self.send_used);
        assert!(self.send_used <= self.depths.send, "send queue full");
        self.posted.push_back(posted);
    }

    fn complete(&mut self) {
        if let Some((_, entries, is_content)) = self.landed.pop_front() {
            self.send_used -= entries;
            self.contents_in_flight -= u32::from(is_content);
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Message(u32),
    Ask,
    Content,
    Land,
    Take,
    Complete,
}

struct Model {
    ends: [End; 2],
    now: u64,
}

impl Model {
    fn new(a: Parameters, b: Parameters) -> Self {
        Self { ends: [End::new(&a, &b), End::new(&b, &a)], now: 0 }
    }

    fn step(&mut self, who: usize, step: &Step) {
        self.now += 1;
        match *step {
            Step::Message(length) => self.message(who, length),
            Step::Ask => {
                let end = &mut self.ends[who];
                if end.outstanding < end.requests_max {
                    end.outstanding += 1;
                    end.asked += 1;
                }
            }
            Step::Content => self.content(who),
            Step::Land => self.land(who),
            Step::Take => self.take(who),
            Step::Complete => self.ends[who].complete(),
        }
    }

    fn message(&mut self, who: usize, length: u32) {
        let (at, end) = (self.now, &mut self.ends[who]);
        let Some((first, second)) = end.producer.reserve(length) else { return };
        assert_eq!(first.length + second.length, length);
        let number = end.next_message;
        end.next_message = number.wrapping_add(1);
        let spans = [first, second].into_iter().filter(|span| span.length > 0);
        let ring: Vec<_> =
            spans.map(|span| (span.offset as usize, vec![number; span.length as usize])).collect();
        let entries = ring.len() as u32;
        end.post(Posted { what: What::Message(number, length), ring, entries, at });
    }

    fn content(&mut self, who: usize) {
        let at = self.now;
        if self.ends[1 - who].asked > 0 && self.ends[who].contents_in_flight < self.ends[who].contents_max {
            self.ends[1 - who].asked -= 1;
            let end = &mut self.ends[who];
            end.contents_in_flight += 1;
            end.post(Posted { what: What::Content, ring: Vec::new(), entries: 1, at });
        }
    }

    fn land(&mut self, who: usize) {
        let Some(posted) = self.ends[who].posted.pop_front() else { return };
        let is_content = matches!(posted.what, What::Content);
        self.ends[who].landed.push_back((self.now, posted.entries, is_content));
        let target = &mut self.ends[1 - who];
        for (offset, bytes) in posted.ring {
            target.ring[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        target.arrivals.push_back((posted.what, posted.at));
        let waiting = target.arrivals.len() as u32;
        target.receive_most = target.receive_most.max(waiting);
        assert!(waiting <= target.depths.receive, "receiver not ready");
    }

    fn take(&mut self, who: usize) {
        let at = self.now;
        let end = &mut self.ends[who];
        let Some((what, posted_at)) = end.arrivals.pop_front() else { return };
        // A completion is reported before any arrival that its write caused.
        while end.landed.front().is_some_and(|&(landed_at, ..)| landed_at < posted_at) {
            end.complete();
        }
        match what {
            What::Message(number, length) => {
                let (first, second) = end.consumer.spans(length).unwrap();
                for span in [first, second] {
                    let range = span.offset as usize..(span.offset + span.length) as usize;
                    assert!(end.ring[range].iter().all(|&byte| byte == number), "overwritten unread");
                }
                end.consumer.advance(length);
                end.post(Posted { what: What::Acknowledgement, ring: Vec::new(), entries: 1, at });
            }
            What::Acknowledgement => end.producer.retire().unwrap(),
            What::Content => end.outstanding -= 1,
        }
    }
}

fn parameters() -> impl Strategy<Value = Parameters> {
    let mode = prop_oneof![1 => Just(Mode::Original), 3 => Just(Mode::Windowed)];
    (mode, 1u32..6, 1u32..6, 1u32..4).prop_map(|(mode, window, requests_max, contents_max)| Parameters {
        mode,
        window,
        ring_bytes: RING_BYTES_MIN,
        requests_max,
        contents_max,
    })
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    let step = prop_oneof![
        4 => (1u32..4096).prop_map(Step::Message),
        2 => Just(Step::Ask),
        2 => Just(Step::Content),
        4 => Just(Step::Land),
        4 => Just(Step::Take),
        1 => Just(Step::Complete),
    ];
    (0usize..2, step)
}

proptest! {
    #[test]
    fn no_schedule_overflows_a_queue_or_a_ring(
        a in parameters(), b in parameters(), steps in proptest::collection::vec(step(), 0..600),
    ) {
        let mut model = Model::new(a, b);
        for (who, step) in &steps {
            model.step(*who, step);
        }
    }

    #[test]
    fn both_ends_agree(a in parameters(), b in parameters()) {
        prop_assert_eq!(Agreed::of(&a, &b), Agreed::of(&b, &a));
        let agreed = Agreed::of(&a, &b);
        prop_assert!(agreed.window <= a.window.min(b.window));
        prop_assert!(agreed.mode != Mode::Original || agreed.window == 1);
    }
}

#[test]
fn the_depths_are_no_deeper_than_needed() {
    let parameters = Parameters {
        mode: Mode::Windowed,
        window: 1,
        ring_bytes: RING_BYTES_MIN,
        requests_max: 3,
        contents_max: 2,
    };
    let mut model = Model::new(parameters, parameters);
    // Both rings just before their end, so that the next message takes two writes.
    for _ in 0..2 {
        for who in [0, 1] {
            model.step(who, &Step::Message(4095));
            model.step(who, &Step::Land);
            model.step(1 - who, &Step::Take);
            model.step(1 - who, &Step::Land);
            model.step(who, &Step::Take);
            model.step(who, &Step::Complete);
            model.step(1 - who, &Step::Complete);
        }
    }
    assert_eq!((model.ends[0].send_used, model.ends[1].send_used), (0, 0));
    // A: a message, an acknowledgement, two contents; none completes. B has asked three times.
    model.step(1, &Step::Message(8));
    model.step(1, &Step::Land);
    model.step(0, &Step::Take);
    model.step(0, &Step::Message(8));
    for _ in 0..3 {
        model.step(1, &Step::Ask);
        model.step(0, &Step::Content);
    }
    assert_eq!(model.ends[0].send_most, model.ends[0].depths.send);
    for _ in 0..5 {
        model.step(0, &Step::Land);
    }
    for _ in 0..4 {
        model.step(0, &Step::Complete);
    }
    model.step(0, &Step::Content);
    model.step(0, &Step::Land);
    assert_eq!(model.ends[1].receive_most, model.ends[1].depths.receive);
}

#[test]
fn depths_follow_the_smaller_window_and_the_own_contents() {
    let local = Parameters { window: 8, requests_max: 100, contents_max: 5, ..Parameters::default() };
    let peer = Parameters { window: 4, requests_max: 30, contents_max: 99, ..Parameters::default() };
    assert_eq!(Depths::of(&local, &peer), Depths { send: 3 * 4 + 5, receive: 2 * 4 + 30 });
    let original = Parameters { mode: Mode::Original, ..peer };
    assert_eq!(Depths::of(&local, &original), Depths { send: 3 + 5, receive: 2 + 30 });
}

#[test]
fn numbers_outside_the_limits_are_brought_inside() {
    let wild = Parameters {
        mode: Mode::Windowed,
        window: u32::MAX,
        ring_bytes: u32::MAX,
        requests_max: u32::MAX,
        contents_max: u32::MAX,
    };
    assert_eq!(Agreed::of(&wild, &wild).window, WINDOW_MAX);
    let none = Parameters { window: 0, requests_max: 0, contents_max: 0, ..wild };
    assert_eq!(Depths::of(&none, &none), Depths { send: 4, receive: 3 });
}

#[test]
fn a_ring_is_filled_to_the_last_byte_and_no_further() {
    let mut producer = RingProducer::new(100, 10);
    let (first, second) = producer.reserve(60).unwrap();
    assert_eq!((first.offset, first.length, second.length), (0, 60, 0));
    assert_eq!(producer.reserve(41), None);
    let (first, second) = producer.reserve(40).unwrap();
    assert_eq!((first.offset, first.length, second.length), (60, 40, 0));
    assert_eq!(producer.reserve(1), None);
    producer.retire().unwrap();
    let (first, second) = producer.reserve(60).unwrap();
    assert_eq!((first.offset, first.length, second.length), (0, 60, 0));
    producer.retire().unwrap();
    producer.retire().unwrap();
    let (first, second) = producer.reserve(50).unwrap();
    assert_eq!((first.offset, first.length), (60, 40));
    assert_eq!((second.offset, second.length), (0, 10));
    assert_eq!(producer.in_flight(), 1);
    producer.retire().unwrap();
    assert_eq!(producer.retire(), Err(NothingInFlight));
}

#[test]
fn messages_of_no_bytes_or_above_the_ring_never_get_a_place() {
    let mut producer = RingProducer::new(100, 10);
    assert_eq!(producer.reserve(0), None);
    assert_eq!(producer.reserve(101), None);
    assert!(producer.reserve(100).is_some());
    assert_eq!(RingConsumer::new(100).spans(101), None);
}

#[test]
fn a_window_of_one_is_one_message_in_flight() {
    let mut producer = RingProducer::new(100, 1);
    assert!(producer.reserve(1).is_some());
    assert!(!producer.has_window());
    assert_eq!(producer.reserve(1), None);
    producer.retire().unwrap();
    assert!(producer.reserve(1).is_some());
}

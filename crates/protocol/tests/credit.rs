//! Queue arithmetic against two queue pairs that are moved by hand: in every schedule no receive is missing, no send queue is full,
//! no ring byte is overwritten unread, and every blocked side continues.

#![allow(clippy::unwrap_used, reason = "the lints spare test functions, not their helpers")]

use std::collections::VecDeque;

use proptest::prelude::*;
use tensorwire_protocol::{
    Agreed, Depths, Destination, Mode, Parameters, PeerMisbehaved, Validation,
    credit::{Answer, Ask, Blocked, Counts, Flow, RingConsumer, RingPlace},
    limits::{DEPTH_MIN, RING_BYTES_MIN},
};

#[derive(Debug, Clone)]
enum What {
    /// Number, length, counts; whether it may cause a return.
    Message(u8, u32, Counts, bool),
    /// RING_OFFER of that many bytes.
    RingOffer(u32, Counts, u32),
    RingMoved(u32, Counts),
    Content,
    Ask(Ask),
    Answer(Answer),
}

#[derive(Debug)]
struct Posted {
    what: What,
    ring: usize,
    place: Option<(RingPlace, u8)>,
    at: u64,
}

impl Posted {
    fn entries(&self) -> u32 {
        self.place.map_or(1, |(place, _)| 1 + u32::from(place.second.length > 0))
    }
}

/// The bytes of a message of flow control.
const CONTROL_BYTES: u32 = 13;

/// One end: what it has posted, what has landed at it.
struct End {
    depths: Depths,
    ring_bytes_max: u32,
    flow: Flow,
    consumer: RingConsumer,
    rings: Vec<Vec<u8>>,
    /// The ring that is read, and the peer's ring that is written.
    reading: usize,
    writing: usize,
    is_growing: bool,
    next_message: u8,
    posted: VecDeque<Posted>,
    /// Writes that have landed at the peer and whose completion was not seen: the time of each, and its entries.
    landed: VecDeque<(u64, u32)>,
    arrivals: VecDeque<(What, u64)>,
    send_used: u32,
    blocked: bool,
    messages_sent: u64,
}

impl End {
    fn new(local: &Parameters, peer: &Parameters) -> Self {
        let agreed = Agreed::of(local, peer);
        let own = local.first_ring_bytes();
        Self {
            depths: Depths::of(local, peer),
            ring_bytes_max: local.ring_bytes,
            flow: Flow::new(&agreed, peer.first_ring_bytes(), peer.ring_bytes, own),
            consumer: RingConsumer::new(own),
            rings: vec![vec![0; own as usize]],
            reading: 0,
            writing: 0,
            is_growing: false,
            next_message: 0,
            posted: VecDeque::new(),
            landed: VecDeque::new(),
            arrivals: VecDeque::new(),
            send_used: 0,
            blocked: false,
            messages_sent: 0,
        }
    }

    fn post(&mut self, what: What, place: Option<RingPlace>, at: u64) {
        let number = self.next_message;
        if place.is_some() {
            self.next_message = number.wrapping_add(1);
        }
        let place = place.map(|place| (place, number));
        let posted = Posted { what, ring: self.writing, place, at };
        self.send_used += posted.entries();
        assert!(self.send_used <= self.depths.send, "send queue full");
        self.posted.push_back(posted);
    }

    fn complete(&mut self) {
        if let Some((_, entries)) = self.landed.pop_front() {
            self.send_used -= entries;
        }
    }

    fn ask(&mut self, blocked: Blocked, at: u64) {
        self.blocked = true;
        if let Some(ask) = self.flow.ask(blocked) {
            self.post(What::Ask(ask), None, at);
        }
    }

    fn message(&mut self, length: u32, at: u64) {
        let counts = self.flow.counts();
        if self.flow.has_ring_offer() {
            match self.flow.post_message(CONTROL_BYTES) {
                Ok(place) => self.post(What::RingMoved(CONTROL_BYTES, counts), Some(place), at),
                Err(blocked) => return self.ask(blocked, at),
            }
            self.flow.move_ring().unwrap();
            self.writing += 1;
        }
        match self.flow.post_message(length) {
            Ok(place) => {
                let number = self.next_message;
                self.post(What::Message(number, length, counts, true), Some(place), at);
                self.blocked = false;
                self.messages_sent += 1;
            }
            Err(blocked) => self.ask(blocked, at),
        }
    }

    fn content(&mut self, at: u64) {
        match self.flow.post_content() {
            Ok(()) => self.post(What::Content, None, at),
            Err(blocked) => self.ask(blocked, at),
        }
    }

    fn return_if_due(&mut self, at: u64) {
        let (counts, number) = (self.flow.counts(), self.next_message);
        if self.flow.is_return_due()
            && let Ok(place) = self.flow.post_message(CONTROL_BYTES)
        {
            self.post(What::Message(number, CONTROL_BYTES, counts, false), Some(place), at);
        }
    }

    /// A message of `length` bytes, each of which is `number`, must be at the position where the ring is read.
    fn read(&mut self, number: Option<u8>, length: u32) {
        let place = self.consumer.place(length).unwrap();
        for span in [place.first, place.second] {
            let range = span.offset as usize..(span.offset + span.length) as usize;
            let bytes = &self.rings[self.reading][range];
            assert!(
                bytes.iter().all(|&byte| number.is_none_or(|number| number == byte)),
                "overwritten unread"
            );
        }
        self.consumer.advance(length);
    }

    fn take(&mut self, at: u64) {
        let Some((what, posted_at)) = self.arrivals.pop_front() else { return };
        // A completion is reported before any arrival that its write caused.
        while self.landed.front().is_some_and(|&(landed_at, _)| landed_at < posted_at) {
            self.complete();
        }
        match what {
            What::Message(number, length, counts, may_return) => {
                self.read(Some(number), length);
                self.flow.take_message(length, counts).unwrap();
                if may_return {
                    self.return_if_due(at);
                }
            }
            What::RingOffer(length, counts, ring_bytes) => {
                self.read(None, length);
                self.flow.take_message(length, counts).unwrap();
                let capacity = ring_bytes.into();
                self.flow
                    .take_ring_offer(Destination {
                        region: 0,
                        generation: 0,
                        offset: 0,
                        capacity,
                        result: None,
                    })
                    .unwrap();
                self.return_if_due(at);
            }
            What::RingMoved(length, counts) => {
                self.read(None, length);
                self.flow.take_message(length, counts).unwrap();
                self.consumer = RingConsumer::new(self.flow.take_ring_move().unwrap());
                self.reading += 1;
                self.is_growing = false;
                self.return_if_due(at);
            }
            What::Content => {
                self.flow.take_content().unwrap();
                self.return_if_due(at);
            }
            What::Ask(ask) => {
                let answer = self.flow.take_ask(ask).unwrap();
                self.post(What::Answer(answer), None, at);
                self.grow(ask.wanted, at);
            }
            What::Answer(answer) => self.flow.take_answer(answer).unwrap(),
        }
    }

    /// Offers a larger ring if it can be posted at once.
    fn grow(&mut self, wanted: u32, at: u64) {
        if self.is_growing {
            return;
        }
        let Some(ring_bytes) = self.flow.growth(wanted, self.ring_bytes_max) else { return };
        let counts = self.flow.counts();
        if let Ok(place) = self.flow.post_message(CONTROL_BYTES) {
            self.flow.offer_ring(ring_bytes);
            self.rings.push(vec![0; ring_bytes as usize]);
            self.is_growing = true;
            self.post(What::RingOffer(CONTROL_BYTES, counts, ring_bytes), Some(place), at);
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Message(u32),
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
        let at = self.now;
        match *step {
            Step::Message(length) => self.ends[who].message(length, at),
            Step::Content => self.ends[who].content(at),
            Step::Land => self.land(who),
            Step::Take => self.ends[who].take(at),
            Step::Complete => self.ends[who].complete(),
        }
    }

    fn land(&mut self, who: usize) {
        let Some(posted) = self.ends[who].posted.pop_front() else { return };
        self.ends[who].landed.push_back((self.now, posted.entries()));
        let target = &mut self.ends[1 - who];
        if let Some((place, number)) = posted.place {
            for span in [place.first, place.second] {
                let range = span.offset as usize..(span.offset + span.length) as usize;
                target.rings[posted.ring][range].fill(number);
            }
        }
        target.arrivals.push_back((posted.what, posted.at));
        let waiting = target.arrivals.len() as u32;
        assert!(waiting <= target.depths.receive, "receiver not ready");
    }

    /// Everything that is on its way is taken in, and so is everything that this causes.
    fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 1000, "two idle ends are not silent");
            for who in [0, 1] {
                self.step(who, &Step::Land);
                self.step(1 - who, &Step::Take);
            }
            if self.ends.iter().all(|end| end.posted.is_empty() && end.arrivals.is_empty()) {
                return;
            }
        }
    }
}

fn parameters() -> impl Strategy<Value = Parameters> {
    (DEPTH_MIN..12, 0u32..4).prop_map(|(depth, doublings)| Parameters {
        mode: Mode::Counted,
        depth,
        ring_bytes: RING_BYTES_MIN << doublings,
        requests_max: 4,
        contents_max: 4,
        names_max: 4,
        eager_bytes_max: 0,
        requests_per_message: 1,
        piece_bytes: 256 << 10,
        validation: Validation::Off,
    })
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    let step = prop_oneof![
        6 => (1u32..4096).prop_map(Step::Message),
        3 => Just(Step::Content),
        4 => Just(Step::Land),
        4 => Just(Step::Take),
        1 => Just(Step::Complete),
    ];
    (0usize..2, step)
}

proptest! {
    #[test]
    fn no_schedule_overflows_a_queue_or_a_ring_and_none_gets_stuck(
        a in parameters(), b in parameters(), steps in proptest::collection::vec(step(), 0..800),
    ) {
        let mut model = Model::new(a, b);
        for (who, step) in &steps {
            model.step(*who, step);
        }
        model.settle();
        for who in [0, 1] {
            let sent = model.ends[who].messages_sent;
            model.step(who, &Step::Message(4096));
            model.settle();
            model.step(who, &Step::Message(4096));
            prop_assert!(model.ends[who].messages_sent > sent, "one ASK is enough");
            model.settle();
        }
    }

    #[test]
    fn both_ends_agree(a in parameters(), b in parameters(), original in any::<bool>()) {
        let b = if original { Parameters { mode: Mode::Original, ..b } } else { b };
        prop_assert_eq!(Agreed::of(&a, &b), Agreed::of(&b, &a));
        let agreed = Agreed::of(&a, &b);
        prop_assert!(agreed.depth <= a.depth.min(b.depth));
        prop_assert_eq!(agreed.mode == Mode::Original, original);
        let (needed, prepared) = (Depths::of(&a, &b), Depths::for_any_peer(&a));
        prop_assert!(needed.send <= prepared.send && needed.receive <= prepared.receive);
    }
}

fn counted(depth: u32) -> Agreed {
    Agreed::of(&Parameters { depth, ..Parameters::default() }, &Parameters::default())
}

fn flow(depth: u32, ring_bytes: u32) -> Flow {
    Flow::new(&counted(depth), ring_bytes, 4 * ring_bytes, ring_bytes)
}

#[test]
fn credits_are_the_depth_less_two() {
    let mut flow = flow(4, 1000);
    assert!(flow.post_message(10).is_ok());
    assert!(flow.post_content().is_ok());
    assert_eq!(flow.post_message(10), Err(Blocked { wanted: 0 }));
    assert_eq!(flow.post_content(), Err(Blocked { wanted: 0 }));
    assert!(!flow.has_credit() && flow.may_try_message(), "it may ask");
    let ask = flow.ask(Blocked { wanted: 0 }).unwrap();
    assert_eq!(ask, Ask { counts: Counts::default(), answers: 0, wanted: 0 });
    assert!(flow.is_asking() && !flow.may_try_message() && !flow.may_try_content());
    assert_eq!(flow.ask(Blocked { wanted: 0 }), None, "one is unanswered");
    flow.take_answer(Answer { counts: Counts { receives: 2, ring_bytes: 10 }, asks: 1 }).unwrap();
    assert!(flow.has_credit() && flow.may_try_message());
    assert_eq!(flow.open().immediates, 0);
}

#[test]
fn in_mode_original_one_message_is_in_flight_and_any_number_of_contents() {
    let mode_original = Parameters { mode: Mode::Original, ..Parameters::default() };
    let mut flow = Flow::new(&Agreed::of(&mode_original, &Parameters::default()), 100, 100, 100);
    assert_eq!(flow.acknowledged(), Err(PeerMisbehaved::AcknowledgementUnasked));
    flow.post_message(100).unwrap();
    assert!(!flow.may_try_message() && flow.may_try_content());
    assert!((0..3).all(|_| flow.post_content().is_ok()), "contents need no credit");
    flow.acknowledged().unwrap();
    assert!(flow.may_try_message());
    assert!(flow.post_message(100).is_ok(), "the whole ring is free again");
}

#[test]
fn who_asked_for_room_tries_again_when_there_is_as_much_as_it_wants() {
    let mut flow = flow(8, 100);
    flow.post_message(60).unwrap();
    let blocked = flow.post_message(41).unwrap_err();
    flow.ask(blocked).unwrap();
    assert!(!flow.may_try_message(), "one byte is missing");
    assert!(flow.may_try_content(), "there are credits");
    flow.take_message(1, Counts { receives: 0, ring_bytes: 1 }).unwrap();
    assert!(flow.may_try_message());
}

#[test]
fn a_ring_is_filled_to_the_last_byte_and_no_further() {
    let mut flow = flow(64, 100);
    let place = flow.post_message(60).unwrap();
    assert_eq!((place.first.offset, place.first.length, place.second.length), (0, 60, 0));
    assert_eq!(flow.post_message(41), Err(Blocked { wanted: 41 }));
    let place = flow.post_message(40).unwrap();
    assert_eq!((place.first.offset, place.first.length, place.second.length), (60, 40, 0));
    assert_eq!(flow.post_message(1), Err(Blocked { wanted: 1 }));
    flow.take_message(13, Counts { receives: 1, ring_bytes: 60 }).unwrap();
    assert!(flow.post_message(60).is_ok());
    flow.take_message(13, Counts { receives: 3, ring_bytes: 160 }).unwrap();
    let place = flow.post_message(50).unwrap();
    assert_eq!((place.first.offset, place.first.length), (60, 40));
    assert_eq!((place.second.offset, place.second.length), (0, 10));
    let consumer = RingConsumer::new(100);
    assert!(consumer.place(100).is_some() && consumer.place(101).is_none());
}

#[test]
fn messages_of_no_bytes_or_above_the_ring_never_get_a_place() {
    let mut flow = flow(64, 100);
    assert_eq!(flow.post_message(0), Err(Blocked { wanted: 0 }));
    assert_eq!(flow.post_message(101), Err(Blocked { wanted: 101 }));
    assert!(flow.post_message(100).is_ok());
}

#[test]
fn counts_go_out_when_half_the_depth_or_half_the_ring_is_unreturned() {
    let mut flow = flow(8, 100);
    for _ in 0..3 {
        flow.take_content().unwrap();
        assert!(!flow.is_return_due());
    }
    flow.take_content().unwrap();
    assert!(flow.is_return_due(), "half the depth");
    flow.post_message(13).unwrap();
    assert!(!flow.is_return_due(), "they went with the message");
    flow.take_message(49, Counts::default()).unwrap();
    assert!(!flow.is_return_due());
    flow.take_message(1, Counts::default()).unwrap();
    assert!(flow.is_return_due(), "half the ring");
    assert!(flow.ask(Blocked { wanted: 0 }).is_some());
    assert!(!flow.is_return_due(), "they went with the ASK");
}

#[test]
fn d_counts_above_what_was_sent_or_lower_than_before_are_refused() {
    let returned = |receives, ring_bytes| {
        let mut flow = flow(8, 100);
        flow.post_message(10).unwrap();
        flow.post_message(10).unwrap();
        flow.take_message(1, Counts { receives: 1, ring_bytes: 10 }).unwrap();
        flow.take_message(1, Counts { receives, ring_bytes })
    };
    assert_eq!(returned(2, 20), Ok(()));
    assert_eq!(returned(1, 10), Ok(()));
    for (receives, bytes) in [(3, 20), (2, 21), (0, 10), (1, 9), (u32::MAX, 10), (1, u32::MAX)] {
        assert_eq!(returned(receives, bytes), Err(PeerMisbehaved::ReturnedTooMuch), "{receives} {bytes}");
    }
}

#[test]
fn counts_start_over_after_the_largest() {
    let mut flow = flow(64, 1 << 16);
    let mut produced = 0u64;
    for sent in 1..=(1u64 << 18) {
        flow.post_message(1 << 16).unwrap();
        produced += 1 << 16;
        let counts = Counts { receives: sent as u32, ring_bytes: produced as u32 };
        flow.take_message(1, counts).unwrap();
        flow.ask(Blocked { wanted: 0 }).unwrap();
        flow.take_answer(Answer { counts, asks: sent as u32 }).unwrap();
    }
    assert!(produced > u64::from(u32::MAX) && flow.open().ring_bytes == 0);
}

#[test]
fn a_ring_grows_by_doubling_up_to_its_maximum_and_only_for_want_of_room() {
    let own = flow(8, 100);
    assert_eq!(own.growth(0, 400), None, "credits are missing, not room");
    assert_eq!(own.growth(1, 400), Some(200));
    assert_eq!(own.growth(1, 150), Some(150));
    assert_eq!(own.growth(1, 100), None);
    let mut own = flow(8, 100);
    own.offer_ring(200);
    assert_eq!(own.growth(1, 400), None, "an offer is open");
    assert_eq!(own.take_ring_move(), Ok(200));
    assert_eq!(own.growth(1, 400), Some(400));
}

#[test]
fn a_ring_is_offered_larger_than_the_present_one_and_within_the_maximum_or_refused() {
    let offered = |capacity| {
        let mut flow = flow(8, 100);
        flow.take_ring_offer(Destination { region: 1, generation: 1, offset: 0, capacity, result: None })
    };
    for capacity in [101, 400] {
        assert_eq!(offered(capacity), Ok(()), "{capacity}");
    }
    for capacity in [0, 100, 401, 101 + (1 << 32)] {
        assert_eq!(offered(capacity), Err(PeerMisbehaved::RingOfferUnfit), "{capacity}");
    }
}

#[test]
fn what_the_old_ring_still_holds_takes_no_room_in_the_new_one() {
    let mut flow = flow(64, 100);
    flow.post_message(87).unwrap();
    let ring = Destination { region: 1, generation: 1, offset: 0, capacity: 200, result: None };
    flow.take_ring_offer(ring).unwrap();
    flow.post_message(13).unwrap();
    assert_eq!(flow.move_ring(), Some(ring));
    let place = flow.post_message(200).unwrap();
    assert_eq!((place.first.offset, place.first.length), (0, 200));
    assert_eq!(flow.post_message(1), Err(Blocked { wanted: 1 }));
    // The old ring's bytes come back first and free nothing here.
    flow.take_message(1, Counts { receives: 2, ring_bytes: 100 }).unwrap();
    assert_eq!(flow.post_message(1), Err(Blocked { wanted: 1 }));
    flow.take_message(1, Counts { receives: 3, ring_bytes: 300 }).unwrap();
    assert!(flow.post_message(200).is_ok());
}

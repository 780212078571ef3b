//! Flow control of one side whose peer sends anything. This side never posts more than it may, and never loses count.

use tensorwire_protocol::{
    Agreed, Destination, Mode, Parameters, PeerMisbehaved,
    credit::{Answer, Ask, Blocked, Counts, Flow},
    limits::{DEPTH_MAX, DEPTH_MIN, RING_BYTES_MAX, RING_BYTES_MIN},
    wire::record::RECORD_BYTES_MAX,
};

use crate::input::Input;

struct End {
    flow: Flow,
    mode: Mode,
    /// The peer's ring, and whether a larger successor of the own ring was offered.
    ring_bytes: u32,
    posted: Counts,
    asks: u32,
}

pub(crate) fn credit(data: &[u8]) {
    let mut input = Input::new(data);
    let (own, peer) = (parameters(&mut input), parameters(&mut input));
    let agreed = Agreed::of(&own, &peer);
    let ring_bytes = peer.first_ring_bytes();
    let flow = Flow::new(&agreed, ring_bytes, peer.ring_bytes, own.first_ring_bytes());
    let mut end = End { flow, mode: agreed.mode, ring_bytes, posted: Counts::default(), asks: 0 };
    while !input.is_empty() {
        let step = if input.flag() { end.acts(&mut input, own.ring_bytes) } else { end.hears(&mut input) };
        if let Err(rule) = step {
            assert!(!rule.to_string().is_empty());
            return;
        }
        end.check(agreed.depth);
    }
}

/// Offers that a decoded frame can have.
fn parameters(input: &mut Input<'_>) -> Parameters {
    let mode = input.pick(&[Mode::Counted, Mode::Counted, Mode::Counted, Mode::Original]);
    let depth = DEPTH_MIN + input.below((DEPTH_MAX - DEPTH_MIN) as usize + 1) as u32 % (1 << input.below(13));
    let ring_bytes = RING_BYTES_MIN + input.below((RING_BYTES_MAX - RING_BYTES_MIN) as usize + 1) as u32;
    let parameters = Parameters { mode, depth, ring_bytes, ..Parameters::default() };
    parameters.check().unwrap();
    parameters
}

impl End {
    /// This side acts without an arrival.
    fn acts(&mut self, input: &mut Input<'_>, own_ring_bytes_max: u32) -> Result<(), PeerMisbehaved> {
        match input.below(6) {
            0 | 1 => self.post(1 + input.below(RECORD_BYTES_MAX) as u32),
            2 => {
                if self.flow.post_content().is_err() {
                    self.ask(Blocked { wanted: 0 });
                } else if self.mode == Mode::Counted {
                    self.posted.receives = self.posted.receives.wrapping_add(1);
                }
            }
            3 => self.ask(Blocked { wanted: input.below(RECORD_BYTES_MAX) as u32 }),
            4 => {
                if let Some(ring) = self.flow.move_ring() {
                    self.ring_bytes = u32::try_from(ring.capacity).unwrap();
                }
            }
            _ => {
                if let Some(bytes) = self.flow.growth(1, own_ring_bytes_max) {
                    assert!(bytes <= own_ring_bytes_max);
                    self.flow.offer_ring(bytes);
                }
            }
        }
        Ok(())
    }

    fn post(&mut self, length: u32) {
        match self.flow.post_message(length) {
            Ok(place) => {
                let (first, second) = (place.first, place.second);
                assert_eq!(first.length + second.length, length);
                assert!(first.length > 0 && first.offset + first.length <= self.ring_bytes);
                assert!(second.length == 0 || first.offset + first.length == self.ring_bytes);
                assert!(second.offset == 0 && second.length <= first.offset, "it runs into itself");
                self.posted.receives = self.posted.receives.wrapping_add(1);
                self.posted.ring_bytes = self.posted.ring_bytes.wrapping_add(length);
            }
            Err(blocked) => self.ask(blocked),
        }
    }

    fn ask(&mut self, blocked: Blocked) {
        let was_asking = self.flow.is_asking();
        let ask = self.flow.ask(blocked);
        assert_eq!(ask.is_some(), self.mode == Mode::Counted && !was_asking);
        self.asks = self.asks.wrapping_add(u32::from(ask.is_some()));
    }

    /// The peer sends something.
    fn hears(&mut self, input: &mut Input<'_>) -> Result<(), PeerMisbehaved> {
        let counts = self.counts(input);
        match (self.mode, input.below(8)) {
            (Mode::Original, 0) => self.flow.acknowledged(),
            (Mode::Original, _) => self.flow.take_content(),
            (_, 0 | 1) => self.flow.take_message(input.below(RECORD_BYTES_MAX) as u32, counts),
            (_, 2) => self.flow.take_content(),
            (_, 3) => {
                let answers = if input.flag() { self.asks_answered() } else { input.u32() };
                let answer = self.flow.take_ask(Ask { counts, answers, wanted: input.number() as u32 })?;
                assert_eq!(answer.counts, self.flow.counts());
                Ok(())
            }
            (_, 4 | 5) => {
                let asks = if input.flag() { self.asks } else { input.u32() };
                self.flow.take_answer(Answer { counts, asks })
            }
            (_, 6) => {
                let capacity = input.number();
                let ring = Destination { region: 1, generation: 1, offset: 0, capacity, result: None };
                self.flow.take_ring_offer(ring)
            }
            _ => self.flow.take_ring_move().map(drop),
        }
    }

    /// The counts of everything that was posted, or any counts.
    fn counts(&self, input: &mut Input<'_>) -> Counts {
        match input.below(4) {
            0 | 1 => self.posted,
            2 => {
                let back = input.u8();
                let receives = self.posted.receives.wrapping_sub(u32::from(back & 3));
                Counts { receives, ring_bytes: self.posted.ring_bytes.wrapping_sub(u32::from(back >> 2)) }
            }
            _ => Counts { receives: input.u32(), ring_bytes: input.u32() },
        }
    }

    /// How many ASKs of the peer this side has answered. It is found by trying: an ASK with another number is refused.
    fn asks_answered(&self) -> u32 {
        let mut copy = self.flow.clone();
        let ask = |answers| Ask { counts: self.posted, answers, wanted: 0 };
        (0..8).find(|&answers| copy.take_ask(ask(answers)).is_ok()).unwrap_or(0)
    }

    fn check(&self, depth: u32) {
        let open = self.flow.open();
        assert!(open.immediates <= self.flow.credits(), "{open:?}");
        if self.mode == Mode::Counted {
            assert!(self.flow.credits() < depth, "two receives are kept apart");
            assert!(open.unreturned <= self.flow.credits(), "{open:?}");
        }
        assert!(self.flow.has_credit() == (open.immediates < self.flow.credits()));
    }
}

//! Measures the round trip of a device: the time from posting a small request to its completion. It includes the peer's
//! device, but neither program.

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::Runtime;

use super::doorbell::Doorbell;

/// One of this many requests is timed, so that reading the clock costs little.
const SAMPLED: u32 = 16;

/// The most bytes of a timed request. More bytes take time by themselves.
const SMALL: u64 = 1 << 10;

/// Times some of the requests of one queue pair.
#[derive(Debug)]
pub(super) struct RoundTrip {
    clock: Arc<dyn Runtime>,
    /// How many requests are still skipped before the next one is timed.
    until_next: u32,
    /// The number of the request that is being timed, and when it was posted.
    under_way: Option<(u64, Duration)>,
    /// The shortest time, because completions are often noticed late. Each longer sample raises it by at most 1/16, so
    /// that it follows a route to the peer that becomes longer.
    shortest: Option<Duration>,
}

impl RoundTrip {
    pub(super) fn new(clock: Arc<dyn Runtime>) -> Self {
        Self { clock, until_next: 0, under_way: None, shortest: None }
    }

    /// Called before the requests of `doorbell` are posted. `first` is the number of the first one; `is_alone` if no
    /// other request is outstanding.
    pub(super) fn posts(&mut self, first: u64, doorbell: &Doorbell, is_alone: bool) {
        if !is_alone || self.under_way.is_some() || doorbell.len() != 1 || doorbell.bytes() > SMALL {
            return;
        }
        if self.until_next > 0 {
            self.until_next -= 1;
            return;
        }
        self.until_next = SAMPLED - 1;
        self.under_way = Some((first, self.clock.now()));
    }

    /// Called when all requests up to number `sequence` are complete.
    pub(super) fn returned(&mut self, sequence: u64) {
        let Some((_, begin)) = self.under_way.take_if(|(number, _)| *number <= sequence) else { return };
        let sample = self.clock.now().saturating_sub(begin);
        self.shortest = Some(self.shortest.map_or(sample, |shortest| sample.min(shortest + shortest / 16)));
    }

    /// The shortest recent time; `None` before the first.
    pub(super) fn shortest(&self) -> Option<Duration> {
        self.shortest
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tensorwire_fabric::BoxFuture;

    use super::*;
    use crate::{
        doorbell::{Part, Request, Work},
        message::Message,
    };

    /// A clock that a test sets.
    #[derive(Debug, Default)]
    struct Clock(AtomicU64);

    impl Clock {
        fn advance(&self, micros: u64) {
            self.0.fetch_add(micros, Ordering::Relaxed);
        }
    }

    impl Runtime for Clock {
        fn spawn(&self, _: &'static str, _: BoxFuture<'static, ()>) {}

        fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
            Box::pin(std::future::pending())
        }

        fn now(&self) -> Duration {
            Duration::from_micros(self.0.load(Ordering::Relaxed))
        }

        fn random(&self) -> u64 {
            0
        }
    }

    fn doorbell(requests: usize) -> Doorbell {
        let mut doorbell = Doorbell::new();
        doorbell.begin(usize::MAX);
        let work = Work::Message(Message::Farewell);
        for _ in 0..requests {
            assert!(doorbell.push(Request { work, part: Part::Piece, is_signaled: true }, &[]));
        }
        doorbell
    }

    fn micros(round_trip: &RoundTrip) -> Option<u128> {
        round_trip.shortest().map(|shortest| shortest.as_micros())
    }

    #[test]
    fn the_shortest_of_late_counts() {
        let clock = Arc::new(Clock::default());
        let mut round_trip = RoundTrip::new(clock.clone());
        let mut number = 0;
        let mut sample = |round_trip: &mut RoundTrip, micros| {
            for _ in 0..SAMPLED {
                round_trip.posts(number, &doorbell(1), true);
                clock.advance(micros);
                round_trip.returned(number);
                number += 1;
            }
        };
        sample(&mut round_trip, 320);
        assert_eq!(micros(&round_trip), Some(320));
        sample(&mut round_trip, 64);
        assert_eq!(micros(&round_trip), Some(64));
        sample(&mut round_trip, 1000);
        assert_eq!(micros(&round_trip), Some(68), "one that was noticed late");
        for _ in 0..100 {
            sample(&mut round_trip, 500);
        }
        assert_eq!(micros(&round_trip), Some(500), "the way has become longer");
    }

    #[test]
    fn only_what_is_alone_and_has_come_back_is_timed() {
        let clock = Arc::new(Clock::default());
        let mut round_trip = RoundTrip::new(clock.clone());
        round_trip.posts(0, &doorbell(2), true);
        round_trip.posts(2, &doorbell(1), false);
        clock.advance(5);
        round_trip.returned(2);
        assert_eq!(micros(&round_trip), None);
        round_trip.posts(3, &doorbell(1), true);
        clock.advance(5);
        round_trip.returned(2);
        assert_eq!(micros(&round_trip), None, "an earlier one");
        clock.advance(5);
        round_trip.returned(4);
        assert_eq!(micros(&round_trip), Some(10), "a later completion ends it too");
    }
}

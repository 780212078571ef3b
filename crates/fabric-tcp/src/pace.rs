//! A limit on the rate of an event that peers cause.

use std::time::Duration;

/// A rate limit: each event joins a queue that moves on at fixed intervals and may have up to `burst` entries.
///
/// Times are those of [`Runtime::now`](tensorwire_fabric::Runtime::now), or any others that do not go back.
#[derive(Debug, Clone)]
pub struct Pace {
    interval: Duration,
    burst: u32,
    /// When the queue will be empty.
    empty_at: Duration,
}

impl Pace {
    /// Allows one event per `interval`, and `burst` at once.
    pub const fn new(interval: Duration, burst: u32) -> Self {
        Self { interval, burst, empty_at: Duration::ZERO }
    }

    /// Counts one more event.
    pub fn count(&mut self, now: Duration) {
        // Events beyond the limit do not make the queue grow without bound.
        let longest = now.saturating_add(self.interval.saturating_mul(self.burst).saturating_mul(2));
        self.empty_at = self.empty_at.max(now).saturating_add(self.interval).min(longest);
    }

    /// How long the queue stays longer than `burst`; zero if it is not.
    pub fn wait(&self, now: Duration) -> Duration {
        self.empty_at.saturating_sub(now.saturating_add(self.interval.saturating_mul(self.burst)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(7);
    const INTERVAL: Duration = Duration::from_millis(5);
    const BURST: u32 = 64;

    fn after(events: u32) -> Pace {
        let mut pace = Pace::new(INTERVAL, BURST);
        (0..events).for_each(|_| pace.count(NOW));
        pace
    }

    #[test]
    fn a_burst_lets_nobody_wait() {
        assert_eq!(after(0).wait(NOW), Duration::ZERO);
        assert_eq!(after(BURST).wait(NOW), Duration::ZERO);
    }

    #[test]
    fn intervals_at_their_ends_are_paces() {
        for interval in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            for burst in [0, 1, u32::MAX] {
                let mut pace = Pace::new(interval, burst);
                (0..3).for_each(|_| pace.count(NOW));
                assert!(pace.wait(NOW) <= interval.saturating_mul(3), "{interval:?}, {burst}");
            }
        }
    }

    #[test]
    fn each_event_beyond_it_takes_its_time() {
        assert_eq!(after(BURST + 3).wait(NOW), INTERVAL * 3);
        assert_eq!(after(BURST + 3).wait(NOW + INTERVAL * 2), INTERVAL);
        assert_eq!(after(BURST + 3).wait(NOW + INTERVAL * 3), Duration::ZERO);
    }

    #[test]
    fn events_that_are_over_count_no_more() {
        let mut pace = after(BURST);
        let later = NOW + INTERVAL * BURST;
        (0..BURST).for_each(|_| pace.count(later));
        assert_eq!(pace.wait(later), Duration::ZERO);
    }

    #[test]
    fn the_wait_is_bounded() {
        assert_eq!(after(100_000).wait(NOW), INTERVAL * BURST);
    }
}

//! A limit on how often peers may cause something.

use std::time::Duration;

/// A pace: each event takes a place in a line that moves on at fixed intervals, and up to `burst` may stand there at once.
///
/// Times are those of [`Runtime::now`](tensorwire_verbs_reactor::Runtime::now), or any others that do not go back.
#[derive(Debug, Clone)]
pub struct Pace {
    interval: Duration,
    burst: u32,
    /// When the line will be empty.
    empty_at: Duration,
}

impl Pace {
    /// One event per `interval` for ever, and `burst` at once.
    pub const fn new(interval: Duration, burst: u32) -> Self {
        Self { interval, burst, empty_at: Duration::ZERO }
    }

    /// One more event.
    pub fn count(&mut self, now: Duration) {
        // Events that come although the line is full do not make it grow without end.
        let longest = now + self.interval * self.burst * 2;
        self.empty_at = (self.empty_at.max(now) + self.interval).min(longest);
    }

    /// For how long the line is longer than `burst`; zero if it is not.
    pub fn wait(&self, now: Duration) -> Duration {
        self.empty_at.saturating_sub(now + self.interval * self.burst)
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

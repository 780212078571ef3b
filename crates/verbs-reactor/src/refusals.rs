//! How fast a listener goes on after peers that it had to refuse.

use std::time::Duration;

/// What one refusal is taken for: peers are refused at 200 a second for ever.
const INTERVAL: Duration = Duration::from_millis(5);

/// Refusals that may come at once before anybody waits for them.
const BURST: u32 = 64;

/// The pace of a listener. Whoever comes with a wrong secret, garbage or nothing but an end costs it some work, and the next of
/// them follows at once: without a pace they take all the time that there is. So each refusal takes a place in a
/// line that moves at 200 a second, and while more than 64 stand there nobody further is let in. Peers who prove themselves take no
/// place, however many come.
///
/// Times are those of [`Runtime::now`](crate::Runtime::now).
#[derive(Debug, Clone, Default)]
pub struct RefusalPace {
    /// When the line will be empty.
    empty_at: Duration,
}

impl RefusalPace {
    /// A peer was refused.
    pub fn refused(&mut self, now: Duration) {
        // Those who had been let in before the line was full do not make it grow without end.
        let longest = now + INTERVAL * BURST * 2;
        self.empty_at = (self.empty_at.max(now) + INTERVAL).min(longest);
    }

    /// For how long nobody further is to be let in; zero if the next may come.
    pub fn wait(&self, now: Duration) -> Duration {
        self.empty_at.saturating_sub(now + INTERVAL * BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(7);

    fn after(refusals: u32) -> RefusalPace {
        let mut pace = RefusalPace::default();
        (0..refusals).for_each(|_| pace.refused(NOW));
        pace
    }

    #[test]
    fn a_burst_lets_nobody_wait() {
        assert_eq!(after(0).wait(NOW), Duration::ZERO);
        assert_eq!(after(BURST).wait(NOW), Duration::ZERO);
    }

    #[test]
    fn each_refusal_beyond_it_takes_its_time() {
        assert_eq!(after(BURST + 3).wait(NOW), INTERVAL * 3);
        assert_eq!(after(BURST + 3).wait(NOW + INTERVAL * 2), INTERVAL);
        assert_eq!(after(BURST + 3).wait(NOW + INTERVAL * 3), Duration::ZERO);
    }

    #[test]
    fn refusals_that_are_over_count_no_more() {
        let mut pace = after(BURST);
        let later = NOW + INTERVAL * BURST;
        (0..BURST).for_each(|_| pace.refused(later));
        assert_eq!(pace.wait(later), Duration::ZERO);
    }

    #[test]
    fn the_wait_is_bounded() {
        assert_eq!(after(100_000).wait(NOW), INTERVAL * BURST);
    }
}

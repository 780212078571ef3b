//! The pace at which requests of one peer are refused.
//!
//! A refusal costs this worker as much as an answer, and the peer next to nothing: it needs no memory for a value, and no value
//! runs out. So a peer whose requests are all refused could take as much of the worker's thread as there is. Refused requests
//! count among those that the peer may have outstanding until they are answered, so late refusals slow its requests down, and
//! those of nobody else.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_fabric_tcp::Pace;

/// Requests of one connection that are refused at once: as many as its peer may have outstanding, and this many at least.
const AT_ONCE_MIN: u32 = 1024;

/// After those, one is refused in each of these, which is a few hundredths of a thread.
const INTERVAL: Duration = Duration::from_micros(200);

/// Refusals that wait are sent together, so that the process wakes for them once in this time.
const TOGETHER: Duration = Duration::from_millis(10);

/// Counts the requests of one connection that are refused.
pub(crate) struct Refusals {
    runtime: Arc<dyn Runtime>,
    pace: Mutex<Pace>,
}

impl fmt::Debug for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refusals").finish_non_exhaustive()
    }
}

impl Refusals {
    /// `requests_max` is how many requests the peer may have outstanding.
    pub(crate) fn new(runtime: Arc<dyn Runtime>, requests_max: u32) -> Self {
        Self { runtime, pace: Mutex::new(Pace::new(INTERVAL, requests_max.max(AT_ONCE_MIN))) }
    }

    /// Counts one more. Returns what it waits for, if it is not refused at once.
    pub(crate) fn turn(&self) -> Option<BoxFuture<'static, ()>> {
        let now = self.runtime.now();
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        pace.count(now);
        let wait = pace.wait(now);
        drop(pace);
        (!wait.is_zero()).then(|| self.runtime.sleep(until_together(now, wait)))
    }
}

/// From `now` until those are sent that wait until `wait` is over.
fn until_together(now: Duration, wait: Duration) -> Duration {
    let since_last = (now + wait).as_nanos() % TOGETHER.as_nanos();
    // Less than `TOGETHER`.
    wait + TOGETHER - Duration::from_nanos(since_last as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the peers in these tests.
    const OUTSTANDING: u32 = 256;

    /// A clock that a test sets, and how long its sleeps are.
    #[derive(Debug, Default)]
    struct Clock {
        now: Mutex<Duration>,
        slept: Mutex<Vec<Duration>>,
    }

    impl Runtime for Clock {
        fn spawn(&self, _: &'static str, _: BoxFuture<'static, ()>) {}

        fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
            self.slept.lock().unwrap().push(duration);
            Box::pin(std::future::ready(()))
        }

        fn now(&self) -> Duration {
            *self.now.lock().unwrap()
        }

        fn random(&self) -> u64 {
            0
        }
    }

    fn refusals(requests_max: u32) -> (Refusals, Arc<Clock>) {
        let clock = Arc::new(Clock::default());
        *clock.now.lock().unwrap() = Duration::from_micros(7_654_321);
        (Refusals::new(clock.clone(), requests_max), clock)
    }

    /// When the next refusal is sent.
    fn next(refusals: &Refusals, clock: &Clock) -> Duration {
        let waits = refusals.turn().is_some();
        let slept = clock.slept.lock().unwrap().pop();
        assert_eq!(slept.is_some(), waits);
        clock.now() + slept.unwrap_or_default()
    }

    #[test]
    fn as_many_as_may_be_outstanding_are_refused_at_once_and_a_thousand_at_least() {
        for (requests_max, at_once) in [(1, AT_ONCE_MIN), (256, AT_ONCE_MIN), (16 << 10, 16 << 10)] {
            let (refusals, _clock) = refusals(requests_max);
            let count = (0..=at_once).take_while(|_| refusals.turn().is_none()).count();
            assert_eq!(count, at_once as usize);
        }
    }

    #[test]
    fn s6_a_peer_that_always_has_requests_is_refused_so_many_a_second_whatever_it_does() {
        let (refusals, clock) = refusals(OUTSTANDING);
        let (began, seconds) = (clock.now(), 10);
        let mut sent: Vec<Duration> = Vec::new();
        // Each is sent when the one that was outstanding before it has been refused.
        for number in 0.. {
            if let Some(before) = usize::checked_sub(number, OUTSTANDING as usize) {
                *clock.now.lock().unwrap() = sent[before];
            }
            let at = next(&refusals, &clock);
            if at >= began + Duration::from_secs(seconds) {
                break;
            }
            sent.push(at);
        }
        let most = AT_ONCE_MIN + (Duration::from_secs(seconds).as_micros() / INTERVAL.as_micros()) as u32;
        assert!(sent.len() <= most as usize, "{} of {most}", sent.len());
        assert!(sent.len() > most as usize * 98 / 100, "it goes on: {} of {most}", sent.len());
        let mut wake_ups: Vec<_> = sent.into_iter().filter(|at| *at > began).collect();
        wake_ups.dedup();
        let ticks = Duration::from_secs(seconds).as_millis() / TOGETHER.as_millis();
        assert!(wake_ups.len() as u128 <= ticks, "{} of {ticks}", wake_ups.len());
    }

    #[test]
    fn no_refusal_waits_long_and_after_a_rest_none_does() {
        for requests_max in [OUTSTANDING, 16 << 10] {
            let (refusals, clock) = refusals(requests_max);
            let began = clock.now();
            // As many as may be outstanding, after all that are refused at once.
            let at_once = requests_max.max(AT_ONCE_MIN);
            let latest = (0..at_once + requests_max).map(|_| next(&refusals, &clock)).max().unwrap();
            let longest = INTERVAL * requests_max + TOGETHER;
            assert!(latest <= began + longest, "{:?} of {longest:?}", latest - began);
            *clock.now.lock().unwrap() = latest + INTERVAL * at_once;
            assert!((0..at_once).all(|_| refusals.turn().is_none()));
        }
    }
}

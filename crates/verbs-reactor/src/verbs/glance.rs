//! A task that awaits an arrival may poll the completion queue itself, while the connection's driver does so too. An
//! arrival that it finds costs no change of tasks and no system call. But all other tasks of its thread wait meanwhile,
//! so it polls
//!
//! - about as long as an answer takes that is under way;
//! - only while that finds arrivals often enough;
//! - at most a few finds in a row, then the others run;
//! - only if this side has posted something since the latest arrival. A task that hands arrivals to others awaits the next
//!   one before those others have run, and that one may depend on what they are going to post.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::Runtime;

/// Polls between two readings of the clock. They take about a microsecond.
const LOOKS: u32 = 16;

/// Polling lasts so many round trips of the device, and [`ANSWERS`].
const ROUND_TRIPS: u32 = 2;

/// The time that the peer's program has for its answer.
const ANSWERS: Duration = Duration::from_micros(2);

/// The most time that one call polls, because it blocks a thread of the runtime.
const LONGEST: Duration = Duration::from_micros(250);

/// After so many finds in a row, one call does not poll, so that other tasks have a turn.
const HITS_IN_A_ROW: u32 = 16;

/// The most credit. A task polls only while there is credit. Each find adds one.
const CREDIT_MAX: u32 = 8;

/// The credit that polling without a find costs.
const MISS: u32 = 2;

/// Without credit, one call in so many polls all the same.
const TRIAL: u32 = 64;

/// Shared by the driver of a connection and the tasks that await arrivals. The values are heuristics, so relaxed loads
/// and stores are enough: a lost update does no harm.
#[derive(Debug)]
pub(super) struct Glances {
    clock: Arc<dyn Runtime>,
    /// How long one call polls, in nanoseconds; 0 while the driver does not poll.
    limit_ns: AtomicU64,
    /// The device's round trip, in nanoseconds; 0 if it is not known.
    round_trip_ns: AtomicU64,
    /// Something was posted since the latest arrival, so that an answer may be under way.
    has_asked: AtomicBool,
    credit: AtomicU32,
    /// Calls that did not poll for lack of credit.
    left_out: AtomicU32,
    hits_in_a_row: AtomicU32,
    hits: AtomicU64,
}

impl Glances {
    pub(super) fn new(clock: Arc<dyn Runtime>) -> Self {
        Self {
            clock,
            limit_ns: AtomicU64::new(0),
            round_trip_ns: AtomicU64::new(0),
            has_asked: AtomicBool::new(false),
            credit: AtomicU32::new(CREDIT_MAX),
            left_out: AtomicU32::new(0),
            hits_in_a_row: AtomicU32::new(0),
            hits: AtomicU64::new(0),
        }
    }

    /// Sets how long the device takes for a round trip.
    pub(super) fn set_round_trip(&self, round_trip: Duration) {
        let ns = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX);
        self.round_trip_ns.store(ns, Ordering::Relaxed);
    }

    /// How long the device takes for a round trip; `None` while it is unknown.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        let ns = self.round_trip_ns.load(Ordering::Relaxed);
        (ns > 0).then_some(Duration::from_nanos(ns))
    }

    /// Sets whether tasks that await an arrival may poll.
    pub(super) fn allow(&self, is_allowed: bool) {
        let longest = || (ANSWERS + ROUND_TRIPS * self.round_trip().unwrap_or_default()).min(LONGEST);
        let limit = if is_allowed { longest() } else { Duration::ZERO };
        self.limit_ns.store(limit.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Notes that something was posted, so that an answer may be under way.
    pub(super) fn asks(&self) {
        self.has_asked.store(true, Ordering::Relaxed);
    }

    /// Notes an arrival. It is taken as the answer to everything that was posted before.
    pub(super) fn heard(&self) {
        self.has_asked.store(false, Ordering::Relaxed);
    }

    /// How often polling found something.
    pub(super) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Calls `finds` until it gives true or the time is over, if polling is worth it now. Gives whether it did.
    pub(super) fn look(&self, finds: impl Fn() -> bool) -> bool {
        let limit = Duration::from_nanos(self.limit_ns.load(Ordering::Relaxed));
        if limit.is_zero() || !self.has_asked.load(Ordering::Relaxed) || !self.is_worth_it() {
            return false;
        }
        let found = self.look_for(limit, finds);
        let credit = self.credit.load(Ordering::Relaxed);
        if found {
            self.hits.fetch_add(1, Ordering::Relaxed);
            self.hits_in_a_row.fetch_add(1, Ordering::Relaxed);
            self.credit.store((credit + 1).min(CREDIT_MAX), Ordering::Relaxed);
        } else {
            self.hits_in_a_row.store(0, Ordering::Relaxed);
            self.credit.store(credit.saturating_sub(MISS), Ordering::Relaxed);
        }
        found
    }

    fn look_for(&self, limit: Duration, finds: impl Fn() -> bool) -> bool {
        let begin = self.clock.now();
        loop {
            for _ in 0..LOOKS {
                if finds() {
                    return true;
                }
            }
            if self.clock.now().saturating_sub(begin) >= limit {
                return false;
            }
        }
    }

    fn is_worth_it(&self) -> bool {
        if self.hits_in_a_row.load(Ordering::Relaxed) >= HITS_IN_A_ROW {
            self.hits_in_a_row.store(0, Ordering::Relaxed);
            return false;
        }
        if self.credit.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let is_trial = self.left_out.fetch_add(1, Ordering::Relaxed) % TRIAL == TRIAL - 1;
        if is_trial {
            self.credit.store(MISS, Ordering::Relaxed);
        }
        is_trial
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::tests::Clock;

    fn glances() -> (Glances, Arc<Clock>) {
        let clock = Arc::new(Clock::default());
        let glances = Glances::new(clock.clone());
        glances.asks();
        (glances, clock)
    }

    /// One call whose find comes after `micros`. Gives whether it was found, and how long the call polled.
    fn look(glances: &Glances, clock: &Clock, micros: u64) -> (bool, u64) {
        let begin = glances.clock.now();
        let spent = || glances.clock.now().saturating_sub(begin).as_micros() as u64;
        let found = glances.look(|| {
            clock.advance(1);
            spent() >= micros
        });
        (found, spent())
    }

    #[test]
    fn nobody_looks_unless_the_driver_does() {
        let (glances, clock) = glances();
        assert_eq!(look(&glances, &clock, 0), (false, 0));
        glances.allow(true);
        assert!(look(&glances, &clock, 0).0);
        glances.allow(false);
        assert_eq!(look(&glances, &clock, 0), (false, 0));
    }

    #[test]
    fn who_hands_an_arrival_on_does_not_look_before_the_others_have_answered_it() {
        let (glances, clock) = glances();
        glances.allow(true);
        for _ in 0..HITS_IN_A_ROW {
            assert!(look(&glances, &clock, 0).0, "the request");
            glances.heard();
            assert_eq!(look(&glances, &clock, 0), (false, 0), "the others have not run");
            glances.asks();
        }
        assert_eq!(glances.credit.load(Ordering::Relaxed), CREDIT_MAX, "nothing was looked for in vain");
    }

    #[test]
    fn looks_as_long_as_an_answer_takes_and_holds_no_thread_long() {
        for (round_trip, least, most) in [(3, 8, 24), (60, 122, 140), (10_000, 250, 270)] {
            let (glances, clock) = glances();
            glances.set_round_trip(Duration::from_micros(round_trip));
            glances.allow(true);
            assert!(look(&glances, &clock, least).0, "{round_trip}");
            let (found, spent) = look(&glances, &clock, u64::MAX);
            assert!(!found && (least..=most).contains(&spent), "{round_trip}: {spent}");
        }
    }

    #[test]
    fn looking_that_finds_nothing_ends_and_is_tried_again() {
        let (glances, clock) = glances();
        glances.allow(true);
        for _ in 0..CREDIT_MAX / MISS {
            assert!(look(&glances, &clock, u64::MAX).1 > 0);
        }
        for _ in 1..TRIAL {
            assert_eq!(look(&glances, &clock, 1), (false, 0));
        }
        assert!(look(&glances, &clock, 1).0, "a trial");
        assert!(look(&glances, &clock, 1).0, "it paid off");
        assert_eq!(glances.hits(), 2);
    }

    #[test]
    fn others_get_a_turn_however_much_is_found() {
        let (glances, clock) = glances();
        glances.allow(true);
        for _ in 0..3 {
            for _ in 0..HITS_IN_A_ROW {
                assert!(look(&glances, &clock, 1).0);
            }
            assert_eq!(look(&glances, &clock, 1), (false, 0));
        }
    }
}

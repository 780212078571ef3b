//! Tests of waiting, on a clock that the test sets.

use std::{cell::Cell, sync::atomic::AtomicU64};

use super::*;
use crate::BoxFuture;

/// A clock that a test sets.
#[derive(Debug, Default)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    pub(crate) fn advance(&self, micros: u64) {
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

fn patience(wait: Wait) -> (Patience, Arc<Clock>) {
    let clock = Arc::new(Clock::default());
    (Patience::new(Spinner::new(wait), clock.clone()), clock)
}

/// One wait that ends after `micros`. Returns whether it slept.
fn wait(patience: &mut Patience, clock: &Clock, micros: u64) -> bool {
    for _ in 0..micros {
        if patience.idle(false, || Look::Idle) == Idle::Sleep {
            break;
        }
        clock.advance(1);
    }
    let slept = patience.slept;
    let now = clock.0.load(Ordering::Relaxed);
    let since = patience.since.map_or(now, |since| since.as_micros() as u64);
    clock.advance((since + micros).saturating_sub(now));
    patience.worked();
    slept
}

#[test]
fn the_budget_grows_while_looking_pays_off_and_ends_with_an_idle_gap() {
    let (mut patience, clock) = patience(Wait::Adaptive);
    assert!(wait(&mut patience, &clock, 10), "nothing is known yet");
    assert!(!wait(&mut patience, &clock, 3), "within the first budget");
    for _ in 0..3 {
        wait(&mut patience, &clock, 3);
    }
    assert!(!wait(&mut patience, &clock, 18), "within the full budget");
    assert!(wait(&mut patience, &clock, 1000), "past every budget");
    assert_eq!(patience.idle(false, || Look::Idle), Idle::Sleep, "an idle gap");
}

#[test]
fn looking_rests_when_it_does_not_pay_off() {
    let (mut patience, clock) = patience(Wait::Adaptive);
    // No budget covers the waits for this regular peer: the budget grows to the longest before the driver knows that.
    for budget in [4, 8, 16, 20].map(Duration::from_micros) {
        assert!(wait(&mut patience, &clock, 100));
        assert_eq!(patience.budget, budget);
    }
    for _ in 1..MISSES_MAX {
        assert!(wait(&mut patience, &clock, 100));
        assert_eq!(patience.budget, BUDGET_MAX);
    }
    for _ in 0..=REST_WAITS {
        assert!(wait(&mut patience, &clock, 100));
        assert_eq!(patience.budget, Duration::ZERO, "it rests");
    }
    assert!(wait(&mut patience, &clock, 100));
    assert_eq!(patience.budget, BUDGET_MIN, "and tries again");
}

#[test]
fn one_wait_that_looking_covers_forgives_the_misses() {
    let (mut patience, clock) = patience(Wait::Adaptive);
    for _ in 0..4 * MISSES_MAX {
        wait(&mut patience, &clock, 100);
        wait(&mut patience, &clock, 3);
    }
    assert_eq!(patience.budget, BUDGET_MAX);
}

#[test]
fn a_peer_on_this_cpu_gets_it_at_once_and_a_wake_up_for_nothing_is_not_waited_for() {
    let (mut patience, clock) = patience(Wait::Adaptive);
    wait(&mut patience, &clock, 3);
    assert_eq!(patience.idle(true, || panic!("looked")), Idle::GiveWay);
    clock.advance(BUDGET_MAX.as_micros() as u64);
    assert_eq!(patience.idle(true, || panic!("looked")), Idle::Sleep, "it has had the CPU for long enough");
    assert_eq!(patience.idle(false, || panic!("looked")), Idle::Sleep, "woken for nothing");
    patience.worked();
    assert_eq!(patience.idle(false, || Look::Idle), Idle::GiveWay);
}

#[test]
fn the_longest_budget_may_be_at_its_ends() {
    for longest in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        let (patience, clock) = patience(Wait::Adaptive);
        let mut patience = patience.with_budgets_up_to(longest);
        for _ in 0..80 {
            wait(&mut patience, &clock, 3);
            assert!(patience.budget <= longest, "{longest:?}");
        }
        patience.expect_copy(1 << 20);
        wait(&mut patience, &clock, 3);
        patience.follow(longest);
        wait(&mut patience, &clock, 3);
        assert!(patience.budget <= BUDGET_LONGEST, "{longest:?}");
    }
}

#[test]
fn a_turn_that_came_back_late_ends_the_looking() {
    for (micros, budget) in [(20, BUDGET_MAX), (21, Duration::ZERO)] {
        for is_found in [true, false] {
            let (mut patience, clock) = patience(Wait::Adaptive);
            for _ in 0..5 {
                wait(&mut patience, &clock, 3);
            }
            assert_eq!(patience.idle(false, || Look::Idle), Idle::GiveWay);
            clock.advance(micros);
            if is_found {
                patience.worked();
            } else {
                assert_eq!(patience.idle(false, || Look::Idle), Idle::Sleep);
            }
            assert_eq!(patience.budget, budget, "after a turn of {micros} µs");
            patience.worked();
            assert_eq!(patience.gave_way, None, "passed on once");
        }
    }
}

#[test]
fn a_peers_copy_is_looked_through_unless_it_is_long() {
    for (bytes, looks_on) in [(0, false), (1 << 20, true), (16 << 20, false)] {
        let (mut patience, clock) = patience(Wait::Adaptive);
        for _ in 0..5 {
            wait(&mut patience, &clock, 3);
        }
        patience.expect_copy(bytes);
        assert_eq!(patience.idle(false, || Look::Idle), Idle::GiveWay);
        patience.turn_was_used();
        clock.advance(100);
        let idle = if looks_on { Idle::GiveWay } else { Idle::Sleep };
        assert_eq!(patience.idle(false, || Look::Idle), idle, "{bytes} bytes");
    }
}

#[test]
fn one_of_many_spins() {
    let (mut first, clock) = patience(Wait::Adaptive);
    let mut second = Patience::new(first.spinner.clone(), clock.clone());
    for patience in [&mut first, &mut second] {
        wait(patience, &clock, 3);
    }
    assert_eq!(first.idle(false, || Look::Idle), Idle::GiveWay);
    assert_eq!(second.idle(false, || panic!("looked")), Idle::Sleep);
    second.worked();
    drop(first);
    assert_eq!(second.idle(false, || Look::Idle), Idle::GiveWay, "the turn came back");
}

/// The times of the steps between two peers, in microseconds.
#[derive(Debug, Clone, Copy)]
struct Costs {
    one_way: u64,
    wake_up: u64,
    answer: u64,
}

/// Ends the wait of `patience`, which began at `since`, for an arrival at `at`. Returns when it is taken, and
/// whether the wait slept.
fn take(patience: &mut Patience, clock: &Clock, since: u64, at: u64, wake_up: u64) -> (u64, bool) {
    clock.0.store(since, Ordering::Relaxed);
    for _ in since..at {
        if patience.idle(false, || Look::Idle) == Idle::Sleep {
            break;
        }
        clock.advance(1);
    }
    let slept = patience.slept;
    let taken = if slept { at + wake_up } else { at };
    clock.0.store(taken, Ordering::Relaxed);
    patience.worked();
    (taken, slept)
}

/// Plays a ping-pong of messages. Returns how many of the last hundred waits slept.
fn sleeps_of_ping_pong(costs: Costs, follows: bool) -> usize {
    let mut ends = [Wait::Adaptive; 2].map(patience);
    if follows {
        // The round trip of the device alone.
        ends.iter_mut().for_each(|(patience, _)| patience.follow(Duration::from_micros(2 * costs.one_way)));
    }
    let (mut posted, mut since, mut slept) = (0, [0, 0], Vec::new());
    for turn in 0..300 {
        let end = (turn + 1) % 2;
        let (patience, clock) = &mut ends[end];
        let (taken, sleeps) = take(patience, clock, since[end], posted + costs.one_way, costs.wake_up);
        posted = taken + costs.answer;
        since[end] = posted;
        slept.push(sleeps);
    }
    slept.iter().skip(200).filter(|&&slept| slept).count()
}

#[test]
fn two_peers_that_sleep_meet_awake_whatever_the_device_takes() {
    let hardware = Costs { one_way: 1, wake_up: 4, answer: 1 };
    let on_idle_virtual_cores = Costs { wake_up: 35, ..hardware };
    let emulated = Costs { one_way: 35, wake_up: 250, answer: 20 };
    for costs in [hardware, on_idle_virtual_cores, emulated] {
        assert_eq!(sleeps_of_ping_pong(costs, true), 0, "{costs:?}");
    }
    // No constant that suits hardware covers this.
    assert_eq!(sleeps_of_ping_pong(emulated, false), 100);
}

#[test]
fn what_takes_longer_than_the_device_explains_is_slept_through() {
    // Twelve milliseconds of work before each answer, on two devices and on one that hardly answers at all.
    for one_way in [1, 35, 5_000] {
        let slow = Costs { one_way, wake_up: 4, answer: 12_000 };
        assert_eq!(sleeps_of_ping_pong(slow, true), 100, "{slow:?}");
    }
}

#[test]
fn a_turn_that_others_used_says_nothing() {
    let (mut patience, clock) = patience(Wait::Adaptive);
    for _ in 0..5 {
        wait(&mut patience, &clock, 3);
    }
    assert_eq!(patience.idle(false, || Look::Idle), Idle::GiveWay);
    clock.advance(1000);
    patience.turn_was_used();
    patience.worked();
    assert_eq!(patience.budget, BUDGET_MAX);
}

#[test]
fn busy_never_sleeps_and_sleep_never_looks() {
    let (mut busy, clock) = patience(Wait::Busy);
    for _ in 0..10 {
        clock.advance(1_000_000);
        assert_eq!(busy.idle(true, || Look::Idle), Idle::GiveWay);
    }
    assert_eq!(busy.idle(false, || Look::Worked), Idle::Work);
    let (mut sleepy, _) = patience(Wait::Sleep);
    assert_eq!(sleepy.idle(false, || panic!("looked")), Idle::Sleep);
}

#[test]
fn looking_ends_at_the_first_look_that_is_in_vain() {
    for wait in [Wait::Adaptive, Wait::Busy] {
        let (mut patience, clock) = patience(wait);
        for _ in 0..5 {
            self::wait(&mut patience, &clock, 3);
        }
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            Look::InVain
        };
        assert_eq!((patience.idle(false, look), looks.get()), (Idle::GiveWay, 1), "{wait:?}");
    }
}

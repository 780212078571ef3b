//! Whether a rank yields its CPU to other ranks before it sleeps.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use super::member::Member;

/// The longest time without a message for which a rank does not sleep.
pub(super) const WAIT_MAX: Duration = Duration::from_micros(200);

/// If other processes keep the CPU for longer than this, they do not all wait for ranks.
pub(super) const TURN_MAX: Duration = Duration::from_millis(1);

/// After this many calls without a sleep, the runtime's other tasks run.
const COMPLETED_MAX: u32 = 64;

/// The most waits that begin with a sleep after one in vain.
const REST_MAX: u32 = 1024;

/// What a rank knows about the CPUs of its machine. If the machine has more ranks than CPUs, a rank that polls blocks the rank that it waits
/// for, and a rank that sleeps must be woken. So a rank yields its CPU between two polls. Where that finds nothing, for example between
/// ranks that share a thread, the rank sleeps at once the next times.
///
/// The counts are heuristic, so races between threads do no harm.
#[derive(Debug)]
pub(super) struct Crowd {
    is_crowded: bool,
    /// Calls without a sleep since the runtime's other tasks ran.
    completed: AtomicU32,
    /// The number of coming waits that begin with a sleep.
    rest: AtomicU32,
    /// The initial value of the latest `rest`.
    latest_rest: AtomicU32,
}

impl Crowd {
    /// For rank `rank` of `members`.
    pub(super) fn new(rank: usize, members: &[Member]) -> Self {
        let own = members.get(rank).map(Member::machine);
        let ranks = members.iter().filter(|member| Some(member.machine()) == own).count();
        let cpus = thread::available_parallelism().map_or(usize::MAX, usize::from);
        // Two ranks poll each other's connection, which knows whether they share a CPU.
        Self::of(ranks > cpus.max(2))
    }

    fn of(is_crowded: bool) -> Self {
        Self {
            is_crowded,
            completed: AtomicU32::new(0),
            rest: AtomicU32::new(0),
            latest_rest: AtomicU32::new(0),
        }
    }

    /// Whether the next wait begins without a sleep.
    pub(super) fn may_yield(&self) -> bool {
        let rest = self.rest.load(Ordering::Relaxed);
        self.rest.store(rest.saturating_sub(1), Ordering::Relaxed);
        self.is_crowded && rest == 0
    }

    /// Whether the runtime's other tasks should run now. After true, the count starts again.
    pub(super) fn other_tasks_are_due(&self) -> bool {
        let is_due = self.completed.load(Ordering::Relaxed) >= COMPLETED_MAX;
        if is_due {
            self.completed.store(0, Ordering::Relaxed);
        }
        is_due
    }

    /// A call was completed without a sleep. If it has yielded, that paid off.
    pub(super) fn completed(&self, has_yielded: bool) {
        self.completed.store(self.completed.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        if has_yielded {
            self.latest_rest.store(self.latest_rest.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
    }

    /// A wait was in vain.
    pub(super) fn missed(&self) {
        let rest = (2 * self.latest_rest.load(Ordering::Relaxed) + 1).min(REST_MAX);
        self.latest_rest.store(rest, Ordering::Relaxed);
        self.rest.store(rest, Ordering::Relaxed);
    }

    /// The CPU has work that awaits no rank. Each yield costs a time slice, which a rank that is woken need not wait for.
    pub(super) fn is_busy(&self) {
        self.rest.store(REST_MAX, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ranks` ranks that listen at `addresses`, in turn.
    fn members(ranks: usize, addresses: &[&str]) -> Vec<Member> {
        let mut addresses = addresses.iter().cycle();
        let mut member = || {
            let address = addresses.next().unwrap();
            Member::decode(format!("tensorwire group 2\nw\n{address}\n0\n0\n\n").as_bytes()).unwrap()
        };
        (0..ranks).map(|_| member()).collect()
    }

    #[test]
    fn more_ranks_of_a_machine_than_it_has_cpus_are_a_crowd() {
        let ranks = 1 + thread::available_parallelism().map_or(1, usize::from).max(2);
        assert!(Crowd::new(1, &members(ranks, &["h:1", "h:2"])).may_yield());
        assert!(!Crowd::new(1, &members(ranks - 1, &["h:1"])).may_yield());
        assert!(!Crowd::new(1, &members(ranks, &["h:1", "other:1"])).may_yield(), "two machines");
        assert!(!Crowd::new(1, &members(2, &["h:1"])).may_yield());
    }

    /// How many waits begin with a sleep.
    fn rest(crowd: &Crowd) -> usize {
        (0..).take_while(|_| !crowd.may_yield()).count()
    }

    #[test]
    fn waits_in_vain_are_followed_by_ever_more_that_begin_with_a_sleep() {
        let crowd = Crowd::of(true);
        let miss = || {
            crowd.missed();
            rest(&crowd)
        };
        assert_eq!([miss(), miss(), miss()], [1, 3, 7]);
        (0..20).for_each(|_| {
            miss();
        });
        assert_eq!(miss(), REST_MAX as usize);
        (0..10).for_each(|_| crowd.completed(true));
        crowd.completed(false);
        crowd.missed();
        assert_eq!(rest(&crowd), 3, "a yield that pays off counts for as much");
    }

    #[test]
    fn after_a_turn_of_other_work_a_rank_sleeps_at_once_for_long() {
        let crowd = Crowd::of(true);
        crowd.is_busy();
        assert_eq!(rest(&crowd), REST_MAX as usize);
        crowd.missed();
        assert_eq!(rest(&crowd), 1, "that was no wait in vain");
    }

    #[test]
    fn other_tasks_run_after_many_calls_without_a_sleep() {
        let crowd = Crowd::of(true);
        for _ in 0..2 {
            assert!(!crowd.other_tasks_are_due());
            (0..COMPLETED_MAX).for_each(|_| crowd.completed(false));
            assert!(crowd.other_tasks_are_due());
        }
    }
}

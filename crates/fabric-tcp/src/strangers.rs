//! The number of connections with unproven peers that a listener admits, and when it admits the next one.

use std::{
    os::fd::{BorrowedFd, RawFd},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec};
use tensorwire_memory::Limit;

use crate::pace::Pace;

/// The interval of the pace of refusals: 200 a second.
const REFUSAL_INTERVAL: Duration = Duration::from_millis(5);

/// Refusals that may come at once before new connections must wait.
const REFUSALS_AT_ONCE: u32 = 64;

/// The share of the strangers that may be evicted at once after a wait.
const AT_ONCE_SHARE: usize = 8;

/// Descriptors of the process that strangers must leave free: an honest peer needs some for its connections.
const DESCRIPTORS_LEFT: u64 = 16;

/// The number of strangers that are allowed while fewer descriptors than that are left. Several, so that one that sends
/// nothing does not block the others.
const FEWEST_WHILE_SOME_ARE_LEFT: usize = 4;

/// How long fewer strangers are allowed after descriptors ran short.
const SHORTAGE: Duration = Duration::from_secs(10);

/// The limits of one listener on its strangers: the connections whose peers have not proven themselves. The listener
/// has the list of strangers, and the grace period of each, in which it may not be evicted.
///
/// A peer that sends a wrong secret, garbage or only the end of the stream costs the listener some work, and the next
/// one may follow at once. Without a limit such peers would use all of the listener's time. So each refusal joins a
/// queue that moves at 200 a second, and while it has more than 64 entries no further connection is admitted. Peers
/// that prove themselves are not counted, however many come.
///
/// Times are those of [`Runtime::now`](tensorwire_fabric::Runtime::now).
#[derive(Debug)]
pub(crate) struct StrangerLimit {
    most: usize,
    /// While descriptors are short: the lower limit, and until when it applies.
    fewer: Option<(usize, Duration)>,
    refusals: Pace,
}

impl StrangerLimit {
    /// Allows at most `most` strangers, and at least one.
    pub(crate) fn new(most: usize) -> Self {
        let refusals = Pace::new(REFUSAL_INTERVAL, REFUSALS_AT_ONCE);
        Self { most: most.max(1), fewer: None, refusals }
    }

    /// Records that a peer was refused for what it sent.
    pub(crate) fn refused(&mut self, now: Duration) {
        self.refusals.count(now);
    }

    /// Records that `newest` was accepted while there were `strangers` strangers. The system assigns the lowest free
    /// number, so all lower ones are in use. If few are left, fewer strangers are allowed.
    pub(crate) fn accepted(&mut self, newest: RawFd, strangers: usize, now: Duration) {
        let used = u64::try_from(newest).unwrap_or(0) + 1;
        if Limit::OpenFiles.value().is_some_and(|most| used + DESCRIPTORS_LEFT > most) {
            // More than one, because a single stranger would block all others for its grace period.
            self.make_fewer((strangers / 2).max(FEWEST_WHILE_SOME_ARE_LEFT), now);
        }
    }

    /// Records that descriptors ran short while there were `strangers` strangers. For some time half as many are
    /// allowed.
    pub(crate) fn out_of_descriptors(&mut self, strangers: usize, now: Duration) {
        if strangers > 0 {
            self.make_fewer((strangers / 2).max(1), now);
        }
    }

    fn make_fewer(&mut self, fewer: usize, now: Duration) {
        self.fewer = Some((fewer, now + SHORTAGE));
    }

    /// The most strangers at any time. Before one more is admitted, others are evicted until there are fewer.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// The limit that applies now. Strangers above it whose grace period is over are evicted.
    pub(crate) fn most_now(&self, now: Duration) -> usize {
        match self.fewer {
            Some((fewer, until)) if now < until => self.most.min(fewer),
            _ => self.most,
        }
    }

    /// How long no further connection is accepted; zero if the next may come. `graces` are what is left of the grace
    /// periods of all strangers.
    ///
    /// If no stranger may be evicted yet, the wait lasts until several may be. So a flood wakes the process once for
    /// several connections instead of once for each.
    pub(crate) fn wait(&self, graces: impl ExactSizeIterator<Item = Duration>, now: Duration) -> Duration {
        let refusals = self.refusals.wait(now);
        if graces.len() < self.most_now(now) {
            return refusals;
        }
        let mut graces: Vec<Duration> = graces.collect();
        graces.sort_unstable();
        match graces.first() {
            None | Some(&Duration::ZERO) => refusals,
            Some(_) => graces[graces.len().div_ceil(AT_ONCE_SHARE) - 1].max(refusals),
        }
    }
}

/// Whether a connection waits to be accepted. Without a free descriptor, accepting fails with the same error whether
/// one waits or not.
pub(crate) fn connection_waits(listener: BorrowedFd<'_>) -> bool {
    let at_once = Timespec::default();
    rustix::event::poll(&mut [PollFd::from_borrowed_fd(listener, PollFlags::IN)], Some(&at_once)) == Ok(1)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const NOW: Duration = Duration::from_secs(7);

    fn milliseconds(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn wait(limit: &StrangerLimit, graces: &[u64]) -> Duration {
        limit.wait(graces.iter().map(|&grace| milliseconds(grace)), NOW)
    }

    #[test]
    fn the_next_waits_until_several_may_be_pushed_out() {
        let limit = StrangerLimit::new(16);
        let graces: Vec<u64> = (10..26).rev().collect();
        assert_eq!(wait(&limit, &graces[1..]), Duration::ZERO, "there is room");
        assert_eq!(wait(&limit, &graces), milliseconds(11), "the first two of 16");
        assert_eq!(wait(&limit, &[&graces[1..], &[0]].concat()), Duration::ZERO, "one may be pushed out");
        let graces: Vec<u64> = (10..27).rev().collect();
        assert_eq!(wait(&StrangerLimit::new(17), &graces), milliseconds(12), "the first three of 17");
    }

    #[test]
    fn one_stranger_may_always_be_there() {
        assert_eq!([0, 1, 16].map(|most| StrangerLimit::new(most).most()), [1, 1, 16]);
    }

    #[test]
    fn refusals_make_the_next_wait_whether_there_is_room_or_not() {
        let mut limit = StrangerLimit::new(2);
        (0..REFUSALS_AT_ONCE + 3).for_each(|_| limit.refused(NOW));
        assert_eq!(wait(&limit, &[]), REFUSAL_INTERVAL * 3);
        assert_eq!(wait(&limit, &[1, 1]), REFUSAL_INTERVAL * 3);
        assert_eq!(wait(&limit, &[50, 50]), milliseconds(50));
    }

    #[test]
    fn a_shortage_of_descriptors_halves_the_strangers_for_a_while() {
        let mut limit = StrangerLimit::new(64);
        limit.out_of_descriptors(40, NOW);
        assert_eq!((limit.most_now(NOW), limit.most_now(NOW + SHORTAGE)), (20, 64));
        limit.out_of_descriptors(1, NOW);
        assert_eq!(limit.most_now(NOW), 1, "one may always come");
        let mut limit = StrangerLimit::new(64);
        limit.out_of_descriptors(0, NOW);
        assert_eq!(limit.most_now(NOW), 64, "those that are used up are not the strangers'");
    }

    #[test]
    fn who_waits_is_seen_without_accepting() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!connection_waits(listener.as_fd()));
        let _waits = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(connection_waits(listener.as_fd()));
        let _accepted = listener.accept().unwrap();
        assert!(!connection_waits(listener.as_fd()));
    }

    #[test]
    fn a_number_near_the_limit_is_a_shortage() {
        let mut limit = StrangerLimit::new(64);
        let last_far = RawFd::try_from(Limit::OpenFiles.value().unwrap() - DESCRIPTORS_LEFT).unwrap() - 1;
        limit.accepted(last_far, 40, NOW);
        assert_eq!(limit.most_now(NOW), 64);
        limit.accepted(last_far + 1, 40, NOW);
        assert_eq!(limit.most_now(NOW), 20);
        (0..10).for_each(|_| limit.accepted(last_far + 1, limit.most_now(NOW), NOW));
        assert_eq!(limit.most_now(NOW), FEWEST_WHILE_SOME_ARE_LEFT);
    }
}

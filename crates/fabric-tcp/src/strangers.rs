//! How many peers that have not proven themselves a listener keeps, and when it lets in the next one.

use std::{
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    time::Duration,
};

use tensorwire_memory::Limit;

use crate::pace::Pace;

/// What one refusal is taken for: peers are refused at 200 a second for ever.
const REFUSAL_INTERVAL: Duration = Duration::from_millis(5);

/// Refusals that may come at once before anybody waits for them.
const REFUSALS_AT_ONCE: u32 = 64;

/// Which part of the strangers may be pushed out at once after a wait.
const AT_ONCE_SHARE: usize = 8;

/// Descriptors of the process that strangers leave to everything else: an honest peer needs some for its connections.
const DESCRIPTORS_LEFT: u64 = 16;

/// How many strangers are allowed while fewer descriptors than that are left: several, so that one that only waits does
/// not keep the others out.
const FEWEST_WHILE_SOME_ARE_LEFT: usize = 4;

/// For how long fewer strangers are allowed after descriptors ran short.
const SHORTAGE: Duration = Duration::from_secs(10);

/// What one listener decides about its strangers: the connections whose peers have not proven themselves. The
/// listener has the list of them, and knows for how long each may not be pushed out yet: its grace.
///
/// Whoever comes with a wrong secret, garbage or nothing but an end costs the listener some work, and the next of them follows
/// at once: without a pace they take all the time that there is. So each refusal takes a place in a line that moves at
/// 200 a second, and while more than 64 stand there nobody further is let in. Peers who prove themselves take no place,
/// however many come.
///
/// Times are those of [`Runtime::now`](tensorwire_verbs_reactor::Runtime::now).
#[derive(Debug)]
pub(crate) struct StrangerLimit {
    most: usize,
    /// While descriptors are short: fewer, until then.
    fewer: Option<(usize, Duration)>,
    refusals: Pace,
}

impl StrangerLimit {
    /// At most `most` strangers, and at least one.
    pub(crate) fn new(most: usize) -> Self {
        let refusals = Pace::new(REFUSAL_INTERVAL, REFUSALS_AT_ONCE);
        Self { most: most.max(1), fewer: None, refusals }
    }

    /// A peer was refused for what it sent.
    pub(crate) fn refused(&mut self, now: Duration) {
        self.refusals.count(now);
    }

    /// `newest` was just accepted, and `strangers` were there before it. The system gives out the lowest free number, so those
    /// below are in use: where few are left, strangers have to make room.
    pub(crate) fn accepted(&mut self, newest: RawFd, strangers: usize, now: Duration) {
        let used = u64::try_from(newest).unwrap_or(0) + 1;
        if Limit::OpenFiles.value().is_some_and(|most| used + DESCRIPTORS_LEFT > most) {
            // More than one: a single stranger would keep all others out for its grace.
            self.make_fewer((strangers / 2).max(FEWEST_WHILE_SOME_ARE_LEFT), now);
        }
    }

    /// Descriptors have run short, and `strangers` have some: for a while half as many may.
    pub(crate) fn out_of_descriptors(&mut self, strangers: usize, now: Duration) {
        if strangers > 0 {
            self.make_fewer((strangers / 2).max(1), now);
        }
    }

    fn make_fewer(&mut self, fewer: usize, now: Duration) {
        self.fewer = Some((fewer, now + SHORTAGE));
    }

    /// How many strangers there may be at any time. Before one more is let in, others are pushed out until there are fewer.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// How many there are to be now: those above that, whose grace is over, are pushed out.
    pub(crate) fn most_now(&self, now: Duration) -> usize {
        match self.fewer {
            Some((fewer, until)) if now < until => self.most.min(fewer),
            _ => self.most,
        }
    }

    /// For how long no further connection is accepted; zero if the next may come. `graces` are those of all strangers.
    ///
    /// Where it has to be waited until somebody may be pushed out, the wait lasts until several may be, so that a flood wakes
    /// the process for every few of its connections instead of for each.
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

/// Whether a connection waits to be accepted. Without a descriptor to be had, accepting fails with the same error whether
/// somebody waits or not.
pub(crate) fn somebody_waits(listener: BorrowedFd<'_>) -> bool {
    let mut asked = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `asked` is one valid entry, and the call does not wait.
    unsafe { libc::poll(&raw mut asked, 1, 0) == 1 }
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
        assert!(!somebody_waits(listener.as_fd()));
        let _waits = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(somebody_waits(listener.as_fd()));
        let _accepted = listener.accept().unwrap();
        assert!(!somebody_waits(listener.as_fd()));
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

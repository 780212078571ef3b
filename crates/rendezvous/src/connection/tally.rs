//! Counts of the values and connections with a peer, for reports. The metrics count the same at the same places.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use tensorwire_protocol::report::Traffic;

/// Values of one direction. Each direction has a cache line of its own, because different tasks may count them.
///
/// Two atomic additions take about a twenty-fifth of a fetch out of a catalogue, and six times as long as plain ones. So the first thread
/// that counts has numbers that it alone writes, and needs none: most workers run on one thread, or receive from a peer on one.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Moved {
    /// The first thread that has counted; 0 before.
    owner: AtomicUsize,
    by_owner: Numbers,
    by_others: Numbers,
}

#[derive(Debug, Default)]
struct Numbers {
    values: AtomicU64,
    bytes: AtomicU64,
}

impl Moved {
    /// Counts a value of `bytes` bytes.
    pub(crate) fn count(&self, bytes: u64) {
        if self.is_owner(THREAD.with(|thread| *thread)) {
            add_alone(&self.by_owner.values, 1);
            add_alone(&self.by_owner.bytes, bytes);
        } else {
            self.add(1, bytes);
        }
    }

    fn add(&self, values: u64, bytes: u64) {
        add(&self.by_others.values, values);
        add(&self.by_others.bytes, bytes);
    }

    fn is_owner(&self, thread: usize) -> bool {
        match self.owner.load(Ordering::Relaxed) {
            0 => self.owner.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok(),
            owner => owner == thread,
        }
    }

    /// Values and their bytes so far.
    fn sums(&self) -> (u64, u64) {
        let [owner, others] = [&self.by_owner, &self.by_others]
            .map(|numbers| (numbers.values.load(Ordering::Relaxed), numbers.bytes.load(Ordering::Relaxed)));
        (owner.0 + others.0, owner.1.wrapping_add(others.1))
    }
}

/// The number of the last thread that has counted.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The number of this thread, which no other thread gets.
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed) + 1;
}

/// Adds to a counter that this thread alone writes.
fn add_alone(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// Counts of values and connections.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) received: Moved,
    pub(crate) sent: Moved,
    pub(crate) errors: AtomicU64,
    pub(crate) connects: AtomicU64,
    pub(crate) reconnects: AtomicU64,
    pub(crate) losses: AtomicU64,
}

impl Tally {
    /// The counts so far.
    pub(crate) fn traffic(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut traffic = Traffic::default();
        (traffic.values_received, traffic.bytes_received) = self.received.sums();
        (traffic.values_sent, traffic.bytes_sent) = self.sent.sums();
        (traffic.errors, traffic.connects) = (read(&self.errors), read(&self.connects));
        (traffic.reconnects, traffic.losses) = (read(&self.reconnects), read(&self.losses));
        traffic
    }

    fn add(&self, traffic: &Traffic) {
        self.received.add(traffic.values_received, traffic.bytes_received);
        self.sent.add(traffic.values_sent, traffic.bytes_sent);
        add(&self.errors, traffic.errors);
        add(&self.connects, traffic.connects);
        add(&self.reconnects, traffic.reconnects);
        add(&self.losses, traffic.losses);
    }
}

/// Adds to a counter of a tally.
pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// The counts of one peer. When the worker forgets the peer they are added to those of all forgotten ones, so that a sum over all peers
/// never gets smaller.
#[derive(Debug)]
pub(crate) struct PeerTally {
    tally: Tally,
    forgotten: Arc<Tally>,
}

impl PeerTally {
    pub(crate) fn new(forgotten: &Arc<Tally>) -> Arc<Self> {
        Arc::new(Self { tally: Tally::default(), forgotten: forgotten.clone() })
    }
}

impl std::ops::Deref for PeerTally {
    type Target = Tally;

    fn deref(&self) -> &Tally {
        &self.tally
    }
}

impl Drop for PeerTally {
    fn drop(&mut self) {
        self.forgotten.add(&self.tally.traffic());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_counted_that_several_threads_count() {
        let moved = Moved::default();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let moved = &moved;
                scope.spawn(move || (0..10_000).for_each(|_| moved.count(thread)));
            }
        });
        assert_eq!(moved.sums(), (40_000, 60_000));
        assert!(
            moved.by_owner.values.load(Ordering::Relaxed) >= 10_000,
            "one of them needs no atomic addition"
        );
    }

    #[test]
    fn counts_of_a_forgotten_peer_stay_in_the_sum() {
        let forgotten = Arc::new(Tally::default());
        for bytes in [7, 5] {
            let peer = PeerTally::new(&forgotten);
            peer.sent.count(bytes);
            peer.received.count(2 * bytes);
            for counter in [&peer.errors, &peer.connects, &peer.reconnects, &peer.losses] {
                add(counter, bytes);
            }
            assert_eq!((peer.traffic().values_sent, peer.traffic().bytes_received), (1, 2 * bytes));
        }
        let sum = forgotten.traffic();
        assert_eq!((sum.values_sent, sum.bytes_sent), (2, 12));
        assert_eq!((sum.values_received, sum.bytes_received), (2, 24));
        assert_eq!([sum.errors, sum.connects, sum.reconnects, sum.losses], [12; 4]);
    }
}

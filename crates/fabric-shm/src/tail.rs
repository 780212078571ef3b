//! The positions of this side's ring. Threads post concurrently: each takes positions, and then publishes descriptors
//! in them. The peer executes descriptors in order, so it waits at a position that is taken and not yet published. Each
//! thread rings the peer after it has published, so the peer is awake for the last of them.

use crate::sync::{AtomicU64, Ordering};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Tail {
    /// The next position.
    next: AtomicU64,
    /// End of the positions that [`take_quiet`](Self::take_quiet) may return.
    quiet_until: AtomicU64,
}

impl Tail {
    pub(super) fn new() -> Self {
        Self { next: AtomicU64::new(0), quiet_until: AtomicU64::new(0) }
    }

    /// The next position. If the peer's count was read before this call, the peer had executed nothing from this
    /// position on.
    pub(super) fn next(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Takes `count` positions and returns the first. The caller has the producer's lock, and knows that there is room
    /// beside what quiet descriptors [may take](Self::allow_quiet).
    pub(super) fn take(&self, count: u64) -> u64 {
        self.next.fetch_add(count, Ordering::Relaxed)
    }

    /// Takes a position for a quiet descriptor, without a lock; `None` if none is allowed.
    #[inline]
    pub(super) fn take_quiet(&self) -> Option<u64> {
        // Pairs with the store in `allow_quiet`: the thread that allows the position knows that the peer has finished
        // reading its slot.
        let until = self.quiet_until.load(Ordering::Acquire);
        let mut next = self.next();
        while next < until {
            match self.next.compare_exchange_weak(next, next + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(taken) => return Some(taken),
                Err(now) => next = now,
            }
        }
        None
    }

    /// Quiet descriptors may take the positions before `until`. The caller has the producer's lock. A thread may still
    /// use the earlier limit.
    pub(super) fn allow_quiet(&self, until: u64) {
        self.quiet_until.store(until, Ordering::Release);
    }
}

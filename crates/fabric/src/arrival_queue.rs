//! Arrivals that were not taken yet.

use std::{collections::VecDeque, mem, sync::PoisonError};

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Arrivals in order. One task at a time passes them on.
#[derive(Debug)]
pub(crate) struct ArrivalQueue<A> {
    queued: Mutex<Queued<A>>,
    /// The number of arrivals in `queued`, plus the one that is being passed on. Read without the lock.
    waiting: AtomicU64,
}

#[derive(Debug)]
struct Queued<A> {
    arrivals: VecDeque<A>,
    is_handing_on: bool,
}

impl<A> ArrivalQueue<A> {
    pub(crate) fn new() -> Self {
        let queued = Queued { arrivals: VecDeque::new(), is_handing_on: false };
        Self { queued: Mutex::new(queued), waiting: AtomicU64::new(0) }
    }

    /// The number of arrivals that wait, including the one that is being passed on. If it is zero, all earlier
    /// arrivals were passed on, so the task that finds the next one may pass it on at once.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Acquire)
    }

    /// Adds `arrival`, unless `depth` of them wait already.
    pub(crate) fn push(&self, arrival: A, depth: u32) -> Result<(), A> {
        let mut queued = self.lock();
        if queued.arrivals.len() >= depth as usize {
            return Err(arrival);
        }
        queued.arrivals.push_back(arrival);
        self.count(&queued);
        Ok(())
    }

    /// Passes on at most `most` arrivals, unless another task is doing so. Returns whether more are queued, or `None`
    /// if this call did nothing.
    pub(crate) fn hand_on(&self, most: u32, mut take: impl FnMut(A)) -> Option<bool> {
        let mut queued = self.lock();
        if queued.arrivals.is_empty() || mem::replace(&mut queued.is_handing_on, true) {
            return None;
        }
        for _ in 0..most {
            let Some(arrival) = queued.arrivals.pop_front() else { break };
            drop(queued);
            take(arrival);
            queued = self.lock();
        }
        queued.is_handing_on = false;
        // Only now: until here, later arrivals must be queued behind the one that is passed on.
        self.count(&queued);
        Some(!queued.arrivals.is_empty())
    }

    fn count(&self, queued: &Queued<A>) {
        let waiting = queued.arrivals.len() + usize::from(queued.is_handing_on);
        self.waiting.store(waiting as u64, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Queued<A>> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! A queue of work for a worker that one thread at a time may use. Any thread submits work at any time, and never waits
//! for the worker's lock: a thread that holds it also does the work that others have submitted meanwhile.

use std::{
    sync::{PoisonError, TryLockError},
    vec::Drain,
};

use crate::sync::{Mutex, MutexGuard};

/// Does the submitted work. One thread at a time uses it.
pub(super) trait Worker {
    type Work;
    type Error;

    /// Whether it takes work now. If it refuses work that need not be done `at_once`, its owner must call
    /// [`Submissions::collect`] later.
    fn takes_work(&self, at_once: bool) -> bool;

    /// Takes work over. Called with the lock of submitted work held, so it must be fast.
    fn take(&mut self, work: Drain<'_, Self::Work>);

    /// Does the work that it has taken. This may be slow.
    fn work(&mut self) -> Result<(), Self::Error>;
}

/// See the module's documentation. The locks are taken in the order of the fields.
#[derive(Debug)]
pub(super) struct Submissions<W: Worker> {
    worker: Mutex<W>,
    /// Held for a few instructions only.
    submitted: Mutex<Submitted<W::Work>>,
}

#[derive(Debug)]
struct Submitted<T> {
    is_open: bool,
    work: Vec<T>,
}

impl<W: Worker> Submissions<W> {
    pub(super) fn new(worker: W) -> Self {
        let submitted = Submitted { is_open: true, work: Vec::new() };
        Self { worker: Mutex::new(worker), submitted: Mutex::new(submitted) }
    }

    /// Queues work, and returns how much is queued; `None` once the queue is closed. [`hand_over`](Self::hand_over)
    /// must follow.
    pub(super) fn submit(&self, work: impl IntoIterator<Item = W::Work>) -> Option<usize> {
        let mut submitted = self.lock_submitted();
        if !submitted.is_open {
            return None;
        }
        submitted.work.extend(work);
        Some(submitted.work.len())
    }

    /// Makes the worker do the queued work, if it takes work now. If another thread holds the worker, that thread does
    /// the work: every use of the worker is followed by this call.
    pub(super) fn hand_over(&self, mut at_once: bool) -> Result<(), W::Error> {
        while !self.lock_submitted().work.is_empty() {
            let mut worker = match self.worker.try_lock() {
                Ok(worker) => worker,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(()),
            };
            if !worker.takes_work(at_once) {
                return Ok(());
            }
            self.collect(&mut worker)?;
            drop(worker);
            // Others may have submitted work while this thread held the worker's lock.
            at_once = true;
        }
        Ok(())
    }

    /// Calls `act` on the worker. [`hand_over`](Self::hand_over) must follow, for work that others submitted meanwhile.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut W) -> T) -> T {
        act(&mut self.worker.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes `worker`, whose lock the caller holds, do the queued work.
    pub(super) fn collect(&self, worker: &mut W) -> Result<(), W::Error> {
        worker.take(self.lock_submitted().work.drain(..));
        worker.work()
    }

    /// Refuses work from now on. Queued work stays.
    pub(super) fn close(&self) {
        self.lock_submitted().is_open = false;
    }

    /// Takes the work that the worker has not taken.
    pub(super) fn take_rest(&self) -> Vec<W::Work> {
        std::mem::take(&mut self.lock_submitted().work)
    }

    fn lock_submitted(&self) -> MutexGuard<'_, Submitted<W::Work>> {
        self.submitted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

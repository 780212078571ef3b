//! Work that any thread submits at any time, for something that one thread at a time works with. Submitting never waits
//! for that thread; whoever works with it takes along what others have submitted meanwhile.

use std::{
    sync::{PoisonError, TryLockError},
    vec::Drain,
};

use crate::sync::{Mutex, MutexGuard};

/// What one thread at a time works with.
pub(super) trait Worker {
    type Work;
    type Error;

    /// Whether it takes work now. If not although it is not `at_once`, [`Submissions::collect`] must be called later by
    /// itself.
    fn takes_work(&self, at_once: bool) -> bool;

    /// Takes work in, quickly.
    fn take(&mut self, work: Drain<'_, Self::Work>);

    /// Does what it has taken in. This may be slow.
    fn work(&mut self) -> Result<(), Self::Error>;
}

/// See the module's documentation. Locks are taken in the order of the fields.
#[derive(Debug)]
pub(super) struct Submissions<W: Worker> {
    worker: Mutex<W>,
    /// Held for moments only.
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

    /// Adds work behind what is there: how much waits now, `None` if no more is taken. [`hand_over`](Self::hand_over)
    /// must follow.
    pub(super) fn submit(&self, work: impl IntoIterator<Item = W::Work>) -> Option<usize> {
        let mut submitted = self.lock_submitted();
        if !submitted.is_open {
            return None;
        }
        submitted.work.extend(work);
        Some(submitted.work.len())
    }

    /// Has what was submitted done, if the worker takes it now. Who works with it meanwhile has it done afterwards.
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
            // Others may have come while we held the lock.
            at_once = true;
        }
        Ok(())
    }

    /// Acts on the worker. [`hand_over`](Self::hand_over) must follow, for what others submitted meanwhile.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut W) -> T) -> T {
        act(&mut self.worker.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Has the worker, on whom someone acts, take what was submitted, and work.
    pub(super) fn collect(&self, worker: &mut W) -> Result<(), W::Error> {
        worker.take(self.lock_submitted().work.drain(..));
        worker.work()
    }

    /// Takes no more. What was submitted stays.
    pub(super) fn close(&self) {
        self.lock_submitted().is_open = false;
    }

    /// What was submitted and not taken.
    pub(super) fn take_rest(&self) -> Vec<W::Work> {
        std::mem::take(&mut self.lock_submitted().work)
    }

    fn lock_submitted(&self) -> MutexGuard<'_, Submitted<W::Work>> {
        self.submitted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

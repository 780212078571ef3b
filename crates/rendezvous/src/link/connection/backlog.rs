//! Work that other tasks queue for a connection's task.

use std::{
    fmt, mem,
    sync::{Arc, PoisonError},
    task::Waker,
};

use crate::sync::{Alarm, AtomicBool, Mutex, MutexGuard, Ordering};

/// Work for the connection's task, and what wakes the task while it sleeps.
pub(crate) struct Backlog<W> {
    /// `None` once the task accepts no more.
    work: Mutex<Option<Vec<W>>>,
    /// Whether `work` is not empty.
    has_work: AtomicBool,
    /// Silent while the task is polled.
    alarm: Arc<Alarm>,
}

impl<W> fmt::Debug for Backlog<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backlog").finish_non_exhaustive()
    }
}

impl<W> Backlog<W> {
    pub(crate) fn new() -> Self {
        let work = Mutex::new(Some(Vec::new()));
        Self { work, has_work: AtomicBool::new(false), alarm: Arc::default() }
    }

    /// Queues `work` for the task. Returns it as the error if the task accepts no more.
    pub(crate) fn add(&self, work: W) -> Result<(), W> {
        match &mut *self.lock() {
            Some(waiting) => waiting.push(work),
            None => return Err(work),
        }
        self.has_work.store(true, Ordering::Release);
        self.wake();
        Ok(())
    }

    /// Wakes the task, unless it is polled now.
    pub(crate) fn wake(&self) {
        self.alarm.ring();
    }

    /// A waker of the task for the futures that it polls. It wakes the task unless that is polled now.
    pub(crate) fn waker(&self) -> Waker {
        self.alarm.waker()
    }

    /// The task is about to take the work and to poll its futures. What is added or woken from now on does not wake it.
    pub(crate) fn begin_poll(&self) {
        self.alarm.silence();
    }

    /// Whether work was added, or a future woken, since [`begin_poll`](Self::begin_poll).
    pub(crate) fn has_more(&self) -> bool {
        self.alarm.has_rung()
    }

    /// From now on `task` is woken. Returns true if work was added or a future woken during the poll, which woke nobody.
    #[must_use]
    pub(crate) fn end_poll(&self, task: &Waker) -> bool {
        self.alarm.set(task)
    }

    /// Takes all work.
    pub(crate) fn take(&self) -> Vec<W> {
        if !self.has_work() {
            return Vec::new();
        }
        let mut work = self.lock();
        self.has_work.store(false, Ordering::Relaxed);
        work.as_mut().map(mem::take).unwrap_or_default()
    }

    /// Accepts no more work from now on, if none is queued. Returns false if some is.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut work = self.lock();
        let is_empty = work.as_ref().is_none_or(Vec::is_empty);
        if is_empty {
            *work = None;
        }
        is_empty
    }

    /// Accepts no more work from now on. Returns what was queued.
    pub(crate) fn close(&self) -> Vec<W> {
        self.lock().take().unwrap_or_default()
    }

    pub(crate) fn has_work(&self) -> bool {
        self.has_work.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Vec<W>>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

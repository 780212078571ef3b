//! The waker of a task that polls several sources of work, and need not be woken while it polls.

use std::{
    fmt,
    sync::Arc,
    task::{Wake, Waker},
};

use crate::sync::{AtomicU8, AtomicWaker, Ordering};

/// The task is awake, and nothing has rung.
const SILENT: u8 = 0;
/// Something has rung.
const RANG: u8 = 1;
/// The next ring wakes the task.
const SET: u8 = 2;

/// Wakes a task when it rings, but only while it is set. A task sets it before it sleeps. Until then the task polls
/// again in any case, and a ring is only recorded: waking a task during its own poll costs another poll, and makes a
/// runtime with many workers wake one of them to take the task over.
///
/// A ring is a call of [`Waker::wake`] on a waker [of this alarm](Self::waker).
pub struct Alarm {
    state: AtomicU8,
    task: AtomicWaker,
}

impl fmt::Debug for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Alarm").finish_non_exhaustive()
    }
}

impl Default for Alarm {
    /// One that is silent.
    fn default() -> Self {
        Self { state: AtomicU8::new(SILENT), task: AtomicWaker::new() }
    }
}

impl Alarm {
    /// A waker that rings this alarm.
    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(self.clone())
    }

    /// Wakes the task if the alarm is set; else notes that it has rung.
    pub fn ring(&self) {
        // A task that sees the ring also sees everything that happened before it.
        if self.state.swap(RANG, Ordering::AcqRel) == SET {
            self.task.wake();
        }
    }

    /// From now on the task is awake. After this call it polls every source that may have rung.
    pub fn silence(&self) {
        self.state.swap(SILENT, Ordering::AcqRel);
    }

    /// Whether something has rung since the alarm was silenced.
    pub fn has_rung(&self) -> bool {
        self.state.load(Ordering::Acquire) == RANG
    }

    /// From now on the next ring wakes `task`. Returns true if something has rung since the alarm was silenced: that
    /// ring woke no task, so the task polls again.
    #[must_use]
    pub fn set(&self, task: &Waker) -> bool {
        self.task.register(task);
        self.state.swap(SET, Ordering::AcqRel) == RANG
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

//! The waker of a task that polls several things, and need not be woken while it does.

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
/// What rings wakes the task.
const SET: u8 = 2;

/// Wakes a task when it rings, but only while it is set. A task sets it before it sleeps. Until then the task looks again in any
/// case, and what rings is only noted: waking a task during its own poll makes a runtime with many workers wake one of them to
/// take the task over, and costs another poll.
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
        // What happened before is seen by whoever finds that this has rung.
        if self.state.swap(RANG, Ordering::AcqRel) == SET {
            self.task.wake();
        }
    }

    /// From now on the task is awake. It looks at everything that may have rung after this call.
    pub fn silence(&self) {
        self.state.swap(SILENT, Ordering::AcqRel);
    }

    /// Whether something has rung since the alarm was silenced.
    pub fn has_rung(&self) -> bool {
        self.state.load(Ordering::Acquire) == RANG
    }

    /// From now on `task` is woken by the next ring. Returns true if something has rung since the alarm was silenced, which woke
    /// nobody: then the task looks again.
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

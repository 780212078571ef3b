//! The futures of one connection: answers that wait, housekeeping, and finally the closing of the connection.

use std::{
    collections::VecDeque,
    fmt, mem,
    pin::Pin,
    sync::{Arc, PoisonError, Weak},
    task::{Context, Wake, Waker},
};

use crate::sync::{Alarm, AtomicBool, Mutex, MutexGuard, Ordering};

/// A slab of futures. Each has an index and a waker of its own: a wake-up queues the index and rings the alarm of the connection's
/// task. [`poll_woken`](Self::poll_woken) polls what was woken, in that order, on whichever thread calls it. The slab is not
/// locked meanwhile, so that a poll may add entries and wake others.
pub(crate) struct Entries<F> {
    slab: Mutex<Slab<F>>,
    /// Whether woken entries are queued. Written with `slab` locked.
    has_woken: AtomicBool,
    /// Silent while the task is polled.
    alarm: Arc<Alarm>,
}

struct Slab<F> {
    slots: Vec<Slot<F>>,
    free: Vec<usize>,
    /// Waiting entries that were woken, each once, oldest first.
    woken: VecDeque<usize>,
    phase: Phase,
}

/// Whether entries are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The task waits for the last entry.
    Ending,
    /// No more are accepted.
    Closed,
}

struct Slot<F> {
    entry: Entry<F>,
    /// Whether it was woken since its latest poll began.
    is_woken: bool,
    waker: Waker,
}

/// ```text
/// Vacant ──add──▶ Polled ──not ready──▶ Waiting
///   ▲               │ ▲                    │
///   └─────ready─────┘ └───woken, polled────┘
/// ```
enum Entry<F> {
    Vacant,
    /// The future is with the thread that polls it.
    Polled,
    Waiting(F),
}

/// Wakes one entry. It may outlive the entry: then it wakes the slot's next one, which is polled once without a reason.
struct EntryWaker<F> {
    entries: Weak<Entries<F>>,
    index: usize,
}

impl<F: Send + 'static> Wake for EntryWaker<F> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(entries) = self.entries.upgrade() {
            entries.woken(self.index);
        }
    }
}

impl<F> fmt::Debug for Entries<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entries").finish_non_exhaustive()
    }
}

impl<F: Future<Output = ()> + Unpin + Send + 'static> Entries<F> {
    /// Polls `future`, and stores it unless it is ready. Returns whether it is ready.
    ///
    /// # Errors
    /// The future, unpolled: no more are accepted.
    pub(crate) fn add(self: &Arc<Self>, future: F) -> Result<bool, F> {
        let (index, waker) = {
            let mut slab = self.lock();
            if slab.phase == Phase::Closed {
                return Err(future);
            }
            let index = slab.reserve(self);
            (index, slab.slots.get(index).map(|slot| slot.waker.clone()))
        };
        Ok(self.poll(Taken { index, future, waker: waker.unwrap_or_else(|| Waker::noop().clone()) }))
    }

    /// Polls the entries that were woken until now, once each: what they wake is polled after the next look for arrivals.
    pub(crate) fn poll_woken(&self) {
        if !self.has_woken() {
            return;
        }
        let most = self.lock().woken.len();
        for _ in 0..most {
            let Some(taken) = self.take_woken() else { return };
            self.poll(taken);
        }
    }

    /// Polls an entry that is out of its slot. Returns whether it is ready.
    fn poll(&self, taken: Taken<F>) -> bool {
        let Taken { index, mut future, waker } = taken;
        let is_ready = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_ready();
        let future = if is_ready {
            // Before its slot is vacant, so that an empty slab owns nothing.
            drop(future);
            None
        } else {
            Some(future)
        };
        let (is_due, left) = {
            let mut slab = self.lock();
            let ended = slab.end_poll(index, future);
            self.has_woken.store(!slab.woken.is_empty(), Ordering::Release);
            ended
        };
        drop(left);
        if is_due {
            self.wake();
        }
        is_ready
    }
}

impl<F: Send + 'static> Entries<F> {
    pub(crate) fn new() -> Arc<Self> {
        let slab = Slab { slots: Vec::new(), free: Vec::new(), woken: VecDeque::new(), phase: Phase::Open };
        Arc::new(Self { slab: Mutex::new(slab), has_woken: AtomicBool::new(false), alarm: Arc::default() })
    }

    /// Stores `future` and wakes the task for its first poll.
    ///
    /// # Errors
    /// The future: no more are accepted.
    pub(crate) fn add_unpolled(self: &Arc<Self>, future: F) -> Result<(), F> {
        {
            let mut slab = self.lock();
            if slab.phase == Phase::Closed {
                return Err(future);
            }
            let index = slab.reserve(self);
            slab.put_back(index, future);
            slab.wake(index);
            self.has_woken.store(true, Ordering::Release);
        }
        self.wake();
        Ok(())
    }

    fn take_woken(&self) -> Option<Taken<F>> {
        let mut slab = self.lock();
        let taken = slab.take_woken();
        self.has_woken.store(!slab.woken.is_empty(), Ordering::Release);
        taken
    }

    /// Entry `index` was woken.
    fn woken(&self, index: usize) {
        let is_due = {
            let mut slab = self.lock();
            let is_due = slab.wake(index);
            if is_due {
                self.has_woken.store(true, Ordering::Release);
            }
            is_due
        };
        if is_due {
            self.wake();
        }
    }

    /// Wakes the task, unless it is polled now.
    pub(crate) fn wake(&self) {
        self.alarm.ring();
    }

    /// A waker of the task, which wakes it unless it is polled now.
    pub(crate) fn waker(&self) -> Waker {
        self.alarm.waker()
    }

    /// The task is about to poll what was woken. What is woken from now on does not wake it.
    pub(crate) fn begin_poll(&self) {
        self.alarm.silence();
    }

    /// Whether the alarm has rung since [`begin_poll`](Self::begin_poll).
    pub(crate) fn has_more(&self) -> bool {
        self.alarm.has_rung()
    }

    /// From now on `task` is woken. Returns true if the alarm has rung during the poll, which woke nobody.
    #[must_use]
    pub(crate) fn end_poll(&self, task: &Waker) -> bool {
        self.alarm.set(task)
    }

    /// Accepts no more entries from now on, if there are none. Otherwise the last one to end wakes the task.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut slab = self.lock();
        let is_empty = slab.in_use() == 0;
        slab.phase = if is_empty { Phase::Closed } else { Phase::Ending };
        is_empty
    }

    /// Accepts no more entries from now on. Returns those that wait; those that are being polled are dropped after that.
    pub(crate) fn close(&self) -> Vec<F> {
        let mut slab = self.lock();
        slab.phase = Phase::Closed;
        slab.woken.clear();
        self.has_woken.store(false, Ordering::Release);
        slab.slots.iter_mut().filter_map(|slot| slot.entry.take_waiting()).collect()
    }

    pub(crate) fn has_woken(&self) -> bool {
        self.has_woken.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Slab<F>> {
        self.slab.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An entry that is being polled.
struct Taken<F> {
    index: usize,
    future: F,
    waker: Waker,
}

impl<F> Entry<F> {
    fn take_waiting(&mut self) -> Option<F> {
        match mem::replace(self, Self::Vacant) {
            Self::Waiting(future) => Some(future),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl<F: Send + 'static> Slab<F> {
    fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The index of a slot whose future is polled next.
    fn reserve(&mut self, entries: &Arc<Entries<F>>) -> usize {
        let index = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(index) {
            Some(slot) => (slot.entry, slot.is_woken) = (Entry::Polled, false),
            None => {
                let waker = Waker::from(Arc::new(EntryWaker { entries: Arc::downgrade(entries), index }));
                self.slots.push(Slot { entry: Entry::Polled, is_woken: false, waker });
            }
        }
        index
    }

    fn put_back(&mut self, index: usize, future: F) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.entry = Entry::Waiting(future);
        }
    }

    /// Queues an entry that waits; one that is being polled is queued afterwards. Returns whether it is queued now.
    fn wake(&mut self, index: usize) -> bool {
        let Some(slot) = self.slots.get_mut(index) else { return false };
        let is_first = !mem::replace(&mut slot.is_woken, true);
        let is_due = is_first && matches!(slot.entry, Entry::Waiting(_));
        if is_due {
            self.woken.push_back(index);
        }
        is_due
    }

    /// The oldest entry that was woken, out of its slot.
    fn take_woken(&mut self) -> Option<Taken<F>> {
        let index = self.woken.pop_front()?;
        let slot = self.slots.get_mut(index)?;
        let future = slot.entry.take_waiting()?;
        (slot.entry, slot.is_woken) = (Entry::Polled, false);
        Some(Taken { index, future, waker: slot.waker.clone() })
    }

    /// Puts `future` back into its slot, or makes that vacant. Returns whether to wake the task, and a future that is not accepted
    /// any more.
    fn end_poll(&mut self, index: usize, future: Option<F>) -> (bool, Option<F>) {
        match future {
            Some(future) if self.phase != Phase::Closed => {
                self.put_back(index, future);
                let was_woken = self.slots.get_mut(index).is_some_and(|slot| mem::take(&mut slot.is_woken));
                (was_woken && self.wake(index), None)
            }
            left => {
                if let Some(slot) = self.slots.get_mut(index) {
                    slot.entry = Entry::Vacant;
                }
                self.free.push(index);
                (self.phase == Phase::Ending && self.in_use() == 0, left)
            }
        }
    }
}

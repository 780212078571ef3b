//! Answers to the peer that wait for publications. Whoever publishes sends them, so that no task must be woken before they
//! leave.

use std::{
    fmt,
    sync::{
        MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use futures::{StreamExt, stream::FuturesUnordered};
use tensorwire_fabric::QueuePair;
use tensorwire_testpoints::sync::Mutex;

use crate::{link::connection::driver::Work, values::published::WaitingAnswers};

/// Answers that wait for publications, and the waker of the connection's task.
pub(crate) struct PeerAnswers {
    queue_pair: QueuePair,
    /// Locked while answers are polled. A poll may hand arrivals on, so one who holds the fabric's receiving side only tries it.
    waiting: Mutex<Waiting>,
    /// Whether the connection's task must look: there are answers, or it has not been polled yet. Written with `waiting` locked.
    concerns_task: AtomicBool,
}

struct Waiting {
    answers: FuturesUnordered<Work>,
    /// Of the connection's task, which is woken by what wakes an answer: as of the latest poll that had answers, since all wakers
    /// of a spawned task wake it. `None` before the first poll, and after the end.
    task: Option<Waker>,
}

impl fmt::Debug for PeerAnswers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerAnswers").finish_non_exhaustive()
    }
}

impl PeerAnswers {
    pub(crate) fn new(queue_pair: QueuePair) -> Self {
        let waiting = Waiting { answers: FuturesUnordered::new(), task: None };
        Self { queue_pair, waiting: Mutex::new(waiting), concerns_task: AtomicBool::new(true) }
    }

    /// Adds an answer, whose next wake-up concerns whoever publishes or the connection's task. Gives it back if the answers
    /// are being polled, or the connection's task has not begun or has ended.
    pub(crate) fn add(&self, answer: Work) -> Result<(), Work> {
        let Some(mut waiting) = self.try_lock().filter(|waiting| waiting.task.is_some()) else {
            return Err(answer);
        };
        waiting.answers.push(answer);
        self.go_on(&mut waiting);
        Ok(())
    }

    /// Polls the answers that were woken, in the connection's task.
    pub(crate) fn poll(&self, context: &Context<'_>) {
        if !self.concerns_task.load(Ordering::Acquire) {
            return;
        }
        let mut waiting = self.lock();
        if !waiting.task.as_ref().is_some_and(|task| task.will_wake(context.waker())) {
            waiting.task = Some(context.waker().clone());
        }
        self.go_on(&mut waiting);
    }

    /// Polls the answers that were woken.
    fn go_on(&self, waiting: &mut Waiting) {
        let Some(task) = waiting.task.clone() else { return };
        let mut context = Context::from_waker(&task);
        while let Poll::Ready(Some(())) = waiting.answers.poll_next_unpin(&mut context) {}
        self.concerns_task.store(!waiting.answers.is_empty(), Ordering::Release);
    }

    /// Accepts no more answers, if there are none. Returns false if there are some.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut waiting = self.lock();
        let is_empty = waiting.answers.is_empty();
        if is_empty {
            waiting.task = None;
        }
        is_empty
    }

    /// Accepts no more answers. Returns those that are left.
    pub(crate) fn close(&self) -> FuturesUnordered<Work> {
        let mut waiting = self.lock();
        waiting.task = None;
        std::mem::take(&mut waiting.answers)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Waiting>> {
        match self.waiting.try_lock() {
            Ok(waiting) => Some(waiting),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl WaitingAnswers for PeerAnswers {
    fn send(&self) {
        if tensorwire_testpoints::chance!("a publication leaves answers to the connection's task") {
            return;
        }
        // Whoever polls them now is, or wakes, the connection's task, which polls them again.
        let Some(mut waiting) = self.try_lock() else { return };
        let together = self.queue_pair.together();
        self.go_on(&mut waiting);
        together.leave();
    }
}

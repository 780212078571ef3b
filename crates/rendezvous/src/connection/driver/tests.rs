//! Whether the task is woken for what comes while it sleeps, and for what comes during its poll and is not done in it.
//!
//! The tests poll a driver of their own. That of the connection does not run meanwhile: the runtime has one thread, and no test
//! awaits anything.

use std::{
    future::{pending, poll_fn, ready},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::Wake,
};

use tensorwire_fabric::{Immediate, TokioRuntime};

use super::*;
use crate::session::{node::connection_setup::tests::connection, tests::worker};

/// How often the task was woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A driver that only the test polls.
struct Polled {
    connection: Arc<DataConnection>,
    driver: Driver,
    woken: Arc<Woken>,
}

impl Polled {
    /// A driver that sleeps, for `connection` and with `fabric`.
    fn with(connection: Arc<DataConnection>, fabric: Work) -> Self {
        let runtime = Arc::new(TokioRuntime::current().unwrap());
        let driver = Driver::new(connection.clone(), fabric, runtime);
        Self { connection, driver, woken: Arc::default() }
    }

    async fn asleep() -> Self {
        let mut polled = Self::with(connection(&worker().await).await, pending().boxed());
        polled.poll_until_asleep();
        polled
    }

    /// Polls as long as the task is woken during its polls.
    fn poll_until_asleep(&mut self) {
        const POLLS_MAX: usize = 100;
        let polls = (0..POLLS_MAX).take_while(|_| self.wakes_of_poll() > 0).count();
        assert!(polls < POLLS_MAX, "the task never sleeps");
    }

    /// How often one poll wakes the task.
    fn wakes_of_poll(&mut self) -> usize {
        let waker = Waker::from(self.woken.clone());
        let before = self.wakes();
        let _pending = Pin::new(&mut self.driver).poll(&mut Context::from_waker(&waker));
        self.wakes() - before
    }

    fn wakes(&self) -> usize {
        self.woken.0.load(Ordering::Relaxed)
    }

    /// Asserts that `comes` wakes the sleeping task once.
    fn is_woken_by(&mut self, what: &str, comes: impl FnOnce(&Arc<DataConnection>)) {
        self.poll_until_asleep();
        let before = self.wakes();
        comes(&self.connection);
        assert_eq!(self.wakes() - before, 1, "{what}");
    }
}

/// Work that waits until its waker, which it leaves here, is woken.
#[derive(Clone, Default)]
struct Waiting(Arc<Mutex<Option<Waker>>>);

impl Waiting {
    fn work(&self) -> Work {
        let left = self.0.clone();
        let mut polls = 0;
        let poll = move |context: &mut Context<'_>| {
            *left.lock().unwrap() = Some(context.waker().clone());
            polls += 1;
            if polls > 1 { Poll::Ready(()) } else { Poll::Pending }
        };
        poll_fn(poll).boxed()
    }

    fn wake(&self) {
        let waker = self.0.lock().unwrap().take();
        waker.expect("it was polled").wake();
    }
}

fn queue(connection: &DataConnection, work: Work) {
    assert!(connection.entries.add_unpolled(work).is_ok(), "the task accepts work");
}

#[tokio::test]
async fn what_comes_while_the_task_sleeps_wakes_it() {
    let mut task = Polled::asleep().await;
    task.is_woken_by("queued work", |connection| queue(connection, ready(()).boxed()));

    let work = Waiting::default();
    queue(&task.connection, work.work());
    task.is_woken_by("a future of the task", |_| work.wake());

    let answer = Waiting::default();
    assert!(task.connection.entries.add(answer.work()).is_ok());
    task.is_woken_by("an answer that waits for a publication", |_| answer.wake());

    task.is_woken_by("a peer that breaks the protocol", |connection| {
        let unknown = Arrival::Immediate { immediate: Immediate(u32::MAX), length: 3 };
        assert!(!Arrivals(Arc::downgrade(connection)).arrived(unknown));
        assert!(connection.broken.get().is_some());
    });
}

/// Work that sets `done`.
fn sets(done: &Arc<AtomicUsize>) -> Work {
    let done = done.clone();
    async move {
        done.fetch_add(1, Ordering::Relaxed);
    }
    .boxed()
}

/// Work that queues `work` of `connection` when it is polled.
fn queues(connection: &Arc<DataConnection>, work: Work) -> Work {
    let connection = Arc::downgrade(connection);
    async move { queue(&connection.upgrade().unwrap(), work) }.boxed()
}

#[tokio::test]
async fn what_comes_during_a_poll_is_done_in_it_or_wakes_the_task() {
    let worker = worker().await;
    let connection = connection(&worker).await;
    let done = Arc::<AtomicUsize>::default();
    let count = || done.load(Ordering::Relaxed);
    // While the fabric is polled.
    let mut task = Polled::with(connection.clone(), queues(&connection, sets(&done)));
    task.poll_until_asleep();
    assert_eq!(count(), 1);
    // While the task's futures are polled: more than one poll does.
    let mut work = sets(&done);
    for _ in 0..4 * ROUNDS_PER_POLL {
        work = queues(&connection, work);
    }
    queue(&connection, work);
    task.poll_until_asleep();
    assert_eq!(count(), 2);
    // While the connection closes: a poll takes less work than this, and does not look again.
    task.driver.end(pending());
    let mut work = sets(&done);
    for _ in 0..4 * ROUNDS_PER_POLL {
        work = queues(&connection, work);
    }
    queue(&connection, work);
    assert!(task.wakes_of_poll() > 0, "queued work, and the task sleeps");
    task.poll_until_asleep();
    assert_eq!(count(), 3);
}

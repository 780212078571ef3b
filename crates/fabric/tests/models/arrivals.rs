//! Passing arrivals on by several threads, and the work that this leaves to the connection's task, under every
//! interleaving that loom finds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Poll, Wake, Waker},
};

use loom::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    thread,
};

use crate::{arrival_queue::ArrivalQueue, entries::Entries, model};

/// A queue pair with a sink: queued arrivals go to the sink first.
struct QueuePair {
    queue: ArrivalQueue<u64>,
    sink: Mutex<Vec<u64>>,
}

impl QueuePair {
    fn arrived(&self, arrival: u64) {
        self.sink.try_lock().expect("two arrivals at once").push(arrival);
    }

    fn deliver(&self, arrival: u64) {
        if self.queue.waiting() == 0 {
            self.arrived(arrival);
        } else {
            self.queue.push(arrival, 4).unwrap();
        }
    }

    fn hand_on(&self) -> Option<bool> {
        self.queue.hand_on(1, |arrival| self.arrived(arrival))
    }
}

#[test]
fn queued_arrivals_and_new_ones_reach_the_sink_in_order_and_one_at_a_time() {
    model(|| {
        let pair = Arc::new(QueuePair { queue: ArrivalQueue::new(), sink: Mutex::new(Vec::new()) });
        (1..=2).for_each(|early| pair.queue.push(early, 4).unwrap());
        let fabric = {
            let pair = pair.clone();
            thread::spawn(move || (3..=4).for_each(|arrival| pair.deliver(arrival)))
        };
        let helper = {
            let pair = pair.clone();
            thread::spawn(move || pair.hand_on())
        };
        pair.hand_on();
        fabric.join().unwrap();
        helper.join().unwrap();
        // A thread that leaves arrivals wakes the task, which does this.
        while pair.hand_on().is_some() {}
        assert_eq!(*pair.sink.lock().unwrap(), [1, 2, 3, 4]);
        assert_eq!(pair.queue.waiting(), 0);
    });
}

/// A connection's task, and descriptors of the peer behind a lock that is only tried.
struct Connection {
    entries: std::sync::Arc<Entries<Work>>,
    posted: AtomicU64,
    /// How many descriptors were executed.
    target: Mutex<u64>,
    is_contended: AtomicBool,
    is_woken: AtomicBool,
    done: Arc<AtomicU64>,
}

/// An entry of the task.
type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Woken(Arc<Connection>);

impl Wake for Woken {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.wake();
    }
}

impl Connection {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            entries: Entries::new(),
            posted: AtomicU64::new(0),
            target: Mutex::new(0),
            is_contended: AtomicBool::new(false),
            is_woken: AtomicBool::new(false),
            done: Arc::new(AtomicU64::new(0)),
        })
    }

    /// Ends the cycle: the waker holds the connection.
    fn forget_task(&self) {
        let _nothing_rings = self.entries.end_poll(Waker::noop());
    }

    /// Polls the task once for each wake-up.
    fn run(this: &Arc<Self>) {
        while this.is_woken.swap(false, Ordering::AcqRel) {
            Self::poll(this);
        }
    }

    /// Like a runtime's: a plain store would hide what an earlier waker did before it.
    fn wake(&self) {
        self.is_woken.swap(true, Ordering::AcqRel);
    }

    /// Leaves an arrival to the task.
    fn leave(&self) {
        let done = self.done.clone();
        let work = poll_fn(move |_| {
            done.fetch_add(1, Ordering::Relaxed);
            Poll::Ready(())
        });
        assert!(self.entries.add_unpolled(Box::pin(work)).is_ok());
    }

    /// Executes the peer's descriptors; each leaves an arrival to the task. Returns false if another thread holds the
    /// lock.
    fn progress(&self) -> bool {
        {
            let Ok(mut executed) = self.target.try_lock() else { return false };
            while *executed < self.posted.load(Ordering::Acquire) {
                *executed += 1;
                self.leave();
            }
        }
        fence(Ordering::SeqCst);
        if self.is_contended.load(Ordering::Relaxed) {
            self.is_contended.store(false, Ordering::Relaxed);
            // The fabric's own waker of this task, which it has during a poll too.
            self.wake();
        }
        true
    }

    /// One poll of the task.
    fn poll(this: &Arc<Self>) {
        this.entries.begin_poll();
        if !this.progress() {
            this.is_contended.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            this.progress();
        }
        this.entries.poll_woken();
        let waker = Waker::from(std::sync::Arc::new(Woken(this.clone())));
        if this.entries.end_poll(&waker) {
            this.wake();
        }
    }
}

#[test]
fn what_a_helper_finds_is_done_by_the_task_wherever_the_helper_is_dropped() {
    // The number of polls by the helper before it is dropped.
    for looks in 0..=2 {
        model(move || {
            let connection = Connection::new();
            let helper = {
                let connection = connection.clone();
                thread::spawn(move || (0..looks).filter(|_| connection.progress()).count())
            };
            let peer = {
                let connection = connection.clone();
                thread::spawn(move || {
                    connection.posted.store(1, Ordering::Release);
                    // The bell.
                    connection.wake();
                })
            };
            Connection::poll(&connection);
            peer.join().unwrap();
            Connection::run(&connection);
            helper.join().unwrap();
            Connection::run(&connection);
            assert_eq!(connection.done.load(Ordering::Relaxed), 1, "{looks} looks");
            connection.forget_task();
        });
    }
}

#[test]
fn what_is_left_to_the_task_while_it_is_polled_is_done() {
    model(|| {
        let connection = Connection::new();
        let other = {
            let connection = connection.clone();
            thread::spawn(move || connection.leave())
        };
        Connection::poll(&connection);
        other.join().unwrap();
        Connection::run(&connection);
        assert_eq!(connection.done.load(Ordering::Relaxed), 1);
        connection.forget_task();
    });
}

/// An entry that is ready once `is_set` is true; until then it leaves its waker. `polls` counts the threads that poll
/// it.
fn waits(is_set: &Arc<AtomicBool>, waker: &Arc<Mutex<Option<Waker>>>, polls: &Arc<AtomicU64>) -> Work {
    let (is_set, left, polls) = (is_set.clone(), waker.clone(), polls.clone());
    Box::pin(poll_fn(move |context| {
        assert_eq!(polls.fetch_add(1, Ordering::Relaxed), 0, "two threads poll one entry");
        *left.lock().unwrap() = Some(context.waker().clone());
        let is_ready = is_set.load(Ordering::Acquire);
        polls.fetch_sub(1, Ordering::Relaxed);
        if is_ready { Poll::Ready(()) } else { Poll::Pending }
    }))
}

#[test]
fn an_entry_that_is_woken_while_it_is_added_is_polled_again_by_one_thread_at_a_time() {
    model(|| {
        let connection = Connection::new();
        let (is_set, waker) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None::<Waker>)));
        let entry = waits(&is_set, &waker, &Arc::new(AtomicU64::new(0)));
        // Like `publish`: it wakes the entry, and polls the entries that it woke.
        let publisher = {
            let (connection, is_set, waker) = (connection.clone(), is_set.clone(), waker.clone());
            thread::spawn(move || {
                is_set.store(true, Ordering::Release);
                let left = waker.lock().unwrap().take();
                if let Some(left) = left {
                    left.wake();
                    connection.entries.poll_woken();
                }
            })
        };
        assert!(connection.entries.add(entry).is_ok());
        Connection::poll(&connection);
        publisher.join().unwrap();
        Connection::run(&connection);
        assert!(connection.entries.close_if_empty(), "its wake-up is lost");
        waker.lock().unwrap().take();
        connection.forget_task();
    });
}

#[test]
fn the_last_entry_that_another_thread_ends_wakes_the_task_that_waits_for_it() {
    model(|| {
        let connection = Connection::new();
        let (is_set, waker) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None::<Waker>)));
        let entry = waits(&is_set, &waker, &Arc::new(AtomicU64::new(0)));
        assert!(connection.entries.add(entry).is_ok());
        let publisher = {
            let (connection, waker) = (connection.clone(), waker.clone());
            thread::spawn(move || {
                is_set.store(true, Ordering::Release);
                let left = waker.lock().unwrap().take();
                left.unwrap().wake();
                connection.entries.poll_woken();
            })
        };
        let mut is_over = false;
        let mut poll = || {
            connection.entries.begin_poll();
            connection.entries.poll_woken();
            is_over |= connection.entries.close_if_empty();
            let task = Waker::from(std::sync::Arc::new(Woken(connection.clone())));
            if connection.entries.end_poll(&task) {
                connection.wake();
            }
        };
        poll();
        publisher.join().unwrap();
        while connection.is_woken.swap(false, Ordering::AcqRel) {
            poll();
        }
        assert!(is_over, "nobody wakes the task");
        waker.lock().unwrap().take();
        connection.forget_task();
    });
}

//! Submitting to a verbs queue pair under every interleaving of a few threads that loom finds: the submissions' own
//! source, compiled with loom's locks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use std::{convert::Infallible, vec::Drain};

use loom::{sync::Arc, thread};

use crate::{
    model,
    submissions::{Submissions, Worker},
};

/// A send queue: posted work returns with a completion, which some thread handles.
#[derive(Debug, Default)]
struct Queue {
    pending: Vec<u32>,
    posted: Vec<u32>,
    outstanding: usize,
    /// Calls that posted something.
    calls: usize,
}

impl Worker for Queue {
    type Work = u32;
    type Error = Infallible;

    fn takes_work(&self, at_once: bool) -> bool {
        at_once || self.outstanding == 0
    }

    fn take(&mut self, work: Drain<'_, u32>) {
        self.pending.extend(work);
    }

    fn work(&mut self) -> Result<(), Infallible> {
        self.calls += usize::from(!self.pending.is_empty());
        self.outstanding += self.pending.len();
        self.posted.append(&mut self.pending);
        Ok(())
    }
}

type Queues = Submissions<Queue>;

fn submit(queue: &Queues, work: u32) {
    queue.submit([work]).unwrap();
    queue.hand_over(false).unwrap();
}

/// Handles all present completions, as the link does. Returns whether there were any.
fn complete(queue: &Queues) -> bool {
    let any = queue.with(|worker| {
        let any = std::mem::take(&mut worker.outstanding) > 0;
        if any {
            queue.collect(worker).unwrap();
        }
        any
    });
    queue.hand_over(true).unwrap();
    any
}

/// Checks that everything is posted once no completion is left, in each thread's order of submission.
fn assert_posted(queue: &Queues, count: u32) {
    while complete(queue) {}
    let posted = queue.with(|worker| worker.posted.clone());
    assert_eq!(posted.len(), count as usize, "work is forgotten: {posted:?} is posted");
    for thread in 0..2 {
        assert!(posted.iter().filter(|work| **work % 2 == thread).is_sorted(), "out of order: {posted:?}");
    }
    assert!(queue.take_rest().is_empty());
}

#[test]
fn what_two_threads_submit_is_posted() {
    model(|| {
        let queue = Arc::new(Queues::new(Queue::default()));
        let other = {
            let queue = queue.clone();
            thread::spawn(move || [1, 3].map(|work| submit(&queue, work)))
        };
        submit(&queue, 0);
        submit(&queue, 2);
        other.join().unwrap();
        assert_posted(&queue, 4);
    });
}

#[test]
fn what_is_submitted_while_completions_are_handled_is_posted() {
    model(|| {
        let queue = Arc::new(Queues::new(Queue::default()));
        submit(&queue, 0);
        let other = {
            let queue = queue.clone();
            thread::spawn(move || [1, 3].map(|work| submit(&queue, work)))
        };
        let poller = {
            let queue = queue.clone();
            thread::spawn(move || complete(&queue))
        };
        submit(&queue, 2);
        other.join().unwrap();
        poller.join().unwrap();
        assert_posted(&queue, 4);
    });
}

#[test]
fn what_somebody_waits_for_is_posted_without_a_completion() {
    model(|| {
        let queue = Arc::new(Queues::new(Queue::default()));
        submit(&queue, 0);
        let other = {
            let queue = queue.clone();
            // Uses the queue for something else meanwhile.
            thread::spawn(move || {
                let outstanding = queue.with(|worker| worker.outstanding);
                queue.hand_over(true).unwrap();
                outstanding
            })
        };
        submit(&queue, 2);
        queue.hand_over(true).unwrap();
        other.join().unwrap();
        assert_eq!(queue.with(|worker| worker.posted.clone()), [0, 2]);
    });
}

#[test]
fn work_that_waits_together_is_posted_in_one_call() {
    model(|| {
        let queue = Queues::new(Queue::default());
        for work in 0..8 {
            submit(&queue, work * 2);
        }
        assert_eq!(queue.with(|worker| worker.calls), 1, "the first found nothing outstanding");
        queue.hand_over(true).unwrap();
        assert_eq!(queue.with(|worker| worker.calls), 2);
        assert_posted(&queue, 8);
    });
}

#[test]
fn what_comes_too_late_is_refused_or_left_over() {
    model(|| {
        let queue = Arc::new(Queues::new(Queue::default()));
        submit(&queue, 0);
        let other = {
            let queue = queue.clone();
            thread::spawn(move || queue.submit([1]).is_some())
        };
        queue.close();
        let is_taken = other.join().unwrap();
        assert_eq!(queue.submit([3]), None);
        assert_eq!(queue.take_rest().len(), usize::from(is_taken));
    });
}

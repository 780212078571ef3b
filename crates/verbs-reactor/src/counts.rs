//! Counts of the calls that a fabric makes to its device.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of the calls that the queue pairs of a fabric have made to the device since the fabric was opened.
///
/// The device's driver decides which calls enter the kernel. With hardware, arming and polling are loads and stores,
/// posting is a store, and only taking an event is a system call. With Soft-RoCE, each post to the send queue and each
/// arming is a system call, too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsCounts {
    /// Calls that posted to send queues: doorbells.
    pub posts: u64,
    /// Work requests in those calls.
    pub requests: u64,
    /// Work requests that asked for a completion.
    pub signals: u64,
    /// Calls that posted receives.
    pub receive_posts: u64,
    /// Polls of completion queues.
    pub polls: u64,
    /// Completions that the polls found.
    pub completions: u64,
    /// Calls that armed a completion queue, so that the next completion makes an event.
    pub arms: u64,
    /// Reads of completion channels: one system call each.
    pub events: u64,
}

/// The running counts, shared by all queue pairs of a fabric.
#[derive(Debug, Default)]
pub(super) struct CallCounters {
    posts: AtomicU64,
    requests: AtomicU64,
    signals: AtomicU64,
    receive_posts: AtomicU64,
    polls: AtomicU64,
    completions: AtomicU64,
    arms: AtomicU64,
    events: AtomicU64,
}

impl CallCounters {
    pub(super) fn read(&self) -> VerbsCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        VerbsCounts {
            posts: read(&self.posts),
            requests: read(&self.requests),
            signals: read(&self.signals),
            receive_posts: read(&self.receive_posts),
            polls: read(&self.polls),
            completions: read(&self.completions),
            arms: read(&self.arms),
            events: read(&self.events),
        }
    }

    /// One doorbell with that many requests, and that many of them signalled.
    pub(super) fn posted(&self, requests: usize, signals: usize) {
        add(&self.posts, 1);
        add(&self.requests, requests);
        add(&self.signals, signals);
    }

    /// One call that posted receives.
    pub(super) fn posted_receives(&self) {
        add(&self.receive_posts, 1);
    }

    /// One poll that found that many completions.
    pub(super) fn polled(&self, completions: usize) {
        add(&self.polls, 1);
        if completions > 0 {
            add(&self.completions, completions);
        }
    }

    /// One arming.
    pub(super) fn armed(&self) {
        add(&self.arms, 1);
    }

    /// One read of a channel.
    pub(super) fn took_event(&self) {
        add(&self.events, 1);
    }
}

fn add(counter: &AtomicU64, amount: usize) {
    counter.fetch_add(amount as u64, Ordering::Relaxed);
}

//! Whether a write is sent at once, by a system call of its own, or together with others.
//!
//! A post that is alone is sent at once, because its latency counts. What the handling of one read brings about, or one poll
//! of a connection's futures, is sent after it, as one. Where several writes are posted between two turns of the driver,
//! those that follow wait for its next turn. Nothing waits once much is posted.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// So many posts never wait. Then the peer begins to handle them while this side makes the next ones.
const POSTS_MAX: u32 = 32;

/// So many bytes never wait: they outweigh a system call.
const BYTES_MAX: u64 = 64 << 10;

/// What is posted, and no task has begun to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Queued {
    pub(super) posts: u32,
    /// Of their payloads.
    pub(super) bytes: u64,
}

impl Queued {
    fn is_much(self) -> bool {
        self.posts >= POSTS_MAX || self.bytes >= BYTES_MAX
    }
}

/// What a poster does after a post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It sends.
    Send,
    /// It wakes the driver, which will send.
    WakeDriver,
    /// Another task will send, and needs no waking.
    Nothing,
}

/// See the module's documentation. Races between threads cost a system call at most.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// How many tasks handle frames, or post several in a row.
    holders: AtomicU32,
    /// Posts since the latest turn that were not much.
    posts: AtomicU32,
    /// The latest turn that had posts had several.
    had_several: AtomicBool,
}

impl Gathering {
    /// Posts wait from now on, until each holder has [released](Self::release) them. Each sends afterwards what waits.
    pub(super) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn release(&self) {
        self.holders.fetch_sub(1, Ordering::SeqCst);
    }

    /// As [`hold`](Self::hold), until the answer is dropped.
    pub(super) fn held(&self) -> Held<'_> {
        self.hold();
        Held(self)
    }

    pub(super) fn is_held(&self) -> bool {
        self.holders.load(Ordering::SeqCst) > 0
    }

    /// A turn of the driver, or of a task that has received something in its place.
    pub(super) fn turn(&self) {
        if self.posts.load(Ordering::Relaxed) > 0 {
            let posts = self.posts.swap(0, Ordering::Relaxed);
            self.had_several.store(posts > 1, Ordering::Relaxed);
        }
    }

    /// The driver falls asleep: a later post has no neighbours.
    pub(super) fn rest(&self) {
        self.had_several.store(false, Ordering::Relaxed);
    }

    /// Decides about a post, which is the last of those that are `queued`.
    pub(super) fn next(&self, queued: Queued) -> Next {
        if queued.is_much() {
            return Next::Send;
        }
        if self.is_held() {
            return Next::Nothing;
        }
        let is_first = self.posts.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first && !self.had_several.load(Ordering::Relaxed) {
            Next::Send
        } else if queued.posts == 1 {
            Next::WakeDriver
        } else {
            Next::Nothing
        }
    }
}

/// See [`Gathering::held`].
#[derive(Debug)]
pub(super) struct Held<'gathering>(&'gathering Gathering);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many posts of a byte.
    fn small(posts: u32) -> Queued {
        Queued { posts, bytes: posts.into() }
    }

    #[test]
    fn a_post_that_is_alone_is_sent_at_once_also_after_others() {
        let gathering = Gathering::default();
        for _ in 0..3 {
            assert_eq!(gathering.next(small(1)), Next::Send);
            gathering.turn();
            gathering.turn();
        }
    }

    #[test]
    fn neighbours_wait_for_one_turn_and_wake_the_driver_once() {
        let gathering = Gathering::default();
        assert_eq!(gathering.next(small(1)), Next::Send);
        assert_eq!(
            [gathering.next(small(1)), gathering.next(small(2)), gathering.next(small(3))],
            [Next::WakeDriver, Next::Nothing, Next::Nothing]
        );
        gathering.turn();
        assert_eq!(gathering.next(small(1)), Next::WakeDriver, "others will follow");
        gathering.turn();
        assert_eq!(gathering.next(small(1)), Next::Send, "none followed");
        assert_eq!(gathering.next(small(1)), Next::WakeDriver);
        gathering.turn();
        gathering.rest();
        assert_eq!(gathering.next(small(1)), Next::Send, "after a sleep");
    }

    #[test]
    fn what_the_handling_of_frames_posts_waits_for_its_end_unless_it_is_much() {
        let gathering = Gathering::default();
        let held = gathering.held();
        drop(gathering.held());
        assert!((1..POSTS_MAX).all(|posts| gathering.next(small(posts)) == Next::Nothing));
        assert_eq!(gathering.next(small(POSTS_MAX)), Next::Send);
        let long = |bytes| Queued { posts: 2, bytes };
        assert_eq!(gathering.next(long(BYTES_MAX - 1)), Next::Nothing);
        assert_eq!(gathering.next(long(BYTES_MAX)), Next::Send);
        drop(held);
        assert_eq!(gathering.next(small(1)), Next::Send);
    }
}

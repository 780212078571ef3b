//! Whether a write is sent at once, by a system call of its own, or together with others.
//!
//! A single post is sent at once, because its latency matters. Posts that result from handling one read, or from one
//! poll of a connection's futures, are sent together afterwards. If several writes are posted between two turns of the
//! driver, later ones wait for its next turn. Nothing waits once many posts or bytes are queued.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// This many posts never wait, so that the peer begins to handle them while this side makes the next ones.
const POSTS_MAX: u32 = 32;

/// This many bytes never wait: they cost more than a system call.
const BYTES_MAX: u64 = 64 << 10;

/// Posts that no task has begun to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Queued {
    pub(super) posts: u32,
    /// The bytes of their payloads.
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
    /// It sends its post.
    Send,
    /// It wakes the driver, which will send.
    WakeDriver,
    /// Another task will send, and needs no waking.
    Nothing,
}

/// See the module's documentation. Races between threads cost a system call at most.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// Number of tasks that handle frames, or post several in a row.
    holders: AtomicU32,
    /// Small posts since the latest turn.
    posts: AtomicU32,
    /// Whether the latest turn with posts had several.
    had_several: AtomicBool,
}

impl Gathering {
    /// Lets posts wait from now on, until each holder has [released](Self::release) them. Each holder then sends the
    /// waiting posts.
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

    /// Begins a turn of the driver, or of a task that has received something instead of it.
    pub(super) fn turn(&self) {
        if self.posts.load(Ordering::Relaxed) > 0 {
            let posts = self.posts.swap(0, Ordering::Relaxed);
            self.had_several.store(posts > 1, Ordering::Relaxed);
        }
    }

    /// Records that the driver falls asleep, so that the next post is alone.
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

    /// `posts` posts of one byte each.
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

//! The effects of a change of a connection's state, which happen once its lock is released.

use std::task::Waker;

use smallvec::SmallVec;

use crate::{Channel, LentEnd};

/// Tasks to wake, wakers to drop and memory to return. All three run code of others, so they happen without the lock.
pub(crate) struct After<L> {
    woken: SmallVec<[Waker; 2]>,
    dropped: SmallVec<[Waker; 2]>,
    returned: Option<(L, LentEnd)>,
    /// Whether the first task of each queue may be able to continue.
    pub(crate) wakes_queues: bool,
}

impl<L> After<L> {
    pub(crate) fn new() -> Self {
        Self { woken: SmallVec::new(), dropped: SmallVec::new(), returned: None, wakes_queues: true }
    }

    #[inline]
    pub(crate) fn wake(&mut self, wakers: impl IntoIterator<Item = Waker>) {
        // Usually there is no waker or one, for which `extend` costs more.
        wakers.into_iter().for_each(|waker| self.woken.push(waker));
    }

    /// Drops a waker that was replaced, or whose task continues without it.
    #[inline]
    pub(crate) fn drop(&mut self, waker: Option<Waker>) {
        if let Some(waker) = waker {
            self.dropped.push(waker);
        }
    }

    /// Returns memory with the evidence that its grant has ended. At most once.
    pub(crate) fn take_back(&mut self, returned: Option<(L, LentEnd)>) {
        debug_assert!(self.returned.is_none() || returned.is_none(), "one change returns memory once");
        self.returned = self.returned.take().or(returned);
    }

    /// Records that nothing has changed that a task in a queue waits for. Without this, a task that is first and stays blocked
    /// would wake itself.
    pub(crate) fn leave_queues(&mut self) {
        self.wakes_queues = false;
    }

    #[inline]
    pub(crate) fn run<C: Channel<Lent = L>>(self, channel: &C) {
        drop(self.dropped);
        self.woken.into_iter().for_each(Waker::wake);
        if let Some((lent, end)) = self.returned {
            channel.take_back(lent, end);
        }
    }
}

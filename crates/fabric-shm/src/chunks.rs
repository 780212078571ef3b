//! The chunks of a payload that two threads copy: the connection's task takes them from the front, and a helper thread
//! from the back. No chunk is taken twice, and the task knows when the helper has finished its last one.

use crate::sync::{AtomicU64, Ordering};

const BACK_ONE: u64 = 1 << 32;

/// The chunks of one payload.
#[derive(Debug)]
pub(crate) struct Chunks {
    count: u32,
    /// Chunks taken from the front in the lower half, from the back in the upper.
    taken: AtomicU64,
    /// Chunks from the back that are copied.
    helped: AtomicU64,
}

impl Chunks {
    pub(crate) fn new(count: u32) -> Self {
        Self { count, taken: AtomicU64::new(0), helped: AtomicU64::new(0) }
    }

    /// The next chunk for the task.
    pub(crate) fn take_front(&self) -> Option<u32> {
        let before = self.take(1)?;
        Some(before as u32)
    }

    /// The next chunk for the helper, which calls [`helped`](Self::helped) when it is copied.
    pub(crate) fn take_back(&self) -> Option<u32> {
        let before = self.take(BACK_ONE)?;
        Some(self.count - 1 - (before >> 32) as u32)
    }

    /// Records that the helper has finished the chunk that it took.
    pub(crate) fn helped(&self) {
        // Releases the chunk's bytes to `all_left`.
        self.helped.fetch_add(1, Ordering::Release);
    }

    /// Lets nothing more be taken from either end.
    pub(crate) fn stop(&self) {
        while self.take(1).is_some() {}
    }

    /// Whether the helper has finished every chunk that it took. Once [`take_front`](Self::take_front) has returned
    /// `None`, this stays true, and the helper's bytes are visible.
    pub(crate) fn all_left(&self) -> bool {
        let back = self.taken.load(Ordering::Acquire) >> 32;
        self.helped.load(Ordering::Acquire) == back
    }

    /// Adds `step` unless all chunks are taken; returns the value before.
    fn take(&self, step: u64) -> Option<u64> {
        let mut before = self.taken.load(Ordering::Relaxed);
        loop {
            if (before as u32) + (before >> 32) as u32 >= self.count {
                return None;
            }
            let swap =
                self.taken.compare_exchange_weak(before, before + step, Ordering::AcqRel, Ordering::Relaxed);
            match swap {
                Ok(before) => return Some(before),
                Err(now) => before = now,
            }
        }
    }
}

//! Bugs to plant, so that tests can show that they are found: by the simulator, which does not look for them, and by the
//! address sanitizer over RDMA. Compiled in with the feature `planted-bugs` only, which nothing but those tests turns on.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

static WAKE_UP_LOST: AtomicBool = AtomicBool::new(false);

/// Plants in the whole process, or takes out: every eighth arrival wakes nobody.
pub fn lose_wake_ups(lose: bool) {
    WAKE_UP_LOST.store(lose, Ordering::SeqCst);
}

/// Whether the arrival with this number shall wake nobody.
pub(crate) fn is_wake_up_lost(arrival: u64) -> bool {
    WAKE_UP_LOST.load(Ordering::SeqCst) && arrival % 8 == 7
}

/// What is wrong with the end of a queue pair over RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BadEnd {
    /// It is never destroyed: the library's memory of it leaks, and the kernel keeps it as long as the device is open.
    Forgotten = 1,
    /// It is destroyed, and read afterwards.
    ReadAfterwards = 2,
}

static BAD_END: AtomicU8 = AtomicU8::new(0);

/// Plants in the whole process.
pub fn end_queue_pairs_badly(bad: BadEnd) {
    BAD_END.store(bad as u8, Ordering::SeqCst);
}

/// Whether queue pairs end like this.
pub(crate) fn is_end(bad: BadEnd) -> bool {
    BAD_END.load(Ordering::SeqCst) == bad as u8
}

//! Bugs to plant, so that tests can show that the address sanitizer over RDMA finds them. Compiled in with the feature
//! `planted-bugs` only, which nothing but those tests turns on.

use std::sync::atomic::{AtomicU8, Ordering};

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

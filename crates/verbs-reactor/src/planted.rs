//! Bugs to plant, so that tests can show that the address sanitizer over RDMA finds them. Compiled only with the
//! feature `planted-bugs`, which only those tests enable.

use std::sync::atomic::{AtomicU8, Ordering};

/// A bug at the end of a queue pair over RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BadEnd {
    /// It is never destroyed: the library's memory of it leaks, and the kernel keeps it as long as the device is open.
    Forgotten = 1,
    /// It is destroyed, and read afterwards.
    ReadAfterwards = 2,
}

static BAD_END: AtomicU8 = AtomicU8::new(0);

/// Plants the bug in the whole process.
pub fn end_queue_pairs_badly(bad: BadEnd) {
    BAD_END.store(bad as u8, Ordering::SeqCst);
}

/// Whether this bug was planted.
pub(crate) fn is_end(bad: BadEnd) -> bool {
    BAD_END.load(Ordering::SeqCst) == bad as u8
}

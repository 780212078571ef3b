//! A bug to plant, so that a test can show that the simulator finds it without looking for it. Compiled in with
//! the feature `planted-bugs` only, which nothing but that test turns on.

use std::sync::atomic::{AtomicBool, Ordering};

static WAKE_UP_LOST: AtomicBool = AtomicBool::new(false);

/// Plants in the whole process, or takes out: every eighth arrival wakes nobody.
pub fn lose_wake_ups(lose: bool) {
    WAKE_UP_LOST.store(lose, Ordering::SeqCst);
}

/// Whether the arrival with this number shall wake nobody.
pub(crate) fn is_wake_up_lost(arrival: u64) -> bool {
    WAKE_UP_LOST.load(Ordering::SeqCst) && arrival % 8 == 7
}

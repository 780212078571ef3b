//! Bugs to plant, so that a test can show that the simulator finds them without looking for them. Compiled in
//! with the feature `planted-bugs` only, which nothing but that test turns on.

use std::sync::atomic::{AtomicU8, Ordering};

/// A bug of this layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// The memory of a receive that is given up goes back at once, while the peer may still write it.
    GrantFreedEarly = 1,
    /// Some arrivals are not returned, so their credits never come back.
    CreditSkipped = 2,
}

static PLANTED: AtomicU8 = AtomicU8::new(0);

/// Plants `bug` in the whole process, in place of an earlier one; `None` takes it out.
pub fn plant(bug: Option<Bug>) {
    PLANTED.store(bug.map_or(0, |bug| bug as u8), Ordering::SeqCst);
}

pub(crate) fn is_planted(bug: Bug) -> bool {
    PLANTED.load(Ordering::SeqCst) == bug as u8
}

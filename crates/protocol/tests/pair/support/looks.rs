//! Looks of the tasks of this thread for what they await. None are allowed by default.

use std::cell::Cell;

thread_local! {
    static LOOKS: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Allows looks, which find nothing, and counts from 0.
pub(crate) fn allow() {
    LOOKS.set(Some(0));
}

/// Whether they are allowed.
pub(crate) fn are_allowed() -> bool {
    LOOKS.get().is_some()
}

/// Counts one, and says that it has found nothing.
pub(crate) fn finds() -> bool {
    LOOKS.set(LOOKS.get().map(|looks| looks + 1));
    false
}

/// How many there were since they were allowed.
pub(crate) fn counted() -> u32 {
    LOOKS.get().unwrap_or_default()
}

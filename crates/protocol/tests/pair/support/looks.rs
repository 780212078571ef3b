//! Counts how often tasks of this thread poll for what they await. Such polls are not allowed by default.

use std::cell::Cell;

thread_local! {
    static LOOKS: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Allows polls, which find nothing, and counts from 0.
pub(crate) fn allow() {
    LOOKS.set(Some(0));
}

/// Whether polls are allowed.
pub(crate) fn are_allowed() -> bool {
    LOOKS.get().is_some()
}

/// Counts a poll, and reports that it has found nothing.
pub(crate) fn finds() -> bool {
    LOOKS.set(LOOKS.get().map(|looks| looks + 1));
    false
}

/// The number of polls since they were allowed.
pub(crate) fn counted() -> u32 {
    LOOKS.get().unwrap_or_default()
}

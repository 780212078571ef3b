//! Polling boards.

use super::{QueuePair, Shared};
use crate::{Effort, Look, link::peer_is_here};

/// Reads of a board before the core pauses. Each is a load.
const LOOKS: usize = 4;

impl QueuePair {
    /// Polls for a few microseconds, if that pays off now, until `found` returns true. `found` reads the
    /// [board](crate::SharedMemory::board). Returns whether it returned true. [`help`](Self::help) does the same for
    /// arrivals.
    pub fn look_for(&self, mut found: impl FnMut() -> bool) -> bool {
        let Shared { core, link, .. } = &*self.shared;
        core.help().find_on_board(|| peer_is_here(&**link), || (0..LOOKS).any(|_| found()))
    }

    /// Like [`look_for`](Self::look_for), for a message that may come on the board or as an arrival. An arrival ends
    /// the polling, too.
    pub fn look_for_both(&self, mut found: impl FnMut() -> bool) -> bool {
        self.shared.help(|| if found() { Look::Worked } else { self.shared.link.progress(Effort::Poll) })
    }

    /// Counts that a task has found something on the board.
    pub fn found_on_board(&self) {
        self.shared.core.help().found_on_board();
    }

    /// Whether the runtime's other tasks should run now, because much was found on the board since this last returned
    /// true. After true, the count starts again.
    pub fn other_tasks_are_due(&self) -> bool {
        self.shared.core.help().other_tasks_are_due()
    }
}

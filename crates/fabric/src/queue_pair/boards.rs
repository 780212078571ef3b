//! Boards, and looking at them.

use super::{QueuePair, Shared};
use crate::{Effort, Look, link::peer_is_here};

/// Looks at a board before the core pauses. Each is a load.
const LOOKS: usize = 4;

impl QueuePair {
    /// Looks for a few microseconds, if that pays off now, until `found` is true. As [`help`](Self::help), for what comes on the
    /// [board](crate::SharedMemory::board). Returns whether it came.
    pub fn look_for(&self, mut found: impl FnMut() -> bool) -> bool {
        let Shared { core, link, .. } = &*self.shared;
        core.help().find_on_board(|| peer_is_here(&**link), || (0..LOOKS).any(|_| found()))
    }

    /// As [`look_for`](Self::look_for), for what may come on the board or as an arrival, which ends the look, too.
    pub fn look_for_both(&self, mut found: impl FnMut() -> bool) -> bool {
        self.shared.help(|| if found() { Look::Worked } else { self.shared.link.progress(Effort::Poll) })
    }

    /// Counts that a task has found something on the board.
    pub fn found_on_board(&self) {
        self.shared.core.help().found_on_board();
    }

    /// Whether the runtime's other tasks should have a turn now, because much was found on the board since the last. It counts as
    /// given.
    pub fn is_others_turn(&self) -> bool {
        self.shared.core.help().is_others_turn()
    }
}

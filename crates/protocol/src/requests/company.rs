//! Whether a task may look for the reply to its request itself.

use super::{RequestIndex, Requests};

/// Whether requests are alone, or others are outstanding with them.
#[derive(Debug, Default)]
pub(super) struct Company {
    /// Whether several requests were outstanding at a time since there was none.
    has_several: bool,
    /// As `has_several`, of the time before there was none.
    had_several: bool,
}

impl Company {
    /// A request was opened, and so many are outstanding with it.
    pub(super) fn opened(&mut self, outstanding: usize) {
        if outstanding == 1 {
            self.had_several = self.has_several;
        }
        self.has_several = outstanding > 1;
    }
}

impl<L> Requests<L> {
    /// Whether the task that waits for a reply may poll for it: there is no other request, and no reply has come. After several
    /// requests at a time others will follow, mostly of the same task, and would wait meanwhile.
    pub(crate) fn may_help(&mut self, index: RequestIndex) -> bool {
        let is_alone = self.slots.len() - self.free.len() == 1 && !self.company.had_several;
        is_alone && self.entry(index).is_some_and(|entry| entry.given.is_none() && entry.reply.is_none())
    }
}

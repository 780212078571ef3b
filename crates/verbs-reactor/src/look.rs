//! Looking for work: by a connection's driver, and by tasks that help it.

use std::hint;

/// What a look for work found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Nothing to do.
    Idle,
    /// All there was is done.
    Worked,
    /// There is more to do at once.
    More,
    /// Another task is at it.
    Busy,
    /// The connection is over.
    Over,
}

/// Looks in one go: about 2 µs, for which other tasks of the thread wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Looks {
    pub(crate) count: u32,
    /// A look is a few loads of memory, after which the core should pause.
    pub(crate) pauses: bool,
}

impl Looks {
    /// Of loads of memory. A fabric whose looks are calls has [fewer](crate::Patience::with_looks).
    pub(crate) const LOADS: Self = Self { count: 48, pauses: true };

    /// Looks in up to `goes` goes, until one finds something; gives that.
    pub(crate) fn find<T>(self, goes: u32, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        (0..goes * self.count).find_map(|_| {
            let found = look();
            if found.is_none() && self.pauses {
                hint::spin_loop();
            }
            found
        })
    }
}

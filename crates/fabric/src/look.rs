//! Polling for work: by a connection's driver, and by tasks that help it.

use std::hint;

/// What a call of [`Link::progress`](crate::Link::progress) is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// The calling task is about to sleep. The call sends waiting posts and does the work that has come.
    BeforeSleep,
    /// One of many calls in a row, by the driver or by a task that awaits the peer, while polling pays off. The call
    /// only polls for work of the peer.
    Poll,
}

/// The result of one look for work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Nothing to do.
    Idle,
    /// Nothing to do, and polling cannot find anything now: the next event wakes the driver.
    InVain,
    /// Work was found, and all of it is done.
    Worked,
    /// Work was found, and there is more.
    More,
    /// Another task is polling.
    Busy,
    /// The connection is over.
    Over,
}

/// How long a task that awaits the peer polls, in rounds of about 2 µs.
pub(crate) const ROUNDS: u32 = 5;

/// The looks of one round: about 2 µs, during which other tasks of the thread wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Looks {
    pub(crate) count: u32,
    /// Whether a look is a few loads of memory, after which the core should pause.
    pub(crate) pauses: bool,
}

impl Looks {
    /// For looks that are loads of memory. A fabric whose looks are calls does [fewer](crate::Patience::with_looks).
    pub(crate) const LOADS: Self = Self { count: 48, pauses: true };

    /// Looks for up to `rounds` rounds, until a look finds something, and returns that.
    pub(crate) fn find<T>(self, rounds: u32, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        (0..rounds * self.count).find_map(|_| {
            let found = look();
            if found.is_none() && self.pauses {
                hint::spin_loop();
            }
            found
        })
    }
}

//! The background task of a connection: the only one that sleeps on the kernel.
//!
//! Order: look for work; arm (say that we sleep); look again; sleep. Users' tasks look for work themselves when
//! they are polled, and are woken by completions and arrivals; so the driver is needed only when all of them
//! sleep.

use std::{
    fmt,
    future::Future,
    os::fd::OwnedFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::io::unix::AsyncFd;

use crate::Link;

use super::link::{Outcome, ShmLink};

/// Goes with work after which completions are rung for, whatever user tasks may still answer.
const DEFERRALS_MAX: u32 = 2;

/// See the module's documentation.
pub(super) struct Driver {
    link: Arc<ShmLink>,
    /// The eventfd that the peer rings: edge-triggered, never read.
    bell: AsyncFd<OwnedFd>,
    /// Counts this driver's sleeps; see [`doorbell`](super::doorbell).
    epoch: u64,
    /// Goes with work since completions were last rung for.
    deferrals: u32,
    /// What a test does at the moment where a wake-up would be lost if we did not look again.
    #[cfg(test)]
    pub(super) before_arming: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("link", &self.link).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl Driver {
    pub(super) fn new(link: Arc<ShmLink>, bell: AsyncFd<OwnedFd>) -> Self {
        Self {
            link,
            bell,
            epoch: 0,
            deferrals: 0,
            #[cfg(test)]
            before_arming: None,
        }
    }

    /// Consumes the edges that woke us, and leaves the waker where the next ones find it.
    fn take_edges(&self, context: &mut Context<'_>) {
        self.link.driver.register(context.waker());
        // An error means that the runtime is shutting down, which will drop us.
        while let Poll::Ready(Ok(mut edge)) = self.bell.poll_read_ready(context) {
            edge.clear_ready();
        }
        let socket = &self.link.connection().socket;
        while let Poll::Ready(Ok(mut edge)) = socket.poll_read_ready(context) {
            edge.clear_ready();
            self.link.frames_came();
        }
        if self.link.waits_for_socket() {
            while let Poll::Ready(Ok(mut edge)) = socket.poll_write_ready(context) {
                edge.clear_ready();
            }
        }
    }

    /// Says that we are about to sleep.
    fn arm(&mut self) {
        #[cfg(test)]
        if let Some(act) = self.before_arming.take() {
            act();
        }
        self.epoch += 1;
        self.link.connection().own.set_sleep(self.epoch);
    }

    /// Looks for work, and rings for completions that have waited long enough.
    fn look(&mut self) -> Outcome {
        let outcome = self.link.progress_or_be_woken();
        match outcome {
            Outcome::Worked | Outcome::More => {
                self.deferrals += 1;
                if self.deferrals >= DEFERRALS_MAX {
                    self.settle();
                }
            }
            Outcome::Idle | Outcome::Busy | Outcome::Over => {}
        }
        outcome
    }

    fn settle(&mut self) {
        self.deferrals = 0;
        self.link.settle();
    }
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.take_edges(context);
        let mut outcome = self.look();
        if outcome == Outcome::Idle {
            self.settle();
            self.arm();
            outcome = self.look();
        }
        match outcome {
            Outcome::Idle => {
                // Someone else may have returned completions since the first look.
                self.settle();
                Poll::Pending
            }
            // Whoever is at it wakes us.
            Outcome::Busy => Poll::Pending,
            Outcome::Worked | Outcome::More => {
                // Let the tasks that were woken run first; then look again.
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Outcome::Over => Poll::Ready(()),
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Either the connection is over, or the runtime is going down and nobody would drive it any more.
        self.link.start_close();
        drop(self.link.driver.take());
    }
}

//! A connection's driver, which polls the peer's page, and sleeps on an eventfd, the socket, and the peer's process.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_fabric::{Driven, Link, Look, Patience, QueuePairCore};
use tokio::io::unix::AsyncFd;

use crate::link::ShmLink;

/// After this many rounds of work since the first completion that needs a ring, the driver rings the peer, even if a
/// user's task might still answer.
const DEFERRALS_MAX: u32 = 8;

/// After this many polls without a sleep the driver checks the socket in any case, because the peer may have closed
/// it.
const POLLS_BETWEEN_EDGES: u32 = 64;

/// See the module's documentation.
pub(super) struct ShmDriven {
    link: Arc<ShmLink>,
    /// The eventfd that the peer rings: edge-triggered, never read.
    bell: AsyncFd<OwnedFd>,
    /// The peer's process. Readable when it is dead.
    process: Option<AsyncFd<OwnedFd>>,
    /// The number of this driver's sleeps; see [`doorbell`](super::doorbell).
    epoch: u64,
    /// Rounds of work since the first completion that needs a ring.
    deferrals: u32,
    /// Polls since the latest sleep.
    polls: u32,
    /// A test's action at the moment where a wake-up would be lost if the driver did not look again.
    #[cfg(test)]
    pub(super) before_arming: Option<Box<dyn FnOnce() + Send>>,
}

impl ShmDriven {
    pub(super) fn new(link: Arc<ShmLink>, bell: AsyncFd<OwnedFd>, process: Option<AsyncFd<OwnedFd>>) -> Self {
        Self {
            link,
            bell,
            process,
            epoch: 0,
            deferrals: 0,
            polls: 0,
            #[cfg(test)]
            before_arming: None,
        }
    }

    /// Consumes the edges that woke this task, and registers the waker for the next ones.
    fn take_edges(&self, context: &mut Context<'_>) {
        // An error means that the runtime is shutting down and will drop this task.
        while let Poll::Ready(Ok(mut edge)) = self.bell.poll_read_ready(context) {
            edge.clear_ready();
        }
        if let Some(process) = &self.process
            && let Poll::Ready(Ok(_)) = process.poll_read_ready(context)
        {
            self.link.peer_died();
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

    fn say_asleep(&mut self, listens: bool) {
        self.epoch += 1;
        let own = &self.link.connection().own;
        own.set_listens(listens);
        own.set_sleep(self.epoch);
    }

    /// Waits, after the connection is over, until the peer has released every view of this side's memory, or is dead.
    fn linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.link.is_viewed() {
            self.link.forget_reader();
            return Poll::Ready(());
        }
        while let Poll::Ready(Ok(mut edge)) = self.bell.poll_read_ready(context) {
            edge.clear_ready();
        }
        match &self.process {
            // The page of a dead process still has its claims.
            Some(process) if matches!(process.poll_read_ready(context), Poll::Ready(Ok(_))) => {
                self.link.bury();
                return Poll::Ready(());
            }
            _ => {
                self.say_asleep(true);
                self.link.reclaim();
            }
        }
        if self.link.is_viewed() {
            return Poll::Pending;
        }
        self.link.forget_reader();
        Poll::Ready(())
    }
}

impl Driven for ShmDriven {
    fn link(&self) -> &dyn Link {
        &*self.link
    }

    fn core(&self) -> &QueuePairCore {
        &self.link.connection().core
    }

    fn begin(&mut self, context: &mut Context<'_>) {
        self.link.driver.register(context.waker());
        self.polls += 1;
        if self.polls % POLLS_BETWEEN_EDGES == 1 {
            self.take_edges(context);
        }
    }

    /// Also rings for completions whose ring was deferred long enough.
    fn look(&mut self, context: &mut Context<'_>) -> Look {
        let look = self.link.turn_or_be_woken();
        match look {
            Look::Worked | Look::More => {
                self.deferrals += u32::from(self.link.owes_ring());
                if self.deferrals >= DEFERRALS_MAX {
                    self.settle();
                }
            }
            Look::Over if self.linger(context).is_pending() => return Look::Busy,
            Look::Idle | Look::InVain | Look::Busy | Look::Over => {}
        }
        look
    }

    fn finds(&self) -> u64 {
        self.link.work_done()
    }

    fn advise(&self, patience: &mut Patience) {
        patience.expect_copy(self.link.copied_by_peer());
    }

    /// Rings the peer for completions.
    fn settle(&mut self) {
        self.deferrals = 0;
        self.link.settle();
    }

    /// Announces to the peer that this side is about to sleep.
    fn arm(&mut self, context: &mut Context<'_>) {
        if self.polls > 1 {
            self.take_edges(context);
        }
        self.polls = 0;
        #[cfg(test)]
        if let Some(act) = self.before_arming.take() {
            act();
        }
        self.say_asleep(self.link.awaits_releases());
    }

    fn is_ending(&self) -> bool {
        self.link.is_closing()
    }
}

impl Drop for ShmDriven {
    fn drop(&mut self) {
        // Either the connection is over, or the runtime is shutting down and nothing would drive the connection any
        // more.
        self.link.start_close();
        drop(self.link.driver.take());
    }
}

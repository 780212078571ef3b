//! What a connection's driver looks at and sleeps on: the peer's page; an eventfd, the socket, and the peer's process.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_verbs_reactor::{Driven, Link, Look, Patience, QueuePairCore};
use tokio::io::unix::AsyncFd;

use crate::link::ShmLink;

/// Goes with work, since there was the first completion to ring for, after which the peer is rung whatever user tasks may
/// still answer.
const DEFERRALS_MAX: u32 = 8;

/// Polls without sleep after which the socket is looked at all the same: it may hold the peer's end.
const POLLS_BETWEEN_EDGES: u32 = 64;

/// See the module's documentation.
pub(super) struct ShmDriven {
    link: Arc<ShmLink>,
    /// The eventfd that the peer rings: edge-triggered, never read.
    bell: AsyncFd<OwnedFd>,
    /// The peer's process: readable when it is dead.
    process: Option<AsyncFd<OwnedFd>>,
    /// Counts this driver's sleeps; see [`doorbell`](super::doorbell).
    epoch: u64,
    /// Goes with work since there is a completion to ring for.
    deferrals: u32,
    /// Polls since the latest sleep.
    polls: u32,
    /// What a test does at the moment where a wake-up would be lost if the driver did not look again.
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

    /// Consumes the edges that woke us, and leaves the waker where the next ones find it.
    fn take_edges(&self, context: &mut Context<'_>) {
        // An error means that the runtime is shutting down, which will drop us.
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

    /// The connection is over. Stays as long as the peer views memory of this side: until it says that it does not,
    /// or is dead.
    fn linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.link.has_leases() {
            return Poll::Ready(());
        }
        while let Poll::Ready(Ok(mut edge)) = self.bell.poll_read_ready(context) {
            edge.clear_ready();
        }
        match &self.process {
            Some(process) if matches!(process.poll_read_ready(context), Poll::Ready(Ok(_))) => {
                self.link.bury();
            }
            _ => {
                self.say_asleep(true);
                self.link.reclaim();
            }
        }
        if self.link.has_leases() { Poll::Pending } else { Poll::Ready(()) }
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

    /// Also rings for completions that have waited long enough.
    fn look(&mut self, context: &mut Context<'_>) -> Look {
        let look = self.link.progress_or_be_woken();
        match look {
            Look::Worked | Look::More => {
                self.deferrals += u32::from(self.link.owes_ring());
                if self.deferrals >= DEFERRALS_MAX {
                    self.settle();
                }
            }
            Look::Over if self.linger(context).is_pending() => return Look::Busy,
            Look::Idle | Look::Busy | Look::Over => {}
        }
        look
    }

    fn finds(&self) -> u64 {
        self.link.work_done()
    }

    fn advise(&self, patience: &mut Patience) {
        patience.expect_copy(self.link.copied_by_peer());
    }

    /// Rings for completions.
    fn settle(&mut self) {
        self.deferrals = 0;
        self.link.settle();
    }

    /// Tells the peer that this side is about to sleep.
    fn arm(&mut self, context: &mut Context<'_>) {
        if self.polls > 1 {
            self.take_edges(context);
        }
        self.polls = 0;
        #[cfg(test)]
        if let Some(act) = self.before_arming.take() {
            act();
        }
        self.say_asleep(self.link.has_leases());
    }

    fn is_ending(&self) -> bool {
        self.link.is_closing()
    }
}

impl Drop for ShmDriven {
    fn drop(&mut self) {
        // Either the connection is over, or the runtime is going down and nobody would drive it any more.
        self.link.start_close();
        drop(self.link.driver.take());
    }
}

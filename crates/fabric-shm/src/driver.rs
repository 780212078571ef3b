//! The background task of a connection: the only one that sleeps on the kernel.
//!
//! Order: look for work; after work, let the tasks that it woke run; ring for completions; spin as the fabric's way of
//! waiting wants it; arm (say that we sleep); look again; sleep.
//! Users' tasks look for work themselves when they are polled, and are woken by completions and arrivals; so the
//! driver is needed only when all of them sleep.

use std::{
    fmt,
    future::Future,
    mem,
    os::fd::OwnedFd,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_verbs_reactor::{Idle, Link, Patience};
use tokio::{
    io::unix::AsyncFd,
    runtime::{Handle, RuntimeFlavor},
};

use crate::link::{Outcome, ShmLink};

/// Goes with work, since there was the first completion to ring for, after which the peer is rung whatever user tasks may
/// still answer.
const DEFERRALS_MAX: u32 = 8;

/// Polls without sleep after which the socket is looked at all the same: it may hold the peer's end.
const POLLS_BETWEEN_EDGES: u32 = 64;

/// See the module's documentation.
pub(super) struct Driver {
    link: Arc<ShmLink>,
    /// The eventfd that the peer rings: edge-triggered, never read.
    bell: AsyncFd<OwnedFd>,
    /// The peer's process: readable when it is dead.
    process: Option<AsyncFd<OwnedFd>>,
    /// Counts this driver's sleeps; see [`doorbell`](super::doorbell).
    epoch: u64,
    /// Goes with work since there is a completion to ring for.
    deferrals: u32,
    patience: Patience,
    /// What [`ShmLink::work_done`] was at the latest poll.
    work_done: u64,
    /// Polls since edges were last taken; 0 after a sleep.
    polls: u32,
    /// Work was found, and the tasks that it woke may not have run, nor those that they woke.
    has_woken: bool,
    /// The runtime has many workers, and waking itself would make another one steal this task.
    many_workers: bool,
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
    pub(super) fn new(
        link: Arc<ShmLink>,
        bell: AsyncFd<OwnedFd>,
        process: Option<AsyncFd<OwnedFd>>,
        patience: Patience,
    ) -> Self {
        let flavor = Handle::try_current().map(|handle| handle.runtime_flavor());
        Self {
            link,
            bell,
            process,
            epoch: 0,
            deferrals: 0,
            patience,
            work_done: 0,
            polls: 0,
            has_woken: false,
            many_workers: !matches!(flavor, Ok(RuntimeFlavor::CurrentThread)),
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

    /// Tells the peer that we are about to sleep, and looks once more.
    fn arm_and_look(&mut self, context: &mut Context<'_>) -> Outcome {
        if self.polls > 1 {
            self.take_edges(context);
        }
        self.polls = 0;
        #[cfg(test)]
        if let Some(act) = self.before_arming.take() {
            act();
        }
        self.say_asleep(self.link.has_leases());
        self.look()
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

    /// Ends the present wait if anyone found work.
    fn learn(&mut self) {
        let work_done = self.link.work_done();
        if mem::replace(&mut self.work_done, work_done) != work_done {
            self.patience.worked();
        }
        self.link.set_pays(!self.patience.rests());
    }

    /// What to do now that there is nothing to do.
    fn wait(&mut self) -> Idle {
        let link = &self.link;
        self.patience.expect_copy(link.copied_by_peer());
        self.patience.idle(link.connection().peer.is_here(), || link.may_have_work())
    }

    /// Looks for work, and rings for completions that have waited long enough.
    fn look(&mut self) -> Outcome {
        let outcome = self.link.progress_or_be_woken();
        match outcome {
            Outcome::Worked | Outcome::More => {
                self.deferrals += u32::from(self.link.owes_ring());
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
        self.link.driver.register(context.waker());
        self.polls += 1;
        if self.polls % POLLS_BETWEEN_EDGES == 1 {
            self.take_edges(context);
        }
        let mut outcome = self.look();
        self.learn();
        if outcome == Outcome::Idle && mem::take(&mut self.has_woken) {
            give_way(context);
            return Poll::Pending;
        }
        if outcome == Outcome::Idle {
            self.settle();
            outcome = match self.wait() {
                Idle::Work => self.look(),
                Idle::GiveWay => {
                    std::thread::yield_now();
                    give_way(context);
                    return Poll::Pending;
                }
                Idle::Sleep => self.arm_and_look(context),
            };
            // Not found after all, or not armed yet: again, after the others.
            if outcome == Outcome::Idle && self.polls > 0 {
                give_way(context);
                return Poll::Pending;
            }
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
                self.has_woken = true;
                // Let the tasks that were woken run first; then look again.
                if self.many_workers {
                    give_way(context);
                } else {
                    context.waker().wake_by_ref();
                }
                Poll::Pending
            }
            Outcome::Over => self.linger(context),
        }
    }
}

/// Wakes this task again after the runtime's other tasks and its IO have had a turn.
fn give_way(context: &mut Context<'_>) {
    // The first poll of this future only asks for that; it needs to live no longer.
    let turn = pin!(tokio::task::yield_now());
    let _always_pending = turn.poll(context);
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Either the connection is over, or the runtime is going down and nobody would drive it any more.
        self.link.start_close();
        drop(self.link.driver.take());
    }
}

//! The one loop that waits, for the connections of all fabrics. A fabric says what a look is and what to sleep on ([`Driven`]);
//! how long to look is decided by [`Patience`].
//!
//! Order: look; after work, let the tasks that it woke run; do what was put off until then; look again, as the fabric's way of
//! waiting wants it; arm; look once more; sleep.
//! Users' tasks look by themselves when they are polled, and are woken by completions and arrivals. So the driver is needed
//! only when all of them sleep.

use std::{
    fmt,
    future::Future,
    mem,
    pin::{Pin, pin},
    task::{Context, Poll},
    thread,
};

use tokio::runtime::{Handle, RuntimeFlavor};

use crate::{
    Link, Look, QueuePairCore,
    wait::{Idle, Patience},
};

/// One connection as its [`Driver`] sees it. Dropping it ends the connection: nobody would drive it any more.
pub trait Driven: Send + Unpin {
    /// The connection's link, whose looks are the driver's while it does not sleep.
    fn link(&self) -> &dyn Link;

    /// The state that the link reports to.
    fn core(&self) -> &QueuePairCore;

    /// Begins a poll: leaves `context`'s waker for those who want the driver to look, and takes in what woke it.
    fn begin(&mut self, context: &mut Context<'_>);

    /// Does a bounded part of what there is to do. After [`Busy`](Look::Busy), whoever is at it must wake the driver; after
    /// [`Over`](Look::Over) the driver ends.
    fn look(&mut self, context: &mut Context<'_>) -> Look;

    /// Changes whenever anyone has found work.
    fn finds(&self) -> u64;

    /// Tells `patience` what is known of the wait that begins.
    fn advise(&self, _patience: &mut Patience) {}

    /// Does what was put off until the tasks that work woke have run, and those that they woke.
    fn settle(&mut self) {}

    /// From now on, whatever comes wakes this task. What came before did not: the driver looks once more.
    fn arm(&mut self, _context: &mut Context<'_>) {}

    /// Whether arming costs nothing now, or would be due soon in any case.
    fn arms_at_once(&self) -> bool {
        false
    }

    /// Whether the connection is over or coming to its end: then it is not worth looking for.
    fn is_ending(&self) -> bool;
}

/// The driver of one connection: the only task that sleeps on the kernel for it.
pub struct Driver<D> {
    driven: D,
    /// `None` once the connection ends.
    patience: Option<Patience>,
    /// What [`Driven::finds`] and [`Help::finds`](crate::help::Help::finds) were.
    finds: (u64, u64),
    /// Work was found, and the tasks that it woke may not have run, nor those that they woke.
    has_woken: bool,
    /// The runtime has many workers, and waking itself would make another one steal this task.
    many_workers: bool,
}

impl<D> fmt::Debug for Driver<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("patience", &self.patience).finish_non_exhaustive()
    }
}

impl<D: Driven> Driver<D> {
    /// For the runtime that this is called on.
    pub fn new(driven: D, patience: Patience) -> Self {
        let flavor = Handle::try_current().map(|handle| handle.runtime_flavor());
        driven.core().help().begin(patience.looks());
        Self {
            driven,
            patience: Some(patience),
            finds: (0, 0),
            has_woken: false,
            many_workers: !matches!(flavor, Ok(RuntimeFlavor::CurrentThread)),
        }
    }

    /// Ends the present wait if anyone found work, and lets tasks that wait help, or not.
    fn learn(&mut self) {
        if self.driven.is_ending() {
            self.patience = None;
        }
        let help = self.driven.core().help();
        let finds = (self.driven.finds(), help.finds());
        let (before, helped_before) = mem::replace(&mut self.finds, finds);
        if let Some(patience) = &mut self.patience {
            // The turn that was given away was spent on this very connection.
            if finds.1 != helped_before {
                patience.turn_was_used();
            }
            if finds.0 != before {
                patience.worked();
            }
        }
        help.allow(!self.rests());
    }

    /// Whether the next wait begins with a sleep.
    fn rests(&self) -> bool {
        self.patience.as_ref().is_none_or(Patience::rests)
    }

    /// What to do now that there is nothing to do.
    fn idle(&mut self) -> Idle {
        let Some(patience) = &mut self.patience else { return Idle::Sleep };
        self.driven.advise(patience);
        let link = self.driven.link();
        patience.idle(link.looks_in_vain(), || link.look() != Look::Idle)
    }

    /// Nothing was found. `None` if other tasks go first.
    fn wait(&mut self, context: &mut Context<'_>) -> Option<Look> {
        self.driven.settle();
        match self.idle() {
            // Found by looking; this takes the rest of it.
            Idle::Work => match self.driven.look(context) {
                Look::Idle => Some(Look::Worked),
                look => Some(look),
            },
            Idle::GiveWay => {
                thread::yield_now();
                give_way(context);
                None
            }
            // In this order, or what comes in between would wake nobody.
            Idle::Sleep => {
                self.driven.arm(context);
                Some(self.driven.look(context))
            }
        }
    }
}

impl<D: Driven> Future for Driver<D> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.driven.begin(context);
        let mut look = self.driven.look(context);
        self.learn();
        let sleeps_at_once = self.rests() && self.driven.arms_at_once();
        if look == Look::Idle && mem::take(&mut self.has_woken) && !sleeps_at_once {
            // The second time after work: those run whom the woken tasks woke.
            give_way(context);
            return Poll::Pending;
        }
        if look == Look::Idle || look == Look::Worked && sleeps_at_once {
            let Some(found) = self.wait(context) else { return Poll::Pending };
            look = found;
        }
        match look {
            // Armed. Others may have left something to settle since the first look.
            Look::Idle => self.driven.settle(),
            // Whoever is at it wakes this task.
            Look::Busy => {}
            Look::Worked | Look::More => {
                self.has_woken = true;
                // The tasks that were woken run first.
                if self.many_workers {
                    give_way(context);
                } else {
                    context.waker().wake_by_ref();
                }
            }
            Look::Over => return Poll::Ready(()),
        }
        Poll::Pending
    }
}

/// Wakes this task again after the runtime's other tasks and its IO have had a turn.
fn give_way(context: &mut Context<'_>) {
    // The first poll of this future only asks for that; it needs to live no longer.
    let turn = pin!(tokio::task::yield_now());
    let _always_pending = turn.poll(context);
}

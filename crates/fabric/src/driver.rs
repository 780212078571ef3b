//! The wait loop of the connections of all fabrics. A fabric defines what a look is and what to sleep on
//! ([`Driven`]). [`Patience`] decides how long to look.
//!
//! The order is: look; after work, let the tasks that it woke run; settle the deferred work; look again, for as long as
//! the fabric's [`Wait`](crate::Wait) allows; arm; look once more; sleep. After work that woke no task, such as
//! requests that were answered at once, the driver looks again immediately. Users' tasks look when they are polled, and
//! completions and arrivals wake them. So the driver is needed only when all of them sleep.

use std::{
    fmt,
    future::Future,
    mem,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    thread,
};

use tokio::runtime::{Handle, RuntimeFlavor};

use crate::{
    Alarm, Effort, Link, Look, QueuePairCore,
    help::FINDS_MAX,
    link::peer_is_here,
    wait::{Idle, Patience},
};

/// What a [`Driver`] needs of one connection. Dropping it ends the connection, because nothing would drive it any
/// more.
pub trait Driven: Send + Unpin {
    /// The connection's link. The driver looks through it while it does not sleep.
    fn link(&self) -> &dyn Link;

    /// The state that the link reports to.
    fn core(&self) -> &QueuePairCore;

    /// Begins a poll: registers the waker of `context`, and consumes the event that woke the driver.
    fn begin(&mut self, context: &mut Context<'_>);

    /// Does a bounded part of the pending work. If this returns [`Busy`](Look::Busy), the task that is looking must
    /// wake the driver afterwards. After [`Over`](Look::Over) the driver ends.
    fn look(&mut self, context: &mut Context<'_>) -> Look;

    /// A number that changes whenever any task has found work.
    fn finds(&self) -> u64;

    /// Passes what the fabric knows about the coming wait to `patience`.
    fn advise(&self, _patience: &mut Patience) {}

    /// Runs deferred work: the tasks that the last work woke have run, and so have the tasks that those woke.
    fn settle(&mut self) {}

    /// From now on, new work wakes this task. Earlier work did not, so the driver looks once more after this call.
    fn arm(&mut self, _context: &mut Context<'_>) {}

    /// Whether arming costs nothing now, or is due soon in any case.
    fn arms_at_once(&self) -> bool {
        false
    }

    /// Whether the connection is over or closing. Then the driver does not poll for work.
    fn is_ending(&self) -> bool;
}

/// The driver of one connection: the only task that waits for the kernel on its behalf.
pub struct Driver<D> {
    driven: D,
    /// The fabric wakes this alarm. It is set while this task sleeps.
    alarm: Arc<Alarm>,
    /// Rings `alarm`.
    rings: Waker,
    /// `None` once the connection ends.
    patience: Option<Patience>,
    /// The last values of [`Driven::finds`] and [`Help::finds`](crate::help::Help::finds).
    finds: (u64, u64),
    /// The last value of [`QueuePairCore::for_tasks`].
    for_tasks: u64,
    /// Work was found, and the tasks that it woke, or the tasks that those woke, may not have run yet.
    has_woken: bool,
    /// The runtime has many workers, so waking itself would let another worker steal this task.
    many_workers: bool,
}

impl<D> fmt::Debug for Driver<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("patience", &self.patience).finish_non_exhaustive()
    }
}

impl<D: Driven> Driver<D> {
    /// A driver for the runtime that this is called on.
    pub fn new(driven: D, mut patience: Patience) -> Self {
        let runtime = Handle::try_current();
        let flavor = runtime.as_ref().map(Handle::runtime_flavor);
        driven.core().help().begin(&patience);
        if runtime.as_ref().is_ok_and(|runtime| runtime.metrics().num_workers() > 1) {
            patience.with_other_workers();
        }
        let alarm = Arc::<Alarm>::default();
        Self {
            driven,
            rings: alarm.waker(),
            alarm,
            patience: Some(patience),
            finds: (0, 0),
            for_tasks: 0,
            has_woken: false,
            many_workers: !matches!(flavor, Ok(RuntimeFlavor::CurrentThread)),
        }
    }

    /// Ends the current wait if any task found work. Then allows or forbids waiting tasks to help. Returns true if work
    /// was found that concerns no task.
    fn learn(&mut self) -> bool {
        if self.driven.is_ending() {
            self.patience = None;
        }
        let core = self.driven.core();
        let (finds, for_tasks) = ((self.driven.finds(), core.help().finds()), core.for_tasks());
        let (before, helped_before) = mem::replace(&mut self.finds, finds);
        let concerns_nobody = mem::replace(&mut self.for_tasks, for_tasks) == for_tasks && finds.0 != before;
        if let Some(patience) = &mut self.patience {
            // Other tasks used the yielded turn for this connection.
            if finds.1 != helped_before {
                patience.turn_was_used();
            }
            if core.help().takes_late_turn() {
                patience.turn_was_late();
            }
            if finds.0 != before {
                patience.worked();
            }
            if concerns_nobody {
                patience.look_on();
            }
        }
        core.help().allow(!self.rests());
        concerns_nobody
    }

    /// Wakes this task again after the tasks that were woken before.
    fn go_behind_woken(&self, context: &mut Context<'_>) {
        if self.many_workers {
            self.give_way(context);
        } else {
            // Unlike `give_way`, this makes no system call.
            context.waker().wake_by_ref();
        }
    }

    /// Wakes this task again after the runtime's other tasks and its IO have had a turn.
    fn give_way(&self, context: &mut Context<'_>) {
        if self.many_workers {
            // Only this worker resumes the task, and its other tasks may delay that for long: then a ring lets another
            // worker continue.
            let _is_due_in_any_case = self.alarm.set(context.waker());
        }
        // The first poll of this future requests the turn; the future is not needed afterwards.
        let turn = pin!(tokio::task::yield_now());
        let _always_pending = turn.poll(context);
    }

    /// Whether the next wait begins with a sleep.
    fn rests(&self) -> bool {
        self.patience.as_ref().is_none_or(Patience::rests)
    }

    /// Decides what to do when there is no work.
    fn idle(&mut self) -> Idle {
        let Some(patience) = &mut self.patience else { return Idle::Sleep };
        self.driven.advise(patience);
        let link = self.driven.link();
        patience.idle(peer_is_here(link), || link.progress(Effort::Poll))
    }

    /// One poll. `context` rings the alarm, and `task` wakes this task.
    fn turn(&mut self, context: &mut Context<'_>, task: &mut Context<'_>) -> Poll<()> {
        self.driven.begin(context);
        let mut look = self.driven.look(context);
        let concerns_nobody = self.learn();
        let sleeps_at_once = self.rests() && self.driven.arms_at_once();
        if look == Look::Idle && mem::take(&mut self.has_woken) && !sleeps_at_once {
            // The second turn after work is for the tasks that the woken tasks woke, and for a future that the runtime's thread
            // itself waits for: it runs only between turns.
            if self.rests() {
                self.go_behind_woken(task);
            } else {
                self.give_way(task);
            }
            return Poll::Pending;
        }
        let mut goes_on = look == Look::Idle || look == Look::Worked && (sleeps_at_once || concerns_nobody);
        for _ in 0..FINDS_MAX {
            if !goes_on {
                break;
            }
            let Some(found) = self.wait(context, task) else { return Poll::Pending };
            look = found;
            goes_on = look == Look::Worked && self.learn();
        }
        if look == Look::Busy {
            // The task that is looking wakes this one, unless it has finished meanwhile.
            look = match self.look_before_sleep(context, task) {
                Some(Look::Idle) => Look::Worked,
                Some(found) => found,
                None => return Poll::Pending,
            };
        }
        match look {
            // Armed. Other tasks may have deferred something since the first look.
            Look::Idle | Look::InVain => self.driven.settle(),
            Look::Busy => {}
            Look::Worked | Look::More => {
                self.has_woken = true;
                self.go_behind_woken(task);
            }
            Look::Over => return Poll::Ready(()),
        }
        Poll::Pending
    }

    /// Waits after a look that found nothing. `None` if other tasks run first. `context` rings the alarm, and `task` wakes this
    /// task.
    fn wait(&mut self, context: &mut Context<'_>, task: &mut Context<'_>) -> Option<Look> {
        self.driven.settle();
        match self.idle() {
            // The look found work; this does the rest of it.
            Idle::Work => match self.driven.look(context) {
                Look::Idle => Some(Look::Worked),
                look => Some(look),
            },
            Idle::GiveWay => {
                thread::yield_now();
                // A peer on this CPU has run meanwhile.
                let look = self.driven.look(context);
                if look == Look::Idle {
                    self.give_way(task);
                    return None;
                }
                Some(look)
            }
            // Arm first, then look: in the other order, work that comes in between would wake no task.
            Idle::Sleep => {
                self.driven.arm(context);
                self.look_before_sleep(context, task)
            }
        }
    }

    /// Sets the alarm and looks. `None` if other tasks run first, because it has rung during this poll.
    fn look_before_sleep(&mut self, context: &mut Context<'_>, task: &mut Context<'_>) -> Option<Look> {
        if self.alarm.set(task.waker()) {
            self.go_behind_woken(task);
            return None;
        }
        Some(self.driven.look(context))
    }
}

impl<D: Driven> Future for Driver<D> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        self.alarm.silence();
        let rings = mem::replace(&mut self.rings, Waker::noop().clone());
        let polled = self.turn(&mut Context::from_waker(&rings), task);
        self.rings = rings;
        polled
    }
}

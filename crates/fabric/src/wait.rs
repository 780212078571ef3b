//! How long to poll for work before sleeping.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    Runtime,
    look::{Look, Looks, ROUNDS},
};

/// How a fabric's drivers wait for work. Set when a fabric is made, for all its queue pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Wait {
    /// Sleeps at once. No CPU time is spent on waiting, and each wake-up costs a system call on both sides.
    Sleep,
    /// Polls for some microseconds before it sleeps, first with pauses, then yielding the core. The budget grows
    /// while that pays off and is zero after an idle gap. At most one task per fabric and runtime polls.
    #[default]
    Adaptive,
    /// Never sleeps. Needs a dedicated core.
    Busy,
}

/// A text that names no [`Wait`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("way of waiting `{0}` is unknown: use one of sleep, adaptive, busy")]
pub struct UnknownWait(pub String);

impl std::str::FromStr for Wait {
    type Err = UnknownWait;

    fn from_str(text: &str) -> Result<Self, UnknownWait> {
        match text {
            "sleep" => Ok(Self::Sleep),
            "adaptive" => Ok(Self::Adaptive),
            "busy" => Ok(Self::Busy),
            other => Err(UnknownWait(other.to_owned())),
        }
    }
}

/// The longest time that a driver polls for work before it sleeps: a few times the cost of a wake-up by the kernel. It
/// must be longer than an answer takes when neither side sleeps. Otherwise two polling peers would never be awake at
/// the same time.
const BUDGET_MAX: Duration = Duration::from_micros(20);

/// The smallest useful budget.
const BUDGET_MIN: Duration = Duration::from_micros(4);

/// After a longer wait than this, earlier experience is obsolete. A shorter wait may consist of a little work of the
/// peer and two wake-ups by the kernel, one on each side. On a virtual machine with idle cores each wake-up takes 30 µs
/// and more, where polling would have taken a few µs.
const IDLE_GAP: Duration = Duration::from_micros(200);

/// The time that waking an idle core takes on a virtual machine.
const WAKE_UP: Duration = Duration::from_micros(80);

/// The longest budget in round trips of the fabric's device, in addition to a wake-up. It is as long as an answer
/// takes while one peer still sleeps; otherwise two sleeping peers would never be awake at the same time. Where the
/// device is slow, so is the wake-up.
const ROUND_TRIPS: u32 = 8;

/// The upper limit of all budgets, however slow the device.
const BUDGET_LONGEST: Duration = Duration::from_millis(1);

/// After this many consecutive waits that the longest budget did not cover, polling pauses.
const MISSES_MAX: u32 = 8;

/// The number of waits for which it pauses, so that at most one wait in nine is polled in vain.
const REST_WAITS: u32 = 64;

/// Bytes per nanosecond that a peer copies when the memory is not in its caches.
const BYTES_PER_NS: u64 = 8;

/// During a longer copy by the peer the driver sleeps: the copy outweighs a sleep and a wake-up on each side.
const COPY_LONGEST: Duration = Duration::from_micros(300);

/// State that the drivers of one fabric on one runtime share, so that at most one of them spins.
#[derive(Debug)]
pub struct Spinner {
    wait: Wait,
    taken: AtomicBool,
}

impl Spinner {
    /// The state for the drivers of a new fabric with the setting `wait`.
    pub fn new(wait: Wait) -> Arc<Self> {
        Arc::new(Self { wait, taken: AtomicBool::new(false) })
    }
}

/// The next action of a driver that found no work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// There is work now.
    Work,
    /// Yield to the core's and the runtime's other tasks, then look again.
    GiveWay,
    /// Arm, look once more, and sleep.
    Sleep,
}

/// How a fabric's tasks poll.
#[derive(Debug)]
pub(crate) struct Polling {
    pub(crate) wait: Wait,
    pub(crate) looks: Looks,
    pub(crate) clock: Arc<dyn Runtime>,
    /// If other processes keep the CPU for longer than this, the core is busy.
    pub(crate) turn_max: Duration,
}

impl Polling {
    /// Lets the other processes of this CPU run. Returns whether they took longer than `turn_max`.
    pub(crate) fn gives_way(&self) -> bool {
        let begun = self.clock.now();
        thread::yield_now();
        self.clock.now().saturating_sub(begun) > self.turn_max
    }
}

/// The decisions of one driver, and the state that it has learnt from earlier waits.
#[derive(Debug)]
pub struct Patience {
    spinner: Arc<Spinner>,
    clock: Arc<dyn Runtime>,
    looks: Looks,
    /// How many rounds the driver polls before other tasks run.
    rounds: u32,
    /// The usual value of `rounds`. It differs after a find that concerned no other task.
    rounds_of_turn: u32,
    /// The longest budget of this fabric's drivers.
    budget_max: Duration,
    /// See [`IDLE_GAP`].
    idle_gap: Duration,
    budget: Duration,
    /// Whether this driver is the one that spins.
    holds: bool,
    /// When the current wait began, if that is known.
    since: Option<Duration>,
    /// Whether the current wait includes a sleep.
    slept: bool,
    /// Consecutive waits that slept although the budget was the longest.
    misses: u32,
    /// The number of coming waits without a budget.
    rest: u32,
    /// When the latest turn was yielded, until its length is known.
    gave_way: Option<Duration>,
    /// How much longer this wait may poll, because the peer is copying local bytes.
    copy: Duration,
}

impl Patience {
    /// For one driver of the fabric that `spinner` belongs to. `clock` measures time.
    pub fn new(spinner: Arc<Spinner>, clock: Arc<dyn Runtime>) -> Self {
        Self {
            spinner,
            clock,
            looks: Looks::LOADS,
            rounds: 1,
            rounds_of_turn: 1,
            budget_max: BUDGET_MAX,
            idle_gap: IDLE_GAP,
            budget: Duration::ZERO,
            holds: false,
            since: None,
            slept: false,
            misses: 0,
            rest: 0,
            gave_way: None,
            copy: Duration::ZERO,
        }
    }

    /// Looks `looks` times in one round, which should take about 2 µs. Each look is a call that takes longer than a
    /// pause would, so there are no pauses. On a virtual machine a pause may trap to the hypervisor, which takes many
    /// times as long as a look.
    pub fn with_looks(mut self, looks: u32) -> Self {
        self.looks = Looks { count: looks, pauses: false };
        self
    }

    /// How this driver polls.
    pub(crate) fn polling(&self) -> Polling {
        Polling {
            wait: self.spinner.wait,
            looks: self.looks,
            clock: self.clock.clone(),
            turn_max: self.budget_max,
        }
    }

    /// Records that a turn which a helping task yielded took longer than any budget.
    pub(crate) fn turn_was_late(&mut self) {
        if self.spinner.wait == Wait::Adaptive {
            self.budget = Duration::ZERO;
        }
    }

    /// Limits the budget to `budget_max`.
    pub fn with_budgets_up_to(mut self, budget_max: Duration) -> Self {
        self.budget_max = budget_max;
        self
    }

    /// Sets the longest budget for a device whose own round trip, without either peer's program, takes `round_trip`.
    pub fn follow(&mut self, round_trip: Duration) {
        self.budget_max = WAKE_UP.saturating_add(round_trip.saturating_mul(ROUND_TRIPS)).min(BUDGET_LONGEST);
        self.idle_gap = IDLE_GAP.max(4 * self.budget_max);
        self.budget = self.budget.min(self.budget_max);
    }

    /// Extends the polling of this wait: the peer must copy `bytes` before it can complete what was posted.
    pub fn expect_copy(&mut self, bytes: u64) {
        let copy = Duration::from_nanos(bytes / BYTES_PER_NS);
        self.copy = if copy <= COPY_LONGEST { copy } else { Duration::ZERO };
    }

    /// Whether the next wait begins with a sleep.
    pub fn rests(&self) -> bool {
        match self.spinner.wait {
            Wait::Sleep => true,
            Wait::Adaptive => self.budget.is_zero(),
            Wait::Busy => false,
        }
    }

    /// Records that tasks of this connection used the latest yielded turn, so its length does not show a busy core.
    pub fn turn_was_used(&mut self) {
        self.gave_way = None;
    }

    /// Decides what to do when nothing was found. `look` is cheap. If `peer_is_here`, it can find nothing now: see
    /// [`SharedMemory::peer_is_here`](crate::SharedMemory::peer_is_here).
    pub fn idle(&mut self, peer_is_here: bool, look: impl Fn() -> Look) -> Idle {
        let wait = self.spinner.wait;
        match wait {
            Wait::Sleep => Idle::Sleep,
            Wait::Busy if self.finds(&look) => Idle::Work,
            Wait::Busy => Idle::GiveWay,
            Wait::Adaptive => self.adapt(peer_is_here, look),
        }
    }

    fn adapt(&mut self, peer_is_here: bool, look: impl Fn() -> Look) -> Idle {
        // This was a wake-up without work, so the sleep continues.
        if self.slept || self.budget.is_zero() || !self.takes_turn() {
            return self.sleep();
        }
        // A peer on this CPU gets the CPU at once.
        if !peer_is_here && self.finds(&look) {
            return Idle::Work;
        }
        let now = self.clock.now();
        let since = *self.since.get_or_insert(now);
        self.learn_from_turn(now);
        if now.saturating_sub(since) >= self.budget.saturating_add(self.copy) {
            return self.sleep();
        }
        self.gave_way = Some(now);
        Idle::GiveWay
    }

    /// Ends the polling if the latest yielded turn took longer than any budget, and returns whether it did. The core
    /// then has other tasks to run. Polling delays them and finds nothing that a sleep would have missed. (A turn
    /// that is longer than the *current* budget proves less: the first budgets are as short as a quick turn.)
    fn learn_from_turn(&mut self, now: Duration) -> bool {
        let late = self.gave_way.take().is_some_and(|at| now.saturating_sub(at) > self.budget_max);
        if late {
            self.budget = Duration::ZERO;
        }
        late
    }

    /// Records a find that concerned no other task. Other tasks then need no turn so soon: the next look lasts as long
    /// as that of a task which awaits the peer. That covers the time until a peer's next request.
    pub(crate) fn look_on(&mut self) {
        self.rounds = ROUNDS;
    }

    /// For a runtime with other workers. They run the ready tasks, so the driver's turns are as long as a helper's: the
    /// end of each turn wakes another worker.
    pub(crate) fn with_other_workers(&mut self) {
        (self.rounds, self.rounds_of_turn) = (ROUNDS, ROUNDS);
    }

    /// Looks for one turn.
    fn finds(&mut self, look: &impl Fn() -> Look) -> bool {
        let rounds = mem::replace(&mut self.rounds, self.rounds_of_turn);
        let found = self.looks.find(rounds, || Some(look()).filter(|look| *look != Look::Idle));
        found.is_some_and(|found| found != Look::InVain)
    }

    fn takes_turn(&mut self) -> bool {
        self.holds = self.holds || !self.spinner.taken.swap(true, Ordering::Acquire);
        self.holds
    }

    fn sleep(&mut self) -> Idle {
        self.gives_turn_back();
        self.slept = true;
        self.since.get_or_insert_with(|| self.clock.now());
        Idle::Sleep
    }

    fn gives_turn_back(&mut self) {
        if mem::take(&mut self.holds) {
            self.spinner.taken.store(false, Ordering::Release);
        }
    }

    /// Ends the wait because work was found, and learns from the wait: a budget pays off if it saves a wake-up by the
    /// kernel.
    pub fn worked(&mut self) {
        let since = self.since.take();
        if self.spinner.wait != Wait::Adaptive {
            return;
        }
        let slept = mem::take(&mut self.slept);
        let Some(since) = since else { return };
        let now = self.clock.now();
        if self.learn_from_turn(now) {
            return;
        }
        if !slept {
            self.misses = 0;
            return self.grow(); // Found while spinning.
        }
        if now.saturating_sub(since) > self.idle_gap {
            self.budget = Duration::ZERO;
        } else {
            self.missed();
        }
    }

    /// Records a wait that slept. Polling might have shortened it, which only a longer budget can show, up to the
    /// longest.
    fn missed(&mut self) {
        if self.rest > 0 {
            self.rest -= 1;
            return;
        }
        if self.budget < self.budget_max {
            return self.grow();
        }
        self.misses += 1;
        if self.misses == MISSES_MAX {
            (self.misses, self.rest, self.budget) = (0, REST_WAITS, Duration::ZERO);
        }
    }

    fn grow(&mut self) {
        self.budget = self.budget.saturating_mul(2).max(BUDGET_MIN).min(self.budget_max);
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        self.gives_turn_back();
    }
}

#[cfg(test)]
pub(crate) mod tests;

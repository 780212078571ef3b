//! The world: everything that one seed decides, and the loop that runs it.

use std::{
    any::Any,
    fmt,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use crate::{
    Failure, Fault, Handle, Rng, Summary, Swarm, Violation, descriptors,
    ids::{NodeId, TaskId},
    lock::lock,
    shared::Shared,
    state::{Action, Trash},
    steps::Step,
    trace::Event,
};

/// The world that the code under test asks while it runs.
struct Asked(Arc<Shared>);

impl tensorwire_testpoints::World for Asked {
    fn chance(&self, name: &'static str) -> bool {
        let now = self.0.now();
        let is_taken = lock(&self.0.chances).as_mut().is_some_and(|chances| chances.take(name, now));
        if is_taken {
            self.reached(name);
        }
        is_taken
    }

    fn reached(&self, name: &'static str) {
        self.0.record(Event::Reached { name });
    }
}

impl Shared {
    pub(crate) fn poll_task(&self, id: TaskId) {
        let Some(mut polling) = self.state().tasks.begin_poll(id) else { return };
        let waker = polling.waker;
        let finished = self.poll(id, || polling.future.as_mut().poll(&mut Context::from_waker(&waker)));
        let mut state = self.state();
        if finished.is_some() {
            state.tasks.finish(id);
            drop(state);
        } else if let Some(gone) = state.tasks.end_poll(id, polling.future) {
            drop(state);
            drop(gone);
        }
    }

    /// One poll. A panic is a finding; the task that panicked is never polled again, because the run ends.
    fn poll<T>(&self, task: TaskId, poll: impl FnOnce() -> Poll<T>) -> Option<T> {
        let answer = match catch_unwind(AssertUnwindSafe(poll)) {
            Ok(Poll::Ready(answer)) => Some(answer),
            Ok(Poll::Pending) => None,
            Err(payload) => {
                self.violated(Violation::Panicked(panic_text(payload.as_ref())));
                None
            }
        };
        self.record(Event::Polled { task, finished: answer.is_some() });
        answer
    }

    fn execute(&self, step: Step) {
        match step {
            Step::Task(id) => self.poll_task(id),
            Step::Action(action) => self.act(action),
            Step::Timer(node, timer, waker) => {
                self.record(Event::Fired { node, timer });
                waker.wake();
            }
            Step::Read(endpoint) => self.read_piece(endpoint),
            Step::Land(endpoint) => self.land_piece(endpoint),
            Step::Deliver(endpoint) => self.deliver(endpoint),
            Step::Complete(endpoint) => self.complete(endpoint),
            Step::Sample(endpoint) => self.sample_piece(endpoint),
            Step::Return(endpoint) => self.return_piece(endpoint),
            Step::Frame(session) => self.deliver_frame(session),
        }
    }

    fn act(&self, action: Action) {
        let Some(action) = self.unless_stopped(action) else { return };
        match action {
            Action::Connect(endpoint) => self.hand_over(endpoint),
            Action::RefuseConnect(endpoint, error) => self.refuse_connect(endpoint, error),
            Action::LoseHalf(endpoint) => self.lose_half(endpoint),
            Action::Late(packet) => self.late_packet(&packet),
            Action::Release(_, lease) => self.release_lease(lease),
            Action::Bury(node) => self.bury(node),
            Action::Fail(endpoint, error) => self.fail_endpoint(endpoint, &error),
            Action::Flush(endpoint) => self.flush(endpoint),
            Action::Drain(endpoint) => self.drain(endpoint),
            Action::LoseSession(session) => self.lose_session(session),
            Action::Fault(fault) => self.inject(fault),
        }
    }

    fn due_trigger(&self) -> Option<Fault> {
        let events = lock(&self.trace).events();
        let mut state = self.state();
        let index = state.triggers.iter().position(|(at, _)| *at <= events)?;
        Some(state.triggers.swap_remove(index).1)
    }

    fn failure(&self) -> Option<Box<Failure>> {
        let violation = lock(&self.failure).clone()?;
        let phase = self.phase();
        let trace = lock(&self.trace);
        let (plan, is_given) = lock(&self.plan).clone();
        let given = if is_given { format!(" SIM_PLAN=\"{plan}\"") } else { String::new() };
        Some(Box::new(Failure {
            seed: self.seed,
            violation,
            hash: trace.hash(),
            events: trace.events(),
            at: self.now(),
            tail: trace.tail(),
            swarm: format!("{:?}", self.swarm),
            phase,
            plan,
            replay: format!(
                "SIM_SEED={}{given} cargo test -p tensorwire-sim --test all {}:: -- --nocapture",
                self.seed,
                lock(&self.replay)
            ),
        }))
    }

    /// Takes the next event. `None` after a planned fault or a finding.
    fn next_step(&self) -> Option<Step> {
        if let Some(fault) = self.due_trigger() {
            self.inject(fault);
            return None;
        }
        if lock(&self.trace).events() > self.swarm.events_max {
            let open = self.ledger().describe_open();
            self.violated(Violation::Endless(format!("{} events; {open}", self.swarm.events_max)));
            return None;
        }
        let overdue = self.ledger().overdue(self.now());
        if let Some(late) = overdue {
            self.violated(late);
            return None;
        }
        match self.choose() {
            Ok(step) => Some(step),
            Err(violation) => {
                self.violated(violation);
                None
            }
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without text".into())
}

/// One simulated cluster, on the thread that runs it.
///
/// Each step picks one enabled event by the seed's random numbers: a woken task runs, a piece of a write is read or
/// lands, an arrival, completion or control frame is delivered, a due timer or planned fault fires. Virtual time moves
/// when nothing else is enabled, to the next moment that something waits for; sometimes by a bounded jitter; and past
/// tasks that only spin (they keep waking themselves while the wire waits).
///
/// **Stuck**: the run fails when nothing is enabled at any time; or when an operation of the ledger is open and
/// all that is left to wait for are sleeps that were asked for with at least
/// [`Swarm::deadline_at_least`] (deadlines, liveness, tombstones): those bound a failure, they are not progress.
pub struct World {
    shared: Arc<Shared>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

/// Events in a report, unless `SIM_TAIL` sets another number.
const TAIL: usize = 60;

impl World {
    /// A world whose knobs are drawn from `seed` too.
    pub fn new(seed: u64) -> Self {
        let swarm = Swarm::draw(&mut Rng::new(seed).fork(1));
        Self::with_swarm(seed, swarm)
    }

    /// A world with given knobs.
    pub fn with_swarm(seed: u64, swarm: Swarm) -> Self {
        descriptors::raise_limit();
        let tail = std::env::var("SIM_TAIL").ok().and_then(|text| text.parse().ok()).unwrap_or(TAIL);
        Self { shared: Shared::new(seed, swarm, tail) }
    }

    /// The handle with which a scenario acts on the world.
    pub fn handle(&self) -> Handle {
        Handle::new(self.shared.clone())
    }

    /// Runs events until `scenario`, which runs on the [operator](NodeId::OPERATOR), returns.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn run<T>(&self, scenario: impl Future<Output = T>) -> Result<T, Box<Failure>> {
        self.run_erased(pin!(scenario))
    }

    /// Erased, so that scenarios with one type of result share the code of the loop.
    fn run_erased<T>(&self, mut scenario: Pin<&mut dyn Future<Output = T>>) -> Result<T, Box<Failure>> {
        let shared = &self.shared;
        let _entered = tensorwire_testpoints::enter(Asked(shared.clone()));
        let (id, waker) = shared.state().tasks.reserve(NodeId::OPERATOR, "scenario");
        shared.record(Event::Spawned { node: NodeId::OPERATOR, task: id, name: "scenario" });
        let answer = loop {
            if let Some(failure) = shared.failure() {
                break Err(failure);
            }
            let Some(step) = shared.next_step() else { continue };
            if !matches!(step, Step::Task(task) if task == id) {
                shared.execute(step);
                continue;
            }
            shared.state().tasks.begin_poll(id);
            let answer = shared.poll(id, || scenario.as_mut().poll(&mut Context::from_waker(&waker)));
            // A finding of the same step comes first: the result may be wrong because of it.
            if let Some(answer) = answer
                && shared.failure().is_none()
            {
                break Ok(answer);
            }
        };
        shared.state().tasks.finish(id);
        answer
    }

    /// Names the suite of this package's tests that runs the world again, for reports. Default `seeds`.
    pub fn replayed_by(&self, test: &str) {
        test.clone_into(&mut lock(&self.shared.replay));
    }

    /// Keeps the last `count` events for reports and [`Handle::events`], instead of a few.
    pub fn keep_events(&self, count: usize) {
        lock(&self.shared.trace).keep(count);
    }

    /// Ends the world and checks that no operation is open.
    ///
    /// # Errors
    /// The broken promise.
    pub fn finish(self) -> Result<Summary, Box<Failure>> {
        let shared = &self.shared;
        let (done, failed, crashes) = {
            let ledger = shared.ledger();
            if ledger.is_open() {
                let open = ledger.describe_open();
                shared.violated(Violation::Operation(format!("the scenario is over, but {open}")));
            }
            (ledger.done, ledger.failed, ledger.crashes)
        };
        if let Some(failure) = shared.failure() {
            return Err(failure);
        }
        let trace = lock(&shared.trace);
        Ok(Summary {
            seed: shared.seed,
            hash: trace.hash(),
            events: trace.events(),
            at: shared.now(),
            operations_done: done,
            operations_failed: failed,
            crashes,
            leaks: shared.owners().leaks,
            marks: trace.marks(),
        })
    }
}

impl Drop for World {
    /// Breaks the reference cycles (tasks hold the world that holds them) after everything is dead, so that nothing acts
    /// any more.
    fn drop(&mut self) {
        let count = self.shared.state().nodes.len() as u32;
        (0..count).for_each(|node| self.shared.owners().forget_node(NodeId(node)));
        let mut state = self.shared.state();
        state.nodes.iter_mut().for_each(|node| node.alive = false);
        let trash: Trash = vec![
            Box::new(state.tasks.remove_node(None)),
            Box::new(state.agenda.remove_node(None)),
            Box::new(state.agenda.clear_actions()),
            Box::new(std::mem::take(&mut state.endpoints)),
            Box::new(std::mem::take(&mut state.control)),
            Box::new(std::mem::take(&mut state.leases)),
        ];
        drop(state);
        drop(trash);
    }
}

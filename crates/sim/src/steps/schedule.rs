//! Chooses the next event.

use std::{task::Waker, time::Duration};

use super::freeze::{DuePoll, PUT_OFF_MAX};
use crate::{
    Violation,
    ids::{EndpointId, NodeId, SessionId, TaskId},
    shared::Shared,
    state::{Action, State, WireStep},
    trace::Event,
};

/// One enabled event, taken.
#[derive(Debug)]
pub(crate) enum Step {
    Task(TaskId),
    Action(Action),
    Timer(NodeId, u64, Waker),
    Read(EndpointId),
    Land(EndpointId),
    Deliver(EndpointId),
    Complete(EndpointId),
    Sample(EndpointId),
    Return(EndpointId),
    Frame(SessionId),
}

/// A group of enabled events of equal weight.
#[derive(Debug, Clone, Copy)]
enum Group {
    Tasks(usize),
    Actions(usize),
    Timers(usize),
    Wire(WireStep, EndpointId),
    Frame(SessionId),
}

/// The events that are enabled now, and when the next one will be.
struct Enabled {
    groups: Vec<(u64, Group)>,
    next: Option<Duration>,
}

impl Enabled {
    fn push(&mut self, weight: u32, count: usize, group: Group) {
        if count > 0 {
            self.groups.push((u64::from(weight) * count as u64, group));
        }
    }

    fn has_only_tasks(&self) -> bool {
        matches!(self.groups[..], [(_, Group::Tasks(_))])
    }

    fn later(&mut self, at: Duration) {
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    /// Adds one event that is possible from `at` on.
    fn offer(&mut self, now: Duration, at: Duration, weight: u32, group: Group) {
        if at <= now {
            self.push(weight, 1, group);
        } else {
            self.later(at);
        }
    }
}

impl Shared {
    /// Takes the next event; lets time pass until there is one.
    pub(crate) fn choose(&self) -> Result<Step, Violation> {
        self.jitter();
        loop {
            let mut state = self.state();
            let now = self.now();
            let enabled = self.enabled(&state, now);
            if state.spins.note(enabled.has_only_tasks()) {
                self.pass_spinning(&state, enabled.next);
                continue;
            }
            if let Some(group) = pick(&mut state, enabled.groups) {
                match take(&mut state, now, group) {
                    Taken::Step(step) => return Ok(step),
                    Taken::Void => {}
                    Taken::PutOff => self.advance_to(now + state.rng.duration(PUT_OFF_MAX)),
                }
                continue;
            }
            self.advance(&state, enabled.next)?;
        }
    }

    /// Lets time pass for tasks that spin on something that takes time: up to the next event in flight, never up to a
    /// deadline.
    fn pass_spinning(&self, state: &State, wire: Option<Duration>) {
        let agenda = &state.agenda;
        let next = [wire, agenda.next_action(), agenda.next_timer(false)].into_iter().flatten().min();
        if let Some(next) = next {
            self.advance_to(next);
        }
    }

    /// Lets time pass because nothing is enabled, unless only deadlines are left.
    fn advance(&self, state: &State, wire: Option<Duration>) -> Result<(), Violation> {
        let agenda = &state.agenda;
        let next = [wire, agenda.next_action(), agenda.next_timer(true)].into_iter().flatten().min();
        let Some(next) = next else {
            let (open, tasks) = (self.ledger().describe_open(), state.tasks.describe());
            let text = format!("nothing is enabled, the scenario is unfinished; {open}; waiting: {tasks}");
            return Err(Violation::Stuck(text));
        };
        let ledger = self.ledger();
        // Only deadlines detect a stopped process.
        let bounded = state.frozen == 0;
        if bounded && wire.is_none() && agenda.only_deadlines() && ledger.is_open_among_honest() {
            let (open, tasks) = (ledger.describe_open(), state.tasks.describe());
            let text = format!("only deadlines are left to wait for; {open}; waiting: {tasks}");
            return Err(Violation::Stuck(text));
        }
        self.advance_to(next);
        Ok(())
    }

    fn jitter(&self) {
        let mut state = self.state();
        if state.rng.chance(self.swarm.jitter_of_256, 256) {
            let passed = state.rng.duration(self.swarm.jitter_max);
            self.advance_to(self.now() + passed);
            self.record(Event::Jitter);
        }
    }

    fn enabled(&self, state: &State, now: Duration) -> Enabled {
        let swarm = &self.swarm;
        let mut enabled = Enabled { groups: Vec::new(), next: None };
        let ready = state.tasks.ready.length();
        enabled.push(swarm.task_weight, ready, Group::Tasks(ready));
        let actions = state.agenda.due_actions(now);
        enabled.push(swarm.timer_weight, actions, Group::Actions(actions));
        let timers = state.agenda.due_timers(now);
        enabled.push(swarm.timer_weight, timers, Group::Timers(timers));
        for (number, endpoint) in state.endpoints.iter().enumerate() {
            let id = EndpointId(number as u32);
            endpoint.offers(&state.endpoints, |step, at| {
                enabled.offer(now, at, swarm.wire_weight, Group::Wire(step, id));
            });
        }
        state.control.offers(|session, at| {
            enabled.offer(now, at, swarm.control_weight, Group::Frame(session));
        });
        enabled
    }
}

fn pick(state: &mut State, groups: Vec<(u64, Group)>) -> Option<Group> {
    let total: u64 = groups.iter().map(|(weight, _)| weight).sum();
    let mut left = state.rng.below(usize::try_from(total).unwrap_or(usize::MAX)) as u64;
    for (weight, group) in groups {
        if left < weight {
            return Some(group);
        }
        left -= weight;
    }
    None
}

/// The result of taking an event.
enum Taken {
    Step(Step),
    /// A wake-up of a task that is gone, or of a stopped process.
    Void,
    /// A slow process defers it.
    PutOff,
}

impl From<Option<Step>> for Taken {
    fn from(step: Option<Step>) -> Self {
        step.map_or(Self::Void, Self::Step)
    }
}

fn take(state: &mut State, now: Duration, group: Group) -> Taken {
    let step = match group {
        Group::Tasks(count) => {
            let index = state.rng.below(count);
            return match state.take_task(index) {
                DuePoll::Due(task) => Taken::Step(Step::Task(task)),
                DuePoll::Void => Taken::Void,
                DuePoll::PutOff => Taken::PutOff,
            };
        }
        Group::Actions(count) => {
            let index = state.rng.below(count);
            return state.agenda.take_action(now, index).map(Step::Action).into();
        }
        Group::Timers(count) => {
            let index = state.rng.below(count);
            let timer = state.agenda.take_timer(now, index);
            return timer.map(|(node, timer, waker)| Step::Timer(node, timer, waker)).into();
        }
        Group::Wire(WireStep::Read, endpoint) => Step::Read(endpoint),
        Group::Wire(WireStep::Land, endpoint) => Step::Land(endpoint),
        Group::Wire(WireStep::Deliver, endpoint) => Step::Deliver(endpoint),
        Group::Wire(WireStep::Complete, endpoint) => Step::Complete(endpoint),
        Group::Wire(WireStep::Sample, endpoint) => Step::Sample(endpoint),
        Group::Wire(WireStep::Return, endpoint) => Step::Return(endpoint),
        Group::Frame(session) => Step::Frame(session),
    };
    Taken::Step(step)
}

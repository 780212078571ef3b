//! Processes that are stopped, or slow.

use std::time::Duration;

use crate::{
    ids::{NodeId, TaskId},
    shared::Shared,
    state::{Action, Frozen, Reach, State},
    trace::Event,
};

/// Of 256 polls of a slow node's tasks, how many are deferred.
const SLOW_OF_256: u32 = 224;

/// Longest time that passes when a poll is deferred.
pub(crate) const PUT_OFF_MAX: Duration = Duration::from_micros(20);

impl Shared {
    pub(crate) fn freeze(&self, node: NodeId) {
        let mut state = self.state();
        let stoppable = node != NodeId::OPERATOR && state.is_alive(node);
        if !stoppable || state.nodes[node.index()].frozen.is_some() {
            return;
        }
        let nic = state.rng.chance(1, 2);
        state.nodes[node.index()].frozen = Some(Frozen::default());
        state.frozen += 1;
        let address = state.nodes[node.index()].address.clone();
        stop_endpoints(&mut state, node, !nic);
        drop(state);
        self.record(Event::Frozen { node, nic });
        let mut ledger = self.ledger();
        ledger.excuse(&address);
        ledger.fault(Reach::Stopped(address), None);
    }

    pub(crate) fn thaw(&self, node: NodeId) {
        let mut state = self.state();
        let Some(frozen) = state.nodes.get_mut(node.index()).and_then(|node| node.frozen.take()) else {
            return;
        };
        state.frozen -= 1;
        let address = state.nodes[node.index()].address.clone();
        stop_endpoints(&mut state, node, false);
        frozen.tasks.into_iter().for_each(|task| state.tasks.ready.put(task));
        for action in frozen.actions {
            state.agenda.plan(self.now(), action);
        }
        drop(state);
        self.record(Event::Thawed { node });
        self.ledger().healed(&Reach::Stopped(address), self.now());
    }

    pub(crate) fn slow(&self, node: NodeId) {
        if let Some(found) = self.state().nodes.get_mut(node.index()).filter(|_| node != NodeId::OPERATOR) {
            found.slow_of_256 = SLOW_OF_256;
        }
        self.record(Event::Slowed { node });
    }

    /// Defers `action` if it belongs to a side whose process is stopped and executes it.
    pub(crate) fn unless_stopped(&self, action: Action) -> Option<Action> {
        let mut state = self.state();
        let stopped =
            action.endpoint().and_then(|id| state.endpoints.get(id.index())).filter(|end| end.stopped);
        let Some(node) = stopped.map(|end| end.node) else { return Some(action) };
        match &mut state.nodes[node.index()].frozen {
            Some(frozen) => {
                frozen.actions.push(action);
                None
            }
            None => Some(action),
        }
    }
}

fn stop_endpoints(state: &mut State, node: NodeId, stopped: bool) {
    let ends = state.endpoints.iter_mut().filter(|end| end.node == node);
    ends.for_each(|end| end.stopped = stopped);
}

/// How a poll that is due is handled.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DuePoll {
    /// The task is polled now.
    Due(TaskId),
    /// Its node is stopped, or the task gone.
    Void,
    /// Its node is slow: the poll is deferred.
    PutOff,
}

impl State {
    /// Takes one of the woken tasks of `node`, unless the node is stopped, in `of_256` of 256 cases.
    pub(crate) fn take_task_of(&mut self, node: NodeId, of_256: u32) -> Option<TaskId> {
        let Self { nodes, rng, tasks, .. } = self;
        let process = nodes.get(node.index()).filter(|process| process.alive && process.frozen.is_none())?;
        let runs_at_speed = process.slow_of_256 == 0;
        let is_of_node = |task| tasks.node_of(task) == Some(node);
        let pick = |count| (count > 0 && runs_at_speed && rng.chance(of_256, 256)).then(|| rng.below(count));
        tasks.ready.take_of(is_of_node, pick)
    }

    /// Takes one of the woken tasks.
    pub(crate) fn take_task(&mut self, index: usize) -> DuePoll {
        let Some(task) = self.tasks.ready.take(index) else { return DuePoll::Void };
        let Some(node) = self.tasks.node_of(task) else { return DuePoll::Void };
        let Self { nodes, rng, tasks, .. } = self;
        let Some(node) = nodes.get_mut(node.index()) else { return DuePoll::Void };
        if let Some(frozen) = &mut node.frozen {
            frozen.tasks.insert(task);
            return DuePoll::Void;
        }
        if node.slow_of_256 > 0 && rng.chance(node.slow_of_256, 256) {
            tasks.ready.put(task);
            return DuePoll::PutOff;
        }
        DuePoll::Due(task)
    }
}

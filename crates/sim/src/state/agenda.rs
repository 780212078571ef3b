//! Sleeps and actions that are planned for a time.

use std::{collections::BTreeMap, task::Waker, time::Duration};

use tensorwire_fabric::FabricError;

use super::late_packet::LatePacket;
use crate::{
    fault::Fault,
    ids::{EndpointId, LeaseId, NodeId, SessionId},
};

/// An action that is planned for a time.
#[derive(Debug)]
pub(crate) enum Action {
    /// Both sides have connected: this one sees it now.
    Connect(EndpointId),
    /// Connecting failed.
    RefuseConnect(EndpointId, FabricError),
    /// This side of a half-open queue pair sees that connecting failed.
    LoseHalf(EndpointId),
    /// A packet arrives after its sender or target has died.
    Late(LatePacket),
    /// This side sees that its connection is over.
    Fail(EndpointId, FabricError),
    /// This side's outstanding operations end.
    Flush(EndpointId),
    /// Nothing of the peer reaches this side any more.
    Drain(EndpointId),
    /// The lender on this side sees that a lease is over.
    Release(EndpointId, LeaseId),
    /// Watchers of the node's process see that it is dead.
    Bury(NodeId),
    /// This side of a control session sees that the other is gone.
    LoseSession(SessionId),
    /// The scenario's fault.
    Fault(Fault),
}

impl Action {
    /// The side that must execute it.
    pub(crate) fn endpoint(&self) -> Option<EndpointId> {
        match self {
            Self::Connect(id)
            | Self::RefuseConnect(id, _)
            | Self::LoseHalf(id)
            | Self::Fail(id, _)
            | Self::Flush(id)
            | Self::Drain(id)
            | Self::Release(id, _) => Some(*id),
            Self::LoseSession(_) | Self::Late(_) | Self::Bury(_) | Self::Fault(_) => None,
        }
    }
}

#[derive(Debug)]
struct Timer {
    node: NodeId,
    waker: Waker,
    /// Whether it is long enough to be a deadline.
    is_deadline: bool,
}

/// Sleeps and planned actions, by time and then by order of creation.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    timers: BTreeMap<(Duration, u64), Timer>,
    actions: BTreeMap<(Duration, u64), Action>,
    next: u64,
}

impl Agenda {
    pub(crate) fn plan(&mut self, at: Duration, action: Action) {
        self.actions.insert((at, self.next), action);
        self.next += 1;
    }

    pub(crate) fn next_action(&self) -> Option<Duration> {
        self.actions.first_key_value().map(|((at, _), _)| *at)
    }

    pub(crate) fn next_timer(&self, deadlines_too: bool) -> Option<Duration> {
        let mut timers = self.timers.iter().filter(|(_, timer)| deadlines_too || !timer.is_deadline);
        timers.next().map(|((at, _), _)| *at)
    }

    /// Whether only deadlines are pending, and no planned action.
    pub(crate) fn only_deadlines(&self) -> bool {
        self.actions.is_empty() && self.timers.values().all(|timer| timer.is_deadline)
    }

    pub(crate) fn due_actions(&self, now: Duration) -> usize {
        self.actions.range(..=(now, u64::MAX)).count()
    }

    pub(crate) fn due_timers(&self, now: Duration) -> usize {
        self.timers.range(..=(now, u64::MAX)).count()
    }

    pub(crate) fn take_action(&mut self, now: Duration, index: usize) -> Option<Action> {
        let key = *self.actions.range(..=(now, u64::MAX)).nth(index)?.0;
        self.actions.remove(&key)
    }

    pub(crate) fn take_timer(&mut self, now: Duration, index: usize) -> Option<(NodeId, u64, Waker)> {
        let key = *self.timers.range(..=(now, u64::MAX)).nth(index)?.0;
        let timer = self.timers.remove(&key)?;
        Some((timer.node, key.1, timer.waker))
    }

    /// Begins a sleep. The key names it.
    pub(crate) fn sleep(
        &mut self,
        node: NodeId,
        until: Duration,
        is_deadline: bool,
        waker: Waker,
    ) -> (Duration, u64) {
        let key = (until, self.next);
        self.next += 1;
        self.timers.insert(key, Timer { node, waker, is_deadline });
        key
    }

    /// The waker of a sleep that has not ended.
    pub(crate) fn sleeper(&mut self, key: (Duration, u64)) -> Option<&mut Waker> {
        self.timers.get_mut(&key).map(|timer| &mut timer.waker)
    }

    /// Ends a sleep without waking. Returns its waker for dropping.
    pub(crate) fn end_sleep(&mut self, key: (Duration, u64)) -> Option<Waker> {
        self.timers.remove(&key).map(|timer| timer.waker)
    }

    /// Removes the sleeps of `node` (of all if `None`) and returns their wakers for dropping.
    pub(crate) fn remove_node(&mut self, node: Option<NodeId>) -> Vec<Waker> {
        let of_node = |timer: &Timer| node.is_none_or(|node| timer.node == node);
        let gone: Vec<_> = self.timers.iter().filter(|(_, t)| of_node(t)).map(|(key, _)| *key).collect();
        gone.iter().filter_map(|key| Some(self.timers.remove(key)?.waker)).collect()
    }

    pub(crate) fn clear_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions).into_values().collect()
    }
}

//! Virtual time: sleeps, and things planned for a time.

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use verbs_reactor::FabricError;

use crate::{
    Fault,
    ids::{EndpointId, LeaseId, NodeId, SessionId},
    late::LatePacket,
    world::Shared,
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
    /// Those that watch the node's process see that it is dead.
    Bury(NodeId),
    /// This side of a control session sees that the other is gone.
    LoseSession(SessionId),
    /// The scenario's fault.
    Fault(Fault),
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

    /// Whether only deadlines are waited for, and no planned action.
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

/// A sleep in virtual time.
pub(crate) struct Sleep {
    shared: Arc<Shared>,
    node: NodeId,
    deadline: Duration,
    is_deadline: bool,
    key: Option<(Duration, u64)>,
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleep").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl Sleep {
    pub(crate) fn new(shared: Arc<Shared>, node: NodeId, duration: Duration) -> Self {
        let deadline = shared.now().saturating_add(duration);
        let is_deadline = duration >= shared.swarm.deadline_at_least;
        Self { shared, node, deadline, is_deadline, key: None }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let shared = self.shared.clone();
        let mut state = shared.state();
        let alive = state.is_alive(self.node);
        let agenda = &mut state.agenda;
        match self.key {
            Some(key) => match agenda.timers.get_mut(&key) {
                Some(timer) => {
                    let before = std::mem::replace(&mut timer.waker, context.waker().clone());
                    drop(state);
                    drop(before);
                    Poll::Pending
                }
                // Fired, or its node is dead and does not poll it any more.
                None => Poll::Ready(()),
            },
            // Its process is gone, so it never ends.
            None if !alive => Poll::Pending,
            None => {
                let key = (self.deadline, agenda.next);
                agenda.next += 1;
                let (node, is_deadline) = (self.node, self.is_deadline);
                agenda.timers.insert(key, Timer { node, waker: context.waker().clone(), is_deadline });
                drop(state);
                self.key = Some(key);
                Poll::Pending
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let timer = self.shared.state().agenda.timers.remove(&key);
            drop(timer);
        }
    }
}

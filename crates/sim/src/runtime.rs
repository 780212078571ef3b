//! A node's runtime: tasks, virtual time and random numbers.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tensorwire_fabric::{BoxFuture, Runtime};

use crate::{ids::NodeId, shared::Shared};

/// One node's view of the world's executor, clock and random numbers.
#[derive(Debug, Clone)]
pub struct SimRuntime {
    shared: Arc<Shared>,
    node: NodeId,
}

impl SimRuntime {
    pub(crate) fn new(shared: Arc<Shared>, node: NodeId) -> Self {
        Self { shared, node }
    }
}

impl Runtime for SimRuntime {
    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>) {
        self.shared.spawn(self.node, name, task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(Sleep::new(self.shared.clone(), self.node, duration))
    }

    fn now(&self) -> Duration {
        self.shared.now()
    }

    fn random(&self) -> u64 {
        self.shared.state().nodes.get_mut(self.node.index()).map_or(0, |node| node.rng.next_u64())
    }
}

/// A sleep in virtual time.
struct Sleep {
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
    fn new(shared: Arc<Shared>, node: NodeId, duration: Duration) -> Self {
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
            Some(key) => match agenda.sleeper(key) {
                Some(waker) => {
                    let before = std::mem::replace(waker, context.waker().clone());
                    drop(state);
                    drop(before);
                    Poll::Pending
                }
                // It fired, or its node is dead and no longer polls it.
                None => Poll::Ready(()),
            },
            // Its process is dead, so the sleep never ends.
            None if !alive => Poll::Pending,
            None => {
                let key = agenda.sleep(self.node, self.deadline, self.is_deadline, context.waker().clone());
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
            let waker = self.shared.state().agenda.end_sleep(key);
            drop(waker);
        }
    }
}

//! Tasks of all nodes on one thread. The world chooses which ready task runs next.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Wake, Waker},
};

use tensorwire_fabric::BoxFuture;

use crate::{
    ids::{NodeId, TaskId},
    lock::lock,
};

/// Woken tasks, in the order of their numbers: the order of wake-ups must not matter, since a library may decide it by
/// random numbers of its own.
#[derive(Debug, Default)]
pub(crate) struct ReadyQueue(Mutex<BTreeSet<TaskId>>);

impl ReadyQueue {
    pub(crate) fn length(&self) -> usize {
        lock(&self.0).len()
    }

    pub(crate) fn take(&self, index: usize) -> Option<TaskId> {
        let mut ready = lock(&self.0);
        let task = ready.iter().nth(index).copied()?;
        ready.remove(&task);
        Some(task)
    }

    /// Takes one of the tasks for which `is_wanted` returns true. `pick` chooses an index below their number.
    pub(crate) fn take_of(
        &self,
        is_wanted: impl Fn(TaskId) -> bool,
        pick: impl FnOnce(usize) -> Option<usize>,
    ) -> Option<TaskId> {
        let mut ready = lock(&self.0);
        let wanted: Vec<TaskId> = ready.iter().copied().filter(|task| is_wanted(*task)).collect();
        let task = *wanted.get(pick(wanted.len())?)?;
        ready.remove(&task);
        Some(task)
    }

    /// Puts a task back that was taken and not polled.
    pub(crate) fn put(&self, task: TaskId) {
        lock(&self.0).insert(task);
    }
}

#[derive(Debug)]
struct TaskWaker {
    task: TaskId,
    queued: AtomicBool,
    ready: Arc<ReadyQueue>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            lock(&self.ready.0).insert(self.task);
        }
    }
}

struct Task {
    node: NodeId,
    name: &'static str,
    /// `None` while the task is being polled, or if its owner polls it.
    future: Option<BoxFuture<'static, ()>>,
    waker: Arc<TaskWaker>,
}

/// All tasks of a world.
#[derive(Default)]
pub(crate) struct Tasks {
    tasks: BTreeMap<TaskId, Task>,
    next: u64,
    pub(crate) ready: Arc<ReadyQueue>,
}

/// A task taken out for one poll.
pub(crate) struct Polling {
    pub(crate) future: BoxFuture<'static, ()>,
    pub(crate) waker: Waker,
}

impl Tasks {
    /// Adds a task, ready to run.
    pub(crate) fn spawn(
        &mut self,
        node: NodeId,
        name: &'static str,
        future: BoxFuture<'static, ()>,
    ) -> TaskId {
        self.add(node, name, Some(future)).0
    }

    /// Adds a task whose future the caller keeps and polls itself.
    pub(crate) fn reserve(&mut self, node: NodeId, name: &'static str) -> (TaskId, Waker) {
        let (id, waker) = self.add(node, name, None);
        (id, waker.into())
    }

    fn add(
        &mut self,
        node: NodeId,
        name: &'static str,
        future: Option<BoxFuture<'static, ()>>,
    ) -> (TaskId, Arc<TaskWaker>) {
        let id = TaskId(self.next);
        self.next += 1;
        let queued = AtomicBool::new(false);
        let waker = Arc::new(TaskWaker { task: id, queued, ready: self.ready.clone() });
        waker.wake_by_ref();
        self.tasks.insert(id, Task { node, name, future, waker: waker.clone() });
        (id, waker)
    }

    pub(crate) fn begin_poll(&mut self, id: TaskId) -> Option<Polling> {
        let task = self.tasks.get_mut(&id)?;
        // From here on a wake-up queues the task again.
        task.waker.queued.store(false, Ordering::Release);
        let future = task.future.take()?;
        Some(Polling { future, waker: task.waker.clone().into() })
    }

    /// Puts the future back, or returns it for dropping when its task is gone.
    pub(crate) fn end_poll(
        &mut self,
        id: TaskId,
        future: BoxFuture<'static, ()>,
    ) -> Option<BoxFuture<'static, ()>> {
        match self.tasks.get_mut(&id) {
            Some(task) => {
                task.future = Some(future);
                None
            }
            None => Some(future),
        }
    }

    pub(crate) fn finish(&mut self, id: TaskId) {
        self.tasks.remove(&id);
    }

    /// The node of a task that still exists.
    pub(crate) fn node_of(&self, id: TaskId) -> Option<NodeId> {
        self.tasks.get(&id).map(|task| task.node)
    }

    /// Number of tasks of `node`.
    pub(crate) fn of(&self, node: NodeId) -> usize {
        self.tasks.values().filter(|task| task.node == node).count()
    }

    /// All tasks, for a report.
    pub(crate) fn describe(&self) -> String {
        let lines = self.tasks.iter().map(|(id, task)| format!("{id} `{}` of {}", task.name, task.node));
        lines.collect::<Vec<_>>().join(", ")
    }

    /// Takes the futures of `node`'s tasks out (of all nodes if `None`), for dropping without a lock.
    pub(crate) fn remove_node(&mut self, node: Option<NodeId>) -> Vec<BoxFuture<'static, ()>> {
        let of_node = |task: &Task| node.is_none_or(|node| task.node == node);
        let ids: Vec<TaskId> = self.tasks.iter().filter(|(_, t)| of_node(t)).map(|(id, _)| *id).collect();
        ids.iter().filter_map(|id| self.tasks.remove(id)?.future).collect()
    }
}

/// Polls in a row, with nothing else enabled, after which tasks count as spinning.
const SPINS: u32 = 200;

/// Counts polls in a row.
#[derive(Debug, Default)]
pub(crate) struct Spins(u32);

impl Spins {
    /// Whether the tasks have spun long enough for time to pass.
    pub(crate) fn note(&mut self, only_tasks: bool) -> bool {
        self.0 = if only_tasks { self.0 + 1 } else { 0 };
        let spinning = self.0 > SPINS;
        if spinning {
            self.0 = 0;
        }
        spinning
    }
}

//! A deterministic executor: polls what was woken, in the order of spawning.

use std::{
    collections::BTreeSet,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Wake, Waker},
};

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Ready = Arc<Mutex<BTreeSet<usize>>>;

struct Flag {
    task: usize,
    ready: Ready,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.ready.lock().unwrap().insert(self.task);
    }
}

struct Task {
    future: Option<BoxFuture<()>>,
    waker: Waker,
}

#[derive(Default)]
pub(crate) struct Tasks {
    tasks: Vec<Task>,
    ready: Ready,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskId(usize);

/// Where the output of a task appears.
pub(crate) struct Handle<T> {
    pub(crate) task: TaskId,
    output: Arc<Mutex<Option<T>>>,
}

impl<T> Handle<T> {
    pub(crate) fn take(&self) -> Option<T> {
        self.output.lock().unwrap().take()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.output.lock().unwrap().is_some()
    }

    /// Whether the task may still return its output.
    pub(crate) fn is_pending(&self) -> bool {
        Arc::strong_count(&self.output) > 1 && !self.is_done()
    }
}

impl Tasks {
    pub(crate) fn spawn<T: Send + 'static>(
        &mut self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Handle<T> {
        let output = Arc::new(Mutex::new(None));
        let slot = output.clone();
        let future: BoxFuture<()> = Box::pin(async move {
            let value = future.await;
            *slot.lock().unwrap() = Some(value);
        });
        let task = self.tasks.len();
        let waker = Waker::from(Arc::new(Flag { task, ready: self.ready.clone() }));
        waker.wake_by_ref();
        self.tasks.push(Task { future: Some(future), waker });
        Handle { task: TaskId(task), output }
    }

    /// Polls one task.
    pub(crate) fn poll(&mut self, id: TaskId) {
        self.ready.lock().unwrap().remove(&id.0);
        let task = &mut self.tasks[id.0];
        let Some(future) = &mut task.future else { return };
        if future.as_mut().poll(&mut Context::from_waker(&task.waker)).is_ready() {
            task.future = None;
        }
    }

    /// Tasks that would run now.
    pub(crate) fn woken(&self) -> Vec<TaskId> {
        self.ready.lock().unwrap().iter().copied().map(TaskId).collect()
    }

    pub(crate) fn first_woken(&self) -> Option<TaskId> {
        self.ready.lock().unwrap().first().copied().map(TaskId)
    }

    /// Polls until no task is woken. Returns whether any task was.
    pub(crate) fn run(&mut self) -> bool {
        let mut any = false;
        for rounds in 0.. {
            assert!(rounds < 100_000, "tasks keep waking each other");
            let woken = self.woken();
            if woken.is_empty() {
                break;
            }
            any = true;
            for id in woken {
                self.poll(id);
            }
        }
        any
    }

    /// Drops the future of a task.
    pub(crate) fn cancel(&mut self, id: TaskId) {
        self.tasks[id.0].future = None;
    }

    pub(crate) fn all_finished(&self) -> bool {
        self.tasks.iter().all(|task| task.future.is_none())
    }

    pub(crate) fn is_finished(&self, id: TaskId) -> bool {
        self.tasks[id.0].future.is_none()
    }
}

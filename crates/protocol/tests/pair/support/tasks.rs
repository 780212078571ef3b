//! A deterministic executor: polls what was woken, in the order of spawning.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake, Waker},
};

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Task {
    future: Option<BoxFuture<()>>,
    flag: Arc<Flag>,
    waker: Waker,
}

#[derive(Default)]
pub(crate) struct Tasks {
    tasks: Vec<Task>,
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
        let flag = Arc::new(Flag(AtomicBool::new(true)));
        let waker = Waker::from(flag.clone());
        self.tasks.push(Task { future: Some(future), flag, waker });
        Handle { task: TaskId(self.tasks.len() - 1), output }
    }

    /// Polls one task if it was woken; true if it was.
    pub(crate) fn poll(&mut self, id: TaskId) -> bool {
        let task = &mut self.tasks[id.0];
        let Some(future) = &mut task.future else { return false };
        if !task.flag.0.swap(false, Ordering::SeqCst) {
            return false;
        }
        if future.as_mut().poll(&mut Context::from_waker(&task.waker)).is_ready() {
            task.future = None;
        }
        true
    }

    /// Tasks that would run now.
    pub(crate) fn woken(&self) -> Vec<TaskId> {
        let woken = |task: &Task| task.future.is_some() && task.flag.0.load(Ordering::SeqCst);
        (0..self.tasks.len()).filter(|&index| woken(&self.tasks[index])).map(TaskId).collect()
    }

    /// Polls until nobody is woken; true if anybody was.
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

    pub(crate) fn is_finished(&self, id: TaskId) -> bool {
        self.tasks[id.0].future.is_none()
    }

    pub(crate) fn clear(&mut self) {
        self.tasks.clear();
    }
}

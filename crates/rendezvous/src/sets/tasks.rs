//! Work on the tensors of a version by several tasks.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::available_parallelism,
};

use futures::{
    channel::oneshot,
    future::{Either, select},
};
use tensorwire_fabric::Runtime;

/// Most tasks that work on one version.
const TASKS_MAX: usize = 4;

/// A further task works only if each has so many bytes.
const BYTES_PER_TASK_MIN: usize = 4 << 20;

/// Work on tensors, in any order. It yields to other tasks between pieces.
pub(super) trait TensorWork: Send + Sync + 'static {
    /// What comes of one tensor.
    type Done: Send + 'static;

    /// The name of the tasks.
    const NAME: &'static str;

    /// The number of tensors, and the bytes of all of them.
    fn size(&self) -> (usize, usize);

    /// Works on the tensor at `at`.
    fn work(&self, at: usize) -> impl Future<Output = Self::Done> + Send;
}

/// Does the work on all tensors by up to [`TASKS_MAX`] tasks, one for each processor: this one, and others that it begins. Returns what
/// comes of it in the order of the tensors, and `None` for one whose task was lost with the runtime.
///
/// # Cancel safety
/// Cancel-safe: when the future is dropped, the tasks that it has begun end after their next piece.
pub(super) async fn in_tasks<W: TensorWork>(runtime: &dyn Runtime, work: W) -> Vec<Option<W::Done>> {
    let (count, bytes) = work.size();
    let cores = available_parallelism().map_or(1, usize::from);
    let tasks = (bytes / BYTES_PER_TASK_MIN).clamp(1, cores.min(TASKS_MAX));
    let queue = Arc::new(Queue { work, count, next: AtomicUsize::new(0) });
    let others: Vec<_> = (1..tasks).map(|_| begin(runtime, queue.clone())).collect();
    let mut results: Vec<_> = (0..count).map(|_| None).collect();
    let mut place = |done: Vec<(usize, W::Done)>| {
        for (at, done) in done {
            if let Some(place) = results.get_mut(at) {
                *place = Some(done);
            }
        }
    };
    place(queue.drain().await);
    for other in others {
        place(other.await.unwrap_or_default());
    }
    results
}

/// Begins a task that takes tensors of the queue. It ends early when the receiver is dropped.
fn begin<W: TensorWork>(
    runtime: &dyn Runtime,
    queue: Arc<Queue<W>>,
) -> oneshot::Receiver<Vec<(usize, W::Done)>> {
    let (mut give, done) = oneshot::channel();
    let task = async move {
        let drained = match select(pin!(queue.drain()), give.cancellation()).await {
            Either::Left((drained, _)) => drained,
            Either::Right(_) => return,
        };
        // Nobody waits for it if the work was dropped just now.
        let _ = give.send(drained);
    };
    runtime.spawn(W::NAME, Box::pin(task));
    done
}

/// Tensors, of which several tasks take one after the other.
struct Queue<W> {
    work: W,
    count: usize,
    /// The next one.
    next: AtomicUsize,
}

impl<W: TensorWork> Queue<W> {
    /// Works on tensors that no other task has taken, until there are no more. Returns their places, and what comes of them.
    async fn drain(&self) -> Vec<(usize, W::Done)> {
        let mut done = Vec::new();
        loop {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            if at >= self.count {
                return done;
            }
            done.push((at, self.work.work(at).await));
        }
    }
}

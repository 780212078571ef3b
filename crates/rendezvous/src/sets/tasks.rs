//! Work on the tensors of a version by several tasks.

use std::{
    iter::Enumerate,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    thread::available_parallelism,
    vec,
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

/// Work on one tensor. It yields to other tasks between pieces.
pub(super) trait TensorWork: Send + 'static {
    /// What comes of it.
    type Done: Send + 'static;

    /// The name of the tasks.
    const NAME: &'static str;

    /// Bytes of the tensor.
    fn bytes(&self) -> usize;

    /// Does it. All work that is done together has `all` bytes.
    fn work(self, all: usize) -> impl Future<Output = Self::Done> + Send;
}

/// Does all work, in any order, by up to [`TASKS_MAX`] tasks, one for each processor: this one, and others that it begins. Returns what
/// comes of it in the order of `work`, and `None` where a task was lost with the runtime.
///
/// # Cancel safety
/// Cancel-safe: when the future is dropped, the tasks that it has begun end after their next piece.
pub(super) async fn in_tasks<W: TensorWork>(runtime: &dyn Runtime, work: Vec<W>) -> Vec<Option<W::Done>> {
    let bytes = work.iter().map(W::bytes).fold(0, usize::saturating_add);
    let cores = available_parallelism().map_or(1, usize::from);
    let tasks = (bytes / BYTES_PER_TASK_MIN).clamp(1, cores.min(TASKS_MAX));
    let mut results: Vec<_> = work.iter().map(|_| None).collect();
    let queue = Arc::new(Queue { work: Mutex::new(work.into_iter().enumerate()), bytes });
    let others: Vec<_> = (1..tasks).map(|_| begin(runtime, queue.clone())).collect();
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

/// Begins a task that takes work of the queue. It ends early when the receiver is dropped.
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

/// Work, with its places, of which several tasks take one after the other.
struct Queue<W> {
    work: Mutex<Enumerate<vec::IntoIter<W>>>,
    /// Of all of it.
    bytes: usize,
}

impl<W: TensorWork> Queue<W> {
    /// Does work that no other task has taken, until there is no more. Returns what comes of it, with its places.
    async fn drain(&self) -> Vec<(usize, W::Done)> {
        let mut done = Vec::new();
        while let Some((at, work)) = self.next() {
            done.push((at, work.work(self.bytes).await));
        }
        done
    }

    fn next(&self) -> Option<(usize, W)> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}

//! How the tensors of a version differ from their predecessors.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::available_parallelism,
};

use futures::channel::oneshot;
use tensorwire_fabric::Runtime;
use tensorwire_protocol::Validation;

use crate::{
    peer_memory::import::yield_once,
    values::{
        sets::{
            delta::{Compared, Comparison},
            encoded,
            manifest_delta::Change,
        },
        tensor::Tensor,
    },
};

/// How a tensor differs from its predecessor, and its delta, if that is the least to send.
pub(super) type Difference = (Change, Option<Tensor>);

/// Most tasks that compare the tensors of one version.
const TASKS_MAX: usize = 4;

/// A further task compares only if each has so many bytes to compare.
const BYTES_PER_TASK_MIN: usize = 4 << 20;

/// Tensors and their predecessors, of which several tasks take one after the other.
#[derive(Debug)]
struct Pairs {
    /// The predecessor, and the tensor.
    pairs: Vec<(Tensor, Tensor)>,
    /// The next one to compare.
    next: AtomicUsize,
    /// Bytes that further deltas may have.
    delta_bytes: AtomicU64,
}

/// The differences of these pairs, each of a predecessor and a tensor. Their deltas have at most `delta_bytes` together.
///
/// # Cancel safety
/// Cancel-safe: when the future is dropped, the tasks that it has begun end after their next piece.
pub(super) async fn differences(
    runtime: &dyn Runtime,
    pairs: Vec<(Tensor, Tensor)>,
    delta_bytes: u64,
) -> Vec<Difference> {
    let count = pairs.len();
    let bytes = pairs.iter().map(|(_, new)| new.bytes().len()).fold(0, usize::saturating_add);
    let cores = available_parallelism().map_or(1, usize::from);
    let tasks = (bytes / BYTES_PER_TASK_MIN).clamp(1, cores.min(TASKS_MAX));
    let pairs =
        Arc::new(Pairs { pairs, next: AtomicUsize::new(0), delta_bytes: AtomicU64::new(delta_bytes) });
    let others: Vec<_> = (1..tasks).map(|_| compare_in_task(runtime, pairs.clone())).collect();
    // A tensor whose task is lost with the runtime is sent whole.
    let mut differences = vec![(Change::Full, None); count];
    let mut place = |compared: Vec<(usize, Difference)>| {
        for (at, difference) in compared {
            if let Some(place) = differences.get_mut(at) {
                *place = difference;
            }
        }
    };
    place(pairs.compare(&|| false).await);
    for other in others {
        place(other.await.unwrap_or_default());
    }
    differences
}

fn compare_in_task(runtime: &dyn Runtime, pairs: Arc<Pairs>) -> oneshot::Receiver<Vec<(usize, Difference)>> {
    let (give, compared) = oneshot::channel();
    let task = async move {
        let differences = pairs.compare(&|| give.is_canceled()).await;
        // Nobody waits for them if the commit was dropped.
        let _ = give.send(differences);
    };
    runtime.spawn("comparison of tensors", Box::pin(task));
    compared
}

impl Pairs {
    /// Compares pairs that no other task has taken, until there are no more or `is_over`. Returns their places and differences.
    async fn compare(&self, is_over: &(dyn Fn() -> bool + Sync)) -> Vec<(usize, Difference)> {
        let mut compared = Vec::new();
        loop {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((old, new)) = self.pairs.get(at).filter(|_| !is_over()) else { return compared };
            compared.push((at, self.difference(old, new, is_over).await));
        }
    }

    async fn difference(
        &self,
        old: &Tensor,
        new: &Tensor,
        is_over: &(dyn Fn() -> bool + Sync),
    ) -> Difference {
        let mut comparison = Comparison::new(new.metadata());
        let checksums = new.checksums().unwrap_or_default();
        let compared = loop {
            if is_over() {
                return (Change::Full, None);
            }
            let compared = comparison.go_on(old.bytes(), new.bytes());
            if comparison.has_runs() {
                // Sums a piece that the processor's cache still has: a sum goes on where it was dropped.
                let _ = futures::poll!(pin!(checksums.sum(Validation::Xxh3, new.bytes())));
            }
            match compared {
                Some(compared) => break compared,
                None => yield_once().await,
            }
        };
        match compared {
            Compared::Same => (Change::Same, None),
            Compared::Runs(delta) if self.takes(delta.len() as u64) => {
                let checksum = checksums.sum(Validation::Xxh3, new.bytes()).await.unwrap_or_default();
                (Change::Runs { bytes: delta.len() as u64, checksum }, Some(encoded(&delta)))
            }
            Compared::Runs(_) | Compared::Full => (Change::Full, None),
        }
    }

    /// Whether a delta of `bytes` bytes may be held beside the others.
    fn takes(&self, bytes: u64) -> bool {
        let rest = |left: u64| left.checked_sub(bytes);
        self.delta_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }
}

//! How the tensors of a version differ from their predecessors.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tensorwire_fabric::Runtime;
use tensorwire_protocol::Validation;

use crate::{
    peer_memory::import::yield_once,
    sets::tasks::{TensorWork, in_tasks},
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

/// A tensor and its predecessor.
struct Pair {
    old: Tensor,
    new: Tensor,
    /// Bytes that further deltas may have, of all pairs.
    delta_bytes: Arc<AtomicU64>,
}

/// The differences of these pairs, each of a predecessor and a tensor. Their deltas have at most `delta_bytes` together.
///
/// # Cancel safety
/// That of [`in_tasks`].
pub(super) async fn differences(
    runtime: &dyn Runtime,
    pairs: Vec<(Tensor, Tensor)>,
    delta_bytes: u64,
) -> Vec<Difference> {
    let delta_bytes = Arc::new(AtomicU64::new(delta_bytes));
    let pairs = pairs.into_iter().map(|(old, new)| Pair { old, new, delta_bytes: delta_bytes.clone() });
    let differences = in_tasks(runtime, pairs.collect()).await;
    // A tensor whose task is lost with the runtime is sent whole.
    differences.into_iter().map(|difference| difference.unwrap_or((Change::Full, None))).collect()
}

impl TensorWork for Pair {
    type Done = Difference;

    const NAME: &'static str = "comparison of tensors";

    fn bytes(&self) -> usize {
        self.new.bytes().len()
    }

    async fn work(self, _: usize) -> Difference {
        let (old, new) = (&self.old, &self.new);
        let mut comparison = Comparison::new(new.metadata());
        let checksums = new.checksums().unwrap_or_default();
        let compared = loop {
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
}

impl Pair {
    /// Whether a delta of `bytes` bytes may be held beside the others.
    fn takes(&self, bytes: u64) -> bool {
        let rest = |left: u64| left.checked_sub(bytes);
        self.delta_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }
}

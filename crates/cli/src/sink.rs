//! Where fetched tensors go: a thread of its own verifies and writes them, so that neither holds up the transfer.

use std::{path::PathBuf, sync::Arc, thread};

use tensorwire::Tensor;
use tokio::sync::{mpsc, oneshot};

use crate::{failure::Failure, output::Output, plan::Plan};

/// Tensors that wait to be written, at most; fetching waits then.
const WAITING_MAX: usize = 16;

/// The checksum of a tensor's bytes, as servers tell it: XXH3-64.
fn checksum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

/// What the thread does with each tensor.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) plan: Arc<Plan>,
    /// Compare checksums.
    pub(crate) verify: bool,
    /// Write to this file, which will have that name.
    pub(crate) output: Option<(Output, PathBuf)>,
}

impl Task {
    fn take(&self, index: usize, tensor: &Tensor) -> Result<(), Failure> {
        let entry = &self.plan.header.entries()[index];
        let (bytes, expected) = (tensor.bytes(), entry.byte_length());
        if bytes.len() as u64 != expected {
            return Err(Failure::Replaced { name: entry.name.clone(), found: bytes.len() as u64, expected });
        }
        if self.verify {
            let name = || entry.name.clone();
            let expected = self.plan.checksums[index].ok_or_else(|| Failure::NoChecksum { name: name() })?;
            let found = checksum(bytes);
            if found != expected {
                return Err(Failure::Checksum { name: name(), found, expected });
            }
        }
        let Some((output, path)) = &self.output else { return Ok(()) };
        output
            .write_at(bytes, self.plan.header.data_start() + entry.range.start)
            .map_err(|source| Failure::Output { path: path.clone(), source })
    }
}

/// The near end of the thread.
#[derive(Debug)]
pub(crate) struct Sink {
    tensors: mpsc::Sender<(usize, Tensor)>,
    result: oneshot::Receiver<Result<Task, Failure>>,
}

impl Sink {
    /// Starts the thread.
    pub(crate) fn start(task: Task) -> Self {
        let (tensors, mut waiting) = mpsc::channel::<(usize, Tensor)>(WAITING_MAX);
        let (end, result) = oneshot::channel();
        thread::spawn(move || {
            let mut taken = Ok(());
            while let Some((index, tensor)) = waiting.blocking_recv() {
                taken = task.take(index, &tensor);
                if taken.is_err() {
                    break;
                }
            }
            drop(waiting);
            // Nobody waits for the result if the pull itself has failed.
            let _ = end.send(taken.map(|()| task));
        });
        Self { tensors, result }
    }

    /// Hands over the tensor that stands at `index` of the plan. False when the thread has failed:
    /// [`finish`](Self::finish) tells why.
    pub(crate) async fn put(&self, index: usize, tensor: Tensor) -> bool {
        self.tensors.send((index, tensor)).await.is_ok()
    }

    /// Waits until all is done, and gives the task back.
    pub(crate) async fn finish(self) -> Result<Task, Failure> {
        drop(self.tensors);
        self.result.await.unwrap_or(Err(Failure::WriterGone))
    }
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn checksum_is_the_published_function() {
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
    }
}

//! The thread that verifies and writes fetched tensors, so that this does not delay the transfer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use indicatif::ProgressBar;
use tensorwire::Tensor;
use tokio::sync::{mpsc, oneshot};

use crate::{
    budget::{HELD_MAX, Room},
    failure::Failure,
    output::Target,
    plan::Plan,
};

/// Bytes written between two steps of the progress.
const STEP_BYTES: usize = 4 << 20;

/// The checksum of a tensor's bytes that servers list: XXH3-64.
fn checksum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

/// The work of the thread for each tensor.
#[derive(Debug)]
pub(crate) struct TensorWork {
    pub(crate) plan: Arc<Plan>,
    /// Whether to compare checksums.
    pub(crate) verify: bool,
    /// The target to write them to.
    pub(crate) output: Option<Target>,
    /// The tensors that are fetched, by their indexes in the plan.
    pub(crate) wanted: Arc<[usize]>,
    /// How many of them are done, in their order.
    pub(crate) done: usize,
    /// Shows the bytes that are done.
    pub(crate) progress: ProgressBar,
}

impl TensorWork {
    /// Processes the next tensor, unless it `is_stopped` meanwhile.
    fn take(&mut self, tensor: &Tensor, is_stopped: &AtomicBool) -> Result<(), Failure> {
        let plan = self.plan.clone();
        let Some(&at) = self.wanted.get(self.done) else { return Ok(()) };
        let Some(piece) = plan.layout.pieces.get(at) else { return Ok(()) };
        let (bytes, expected) = (tensor.bytes(), piece.bytes);
        if bytes.len() as u64 != expected {
            return Err(Failure::Replaced { name: piece.name.clone(), found: bytes.len() as u64, expected });
        }
        if self.verify {
            let name = || piece.name.clone();
            let expected = plan.checksums[at].ok_or_else(|| Failure::NoChecksum { name: name() })?;
            let found = checksum(bytes);
            if found != expected {
                return Err(Failure::Checksum { name: name(), found, expected });
            }
        }
        let mut place = piece.place;
        for step in bytes.chunks(STEP_BYTES) {
            if is_stopped.load(Relaxed) {
                return Err(Failure::WriterGone);
            }
            if let Some(output) = &mut self.output {
                output.write_at(piece.file, step, place)?;
            }
            place += step.len() as u64;
            self.progress.inc(step.len() as u64);
        }
        self.done += 1;
        Ok(())
    }
}

/// The handle on the thread.
#[derive(Debug)]
pub(crate) struct Sink {
    tensors: mpsc::Sender<(Tensor, Room)>,
    result: oneshot::Receiver<Result<TensorWork, Failure>>,
    is_stopped: Arc<AtomicBool>,
    /// A stream's reader may hang, and then the thread hangs, too.
    is_stream: bool,
}

impl Sink {
    /// Starts the thread.
    pub(crate) fn start(mut task: TensorWork) -> Self {
        // The channel has room for all tensors that may be held, so that sending never waits.
        let (tensors, mut waiting) = mpsc::channel::<(Tensor, Room)>(HELD_MAX as usize);
        let (end, result) = oneshot::channel();
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (stopped, is_stream) = (is_stopped.clone(), task.output.as_ref().is_some_and(Target::is_stream));
        thread::spawn(move || {
            let mut taken = Ok(());
            while let Some((tensor, room)) = waiting.blocking_recv() {
                taken = task.take(&tensor, &stopped);
                // In this order, so that the room is free only after the memory.
                drop(tensor);
                drop(room);
                if taken.is_err() {
                    break;
                }
            }
            drop(waiting);
            // The receiver is gone if the pull itself has failed.
            let _ = end.send(taken.map(|()| task));
        });
        Self { tensors, result, is_stopped, is_stream }
    }

    /// Sends the next tensor of the plan to the thread, with the room that it takes. False when the thread has failed:
    /// [`finish`](Self::finish) has the error.
    pub(crate) async fn put(&self, tensor: Tensor, room: Room) -> bool {
        self.tensors.send((tensor, room)).await.is_ok()
    }

    /// Waits until all is done, and returns the task.
    pub(crate) async fn finish(self) -> Result<TensorWork, Failure> {
        drop(self.tensors);
        self.result.await.unwrap_or(Err(Failure::WriterGone))
    }

    /// Drops the tensors that are not done yet. An unfinished file is removed.
    pub(crate) async fn stop(self) {
        self.is_stopped.store(true, Relaxed);
        if self.is_stream {
            return;
        }
        // Its result does not matter any more.
        let _ = self.finish().await;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::Path,
        sync::{Arc, atomic::AtomicBool},
    };

    use indicatif::ProgressBar;
    use tensorwire::{DataType, Tensor, Worker};

    use super::{Sink, TensorWork, checksum};
    use crate::{
        budget::Budget,
        failure::Failure,
        header::Header,
        output::{Target, Writing},
        plan::Plan,
    };

    /// The number that the progress shows after a tensor of six bytes was written to `path`.
    async fn shown_after(path: &str) -> (u64, Result<(), Failure>) {
        let worker = Worker::builder("/job:test/replica:0/task:0").start().await.unwrap();
        let tensor = Tensor::from_bytes(worker.pool(), DataType::U8, &[6], b"abcdef").unwrap();
        let header = r#"{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]}}"#;
        let plan = Arc::new(Plan::of(&Header::parse(header.to_owned()).unwrap()));
        let mut output = Target::open(Path::new(path), Writing::default()).unwrap();
        // A full device accepts no bytes.
        let _ = output.begin(&plan.layout.files, |_| true);
        let progress = ProgressBar::hidden();
        let mut task = TensorWork {
            plan,
            verify: false,
            output: Some(output),
            wanted: Arc::new([0]),
            done: 0,
            progress,
        };
        let taken = task.take(&tensor, &AtomicBool::new(false));
        (task.progress.position(), taken)
    }

    #[tokio::test(flavor = "current_thread")]
    async fn progress_counts_what_is_written() {
        let (shown, taken) = shown_after("/dev/null").await;
        assert!(shown == 6 && taken.is_ok(), "{shown} {taken:?}");
        let (shown, taken) = shown_after("/dev/full").await;
        assert!(shown == 0, "{shown}");
        assert!(taken.unwrap_err().to_string().contains("/dev/full"));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn what_is_stopped_has_let_its_file_go() {
        let worker = Worker::builder("/job:test/replica:0/task:0").start().await.unwrap();
        // Several steps of the progress.
        let bytes = 64 << 20;
        let tensor =
            Tensor::from_bytes(worker.pool(), DataType::U8, &[bytes], &vec![1; bytes as usize]).unwrap();
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
        let plan = Arc::new(Plan::of(&Header::parse(header).unwrap()));
        let directory = tempfile::tempdir().unwrap();
        let output = Target::open(&directory.path().join("file"), Writing::default()).unwrap();
        let progress = ProgressBar::hidden();
        let task = TensorWork {
            plan: plan.clone(),
            verify: false,
            output: Some(output),
            wanted: Arc::new([0]),
            done: 0,
            progress,
        };
        let sink = Sink::start(task);
        assert!(sink.put(tensor, Budget::of(1).take(1).await).await);
        sink.stop().await;
        assert_eq!((Arc::strong_count(&plan), fs::read_dir(directory.path()).unwrap().count()), (1, 0));
    }

    #[test]
    fn checksum_is_the_published_function() {
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
    }
}

//! One worker of the cluster.

use std::time::Duration;

use memory::{BufMut, MemoryError};
use protocol::{Code, DataType, Mode, Validation};
use rendezvous::{ClusterSpec, Tensor, Trust, Worker, WorkerError};
use sim::{Node, Outcome, Rng, Violation};
use verbs_reactor::Runtime;

use super::{Run, WORKERS_MIN};

/// Published names of each worker. The last one is withdrawn now and then.
pub(super) const NAMES: usize = 4;
pub(super) const FICKLE: usize = NAMES - 1;

/// Lengths that a content can have. What is published has room for its number.
const LENGTHS: [usize; 10] = [0, 1, 7, 8, 63, 64, 65, 1000, 5003, 20_000];
const PUBLISHED_LENGTHS: [usize; 7] = [8, 9, 64, 65, 1000, 5003, 20_000];

/// Settings that the seed draws for all workers.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) workers: usize,
    mode: Mode,
    depth: u32,
    requests_max: u32,
    contents_max: u32,
    eager_bytes_max: u32,
    ring_bytes: u32,
    /// Bytes that keys and names are longer than they need be.
    padding: usize,
    receive_bytes: u64,
    validation: Validation,
    /// What each worker takes its peers for.
    trust: Vec<Trust>,
    /// Of 65,536 pieces of contents, how many come with a bit flipped; 0 unless contents are validated.
    pub(super) flips_of_65536: u32,
}

impl Setup {
    /// The name under which tensor `which` is published.
    pub(super) fn published(&self, which: usize) -> String {
        format!("p{which}{}", "-".repeat(self.padding))
    }

    /// The edge of every stream.
    pub(super) fn edge(&self) -> String {
        format!("stream{}", "-".repeat(self.padding))
    }

    /// Checksums and trust have sequences of their own, so that the seeds without them stay what they were.
    pub(super) fn draw(rng: &mut Rng, checksums: &mut Rng, trust: &mut Rng) -> Self {
        let validation =
            checksums.pick([Validation::Off, Validation::Off, Validation::Crc32c, Validation::Xxh3]);
        let flips = checksums.pick([0, 300, 3000]);
        let workers = WORKERS_MIN + rng.below(3);
        let hostile_of_4 = trust.pick([0, 0, 2, 4]);
        let drawn = |_| if trust.chance(hostile_of_4, 4) { Trust::Hostile } else { Trust::Cluster };
        Self {
            workers,
            trust: (0..workers).map(drawn).collect(),
            mode: rng.pick([Mode::Original, Mode::Counted, Mode::Counted]),
            depth: rng.pick([4, 5, 6, 12, 64]),
            requests_max: rng.pick([1, 2, 5, 64]),
            contents_max: rng.pick([1, 2, 64]),
            eager_bytes_max: rng.pick([0, 64, 4096]),
            ring_bytes: rng.pick([8 << 10, 9000, 64 << 10]),
            padding: rng.pick([0, 1, 200, 500]),
            receive_bytes: rng.pick([32 << 10, 64 << 10, 256 << 10]),
            validation,
            flips_of_65536: if validation.is_on() { flips } else { 0 },
        }
    }
}

pub(super) fn any_length(rng: &mut Rng) -> usize {
    rng.pick(LENGTHS)
}

pub(super) fn name(index: usize) -> String {
    format!("/job:w/replica:0/task:{index}")
}

pub(super) fn device(index: usize) -> String {
    format!("/job:w/replica:0/task:{index}/device:CPU:0")
}

pub(super) fn address(index: usize) -> String {
    format!("w{index}:1")
}

/// The worker that an operation is with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) peer: usize,
    /// The life of it that is meant, if one is.
    pub(super) incarnation: Option<u64>,
    /// There may be nothing.
    pub(super) is_fickle: bool,
}

impl Target {
    pub(super) fn any_life(peer: usize) -> Self {
        Self { peer, incarnation: None, is_fickle: false }
    }
}

/// An operation ended with an error.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended;

/// One incarnation of one worker.
#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) index: usize,
    pub(super) node: Node,
    pub(super) worker: Worker,
    pub(super) run: Run,
}

impl Member {
    /// Starts the worker at its address and publishes the first version of every name.
    pub(super) async fn start(run: &Run, index: usize) -> Self {
        let node = run.handle.start_node(&address(index)).unwrap();
        let setup = &run.setup;
        let others = (0..setup.workers).filter(|other| *other != index);
        let cluster = others.fold(ClusterSpec::new(), |all, other| all.worker(name(other), address(other)));
        let builder = Worker::builder(&name(index))
            .runtime(node.runtime())
            .local_fabrics(vec![node.fabric()])
            .dangerous_control_plane(node.control_plane())
            .observer(node.observer())
            .cluster(cluster)
            .mode(setup.mode)
            .depth(setup.depth)
            .requests_max(setup.requests_max)
            .contents_max(setup.contents_max)
            .eager_bytes_max(setup.eager_bytes_max)
            .ring_bytes(setup.ring_bytes)
            .validation(setup.validation)
            .source_bytes(64 << 20)
            .receive_bytes(setup.receive_bytes)
            .trust(setup.trust[index])
            .bounce_bytes(setup.receive_bytes)
            .block_bytes(64 << 10);
        let worker = node.run("start", builder.start()).await.unwrap().unwrap();
        run.truth().incarnations[index] = worker.incarnation();
        let member = Self { index, node, worker, run: run.clone() };
        for (which, length) in PUBLISHED_LENGTHS.into_iter().take(NAMES).enumerate() {
            member.publish(which, length).await;
        }
        member
    }

    /// Memory to send from. Having or registering it fails now and then, each time once: after that it works again.
    async fn buffer(&self, length: usize) -> BufMut {
        loop {
            match self.worker.pool().alloc(length).await {
                Ok(buffer) => return buffer,
                Err(MemoryError::Register { .. } | MemoryError::Block { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// A tensor with the content of `transfer`; `numbered` puts the number itself into its first bytes.
    pub(super) async fn tensor(&self, transfer: u64, length: usize, numbered: bool) -> Tensor {
        let mut buffer = self.buffer(length).await;
        let pattern = self.run.handle.pattern();
        if numbered {
            let (number, rest) = buffer.split_at_mut(8);
            number.copy_from_slice(&transfer.to_le_bytes());
            pattern.fill(transfer, rest);
        } else {
            pattern.fill(transfer, &mut buffer);
        }
        Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
    }

    /// Publishes a new version.
    pub(super) async fn publish(&self, which: usize, length: usize) {
        let transfer = self.run.new_transfer(length);
        let tensor = self.tensor(transfer, length, true).await;
        // At once, so that nobody fetches what is not yet known to be true.
        self.run.truth().published[self.index][which].push(transfer);
        self.worker.publish(&self.run.setup.published(which), tensor).unwrap();
    }

    pub(super) async fn publish_any(&self, rng: &mut Rng) {
        let (which, length) = (rng.below(NAMES), rng.pick(PUBLISHED_LENGTHS));
        if which == FICKLE && self.worker.withdraw(&self.run.setup.published(which)) {
            return;
        }
        self.publish(which, length).await;
    }

    /// What a fetch of `which` from worker `peer`, begun now, must give at least.
    pub(super) fn newest(&self, peer: usize, which: usize) -> u64 {
        *self.run.truth().published[peer][which].last().unwrap()
    }

    /// Checks a numbered content: one of `allowed`, no older than `oldest`, and whole. Gives its number.
    pub(super) fn check_numbered(&self, tensor: &Tensor, allowed: &[u64], oldest: u64) -> u64 {
        let broken = |text: String| self.run.handle.fail(Violation::Data(text));
        let Some((number, rest)) = tensor.bytes().split_first_chunk::<8>() else {
            broken(format!("{} bytes are too few", tensor.bytes().len()));
            return 0;
        };
        let transfer = u64::from_le_bytes(*number);
        if !allowed.contains(&transfer) || transfer < oldest {
            broken(format!("content {transfer} came; current since before the operation began: {oldest}"));
            return 0;
        }
        self.check_length(transfer, tensor);
        self.run.handle.verify(transfer, rest);
        self.run.truth().transfers += 1;
        transfer
    }

    /// Checks that `tensor` is exactly `transfer`.
    pub(super) fn check(&self, tensor: &Tensor, transfer: u64) {
        self.check_length(transfer, tensor);
        self.run.handle.verify(transfer, tensor.bytes());
        self.run.truth().transfers += 1;
    }

    fn check_length(&self, transfer: u64, tensor: &Tensor) {
        let (found, wanted) = (tensor.bytes().len(), self.run.truth().lengths[transfer as usize]);
        let shape = tensor.metadata().byte_length;
        if found != wanted || shape != wanted as u64 {
            let text = format!("transfer {transfer} has {found} bytes ({shape} by its shape), not {wanted}");
            self.run.handle.fail(Violation::Data(text));
        }
    }

    /// Awaits one operation and enters its end into the ledger.
    pub(super) async fn operation<T>(
        &self,
        target: Target,
        what: String,
        operation: impl Future<Output = Result<T, WorkerError>>,
    ) -> Option<T> {
        let entry = self.node.begin(Some(&address(target.peer)), what);
        match operation.await {
            Ok(value) => {
                entry.end(&Outcome::Done);
                Some(value)
            }
            Err(error) => {
                entry.end_because(&self.outcome(target, &error), &error);
                None
            }
        }
    }

    /// Polls `operation` up to `polls` times and then drops it: `None`.
    ///
    /// # Errors
    /// It ended with an error, which is in the ledger.
    pub(super) async fn impatient<T>(
        &self,
        target: Target,
        what: String,
        polls: usize,
        operation: impl Future<Output = Result<T, WorkerError>>,
    ) -> Result<Option<T>, Ended> {
        let entry = self.node.begin(Some(&address(target.peer)), what);
        let outcome = match polled(polls, operation).await {
            Some(Ok(value)) => {
                entry.end(&Outcome::Done);
                return Ok(Some(value));
            }
            Some(Err(error)) => {
                entry.end_because(&self.outcome(target, &error), &error);
                return Err(Ended);
            }
            None => Outcome::Cancelled,
        };
        entry.end(&outcome);
        Ok(None)
    }

    fn outcome(&self, target: Target, error: &WorkerError) -> Outcome {
        let life = self.run.truth().incarnations[target.peer];
        match error {
            WorkerError::DeadlineExceeded { .. } => Outcome::Deadline,
            WorkerError::Corrupted { .. } => Outcome::Corrupted,
            WorkerError::Remote { status, .. }
                if status.code == Code::Aborted && target.incarnation.is_some_and(|named| named != life) =>
            {
                Outcome::Refused
            }
            WorkerError::Remote { status, .. } if status.code == Code::NotFound && target.is_fickle => {
                Outcome::Refused
            }
            // Nothing else may go wrong between healthy workers, so each of these needs a fault as its reason.
            _ => Outcome::PeerLost,
        }
    }

    /// Ends the worker, and checks that its memory is back.
    pub(super) async fn stop(&self) {
        let worker = self.worker.clone();
        self.node.run("shutdown", async move { worker.shutdown().await }).await.unwrap();
        self.run.handle.runtime().sleep(Duration::from_secs(2)).await;
        let memory = self.worker.receive_memory();
        assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0), "worker {}", self.index);
        // Nobody views anything any more.
        let source = self.worker.pool().stats();
        assert_eq!((source.retired_bytes, source.leaked_bytes), (0, 0), "worker {}", self.index);
    }
}

async fn polled<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    use std::{future::poll_fn, pin::pin, task::Poll};
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        let answer = future.as_mut().poll(context).map(Some);
        if answer.is_pending() && left == 0 {
            // Dropped only when something has happened to it, so that every stage is reached.
            return Poll::Ready(None);
        }
        answer
    })
    .await
}

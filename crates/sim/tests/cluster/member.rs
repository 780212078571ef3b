//! One worker of the cluster.

use std::time::Duration;

use tensorwire_fabric::Runtime;
use tensorwire_memory::{BufMut, MemoryError, Pool};
use tensorwire_protocol::{Code, DataType, Mode, Validation};
use tensorwire_rendezvous::{ClusterSpec, Tensor, Trust, Worker, WorkerError};
use tensorwire_sim::{Node, Operation, OperationResult, Rng, Violation};

use super::{Kind, Run, WORKERS_MIN, kinds::LARGE};

use crate::common::builder;

/// Published names of each worker. The first ones are small, so that one call can request several. The last one is
/// withdrawn sometimes.
pub(super) const NAMES: usize = 7;
pub(super) const SMALL: usize = 3;
pub(super) const FICKLE: usize = NAMES - 1;

/// Lengths that a content can have. A published one has room for its number.
const LENGTHS: [usize; 10] = [0, 1, 7, 8, 63, 64, 65, 1000, 5003, LARGE];
const PUBLISHED_LENGTHS: [usize; 7] = [8, 9, 64, 65, 1000, 5003, LARGE];

/// Lengths of tensors that one call requests: a task that holds one and waits for another must leave room for all
/// others.
const SMALL_LENGTHS: [usize; 4] = [8, 64, 65, 500];

/// Settings that the seed draws for all workers.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) workers: usize,
    /// Of each worker.
    modes: Vec<Mode>,
    depth: u32,
    /// Of each worker.
    requests_max: Vec<u32>,
    contents_max: u32,
    /// Of each worker.
    eager_bytes_max: Vec<u32>,
    piece_bytes: u32,
    requests_per_message: Vec<u32>,
    ring_bytes: u32,
    /// Bytes by which keys and names are longer than necessary.
    padding: usize,
    pub(super) receive_bytes: u64,
    /// Length of the largest contents.
    pub(super) longest: usize,
    pub(super) validation: Validation,
    /// How far each worker trusts its peers.
    trust: Vec<Trust>,
    /// Of 65,536 pieces of contents, how many arrive with a bit flipped; 0 unless contents are validated.
    pub(super) flips_of_65536: u32,
}

impl Setup {
    /// The name under which tensor `which` is published.
    pub(super) fn published(&self, which: usize) -> String {
        let letter = if which < SMALL { 'm' } else { 'p' };
        format!("{letter}{which}{}", "-".repeat(self.padding))
    }

    /// The edge of every stream.
    pub(super) fn edge(&self) -> String {
        self.edge_of(0)
    }

    /// Edge number `which` of those that one call receives.
    pub(super) fn edge_of(&self, which: usize) -> String {
        format!("stream{which}{}", "-".repeat(self.padding))
    }

    /// The settings of two workers always allow every kind of transfer; those of the others may not.
    pub(super) fn draw(rng: &mut Rng, [mut checksums, mut trust, mut own]: [Rng; 3]) -> Self {
        let validation =
            checksums.pick([Validation::Off, Validation::Off, Validation::Crc32c, Validation::Xxh3]);
        let flips = checksums.pick([0, 300, 3000]);
        let workers = WORKERS_MIN + rng.below(3);
        let hostile_of_4 = trust.pick([0, 0, 2, 4]);
        let drawn = |_| if trust.chance(hostile_of_4, 4) { Trust::Hostile } else { Trust::Cluster };
        let mode = rng.pick([Mode::Original, Mode::Counted, Mode::Counted]);
        let (depth, requests_max) = (rng.pick([4, 5, 6, 12, 64]), rng.pick([1, 2, 5, 64]));
        let contents_max = rng.pick([1, 2, 64]);
        let eager_bytes_max = rng.pick([0, 64, 4096]);
        let ring_bytes = rng.pick([8 << 10, 9000, 64 << 10]);
        let padding = rng.pick([0, 1, 200, 500]);
        let receive_bytes = rng.pick([32 << 10, 64 << 10, 256 << 10]);
        let is_able = |index| index < 2;
        Self {
            workers,
            trust: (0..workers).map(drawn).collect(),
            modes: (0..workers).map(|index| if is_able(index) { Mode::Counted } else { mode }).collect(),
            depth,
            requests_max: (0..workers)
                .map(|index| if is_able(index) { requests_max.max(4) } else { requests_max })
                .collect(),
            contents_max,
            eager_bytes_max: (0..workers)
                .map(|index| eager_bytes_max.max(64 * u32::from(is_able(index))))
                .collect(),
            requests_per_message: (0..workers)
                .map(|index| if is_able(index) { 8 } else { own.pick([1, 2, 8]) })
                .collect(),
            ring_bytes,
            padding,
            receive_bytes,
            longest: own.pick([LARGE, receive_bytes as usize * 5 / 8]),
            piece_bytes: own.pick([4 << 10, 8 << 10, 256 << 10]),
            validation,
            flips_of_65536: if validation.is_on() { flips } else { 0 },
        }
    }
}

pub(super) fn any_length(setup: &Setup, rng: &mut Rng) -> usize {
    if rng.chance(1, 24) { setup.longest } else { rng.pick(LENGTHS) }
}

pub(super) fn any_small_length(rng: &mut Rng) -> usize {
    rng.pick(SMALL_LENGTHS)
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
    /// Its incarnation, if the operation names one.
    pub(super) incarnation: Option<u64>,
    /// The name may be withdrawn.
    pub(super) is_fickle: bool,
}

impl Target {
    pub(super) fn any_life(peer: usize) -> Self {
        Self { peer, incarnation: None, is_fickle: false }
    }
}

/// The error of an operation, which is in the ledger already.
#[derive(Debug)]
pub(super) struct Ended(pub(super) OperationResult);

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
        let builder = builder(&node, &name(index))
            .cluster(cluster)
            .flow(|flow| {
                flow.mode = setup.modes[index];
                flow.depth = setup.depth;
                flow.requests_max = setup.requests_max[index];
                flow.contents_max = setup.contents_max;
                flow.eager_bytes_max = setup.eager_bytes_max[index];
                flow.requests_per_message = setup.requests_per_message[index];
                flow.ring_bytes = setup.ring_bytes;
                flow.piece_bytes = setup.piece_bytes;
            })
            .validation(setup.validation)
            .memory(|memory| {
                memory.source_bytes = 64 << 20;
                memory.receive_bytes = setup.receive_bytes;
                memory.bounce_bytes = setup.receive_bytes;
            })
            .trust(setup.trust[index]);
        let worker = node.run("start", builder.start()).await.unwrap().unwrap();
        run.truth().incarnations[index] = worker.incarnation();
        let member = Self { index, node, worker, run: run.clone() };
        for which in 0..NAMES {
            let length = if which < SMALL { SMALL_LENGTHS[which] } else { PUBLISHED_LENGTHS[which - SMALL] };
            member.publish(which, length).await;
        }
        member
    }

    /// The names of the peers that it is connected with.
    pub(super) fn connected(&self) -> Vec<String> {
        let peers = self.worker.peers().into_iter();
        peers.filter(|peer| peer.transport.is_some()).map(|peer| peer.name).collect()
    }

    /// Memory to send from.
    async fn buffer(&self, length: usize) -> BufMut {
        Self::buffer_of(self.worker.pool(), length).await
    }

    /// Memory to receive into: in the receive pool, where contents land without a copy, if that cannot starve other
    /// receives; otherwise elsewhere.
    pub(super) async fn target(&self, length: usize) -> BufMut {
        let Setup { receive_bytes, validation, .. } = *self.run.setup;
        let is_spared = length as u64 <= receive_bytes / 8 && !validation.is_on();
        let pool = if is_spared { self.worker.receive_pool() } else { self.worker.pool() };
        Self::buffer_of(pool, length).await
    }

    /// Allocating and registering memory fail sometimes, each time once; the next attempt works.
    async fn buffer_of(pool: &Pool, length: usize) -> BufMut {
        loop {
            match pool.alloc(length).await {
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
        // Without an await in between, so that no fetch returns a version that the scenario does not know.
        self.run.truth().published[self.index][which].push(transfer);
        self.worker.publish(&self.run.setup.published(which), tensor).unwrap();
    }

    pub(super) async fn publish_any(&self, rng: &mut Rng) {
        let which = rng.below(NAMES);
        let length = match which {
            ..SMALL => any_small_length(rng),
            _ if rng.chance(1, 12) => self.run.setup.longest,
            _ => rng.pick(PUBLISHED_LENGTHS),
        };
        if which == FICKLE && self.worker.withdraw(&self.run.setup.published(which)) {
            return;
        }
        self.publish(which, length).await;
    }

    /// Length of the longest tensor that may be published as `which`.
    pub(super) fn longest_of(&self, which: usize) -> usize {
        let small = SMALL_LENGTHS.into_iter().max().unwrap_or_default();
        if which < SMALL { small } else { self.run.setup.longest }
    }

    /// The oldest version that a fetch of `which` from worker `peer` may return, if it begins now.
    pub(super) fn newest(&self, peer: usize, which: usize) -> u64 {
        *self.run.truth().published[peer][which].last().unwrap()
    }

    /// Checks a numbered content: one of `allowed`, no older than `oldest`, and whole. Returns its number.
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
        self.count(tensor);
        transfer
    }

    fn count(&self, tensor: &Tensor) {
        self.run.truth().transfers += 1;
        if tensor.bytes().len() >= LARGE {
            self.run.count(Kind::Large);
        }
    }

    /// Checks that `tensor` is exactly `transfer`.
    pub(super) fn check(&self, tensor: &Tensor, transfer: u64) {
        self.check_length(transfer, tensor);
        self.run.handle.verify(transfer, tensor.bytes());
        self.count(tensor);
    }

    fn check_length(&self, transfer: u64, tensor: &Tensor) {
        let (found, wanted) = (tensor.bytes().len(), self.run.truth().lengths[transfer as usize]);
        let shape = tensor.metadata().byte_length;
        if found != wanted || shape != wanted as u64 {
            let text = format!("transfer {transfer} has {found} bytes ({shape} by its shape), not {wanted}");
            self.run.handle.fail(Violation::Data(text));
        }
    }

    /// Awaits one operation and enters its result into the ledger.
    ///
    /// # Errors
    /// It ended with an error.
    pub(super) async fn operation<T>(
        &self,
        target: Target,
        what: String,
        operation: impl Future<Output = Result<T, WorkerError>>,
    ) -> Result<T, Ended> {
        let entry = self.node.begin(Some(&address(target.peer)), what);
        match operation.await {
            Ok(value) => {
                entry.end(&OperationResult::Done);
                Ok(value)
            }
            Err(error) => Err(self.failed(entry, target, &error)),
        }
    }

    /// Polls `operation` up to `polls` times and then drops it, at once or when it is woken again: `None`.
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
        let result = match polled(polls, operation).await {
            Some(Ok(value)) => {
                entry.end(&OperationResult::Done);
                return Ok(Some(value));
            }
            Some(Err(error)) => return Err(self.failed(entry, target, &error)),
            None => OperationResult::Cancelled,
        };
        entry.end(&result);
        Ok(None)
    }

    /// An operation of a step that has ended, here or at the peer, may report that long afterwards.
    fn failed(&self, entry: Operation, target: Target, error: &WorkerError) -> Ended {
        let was_over = error.code() == Code::Aborted;
        let entry = if was_over { entry.part_of(self.run.truth().round_began) } else { entry };
        let result = self.result(target, error);
        entry.end_because(&result, error);
        Ended(result)
    }

    fn result(&self, target: Target, error: &WorkerError) -> OperationResult {
        let life = self.run.truth().incarnations[target.peer];
        match error {
            WorkerError::DeadlineExceeded { .. } => OperationResult::Deadline,
            WorkerError::Corrupted { .. } => OperationResult::Corrupted,
            WorkerError::Remote { status, .. }
                if status.code == Code::Aborted && target.incarnation.is_some_and(|named| named != life) =>
            {
                OperationResult::Refused
            }
            WorkerError::Remote { status, .. } if status.code == Code::NotFound && target.is_fickle => {
                OperationResult::Refused
            }
            // Healthy workers have no other errors, so each of these needs a fault that explains it.
            _ => OperationResult::PeerLost,
        }
    }

    /// Checks the gauges of an idle worker: its contents are still published, and everything else is zero.
    pub(super) fn check_idle(&self) {
        let (receive, source) = (self.worker.receive_memory(), self.worker.pool().stats());
        let held = [receive.used_bytes, receive.early_bytes, receive.leaked_bytes, receive.retired_bytes];
        let lent = [source.early_bytes, source.leaked_bytes, source.retired_bytes];
        let waiting = [receive.waiting, source.waiting];
        assert_eq!((held, lent, waiting), ([0; 4], [0; 3], [0; 2]), "worker {}", self.index);
        for peer in self.worker.peers().into_iter().filter(|peer| peer.transport.is_some()) {
            let counters = peer.counters;
            assert_eq!(counters.asks_received, counters.answers_sent, "worker {}: {peer:?}", self.index);
        }
    }

    /// Ends the worker, and checks that all its memory has returned.
    pub(super) async fn stop(&self) {
        let worker = self.worker.clone();
        self.node.run("shutdown", async move { worker.shutdown().await }).await.unwrap();
        self.run.handle.runtime().sleep(Duration::from_secs(2)).await;
        let memory = self.worker.receive_memory();
        assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0), "worker {}", self.index);
        // There are no views any more.
        let source = self.worker.pool().stats();
        assert_eq!((source.retired_bytes, source.leaked_bytes), (0, 0), "worker {}", self.index);
    }
}

/// Polls `future` up to `polls` times. If `polls` is odd, drops it when it is woken once more, like a `select!` whose
/// other branch is ready too.
async fn polled<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    use std::{future::poll_fn, pin::pin, task::Poll};
    let mut future = pin!(future);
    let (mut left, dropped_when_woken) = (polls, polls % 2 == 1);
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        let answer = future.as_mut().poll(context).map(Some);
        if answer.is_pending() && left == 0 && !dropped_when_woken {
            // Dropped only after a wake-up, so that every stage is reached.
            return Poll::Ready(None);
        }
        answer
    })
    .await
}

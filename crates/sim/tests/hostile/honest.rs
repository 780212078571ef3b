//! Honest workers: their operations with each other must succeed, and those with rogues must end.

use std::{
    slice,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_memory::{BufMut, MemoryError};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{
    ClusterSpec, Notes, Sharing, Tensor, Trust, Worker, WorkerError,
    calls::Handling,
    pages::{Arena, Exposed},
};
use tensorwire_sim::{Holdings, Node, OperationResult, Rng, Violation};

use super::{
    calling,
    stage::{
        LIMIT, NOTES, PAGE_BYTES, PAGES, Stage, address, device, name, rogue_address, rogue_device,
        rogue_name,
    },
};

use crate::common::builder;
use crate::join_all::join_all;

/// Published names of each worker.
const NAMES: usize = 2;

pub(super) const LENGTHS: [usize; 7] = [8, 9, 64, 65, 1000, 5003, 20_000];

type Job = BoxFuture<'static, Option<()>>;

/// One honest worker.
#[derive(Debug, Clone)]
pub(super) struct Honest {
    pub(super) index: usize,
    pub(super) node: Node,
    pub(super) worker: Worker,
    /// What rogues may read and write, until the worker ends.
    exposed: Arc<Mutex<Option<(Arena, Exposed, Handling)>>>,
    pub(super) stage: Stage,
}

impl Honest {
    pub(super) async fn start(stage: &Stage, index: usize) -> Self {
        let node = stage.handle.start_node(&address(index)).unwrap();
        let setup = &stage.setup;
        let mut cluster = ClusterSpec::new();
        for other in (0..setup.honest).filter(|other| *other != index) {
            cluster = cluster.worker(name(other), address(other));
        }
        for rogue in 0..setup.rogues {
            cluster = cluster.worker(rogue_name(rogue), rogue_address(rogue));
        }
        let trust = setup.trust[index];
        if trust == Trust::Cluster {
            stage.handle.share_domain(node.id());
        }
        let builder = builder(&node, &name(index))
            .cluster(cluster)
            .timeout(LIMIT)
            .liveness(Duration::from_secs(3))
            .limits(|limits| {
                limits.step_init_timeout = Duration::from_secs(3);
                limits.call_bytes = 32 << 10;
            })
            .flow(|flow| {
                flow.mode = setup.mode;
                flow.depth = setup.depth;
                flow.requests_max = setup.requests_max;
                flow.contents_max = setup.contents_max;
                flow.eager_bytes_max = setup.eager_bytes_max;
                flow.ring_bytes = setup.ring_bytes;
            })
            .validation(setup.validation)
            .memory(|memory| {
                memory.source_bytes = 16 << 20;
                memory.receive_bytes = 2 << 20;
                memory.bounce_bytes = 256 << 10;
            })
            .trust(trust);
        let worker = node.run("start", builder.start()).await.unwrap().unwrap();
        let arena = worker.arena(PAGES, PAGE_BYTES).await.unwrap();
        let exposed = worker.expose("kv", &arena).unwrap();
        let exposed = Arc::new(Mutex::new(Some((arena, exposed, calling::echo(&worker)))));
        let honest = Self { index, node, worker, exposed, stage: stage.clone() };
        for which in 0..NAMES {
            honest.publish(which, 64).await;
        }
        honest
    }

    async fn buffer(&self, length: usize) -> BufMut {
        match self.worker.pool().alloc(length).await {
            Ok(buffer) => buffer,
            Err(error @ MemoryError::Register { .. }) => panic!("{error}"),
            Err(error) => panic!("{error}"),
        }
    }

    /// A tensor with the number of the transfer, and then its content.
    pub(super) async fn tensor(&self, transfer: u64, length: usize) -> Tensor {
        let mut buffer = self.buffer(length).await;
        let (number, rest) = buffer.split_at_mut(8);
        number.copy_from_slice(&transfer.to_le_bytes());
        self.stage.handle.pattern().fill(transfer, rest);
        Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
    }

    async fn publish(&self, which: usize, length: usize) {
        let transfer = self.stage.new_transfer(length);
        let tensor = self.tensor(transfer, length).await;
        self.stage.truth().published.entry((self.index, which)).or_default().push(transfer);
        self.worker.publish(&format!("p{which}"), tensor).unwrap();
    }

    /// S2: one of `allowed`, and whole.
    fn check(&self, tensor: &Tensor, allowed: &[u64]) {
        let broken = |text: String| self.stage.handle.fail(Violation::Data(text));
        let Some((number, rest)) = tensor.bytes().split_first_chunk::<8>() else {
            return broken(format!("{} bytes are too few", tensor.bytes().len()));
        };
        let transfer = u64::from_le_bytes(*number);
        if !allowed.contains(&transfer) {
            return broken(format!("content {transfer} came instead of one of {allowed:?}"));
        }
        if self.stage.truth().lengths[transfer as usize] != tensor.bytes().len() {
            return broken(format!("content {transfer} has {} bytes", tensor.bytes().len()));
        }
        self.stage.handle.verify(transfer, rest);
        self.stage.truth().transfers += 1;
    }

    /// An operation with another honest worker, which must succeed if the two can rely on each other.
    async fn with_honest<T>(
        &self,
        peer: usize,
        what: String,
        operation: impl Future<Output = Result<T, WorkerError>>,
    ) -> Option<T> {
        let entry = self.node.begin(Some(&address(peer)), what);
        match operation.await {
            Ok(value) => {
                entry.end(&OperationResult::Done);
                Some(value)
            }
            Err(error) => {
                let result = match error {
                    _ if !self.stage.may_rely(self.index, peer) => OperationResult::Refused,
                    WorkerError::DeadlineExceeded { .. } => OperationResult::Deadline,
                    _ => OperationResult::PeerLost,
                };
                entry.end_because(&result, &error);
                None
            }
        }
    }

    /// An operation with a rogue, which must end in time, with any result.
    pub(super) async fn with_rogue<T>(
        &self,
        rogue: usize,
        what: String,
        operation: impl Future<Output = Result<T, WorkerError>>,
    ) -> Option<T> {
        self.stage.truth().operations_with_rogues += 1;
        let entry = self.node.begin(Some(&rogue_address(rogue)), what);
        match operation.await {
            Ok(value) => {
                entry.end(&OperationResult::Done);
                Some(value)
            }
            Err(error) => {
                entry.end_because(&OperationResult::Refused, &error);
                None
            }
        }
    }

    fn spawn<F: Future<Output = ()> + Send + 'static>(
        &self,
        rng: &mut Rng,
        job: impl FnOnce(Self, Rng) -> F,
    ) -> Job {
        self.node.run("job", job(self.clone(), Rng::new(rng.next_u64())))
    }

    pub(super) async fn pause(&self, rng: &mut Rng, longest: Duration) {
        let moment = rng.duration(longest);
        self.node.runtime().sleep(moment).await;
    }

    async fn fetcher(self, from: usize, mut rng: Rng) {
        let peer = self.worker.peer(&name(from)).unwrap();
        for _ in 0..rng.within(2..5) {
            self.pause(&mut rng, Duration::from_millis(20)).await;
            let which = rng.below(NAMES);
            let published = |stage: &Stage| stage.truth().published[&(from, which)].clone();
            let oldest = published(&self.stage).len() - 1;
            let sharing = if rng.chance(1, 3) { Sharing::View } else { Sharing::Copy };
            let published_name = format!("p{which}");
            let fetch = peer.fetch(&published_name).sharing(sharing).into_future();
            let what = format!("fetch {which} of worker {from}");
            if let Some(tensor) = self.with_honest(from, what, fetch).await
                && self.stage.may_rely(self.index, from)
            {
                self.check(&tensor, &published(&self.stage)[oldest..]);
            }
        }
        if rng.chance(1, 4) {
            let what = format!("list of worker {from}");
            let listed = self.with_honest(from, what, peer.list().into_future()).await;
            let is_relied_on = self.stage.may_rely(self.index, from);
            if is_relied_on && listed.is_some_and(|listed| listed.len() != NAMES) {
                self.stage.handle.fail(Violation::Data("a list is not whole".into()));
            }
        }
    }

    async fn receiver(self, from: usize, step: i64, values: Vec<u64>, mut rng: Rng) {
        let key = self.worker.key(&device(from), &device(self.index), "edge").unwrap();
        for transfer in values {
            self.pause(&mut rng, Duration::from_millis(5)).await;
            let step = self.worker.shared_step(step);
            let what = format!("receive of step {} from worker {from}", step.id());
            let received = self.with_honest(from, what, step.recv(&key).into_future()).await;
            let Some(tensor) = received else { return };
            if self.stage.may_rely(self.index, from) {
                self.check(&tensor, &[transfer]);
            }
        }
    }

    async fn sender(self, to: usize, step: i64, values: Vec<(u64, usize)>, mut rng: Rng) {
        let key = self.worker.key(&device(self.index), &device(to), "edge").unwrap();
        for (transfer, length) in values {
            self.pause(&mut rng, Duration::from_millis(5)).await;
            let tensor = self.tensor(transfer, length).await;
            match self.worker.shared_step(step).send(&key, tensor) {
                Ok(()) => {}
                Err(WorkerError::Aborted { .. }) if !self.stage.may_rely(self.index, to) => return,
                Err(error) => {
                    self.stage.handle.fail(Violation::Unexplained(format!("a send to worker {to}: {error}")));
                }
            }
        }
    }

    /// Receives from a rogue, and checks that a received tensor does not change.
    async fn takes_from(self, rogue: usize, step: i64, mut rng: Rng) {
        let peer = self.worker.peer(&rogue_name(rogue)).unwrap();
        let mut held: Vec<(Tensor, Vec<u8>)> = Vec::new();
        for number in 0..rng.within(1..5) {
            self.pause(&mut rng, Duration::from_millis(50)).await;
            let what = format!("operation {number} with rogue {rogue}");
            let sharing = if rng.chance(1, 3) { Sharing::View } else { Sharing::Copy };
            let taken = match rng.below(10) {
                8 | 9 => {
                    let mut values = peer.subscribe("p0").sharing(sharing).ahead(rng.pick([1, 2, 9]));
                    let runtime = self.node.runtime();
                    let next = timeout(&*runtime, LIMIT, values.next());
                    let taken = async { next.await.ok().flatten().transpose() };
                    self.with_rogue(rogue, what, taken).await.flatten().map(|update| update.tensor)
                }
                0 => {
                    let listed = self.with_rogue(rogue, what, peer.list().into_future()).await;
                    drop(listed);
                    None
                }
                1 => {
                    let key = self.worker.key(&rogue_device(rogue), &device(self.index), "edge");
                    let Ok(key) = key else { continue };
                    let step = self.worker.shared_step(step);
                    self.with_rogue(rogue, what, step.recv(&key).sharing(sharing).into_future()).await
                }
                2 => {
                    let Ok(into) = self.worker.receive_pool().alloc(64).await else { continue };
                    let fetch = peer.fetch("p0").into_buffer(into).dtype(DataType::U8).into_future();
                    self.with_rogue(rogue, what, async {
                        fetch.await.map(drop).map_err(|failed| failed.error)
                    })
                    .await;
                    None
                }
                3 | 4 => {
                    let fetch = peer.fetch("p1").sharing(sharing).versioned().into_future();
                    let fetched = self.with_rogue(rogue, what, fetch).await;
                    fetched.map(|fetched| fetched.tensor)
                }
                5 => {
                    let fetched =
                        self.with_rogue(rogue, what, peer.fetch_slice("p0", slice::from_ref(&(8..20)))).await;
                    if fetched.as_ref().is_some_and(|slice| slice.shape() != [12]) {
                        self.stage.handle.fail(Violation::Data("a slice has not its shape".into()));
                    }
                    fetched
                }
                _ => {
                    let published = format!("p{}", rng.below(3));
                    self.with_rogue(rogue, what, peer.fetch(&published).sharing(sharing).into_future()).await
                }
            };
            // A view is of the rogue's own memory.
            if let Some(tensor) = taken.filter(|tensor| !tensor.buf().is_foreign()) {
                self.stage.truth().taken_from_rogues += 1;
                let bytes = tensor.bytes().to_vec();
                held.push((tensor, bytes));
            }
            held.iter().for_each(|held| self.check_held(held));
        }
        self.pause(&mut rng, Duration::from_millis(500)).await;
        held.iter().for_each(|held| self.check_held(held));
    }

    fn check_held(&self, (tensor, bytes): &(Tensor, Vec<u8>)) {
        if tensor.bytes() != bytes.as_slice() {
            let text = "a value that came from a rogue changed after it was handed out".to_owned();
            self.stage.handle.fail(Violation::Memory(text));
        }
    }

    async fn sends_to_rogue(self, rogue: usize, step: i64, mut rng: Rng) {
        let Ok(key) = self.worker.key(&device(self.index), &rogue_device(rogue), "edge") else { return };
        for _ in 0..rng.within(1..3) {
            let length = rng.pick(LENGTHS);
            let transfer = self.stage.new_transfer(length);
            let tensor = self.tensor(transfer, length).await;
            // The step may have ended with the rogue.
            let _ = self.worker.shared_step(step).send(&key, tensor);
            self.pause(&mut rng, Duration::from_millis(50)).await;
        }
    }

    /// Opens a channel of notes with a rogue for some time, and takes the notes that arrive.
    async fn has_notes_of(self, rogue: usize, mut rng: Rng) {
        let peer = self.worker.peer(&rogue_name(rogue)).unwrap();
        let what = format!("notes with rogue {rogue}");
        let Some(notes) = self.with_rogue(rogue, what, peer.notes(NOTES, 2)).await else { return };
        for _ in 0..3 {
            self.pause(&mut rng, Duration::from_millis(300)).await;
            while let Some(Ok(note)) = notes.recv(0).now_or_never() {
                assert!(note.len() <= Notes::BYTES_MAX);
            }
        }
    }

    pub(super) fn holdings(&self) -> Holdings {
        self.stage.handle.holdings(self.node.id())
    }

    /// Ends the worker, and checks that its memory has returned.
    pub(super) async fn stop(&self) {
        let worker = self.worker.clone();
        self.node.run("shutdown", async move { worker.shutdown().await }).await.unwrap();
        self.stage.handle.runtime().sleep(Duration::from_secs(2)).await;
        let (arena, exposed, handling) = self.exposed.lock().unwrap().take().unwrap();
        if (0..PAGES).any(|page| arena.page_mut(page).is_err()) {
            let text = format!("worker {} ended with pages in use", self.index);
            self.stage.handle.fail(Violation::Scenario(format!("S4: {text}")));
        }
        drop((arena, exposed, handling));
        let (receive, source) = (self.worker.receive_memory(), self.worker.pool().stats());
        let left = [receive.used_bytes, receive.leaked_bytes, source.leaked_bytes, source.retired_bytes];
        if left != [0; 4] {
            let text = format!("worker {} ended with memory in use: {receive:?} {source:?}", self.index);
            self.stage.handle.fail(Violation::Scenario(format!("S4: {text}")));
        }
    }
}

/// One round of traffic among honest workers, and with rogues if `with_rogues`.
pub(super) async fn round(stage: &Stage, members: &[Honest], round: i64, with_rogues: bool, rng: &mut Rng) {
    let mut jobs: Vec<Job> = Vec::new();
    let mut steps = Vec::new();
    for member in members {
        jobs.push(member.spawn(rng, |member, mut rng| async move {
            for _ in 0..2 {
                let (which, length) = (rng.below(NAMES), rng.pick(LENGTHS));
                member.publish(which, length).await;
                member.pause(&mut rng, Duration::from_millis(20)).await;
            }
        }));
        for peer in members.iter().filter(|peer| peer.index != member.index) {
            let from = peer.index;
            jobs.push(member.spawn(rng, move |member, rng| member.fetcher(from, rng)));
            let step = round * 1000 + (member.index * 10 + from) as i64;
            steps.push(step);
            let lengths: Vec<usize> = (0..rng.within(1..4)).map(|_| rng.pick(LENGTHS)).collect();
            let values: Vec<(u64, usize)> =
                lengths.into_iter().map(|length| (stage.new_transfer(length), length)).collect();
            let numbers = values.iter().map(|(transfer, _)| *transfer).collect();
            let to = member.index;
            jobs.push(peer.spawn(rng, move |peer, rng| peer.sender(to, step, values, rng)));
            jobs.push(member.spawn(rng, move |member, rng| member.receiver(from, step, numbers, rng)));
        }
        if with_rogues {
            let (rogue, step) = (rng.below(stage.setup.rogues), round * 1000 + 500 + member.index as i64);
            steps.push(step);
            for _ in 0..rng.within(1..5) {
                jobs.push(member.spawn(rng, move |member, rng| member.takes_from(rogue, step, rng)));
            }
            jobs.push(member.spawn(rng, move |member, rng| member.sends_to_rogue(rogue, step, rng)));
            jobs.push(member.spawn(rng, move |member, rng| member.has_notes_of(rogue, rng)));
            jobs.push(member.spawn(rng, move |member, rng| member.moves_pages(rogue, rng)));
            jobs.push(member.spawn(rng, move |member, rng| member.calls(rogue, rng)));
        }
    }
    join_all(jobs).await;
    members.iter().for_each(|member| steps.iter().for_each(|step| member.worker.cleanup(*step)));
}

//! Reads and writes of 8 bytes and of 1 MiB in an export of 64 MiB, and of pages of as many bytes in an arena, compared with pulls
//! of as many bytes by message. Two ranks are threads of this process, and sleep while they wait. RDMA is measured where there is a
//! device: run by scripts/rxe-vm/run, the program has some.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime
#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its group is its own

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensorwire::{
    DataType, Peer, Sharing, Step, Tensor, Worker,
    collective::{Group, pair::ExportKey, store::MemoryStore},
    pages::{Arena, Pages, RemoteArena},
};
use tensorwire_fabric::{Fabric, FabricKind, Runtime, TokioRuntime};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_verbs_reactor::{Rdma, VerbsFabric};
use tokio::sync::mpsc;

const EXPORT_BYTES: usize = 64 << 20;

const BYTES: [usize; 2] = [8, 1 << 20];

/// Pages of each arena.
const PAGES: u32 = 64;

/// Where the ranges begin.
const OFFSET: usize = (32 << 20) + 64;

/// The step of pulled values, and their key.
const STEP: i64 = 1;
const VALUE: &str = "value";

/// How many values at most the owner sends before they are pulled.
const SENT: usize = 32;

fn exports(criterion: &mut Criterion) {
    for kind in [FabricKind::SHM, FabricKind::TCP, FabricKind::VERBS] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        if runtime.block_on(async { fabric(kind).is_none() }) {
            println!("exports over {kind}: not measured, there is no device");
            continue;
        }
        let mut rank = runtime.block_on(Measuring::start(kind));
        let mut group = criterion.benchmark_group(format!("exports/{kind}"));
        for bytes in BYTES {
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(BenchmarkId::new("pull", bytes), |bencher| {
                bencher.iter_custom(|number| runtime.block_on(rank.pull(bytes, number)));
            });
            group.bench_function(BenchmarkId::new("get", bytes), |bencher| {
                bencher.iter(|| runtime.block_on(rank.get(bytes)));
            });
            let content = vec![1; bytes];
            group.bench_function(BenchmarkId::new("put", bytes), |bencher| {
                bencher.iter(|| runtime.block_on(rank.put(&content)));
            });
            let window = runtime.block_on(rank.window(bytes));
            group.bench_function(BenchmarkId::new("read page", bytes), |bencher| {
                bencher.iter(|| runtime.block_on(window.read()));
            });
            group.bench_function(BenchmarkId::new("write page", bytes), |bencher| {
                bencher.iter(|| runtime.block_on(window.write()));
            });
        }
        group.finish();
    }
}

/// The rank that reads and writes.
struct Measuring {
    group: Group,
    owner: Peer,
    step: Step,
    key: ExportKey,
    /// Orders values: how many, of how many bytes.
    values: mpsc::Sender<(usize, usize)>,
    sent: mpsc::Receiver<()>,
}

impl Measuring {
    async fn start(kind: FabricKind) -> Self {
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().expect("a runtime"));
        let store = Arc::new(MemoryStore::new(runtime));
        let (values, wanted) = mpsc::channel(1);
        let (done, sent) = mpsc::channel(1);
        let shared = store.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(own(kind, shared, wanted, done));
        });
        let worker = worker(kind, 0).await;
        let group = Group::builder(store, 0, 2).name("bench").join(&worker).await.expect("a group");
        let key = group.recv(1, 0).await.expect("the key").tensor;
        let key = ExportKey::decode(key.bytes()).expect("a key");
        let owner = worker.peer("rank_1").expect("a peer");
        Self { group, owner, step: worker.step(STEP), key, values, sent }
    }

    /// The time of this many pulls.
    async fn pull(&mut self, bytes: usize, number: u64) -> Duration {
        let mut took = Duration::ZERO;
        for begun in (0..number).step_by(SENT) {
            let values = SENT.min((number - begun) as usize);
            self.values.send((values, bytes)).await.expect("the owner");
            self.sent.recv().await.expect("the owner");
            let begin = Instant::now();
            for _ in 0..values {
                let value = self.step.from(&self.owner).recv(VALUE).sharing(Sharing::Copy);
                assert_eq!(value.await.expect("a value").bytes().len(), bytes);
            }
            took += begin.elapsed();
        }
        took
    }

    async fn get(&self, bytes: usize) {
        let read = self.group.get(&self.key, OFFSET..OFFSET + bytes).await.expect("a read");
        assert_eq!(read.bytes().len(), bytes);
    }

    async fn put(&self, content: &[u8]) {
        self.group.put(&self.key, OFFSET, content).await.expect("a write");
    }

    async fn window(&self, bytes: usize) -> Window {
        let remote = self.owner.arena(&arena_of_pages(bytes)).await.expect("an arena");
        let page = self.group.worker().arena(1, bytes).await.expect("a page");
        let at = Pages::from([PAGES / 2]);
        Window { remote, page, at }
    }
}

/// The owner's arena with pages of one length, and a page of this rank.
struct Window {
    remote: RemoteArena,
    page: Arena,
    at: Pages,
}

impl Window {
    async fn read(&self) {
        self.remote.read(&self.at, &self.page, &Pages::from([0])).await.expect("a read");
    }

    async fn write(&self) {
        self.remote.write(&self.page, &Pages::from([0]), &self.at).await.expect("a write");
    }
}

/// The name of the arena with pages of `bytes`.
fn arena_of_pages(bytes: usize) -> String {
    format!("pages of {bytes}")
}

/// The rank that has the export and the arenas, and sends values when they are wanted.
async fn own(
    kind: FabricKind,
    store: Arc<MemoryStore>,
    mut wanted: mpsc::Receiver<(usize, usize)>,
    sent: mpsc::Sender<()>,
) {
    let worker = worker(kind, 1).await;
    let group = Group::builder(store, 1, 2).name("bench").join(&worker).await.expect("a group");
    let tensor = |bytes: usize| {
        let zeros = worker.pool().try_alloc(bytes).expect("memory");
        Tensor::new(zeros, DataType::U8, &[bytes as u64]).expect("a tensor")
    };
    let export = group.export(tensor(EXPORT_BYTES)).expect("an export");
    let mut exposed = Vec::new();
    for bytes in BYTES {
        let arena = worker.arena(PAGES, bytes).await.expect("an arena");
        exposed.push(worker.expose(&arena_of_pages(bytes), &arena).expect("a name"));
    }
    let key = Tensor::from_values(worker.pool(), &[40], &export.key().encode()).expect("a key");
    // The other rank may leave without having measured anything.
    drop(group.send(0, 0, key));
    let (step, peer) = (worker.step(STEP), worker.peer("rank_0").expect("a peer"));
    while let Some((values, bytes)) = wanted.recv().await {
        for _ in 0..values {
            step.to(&peer).send(VALUE, tensor(bytes)).expect("the other rank");
        }
        if sent.send(()).await.is_err() {
            break;
        }
    }
}

async fn worker(kind: FabricKind, rank: usize) -> Worker {
    let fabric = fabric(kind).expect("a fabric");
    let worker = Worker::builder(&format!("rank_{rank}")).local_fabrics(vec![fabric]).start().await;
    worker.expect("a worker")
}

/// `None` if there is no device.
fn fabric(kind: FabricKind) -> Option<Arc<dyn Fabric>> {
    let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().expect("a runtime"));
    if kind == FabricKind::SHM {
        return Some(Arc::new(ShmFabric::new(runtime).expect("shared memory")));
    }
    if kind == FabricKind::TCP {
        return Some(Arc::new(TcpFabric::new(runtime, TcpConfig::default())));
    }
    let settings = Rdma::from_environment().ok()?;
    Some(Arc::new(VerbsFabric::open(runtime, &settings).ok()?))
}

criterion_group!(benches, exports);
criterion_main!(benches);

//! All-reduces of four ranks on two hosts, with each algorithm: shared memory within a host, TCP over loopback between them. Ranks
//! are threads of this process, and sleep while they wait.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::{
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensorwire::{
    Worker,
    collective::{Algorithm, Group, store::MemoryStore},
};
use tensorwire_fabric::{Fabric, Runtime, TokioRuntime};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tokio::sync::mpsc;

/// The hosts of the ranks: in blocks, as launchers place them by default, or alternating.
const PLACES: [(&str, [&str; RANKS]); 2] =
    [("blocks", ["a", "a", "b", "b"]), ("turns", ["a", "b", "a", "b"])];

const RANKS: usize = 4;

const ALGORITHMS: [Algorithm; 4] =
    [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Doubling, Algorithm::Hierarchical];

const BYTES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 16 << 20];

/// An order to every rank: how many calls to make.
#[derive(Clone, Copy)]
struct Calls {
    number: u64,
    bytes: usize,
    algorithm: Algorithm,
}

/// The ranks' threads.
struct Ranks {
    calls: Vec<mpsc::Sender<Calls>>,
    took: mpsc::Receiver<Duration>,
}

impl Ranks {
    fn start(hosts: [&'static str; RANKS]) -> Self {
        let (done, took) = mpsc::channel(RANKS);
        let store = Arc::new(OnceLock::new());
        let calls = hosts.into_iter().enumerate().map(|(rank, host)| {
            let (calls, given) = mpsc::channel(1);
            let (done, store) = (done.clone(), Arc::clone(&store));
            thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("a runtime").block_on(serve(rank, host, &store, given, done));
            });
            calls
        });
        let mut ranks = Self { calls: calls.collect(), took };
        ranks.slowest();
        ranks
    }

    /// The time of the slowest rank.
    fn time(&mut self, calls: Calls) -> Duration {
        for rank in &self.calls {
            rank.blocking_send(calls).expect("a rank");
        }
        self.slowest()
    }

    fn slowest(&mut self) -> Duration {
        (0..RANKS).map(|_| self.took.blocking_recv().expect("a rank")).max().unwrap_or_default()
    }
}

/// Joins, and makes the ordered calls.
async fn serve(
    rank: usize,
    host: &str,
    store: &OnceLock<Arc<MemoryStore>>,
    mut given: mpsc::Receiver<Calls>,
    done: mpsc::Sender<Duration>,
) {
    let (worker, runtime) = worker(rank, host).await;
    let store = store.get_or_init(|| Arc::new(MemoryStore::new(runtime))).clone();
    let group = Group::builder(store, rank, RANKS).name("bench").join(&worker).await.expect("a group");
    done.send(Duration::ZERO).await.expect("somebody measures");
    while let Some(calls) = given.recv().await {
        done.send(run(&group, calls).await).await.expect("somebody measures");
    }
}

async fn worker(rank: usize, host: &str) -> (Worker, Arc<dyn Runtime>) {
    let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().expect("a runtime"));
    let within = ShmFabric::new(runtime.clone()).expect("shared memory").with_host(host);
    let between = TcpFabric::new(runtime.clone(), TcpConfig::default());
    let fabrics: Vec<Arc<dyn Fabric>> = vec![Arc::new(within), Arc::new(between)];
    let worker = Worker::builder(&format!("rank_{rank}")).local_fabrics(fabrics).start().await;
    (worker.expect("a worker"), runtime)
}

async fn run(group: &Group, calls: Calls) -> Duration {
    let mut values = vec![0.5f32; calls.bytes / 4];
    group.barrier().await.expect("all ranks");
    let clock = group.worker().runtime().clone();
    let begin = clock.now();
    for _ in 0..calls.number {
        group.all_reduce(&mut values).algorithm(calls.algorithm).await.expect("all ranks");
    }
    clock.now() - begin
}

fn all_reduce(criterion: &mut Criterion) {
    for (places, hosts) in PLACES {
        let mut ranks = Ranks::start(hosts);
        for bytes in BYTES {
            let mut group = criterion.benchmark_group(format!("all_reduce/hosts in {places}/{bytes} B"));
            group.throughput(Throughput::Bytes(bytes as u64)).sample_size(20);
            for algorithm in ALGORITHMS {
                let id = BenchmarkId::from_parameter(algorithm);
                group.bench_function(id, |bencher| {
                    bencher.iter_custom(|number| ranks.time(Calls { number, bytes, algorithm }));
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, all_reduce);
criterion_main!(benches);

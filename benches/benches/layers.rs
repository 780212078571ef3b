//! The cost of each layer, in one process and on one thread: what remains of a transfer when nobody sleeps and
//! nothing is waited for. `tensorwire bench` measures the same between two processes, against the machine's limits.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::{
    hint::black_box,
    sync::{Arc, Mutex, OnceLock, Weak},
    time::Duration,
};

use criterion::{Criterion, criterion_group, criterion_main};
use tensorwire::{Tensor, Worker};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_memory::{Block, BlockVisitor, Buf, Granted, Pool, PoolConfig, VisitError};
use tensorwire_protocol::{DataType, Message, RequestIndex, Scope, StepId, TensorRequest, wire};
use tensorwire_verbs_reactor::{
    Access, Capabilities, ConnectParams, Domain, Fabric, FabricKind, Immediate, Link, QueuePair,
    QueuePairConfig, QueuePairCore, RemoteRange, RemoteRegion, Role, Runtime, SlotKey, TokioRuntime,
    WorkRequest,
};

const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 64, receive_depth: 256 };
const SMALL: usize = 8;
const SERVER: &str = "/job:bench/replica:0/task:0";
const PULLER: &str = "/job:bench/replica:0/task:1";

fn tokio_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn memory_layer(criterion: &mut Criterion) {
    let pool = Pool::new(PoolConfig::new("bench")).expect("a pool");
    let _held = pool.try_alloc(64).expect("a buffer");
    criterion.bench_function("memory/alloc and free 4 KiB", |bencher| {
        bencher.iter(|| black_box(pool.try_alloc(4096).expect("a buffer")));
    });
    criterion.bench_function("memory/grant and end", |bencher| {
        bencher.iter(|| {
            let granted = pool.try_alloc(4096).expect("a buffer").grant();
            black_box(granted.end(tensorwire_memory::GrantEnd::Content).expect("the buffer back"))
        });
    });
}

fn wire_layer(criterion: &mut Criterion) {
    let request = Message::TensorRequest(TensorRequest {
        index: RequestIndex(7),
        scope: Scope::Step(StepId(3)),
        key: "/job:ps/replica:0/task:0/device:CPU:0;0000000000001ed2;/job:w/replica:0/task:0/device:CPU:0;var0;0:0"
            .into(),
        known: [].into(),
        want: tensorwire_protocol::Want::Write(None),
    });
    let bytes = wire::encode(&request);
    criterion.bench_function("wire/encode a request", |bencher| {
        bencher.iter(|| wire::encode(black_box(&request)));
    });
    criterion
        .bench_function("wire/decode a request", |bencher| bencher.iter(|| wire::decode(black_box(&bytes))));
}

/// A link that has carried out every operation when it is posted.
#[derive(Debug)]
struct AtOnce(OnceLock<Weak<QueuePairCore>>);

impl Link for AtOnce {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        if let Some(core) = self.0.get().and_then(Weak::upgrade) {
            core.complete(key, request.length(), Ok(()));
        }
    }

    fn drive(&self) {}

    fn start_close(&self) {
        if let Some(core) = self.0.get().and_then(Weak::upgrade) {
            core.mark_drained();
        }
    }
}

fn reactor_layer(criterion: &mut Criterion) {
    let runtime = tokio_runtime();
    let core = Arc::new(QueuePairCore::new(FabricKind::SHM, DEPTHS, Capabilities::WRITES));
    let link = Arc::new(AtOnce(OnceLock::new()));
    link.0.set(Arc::downgrade(&core)).expect("set once");
    let queue_pair = QueuePair::new(core, link);
    criterion.bench_function("reactor/reserve, complete and await a slot", |bencher| {
        bencher.iter(|| runtime.block_on(queue_pair.notify(Immediate(7))).expect("a completion"));
    });
}

/// The last region of a pool.
#[derive(Debug)]
struct Regions(Arc<dyn Domain>, Access, Mutex<Option<RemoteRegion>>);

impl BlockVisitor for Regions {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        let region = self.0.register(block, self.1).map_err(|error| VisitError(Arc::new(error)))?;
        *self.2.lock().expect("no panic before") = Some(region);
        Ok(())
    }
}

fn pool(domain: &Arc<dyn Domain>, access: Access) -> (Pool, Arc<Regions>) {
    let pool = Pool::new(PoolConfig::new("bench")).expect("a pool");
    let regions = Arc::new(Regions(domain.clone(), access, Mutex::default()));
    pool.add_visitor(regions.clone()).expect("no blocks yet");
    (pool, regions)
}

/// Two connected queue pairs, and a write of 8 bytes from the first to the second.
struct Pair {
    writer: QueuePair,
    reader: QueuePair,
    bytes: Buf,
    target: RemoteRange,
    _lent: Granted,
    _domains: [Arc<dyn Domain>; 2],
}

impl Pair {
    async fn connect(fabric: &dyn Fabric, runtime: &dyn Runtime) -> Self {
        let domains = [(); 2].map(|()| fabric.open_domain().expect("a domain"));
        let (source, _) = pool(&domains[0], Access::LOCAL);
        let (receive, regions) = pool(&domains[1], Access::RECEIVE);
        let bytes = source.try_alloc(SMALL).expect("a buffer").freeze();
        let lent = receive.try_alloc(SMALL).expect("a buffer").grant();
        let ends = domains.each_ref().map(|domain| domain.prepare(DEPTHS).expect("a side"));
        let data = ends.each_ref().map(|end| end.connection_data());
        let [first, second] = ends;
        let limit = Duration::from_secs(10);
        let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit };
        let [first_data, second_data] = data;
        let (writer, reader) = futures::join!(
            first.connect(params(second_data, Role::Dialer)),
            second.connect(params(first_data, Role::Acceptor))
        );
        let [writer, reader] =
            [writer, reader].map(|connected| connected.expect("a connection").spawn(runtime));
        let region = regions.2.lock().expect("no panic before").expect("a region");
        writer.add_remote_region(region);
        let (region, generation) = (region.region, region.generation);
        let target = RemoteRange { region, generation, offset: lent.offset() as u64, length: SMALL as u64 };
        Self { writer, reader, bytes, target, _lent: lent, _domains: domains }
    }

    async fn write(&self) {
        let write = self.writer.write_imm(self.bytes.clone(), self.target, Immediate(7));
        self.reader.next_arrival().await.expect("an arrival");
        write.await.expect("a completion");
    }
}

fn fabric_layer(criterion: &mut Criterion) {
    let runtime = tokio_runtime();
    let _inside = runtime.enter();
    let clock: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().expect("inside a runtime"));
    let fabrics: [Arc<dyn Fabric>; 2] = [
        Arc::new(ShmFabric::new(clock.clone()).expect("shared memory")),
        Arc::new(TcpFabric::new(clock.clone(), TcpConfig::default())),
    ];
    for fabric in fabrics {
        let pair = runtime.block_on(Pair::connect(&*fabric, &*clock));
        let name = format!("fabric/write 8 B with immediate, take it, complete, {}", fabric.kind());
        criterion.bench_function(&name, |bencher| bencher.iter(|| runtime.block_on(pair.write())));
    }
}

fn small_tensor(worker: &Worker) -> Tensor {
    Tensor::from_bytes(worker.pool(), DataType::U8, &[SMALL as u64], &[7; SMALL]).expect("a tensor")
}

fn rendezvous_layer(criterion: &mut Criterion) {
    let runtime = tokio_runtime();
    let start =
        |name| runtime.block_on(Worker::builder(name).require(FabricKind::SHM).start()).expect("a worker");
    let (server, puller) = (start(SERVER), start(PULLER));
    let device = format!("{SERVER}/device:CPU:0");
    let own = server.key(&device, &device, "edge").expect("a key");
    let (step, tensor) = (server.shared_step(1), small_tensor(&server));
    criterion.bench_function("rendezvous/send and take in one worker", |bencher| {
        bencher.iter(|| {
            step.send(&own, tensor.clone()).expect("room");
            runtime.block_on(step.recv(&own).into_future()).expect("the value")
        });
    });
    server.publish("tensor", tensor).expect("a good name");
    let peer = runtime.block_on(puller.peer_at(server.address())).expect("the server");
    criterion.bench_function("rendezvous/pull 8 B over shm", |bencher| {
        bencher.iter(|| runtime.block_on(peer.fetch("tensor").into_future()).expect("the tensor"));
    });
    runtime.block_on(async { futures::join!(puller.shutdown(), server.shutdown()) });
}

criterion_group!(benches, memory_layer, wire_layer, reactor_layer, fabric_layer, rendezvous_layer);
criterion_main!(benches);

//! The cost of each layer, in one process and on one thread: the part of a transfer without sleeping and waiting.
//! `tensorwire-bench` measures the same between two processes, and compares it with the machine's limits.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::{
    hint::black_box,
    sync::{Arc, OnceLock, Weak},
};

use criterion::{Criterion, criterion_group, criterion_main};
use tensorwire::{Tensor, Worker};
use tensorwire_benches::fabric_pair::{DEPTHS, FabricPair};
use tensorwire_fabric::{
    Capabilities, Fabric, FabricKind, Immediate, Link, QueuePair, QueuePairCore, Runtime, SlotKey,
    TokioRuntime, WorkRequest,
};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_memory::{Pool, PoolConfig};
use tensorwire_protocol::{DataType, Message, RequestIndex, Scope, StepId, TensorRequest, wire};

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
        arguments: None,
    });
    let bytes = wire::encode(&request);
    criterion.bench_function("wire/encode a request", |bencher| {
        bencher.iter(|| wire::encode(black_box(&request)));
    });
    criterion
        .bench_function("wire/decode a request", |bencher| bencher.iter(|| wire::decode(black_box(&bytes))));
}

/// A link whose operations are complete when they are posted.
#[derive(Debug)]
struct AtOnce(OnceLock<Weak<QueuePairCore>>);

impl Link for AtOnce {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        if let Some(core) = self.0.get().and_then(Weak::upgrade) {
            core.complete(key, request.length(), Ok(()));
        }
    }

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

fn fabric_layer(criterion: &mut Criterion) {
    let runtime = tokio_runtime();
    let _inside = runtime.enter();
    let clock: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().expect("inside a runtime"));
    let fabrics: [Arc<dyn Fabric>; 2] = [
        Arc::new(ShmFabric::new(clock.clone()).expect("shared memory")),
        Arc::new(TcpFabric::new(clock.clone(), TcpConfig::default())),
    ];
    for fabric in fabrics {
        let pair = runtime.block_on(FabricPair::connect(&*fabric, &*clock));
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

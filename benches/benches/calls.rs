//! Calls that are answered with their argument, by a server in another process, and the same over gRPC.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use prost::bytes::Bytes;
use tensorwire::{DataType, FabricKind, Tensor, settings::Wait};
use tensorwire_benches::{ECHO, Server, grpc, puller, serve_if_child};

/// The lengths of the argument, in bytes.
const SIZES: [usize; 4] = [8, 4 << 10, 64 << 10, 1 << 20];

/// The ways to call: name, fabric, and how both sides wait.
const WAYS: [(&str, FabricKind, Wait); 4] = [
    ("shm", FabricKind::SHM, Wait::Sleep),
    ("shm adaptive", FabricKind::SHM, Wait::Adaptive),
    ("tcp", FabricKind::TCP, Wait::Sleep),
    ("tcp adaptive", FabricKind::TCP, Wait::Adaptive),
];

fn calls(criterion: &mut Criterion) {
    let server = Server::start().expect("the server");
    // Dropped before the server, which waits for the end of its connections.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut group = criterion.benchmark_group("call");
    for bytes in SIZES {
        // There and back.
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        let mut grpc = runtime.block_on(grpc::Puller::connect(&server.grpc_address)).expect("a connection");
        let content = Bytes::from(vec![7; bytes]);
        group.bench_function(BenchmarkId::new("grpc", bytes), |bencher| {
            bencher.iter(|| {
                let answer = runtime.block_on(grpc.echo(content.clone())).expect("an answer");
                assert_eq!(answer.len(), bytes);
            });
        });
        for (label, kind, wait) in WAYS {
            let (worker, peer) = runtime.block_on(puller(&server, kind, wait)).expect("a worker");
            let mut buffer = worker.pool().try_alloc(bytes).expect("memory");
            buffer.fill(7);
            let argument = Tensor::new(buffer, DataType::U8, &[bytes as u64]).expect("a tensor");
            group.bench_function(BenchmarkId::new(label, bytes), |bencher| {
                bencher.iter(|| {
                    let called = peer.call(ECHO, argument.clone()).into_future();
                    let answer = runtime.block_on(called).expect("an answer");
                    assert_eq!(answer.first().map(|tensor| tensor.bytes().len()), Some(bytes));
                });
            });
            runtime.block_on(worker.shutdown());
        }
    }
    group.finish();
}

criterion_group!(benches, calls);

fn main() {
    serve_if_child();
    benches();
    Criterion::default().configure_from_args().final_summary();
}

//! Pulls from a server in another process, compared with the machine's limits.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use tensorwire::{FabricKind, Sharing, settings::Wait};
use tensorwire_benches::{RawPull, SIZES, Server, grpc, puller, serve_if_child, tensor_name};

/// The ways to pull: name, fabric, how both sides wait, and whether the puller gets a copy or a view.
const WAYS: [(&str, FabricKind, Wait, Sharing); 5] = [
    ("shm", FabricKind::SHM, Wait::Sleep, Sharing::Copy),
    ("shm adaptive", FabricKind::SHM, Wait::Adaptive, Sharing::Copy),
    ("shm view", FabricKind::SHM, Wait::Sleep, Sharing::View),
    ("tcp", FabricKind::TCP, Wait::Sleep, Sharing::Copy),
    ("tcp adaptive", FabricKind::TCP, Wait::Adaptive, Sharing::Copy),
];

fn pulls(criterion: &mut Criterion) {
    let server = Server::start().expect("the server");
    // Dropped before the server, which waits for the end of its connections.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut group = criterion.benchmark_group("pull");
    for bytes in SIZES {
        group.throughput(Throughput::Bytes(bytes as u64));
        let (source, mut target) = (vec![1u8; bytes], vec![0u8; bytes]);
        group.bench_function(BenchmarkId::new("limit memcpy", bytes), |bencher| {
            bencher.iter(|| black_box(&mut target).copy_from_slice(black_box(&source)));
        });
        let mut raw = RawPull::new(bytes).expect("a stream");
        group.bench_function(BenchmarkId::new("limit raw tcp", bytes), |bencher| {
            bencher.iter(|| raw.pull().expect("a pull"));
        });
        let mut grpc = runtime.block_on(grpc::Puller::connect(&server.grpc_address)).expect("a connection");
        group.bench_function(BenchmarkId::new("grpc", bytes), |bencher| {
            bencher.iter(|| {
                let pulled = runtime.block_on(grpc.pull(bytes)).expect("a pull");
                assert_eq!(pulled.len(), bytes);
            });
        });
        for (label, kind, wait, sharing) in WAYS {
            let (worker, peer) = runtime.block_on(puller(&server, kind, wait)).expect("a worker");
            let name = tensor_name(bytes);
            group.bench_function(BenchmarkId::new(label, bytes), |bencher| {
                bencher.iter(|| {
                    let pulled =
                        runtime.block_on(peer.fetch(&name).sharing(sharing).into_future()).expect("a pull");
                    assert_eq!(pulled.bytes().len(), bytes);
                });
            });
            runtime.block_on(worker.shutdown());
        }
    }
    group.finish();
}

criterion_group!(benches, pulls);

fn main() {
    serve_if_child();
    benches();
    Criterion::default().configure_from_args().final_summary();
}

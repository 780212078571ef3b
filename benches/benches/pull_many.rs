//! A hundred tensors fetched by one call: with all requests in one message, and with one message for each. Both sides
//! are in this process, on one runtime.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensorwire::{FabricKind, Tensor, Worker};
use tokio::runtime::Runtime;

const TENSORS: usize = 100;

/// Bytes of each tensor. Small ones travel inside a message, others are written.
const SIZES: [usize; 3] = [8, 1024, 16 << 10];

async fn worker(name: &str, kind: FabricKind, requests_per_message: u32) -> Worker {
    let builder =
        Worker::builder(name).require(kind).flow(|flow| flow.requests_per_message = requests_per_message);
    builder.start().await.expect("a worker")
}

fn fetches(criterion: &mut Criterion, runtime: &Runtime, kind: FabricKind, bytes: usize) {
    let mut group = criterion.benchmark_group(format!("pull {TENSORS} of {bytes} B over {kind}"));
    group.throughput(Throughput::Elements(TENSORS as u64));
    let names: Vec<String> = (0..TENSORS).map(|number| format!("layer {number}/weights")).collect();
    for requests_per_message in [1, 128] {
        let server = runtime.block_on(worker("/job:ps/replica:0/task:0", kind, requests_per_message));
        let client = runtime.block_on(worker("/job:worker/replica:0/task:0", kind, requests_per_message));
        for name in &names {
            let values = vec![1u8; bytes];
            let tensor = Tensor::from_values(server.pool(), &[bytes as u64], &values).expect("a tensor");
            server.publish(name, tensor).expect("a name");
        }
        let peer = runtime.block_on(client.peer_at(server.address())).expect("a peer");
        group.bench_function(BenchmarkId::new("requests per message", requests_per_message), |bencher| {
            bencher.iter(|| {
                let fetched = runtime.block_on(peer.fetch_many(&names).into_future()).expect("a pull");
                assert_eq!(fetched.len(), TENSORS);
            });
        });
        runtime.block_on(async {
            client.shutdown().await;
            server.shutdown().await;
        });
    }
    group.finish();
}

fn pull_many(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        for bytes in SIZES {
            fetches(criterion, &runtime, kind, bytes);
        }
    }
}

criterion_group!(benches, pull_many);
criterion_main!(benches);

//! The cost of each layer without a peer.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use memory::{Pool, PoolConfig};
use protocol::{Message, RequestIndex, Scope, StepId, TensorRequest, wire};

fn memory_layer(criterion: &mut Criterion) {
    let pool = Pool::new(PoolConfig::new("bench")).expect("a pool");
    let _held = pool.try_alloc(64).expect("a buffer");
    criterion.bench_function("memory/alloc and free 4 KiB", |bencher| {
        bencher.iter(|| black_box(pool.try_alloc(4096).expect("a buffer")));
    });
    criterion.bench_function("memory/grant and end", |bencher| {
        bencher.iter(|| {
            let granted = pool.try_alloc(4096).expect("a buffer").grant();
            black_box(granted.end(memory::GrantEnd::Content).expect("the buffer back"))
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
        want: protocol::Want::Write(None),
    });
    let bytes = wire::encode(&request);
    criterion.bench_function("wire/encode a request", |bencher| {
        bencher.iter(|| wire::encode(black_box(&request)));
    });
    criterion
        .bench_function("wire/decode a request", |bencher| bencher.iter(|| wire::decode(black_box(&bytes))));
}

criterion_group!(benches, memory_layer, wire_layer);
criterion_main!(benches);

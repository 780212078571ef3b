//! The local rendezvous: the cost of a send and its receive, alone, among many others, and between two threads.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::{hint::black_box, sync::Arc};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use futures::FutureExt;
use tensorwire::{
    Key, Tensor,
    tensorflow::{CancellationToken, LocalRendezvous, RecvArgs, SendArgs},
};
use tensorwire_memory::{Pool, PoolConfig};

fn key(edge: &str) -> Key {
    let cpu = "/job:mnist/replica:1/task:2/device:CPU:0";
    Key::builder().source(cpu).destination(cpu).edge(edge).build().expect("a key")
}

fn value() -> Tensor {
    let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("bench") }).expect("a pool");
    Tensor::from_values(&pool, &[], &[1.0f32]).expect("a tensor")
}

fn send_recv(criterion: &mut Criterion) {
    let (rendezvous, key, value) = (LocalRendezvous::new(), key("foo"), value());
    criterion.bench_function("rendezvous/send, then recv", |bencher| {
        bencher.iter(|| {
            rendezvous.send(&key, SendArgs::default(), value.clone()).expect("sent");
            let received = rendezvous.recv(&key, RecvArgs::default()).now_or_never();
            black_box(received.expect("at once").expect("received"));
        });
    });
}

fn recv_send(criterion: &mut Criterion) {
    let (rendezvous, key, value) = (LocalRendezvous::new(), key("foo"), value());
    criterion.bench_function("rendezvous/recv, then send", |bencher| {
        bencher.iter(|| {
            let mut received = rendezvous.recv(&key, RecvArgs::default());
            assert!((&mut received).now_or_never().is_none(), "it waits");
            rendezvous.send(&key, SendArgs::default(), value.clone()).expect("sent");
            black_box(received.now_or_never().expect("inside the send").expect("received"));
        });
    });
}

/// Receives that each wait for another key, and then the values of all keys.
fn outstanding(criterion: &mut Criterion) {
    let (rendezvous, value) = (LocalRendezvous::new(), value());
    let mut group = criterion.benchmark_group("rendezvous/outstanding receives");
    for count in [10, 10_000] {
        let keys: Vec<_> = (0..count).map(|edge| key(&format!("edge {edge}"))).collect();
        group.throughput(Throughput::Elements(count));
        group.bench_with_input(BenchmarkId::from_parameter(count), &keys, |bencher, keys| {
            bencher.iter_batched(
                || Vec::with_capacity(keys.len()),
                |mut receives| {
                    receives.extend(keys.iter().map(|key| rendezvous.recv(key, RecvArgs::default())));
                    for key in keys {
                        rendezvous.send(key, SendArgs::default(), value.clone()).expect("sent");
                    }
                    for received in receives {
                        black_box(received.now_or_never().expect("at once").expect("received"));
                    }
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

/// Messages to another thread and back. Each receive has a token that is never cancelled.
fn ping_pong(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let (runtime, token, value) = (runtime.expect("a runtime"), CancellationToken::new(), value());
    let args = RecvArgs { cancellation: Some(token), ..RecvArgs::default() };
    let keys = Arc::new((key("foo"), key("bar")));
    let mut group = criterion.benchmark_group("rendezvous/ping-pong with a token");
    for messages in [100u64, 200, 300] {
        group.throughput(Throughput::Elements(messages));
        group.bench_function(BenchmarkId::from_parameter(messages), |bencher| {
            bencher.iter(|| {
                let rendezvous = LocalRendezvous::new();
                let (other, there, wanted) = (rendezvous.clone(), keys.clone(), args.clone());
                let pong = runtime.spawn(async move {
                    for _ in 0..messages {
                        let got = other.recv(&there.0, wanted.clone()).await.expect("received");
                        other.send(&there.1, SendArgs::default(), got.tensor).expect("sent");
                    }
                });
                runtime.block_on(async {
                    for _ in 0..messages {
                        rendezvous.send(&keys.0, SendArgs::default(), value.clone()).expect("sent");
                        black_box(rendezvous.recv(&keys.1, args.clone()).await.expect("received"));
                    }
                    pong.await.expect("no panic");
                });
            });
        });
    }
    group.finish();
}

criterion_group!(benches, send_recv, recv_send, outstanding, ping_pong);
criterion_main!(benches);

//! Pulls of 64 KiB beside pulls of 64 MiB over the same TCP connection, with long values written in pieces and as a whole. Both workers
//! are threads of this process.

#![allow(clippy::disallowed_methods)] // it measures real time on tokio's runtime
#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its group is its own

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensorwire::{DataType, FabricKind, Peer, Tensor, Worker};
use tensorwire_benches::Failure;

const SHORT: (&str, usize) = ("short", 64 << 10);
const LONG: (&str, usize) = ("long", 64 << 20);

/// The lengths of pieces: the default, and one that no value exceeds.
const PIECES: [(&str, u32); 2] = [("pieces", 512 << 10), ("whole", 1 << 30)];

fn foreground(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let address = serve();
    let mut group = criterion.benchmark_group("foreground");
    for (label, piece_bytes) in PIECES {
        let (worker, peer) = runtime.block_on(puller(&address, piece_bytes)).expect("a worker");
        group.throughput(Throughput::Bytes(SHORT.1 as u64));
        group.bench_function(BenchmarkId::new("alone", label), |bencher| {
            bencher.iter(|| runtime.block_on(pull(&peer, SHORT)));
        });
        group.bench_function(BenchmarkId::new("beside", label), |bencher| {
            bencher.iter_custom(|number| runtime.block_on(beside(&peer, number)));
        });
        group.throughput(Throughput::Bytes(LONG.1 as u64));
        group.bench_function(BenchmarkId::new("long", label), |bencher| {
            bencher.iter(|| runtime.block_on(pull(&peer, LONG)));
        });
        runtime.block_on(worker.shutdown());
    }
    group.finish();
}

/// The time of this many short pulls while long ones follow each other. Both are tasks: a runtime of one thread seldom polls the future
/// that it blocks on.
async fn beside(peer: &Peer, number: u64) -> Duration {
    let other = peer.clone();
    let long = tokio::spawn(async move {
        loop {
            pull(&other, LONG).await;
        }
    });
    let other = peer.clone();
    let short = tokio::spawn(async move {
        let mut took = Duration::ZERO;
        for _ in 0..number {
            // At another moment of a long pull.
            tokio::time::sleep(Duration::from_micros(700)).await;
            let begin = Instant::now();
            pull(&other, SHORT).await;
            took += begin.elapsed();
        }
        took
    });
    let took = short.await.expect("short pulls");
    long.abort();
    took
}

async fn pull(peer: &Peer, (name, bytes): (&str, usize)) {
    let pulled = peer.fetch(name).await.expect("a pull");
    assert_eq!(pulled.bytes().len(), bytes);
}

async fn puller(address: &str, piece_bytes: u32) -> Result<(Worker, Peer), Failure> {
    let worker = Worker::client().fabrics([FabricKind::TCP]).flow(|flow| flow.piece_bytes = piece_bytes);
    let worker = worker.start().await?;
    let peer = worker.peer_at(address).await?;
    Ok((worker, peer))
}

/// The address of a worker that publishes both values until the process ends.
fn serve() -> String {
    let (started, address) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let worker = Worker::builder("server").fabrics([FabricKind::TCP]);
            let worker = worker.flow(|flow| flow.piece_bytes = 1 << 30).start().await.expect("a worker");
            for (name, bytes) in [SHORT, LONG] {
                let zeros = worker.pool().alloc(bytes).await.expect("memory");
                let tensor = Tensor::new(zeros, DataType::U8, &[bytes as u64]).expect("a tensor");
                worker.publish(name, tensor).expect("a publication");
            }
            started.send(worker.address().to_owned()).expect("somebody measures");
            std::future::pending::<()>().await;
        });
    });
    address.recv().expect("the server")
}

criterion_group!(benches, foreground);
criterion_main!(benches);

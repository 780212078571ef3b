//! The cost of allocating memory from a pool and freeing it: alone, fragmented, churned, contended.

#![allow(clippy::expect_used, missing_docs)] // a benchmark that cannot run stops, and its groups are its own

use std::{hint::black_box, thread};

use criterion::{Criterion, criterion_group, criterion_main};
use tensorwire_memory::{BufMut, Pool, PoolConfig};

const BLOCK_BYTES: usize = 1 << 20;

fn pool() -> Pool {
    let config = PoolConfig { block_bytes: BLOCK_BYTES, cap_bytes: 1 << 30, ..PoolConfig::new("bench") };
    Pool::new(config).expect("a pool")
}

/// Numbers that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// A size from 64 B to 256 KiB. Each power of two is equally frequent.
    fn size(&mut self) -> usize {
        let doubling = 64_u64 << self.below(12);
        usize::try_from(doubling + self.below(doubling)).expect("fits")
    }
}

/// A pool with every second buffer of `count` freed again: as many holes as buffers.
fn holed(count: usize, bytes: usize) -> (Pool, Vec<BufMut>) {
    let pool = pool();
    let buffers: Vec<_> = (0..2 * count).map(|_| pool.try_alloc(bytes).expect("a buffer")).collect();
    let live = buffers.into_iter().enumerate().filter(|(index, _)| index % 2 == 0).map(|(_, b)| b).collect();
    (pool, live)
}

fn alone(criterion: &mut Criterion) {
    let pool = pool();
    let _held = pool.try_alloc(64).expect("a buffer");
    for (name, bytes) in [("64 B", 64), ("4 KiB", 4096), ("1 MiB", 1 << 20), ("8 MiB", 8 << 20)] {
        criterion.bench_function(&format!("pool/alone {name}"), |bencher| {
            bencher.iter(|| black_box(pool.try_alloc(bytes).expect("a buffer")));
        });
    }
}

fn fragmented(criterion: &mut Criterion) {
    for holes in [100, 10_000] {
        let (pool, _kept) = holed(holes, 4096);
        // A size that fits no hole: a search by address would visit them all.
        criterion.bench_function(&format!("pool/8 KiB among {holes} holes of 4 KiB"), |bencher| {
            bencher.iter(|| black_box(pool.try_alloc(8192).expect("a buffer")));
        });
    }
}

fn churn(criterion: &mut Criterion) {
    for live in [64, 2048] {
        let (pool, mut numbers) = (pool(), Numbers(7));
        let mut held: Vec<_> = (0..live).map(|_| pool.try_alloc(numbers.size()).expect("a buffer")).collect();
        criterion.bench_function(&format!("pool/churn, {live} live of 64 B to 256 KiB"), |bencher| {
            bencher.iter(|| {
                let place = usize::try_from(numbers.below(live)).expect("fits");
                held[place] = pool.try_alloc(numbers.size()).expect("a buffer");
            });
        });
        let stats = pool.stats();
        println!("churn, {live} live: {} bytes mapped for {} in use", stats.block_bytes, stats.used_bytes);
    }
}

fn contended(criterion: &mut Criterion) {
    let pool = pool();
    criterion.bench_function("pool/two threads, 10,000 of 4 KiB each", |bencher| {
        bencher.iter(|| {
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        for _ in 0..10_000 {
                            black_box(pool.try_alloc(4096).expect("a buffer"));
                        }
                    });
                }
            });
        });
    });
}

criterion_group!(benches, alone, fragmented, churn, contended);
criterion_main!(benches);

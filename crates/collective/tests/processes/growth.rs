//! Thousands of calls and thousands of groups: the process does not grow. In a process of its own, because its size is measured.

use std::{fs, sync::Arc, time::Duration};

use futures::future::join_all;
use tensorwire_collective::{Group, store::MemoryStore};
use tensorwire_fabric::{FabricKind, TokioRuntime};
use tensorwire_rendezvous::{Tensor, Worker};

/// How often each is done, after an eighth as often to warm up.
const TIMES: usize = 10_000;

/// How much the process may grow: a worker remembers the last 65,536 steps that ended, and a group has two.
const GROWTH_BYTES_MAX: u64 = 8 << 20;

/// The resident memory of this process, in bytes.
fn resident() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Two ranks do `once` many times. After that, pools and process have the same size as before.
async fn stays_as_large(fabric: FabricKind, once: impl AsyncFn(&Group)) {
    let store = Arc::new(MemoryStore::new(Arc::new(TokioRuntime::current().unwrap())));
    let worker = async |name| Worker::builder(name).require(fabric).start().await.unwrap();
    let workers = [worker("one").await, worker("other").await];
    let groups = join_all(workers.iter().enumerate().map(async |(rank, worker)| {
        let group = Group::builder(store.clone(), rank, 2).timeout(Duration::from_secs(60));
        group.join(worker).await.unwrap()
    }));
    let groups = groups.await;
    let all = async |times: usize| {
        let rounds = groups.iter().map(async |group| {
            for _ in 0..times {
                once(group).await;
            }
            group.barrier().await.unwrap();
        });
        join_all(rounds).await;
        let pools = workers.iter().flat_map(|worker| [worker.pool().stats(), worker.receive_memory()]);
        (resident(), pools.map(|pool| pool.block_bytes).collect::<Vec<_>>())
    };
    let (before, pools_before) = all(TIMES / 8).await;
    let (after, pools_after) = all(TIMES).await;
    println!("{fabric}: from {before} to {after} bytes");
    assert_eq!(pools_before, pools_after, "memory for messages");
    assert!(after.saturating_sub(before) <= GROWTH_BYTES_MAX, "from {before} to {after} bytes");
    drop(groups);
    join_all(workers.iter().map(Worker::shutdown)).await;
}

async fn call(group: &Group) {
    let tensor = Tensor::from_values(group.worker().pool(), &[100], &[group.rank() as i32; 100]).unwrap();
    group.all_gather(tensor).await.unwrap();
}

async fn derive(group: &Group) {
    let derived = group.derive("derived").await.unwrap();
    derived.all_reduce(&mut [1.0f32; 10]).await.unwrap();
    derived.close().await.unwrap();
}

#[tokio::test]
async fn memory_many_slots_no_leaks_over_shm() {
    stays_as_large(FabricKind::SHM, call).await;
}

#[tokio::test]
async fn memory_many_slots_no_leaks_over_tcp() {
    stays_as_large(FabricKind::TCP, call).await;
}

#[tokio::test]
async fn memory_many_groups_no_leaks_over_shm() {
    stays_as_large(FabricKind::SHM, derive).await;
}

#[tokio::test]
async fn memory_many_groups_no_leaks_over_tcp() {
    stays_as_large(FabricKind::TCP, derive).await;
}

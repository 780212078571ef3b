//! Groups and stores that are awaited where no tokio runtime is.

use std::{sync::Arc, thread, time::Duration};

use tensorwire_collective::{
    Group,
    store::{MemoryStore, WorkerStore},
};
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime};
use tensorwire_rendezvous::{Tensor, Worker};

use crate::block_on::block_on;

/// Enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A tokio runtime whose threads run tasks, and which no test enters.
pub(crate) fn tokio_runtime() -> (tokio::runtime::Runtime, Arc<dyn Runtime>) {
    let builder = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let tokio = builder.unwrap();
    let runtime = Arc::new(tokio.block_on(async { TokioRuntime::current().unwrap() }));
    (tokio, runtime)
}

async fn calls(worker: &Worker, rank: usize, address: &str) {
    let store = WorkerStore::connect(worker, address, LIMIT).await.unwrap();
    let group = Group::builder(Arc::new(store), rank, 2).timeout(LIMIT).join(worker).await.unwrap();
    group.barrier().await.unwrap();
    for length in [1, 100_000] {
        let mut values = vec![rank as f32 + 1.0; length];
        group.all_reduce(&mut values).await.unwrap();
        assert!(values.iter().all(|value| *value == 3.0));
    }
    let tensor = Tensor::from_values(worker.pool(), &[1], &[rank as u8]).unwrap();
    assert_eq!(group.all_gather(tensor).await.unwrap().len(), 2);
    let derived = group.derive("other").await.unwrap();
    derived.close().await.unwrap();
    group.close().await.unwrap();
    worker.shutdown().await;
}

#[test]
fn a_group_may_be_used_outside_of_tokio() {
    let (tokio, runtime) = tokio_runtime();
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        let (store, serving) =
            (MemoryStore::new(runtime.clone()), tokio.block_on(Worker::client().start()).unwrap());
        store.serve(&serving).unwrap();
        let address = serving.address();
        thread::scope(|scope| {
            for rank in 0..2 {
                let start = Worker::builder(&format!("rank_{rank}")).fabrics([kind]).start();
                let worker = tokio.block_on(start).unwrap();
                scope.spawn(move || block_on(calls(&worker, rank, address)));
            }
        });
    }
}

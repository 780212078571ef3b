//! As many newcomers as ranks, or more, some of which are lost, or do not answer at first.

use std::{sync::Arc, thread, time::Duration};

use futures::{channel::oneshot, future::join};
use tensorwire_collective::{Group, GroupBuilder, GroupError, store::MemoryStore};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::Worker;

use super::{cut_store::CutStore, over_fabrics, shrinking::sum_of_ranks, store, worker};
use crate::join_all::join_all;

over_fabrics! {
    as_many_newcomers_come_at_a_time_as_there_are_ranks,
    newcomers_that_outnumber_the_ranks_may_vanish,
    errors_of_a_generation_that_has_not_met_have_the_numbers_of_the_own_one,
    a_newcomer_that_does_not_answer_at_first_is_admitted_later,
}

const LIMIT: Duration = Duration::from_secs(20);

/// How long ranks that do not come are awaited.
const SHORT: Duration = Duration::from_secs(4);

/// Waits until this many workers wait.
async fn until_waiting(group: &Group, count: usize) {
    while group.waiting().await.unwrap() < count {
        group.worker().runtime().sleep(Duration::from_millis(5)).await;
    }
}

/// Admits newcomers until all have joined, and then adds up the ranks' numbers.
async fn grow(mut group: Group, size: usize) -> (u64, i32) {
    while group.size() < size {
        group = group.admit().await.unwrap();
    }
    (group.generation(), sum_of_ranks(&group).await)
}

async fn as_many_newcomers_come_at_a_time_as_there_are_ranks(fabric: FabricKind) {
    let store = store();
    let workers = join_all((0..4).map(async |at| worker(format!("rank_{at}"), fabric).await)).await;
    let builder = Group::builder(store, 0, 1).timeout(LIMIT);
    let alone = builder.clone().join(&workers[0]).await.unwrap();
    let coming = workers[1..]
        .iter()
        .map(async |worker| grow(builder.clone().rejoin(worker).await.unwrap(), workers.len()).await);
    let admitting = async {
        until_waiting(&alone, 3).await;
        grow(alone.clone(), workers.len()).await
    };
    let (come, first) = join(join_all(coming), admitting).await;
    // One rank became two, and then these four.
    assert_eq!(first, (2, 6));
    assert_eq!(come, [first; 3]);
    join_all(workers.iter().map(Worker::shutdown)).await;
}

/// Writes a record into the waiting list, and never reads whether it was admitted.
async fn comes_and_vanishes(builder: &GroupBuilder, worker: &Worker, group: &Group, before: usize) {
    tokio::select! {
        come = builder.clone().rejoin(worker) => panic!("nobody admits it: {come:?}"),
        () = until_waiting(group, before + 1) => {}
    }
}

async fn newcomers_that_outnumber_the_ranks_may_vanish(fabric: FabricKind) {
    let store = store();
    let [alone, one, other] =
        [worker("alone", fabric).await, worker("one", fabric).await, worker("other", fabric).await];
    let builder = Group::builder(store, 0, 1).timeout(SHORT);
    let group = builder.clone().join(&alone).await.unwrap();
    for (before, newcomer) in [&one, &other].into_iter().enumerate() {
        comes_and_vanishes(&builder, newcomer, &group, before).await;
    }
    // They answer, because their workers run.
    let admitted = group.admit().await.unwrap();
    assert_eq!((admitted.size(), admitted.generation()), (1, 2));
    join_all([&alone, &one, &other].map(Worker::shutdown)).await;
}

async fn errors_of_a_generation_that_has_not_met_have_the_numbers_of_the_own_one(fabric: FabricKind) {
    let below = store();
    let store = CutStore::new(&below);
    let [alone, newcomer] = [worker("alone", fabric).await, worker("newcomer", fabric).await];
    let builder = Group::builder(below, 0, 1).timeout(SHORT);
    let group = Group::builder(store.clone(), 0, 1).timeout(SHORT).join(&alone).await.unwrap();
    comes_and_vanishes(&builder, &newcomer, &group, 0).await;
    // The list is read, and the newcomer's key written. Then it does not come, and the ranks need the store to go on without it.
    store.cut_after(2);
    let error = group.admit().await.unwrap_err();
    let GroupError::NoMajority { size, come, store: Some(_), .. } = &error else { panic!("{error}") };
    assert_eq!((*size, come.as_slice()), (1, [0].as_slice()), "{error}");
    join_all([&alone, &newcomer].map(Worker::shutdown)).await;
}

/// A process that comes to the group, and is paused while it waits, until it is resumed.
fn stopped_newcomer(
    store: &Arc<MemoryStore>,
    fabric: FabricKind,
    goes_on: std::sync::mpsc::Receiver<()>,
) -> (thread::JoinHandle<i32>, oneshot::Receiver<()>) {
    let (waits, waiting) = oneshot::channel();
    let builder = Group::builder(store.clone(), 0, 1).timeout(LIMIT);
    let running = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let newcomer = worker("newcomer", fabric).await;
            let mut rejoining = Box::pin(builder.rejoin(&newcomer));
            // The first poll writes its record, because this store answers at once.
            assert!(futures::poll!(&mut rejoining).is_pending());
            waits.send(()).unwrap();
            goes_on.recv().unwrap();
            let group = rejoining.await.unwrap();
            let sum = sum_of_ranks(&group).await;
            group.close().await.unwrap();
            newcomer.shutdown().await;
            sum
        })
    });
    (running, waiting)
}

async fn a_newcomer_that_does_not_answer_at_first_is_admitted_later(fabric: FabricKind) {
    let store = store();
    let alone = worker("alone", fabric).await;
    let mut group = Group::builder(store.clone(), 0, 1).timeout(LIMIT).join(&alone).await.unwrap();
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let (running, waiting) = stopped_newcomer(&store, fabric, goes_on);
    waiting.await.unwrap();
    until_waiting(&group, 1).await;
    group = group.admit().await.unwrap();
    assert_eq!((group.size(), group.waiting().await.unwrap()), (1, 0), "it was passed over");
    go_on.send(()).unwrap();
    until_waiting(&group, 1).await;
    group = group.admit().await.unwrap();
    assert_eq!(sum_of_ranks(&group).await, 1);
    group.close().await.unwrap();
    alone.shutdown().await;
    // It needs nothing more of this thread.
    assert_eq!(running.join().unwrap(), 1);
}

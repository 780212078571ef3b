//! A store that stops answering without an error: the ranks fail, or go on, within the documented time.

use std::{sync::Arc, time::Duration};

use tensorwire_collective::{Group, GroupError};
use tensorwire_fabric::{FabricKind, timeout};
use tensorwire_rendezvous::Worker;

use super::{cut_store::CutStore, over_fabrics, shrinking::sum_of_ranks, store, worker};
use crate::join_all::join_all;

over_fabrics! {
    half_without_an_answer_of_the_store_fail_in_time,
    ranks_that_admit_others_go_on_without_the_list_in_time,
}

const LIMIT: Duration = Duration::from_secs(2);

/// Three and a half times the limit, and room for a busy machine.
const AGREED: Duration = Duration::from_secs(9);

async fn two(fabric: FabricKind) -> (Vec<Worker>, Vec<Arc<CutStore>>, Vec<Group>) {
    let below = store();
    let workers = join_all((0..2).map(async |rank| worker(format!("rank_{rank}"), fabric).await)).await;
    let stores = vec![CutStore::new(&below), CutStore::new(&below)];
    let joining = workers.iter().zip(&stores).enumerate().map(async |(rank, (worker, store))| {
        Group::builder(store.clone(), rank, 2).timeout(LIMIT).join(worker).await.unwrap()
    });
    let groups = join_all(joining).await;
    (workers, stores, groups)
}

async fn half_without_an_answer_of_the_store_fail_in_time(fabric: FabricKind) {
    let (mut workers, stores, mut groups) = two(fabric).await;
    drop(groups.pop());
    workers.pop().unwrap().shutdown().await;
    stores[0].silent_after(0);
    let shrunk = timeout(&**workers[0].runtime(), AGREED, groups[0].shrink()).await;
    let error = shrunk.expect("in time").unwrap_err();
    let GroupError::NoMajority { size: 2, come, store: Some(store), .. } = &error else { panic!("{error}") };
    assert_eq!(*come, [0]);
    assert!(store.to_string().contains("no answer in time"), "{store}");
    workers[0].shutdown().await;
}

async fn ranks_that_admit_others_go_on_without_the_list_in_time(fabric: FabricKind) {
    let (workers, stores, groups) = two(fabric).await;
    stores.iter().for_each(|store| store.silent_after(0));
    let runtime = workers[0].runtime().clone();
    let admitted = timeout(&*runtime, AGREED, join_all(groups.iter().map(Group::admit))).await;
    let admitted: Vec<Group> = admitted.expect("in time").into_iter().map(Result::unwrap).collect();
    assert_eq!(join_all(admitted.iter().map(sum_of_ranks)).await, [1; 2]);
    join_all(workers.iter().map(Worker::shutdown)).await;
}

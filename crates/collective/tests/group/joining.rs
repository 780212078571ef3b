//! Joining: ranks that are late, missing, duplicated, or of another run.

use std::{sync::Arc, time::Duration};

use futures::join;
use tensorwire_collective::{
    Group, GroupError,
    store::{MemoryStore, Store as _},
};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{DuplicatePolicy, Worker};

use super::{PATIENCE, cut_store::CutStore, over_fabrics, store, worker};
use crate::join_all::join_all;

over_fabrics! {
    ranks_that_are_missing_are_named,
    a_rank_that_is_taken_names_who_has_it,
    a_restarted_rank_takes_its_place_while_others_are_awaited,
    a_restarted_rank_that_comes_too_late_says_so_at_once,
    groups_of_two_sizes_say_so,
    records_of_an_earlier_run_are_not_mistaken,
    a_second_run_under_the_name_ends_the_first,
    groups_of_several_names_share_store_and_workers,
    ranks_of_a_job_join_in_any_order,
}

#[tokio::test]
async fn what_cannot_be_joined_is_refused() {
    let worker = worker("alone", FabricKind::SHM).await;
    let group = |rank, size| Group::builder(store(), rank, size);
    let refused = [
        (group(0, 0), "size"),
        (group(2, 2), "rank"),
        (group(0, 1).name(""), "name"),
        (group(0, 1).name("a\nb"), "name"),
        (group(0, 1).timeout(Duration::ZERO), "timeout"),
    ];
    for (builder, named) in refused {
        match builder.join(&worker).await.unwrap_err() {
            GroupError::Argument { field, .. } => assert_eq!(field, named),
            other => panic!("{other}"),
        }
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn a_worker_of_few_requests_is_refused() {
    let worker = Worker::builder("one").flow(|flow| flow.requests_max = 255).start().await.unwrap();
    match Group::builder(store(), 0, 1).join(&worker).await.unwrap_err() {
        GroupError::Argument { field: "requests_max", value, remedy } => {
            assert!(value == "255" && remedy.contains("256"), "{value}: {remedy}");
        }
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn a_worker_that_takes_one_value_of_a_key_cannot_join() {
    let worker = Worker::builder("one").duplicates(DuplicatePolicy::Report).start().await.unwrap();
    match Group::builder(store(), 0, 1).join(&worker).await.unwrap_err() {
        GroupError::Argument { field, .. } => assert_eq!(field, "duplicates"),
        other => panic!("{other}"),
    }
    worker.shutdown().await;
}

async fn ranks_that_are_missing_are_named(fabric: FabricKind) {
    let (store, worker) = (store(), worker("early", fabric).await);
    let builder = Group::builder(store, 1, 4).job("a").timeout(Duration::from_millis(50));
    match builder.join(&worker).await.unwrap_err() {
        GroupError::Missing { missing, .. } => assert_eq!(missing, [0, 2, 3]),
        other => panic!("{other}"),
    }
    worker.shutdown().await;
}

#[tokio::test]
async fn ranks_that_are_missing_are_named_with_the_address_of_the_store() {
    let worker = worker("early", FabricKind::TCP).await;
    let store = MemoryStore::new(worker.runtime().clone());
    store.serve(&worker).unwrap();
    let bound = worker.address();
    let joining = Group::builder(Arc::new(store), 0, 2).timeout(Duration::from_millis(50)).join(&worker);
    let error = joining.await.unwrap_err().to_string();
    assert!(error.contains(&format!("have not joined in the store served at {bound} after")), "{error}");
    worker.shutdown().await;
}

async fn a_rank_that_is_taken_names_who_has_it(fabric: FabricKind) {
    let store = store();
    let (one, other) = join!(worker("one", fabric), worker("other", fabric));
    let builder = Group::builder(store, 0, 1).job("a").timeout(PATIENCE);
    let group = builder.clone().join(&one).await.unwrap();
    match builder.join(&other).await.unwrap_err() {
        GroupError::RankTaken { rank: 0, by, .. } => assert!(by.contains("one"), "{by}"),
        other => panic!("{other}"),
    }
    drop(group);
    join!(one.shutdown(), other.shutdown());
}

/// Its first process has written its record and has ended.
async fn a_restarted_rank_takes_its_place_while_others_are_awaited(fabric: FabricKind) {
    for job in [None, Some("a")] {
        let store = store();
        let builder = |rank| {
            let builder = Group::builder(store.clone(), rank, 3).timeout(PATIENCE);
            if let Some(job) = job { builder.job(job) } else { builder }
        };
        let [zero, first] = [worker("zero", fabric).await, worker("one", fabric).await];
        let joining_zero = builder(0).join(&zero);
        let others = async {
            {
                let mut joining = std::pin::pin!(builder(1).join(&first));
                // It writes its record once rank 0 has begun the run.
                for _ in 0..1_000 {
                    assert!(futures::poll!(&mut joining).is_pending());
                    tokio::task::yield_now().await;
                }
            }
            first.shutdown().await;
            let [again, two] = [worker("one", fabric).await, worker("two", fabric).await];
            let late = async {
                // The restarted rank has checked which ranks are missing.
                let key = match job {
                    Some(job) => format!("group/{job}/0/rank 1"),
                    None => {
                        let run = store.get(&["group/run".to_owned()]).await.unwrap().remove(0).unwrap();
                        format!("group/{}/0/rank 1", String::from_utf8(run).unwrap().lines().next().unwrap())
                    }
                };
                let incarnation = format!("{:016x}", again.incarnation());
                loop {
                    let record = store.get(std::slice::from_ref(&key)).await.unwrap().remove(0).unwrap();
                    if String::from_utf8(record).unwrap().contains(&incarnation) {
                        break builder(2).join(&two).await;
                    }
                    tokio::task::yield_now().await;
                }
            };
            let (again_joined, two_joined) = join!(builder(1).join(&again), late);
            (again_joined.unwrap(), two_joined.unwrap(), again, two)
        };
        // Rank 0 may still need what the others have sent.
        let (zero_joined, (again_joined, two_joined, again, two)) = join!(joining_zero, others);
        drop((zero_joined.unwrap(), again_joined, two_joined));
        join!(zero.shutdown(), again.shutdown(), two.shutdown());
    }
}

async fn a_restarted_rank_that_comes_too_late_says_so_at_once(fabric: FabricKind) {
    for job in [None, Some("a")] {
        let store = store();
        let builder = |rank| {
            let builder = Group::builder(store.clone(), rank, 2).timeout(PATIENCE);
            if let Some(job) = job { builder.job(job) } else { builder }
        };
        let (zero, one) = join!(worker("zero", fabric), worker("one", fabric));
        let (zero_joined, one_joined) = join!(builder(0).join(&zero), builder(1).join(&one));
        drop(one_joined.unwrap());
        one.shutdown().await;
        let again = worker("one", fabric).await;
        let begun = again.runtime().now();
        match builder(1).join(&again).await.unwrap_err() {
            GroupError::Argument { field: "rank", remedy, .. } => {
                assert!(remedy.contains("start all ranks again") && remedy.contains("/job:one/"), "{remedy}");
            }
            other => panic!("{other}"),
        }
        assert!(again.runtime().now() - begun < PATIENCE / 4);
        drop(zero_joined.unwrap());
        join!(zero.shutdown(), again.shutdown());
    }
}

async fn groups_of_two_sizes_say_so(fabric: FabricKind) {
    let store = store();
    let (zero, one) = join!(worker("zero", fabric), worker("one", fabric));
    let group = Group::builder(store.clone(), 0, 1).timeout(PATIENCE).join(&zero).await.unwrap();
    let other = Group::builder(store.clone(), 1, 2).timeout(Duration::from_millis(300)).join(&one).await;
    match other.unwrap_err() {
        GroupError::Argument { field: "size", remedy, .. } => {
            assert!(remedy.contains("/job:zero/") && remedy.contains("of a group of 1 ranks"), "{remedy}");
        }
        other => panic!("{other}"),
    }
    drop(group);
    join!(zero.shutdown(), one.shutdown());
}

/// The first ranks of the later run read the records of the earlier one, whose workers are gone.
async fn records_of_an_earlier_run_are_not_mistaken(fabric: FabricKind) {
    let store = store();
    let run = async |life: &str| {
        let workers = join!(
            worker(format!("{life}_0"), fabric),
            worker(format!("{life}_1"), fabric),
            worker(format!("{life}_2"), fabric)
        );
        let builder = |rank| Group::builder(store.clone(), rank, 3).timeout(PATIENCE);
        let late = async {
            // The others have read the id of the earlier run by now.
            workers.0.runtime().sleep(Duration::from_millis(20)).await;
            builder(0).join(&workers.0).await
        };
        let groups = join!(late, builder(1).join(&workers.1), builder(2).join(&workers.2));
        for group in [&groups.0, &groups.1, &groups.2] {
            let names: Vec<_> = group.as_ref().unwrap().members().map(str::to_owned).collect();
            assert_eq!(names, [0, 1, 2].map(|rank| format!("/job:{life}_{rank}/replica:0/task:0")));
        }
        drop(groups);
        join!(workers.0.shutdown(), workers.1.shutdown(), workers.2.shutdown());
    };
    run("first").await;
    run("second").await;
}

async fn a_second_run_under_the_name_ends_the_first(fabric: FabricKind) {
    let store = store();
    let (one, other) = join!(worker("one", fabric), worker("other", fabric));
    let builder = Group::builder(store.clone(), 0, 2).timeout(PATIENCE);
    let second = async {
        store.wait(&["group/run".to_owned()], PATIENCE).await.unwrap();
        builder.clone().timeout(Duration::from_secs(1)).join(&other).await
    };
    let (first, second) = join!(builder.clone().join(&one), second);
    match first.unwrap_err() {
        GroupError::OtherRun { by, .. } => assert!(by.contains("other"), "{by}"),
        other => panic!("{other}"),
    }
    assert!(matches!(second.unwrap_err(), GroupError::Missing { missing, .. } if missing == [1]));
    join!(one.shutdown(), other.shutdown());
}

async fn groups_of_several_names_share_store_and_workers(fabric: FabricKind) {
    let store = store();
    let workers = [worker("a", fabric).await, worker("b", fabric).await];
    let names = ["odd", "even", "third"];
    let joined = names.map(|name| {
        let (store, workers) = (store.clone(), &workers);
        async move {
            let join = async |rank: usize| {
                let builder = Group::builder(store.clone(), rank, 2).name(name).timeout(PATIENCE);
                builder.join(&workers[rank]).await.unwrap()
            };
            let (left, right) = join!(join(0), join(1));
            let (left_barrier, right_barrier) =
                join!(async { left.barrier().await }, async { right.barrier().await });
            left_barrier.unwrap();
            right_barrier.unwrap();
        }
    });
    join_all(joined).await;
    join_all(workers.iter().map(tensorwire_rendezvous::Worker::shutdown)).await;
}

async fn ranks_of_a_job_join_in_any_order(fabric: FabricKind) {
    let store = store();
    let workers = [worker("a", fabric).await, worker("b", fabric).await];
    let join = async |rank: usize| {
        let builder = Group::builder(store.clone(), rank, 2).job("job 7").timeout(PATIENCE);
        builder.join(&workers[rank]).await
    };
    let first = async {
        workers[0].runtime().sleep(Duration::from_millis(20)).await;
        join(0).await
    };
    let (first, second) = join!(first, join(1));
    assert_eq!((first.unwrap().rank(), second.unwrap().rank()), (0, 1));
    join_all(workers.iter().map(tensorwire_rendezvous::Worker::shutdown)).await;
}

/// The store may be gone with the rank that serves it.
#[tokio::test]
async fn a_rank_that_only_its_own_machine_reaches_is_named_although_the_store_is_gone() {
    let below = store();
    let [near, far] = ["near", "far"].map(|name| worker(name, FabricKind::TCP));
    let (near, far) = (near.await, far.await);
    let (unfinished, seen) = (CutStore::new(&below), CutStore::new(&below));
    seen.set_own_address(Some([192, 0, 2, 1].into()));
    // Rank 1 writes its record after it has found the run, and never comes to the others.
    unfinished.silent_after(2);
    let never = Group::builder(unfinished.clone(), 1, 2).timeout(PATIENCE).join(&far);
    let named = async {
        let joined = Group::builder(seen.clone(), 0, 2).timeout(PATIENCE).join(&near);
        let ends = async {
            seen.found.notified().await;
            seen.set_own_address(None);
            far.shutdown().await;
        };
        futures::join!(joined, ends).0.unwrap_err()
    };
    let error = tokio::select! {
        error = named => error,
        never = never => panic!("rank 1 has not found the others' records: {never:?}"),
    };
    assert!(matches!(&error, GroupError::Argument { field: "bind", .. }), "{error}");
    near.shutdown().await;
}

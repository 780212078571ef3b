//! Workers that join an existing group.

use std::{sync::Arc, time::Duration};

use futures::join;
use tensorwire_collective::{Group, GroupBuilder, GroupError, store::MemoryStore};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::Worker;

use super::{cut_store::CutStore, over_fabrics, shrinking::sum_of_ranks, store, worker};
use crate::join_all::join_all;

over_fabrics! {
    a_rank_that_was_left_out_comes_back,
    a_restarted_rank_comes_back_under_its_name,
    several_newcomers_come_at_once_and_one_after_the_other,
    newcomers_wait_while_the_others_shrink,
    a_newcomer_that_is_gone_is_not_waited_for,
    ranks_that_are_lost_are_left_out_while_others_are_admitted,
    earlier_calls_are_completed_before_others_are_admitted,
    without_the_store_nobody_is_admitted,
}

const LIMIT: Duration = Duration::from_secs(20);

/// Enough for a busy machine to join in.
const SHORT: Duration = Duration::from_secs(3);

struct Members {
    store: Arc<MemoryStore>,
    workers: Vec<Worker>,
    groups: Vec<Group>,
    limit: Duration,
}

impl Members {
    async fn join(fabric: FabricKind, size: usize, limit: Duration) -> Self {
        let store = store();
        let workers = join_all((0..size).map(async |at| worker(format!("rank_{at}"), fabric).await)).await;
        let joining = workers.iter().enumerate().map(async |(rank, worker)| {
            Group::builder(store.clone(), rank, size).timeout(limit).join(worker).await.unwrap()
        });
        let groups = join_all(joining).await;
        Self { store, workers, groups, limit }
    }

    fn builder(&self) -> GroupBuilder {
        Group::builder(self.store.clone(), 0, 1).timeout(self.limit)
    }

    /// Waits until this many workers wait.
    async fn until_waiting(&self, count: usize) {
        while self.groups[0].waiting().await.unwrap() < count {
            self.workers[0].runtime().sleep(Duration::from_millis(5)).await;
        }
    }

    /// Forms a group of the ranks and the newcomers, once these wait.
    async fn admit(&mut self, newcomers: Vec<Worker>) {
        let builder = self.builder();
        let coming = join_all(newcomers.iter().map(|worker| builder.clone().rejoin(worker)));
        let admitting = async {
            self.until_waiting(newcomers.len()).await;
            join_all(self.groups.iter().map(Group::admit)).await
        };
        let (come, admitted) = join!(coming, admitting);
        self.groups = admitted.into_iter().chain(come).map(Result::unwrap).collect();
        self.workers.extend(newcomers);
    }

    /// All are ranks of one group, in their order.
    async fn check(&self) {
        let size = self.workers.len();
        for (rank, (group, worker)) in self.groups.iter().zip(&self.workers).enumerate() {
            assert_eq!((group.rank(), group.size()), (rank, size));
            assert_eq!(group.worker().name(), worker.name());
            assert_eq!(group.waiting().await.unwrap(), 0);
        }
        let expected = (0..size).sum::<usize>() as i32;
        assert_eq!(join_all(self.groups.iter().map(sum_of_ranks)).await, vec![expected; size]);
    }

    async fn end(self) {
        let closing = self.groups.into_iter().zip(&self.workers).map(async |(group, worker)| {
            group.close().await.unwrap();
            worker.shutdown().await;
        });
        join_all(closing).await;
    }
}

async fn a_rank_that_was_left_out_comes_back(fabric: FabricKind) {
    let mut members = Members::join(fabric, 3, SHORT).await;
    let (group, worker) = (members.groups.remove(1), members.workers.remove(1));
    members.groups = join_all(members.groups.iter().map(async |group| group.shrink().await.unwrap())).await;
    assert!(matches!(group.shrink().await.unwrap_err(), GroupError::LeftOut { rank: 1, .. }));
    drop(group);
    members.limit = LIMIT;
    members.admit(vec![worker]).await;
    assert_eq!(members.groups[0].generation(), 2);
    members.check().await;
    members.end().await;
}

async fn a_restarted_rank_comes_back_under_its_name(fabric: FabricKind) {
    for lost in 0..3 {
        let mut members = Members::join(fabric, 3, LIMIT).await;
        drop(members.groups.remove(lost));
        members.workers.remove(lost).shutdown().await;
        // Before the others have noticed anything.
        let again = worker(format!("rank_{lost}"), fabric).await;
        members.admit(vec![again]).await;
        members.check().await;
        members.end().await;
    }
}

async fn several_newcomers_come_at_once_and_one_after_the_other(fabric: FabricKind) {
    let mut members = Members::join(fabric, 1, LIMIT).await;
    let [one, two, three] = [worker("b", fabric).await, worker("a", fabric).await, worker("c", fabric).await];
    members.admit(vec![one]).await;
    members.check().await;
    let builder = members.builder();
    let coming = [&two, &three].map(|worker| builder.clone().rejoin(worker));
    let admitting = async {
        members.until_waiting(2).await;
        join_all(members.groups.iter().map(Group::admit)).await
    };
    let (come, admitted) = join!(join_all(coming), admitting);
    let groups: Vec<Group> = admitted.into_iter().chain(come).map(Result::unwrap).collect();
    assert!(groups.iter().all(|group| group.size() == 4 && group.generation() == 2));
    assert_eq!(join_all(groups.iter().map(sum_of_ranks)).await, [6; 4]);
    members.workers.extend([two, three]);
    join_all(members.workers.iter().map(Worker::shutdown)).await;
}

async fn newcomers_wait_while_the_others_shrink(fabric: FabricKind) {
    let mut members = Members::join(fabric, 3, LIMIT).await;
    drop(members.groups.pop());
    members.workers.pop().unwrap().shutdown().await;
    let newcomer = worker("newcomer", fabric).await;
    let coming = members.builder().rejoin(&newcomer);
    let others = async {
        members.until_waiting(1).await;
        let shrunk = join_all(members.groups.iter().map(async |group| group.shrink().await.unwrap())).await;
        assert!(shrunk.iter().all(|group| group.size() == 2), "shrinking admits nobody");
        assert_eq!(shrunk[1].waiting().await.unwrap(), 1);
        join_all(shrunk.iter().map(async |group| group.admit().await.unwrap())).await
    };
    let (come, mut groups) = join!(coming, others);
    groups.push(come.unwrap());
    members.groups = groups;
    members.workers.push(newcomer);
    members.check().await;
    members.end().await;
}

async fn a_newcomer_that_is_gone_is_not_waited_for(fabric: FabricKind) {
    let mut members = Members::join(fabric, 2, LIMIT).await;
    let (gone, late) = (worker("gone", fabric).await, worker("late", fabric).await);
    let builder = members.builder();
    let waiting = async {
        // Its process ends while it waits.
        let coming = builder.clone().rejoin(&gone);
        tokio::select! {
            come = coming => panic!("nobody admits it: {come:?}"),
            () = members.until_waiting(1) => {}
        }
        gone.shutdown().await;
    };
    waiting.await;
    // This one withdraws from the waiting list.
    let error = builder.timeout(Duration::from_millis(50)).rejoin(&late).await.unwrap_err();
    assert!(matches!(error, GroupError::NotAdmitted { .. }), "{error}");
    assert_eq!(members.groups[0].waiting().await.unwrap(), 1);
    members.groups = join_all(members.groups.iter().map(async |group| group.admit().await.unwrap())).await;
    members.check().await;
    members.admit(vec![late]).await;
    members.check().await;
    members.end().await;
}

async fn ranks_that_are_lost_are_left_out_while_others_are_admitted(fabric: FabricKind) {
    let mut members = Members::join(fabric, 4, LIMIT).await;
    let (group, lost) = (members.groups.remove(0), members.workers.remove(0));
    let newcomer = worker("newcomer", fabric).await;
    let losing = async {
        drop(group);
        lost.shutdown().await;
    };
    let ((), ()) = join!(losing, members.admit(vec![newcomer]));
    members.check().await;
    members.end().await;
}

async fn earlier_calls_are_completed_before_others_are_admitted(fabric: FabricKind) {
    let mut members = Members::join(fabric, 3, LIMIT).await;
    let admitted = members.groups.iter().map(async |group| {
        // The slow ranks still need messages of ranks that admit newcomers already.
        let sum = sum_of_ranks(group).await;
        group.worker().runtime().sleep(Duration::from_millis(20 * group.rank() as u64)).await;
        let slow = group.barrier();
        let (next, slow) = join!(group.admit(), async { slow.await });
        slow.unwrap();
        (sum, next.unwrap())
    });
    let (sums, groups): (Vec<i32>, Vec<Group>) = join_all(admitted).await.into_iter().unzip();
    assert_eq!(sums, [3; 3]);
    members.groups = groups;
    members.check().await;
    members.end().await;
}

async fn without_the_store_nobody_is_admitted(fabric: FabricKind) {
    let (below, one) = (store(), worker("one", fabric).await);
    let cut = CutStore::new(&below);
    let builder = Group::builder(cut.clone(), 0, 1).timeout(LIMIT);
    let group = builder.clone().join(&one).await.unwrap();
    cut.cut_after(0);
    assert!(matches!(group.waiting().await.unwrap_err(), GroupError::Store(_)));
    assert!(matches!(builder.rejoin(&one).await.unwrap_err(), GroupError::Store(_)));
    let same = group.admit().await.unwrap();
    assert_eq!((same.size(), same.generation()), (1, 1));
    one.shutdown().await;
}

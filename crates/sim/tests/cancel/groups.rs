//! Cancelled calls of groups: the group ends for both its ranks, and the next group of the same workers works.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use futures::future::join;
use tensorwire_collective::{Group, GroupBuilder, GroupError, store::MemoryStore};
use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{Tensor, Worker};
use tensorwire_sim::Handle;

use super::{for_every_k, on_seeds, polled};
use crate::common::builder;

/// Calls that end the group when they are cancelled.
const CALLS: [&str; 13] = [
    "barrier",
    "broadcast",
    "all_reduce",
    "all_reduce_tensors",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "close",
    "derive",
    "subgroup",
];

/// What else this file cancels.
const OTHERS: [&str; 2] = ["join", "shrink"];

/// What this file cancels.
pub(super) fn cases() -> impl Iterator<Item = &'static str> {
    CALLS.into_iter().chain(OTHERS)
}

/// Elements of each value: more than fit into the first message of a call.
const LENGTH: usize = 3000;

/// Two workers, and the number of groups that they have had.
struct Two {
    handle: Handle,
    store: Arc<MemoryStore>,
    workers: [Worker; 2],
    groups: AtomicU32,
}

impl Two {
    async fn start(handle: &Handle) -> Self {
        let worker = async |name: &str| {
            let node = handle.start_node(&format!("{name}:1")).unwrap();
            builder(&node, &format!("/job:{name}/replica:0/task:0")).start().await.unwrap()
        };
        let workers = [worker("a").await, worker("b").await];
        let store = Arc::new(MemoryStore::new(handle.runtime()));
        Self { handle: handle.clone(), store, workers, groups: AtomicU32::new(0) }
    }

    /// The two ranks of a new group.
    fn ranks(&self) -> [GroupBuilder; 2] {
        let number = self.groups.fetch_add(1, Ordering::Relaxed);
        let limit = Duration::from_secs(5);
        [0, 1].map(|rank| {
            Group::builder(self.store.clone(), rank, 2).name(format!("group {number}")).timeout(limit)
        })
    }

    async fn group(&self) -> (Group, Group) {
        let [one, other] = self.ranks();
        let joined = join(one.join(&self.workers[0]), other.join(&self.workers[1])).await;
        (joined.0.unwrap(), joined.1.unwrap())
    }

    async fn end(self) {
        self.handle.runtime().sleep(Duration::from_millis(900)).await;
        for worker in &self.workers {
            let received = worker.receive_memory();
            assert_eq!((received.used_bytes, received.leaked_bytes, received.waiting), (0, 0, 0));
            let sent = worker.pool().stats();
            assert_eq!((sent.used_bytes, sent.leaked_bytes, sent.waiting), (0, 0, 0));
        }
        join(self.workers[0].shutdown(), self.workers[1].shutdown()).await;
    }
}

fn tensor(group: &Group) -> Tensor {
    Tensor::from_values(group.worker().pool(), &[LENGTH as u64], &[7u32; LENGTH]).unwrap()
}

async fn call(case: &str, group: Group) -> Result<(), GroupError> {
    let is_root = group.rank() == 0;
    let mut values = [1u32; LENGTH];
    match case {
        "barrier" => group.barrier().await,
        "broadcast" => group.broadcast(0, is_root.then(|| tensor(&group))).await.map(drop),
        "all_reduce" => group.all_reduce(&mut values).await,
        "all_reduce_tensors" => group.all_reduce_tensors([tensor(&group)]).await.map(drop),
        "reduce" => group.reduce(0, &mut values).await,
        "reduce_scatter" => group.reduce_scatter(&mut values, &[LENGTH, 0]).await,
        "all_gather" => group.all_gather(tensor(&group)).await.map(drop),
        "gather" => group.gather(0, tensor(&group)).await.map(drop),
        "scatter" => group.scatter(0, is_root.then(|| vec![tensor(&group), tensor(&group)])).await.map(drop),
        "all_to_all" => group.all_to_all(vec![tensor(&group), tensor(&group)]).await.map(drop),
        "close" => group.close().await,
        "derive" => group.derive("derived").await.map(drop),
        "subgroup" => group.subgroup("derived", &[1, 0]).await.map(drop),
        other => panic!("{other} is no call"),
    }
}

#[test]
fn s3_a_call_given_up_ends_its_group_and_nothing_else() {
    on_seeds(async |handle: Handle| {
        let two = Two::start(&handle).await;
        let case = CALLS[handle.seed() as usize % CALLS.len()];
        for_every_k(case, async |polls| {
            let (one, other) = two.group().await;
            // A rank that has completed stays until both have ended: dropping its group drops what it has sent and the
            // other has not received.
            let stays = async |group: Group| (call(case, group.clone()).await, group);
            let (given_up, (ended, _other)) = join(polled(polls, stays(one)), stays(other)).await;
            let Some((completed, _one)) = given_up else {
                // The other rank may have received all that it needs by then.
                let is_told = |error: &GroupError| {
                    matches!(
                        error,
                        GroupError::Over { .. } | GroupError::Left { .. } | GroupError::RankLost { .. }
                    )
                };
                assert!(ended.as_ref().err().is_none_or(is_told), "{ended:?}");
                return false;
            };
            completed.unwrap();
            ended.unwrap();
            true
        })
        .await;
        two.end().await;
    });
}

#[test]
fn s3_a_join_given_up_leaves_nothing_behind() {
    on_seeds(async |handle: Handle| {
        let two = Two::start(&handle).await;
        for_every_k("join", async |polls| {
            let [one, other] = two.ranks();
            let joining = join(polled(polls, one.join(&two.workers[0])), other.join(&two.workers[1]));
            let (given_up, joined) = joining.await;
            given_up.is_some_and(|given_up| given_up.and(joined).is_ok())
        })
        .await;
        two.end().await;
    });
}

#[test]
fn s3_a_shrink_given_up_may_be_called_again() {
    on_seeds(async |handle: Handle| {
        let two = Two::start(&handle).await;
        for_every_k("shrink", async |polls| {
            let (one, other) = two.group().await;
            drop(one.barrier());
            let shrunk = async {
                let given_up = polled(polls, one.shrink()).await;
                match given_up {
                    Some(shrunk) => (true, shrunk),
                    None => (false, one.shrink().await),
                }
            };
            let ((completed, one), other) = join(shrunk, other.shrink()).await;
            let (one, other) = (one.unwrap(), other.unwrap());
            // The other rank may have received all that it needs from the cancelled call. Then it is alone, and its
            // error says so.
            let are_together = one.size() == 2;
            assert!(are_together || !completed, "after {polls} polls");
            let (one, other) = join(call("barrier", one), call("barrier", other)).await;
            one.unwrap();
            assert_eq!(other.is_ok(), are_together, "after {polls} polls: {other:?}");
            completed
        })
        .await;
        two.end().await;
    });
}

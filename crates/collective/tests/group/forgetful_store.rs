//! A store that restarts without its data while a group breaks into halves.

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_collective::{Group, GroupError, store::StoreError};
use tensorwire_fabric::{FabricKind, timeout};
use tensorwire_rendezvous::{Tensor, Worker};

use super::{cut_store::CutStore, over_fabrics, store, worker};
use crate::{
    join_all::join_all,
    rdma::{End, over_at},
};

over_fabrics! {
    a_store_that_has_lost_its_data_votes_no_more,
    a_newcomer_knows_that_the_store_has_lost_its_data,
    a_store_that_has_kept_its_data_votes_for_newcomers,
    a_store_that_loses_its_data_before_any_call_makes_no_second_group,
    a_register_of_another_incarnation_has_no_vote,
}

/// How long the ranks of one half wait for the other.
const SHORT: Duration = Duration::from_secs(2);

struct Rank {
    worker: Worker,
    store: Arc<CutStore>,
    group: Group,
}

impl Rank {
    /// One half goes on without the other, and is lost with all that it knows.
    async fn goes_on_and_dies(self) {
        let shrunk = self.group.shrink().await.unwrap();
        assert_eq!(shrunk.size(), 1);
        drop((self.group, shrunk));
        self.worker.shutdown().await;
    }

    /// The error of a shrink with half of the votes and without that of the store.
    async fn does_not_go_on(self) {
        let error = self.group.shrink().await.unwrap_err();
        let GroupError::NoMajority { come, store: Some(store), .. } = &error else { panic!("{error}") };
        assert_eq!(*come, [self.group.rank()]);
        assert!(matches!(**store, StoreError::Lost { .. }), "{error}");
        drop(self.group);
        self.worker.shutdown().await;
    }
}

async fn two(fabric: FabricKind) -> [Rank; 2] {
    let below = store();
    let joining = (0..2).map(async |rank| {
        let (worker, store) = (worker(format!("rank_{rank}"), fabric).await, CutStore::new(&below));
        let group = Group::builder(store.clone(), rank, 2).timeout(SHORT).join(&worker).await.unwrap();
        Rank { worker, store, group }
    });
    join_all(joining).await.try_into().unwrap_or_else(|_| unreachable!("there are two"))
}

/// A group of one, and another rank that it admits.
async fn admitted(fabric: FabricKind) -> [Rank; 2] {
    let below = store();
    let [old, new] = [worker("old", fabric).await, worker("new", fabric).await];
    let stores = [CutStore::new(&below), CutStore::new(&below)];
    let builder = |store: &Arc<CutStore>| Group::builder(store.clone(), 0, 1).timeout(SHORT);
    let alone = builder(&stores[0]).join(&old).await.unwrap();
    let admitting = async {
        while alone.waiting().await.unwrap() == 0 {
            old.runtime().sleep(Duration::from_millis(5)).await;
        }
        // A busy machine may keep a newcomer from answering. It is passed over, and tries again.
        let mut group = alone.admit().await.unwrap();
        while group.size() < 2 {
            group = group.admit().await.unwrap();
        }
        group
    };
    // Its limit may be over before that. It comes again, or the other would admit nobody for ever.
    let coming = async {
        loop {
            match builder(&stores[1]).rejoin(&new).await {
                Err(GroupError::NotAdmitted { .. }) => {}
                come => break come.unwrap(),
            }
        }
    };
    let (group, come) = join(admitting, coming).await;
    let [first, second] = stores;
    let old = Rank { worker: old, store: first, group };
    [old, Rank { worker: new, store: second, group: come }]
}

/// Half of `first` goes on; the other half asks a store that knows nothing of that.
async fn one_half_and_the_other(ranks: [Rank; 2], first: usize) {
    let mut ranks = Vec::from(ranks);
    let (one, other) = (ranks.remove(first), ranks.remove(0));
    one.goes_on_and_dies().await;
    other.store.lead_to(&store());
    other.does_not_go_on().await;
}

async fn a_store_that_has_lost_its_data_votes_no_more(fabric: FabricKind) {
    join(one_half_and_the_other(two(fabric).await, 0), one_half_and_the_other(two(fabric).await, 1)).await;
}

async fn a_newcomer_knows_that_the_store_has_lost_its_data(fabric: FabricKind) {
    let [one, other] = [admitted(fabric).await, admitted(fabric).await];
    join(one_half_and_the_other(one, 0), one_half_and_the_other(other, 1)).await;
}

async fn a_store_that_has_kept_its_data_votes_for_newcomers(fabric: FabricKind) {
    let [old, new] = admitted(fabric).await;
    drop(old.group);
    old.worker.shutdown().await;
    new.goes_on_and_dies().await;
}

/// The groups of a world whose two halves cannot both go on, one after the other, with a store that loses its data before a call.
struct World {
    workers: Vec<Worker>,
    groups: Vec<Group>,
    store: Arc<CutStore>,
}

impl World {
    async fn new(fabric: FabricKind, size: usize) -> Self {
        let store = CutStore::new(&store());
        let workers: Vec<_> =
            join_all((0..size).map(async |rank| worker(format!("rank_{rank}"), fabric).await)).await;
        let joining = workers.iter().enumerate().map(async |(rank, worker)| {
            Group::builder(store.clone(), rank, size).timeout(SHORT).join(worker).await.unwrap()
        });
        let groups = join_all(joining).await;
        Self { workers, groups, store }
    }

    /// Shrinks one half while the other does not come, ends it, and then shrinks the other one. Returns whether the store has lost
    /// its data.
    async fn halves_with_a_loss_after(mut self, calls: usize) -> bool {
        self.store.forget_after(calls, store());
        let half = self.groups.len() / 2;
        let mut went_on = 0;
        for first in [half, 0] {
            let shrunk = join_all(self.groups.drain(first..).map(async |group| group.shrink().await)).await;
            let mut members = Vec::new();
            for shrunk in shrunk {
                match shrunk {
                    Ok(group) => members.push(group.members().map(str::to_owned).collect::<Vec<_>>()),
                    Err(GroupError::NoMajority { .. } | GroupError::LeftOut { .. }) => {}
                    Err(error) => panic!("a loss after {calls} calls: {error}"),
                }
            }
            assert!(members.iter().all(|of| *of == members[0] && of.len() == half), "{calls}: {members:?}");
            went_on += usize::from(!members.is_empty());
            join_all(self.workers.drain(first..).map(async |worker| worker.shutdown().await)).await;
        }
        assert!(went_on <= 1, "a loss after {calls} calls makes two groups");
        // The second half has no vote, and the first one has it unless its witness was lost before it was checked.
        self.store.has_forgotten()
    }
}

async fn a_store_that_loses_its_data_before_any_call_makes_no_second_group(fabric: FabricKind) {
    join(with_a_loss_before_each_call(fabric, 2), with_a_loss_before_each_call(fabric, 4)).await;
}

async fn with_a_loss_before_each_call(fabric: FabricKind, size: usize) {
    const AT_ONCE: usize = 8;
    for begin in (0..).step_by(AT_ONCE) {
        // One after the other, because each must join within its limit.
        let mut worlds = Vec::new();
        for _ in 0..AT_ONCE {
            worlds.push(World::new(fabric, size).await);
        }
        let losses =
            worlds.into_iter().zip(begin..).map(|(world, calls)| world.halves_with_a_loss_after(calls));
        let is_lost = join_all(losses).await;
        if is_lost.contains(&false) {
            assert!(begin > 0 || is_lost[0], "the shrink needs the store");
            println!("{size} ranks: {} calls", begin + is_lost.iter().filter(|lost| **lost).count());
            return;
        }
    }
}

/// A worker that comes back under its name and address, with what an earlier one has published, is not the rank that was lost.
async fn a_register_of_another_incarnation_has_no_vote(fabric: FabricKind) {
    let [one, other] = two(fabric).await;
    one.store.cut_after(0);
    let runtime = one.worker.runtime().clone();
    let shrinking = timeout(&*runtime, SHORT / 8, other.group.shrink()).await;
    assert!(shrinking.is_err(), "it waits for the first rank");
    let address = other.worker.address().to_owned();
    let reader = worker("reader", fabric).await;
    let peer = reader.peer_at(&address).await.unwrap();
    let published = peer.list().await.unwrap();
    let register = published.iter().find(|it| it.name.contains("agreement")).expect("it takes part");
    let bytes = peer.fetch(&register.name).await.unwrap().bytes().to_vec();
    drop(other.group);
    other.worker.shutdown().await;

    let builder = Worker::builder("rank_1").bind(address);
    let later = over_at(builder, fabric, End::Right).start().await.unwrap();
    let again = Tensor::from_values(later.pool(), &[bytes.len() as u64], &bytes).unwrap();
    later.publish(&register.name, again).unwrap();
    let error = one.group.shrink().await.unwrap_err();
    let GroupError::NoMajority { come, .. } = &error else { panic!("{error}") };
    assert_eq!(*come, [0], "{error}");
    join_all([&one.worker, &later, &reader].map(Worker::shutdown)).await;
}

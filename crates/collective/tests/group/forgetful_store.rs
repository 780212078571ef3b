//! A store that restarts without its data while a group breaks into halves.

use std::{sync::Arc, time::Duration};

use futures::future::{join, join_all};
use tensorwire_collective::{Group, GroupError, store::StoreError};
use tensorwire_rendezvous::Worker;
use tensorwire_verbs_reactor::FabricKind;

use super::{cut_store::CutStore, over_fabrics, store, worker};

over_fabrics! {
    a_store_that_has_lost_its_data_votes_no_more,
    a_newcomer_knows_that_the_store_has_lost_its_data,
    a_store_that_has_kept_its_data_votes_for_newcomers,
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
    let (group, come) = join(admitting, builder(&stores[1]).rejoin(&new)).await;
    let [first, second] = stores;
    let old = Rank { worker: old, store: first, group };
    [old, Rank { worker: new, store: second, group: come.unwrap() }]
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

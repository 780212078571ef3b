//! Ranks whose connection broke.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{
    FutureExt as _,
    channel::oneshot::{Receiver, Sender, channel},
    future::join,
};
use tensorwire_collective::{
    Group, GroupError,
    store::{MemoryStore, Store, StoreError},
};
use tensorwire_fabric::{BoxFuture, FabricKind, Runtime};
use tensorwire_rendezvous::{Tensor, Worker};
use tensorwire_sim::{Fault, Handle, Node, World};

use crate::common::builder;
use crate::join_all::join_all;

const SIZE: usize = 4;

/// The rank that comes late.
const LATE: usize = 2;

const LIMIT: Duration = Duration::from_secs(60);

/// The late rank's view of the store: it sees the other ranks only when the test allows that.
#[derive(Debug)]
struct Held {
    below: Arc<MemoryStore>,
    release: Mutex<Option<Receiver<()>>>,
}

impl Held {
    fn new(below: &Arc<MemoryStore>) -> (Arc<Self>, Sender<()>) {
        let (release, released) = channel();
        (Arc::new(Self { below: below.clone(), release: Mutex::new(Some(released)) }), release)
    }
}

impl Store for Held {
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.below.set(key, value)
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        self.below.get(keys)
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        async move {
            let found = self.below.wait(keys, limit).await;
            let release = if keys.len() == SIZE { self.release.lock().unwrap().take() } else { None };
            if let Some(release) = release {
                release.await.unwrap();
            }
            found
        }
        .boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        self.below.add(key, delta)
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.below.compare_set(key, expected, value)
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        self.below.delete(key)
    }
}

async fn start(handle: &Handle, rank: usize) -> (Node, Worker) {
    let node = handle.start_node(&format!("r{rank}:1")).unwrap();
    let worker = builder(&node, &format!("/job:r/replica:0/task:{rank}")).start().await.unwrap();
    (node, worker)
}

/// Rank 3 has opened its channel with the late rank and waits for it when their connection breaks. So it cannot know whether the late
/// rank finds its channel, and the joining ends for all: also for rank 1, which has no connection with the late rank, and for that rank
/// itself, which connects anew.
async fn breaks_before_ranks_meet(handle: Handle) {
    let ranks = join_all((0..SIZE).map(|rank| start(&handle, rank))).await;
    let store = Arc::new(MemoryStore::new(handle.runtime()));
    let (held, release) = Held::new(&store);
    let joining = ranks.iter().enumerate().map(async |(rank, (_, worker))| {
        let store: Arc<dyn Store> = if rank == LATE { held.clone() } else { store.clone() };
        Group::builder(store, rank, SIZE).timeout(LIMIT).job("job").join(worker).await.unwrap_err()
    });
    let breaking = async {
        handle.runtime().sleep(Duration::from_secs(2)).await;
        handle.inject(Fault::LoseLink(ranks[3].0.id(), ranks[LATE].0.id()));
        handle.runtime().sleep(handle.swarm().detection_max * 2 + Duration::from_millis(1)).await;
        release.send(()).unwrap();
    };
    let begun = handle.now();
    let (errors, ()) = join(join_all(joining), breaking).await;
    let took = handle.now() - begun;
    assert!(took < LIMIT / 4, "after {took:?}: {errors:?}");
    for error in errors {
        assert!(!matches!(error, GroupError::TimedOut { .. }), "{error}");
        // Each end of the connection names the other.
        let text = error.to_string();
        assert!(text.contains("rank 2 is lost") || text.contains("rank 3 is lost"), "{text}");
    }
    join_all(ranks.iter().map(|(_, worker)| worker.shutdown())).await;
}

/// A rank that could not be dialled at the first request for its messages is requested again.
async fn writes_after_a_failed_dial(handle: Handle) {
    let ranks = join_all((0..2).map(|rank| start(&handle, rank))).await;
    let store = Arc::new(MemoryStore::new(handle.runtime()));
    let joining = ranks.iter().enumerate().map(async |(rank, (_, worker))| {
        Group::builder(store.clone(), rank, 2).timeout(LIMIT).join(worker).await.unwrap()
    });
    let groups = join_all(joining).await;
    let [owner, writer] = &groups[..] else { panic!("two ranks") };
    let nodes = [0, 1].map(|rank: usize| ranks[rank].0.id());
    handle.inject(Fault::LoseDevice(nodes[1], FabricKind::SIM));
    handle.runtime().sleep(handle.swarm().detection_max * 2 + Duration::from_millis(1)).await;
    let tensor = Tensor::from_values(owner.worker().pool(), &[4], &[0u8; 4]).unwrap();
    let export = owner.export(tensor).unwrap();
    handle.runtime().sleep(Duration::from_secs(2)).await;
    handle.inject(Fault::RestoreDevice(nodes[1], FabricKind::SIM));
    handle.runtime().sleep(Duration::from_secs(8)).await;
    writer.put(&export.key(), 1, &[2]).await.unwrap();
    assert_eq!(export.tensor().unwrap().bytes(), [0, 2, 0, 0]);
    drop(export);
    drop(groups);
    join_all(ranks.iter().map(|(_, worker)| worker.shutdown())).await;
}

#[test]
fn an_export_is_written_after_a_failed_dial() {
    for seed in 0..6 {
        let world = World::new(seed);
        world.replayed_by("group_end");
        world.run(writes_after_a_failed_dial(world.handle())).unwrap();
        world.finish().unwrap();
    }
}

#[test]
fn a_connection_that_breaks_before_its_ranks_have_met_ends_the_joining_of_all() {
    for seed in 0..6 {
        let world = World::new(seed);
        world.replayed_by("group_end");
        world.run(breaks_before_ranks_meet(world.handle())).unwrap();
        world.finish().unwrap();
    }
}

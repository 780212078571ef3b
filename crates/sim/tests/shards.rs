//! Sharded sets whose publishers crash and come back, over links that break, with followers that have layouts of their own and crash, too.
//!
//! `SIM_SEEDS=40` runs as many seeds, `SIM_FROM=7` begins with that one, `SIM_SEED=7` runs one and prints its figures. `SIM_COMMITS=200`
//! commits as many versions in each.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::single_range_in_vec_init)] // all rows

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::{join, pending};
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_rendezvous::{
    Sharing, Tensor, Worker, WorkerError,
    sets::{Layout, Shard, ShardedSet, Snapshot},
};
use tensorwire_sim::{Fault, Handle, Node, NodeId, Rng};

use crate::{
    common::builder,
    each_event::a_process_dies_at_each_event,
    figures::{every_seed_twice, number},
    join_all::join_all,
    points::{Point, in_source},
};

/// As many as one process can have open files for.
const SEEDS: u64 = 40;
const SET: &str = "policy";
/// Commits of one run.
const COMMITS: u64 = 24;
/// The last version, which ends the followers.
const LAST: u64 = 1000;
/// Commits of a run that is repeated with a crash at each of its events.
const FEW_COMMITS: u64 = 3;
const LIVENESS: Duration = Duration::from_secs(2);
const ROWS: u64 = 48;
const COLUMNS: u64 = 120;
/// Bytes of all tensors of a version, at most.
const VERSION_BYTES: u64 = 2 * (ROWS * COLUMNS + FIXED + 50 + 4000);
const FIXED: u64 = 6000;
/// Versions that a publisher holds at most: the newest two, two that are being fetched, one that is being committed.
const HELD: u64 = 5;

fn publisher_name(number: usize) -> String {
    format!("/job:ps/replica:0/task:{number}")
}

fn publisher_address(number: usize) -> String {
    format!("publisher_{number}:1")
}

/// Ranges of a dimension of the matrix.
type Ranges = (usize, Vec<Range<u64>>);

/// The part of the publisher or follower `at` of `count`, evenly or of each of three fused matrices.
fn part(axis: usize, is_fused: bool, (at, count): (u64, u64)) -> Ranges {
    let length = [ROWS, COLUMNS][axis];
    let fused = if is_fused { 3 } else { 1 };
    let each = length / fused;
    (axis, (0..fused).map(|of| of * each + each * at / count..of * each + each * (at + 1) / count).collect())
}

/// The part of the matrix that a publisher has of a version. The division changes from version to version.
fn committed_part(version: u64, publisher: (u64, u64)) -> Ranges {
    part((version / 2 % 2) as usize, version % 5 < 2, publisher)
}

/// These ranges of the matrix of a version: in each version one of eight rows has changed.
fn matrix(version: u64, (axis, ranges): &Ranges) -> Vec<u16> {
    let all = |length| (0..length).collect::<Vec<_>>();
    let chosen: Vec<_> = ranges.iter().cloned().flatten().collect();
    let (rows, columns) = if *axis == 0 { (chosen, all(COLUMNS)) } else { (all(ROWS), chosen) };
    let changed = |row: u64| version.saturating_sub((version + 8 - row % 8) % 8);
    let row = |row: u64| columns.iter().map(move |column| (row * 131 + column * 7 + changed(row) * 3) as u16);
    rows.into_iter().flat_map(row).collect()
}

fn fixed(range: Range<u64>) -> Vec<u16> {
    range.map(|at| (at * 5) as u16).collect()
}

/// The name of a tensor that only one publisher has, and who that is.
fn layer(version: u64, publishers: u64) -> Option<(String, u64)> {
    (!version.is_multiple_of(3)).then(|| (format!("layer{}", version % 2), version % publishers))
}

fn layer_elements(version: u64) -> Vec<u16> {
    vec![version as u16; 3000 + version as usize % 7]
}

/// What a publisher commits.
fn shards(worker: &Worker, version: u64, (at, count): (u64, u64)) -> Vec<(String, Shard)> {
    let of = |shape: &[u64], values: &[u16]| Tensor::from_values(worker.pool(), shape, values).unwrap();
    let (axis, ranges) = committed_part(version, (at, count));
    let along: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let shape = if axis == 0 { [along, COLUMNS] } else { [ROWS, along] };
    let own = of(&shape, &matrix(version, &(axis, ranges.clone())));
    let range = FIXED * at / count..FIXED * (at + 1) / count;
    let fixed = of(&[range.end - range.start], &fixed(range.clone()));
    let mut tensors = vec![
        ("fixed".to_owned(), fixed.shard(0, FIXED, std::slice::from_ref(&range))),
        ("step".to_owned(), of(&[50], &[version as u16; 50]).into()),
        ("w".to_owned(), own.shard(axis, [ROWS, COLUMNS][axis], &ranges)),
    ];
    if let Some((name, _)) = layer(version, count).filter(|(_, owner)| *owner == at) {
        let elements = layer_elements(version);
        tensors.push((name, of(&[elements.len() as u64], &elements).into()));
    }
    tensors
}

/// What a follower wants: these ranges of the matrix, or all of it.
type Wanted = Option<Ranges>;

/// Checks that each content is that of the snapshot's version.
fn check(snapshot: &Snapshot, publishers: u64, wanted: &Wanted) {
    let version = snapshot.version();
    let of = |name: &str| snapshot.get(name).unwrap().values::<u16>().unwrap();
    let all = (0, vec![0..ROWS]);
    assert!(of("w") == matrix(version, wanted.as_ref().unwrap_or(&all)), "version {version}, {wanted:?}");
    assert_eq!(of("fixed"), fixed(0..FIXED), "version {version}");
    assert_eq!(of("step"), [version as u16; 50], "version {version}");
    let layer = layer(version, publishers);
    assert_eq!(snapshot.len(), 3 + usize::from(layer.is_some()), "version {version}");
    if let Some((name, _)) = layer {
        assert_eq!(of(&name), layer_elements(version));
    }
}

/// One life of a follower.
struct Follower {
    node: Node,
    name: String,
    publishers: usize,
    wanted: Wanted,
    sharing: Sharing,
    rng: Rng,
}

impl Follower {
    fn set(&self, worker: &Worker) -> ShardedSet {
        let parts = (0..self.publishers).map(|publisher| {
            let address = publisher_address(publisher);
            let peer = worker.set_address(&publisher_name(publisher), &address).unwrap();
            peer.set(SET).sharing(self.sharing).timeout(Duration::from_secs(5))
        });
        let layout = Layout::new();
        let layout = match &self.wanted {
            Some((axis, ranges)) => layout.part("w", *axis, ranges),
            None => layout,
        };
        ShardedSet::new(parts).layout(layout)
    }

    fn check(&self, snapshot: &Snapshot) {
        check(snapshot, self.publishers as u64, &self.wanted);
    }

    /// Follows until the last version.
    async fn live(mut self) {
        let worker = builder(&self.node, &self.name).liveness(LIVENESS).start().await.unwrap();
        let set = self.set(&worker);
        let mut versions = set.follow();
        let mut held: Option<Snapshot> = None;
        let mut floor = None;
        while floor < Some(LAST) {
            match versions.next().await.unwrap() {
                Ok(staged) => {
                    self.check(staged.snapshot());
                    assert!(floor < Some(staged.version()), "{floor:?}, then {}", staged.version());
                    floor = Some(staged.version());
                    held.iter().for_each(|held| self.check(held));
                    held = Some(staged.apply());
                }
                Err(error) => self.check_incomplete(&error, floor),
            }
            if self.rng.chance(1, 4) {
                self.node.runtime().sleep(self.rng.duration(Duration::from_millis(20))).await;
            }
            if self.rng.chance(1, 8) {
                match set.fetch().await {
                    Ok(snapshot) => self.check(&snapshot),
                    Err(WorkerError::DeadlineExceeded { .. }) => {}
                    Err(error) => self.check_incomplete(&error, None),
                }
            }
        }
        drop((held, versions));
        worker.shutdown().await;
        assert_eq!(worker.receive_memory().used_bytes, 0, "{:?}", worker.receive_memory());
    }

    /// The only error of a set whose parts fit.
    fn check_incomplete(&self, error: &WorkerError, floor: Option<u64>) {
        let WorkerError::Incomplete { version, parts, .. } = error else { panic!("{error}") };
        assert!(floor.is_none() || *version > floor, "{error}, after {floor:?}");
        let names: Vec<_> = (0..self.publishers).map(publisher_name).collect();
        assert!(!parts.is_empty() && parts.iter().all(|part| names.contains(part)), "{error}");
    }
}

/// One life of a publisher.
struct Publisher {
    handle: Handle,
    node: Node,
    worker: Worker,
    at: usize,
    count: usize,
}

impl Publisher {
    async fn start(handle: &Handle, at: usize, count: usize) -> Self {
        let node = handle.start_node(&publisher_address(at)).unwrap();
        let worker = builder(&node, &publisher_name(at)).liveness(LIVENESS).start().await.unwrap();
        Self { handle: handle.clone(), node, worker, at, count }
    }

    fn shards(&self, version: u64) -> Vec<(String, Shard)> {
        shards(&self.worker, version, (self.at as u64, self.count as u64))
    }

    async fn commit(&self, version: u64) {
        let (worker, shards) = (self.worker.clone(), self.shards(version));
        let commit = async move { worker.set(SET).commit(version, shards).await };
        self.node.run("commit", commit).await.unwrap().unwrap();
        let used = self.worker.pool().stats().used_bytes;
        assert!(used <= HELD * VERSION_BYTES, "{used} bytes for {HELD} versions of {VERSION_BYTES}");
    }

    /// Waits until no more bytes are in use. Of a follower that has died, the publisher knows after a while.
    async fn uses_at_most(&self, bytes: u64) {
        let used = || self.worker.pool().stats().used_bytes;
        let back = async {
            while used() > bytes {
                self.handle.runtime().sleep(Duration::from_millis(10)).await;
            }
        };
        let back = timeout(&*self.handle.runtime(), LIVENESS * 10, back).await;
        assert!(back.is_ok(), "{} bytes are in use, of which {bytes} should be", used());
    }

    /// The process dies, perhaps in the middle of a commit. The next one has no version.
    async fn crash(&mut self, rng: &mut Rng, next: u64) {
        if rng.chance(1, 2) {
            let set = self.worker.set(SET);
            drop(futures::poll!(Box::pin(set.commit(next, self.shards(next)))));
        }
        self.node.crash();
        *self = Self::start(&self.handle, self.at, self.count).await;
    }
}

/// The processes of the followers that live now.
type Nodes = Arc<Mutex<Vec<NodeId>>>;

/// Commits versions, some of which are never complete.
struct Publishing {
    handle: Handle,
    publishers: Vec<Publisher>,
    followers: Nodes,
    rng: Rng,
}

impl Publishing {
    /// The publishers commit `version` one after the other, perhaps not all of them; faults come between.
    async fn commit(&mut self, version: u64, pause: u64) {
        let first = self.rng.below(self.publishers.len());
        for turn in 0..self.publishers.len() {
            let at = (first + turn) % self.publishers.len();
            self.fault(at, version).await;
            if !self.rng.chance(1, 20) {
                self.publishers[at].commit(version).await;
            }
            if self.rng.chance(1, 3) {
                self.handle.runtime().sleep(self.rng.duration(Duration::from_millis(pause))).await;
            }
        }
    }

    async fn fault(&mut self, at: usize, version: u64) {
        let follower = {
            let followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
            followers[self.rng.below(followers.len())]
        };
        let (publisher, delay) = (self.publishers[at].node.id(), self.rng.duration(Duration::from_millis(3)));
        match self.rng.below(20) {
            0 | 1 => self.handle.inject_after(delay, Fault::LoseLink(publisher, follower)),
            2 => self.handle.inject_after(delay, Fault::LoseControl(publisher, follower)),
            3 => self.handle.inject_after(delay, Fault::Crash(follower)),
            4 | 5 => {
                self.handle.runtime().sleep(delay).await;
                self.publishers[at].crash(&mut self.rng, version).await;
                if self.rng.chance(1, 2) && version > 1 {
                    // What it had committed last.
                    self.publishers[at].commit(version - 1).await;
                }
            }
            6 if self.rng.chance(1, 6) => self.handle.runtime().sleep(LIVENESS * 2).await,
            _ => {}
        }
    }

    async fn live(&mut self) {
        let pause = self.rng.pick([1, 20, 300]);
        for version in 1..=number("SIM_COMMITS").unwrap_or(COMMITS) {
            self.commit(version, pause).await;
            self.handle.runtime().sleep(self.rng.duration(Duration::from_millis(pause))).await;
        }
        for publisher in &self.publishers {
            publisher.commit(LAST).await;
        }
    }
}

/// Lives of a follower, until one gets the last version.
async fn follow(handle: Handle, number: usize, publishers: usize, first: Node, nodes: Nodes, mut rng: Rng) {
    let mut node = first;
    for life in 0.. {
        let (axis, is_fused) = (rng.pick([0, 1]), rng.chance(1, 2));
        let part = part(axis, is_fused, (number as u64 % 2, rng.pick([2, 3])));
        let follower = Follower {
            node: node.clone(),
            name: format!("/job:worker/replica:0/task:{number}"),
            publishers,
            wanted: rng.chance(2, 3).then_some(part),
            sharing: rng.pick([Sharing::Copy, Sharing::View]),
            rng: rng.fork(life),
        };
        if node.run("follow", follower.live()).await.is_some() {
            return node.crash();
        }
        node = handle.start_node(node.address()).unwrap();
        nodes.lock().unwrap_or_else(PoisonError::into_inner)[number] = node.id();
    }
}

async fn scenario(handle: Handle) {
    let mut rng = Rng::new(handle.seed()).fork(94);
    handle.take_chances();
    if rng.chance(1, 2) {
        handle.lend_nothing();
    }
    let count = rng.pick([2, 2, 3]);
    let publishers = join_all((0..count).map(|at| Publisher::start(&handle, at, count))).await;
    let followers = rng.pick([1, 2, 2, 3]);
    let first: Vec<_> =
        (0..followers).map(|at| handle.start_node(&format!("follower_{at}:1")).unwrap()).collect();
    let nodes: Nodes = Arc::new(Mutex::new(first.iter().map(Node::id).collect()));
    let lives = first.into_iter().enumerate().map(|(number, node)| {
        follow(handle.clone(), number, count, node, nodes.clone(), rng.fork(number as u64))
    });
    let lives = join_all(lives.collect::<Vec<_>>());
    let mut publishing = Publishing { handle, publishers, followers: nodes.clone(), rng };
    join(publishing.live(), lives).await;
    for publisher in publishing.publishers {
        publisher.uses_at_most(2 * VERSION_BYTES).await;
        publisher.worker.shutdown().await;
        publisher.uses_at_most(0).await;
    }
}

#[test]
fn every_version_of_a_sharded_set_is_whole_twice() {
    let reached = every_seed_twice("shards", SEEDS, scenario);
    let points = ["chance", "mark"].into_iter().flat_map(in_source).filter(Point::is_of_sets);
    let missed: Vec<_> = points.filter(|point| !reached.contains(point.name.as_str())).collect();
    let is_sample = number("SIM_SEED").is_some() || number("SIM_SEEDS").is_some_and(|seeds| seeds < SEEDS);
    assert!(is_sample || missed.is_empty(), "no seed reached {missed:?}");
}

/// Publishers of a run that is repeated with a crash at each of its events.
const TWO: usize = 2;

/// Commits versions, and serves until the process dies.
async fn publish(node: Node, at: usize, first: u64) {
    let worker = builder(&node, &publisher_name(at)).liveness(LIVENESS).start().await.unwrap();
    for version in (first..=FEW_COMMITS).chain([LAST]) {
        let shards = shards(&worker, version, (at as u64, TWO as u64));
        worker.set(SET).commit(version, shards).await.unwrap();
        node.runtime().sleep(Duration::from_micros(500)).await;
    }
    pending::<()>().await;
}

/// Lives of a publisher, of which the first one dies after `crash_at` events, and the others begin in the middle.
async fn publisher(handle: Handle, at: usize, mut crash_at: Option<u64>) {
    let mut first = 1;
    loop {
        let node = handle.start_node(&publisher_address(at)).unwrap();
        crash_at.take().into_iter().for_each(|at| handle.inject_at_event(at, Fault::Crash(node.id())));
        node.run("publish", publish(node.clone(), at, first)).await;
        first = FEW_COMMITS - 1;
    }
}

/// Lives of a follower, of which the first one dies after `crash_at` events, and the last one gets the last version.
async fn follower(handle: Handle, mut crash_at: Option<u64>, sharing: Sharing) {
    loop {
        let node = handle.start_node("follower:1").unwrap();
        crash_at.take().into_iter().for_each(|at| handle.inject_at_event(at, Fault::Crash(node.id())));
        let (rng, wanted) = (Rng::new(handle.seed()).fork(7), Some(part(1, true, (0, 2))));
        let name = "/job:worker/replica:0/task:0".to_owned();
        let follower = Follower { node: node.clone(), name, publishers: TWO, wanted, sharing, rng };
        if node.run("follow", follower.live()).await.is_some() {
            return node.crash();
        }
    }
}

#[test]
fn a_crash_at_any_event_mixes_no_versions_of_shards() {
    a_process_dies_at_each_event(
        |handle, (_, crash_at)| {
            let lives = [crash_at, None].into_iter().enumerate();
            join_all(
                lives.map(|(number, at)| Box::pin(publisher(handle.clone(), number, at))).collect::<Vec<_>>(),
            )
        },
        |handle, (run, crash_at)| {
            if run.is_multiple_of(3) {
                handle.lend_nothing();
            }
            let sharing = if run.is_multiple_of(2) { Sharing::Copy } else { Sharing::View };
            follower(handle, crash_at, sharing)
        },
    );
}

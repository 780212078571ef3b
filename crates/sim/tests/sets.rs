//! Sets whose publisher crashes and comes back, over links that break, with followers of both policies.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_FROM=7` begins with that one, `SIM_SEED=7` runs one and prints its figures. `SIM_COMMITS=200`
//! commits as many versions in each.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::{join, pending};
use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{
    Sharing, Tensor, Worker, WorkerError,
    sets::{Policy, Snapshot},
};
use tensorwire_sim::{Fault, Handle, Node, Rng};

use crate::{
    common::builder,
    each_event::a_process_dies_at_each_event,
    figures::{every_seed_twice, number},
    join_all::join_all,
};

const SEEDS: u64 = 60;
const PUBLISHER: &str = "/job:ps/replica:0/task:0";
const SET: &str = "policy";
/// Commits of one run.
const COMMITS: u64 = 24;
/// The last version, which ends the followers.
const LAST: u64 = 1000;
/// Commits of a run that is repeated with a crash at each of its events.
const FEW_COMMITS: u64 = 4;
const ELEMENTS: u64 = 3000;

/// The tensor `w` of a version: in each version another element has changed.
fn elements(version: u64) -> Vec<u16> {
    let mut elements: Vec<u16> = (0..ELEMENTS as u16).collect();
    (1..=version).for_each(|version| elements[(version * 97 % ELEMENTS) as usize] = version as u16);
    elements
}

/// The tensors of a version. Names and shapes depend on it.
fn tensors(worker: &Worker, version: u64) -> Vec<(String, Tensor)> {
    let of = |values: &[u16]| Tensor::from_values(worker.pool(), &[values.len() as u64], values).unwrap();
    let mut tensors = vec![
        ("fixed".to_owned(), of(&[7; 600])),
        ("step".to_owned(), of(&[version as u16; 50])),
        ("w".to_owned(), of(&elements(version))),
    ];
    if !version.is_multiple_of(3) {
        tensors
            .push((format!("layer{}", version % 2), of(&vec![version as u16; 100 + version as usize % 7])));
    }
    tensors
}

/// Checks that each content is that of the snapshot's version.
fn check(snapshot: &Snapshot) {
    let version = snapshot.version();
    let of = |name: &str| snapshot.get(name).unwrap().values::<u16>().unwrap();
    assert_eq!(of("fixed"), [7; 600]);
    assert_eq!(of("step"), [version as u16; 50], "version {version}");
    assert_eq!(of("w"), elements(version), "version {version}");
    let layer = format!("layer{}", version % 2);
    assert_eq!(snapshot.len(), 3 + usize::from(!version.is_multiple_of(3)), "version {version}");
    if !version.is_multiple_of(3) {
        assert_eq!(of(&layer), vec![version as u16; 100 + version as usize % 7]);
    }
}

struct Follower {
    node: Node,
    policy: Policy,
    sharing: Sharing,
    rng: Rng,
    ready: Arc<AtomicUsize>,
}

impl Follower {
    /// Follows until the last version.
    async fn live(mut self, number: u64) {
        let name = format!("/job:worker/replica:0/task:{number}");
        let worker = builder(&self.node, &name).start().await.unwrap();
        let peer = worker.set_address(PUBLISHER, "publisher:1").unwrap();
        let set = peer.set(SET).sharing(self.sharing);
        let mut versions = set.follow(self.policy);
        self.ready.fetch_add(1, Ordering::Relaxed);
        let mut held: Option<Snapshot> = None;
        let mut floor = None;
        while floor < Some(LAST) {
            match versions.next().await.unwrap() {
                Ok(staged) => {
                    check(staged.snapshot());
                    assert!(floor < Some(staged.version()), "{floor:?}, then {}", staged.version());
                    floor = Some(staged.version());
                    held.iter().for_each(check);
                    held = Some(staged.apply());
                }
                Err(WorkerError::WentBack { held, offered, .. }) => {
                    assert!(offered < held && floor == Some(held), "{offered}, {held}, {floor:?}");
                    if self.rng.chance(1, 2) {
                        versions.accept_restart();
                        floor = None;
                    }
                }
                Err(WorkerError::Superseded { held, newest, .. }) => {
                    assert!(self.policy == Policy::Every && held < newest && floor == Some(held));
                }
                Err(error) => panic!("{error}"),
            }
            if self.rng.chance(1, 4) {
                self.node.runtime().sleep(self.rng.duration(Duration::from_millis(20))).await;
            }
            if self.rng.chance(1, 8)
                && let Ok(snapshot) = set.clone().timeout(Duration::from_secs(5)).fetch().await
            {
                check(&snapshot);
            }
        }
        worker.shutdown().await;
    }
}

/// The process of the publisher, which a crash replaces.
struct Publisher {
    handle: Handle,
    node: Node,
    worker: Worker,
    version: u64,
}

impl Publisher {
    async fn start(handle: &Handle) -> Self {
        let node = handle.start_node("publisher:1").unwrap();
        let worker = builder(&node, PUBLISHER).start().await.unwrap();
        Self { handle: handle.clone(), node, worker, version: 0 }
    }

    async fn commit(&mut self, version: u64) {
        let (worker, tensors) = (self.worker.clone(), tensors(&self.worker, version));
        let commit = async move { worker.set(SET).commit(version, tensors).await };
        self.node.run("commit", commit).await.unwrap().unwrap();
        self.version = version;
    }

    /// The process dies, perhaps in the middle of a commit, and the next one begins at a version below or above.
    async fn crash(self, rng: &mut Rng) -> Self {
        let Self { handle, node, worker, version } = self;
        if rng.chance(1, 2) {
            let (set, next) = (worker.set(SET), version + 1);
            drop(futures::poll!(Box::pin(set.commit(next, tensors(&worker, next)))));
        }
        // What the process had dies with it.
        drop(worker);
        node.crash();
        let version = rng.pick([0, version / 2, version, version + 1, version + 9]);
        Self { version, ..Self::start(&handle).await }
    }
}

async fn publish(mut publisher: Publisher, mut rng: Rng, followers: Vec<Node>, ready: Arc<AtomicUsize>) {
    let pause = rng.pick([0, 1, 20, 300]);
    if rng.chance(1, 2) {
        while ready.load(Ordering::Relaxed) < followers.len() {
            publisher.handle.runtime().sleep(Duration::from_micros(100)).await;
        }
    }
    for _ in 0..number("SIM_COMMITS").unwrap_or(COMMITS) {
        let version = publisher.version + rng.pick([1, 1, 1, 2]);
        publisher.commit(version).await;
        let follower = followers[rng.below(followers.len())].id();
        let delay = rng.duration(Duration::from_millis(3));
        match rng.below(12) {
            0 | 1 => publisher.handle.inject_after(delay, Fault::LoseLink(publisher.node.id(), follower)),
            2 => publisher.handle.inject_after(delay, Fault::LoseControl(publisher.node.id(), follower)),
            3 => {
                publisher.handle.runtime().sleep(delay).await;
                publisher = publisher.crash(&mut rng).await;
            }
            _ => {}
        }
        publisher.handle.runtime().sleep(rng.duration(Duration::from_millis(pause))).await;
    }
    publisher.commit(LAST).await;
    // It serves until the followers have ended.
    join_all(followers.iter().map(Node::crashed)).await;
    publisher.worker.shutdown().await;
}

async fn scenario(handle: Handle) {
    let mut rng = Rng::new(handle.seed()).fork(93);
    handle.take_chances();
    if rng.chance(1, 2) {
        handle.lend_nothing();
    }
    let publisher = Publisher::start(&handle).await;
    let ready = Arc::new(AtomicUsize::new(0));
    let count = rng.pick([1, 2, 2, 3]);
    let nodes: Vec<_> = (0..count).map(|at| handle.start_node(&format!("follower:{at}")).unwrap()).collect();
    let lives = nodes.iter().zip(0..).map(|(node, number)| {
        let policy = rng.pick([Policy::Every, Policy::Latest]);
        let sharing = rng.pick([Sharing::Copy, Sharing::View]);
        let rng = rng.fork(number);
        let follower = Follower { node: node.clone(), policy, sharing, rng, ready: ready.clone() };
        let life = node.run("follow", follower.live(number));
        async move {
            life.await.unwrap();
            node.crash();
        }
    });
    let lives: Vec<_> = lives.collect();
    join(publish(publisher, rng, nodes.clone(), ready), join_all(lives)).await;
}

#[test]
fn every_version_of_a_set_is_whole_twice() {
    every_seed_twice("sets", SEEDS, scenario);
}

/// Commits versions from a number on, and serves until the process dies.
async fn publish_from(node: Node, first: u64) {
    let worker = builder(&node, PUBLISHER).start().await.unwrap();
    for version in (first..first + FEW_COMMITS).chain([LAST]) {
        worker.set(SET).commit(version, tensors(&worker, version)).await.unwrap();
        node.runtime().sleep(Duration::from_micros(500)).await;
    }
    pending::<()>().await;
}

/// Publishers, one after the other, of which the first one dies after `crash_at` events, and the second one begins below its last version.
async fn publishers(handle: Handle, mut crash_at: Option<u64>) {
    let mut first = FEW_COMMITS;
    loop {
        let node = handle.start_node("publisher:1").unwrap();
        crash_at.take().into_iter().for_each(|at| handle.inject_at_event(at, Fault::Crash(node.id())));
        node.run("publish", publish_from(node.clone(), first)).await;
        first /= 2;
    }
}

/// Followers, one after the other, of which the first one dies after `crash_at` events, and the last one gets the last version.
async fn followers(handle: Handle, mut crash_at: Option<u64>, policy: Policy) {
    loop {
        let node = handle.start_node("follower:1").unwrap();
        crash_at.take().into_iter().for_each(|at| handle.inject_at_event(at, Fault::Crash(node.id())));
        let (rng, ready) = (Rng::new(handle.seed()).fork(7), Arc::default());
        let follower = Follower { node: node.clone(), policy, sharing: Sharing::Copy, rng, ready };
        if node.run("follow", follower.live(0)).await.is_some() {
            return node.crash();
        }
    }
}

#[test]
fn a_crash_at_any_event_mixes_no_versions() {
    a_process_dies_at_each_event(
        |handle, (_, crash_at)| publishers(handle, crash_at),
        |handle, (run, crash_at)| {
            let policy = if run.is_multiple_of(2) { Policy::Every } else { Policy::Latest };
            followers(handle, crash_at, policy)
        },
    );
}

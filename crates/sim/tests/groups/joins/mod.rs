//! Groups that ranks leave and rejoin, in many worlds: newcomers wait to be admitted, processes die and are restarted,
//! connections break, and the store fails for some time or forever, so that some of its calls may or may not have been
//! made.
//!
//! All ranks of a generation agree on its members. No call takes longer than documented. Without faults, no call fails.
//! Once faults have ended, newcomers rejoin a new group of the living processes.

mod life;
mod outage;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::future::join;
use life::Life;
use outage::FailingStore;
use tensorwire_collective::{Group, GroupBuilder};
use tensorwire_fabric::Runtime;
use tensorwire_sim::{Disturbance, Failure, Handle, Plan, Rng};

use super::{
    Ended, Run, SEEDS, SEEN, Setup, arrange, each_seed, in_world,
    rank::{LIMIT, Rank},
};
use crate::join_all::join_all;

/// The limit of calls that must succeed, in worlds in which each byte of a message may be delayed by itself.
const CALM_LIMIT: Duration = Duration::from_secs(60);

/// How often a process that has died is started again.
const STARTS: u32 = 2;

/// What the scenario knows of all processes.
#[derive(Debug, Default)]
struct Known {
    /// Whether some rank has completed its work: a process that rejoins after that may find no rank.
    is_done: bool,
    reached: Reached,
}

/// Cases that some seed must reach, because otherwise the scenario tests too little, and cases that few reach.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Reached {
    joined: u64,
    closed: u64,
    admitted: u64,
    grown: u64,
    shrunk: u64,
    left_out: u64,
    no_majority: u64,
    not_admitted: u64,
    without_store: u64,
    restarted: u64,
}

impl Reached {
    fn counts(&mut self) -> [&mut u64; 10] {
        let Self { joined, closed, admitted, grown, shrunk, .. } = self;
        let Self { left_out, no_majority, not_admitted, without_store, restarted, .. } = self;
        [
            joined,
            closed,
            admitted,
            grown,
            shrunk,
            not_admitted,
            without_store,
            restarted,
            left_out,
            no_majority,
        ]
    }

    fn add(&mut self, mut other: Self) {
        self.counts().into_iter().zip(other.counts()).for_each(|(sum, count)| *sum += *count);
    }
}

/// Shared by all processes.
#[derive(Debug, Clone)]
struct Scene {
    run: Run,
    store: Arc<FailingStore>,
    known: Arc<Mutex<Known>>,
    /// Whether there are faults.
    is_disturbed: bool,
}

impl Scene {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap()
    }

    fn builder(&self, name: &str, rank: usize, size: usize) -> GroupBuilder {
        Group::builder(self.store.clone(), rank, size).name(name).timeout(LIMIT)
    }
}

fn run(seed: u64, plan: Option<&Plan>) -> Result<Ended<Reached>, Box<Failure>> {
    in_world("groups::joins", seed, |handle| scenario(handle, plan))
}

/// Returns the cases that the ranks have reached.
async fn scenario(handle: Handle, given: Option<&Plan>) -> Reached {
    let mut rng = Rng::new(handle.seed()).fork(92);
    let first = 1 + rng.below(4);
    let size = first + 1 + rng.below(2);
    let setup = Setup {
        ranks: size,
        hosts: rng.pick([0, 1, 2]),
        depth: rng.pick([4, 64]),
        requests_max: rng.pick([256, 1024]),
        eager_bytes_max: rng.pick([0, 4096]),
        receive_bytes: 2 << 20,
        impatience_of_64: 0,
    };
    let run = Run::new(handle.clone(), setup);
    run.handle.take_chances();
    let store = FailingStore::new(&run.store, &handle, rng.fork(1));
    let ranks = run.start().await;

    let plan = &run.plan(given, &mut rng);
    let outage = rng.chance(1, 3).then(|| FailingStore::draw_outage(&mut rng));
    let is_disturbed = outage.is_some() || !plan.entries.is_empty();
    let scene = Scene { run, store, known: Arc::default(), is_disturbed };
    let joining = ranks[..first].iter().map(async |rank| {
        let life = Life::of(&scene, rank);
        life.join("ranks", rank.index, first).await
    });
    let groups = join_all(joining).await;
    if let Some(outage) = outage {
        scene.store.fail_during(outage);
    }
    arrange(&scene.run, &ranks, plan);
    let restarts = plan.entries.iter().any(|entry| matches!(entry.what, Disturbance::Crash(..)));
    let groups = groups.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
    let lives = ranks.into_iter().zip(groups).map(|(rank, group)| {
        let rng = rng.fork(rank.index as u64);
        live(&scene, rank, group, restarts, rng)
    });
    let left = join_all(lives.collect::<Vec<_>>()).await;

    scene.run.handle.heal();
    scene.store.heal();
    scene.run.handle.runtime().sleep(SEEN).await;
    *scene.run.truth() = super::Truth::default();
    let left: Vec<Rank> = left.into_iter().flatten().filter(|rank| rank.node.is_alive()).collect();
    calm(&scene, &left).await;
    join_all(left.iter().map(Rank::stop)).await;
    scene.known().reached
}

/// Runs one process, which is started again if it dies. Returns the last one.
async fn live(
    scene: &Scene,
    mut rank: Rank,
    mut group: Option<Group>,
    restarts: bool,
    mut rng: Rng,
) -> Option<Rank> {
    for _ in 0..STARTS {
        let life = Life::of(scene, &rank);
        let living = life.live(group.take(), rng.fork(0));
        if rank.node.run("rank", living).await.is_some() {
            return Some(rank);
        }
        if !restarts || !rng.chance(2, 3) {
            return None;
        }
        let pause = Duration::from_millis(rng.pick([0, 50, 1000, 12_000]));
        scene.run.handle.runtime().sleep(pause).await;
        rank = Rank::start(&scene.run, rank.index).await;
        rng = rng.fork(1);
        scene.known().reached.restarted += 1;
    }
    Some(rank)
}

/// Forms a group of all living processes: half of them join, and the others rejoin.
async fn calm(scene: &Scene, left: &[Rank]) {
    let first = left.len().div_ceil(2);
    let (joining, coming) = left.split_at(first);
    let joined = joining.iter().enumerate().map(async |(at, rank)| {
        let life = Life::of(scene, rank);
        let group = life.join("calm", at, first).await;
        while group.waiting().await.unwrap() < coming.len() {
            rank.worker.runtime().sleep(Duration::from_millis(5)).await;
        }
        group.admit().await.unwrap()
    });
    let come = coming.iter().map(async |rank| {
        // The store has a run to rejoin only once rank 0 has begun it.
        scene.builder("calm", 0, 1).timeout(CALM_LIMIT).rejoin(&rank.worker).await.unwrap()
    });
    let (joined, come) = join(join_all(joined.collect::<Vec<_>>()), join_all(come.collect::<Vec<_>>())).await;
    let groups: Vec<Group> = joined.into_iter().chain(come).collect();
    let members: BTreeSet<Vec<String>> =
        groups.iter().map(|group| group.members().map(str::to_owned).collect()).collect();
    assert_eq!(members.len(), 1, "{members:?}");
    assert!(groups.iter().all(|group| group.size() == left.len()), "{groups:?}");
    join_all(groups.iter().map(async |group| group.clone().close().await.unwrap())).await;
}

#[test]
fn groups_that_grow_and_shrink_keep_every_promise_twice() {
    each_seed(
        SEEDS,
        run,
        |reached: &mut Reached, (_, ended)| reached.add(*ended),
        |reached| {
            let [most @ .., _left_out, _no_majority] = reached.counts();
            most.into_iter().all(|count| *count > 0)
        },
    );
}

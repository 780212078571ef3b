//! Groups in many worlds: random calls of all kinds, while connections break, processes die and calls are cancelled.
//! Messages between two ranks are in `pairs`, and newcomers in `joins`.
//!
//! Every call ends in bounded time, with the right result or an error that has a reason. The remaining ranks shrink
//! their group, agree on its members, and get right results again. Once faults have ended, a new group of all processes
//! works. At the end no memory is in use.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_FROM=7` begins with that one, `SIM_SEED=7` runs one and prints its settings, with `SIM_PLAN="0@512 crash 1 0us"` under these
//! faults instead of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod calls;
mod joins;
mod pairs;
mod rank;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use rank::Rank;
use tensorwire_collective::store::MemoryStore;
use tensorwire_fabric::{Fabric, FabricKind, Runtime};
use tensorwire_sim::{Call as Step, Disturbance, Entry, Failure, Handle, Node, Plan, Rng, Summary, World};

use crate::{
    figures::{for_each_below, number},
    join_all::join_all,
    points::in_source,
    shrunk::shrunk_by,
};

/// Seeds that run if `SIM_SEEDS` is not set.
const SEEDS: u64 = 60;

/// After this time, all processes have noticed the losses.
const SEEN: Duration = Duration::from_secs(5);

/// Settings that the seed draws for all ranks.
#[derive(Debug)]
struct Setup {
    ranks: usize,
    /// The number of hosts. With 0, ranks share no memory.
    hosts: usize,
    depth: u32,
    requests_max: u32,
    eager_bytes_max: u32,
    receive_bytes: u64,
    /// How often of 64 times a rank cancels the calls that it makes.
    impatience_of_64: u32,
}

impl Setup {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            ranks: 2 + rng.below(4),
            hosts: rng.pick([0, 1, 2, 3]),
            depth: rng.pick([4, 6, 64]),
            requests_max: rng.pick([256, 1024, 1024]),
            eager_bytes_max: rng.pick([0, 64, 4096]),
            receive_bytes: rng.pick([2 << 20, 8 << 20]),
            impatience_of_64: rng.pick([0, 0, 2]),
        }
    }

    /// The fabrics of a rank. Between hosts it uses the second one.
    fn fabrics(&self, node: &Node, rank: usize) -> Vec<Arc<dyn Fabric>> {
        let within = rank.checked_rem(self.hosts).map(|host| node.fabric_on_host(FabricKind::SHM, host));
        let between = (self.hosts != 1).then(|| node.fabric());
        within.into_iter().chain(between).map(|fabric| fabric as Arc<dyn Fabric>).collect()
    }
}

/// What the scenario knows.
#[derive(Debug, Default)]
struct Truth {
    /// The workers that are the ranks of each generation.
    members: BTreeMap<u64, Vec<String>>,
    sizes: BTreeMap<u64, usize>,
    /// Generations in which a rank has cancelled a call.
    given_up: BTreeSet<u64>,
    /// Processes that are stopped for some time.
    stopped: BTreeSet<usize>,
    /// Whether connections between two ranks are broken. It reaches all other ranks, so it excuses more than calls of
    /// these two.
    are_links_broken: bool,
}

impl Truth {
    /// Whether a call may fail although no fault affects the process of any rank.
    fn is_excused(&self) -> bool {
        self.are_links_broken || !self.given_up.is_empty()
    }
}

/// Shared by all ranks.
#[derive(Debug, Clone)]
struct Run {
    handle: Handle,
    setup: Arc<Setup>,
    store: Arc<MemoryStore>,
    truth: Arc<Mutex<Truth>>,
}

impl Run {
    fn new(handle: Handle, setup: Setup) -> Self {
        if number("SIM_SEED").is_some() {
            eprintln!("{setup:?}");
        }
        let store = Arc::new(MemoryStore::new(handle.runtime()));
        Self { handle, setup: Arc::new(setup), store, truth: Arc::default() }
    }

    /// Starts all ranks.
    async fn start(&self) -> Vec<Rank> {
        join_all((0..self.setup.ranks).map(|index| Rank::start(self, index))).await
    }

    /// The given faults, or those of the seed, which draws some in any case. The report of a failure shows them.
    fn plan(&self, given: Option<&Plan>, rng: &mut Rng) -> Plan {
        let drawn = Plan { entries: faults(self.setup.ranks, rng) };
        let plan = given.cloned().unwrap_or(drawn);
        self.handle.note_plan(&plan, given.is_some());
        plan
    }

    fn truth(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap()
    }
}

fn run(seed: u64, plan: Option<&Plan>) -> Result<Ended<Vec<usize>>, Box<Failure>> {
    in_world("groups", seed, |handle| scenario(handle, plan))
}

/// How a run ended, and the result of its scenario.
type Ended<T> = (Summary, T);

/// Runs a scenario that the test called `name` replays.
fn in_world<T, Running: Future<Output = T>>(
    name: &'static str,
    seed: u64,
    scenario: impl FnOnce(Handle) -> Running,
) -> Result<Ended<T>, Box<Failure>> {
    let world = World::new(seed);
    world.replayed_by(name);
    let told = world.run(scenario(world.handle()))?;
    Ok((world.finish()?, told))
}

/// Returns the number of ranks of each generation.
async fn scenario(handle: Handle, given: Option<&Plan>) -> Vec<usize> {
    let mut rng = Rng::new(handle.seed()).fork(90);
    let run = Run::new(handle, Setup::draw(&mut rng));
    run.handle.take_chances();
    let ranks = run.start().await;
    let size = ranks.len();
    let groups = join_all(ranks.iter().map(|rank| rank.join("ranks", rank.index, size))).await;

    let plan = &run.plan(given, &mut rng);
    arrange(&run, &ranks, plan);
    let lives = ranks.iter().zip(groups).map(|(rank, group)| {
        let life = rank.clone().live(group, rng.fork(rank.index as u64));
        rank.node.run("rank", life)
    });
    join_all(lives.collect::<Vec<_>>()).await;

    // Ranks that still have a group do not use it any more. From here on everything must succeed.
    run.handle.heal();
    run.handle.runtime().sleep(SEEN).await;
    let left: Vec<Rank> = ranks.into_iter().filter(|rank| rank.node.is_alive()).collect();
    calm(&run, &left, &mut rng).await;
    join_all(left.iter().map(Rank::stop)).await;
    std::mem::take(&mut run.truth().sizes).into_values().collect()
}

/// Forms a new group of all living processes.
async fn calm(run: &Run, left: &[Rank], rng: &mut Rng) {
    // Earlier cancellations and stops explain nothing any more.
    let sizes = std::mem::take(&mut *run.truth()).sizes;
    run.truth().sizes = sizes;
    let (size, calls) = (left.len(), 6);
    let salt = rng.next_u64();
    let lives = left.iter().enumerate().map(async |(at, rank)| {
        let group = rank.join("calm", at, size).await;
        let mut drawn = Rng::new(salt);
        for _ in 0..calls {
            let call = calls::Call::draw(&mut drawn, size, group.hosts().len() == 1);
            call.make(&run.handle, &group).await.unwrap_or_else(|error| panic!("{call:?}: {error}"));
        }
        group.close().await.unwrap();
    });
    join_all(lives).await;
}

fn arrange(run: &Run, ranks: &[Rank], plan: &Plan) {
    let ids: Vec<_> = ranks.iter().map(|rank| rank.node.id()).collect();
    for entry in &plan.entries {
        match entry.what {
            Disturbance::Pause(place, _) => drop(run.truth().stopped.insert(place)),
            Disturbance::LoseLink(..) | Disturbance::LoseControl(..) | Disturbance::HalfOpen(..) => {
                run.truth().are_links_broken = true;
            }
            _ => {}
        }
        run.handle.arrange(entry, &ids);
    }
}

/// The faults of the ranks, which are not restarted.
fn faults(size: usize, rng: &mut Rng) -> Vec<Entry> {
    let mut entries = Vec::new();
    for _ in 0..rng.pick([0, 1, 1, 2, 3]) {
        let one = rng.below(size);
        let other = (one + 1 + rng.below(size - 1)) % size;
        let call = rng.pick([Step::Register, Step::Prepare, Step::Post, Step::Allocate]);
        let longest = Duration::from_millis(rng.pick([2, 200, 20_000]));
        let length = Duration::from_micros(rng.duration(longest).as_micros() as u64);
        let successes = rng.below(60) as u64;
        let what = rng.pick([
            Disturbance::Crash(one, Duration::ZERO),
            Disturbance::Crash(one, Duration::ZERO),
            Disturbance::LoseLink(one, other),
            Disturbance::LoseControl(one, other),
            Disturbance::HalfOpen(one, other),
            Disturbance::Slow(one),
            Disturbance::Pause(one, length),
            Disturbance::Fail(one, call, successes),
        ]);
        let is_at_once = matches!(what, Disturbance::Slow(_) | Disturbance::Fail(..));
        let after = if is_at_once { 0 } else { 1 + rng.below(6000) as u64 };
        entries.push(Entry { round: 0, after, what });
    }
    entries
}

/// The plan that the environment gives, to run instead of the drawn one.
fn plan_given() -> Option<Plan> {
    let text = std::env::var("SIM_PLAN").ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("SIM_PLAN: {error}")))
}

/// Runs one seed twice.
fn check<T: fmt::Debug + PartialEq>(seed: u64, run: Running<T>) -> Result<Ended<T>, Box<Failure>> {
    let again = |plan: &Plan| run(seed, Some(plan)).err();
    let first = run(seed, None).map_err(|failure| shrunk_by(failure, again).failure)?;
    assert_eq!(first, run(seed, None)?, "seed {seed} gave two different runs");
    assert_eq!(first.0.leaks, 0, "seed {seed}");
    Ok(first)
}

/// Runs a seed, with the given plan instead of its own.
type Running<T> = fn(u64, Option<&Plan>) -> Result<Ended<T>, Box<Failure>>;

/// Maximum factor by which the number of seeds grows if they have not reached all cases. A few seeds may miss a rare
/// case by chance, and each commit begins with other seeds.
const TRIES: u64 = 16;

/// Runs the seeds that the environment names, or the first `seeds` and as many again until they have reached all cases,
/// and adds up their results. Fewer seeds than `seeds` need not reach any case.
fn each_seed<T: fmt::Debug + PartialEq, R: fmt::Debug + Default + Send>(
    seeds: u64,
    run: Running<T>,
    add: impl Fn(&mut R, &Ended<T>) + Sync,
    is_all: impl Fn(&mut R) -> bool,
) {
    if let Some(seed) = number("SIM_SEED") {
        eprintln!(
            "{:?}",
            plan_given().map_or_else(|| check(seed, run), |plan| run(seed, Some(&plan))).unwrap()
        );
        return;
    }
    let (from, given) = (number("SIM_FROM").unwrap_or_default(), number("SIM_SEEDS").unwrap_or(seeds));
    let reached = Mutex::new(R::default());
    for at in 0..TRIES {
        let from = from.wrapping_add(at * given);
        for_each_below(given, |index| {
            let ended = check(from.wrapping_add(index), run).unwrap();
            add(&mut reached.lock().unwrap(), &ended);
        });
        let mut reached = reached.lock().unwrap();
        eprintln!("{given} seeds from {from}, twice each: {reached:?}");
        if given < seeds || is_all(&mut reached) {
            return;
        }
    }
    panic!("{} seeds did not reach what some must reach: {reached:?}", TRIES * given);
}

/// Cases that some seed must reach, because otherwise the scenario tests too little.
#[derive(Debug, Default)]
struct Reached {
    calls: u64,
    failed: u64,
    crashes: u64,
    /// Runs in which a group shrank, and runs in which it lost ranks by that.
    shrank: u64,
    lost: u64,
    marks: BTreeMap<&'static str, u64>,
}

impl Reached {
    fn add(&mut self, (summary, sizes): &(Summary, Vec<usize>)) {
        self.calls += summary.operations_done;
        self.failed += summary.operations_failed;
        self.crashes += summary.crashes;
        self.shrank += u64::from(sizes.len() > 1);
        self.lost += u64::from(sizes.windows(2).any(|sizes| sizes[1] < sizes[0]));
        summary.marks.iter().for_each(|(mark, count)| *self.marks.entry(mark).or_default() += count);
    }

    fn is_all(&self) -> bool {
        let Self { calls, failed, crashes, shrank, lost, marks } = self;
        let points = ["chance", "mark"].into_iter().flat_map(in_source);
        let points = points.filter(|point| point.is_of_groups() && !point.is_of_pairs());
        [calls, failed, crashes, shrank, lost].into_iter().all(|count| *count > 0)
            && points.into_iter().all(|point| marks.contains_key(point.name.as_str()))
            && marks.contains_key("a peer ran in the middle of a poll")
    }
}

#[test]
fn every_group_keeps_every_promise_twice() {
    each_seed(SEEDS, run, Reached::add, |reached| reached.is_all());
}

/// Calls in progress together stopped: a message in line belonged to a receive that its call does not poll while it
/// sends.
#[test]
fn calls_under_way_together_do_not_wait_for_a_receive_that_is_not_polled() {
    run(378, Some(&Plan { entries: Vec::new() })).unwrap();
}

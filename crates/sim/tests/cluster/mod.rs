//! A whole cluster of workers in one world: they publish, fetch, send and receive while one of them crashes.
//!
//! Every content names its owner, every operation is in the ledger, and the scenario gives the oracles only what was
//! published and sent. It looks for no bug in particular.
//!
//! Two phases: *safety*, in which the faults of a [`Plan`] happen, and *liveness*, from the plan's end on or its `heal`,
//! in which everything under way must end within a bound (L1) and all new work succeed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

mod crowd;
mod faults;
mod kinds;
mod many;
mod member;
mod traffic;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::future::join;
pub(crate) use kinds::{Kind, Kinds};
use member::{Member, Setup, name};
use tensorwire_fabric::Runtime;
use tensorwire_sim::{
    Bounds, Disturbance, Entry, Failure, Handle, Node, Plan, Rng, Summary, Violation, World,
};

use crate::join_all::join_all;

/// Transfers that each run must have, at least.
pub(crate) const TRANSFERS_MIN: u64 = 200;

/// Workers that each run must have, at least.
pub(crate) const WORKERS_MIN: usize = 3;

/// The figures of one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) summary: Summary,
    pub(crate) workers: usize,
    /// Tensors that arrived whole, by fetches and receives that succeeded.
    pub(crate) transfers: u64,
    /// Of which kinds they were.
    pub(crate) kinds: Kinds,
}

/// What the scenario knows to be true.
#[derive(Debug)]
struct Truth {
    /// Transfers by number: their lengths.
    lengths: Vec<usize>,
    /// By worker and name: what was published there, oldest first.
    published: Vec<Vec<Vec<u64>>>,
    /// By worker: its present incarnation.
    incarnations: Vec<u64>,
    /// When the round began, and its steps.
    round_began: Duration,
    /// Fetches and receives that succeeded.
    transfers: u64,
    /// Their kinds, as far as the scenario knows.
    kinds: Kinds,
}

/// Shared by all tasks of a run.
#[derive(Debug, Clone)]
struct Run {
    handle: Handle,
    setup: Arc<Setup>,
    truth: Arc<Mutex<Truth>>,
}

impl Run {
    fn truth(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap()
    }

    /// Counts a transfer of this kind.
    fn count(&self, kind: Kind) {
        *self.truth().kinds.entry(kind).or_default() += 1;
    }

    /// A new transfer of `length` bytes.
    fn new_transfer(&self, length: usize) -> u64 {
        let mut truth = self.truth();
        truth.lengths.push(length);
        truth.lengths.len() as u64 - 1
    }
}

/// How long operations may take. The longest deadline of a worker is that of an operation, 60 s; a peer that stopped
/// answering is noticed after 33 s at most.
const BOUNDS: Bounds = Bounds {
    after_faults: Duration::from_secs(65),
    new_work: Duration::from_secs(15),
    after_death: Duration::from_secs(35),
};

/// L3: the bound of all workers' shutdowns, with the time for late packets afterwards.
const END_MAX: Duration = Duration::from_secs(6);

/// Runs the scenario of `seed` once.
pub(crate) fn run_seed(seed: u64) -> Result<Report, Box<Failure>> {
    run_planned(seed, None)
}

/// As [`run_seed`], with this many rounds of faults, which show small leaks.
pub(crate) fn run_long(seed: u64, rounds: u32) -> Result<Report, Box<Failure>> {
    run(seed, None, Some(rounds))
}

/// As [`run_seed`], with the faults of `plan` instead of those that the seed draws.
pub(crate) fn run_planned(seed: u64, plan: Option<&Plan>) -> Result<Report, Box<Failure>> {
    run(seed, plan.cloned(), None)
}

fn run(seed: u64, plan: Option<Plan>, rounds: Option<u32>) -> Result<Report, Box<Failure>> {
    let world = World::new(seed);
    let ended = world.run(scenario(world.handle(), plan, rounds))?;
    let (workers, transfers, kinds) = ended;
    Ok(Report { summary: world.finish()?, workers, transfers, kinds })
}

/// The sequence of random numbers that decides about checksums and flipped bits.
const CHECKSUMS: u64 = 78;

/// The one that decides which workers trust their peers.
const TRUST: u64 = 79;

/// The one that decides when faults end.
const HEALING: u64 = 80;

/// The one that decides the settings of each worker.
const WORKERS: u64 = 81;

/// The ones that decide about crowds, one for each round.
const CROWDS: u64 = 82;

/// Rounds without faults in which every kind of transfer must have come.
const CALM_ROUNDS_MAX: i64 = 12;

/// Returns the number of workers, the number of transfers, and the transfers by kind.
async fn scenario(handle: Handle, given: Option<Plan>, rounds: Option<u32>) -> (usize, u64, Kinds) {
    // A sequence of its own, so that the operations depend on the seed alone, and not on the schedule.
    let mut rng = Rng::new(handle.seed()).fork(77);
    let seed = handle.seed();
    let sequence = |number| Rng::new(seed).fork(number);
    let own = [CHECKSUMS, TRUST, WORKERS].map(sequence);
    let setup = Arc::new(Setup::draw(&mut rng, own));
    let published = vec![vec![Vec::new(); member::NAMES]; setup.workers];
    let incarnations = vec![0; setup.workers];
    let (lengths, kinds) = (Vec::new(), Kinds::new());
    let truth = Truth { lengths, published, incarnations, round_began: Duration::ZERO, transfers: 0, kinds };
    let run = Run { handle, setup, truth: Arc::new(Mutex::new(truth)) };
    run.handle.take_chances();
    run.handle.bound(BOUNDS);
    let mut members = join_all((0..run.setup.workers).map(|index| Member::start(&run, index))).await;

    let rounds = rounds.unwrap_or(1 + rng.below(2) as u32);
    let mut faults = faults::Faults::new(&run, given, rounds, sequence(HEALING));
    for round in 0..rounds {
        let entries = faults.of_round(round, &mut rng);
        faulty_round(&run, &mut members, round, &entries, &mut rng).await;
    }
    // From here on everything must succeed, once all workers have noticed the losses.
    run.handle.heal();
    run.handle.runtime().sleep(Duration::from_secs(5)).await;
    let mut round = i64::from(rounds);
    let last = round + CALM_ROUNDS_MAX;
    while round == i64::from(rounds) || round < last && !has_all(&run) {
        traffic::round(&run, &members, round, &mut rng).await;
        round += 1;
    }
    rest(&run, &members).await;
    stop(&run, &members).await;
    let transfers = run.truth().transfers;
    (members.len(), transfers, kinds::counted(&run))
}

/// Whether there were enough transfers, and some of each kind.
fn has_all(run: &Run) -> bool {
    let transfers = run.truth().transfers;
    transfers >= TRANSFERS_MIN && kinds::are_complete(run)
}

/// Longer than the default liveness bound, within which a silent peer counts as lost.
const REST: Duration = Duration::from_secs(35);

/// Lets all workers idle, and checks that connections stay.
async fn rest(run: &Run, members: &[Member]) {
    let before: Vec<_> = members.iter().map(Member::connected).collect();
    run.handle.runtime().sleep(REST).await;
    members.iter().for_each(Member::check_idle);
    for (member, before) in members.iter().zip(before) {
        let after = member.connected();
        if let Some(lost) = before.iter().find(|name| !after.contains(name)) {
            let what = format!("{} lost {lost} within {REST:?} without work and faults", name(member.index));
            run.handle.fail(Violation::Unexplained(what));
        }
    }
}

/// L3: every worker's end has a bound.
async fn stop(run: &Run, members: &[Member]) {
    let began = run.handle.now();
    join_all(members.iter().map(Member::stop)).await;
    let took = run.handle.now() - began;
    if took > END_MAX {
        let what = format!("the end of all workers took {took:?}, and {END_MAX:?} is the most");
        run.handle.fail(Violation::Late { promise: "L3", what });
    }
}

/// Runs traffic during which faults happen. A worker that crashes is started again at the same address.
async fn faulty_round(run: &Run, members: &mut [Member], round: u32, entries: &[Entry], rng: &mut Rng) {
    let nodes: Vec<Node> = members.iter().map(|member| member.node.clone()).collect();
    let ids: Vec<_> = nodes.iter().map(Node::id).collect();
    entries.iter().for_each(|entry| run.handle.arrange(entry, &ids));
    let mut crashes = BTreeMap::new();
    for entry in entries {
        if let Disturbance::Crash(place, pause) = entry.what
            && place < members.len()
        {
            crashes.entry(place).or_insert(pause);
        }
    }
    let restarts = crashes.iter().map(|(place, pause)| {
        let victim = &nodes[*place];
        async move {
            victim.crashed().await;
            run.handle.runtime().sleep(*pause).await;
            (*place, Member::start(run, *place).await)
        }
    });
    let traffic = async {
        traffic::round(run, members, round.into(), rng).await;
        // If the traffic ended before the crash.
        crashes.keys().for_each(|place| nodes[*place].crash());
    };
    let (restarted, ()) = join(join_all(restarts), traffic).await;
    for (place, member) in restarted {
        members[place] = member;
    }
}

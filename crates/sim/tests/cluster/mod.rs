//! A whole cluster of workers in one world: they publish, fetch, send and receive while one of them crashes.
//!
//! Every content tells whose it is, every operation is in the ledger, and the scenario gives the oracles nothing
//! but the truth: what was published and sent. It knows no bug in particular.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

mod member;
mod traffic;

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::future::{join, join_all};
use member::{Member, Setup};
use sim::{Call, Failure, Fault, Handle, Node, Rng, Summary, World};
use verbs_reactor::Runtime;

/// Transfers that each run must have, at least.
pub(crate) const TRANSFERS_MIN: u64 = 200;

/// Workers that each run must have, at least.
pub(crate) const WORKERS_MIN: usize = 3;

/// What one run came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) summary: Summary,
    pub(crate) workers: usize,
    /// Tensors that came whole: fetches and receives that ended well.
    pub(crate) transfers: u64,
}

/// What the scenario knows to be true.
#[derive(Debug)]
struct Truth {
    /// Transfers by number: their lengths.
    lengths: Vec<usize>,
    /// By worker and name: what was published there, oldest first.
    published: Vec<Vec<Vec<u64>>>,
    /// By worker: its present life.
    incarnations: Vec<u64>,
    /// Fetches and receives that ended well.
    transfers: u64,
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

    /// A new transfer of `length` bytes.
    fn new_transfer(&self, length: usize) -> u64 {
        let mut truth = self.truth();
        truth.lengths.push(length);
        truth.lengths.len() as u64 - 1
    }
}

/// Runs the scenario of `seed` once.
pub(crate) fn run_seed(seed: u64) -> Result<Report, Box<Failure>> {
    let world = World::new(seed);
    let handle = world.handle();
    let (workers, transfers) = world.run(scenario(handle))?;
    Ok(Report { summary: world.finish()?, workers, transfers })
}

/// The sequence of random numbers that decides about checksums and flipped bits.
const CHECKSUMS: u64 = 78;

/// The one that decides which workers trust their peers.
const TRUST: u64 = 79;

/// Gives the number of workers and of transfers.
async fn scenario(handle: Handle) -> (usize, u64) {
    // A sequence of its own: what is done is a function of the seed alone, not of the schedule.
    let mut rng = Rng::new(handle.seed()).fork(77);
    let sequence = |number| Rng::new(handle.seed()).fork(number);
    let setup = Arc::new(Setup::draw(&mut rng, &mut sequence(CHECKSUMS), &mut sequence(TRUST)));
    let published = vec![vec![Vec::new(); member::NAMES]; setup.workers];
    let incarnations = vec![0; setup.workers];
    let truth = Truth { lengths: Vec::new(), published, incarnations, transfers: 0 };
    let run = Run { handle, setup, truth: Arc::new(Mutex::new(truth)) };
    run.handle.take_chances();
    let mut members = join_all((0..run.setup.workers).map(|index| Member::start(&run, index))).await;

    run.handle.flip_bits(run.setup.flips_of_65536);
    let rounds = 1 + rng.below(2) as i64;
    for round in 0..rounds {
        faulty_round(&run, &mut members, round, &mut rng).await;
    }
    // Faults are over and everyone has seen them: from here on everything must succeed.
    run.handle.heal();
    run.handle.runtime().sleep(Duration::from_secs(5)).await;
    let mut round = rounds;
    while round == rounds || run.truth().transfers < TRANSFERS_MIN {
        traffic::round(&run, &members, round, &mut rng).await;
        round += 1;
    }
    join_all(members.iter().map(Member::stop)).await;
    let transfers = run.truth().transfers;
    (members.len(), transfers)
}

/// Traffic during which faults happen: a crash in the first round, at a random event of it and followed by a
/// restart at the same address; now and then another one, or any other fault.
async fn faulty_round(run: &Run, members: &mut [Member], round: i64, rng: &mut Rng) {
    let index = rng.below(members.len());
    let victim = members[index].node.clone();
    let other = members[(index + 1 + rng.below(members.len() - 1)) % members.len()].node.clone();
    plan_faults(run, &victim, &other, rng);
    let crashes = round == 0 || rng.chance(1, 3);
    if !crashes {
        return traffic::round(run, members, round, rng).await;
    }
    run.handle.inject_at_event(soon(rng), Fault::Crash(victim.id()));
    let pause = rng.duration(Duration::from_millis(50));
    let restart = async {
        victim.crashed().await;
        run.handle.runtime().sleep(pause).await;
        Member::start(run, index).await
    };
    let traffic = async {
        traffic::round(run, members, round, rng).await;
        // In case that the traffic was over sooner.
        victim.crash();
    };
    let (restarted, ()) = join(restart, traffic).await;
    members[index] = restarted;
}

/// In how many events a fault comes.
fn soon(rng: &mut Rng) -> u64 {
    50 + rng.below(3000) as u64
}

/// Faults of this round besides a crash.
fn plan_faults(run: &Run, victim: &Node, other: &Node, rng: &mut Rng) {
    let (victim, other) = (victim.id(), other.id());
    if rng.chance(1, 3) {
        run.handle.inject_at_event(soon(rng), Fault::LoseLink(victim, other));
    }
    if rng.chance(1, 4) {
        run.handle.inject_at_event(soon(rng), Fault::LoseControl(victim, other));
    }
    if rng.chance(1, 4) {
        run.handle.inject_at_event(soon(rng), Fault::HalfOpen(victim, other));
        run.handle.inject_at_event(soon(rng), Fault::LoseLink(victim, other));
    }
    if rng.chance(1, 3) {
        run.handle.inject(Fault::Slow(other));
    }
    if rng.chance(1, 4) {
        let call = rng.pick([Call::Register, Call::Prepare, Call::Post, Call::Allocate]);
        let successes = match call {
            Call::Post => rng.below(300),
            Call::Allocate => rng.below(100),
            _ => rng.below(4),
        };
        run.handle.fail_call(other, call, successes as u64);
    }
    if rng.chance(1, 2) {
        // A stop that nobody notices, one that outlasts connecting, and one that outlasts every deadline.
        let longest = rng.pick([50, 40_000, 15_000_000, 90_000_000]);
        let length = rng.duration(Duration::from_micros(longest));
        run.handle.inject_at_event(soon(rng), Fault::Pause(other, length));
    }
}

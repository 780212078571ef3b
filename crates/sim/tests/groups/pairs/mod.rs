//! Messages between two ranks, in many worlds: tagged messages, buffers of a slot, and memory that is read and written
//! by a key, while connections break, processes die or stop, and waits are aborted, dropped or run out of their limits.
//!
//! Every wait ends within its limit, with the right content or an error that has a reason in its own pair of ranks.
//! Each message is received once and in order; a message with a receipt was received; without faults of two ranks, no
//! wait between them lasts until its limit. Once faults have ended, a new group of all processes does the same without
//! any error, and a flood of one rank delays no other rank.

mod exports;
mod flood;
mod life;
mod slots;
mod tags;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::join;
use life::Life;
use tensorwire_collective::Group;
use tensorwire_fabric::Runtime;
use tensorwire_sim::{Disturbance, Failure, Handle, Plan, Rng};

use super::{Ended, Run, SEEN, Setup, arrange, each_seed, in_world, rank::Rank};
use crate::{
    join_all::join_all,
    points::{Point, in_source},
};

/// Seeds that run if `SIM_SEEDS` is not set.
const SEEDS: u64 = 20;

/// In how many of 8 runs a rank ends the group.
const ENDED_OF_8: u32 = 1;

/// What each rank has seen.
#[derive(Debug, Default)]
struct Books {
    /// The received messages of each sender, receiver and tag.
    handed: BTreeMap<(usize, usize, u64), BTreeSet<u32>>,
    /// The number of receipts of each sender, receiver and tag.
    acknowledged: BTreeMap<(usize, usize, u64), usize>,
    /// The numbers of acknowledged sends and of waits of each sender, receiver and round of a slot.
    landed: BTreeMap<(usize, usize, u32), (usize, usize)>,
    /// When processes were found dead.
    deaths: BTreeMap<usize, Duration>,
    reached: Reached,
}

/// Cases that some seed must reach, because otherwise the scenario tests too little.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Reached {
    received: u64,
    from_several: u64,
    acknowledged: u64,
    landed: u64,
    written: u64,
    read: u64,
    aborted: u64,
    dropped: u64,
    brief: u64,
    lost: u64,
    over: u64,
    gone: u64,
}

impl Reached {
    fn counts(&mut self) -> [&mut u64; 12] {
        let Self { received, from_several, acknowledged, landed, written, read, aborted, .. } = self;
        let Self { dropped, brief, lost, over, gone, .. } = self;
        [
            received,
            from_several,
            acknowledged,
            landed,
            written,
            read,
            aborted,
            dropped,
            brief,
            lost,
            over,
            gone,
        ]
    }

    fn add(&mut self, mut other: Self) {
        self.counts().into_iter().zip(other.counts()).for_each(|(sum, count)| *sum += *count);
    }
}

/// What the faults of a plan can affect.
#[derive(Debug, Default)]
struct Touched {
    processes: BTreeSet<usize>,
    pairs: BTreeSet<(usize, usize)>,
}

impl Touched {
    fn by(plan: &Plan) -> Self {
        let mut touched = Self::default();
        for entry in &plan.entries {
            match entry.what {
                Disturbance::LoseLink(one, other)
                | Disturbance::LoseControl(one, other)
                | Disturbance::HalfOpen(one, other) => {
                    touched.pairs.extend([(one, other), (other, one)]);
                }
                Disturbance::Crash(one, _)
                | Disturbance::Slow(one)
                | Disturbance::Pause(one, _)
                | Disturbance::Fail(one, ..) => {
                    touched.processes.insert(one);
                }
                _ => {}
            }
        }
        touched
    }

    fn has(&self, one: usize, other: usize) -> bool {
        self.processes.contains(&one) || self.processes.contains(&other) || self.pairs.contains(&(one, other))
    }
}

fn run(seed: u64, plan: Option<&Plan>) -> Result<Ended<Reached>, Box<Failure>> {
    in_world("groups::pairs", seed, |handle| scenario(handle, plan))
}

/// Returns the cases that the ranks have reached.
async fn scenario(handle: Handle, given: Option<&Plan>) -> Reached {
    let mut rng = Rng::new(handle.seed()).fork(91);
    let setup = Setup {
        ranks: 2 + rng.below(3),
        hosts: rng.pick([0, 1]),
        depth: rng.pick([4, 6, 64]),
        requests_max: rng.pick([256, 256, 1024]),
        eager_bytes_max: rng.pick([0, 64, 4096]),
        receive_bytes: rng.pick([2 << 20, 8 << 20]),
        impatience_of_64: rng.pick([0, 8]),
    };
    let run = Run::new(handle, setup);
    run.handle.take_chances();
    let ranks = run.start().await;
    let size = ranks.len();
    let groups = join_all(ranks.iter().map(|rank| rank.join("ranks", rank.index, size))).await;

    let plan = &run.plan(given, &mut rng);
    arrange(&run, &ranks, plan);
    let ends = rng.chance(ENDED_OF_8, 8).then(|| (rng.below(size), rng.duration(Duration::from_millis(20))));
    let reached = phase(&run, &ranks, groups, Some(plan), ends).await;

    run.handle.heal();
    run.handle.runtime().sleep(SEEN).await;
    *run.truth() = super::Truth::default();
    let left: Vec<Rank> = ranks.into_iter().filter(|rank| rank.node.is_alive()).collect();
    let joining = left.iter().enumerate().map(|(at, rank)| rank.join("calm", at, left.len()));
    let groups = join_all(joining.collect::<Vec<_>>()).await;
    let calm = phase(&run, &left, groups, None, None).await;
    assert_eq!((calm.lost, calm.over), (0, 0), "{calm:?}");
    join_all(left.iter().map(Rank::stop)).await;
    reached
}

/// Runs all ranks, under a plan if there is one. `ends` is the rank that ends the group, and when.
async fn phase(
    run: &Run,
    ranks: &[Rank],
    groups: Vec<Group>,
    plan: Option<&Plan>,
    ends: Option<(usize, Duration)>,
) -> Reached {
    let books: Arc<Mutex<Books>> = Arc::default();
    let members: Arc<Vec<usize>> = Arc::new(ranks.iter().map(|rank| rank.index).collect());
    let touched = Arc::new(plan.map(Touched::by).unwrap_or_default());
    let (begun, is_calm) = (run.handle.now(), plan.is_none());
    let lives = ranks.iter().zip(groups).map(|(rank, group)| {
        let life = Life {
            rank: rank.clone(),
            group,
            books: books.clone(),
            touched: touched.clone(),
            members: members.clone(),
            begun,
            is_calm,
        };
        let after = ends.filter(|(at, _)| *at == life.group.rank()).map(|(_, after)| after);
        let (books, index) = (books.clone(), rank.index);
        let living = rank.node.run("rank", life.live(after));
        async move {
            let group = living.await;
            if group.is_none() {
                books.lock().unwrap().deaths.insert(index, run.handle.now());
            }
            group
        }
    });
    // No rank leaves before all have finished.
    let groups = join_all(lives.collect::<Vec<_>>()).await;
    drop(groups);
    books.lock().unwrap().reached
}

impl Life {
    /// Does everything at the same time. Returns the group, because a rank that drops it leaves.
    async fn live(self, ends_after: Option<Duration>) -> Group {
        let size = self.group.size();
        let tags = join_all((0..size).map(|to| self.send_tagged(to)));
        let received = join_all(tags::TAGS.map(|tag| self.receive_tagged(tag)));
        let slots = join_all((0..size).map(|other| join(self.send_slot(other), self.receive_slot(other))));
        let exports = join(self.export(), join_all((0..size).map(|owner| self.use_export(owner))));
        let end = async {
            let Some(after) = ends_after else { return };
            self.rank.worker.runtime().sleep(after).await;
            self.rank.run.truth().given_up.insert(self.group.generation());
            drop(self.group.barrier());
        };
        futures::join!(tags, received, slots, exports, end);
        if self.is_calm {
            self.flood().await;
        }
        self.group
    }
}

/// A connection broke before its first value, and the receipts of its messages were counted for later messages.
#[test]
fn receipts_are_not_taken_for_those_of_messages_that_were_given_up() {
    let plan = "0@1 pause 0 12us, 0@1 lose-link 1 0".parse().unwrap();
    run(1064, Some(&plan)).unwrap();
}

/// A receive buffer was made while the one before it still received. The connection broke, and the new buffer received a message
/// of the earlier send buffer over the next connection.
#[test]
fn a_receive_buffer_receives_nothing_of_an_earlier_send_buffer_after_a_loss() {
    let plan = "0@0 fail 2 post 1".parse().unwrap();
    run(134, Some(&plan)).unwrap();
}

#[test]
fn pairs_keep_every_promise_twice() {
    each_seed(
        SEEDS,
        run,
        |(reached, marks): &mut (Reached, BTreeSet<&str>), (summary, ended)| {
            reached.add(*ended);
            marks.extend(summary.marks.keys());
        },
        |(reached, marks)| {
            let mut points = in_source("mark").into_iter().filter(Point::is_of_pairs);
            reached.counts().into_iter().all(|count| *count > 0)
                && points.all(|point| marks.contains(point.name.as_str()))
        },
    );
}

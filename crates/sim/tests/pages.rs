//! Workers read and write pages of each other's arenas, give transfers up, and use pages themselves, while links break, processes are slow,
//! stop or crash, and arenas are hidden and exposed again.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_FROM=7` begins with that one, `SIM_SEED=7` runs one and prints its figures.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod life;
mod model;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::{join, join3};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::Mode;
use tensorwire_rendezvous::WorkerBuilder;
#[cfg(feature = "planted-bugs")]
use tensorwire_sim::{Failure, Summary, World};
use tensorwire_sim::{Fault, Handle, Node, Rng};

use self::{life::Life, model::Model};
use crate::{common::builder, figures::every_seed_twice, join_all::join_all};

const SEEDS: u64 = 40;

fn name(worker: usize) -> String {
    format!("/job:worker/replica:0/task:{worker}")
}

fn address(worker: usize) -> String {
    format!("worker{worker}:1")
}

/// What the settings of a run are.
#[derive(Debug, Clone, Copy)]
struct Settings {
    workers: usize,
    /// Of each arena.
    pages: u32,
    page_bytes: usize,
    mode: Mode,
    depth: u32,
    requests_max: u32,
    contents_max: u32,
    /// Tasks of each worker.
    tasks: usize,
    /// Of each task in a round.
    deeds: usize,
    rounds: usize,
    is_calm: bool,
}

impl Settings {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            workers: rng.pick([2, 2, 3, 4]),
            pages: rng.pick([3, 12, 40]),
            page_bytes: rng.pick([16, 100, 4096, 5000, 20_000]),
            mode: rng.pick([Mode::Counted, Mode::Counted, Mode::Original]),
            depth: rng.pick([4, 5, 12, 64]),
            requests_max: rng.pick([2, 3, 5, 64]),
            contents_max: rng.pick([1, 2, 64]),
            tasks: rng.pick([1, 2, 4]),
            deeds: rng.pick([3, 8]),
            rounds: rng.pick([1, 2, 3]),
            is_calm: rng.chance(1, 3),
        }
    }

    fn builder(self, node: &Node, name: &str) -> WorkerBuilder {
        let builder = builder(node, name).timeout(Duration::from_secs(20)).liveness(Duration::from_secs(3));
        builder.flow(|flow| {
            flow.mode = self.mode;
            flow.depth = self.depth;
            flow.requests_max = self.requests_max;
            flow.contents_max = self.contents_max;
            flow.ring_bytes = 16 << 10;
        })
    }
}

/// What all tasks of a run know.
#[derive(Debug, Clone)]
struct Run {
    handle: Handle,
    settings: Settings,
    model: Model,
    lives: Arc<Mutex<Vec<Arc<Life>>>>,
    /// How many lives act in this round.
    acting: Arc<AtomicUsize>,
}

impl Run {
    fn life(&self, worker: usize) -> Arc<Life> {
        self.lives.lock().unwrap()[worker].clone()
    }

    fn lives(&self) -> Vec<Arc<Life>> {
        self.lives.lock().unwrap().clone()
    }

    async fn rest(&self, moment: Duration) {
        self.handle.runtime().sleep(moment).await;
    }

    /// The traffic of one life in a round, until its process dies.
    async fn live(&self, life: Arc<Life>, rng: Rng) {
        life.begin_round();
        self.acting.fetch_add(1, Ordering::Relaxed);
        let notes = life.node.run("notes", life.clone().take_notes(rng.fork(100)));
        let tasks = (0..self.settings.tasks).map(|task| {
            let act = life.clone().act(rng.fork(task as u64));
            life.node.run("moves pages", act)
        });
        let tasks: Vec<_> = tasks.collect();
        let acting = async {
            join_all(tasks).await;
            // Notes of writes that were given up may come still.
            self.rest(Duration::from_millis(900)).await;
            // Notes are taken until nobody acts any more.
            if self.acting.fetch_sub(1, Ordering::Relaxed) == 1 {
                self.lives().iter().for_each(|life| life.end_round());
            }
        };
        join(acting, notes).await;
    }

    /// Traffic of all workers, with faults among them. The process of one may die and come back.
    async fn round(&self, rng: &mut Rng) {
        let lives = self.lives();
        let living = lives.into_iter().map(|life| {
            let rng = rng.fork(1000 + life.index as u64);
            self.live(life, rng)
        });
        let living: Vec<_> = living.collect();
        let crashes = !self.settings.is_calm && rng.chance(1, 3);
        let reborn = async {
            if crashes {
                self.reborn(rng.fork(1)).await;
            }
        };
        let mut faults = rng.fork(2);
        join3(join_all(living), reborn, self.faults(&mut faults)).await;
        *rng = rng.fork(3);
    }

    async fn reborn(&self, mut rng: Rng) {
        self.rest(rng.duration(Duration::from_millis(40))).await;
        let victim = rng.below(self.settings.workers);
        self.model.disturb();
        self.model.lose_notes(victim);
        self.life(victim).node.crash();
        self.rest(rng.duration(Duration::from_millis(20))).await;
        let life = Life::start(&self.handle, self.settings, &self.model, victim).await;
        self.lives.lock().unwrap()[victim] = life.clone();
        self.live(life, rng).await;
    }

    async fn faults(&self, rng: &mut Rng) {
        if self.settings.is_calm {
            return;
        }
        self.model.disturb();
        for _ in 0..rng.below(4) {
            self.rest(rng.duration(Duration::from_millis(20))).await;
            let one = rng.below(self.settings.workers);
            let other = (one + 1 + rng.below(self.settings.workers - 1)) % self.settings.workers;
            let [one, other] = [one, other].map(|worker| self.life(worker).node.id());
            let longest = rng.pick([1, 200, 8000]);
            self.handle.inject(match rng.below(5) {
                0 | 1 => Fault::LoseLink(one, other),
                2 => Fault::LoseControl(one, other),
                3 => Fault::Slow(one),
                _ => Fault::Pause(one, rng.duration(Duration::from_millis(longest))),
            });
        }
    }

    /// All transfers have ended: checks what must be true then, and that everything can be moved again.
    async fn check(&self) {
        self.handle.heal();
        self.rest(Duration::from_millis(900)).await;
        let lives = self.lives();
        lives.iter().for_each(|life| life.check_quiet());
        self.model.end_round();
        lives.iter().for_each(|life| life.settle());
        for life in &lives {
            for peer in (0..self.settings.workers).filter(|peer| *peer != life.index) {
                let (mover, checks) = (life.clone(), "reads all");
                life.node.run(checks, async move { mover.reads_all(peer).await }).await.unwrap();
            }
        }
        lives.iter().for_each(|life| life.check_quiet());
        self.model.end_round();
        lives.iter().for_each(|life| life.settle());
    }

    /// All workers end, some of them amid their transfers.
    async fn end(self, mut rng: Rng) {
        let acting = self.lives().into_iter().filter_map(|life| {
            let act = life.clone().act(rng.fork(life.index as u64));
            rng.chance(1, 2).then(|| life.node.run("moves pages", act))
        });
        let acting: Vec<_> = acting.collect();
        let (model, handle) = (self.model.clone(), self.handle.clone());
        model.disturb();
        let ends = self.lives().into_iter().map(|life| {
            let moment = rng.duration(Duration::from_millis(5));
            let (worker, runtime) = (life.worker.clone(), life.node.runtime());
            life.node.run("shut down", async move {
                runtime.sleep(moment).await;
                worker.shutdown().await;
            })
        });
        let ends: Vec<_> = ends.collect();
        join(join_all(acting), join_all(ends)).await;
        let lives = std::mem::take(&mut *self.lives.lock().unwrap());
        drop(handle);
        for life in lives {
            life.is_gone().await;
        }
    }
}

async fn scenario(handle: Handle) {
    let mut rng = Rng::new(handle.seed()).fork(97);
    handle.take_chances();
    let (settings, model) = (Settings::draw(&mut rng), Model::new(&handle));
    let starts = (0..settings.workers).map(|index| Life::start(&handle, settings, &model, index));
    let lives = join_all(starts.collect::<Vec<_>>()).await;
    let acting = Arc::default();
    let run = Run { handle, settings, model, lives: Arc::new(Mutex::new(lives)), acting };
    for _ in 0..settings.rounds {
        run.round(&mut rng).await;
        run.check().await;
    }
    run.end(rng).await;
}

/// Runs the scenario of `seed` once.
#[cfg(feature = "planted-bugs")]
pub(crate) fn run_seed(seed: u64) -> Result<Summary, Box<Failure>> {
    let world = World::new(seed);
    world.run(scenario(world.handle()))?;
    world.finish()
}

#[test]
fn every_page_has_one_content_and_one_writer_twice() {
    every_seed_twice("pages", SEEDS, scenario);
}

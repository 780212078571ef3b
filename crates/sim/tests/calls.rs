//! Workers call each other's handlers, give calls up, and let their deadlines pass, while handlers are slow, fail, and come and go, links
//! break, and processes are slow, stop or crash.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_FROM=7` begins with that one, `SIM_SEED=7` runs one and prints its figures.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::BTreeMap,
    future::IntoFuture as _,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{Either, join3, select},
};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{Code, DataType, Mode, Status};
use tensorwire_rendezvous::{
    Tensor, Trust, Validation, Worker, WorkerBuilder, WorkerError,
    calls::{Call, Handling},
};
#[cfg(feature = "planted-bugs")]
use tensorwire_sim::{Failure, Summary, World};
use tensorwire_sim::{Fault, Handle, Node, Rng};

use crate::{common::builder, figures::every_seed_twice, join_all::join_all};

const SEEDS: u64 = 60;
const NAME: &str = "work";
/// The code with which a handler refuses.
const REFUSED: Code = Code::OutOfRange;
/// None, in a message, in one write, in pieces.
const LENGTHS: [usize; 6] = [0, 40, 40, 3000, 20_000, 70_000];

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
    mode: Mode,
    validation: Validation,
    trust: Trust,
    depth: u32,
    requests_max: u32,
    call_bytes: u64,
    /// Tasks of each worker.
    tasks: usize,
    /// Of each task.
    calls: usize,
    is_calm: bool,
}

impl Settings {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            workers: rng.pick([2, 2, 3]),
            mode: rng.pick([Mode::Counted, Mode::Counted, Mode::Original]),
            validation: rng.pick([Validation::Off, Validation::Off, Validation::Xxh3]),
            trust: rng.pick([Trust::Cluster, Trust::Cluster, Trust::Hostile]),
            depth: rng.pick([4, 5, 12, 64]),
            requests_max: rng.pick([2, 3, 5, 64]),
            call_bytes: rng.pick([220_000, 250_000, 256 << 20]),
            tasks: rng.pick([1, 3, 6]),
            calls: rng.pick([3, 8]),
            is_calm: rng.chance(1, 3),
        }
    }

    fn builder(self, node: &Node, name: &str) -> WorkerBuilder {
        let builder = builder(node, name).timeout(Duration::from_secs(20)).liveness(Duration::from_secs(3));
        let builder = builder.validation(self.validation).trust(self.trust);
        builder.limits(|limits| limits.call_bytes = self.call_bytes).flow(|flow| {
            flow.mode = self.mode;
            flow.depth = self.depth;
            flow.requests_max = self.requests_max;
            flow.piece_bytes = 16 << 10;
        })
    }
}

/// What happened to all calls.
#[derive(Debug, Default)]
struct Calls {
    /// How often the handler ran for each call.
    runs: Mutex<BTreeMap<u64, u32>>,
    made: AtomicUsize,
    /// Something went wrong on purpose.
    is_disturbed: AtomicBool,
}

impl Calls {
    fn next(&self) -> u64 {
        self.made.fetch_add(1, Ordering::Relaxed) as u64 + 1
    }

    fn runs(&self, call: u64) -> u32 {
        self.runs.lock().unwrap().get(&call).copied().unwrap_or_default()
    }

    fn disturb(&self) {
        self.is_disturbed.store(true, Ordering::Relaxed);
    }
}

/// The tensors of a call, or of its answer. Their number and lengths follow from `number`, and each byte says which it is.
fn tensors(worker: &Worker, number: u64) -> Vec<Tensor> {
    let tensor = |at: u64| {
        let length = LENGTHS[(number.wrapping_mul(31).wrapping_add(at * 7) % 11) as usize % LENGTHS.len()];
        let mut buffer = worker.pool().try_alloc(length).unwrap();
        buffer.fill((number + at) as u8);
        Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
    };
    let count = 1 + number % 3;
    let first = Tensor::from_values(worker.pool(), &[], &[number]).unwrap();
    std::iter::once(first).chain((1..count).map(tensor)).collect()
}

/// The number of the call to which `came` belongs. They must be all of its tensors, whole.
fn read(worker: &Worker, came: &[Tensor]) -> u64 {
    let number = came[0].values::<u64>().unwrap()[0];
    let meant = tensors(worker, number);
    assert_eq!(came.len(), meant.len(), "call {number}");
    let is_same = |(came, meant): (&Tensor, &Tensor)| {
        (came.metadata(), came.bytes()) == (meant.metadata(), meant.bytes())
    };
    assert!(came.iter().zip(&meant).all(is_same), "call {number} is torn");
    number
}

/// Added to the number of a call: the number of its answer.
const ANSWER: u64 = 1 << 32;

/// Counts the handlers of a process that run.
struct Run(Arc<AtomicUsize>);

impl Run {
    fn begin(running: &Arc<AtomicUsize>) -> Self {
        running.fetch_add(1, Ordering::Relaxed);
        Self(running.clone())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A process with a worker.
struct Life {
    index: usize,
    node: Node,
    worker: Worker,
    settings: Settings,
    calls: Arc<Calls>,
    running: Arc<AtomicUsize>,
    handling: Mutex<Option<Handling>>,
}

/// How a task ends a call.
#[derive(Debug, Clone, Copy)]
enum Until {
    End,
    Polls(usize),
    Moment(Duration),
}

impl Life {
    async fn start(handle: &Handle, settings: Settings, calls: &Arc<Calls>, index: usize) -> Arc<Self> {
        let node = handle.start_node(&address(index)).unwrap();
        let start = settings.builder(&node, &name(index)).start();
        let worker = node.run("start", start).await.unwrap().unwrap();
        for other in (0..settings.workers).filter(|other| *other != index) {
            worker.set_address(&name(other), &address(other)).unwrap();
        }
        let (calls, running, handling) = (calls.clone(), Arc::default(), Mutex::default());
        let life = Arc::new(Self { index, node, worker, settings, calls, running, handling });
        life.handle(Rng::new(handle.seed()).fork(500 + index as u64));
        life
    }

    /// Has a handler answer calls from now on.
    fn handle(&self, rng: Rng) {
        let (worker, runtime) = (self.worker.clone(), self.node.runtime());
        let (calls, running) = (self.calls.clone(), self.running.clone());
        let answer = move |call: Call| {
            let run = Run::begin(&running);
            let number = read(&worker, call.arguments());
            *calls.runs.lock().unwrap().entry(number).or_default() += 1;
            let mut rng = rng.fork(number);
            let (worker, runtime) = (worker.clone(), runtime.clone());
            async move {
                if rng.chance(1, 2) {
                    let longest = rng.pick([100, 5000, 3_000_000]);
                    runtime.sleep(rng.duration(Duration::from_micros(longest))).await;
                }
                // The arguments stay what they are while the handler runs.
                assert_eq!(read(&worker, call.arguments()), number);
                drop(run);
                if rng.chance(1, 8) {
                    return Err(Status::new(REFUSED, number.to_string()));
                }
                Ok(tensors(&worker, number + ANSWER))
            }
        };
        let mut handling = self.handling.lock().unwrap();
        *handling = None;
        *handling = Some(self.worker.handle(NAME, answer).unwrap());
    }

    async fn act(self: Arc<Self>, mut rng: Rng) {
        for _ in 0..self.settings.calls {
            let peer = (self.index + 1 + rng.below(self.settings.workers - 1)) % self.settings.workers;
            let until = match rng.below(8) {
                0 => Until::Polls(rng.below(12)),
                1 => Until::Moment(rng.duration(Duration::from_millis(3))),
                _ => Until::End,
            };
            let limit = Duration::from_millis(rng.pick([1, 20, 20_000, 20_000, 20_000]));
            self.call(peer, until, limit).await;
            if rng.chance(1, 10) {
                self.handle(rng.fork(7));
            }
        }
    }

    async fn call(&self, peer: usize, until: Until, limit: Duration) {
        let number = self.calls.next();
        let Ok(peer) = self.worker.peer(&name(peer)) else { return };
        let called = peer.call(NAME, tensors(&self.worker, number)).timeout(limit).into_future();
        let mut called = pin!(called);
        let ended = match until {
            Until::End => Some(called.await),
            Until::Polls(polls) => {
                let mut ended = None;
                for _ in 0..polls {
                    ended = called.as_mut().now_or_never();
                    if ended.is_some() {
                        break;
                    }
                    self.node.runtime().sleep(Duration::from_micros(20)).await;
                }
                ended
            }
            Until::Moment(moment) => match select(called, self.node.runtime().sleep(moment)).await {
                Either::Left((ended, _)) => Some(ended),
                Either::Right(_) => None,
            },
        };
        if let Some(ended) = ended {
            self.check(number, ended, limit);
        }
    }

    /// Checks how a call ended. Each ran at most once.
    fn check(&self, number: u64, ended: Result<Vec<Tensor>, WorkerError>, limit: Duration) {
        let runs = self.calls.runs(number);
        let is_calm = !self.calls.is_disturbed.load(Ordering::Relaxed);
        match ended {
            Ok(answer) => {
                assert_eq!(runs, 1, "call {number} was answered");
                assert_eq!(read(&self.worker, &answer), number + ANSWER);
            }
            Err(WorkerError::Remote { status, .. }) if status.code == REFUSED => {
                assert_eq!((runs, &*status.message), (1, &*number.to_string()));
            }
            Err(WorkerError::Remote { status, .. }) if status.code == Code::NotFound => {
                assert_eq!(runs, 0, "call {number} found no handler");
            }
            Err(error) => {
                assert!(runs <= 1, "call {number} ran {runs} times: {error}");
                let is_late = matches!(error, WorkerError::DeadlineExceeded { .. });
                assert!(!is_calm || is_late && limit < Duration::from_secs(20), "call {number}: {error}");
            }
        }
    }
}

/// What all tasks of a run know.
struct Cluster {
    handle: Handle,
    settings: Settings,
    calls: Arc<Calls>,
    lives: Mutex<Vec<Arc<Life>>>,
}

impl Cluster {
    fn lives(&self) -> Vec<Arc<Life>> {
        self.lives.lock().unwrap().clone()
    }

    async fn rest(&self, moment: Duration) {
        self.handle.runtime().sleep(moment).await;
    }

    async fn live(&self, life: Arc<Life>, rng: Rng) {
        let tasks = (0..self.settings.tasks).map(|task| {
            let act = life.clone().act(rng.fork(task as u64));
            life.node.run("calls", act)
        });
        join_all(tasks.collect::<Vec<_>>()).await;
    }

    async fn reborn(&self, mut rng: Rng) {
        if self.settings.is_calm || rng.chance(2, 3) {
            return;
        }
        self.rest(rng.duration(Duration::from_millis(20))).await;
        let victim = rng.below(self.settings.workers);
        self.calls.disturb();
        let crashed = self.lives()[victim].clone();
        crashed.node.crash();
        self.rest(rng.duration(Duration::from_millis(20))).await;
        let life = Life::start(&self.handle, self.settings, &self.calls, victim).await;
        self.lives.lock().unwrap()[victim] = life.clone();
        self.live(life, rng).await;
    }

    async fn faults(&self, rng: &mut Rng) {
        if self.settings.is_calm {
            return;
        }
        self.calls.disturb();
        for _ in 0..rng.below(4) {
            self.rest(rng.duration(Duration::from_millis(20))).await;
            let one = rng.below(self.settings.workers);
            let other = (one + 1 + rng.below(self.settings.workers - 1)) % self.settings.workers;
            let [one, other] = [one, other].map(|worker| self.lives()[worker].node.id());
            let longest = rng.pick([1, 200, 8000]);
            self.handle.inject(match rng.below(5) {
                0 | 1 => Fault::LoseLink(one, other),
                2 => Fault::LoseControl(one, other),
                3 => Fault::Slow(one),
                _ => Fault::Pause(one, rng.duration(Duration::from_millis(longest))),
            });
        }
    }

    /// All calls have ended: no handler runs any more, and each worker can call each other.
    async fn check(&self) {
        self.handle.heal();
        self.rest(Duration::from_millis(900)).await;
        for life in self.lives() {
            let running = life.running.load(Ordering::Relaxed);
            assert_eq!(running, 0, "handlers of worker {} run although all calls have ended", life.index);
            assert_eq!(life.worker.receive_memory().used_bytes, 0, "worker {}", life.index);
        }
        for life in self.lives() {
            for peer in (0..self.settings.workers).filter(|peer| *peer != life.index) {
                let caller = life.clone();
                let limit = Duration::from_secs(20);
                life.node
                    .run("calls", async move { caller.call(peer, Until::End, limit).await })
                    .await
                    .unwrap();
            }
        }
        let runs = self.calls.runs.lock().unwrap();
        assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
    }

    async fn end(self) {
        let lives = self.lives.into_inner().unwrap();
        let ends = lives.iter().map(|life| {
            let worker = life.worker.clone();
            life.node.run("shut down", async move { worker.shutdown().await })
        });
        join_all(ends.collect::<Vec<_>>()).await;
    }
}

async fn scenario(handle: Handle) {
    let mut rng = Rng::new(handle.seed()).fork(131);
    handle.take_chances();
    let (settings, calls) = (Settings::draw(&mut rng), Arc::default());
    let starts = (0..settings.workers).map(|index| Life::start(&handle, settings, &calls, index));
    let lives = Mutex::new(join_all(starts.collect::<Vec<_>>()).await);
    let run = Cluster { handle, settings, calls, lives };
    let living = run.lives().into_iter().map(|life| {
        let rng = rng.fork(1000 + life.index as u64);
        run.live(life, rng)
    });
    let (living, mut faults) = (living.collect::<Vec<_>>(), rng.fork(2));
    join3(join_all(living), run.reborn(rng.fork(1)), run.faults(&mut faults)).await;
    run.check().await;
    run.end().await;
}

/// Runs the scenario of `seed` once.
#[cfg(feature = "planted-bugs")]
pub(crate) fn run_seed(seed: u64) -> Result<Summary, Box<Failure>> {
    let world = World::new(seed);
    world.run(scenario(world.handle()))?;
    world.finish()
}

#[test]
fn every_call_runs_at_most_once_and_ends_its_handler_twice() {
    every_seed_twice("calls", SEEDS, scenario);
}

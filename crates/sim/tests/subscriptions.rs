//! Subscriptions to a tensor whose publisher crashes and comes back, and to the values of a step, over links that break, with subscribers
//! of both policies that are slow, crash, or give up.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_FROM=7` begins with that one, `SIM_SEED=7` runs one and prints its figures. `SIM_COMMITS=200`
//! publishes or sends as many values in each.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::join;
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{DataType, Mode};
use tensorwire_rendezvous::{
    Peer, Sharing, Step, Tensor, Validation, Worker, WorkerBuilder, WorkerError,
    subscriptions::{Policy, Update},
};
#[cfg(feature = "planted-bugs")]
use tensorwire_sim::{Failure, Summary, World};
use tensorwire_sim::{Fault, Handle, Node, Rng};

use crate::{
    common::builder,
    figures::{every_seed_twice, number},
    join_all::join_all,
};

const SEEDS: u64 = 60;
const PUBLISHER: &str = "/job:ps/replica:0/task:0";
const NAME: &str = "x";
/// Values of one run.
const VALUES: u64 = 30;
/// Inside a message, in a buffer, in a larger one, in pieces.
const LENGTHS: [usize; 6] = [17, 3000, 5000, 5000, 20_000, 70_000];
/// What ends the subscribers, in the first byte of its content.
const LAST: u8 = 255;

fn values() -> u64 {
    number("SIM_COMMITS").unwrap_or(VALUES)
}

/// A value of which each byte says which it is. Its length does, too.
fn tensor(worker: &Worker, number: u64, is_last: bool) -> Tensor {
    let length = LENGTHS[(number * 7 % 31) as usize % LENGTHS.len()];
    let mut buffer = worker.pool().try_alloc(length).unwrap();
    buffer.fill((number % 251) as u8);
    buffer[0] = if is_last { LAST } else { 0 };
    buffer[1..9].copy_from_slice(&number.to_le_bytes());
    Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
}

/// The number of a value, and whether it is the last one. It must be whole.
fn read(tensor: &Tensor) -> (u64, bool) {
    let bytes = tensor.bytes();
    let number = u64::from_le_bytes(bytes[1..9].try_into().unwrap());
    assert_eq!(bytes.len(), LENGTHS[(number * 7 % 31) as usize % LENGTHS.len()], "value {number}");
    assert!(bytes[9..].iter().all(|byte| *byte == (number % 251) as u8), "value {number} is torn");
    (number, bytes[0] == LAST)
}

/// What the settings of a run's workers are.
#[derive(Clone, Copy)]
struct Settings {
    mode: Mode,
    validation: Validation,
}

impl Settings {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            mode: rng.pick([Mode::Counted, Mode::Counted, Mode::Original]),
            validation: rng.pick([Validation::Off, Validation::Off, Validation::Xxh3]),
        }
    }

    fn builder(self, node: &Node, name: &str) -> WorkerBuilder {
        builder(node, name).validation(self.validation).flow(|flow| {
            flow.mode = self.mode;
            flow.piece_bytes = 16 << 10;
        })
    }
}

/// What all processes of a run know.
#[derive(Default)]
struct Shared {
    /// Subscribers that have begun.
    ready: AtomicUsize,
    /// Incarnation of the publisher, and the number of its newest version.
    newest: Mutex<(u64, u64)>,
    /// A link broke, a process crashed, or a version was published out of turn.
    is_disturbed: AtomicBool,
}

impl Shared {
    fn disturb(&self) {
        self.is_disturbed.store(true, Ordering::Relaxed);
    }
}

#[derive(Clone)]
struct Subscriber {
    node: Node,
    settings: Settings,
    policy: Policy,
    sharing: Sharing,
    ahead: u8,
    shared: Arc<Shared>,
}

/// What a subscriber has got.
#[derive(Default)]
struct Got {
    /// Incarnation and number.
    last: Option<(u64, u64)>,
    /// The gap that was reported.
    reported: Option<(u64, u64)>,
    /// The newest version when each of the latest values was handed over.
    newest: VecDeque<(u64, u64)>,
}

impl Got {
    /// Checks a value of `subscriber` against those before it. Returns whether it is the last one.
    fn check(&mut self, subscriber: &Subscriber, update: &Update) -> bool {
        let (number, is_last) = read(&update.tensor);
        let version = update.version.unwrap();
        assert_eq!(number, version.number());
        let life = version.incarnation();
        let before = match self.last {
            Some((same, before)) if same == life => before,
            Some(_) => 0,
            None => number - 1,
        };
        assert!(number > before, "{number} after {before}");
        assert_eq!(update.dropped, number - before - 1, "{number} after {before}");
        if subscriber.policy == Policy::Every {
            let gap = (update.dropped > 0).then_some((before, number));
            assert_eq!(self.reported.take(), gap, "{number} after {before}");
            let is_calm = !subscriber.shared.is_disturbed.load(Ordering::Relaxed);
            assert!(!is_calm || gap.is_none(), "{number} after {before}, and nothing went wrong");
        }
        // It was the newest one when it was sent: after the value so many before it was handed over.
        if self.newest.len() >= subscriber.ahead.into() {
            let (then, newest) = self.newest.pop_front().unwrap();
            let is_new = subscriber.policy == Policy::Every || then != life || number >= newest;
            assert!(is_new, "{number}, but {newest} was the newest one {} values ago", subscriber.ahead);
        }
        self.newest.push_back(*subscriber.shared.newest.lock().unwrap());
        self.last = Some((life, number));
        is_last
    }
}

impl Subscriber {
    /// Subscribes until the last version.
    async fn live(self, name: String, mut rng: Rng) {
        let worker = self.settings.builder(&self.node, &name).start().await.unwrap();
        let peer = worker.set_address(PUBLISHER, "publisher:1").unwrap();
        let subscribe = || peer.subscribe(NAME).policy(self.policy).sharing(self.sharing).ahead(self.ahead);
        let (mut subscription, mut got, mut held) = (subscribe(), Got::default(), None);
        self.shared.ready.fetch_add(1, Ordering::Relaxed);
        loop {
            match subscription.next().await.unwrap() {
                Ok(update) => {
                    if got.check(&self, &update) {
                        break;
                    }
                    // What the program has stays what it was.
                    if let Some((number, tensor)) = held.replace((read(&update.tensor), update.tensor)) {
                        assert_eq!(read(&tensor), number);
                    }
                }
                Err(WorkerError::Superseded { held, newest, .. }) => got.reported = Some((held, newest)),
                Err(error) => panic!("{error}"),
            }
            if rng.chance(1, 4) {
                self.node.runtime().sleep(rng.duration(Duration::from_millis(20))).await;
            }
            if rng.chance(1, 20) {
                // It gives up, and begins with what is published then.
                (subscription, got) = (subscribe(), Got::default());
                self.shared.disturb();
            }
        }
        drop(subscription);
        worker.shutdown().await;
    }
}

/// The process of the publisher, which a crash replaces.
struct Publisher {
    handle: Handle,
    node: Node,
    worker: Worker,
    settings: Settings,
    number: u64,
    shared: Arc<Shared>,
}

impl Publisher {
    async fn start(handle: &Handle, settings: Settings, shared: Arc<Shared>) -> Self {
        let node = handle.start_node("publisher:1").unwrap();
        let worker = settings.builder(&node, PUBLISHER).start().await.unwrap();
        Self { handle: handle.clone(), node, worker, settings, number: 0, shared }
    }

    async fn publish(&mut self, in_turn: bool, is_last: bool) {
        self.number += 1;
        let (worker, number) = (self.worker.clone(), self.number);
        let tensor = tensor(&worker, number, is_last);
        let publish = async move {
            if in_turn { worker.publish_in_turn(NAME, tensor).await } else { worker.publish(NAME, tensor) }
        };
        let version = self.node.run("publish", publish).await.unwrap().unwrap();
        assert_eq!(version.number(), number);
        *self.shared.newest.lock().unwrap() = (version.incarnation(), number);
    }

    async fn crash(self) -> Self {
        let Self { handle, node, worker, settings, shared, .. } = self;
        shared.disturb();
        drop(worker);
        node.crash();
        Self::start(&handle, settings, shared).await
    }
}

async fn publish(mut publisher: Publisher, mut rng: Rng, nodes: Vec<Node>) {
    let shared = publisher.shared.clone();
    let (pause, is_calm) = (rng.pick([0, 1, 20, 300]), rng.chance(1, 3));
    if rng.chance(1, 2) {
        while shared.ready.load(Ordering::Relaxed) < nodes.len() {
            publisher.handle.runtime().sleep(Duration::from_micros(100)).await;
        }
    }
    for _ in 0..values() {
        let in_turn = is_calm || rng.chance(7, 8);
        if !in_turn {
            shared.disturb();
        }
        publisher.publish(in_turn, false).await;
        let (own, other) = (publisher.node.id(), nodes[rng.below(nodes.len())].clone());
        let delay = rng.duration(Duration::from_millis(3));
        let fault = if is_calm { 20 } else { rng.below(20) };
        match fault {
            0 => publisher.handle.inject_after(delay, Fault::LoseLink(own, other.id())),
            1 => publisher.handle.inject_after(delay, Fault::LoseControl(own, other.id())),
            2 => {
                publisher.handle.runtime().sleep(delay).await;
                publisher = publisher.crash().await;
            }
            _ => {}
        }
        if fault < 2 {
            shared.disturb();
        }
        publisher.handle.runtime().sleep(rng.duration(Duration::from_millis(pause))).await;
    }
    publisher.publish(true, true).await;
    // It serves until the subscribers have ended.
    join_all(nodes.iter().map(Node::crashed)).await;
    publisher.worker.shutdown().await;
}

async fn scenario(handle: Handle) {
    let mut rng = Rng::new(handle.seed()).fork(95);
    handle.take_chances();
    if rng.chance(1, 2) {
        handle.lend_nothing();
    }
    let (settings, shared) = (Settings::draw(&mut rng), Arc::<Shared>::default());
    let publisher = Publisher::start(&handle, settings, shared.clone()).await;
    let count = rng.pick([1, 2, 2, 3]);
    let nodes: Vec<_> =
        (0..count).map(|at| handle.start_node(&format!("subscriber:{at}")).unwrap()).collect();
    let lives = nodes.iter().zip(0..).map(|(node, number)| {
        let subscriber = Subscriber {
            node: node.clone(),
            settings,
            policy: rng.pick([Policy::Every, Policy::Latest]),
            sharing: rng.pick([Sharing::Copy, Sharing::View]),
            ahead: rng.pick([1, 2, 2, 5, 64]),
            shared: shared.clone(),
        };
        let life = subscriber.live(format!("/job:worker/replica:0/task:{number}"), rng.fork(number));
        let life = node.run("subscribe", life);
        async move {
            life.await.unwrap();
            node.crash();
        }
    });
    let lives: Vec<_> = lives.collect();
    join(publish(publisher, rng, nodes.clone()), join_all(lives)).await;
}

/// Runs the scenario of `seed` once.
#[cfg(feature = "planted-bugs")]
pub(crate) fn run_seed(seed: u64) -> Result<Summary, Box<Failure>> {
    let world = World::new(seed);
    world.run(scenario(world.handle()))?;
    world.finish()
}

#[test]
fn every_version_comes_whole_in_order_and_counted_twice() {
    every_seed_twice("subscriptions", SEEDS, scenario);
}

/// Sends values in a step, each followed by the next number.
async fn send(sender: Worker, step: Step, to: Peer, mut rng: Rng) {
    let pause = rng.pick([0, 0, 1, 20]);
    for number in 0..=values() {
        let sent = step.to(&to).send(NAME, tensor(&sender, number, number == values()));
        if sent.is_err() {
            // The connection broke, which ended the step between the two.
            return;
        }
        if rng.chance(1, 3) {
            sender.runtime().sleep(rng.duration(Duration::from_millis(pause))).await;
        }
    }
}

/// Receives the values of a step, in subscriptions that it gives up and by single receives, until the last one. Returns false if the step
/// broke before.
async fn take_all(receiver: Worker, (step, from): (Step, Peer), policy: Policy, mut rng: Rng) -> bool {
    let step_from = step.from(&from);
    let mut expected = 0;
    let mut subscription = None;
    loop {
        if rng.chance(1, 6) {
            subscription = None;
        }
        let received = match &mut subscription {
            None if rng.chance(1, 3) => step_from.recv(NAME).await,
            none @ None => {
                let ahead = rng.pick([1, 2, 9]);
                let began = step_from.subscribe(NAME).policy(policy).ahead(ahead);
                none.insert(began).next().await.unwrap().map(|update| update.tensor)
            }
            Some(subscription) => subscription.next().await.unwrap().map(|update| update.tensor),
        };
        let Ok(tensor) = received else { return false };
        let (number, is_last) = read(&tensor);
        let follows = if policy == Policy::Every { number == expected } else { number >= expected };
        assert!(follows, "{number} instead of {expected}");
        if is_last {
            return true;
        }
        expected = number + 1;
        if rng.chance(1, 5) {
            receiver.runtime().sleep(rng.duration(Duration::from_millis(5))).await;
        }
    }
}

async fn step_scenario(handle: Handle) {
    let mut rng = Rng::new(handle.seed()).fork(96);
    handle.take_chances();
    let (settings, policy) =
        (Settings::draw(&mut rng), rng.pick([Policy::Every, Policy::Every, Policy::Latest]));
    let nodes = ["sender:1", "receiver:1"].map(|address| handle.start_node(address).unwrap());
    let names = [PUBLISHER, "/job:worker/replica:0/task:0"];
    let sender = settings.builder(&nodes[0], names[0]).start().await.unwrap();
    let receiver = settings.builder(&nodes[1], names[1]).start().await.unwrap();
    let from = receiver.peer_at("sender:1").await.unwrap();
    from.connect().await.unwrap();
    let to = sender.wait_for_peer(names[1]).await.unwrap();
    let (there, here) = (sender.step(7), receiver.step(7));
    let is_disturbed = rng.chance(1, 3);
    if is_disturbed {
        let delay = rng.duration(Duration::from_millis(10));
        handle.inject_after(delay, Fault::LoseLink(nodes[0].id(), nodes[1].id()));
    }
    let sending = nodes[0].run("send", send(sender.clone(), there.clone(), to, rng.fork(1)));
    let taking = take_all(receiver.clone(), (here.clone(), from), policy, rng.fork(2));
    let (_, is_complete) = join(sending, nodes[1].run("take", taking)).await;
    assert!(is_complete.unwrap() || is_disturbed, "the step broke, and nothing went wrong");
    drop((there, here));
    // The ends of the subscriptions are acknowledged.
    handle.runtime().sleep(Duration::from_millis(900)).await;
    let memory = receiver.receive_memory();
    assert_eq!((memory.used_bytes, memory.leaked_bytes, memory.waiting), (0, 0, 0));
    join(sender.shutdown(), receiver.shutdown()).await;
}

#[test]
fn values_of_a_step_come_once_and_in_order_twice() {
    every_seed_twice("subscriptions of steps", SEEDS, step_scenario);
}

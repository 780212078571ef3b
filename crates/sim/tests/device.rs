//! A device fails under load, and comes back: workers continue over their next fabric, or report why they cannot.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_SEED=7` runs one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{Fabric, FabricKind, Runtime};
use tensorwire_protocol::{Code, DataType};
use tensorwire_rendezvous::{Peer, Tensor, Worker, WorkerError};
use tensorwire_sim::{Fault, Handle, Node, Rng, Summary, World};

use crate::common::builder;

/// Seeds that run if `SIM_SEEDS` is not set.
const SEEDS: u64 = 200;

/// Values of the stream, and fetches beside it.
const VALUES: u64 = 12;

/// How long after its return a better fabric is used, if there are moments without a transfer under way.
const COMES_BACK_WITHIN: Duration = Duration::from_secs(5);

/// Between two steps.
const PAUSE: Duration = Duration::from_millis(30);

const SENDER: &str = "/job:ps/replica:0/task:0";
const RECEIVER: &str = "/job:worker/replica:0/task:0";

/// Two workers, and what has happened to them.
struct Story {
    handle: Handle,
    sender: Worker,
    receiver: Worker,
    peer: Peer,
    nodes: [Node; 2],
    rng: Rng,
}

async fn worker(node: &Node, name: &str, kinds: &[FabricKind]) -> Worker {
    let fabrics = kinds.iter().map(|kind| node.fabric_as(*kind) as Arc<dyn Fabric>);
    let builder = builder(node, name).local_fabrics(fabrics.collect()).memory(|memory| {
        memory.source_bytes = 16 << 20;
        memory.receive_bytes = 16 << 20;
    });
    let builder = builder.flow(|flow| {
        flow.depth = 8;
        flow.ring_bytes = 8 << 10;
    });
    builder.start().await.unwrap()
}

impl Story {
    async fn begin(handle: Handle, kinds: &[FabricKind]) -> Self {
        let nodes = [handle.start_node("sender:1").unwrap(), handle.start_node("receiver:1").unwrap()];
        let sender = worker(&nodes[0], SENDER, kinds).await;
        let receiver = worker(&nodes[1], RECEIVER, kinds).await;
        let peer = receiver.peer_at("sender:1").await.unwrap();
        let rng = Rng::new(handle.seed()).fork(91);
        let story = Self { handle, sender, receiver, peer, nodes, rng };
        story.sender.publish("weights", story.tensor(1, 9000)).unwrap();
        story.fetch().await.unwrap();
        assert_eq!(story.uses(), kinds[0], "the first fabric is used while it can be");
        story
    }

    fn tensor(&self, transfer: u64, length: usize) -> Tensor {
        let mut buffer = self.sender.pool().try_alloc(length).unwrap();
        self.handle.pattern().fill(transfer, &mut buffer);
        Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
    }

    async fn fetch(&self) -> Result<(), WorkerError> {
        let fetched = self.peer.fetch("weights").await?;
        self.handle.verify(1, fetched.bytes());
        Ok(())
    }

    /// The fabric that the two use now.
    fn uses(&self) -> FabricKind {
        let peers = self.receiver.peers();
        peers.iter().find(|info| info.name == SENDER).unwrap().transport.unwrap()
    }

    /// Sends and receives values of a step; each arrives intact, or the step ends with a reason.
    async fn stream(&self, step: u32) -> Result<(), WorkerError> {
        let key = |value| self.receiver.key(SENDER_CPU, RECEIVER_CPU, &format!("value{value}")).unwrap();
        for value in 0..VALUES {
            let tensor = self.tensor(u64::from(step) * 1000 + value, 3000);
            self.sender.shared_step(step.into()).send(&key(value), tensor).unwrap();
        }
        for value in 0..VALUES {
            let received = self.receiver.shared_step(step.into()).recv(&key(value)).await?;
            self.handle.verify(u64::from(step) * 1000 + value, received.bytes());
        }
        Ok(())
    }

    /// Makes the device of one of the two fail.
    fn lose(&mut self) -> Fault {
        let node = self.rng.pick([0, 1]);
        self.handle.inject(Fault::LoseDevice(self.nodes[node].id(), FabricKind::VERBS));
        Fault::RestoreDevice(self.nodes[node].id(), FabricKind::VERBS)
    }

    /// The sender of the other values receives some, most of which it requests before they are sent.
    async fn reply(&self, step: u32) {
        let [first, second] =
            ["first", "second"].map(|name| self.receiver.key(RECEIVER_CPU, SENDER_CPU, name).unwrap());
        let runtime = self.handle.runtime();
        let send = async {
            let step = self.receiver.shared_step(step.into());
            for key in [&first, &second, &first] {
                step.send(key, self.tensor(3, 500)).unwrap();
                runtime.sleep(PAUSE).await;
            }
        };
        let receive = async {
            let step = self.sender.shared_step(step.into());
            for key in [&first, &second, &first] {
                self.handle.verify(3, step.recv(key).await.unwrap().bytes());
            }
        };
        join(send, receive).await;
    }

    /// Steps go on without an error while the workers move to the first fabric, which they use within the bound. A fetch that waits meanwhile
    /// ends with its value.
    async fn comes_back(&self) {
        let waits = async {
            let fetched = self.peer.fetch("later").wait().timeout(Duration::from_secs(60)).await.unwrap();
            self.handle.verify(2, fetched.bytes());
        };
        let runtime = self.handle.runtime();
        let steps = async {
            let end = runtime.now() + COMES_BACK_WITHIN;
            let mut step = 3;
            while runtime.now() < end {
                join(self.stream(step), self.reply(step + 1)).await.0.unwrap();
                step += 2;
                runtime.sleep(PAUSE).await;
            }
            for worker in [&self.sender, &self.receiver] {
                let transports: Vec<_> = worker.peers().iter().map(|peer| peer.transport).collect();
                assert_eq!(transports, [Some(FabricKind::VERBS)], "of {}", worker.name());
            }
            self.sender.publish("later", self.tensor(2, 9000)).unwrap();
        };
        join(waits, steps).await;
    }

    /// Sleeps until both workers have noticed the failure.
    async fn settle(&self) {
        let swarm = self.handle.swarm();
        let seen = swarm.detection_max * 2 + swarm.control_latency_max * 4 + Duration::from_millis(50);
        self.handle.runtime().sleep(seen).await;
    }

    async fn end(self) {
        join(self.receiver.shutdown(), self.sender.shutdown()).await;
        self.handle.runtime().sleep(Duration::from_secs(2)).await;
        let memory = self.receiver.receive_memory();
        assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0));
    }
}

const SENDER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const RECEIVER_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

/// Returns whether the step was in progress when the device failed.
async fn with_another_fabric(handle: Handle) -> bool {
    let mut story = Story::begin(handle, &[FabricKind::VERBS, FabricKind::TCP]).await;
    let moment = story.rng.duration(Duration::from_millis(2));
    let runtime = story.handle.runtime();
    let node = story.rng.pick([0, 1]);
    let lost = Fault::LoseDevice(story.nodes[node].id(), FabricKind::VERBS);
    let fail = async {
        runtime.sleep(moment).await;
        story.handle.inject(lost);
    };
    let (streamed, ()) = join(story.stream(1), fail).await;
    if let Err(error) = &streamed {
        // Noticed by the receiver, or reported by the sender.
        let is_lost = matches!(error, WorkerError::PeerLost { .. });
        assert!(is_lost || error.code() == Code::Aborted, "{error}");
    }
    story.settle().await;
    // The next requests use the next fabric.
    story.fetch().await.unwrap();
    story.stream(2).await.unwrap();
    assert_eq!(story.uses(), FabricKind::TCP);
    story.handle.inject(Fault::RestoreDevice(story.nodes[node].id(), FabricKind::VERBS));
    story.comes_back().await;
    story.end().await;
    streamed.is_err()
}

async fn with_no_other(handle: Handle) {
    let mut story = Story::begin(handle, &[FabricKind::VERBS]).await;
    let restore = story.lose();
    story.settle().await;
    let refused = story.fetch().await.unwrap_err();
    let WorkerError::NoFabric { tried, .. } = &refused else { panic!("{refused}") };
    assert!(tried.contains("verbs") && tried.contains("looking for a device"), "{tried}");
    story.handle.inject(restore);
    story.fetch().await.unwrap();
    story.stream(3).await.unwrap();
    assert_eq!(story.uses(), FabricKind::VERBS);
    story.end().await;
}

fn run_seed(seed: u64) -> (bool, [Summary; 2]) {
    let world = World::new(seed);
    world.replayed_by("device");
    let broken = world.run(with_another_fabric(world.handle())).unwrap();
    let first = world.finish().unwrap();
    let world = World::new(seed);
    world.replayed_by("device");
    world.run(with_no_other(world.handle())).unwrap();
    (broken, [first, world.finish().unwrap()])
}

#[test]
fn d_device_fatal() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    if let Some(seed) = number("SIM_SEED") {
        eprintln!("{:?}", run_seed(seed));
        return;
    }
    let seeds = number("SIM_SEEDS").unwrap_or(SEEDS);
    let broken = (0..seeds).filter(|seed| run_seed(*seed).0).count() as u64;
    assert!(broken > seeds / 20, "only {broken} steps were under way when the device failed");
    eprintln!("{seeds} seeds, {broken} broken steps");
}

/// Its peers know its name alone.
#[test]
fn a_fabric_of_a_kind_that_only_its_users_know_is_chosen_by_its_name() {
    let own = FabricKind::new("of-my-own");
    let world = World::new(1);
    let story = |handle: Handle| async move {
        let story = Story::begin(handle, &[own, FabricKind::TCP]).await;
        story.stream(1).await.unwrap();
        assert_eq!(story.uses().to_string(), "of-my-own");
        story.end().await;
    };
    world.run(story(world.handle())).unwrap();
    world.finish().unwrap();
}

#[test]
fn one_seed_gives_one_history() {
    for seed in [1, 2] {
        assert_eq!(run_seed(seed), run_seed(seed));
    }
}

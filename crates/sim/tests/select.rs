//! `select!` in a loop around `recv`, beside other transfers: no value is lost or duplicated, and all arrive in order.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_SEED=7` runs one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{pin::pin, time::Duration};

use futures::future::{Either, join, select};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{DataType, Key, Mode};
use tensorwire_rendezvous::{CancellationToken, RecvArgs, Step, Tensor, Worker, WorkerError};
use tensorwire_sim::{Handle, Node, Rng, Summary, World};

use crate::common::builder;
use crate::join_all::join_all;

/// Seeds that run if `SIM_SEEDS` is not set.
const SEEDS: u64 = 500;

/// Values of each stream.
const VALUES: u64 = 20;

const SENDER: &str = "/job:ps/replica:0/task:0";
const RECEIVER: &str = "/job:worker/replica:0/task:0";
const SENDER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const RECEIVER_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

#[derive(Debug, Clone, Copy)]
struct Setup {
    mode: Mode,
    requests_max: u32,
    contents_max: u32,
    depth: u32,
    streams: u64,
    patience: Duration,
}

impl Setup {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            mode: rng.pick([Mode::Original, Mode::Counted, Mode::Counted]),
            requests_max: rng.pick([1, 2, 64]),
            contents_max: rng.pick([1, 2, 64]),
            depth: rng.pick([4, 6, 128]),
            streams: 1 + rng.below(3) as u64,
            patience: Duration::from_micros(rng.pick([20, 200, 5_000])),
        }
    }
}

async fn worker(node: &Node, name: &str, setup: Setup) -> Worker {
    let builder = builder(node, name).memory(|memory| {
        memory.source_bytes = 16 << 20;
        memory.receive_bytes = 64 << 10;
    });
    let builder = builder.flow(|flow| {
        flow.mode = setup.mode;
        flow.requests_max = setup.requests_max;
        flow.contents_max = setup.contents_max;
        flow.depth = setup.depth;
        flow.ring_bytes = 8 << 10;
    });
    builder.start().await.unwrap()
}

fn tensor(handle: &Handle, worker: &Worker, transfer: u64, length: usize) -> Tensor {
    let mut buffer = worker.pool().try_alloc(length).unwrap();
    handle.pattern().fill(transfer, &mut buffer);
    Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
}

fn length(stream: u64, value: u64) -> usize {
    [64, 1, 5003, 64, 9000][((stream + value) % 5) as usize]
}

async fn send(handle: Handle, sender: Worker, stream: u64, mut rng: Rng) {
    let key = sender.key(SENDER_CPU, RECEIVER_CPU, &format!("stream{stream}")).unwrap();
    for value in 0..VALUES {
        if rng.chance(1, 2) {
            handle.runtime().sleep(rng.duration(Duration::from_micros(500))).await;
        }
        let tensor = tensor(&handle, &sender, stream * 1000 + value, length(stream, value));
        sender.shared_step(1).send(&key, tensor).unwrap();
    }
}

/// The value that `step` receives, unless a token cancels the receive at `tick`.
async fn until(step: &Step, key: &Key, tick: impl Future<Output = ()>) -> Option<Tensor> {
    let token = CancellationToken::new();
    let args = RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() };
    let cancel = async {
        tick.await;
        token.cancel();
    };
    match join(step.recv(key).with(args).into_future(), cancel).await.0 {
        Ok(delivered) => Some(delivered.tensor),
        Err(WorkerError::Cancelled { .. }) => None,
        Err(other) => panic!("{other}"),
    }
}

/// Receives all values of `stream`, and cancels receives again and again. Returns how often.
async fn receive(handle: Handle, receiver: Worker, stream: u64, patience: Duration, mut rng: Rng) -> u64 {
    let key = receiver.key(SENDER_CPU, RECEIVER_CPU, &format!("stream{stream}")).unwrap();
    let step = receiver.shared_step(1);
    let (mut next, mut given_up) = (0, 0);
    while next < VALUES {
        // Patience grows, because otherwise a slow wire would never deliver a value.
        let moment = rng.duration(patience * (1 + given_up as u32 / 4));
        let tick = handle.runtime().sleep(moment);
        let received = if rng.chance(1, 2) {
            until(&step, &key, tick).await
        } else {
            match select(pin!(step.recv(&key).into_future()), tick).await {
                Either::Left((tensor, _)) => Some(tensor.unwrap()),
                Either::Right(((), _)) => None,
            }
        };
        match received {
            Some(tensor) => {
                assert_eq!(tensor.bytes().len(), length(stream, next), "value {next} of stream {stream}");
                handle.verify(stream * 1000 + next, tensor.bytes());
                next += 1;
            }
            None => given_up += 1,
        }
    }
    // A further value would be a duplicate.
    let more = step.recv(&key).timeout(Duration::from_millis(800)).await;
    assert!(matches!(more, Err(WorkerError::DeadlineExceeded { .. })), "stream {stream}: {more:?}");
    given_up
}

async fn scenario(handle: Handle) -> u64 {
    let mut rng = Rng::new(handle.seed()).fork(78);
    let setup = Setup::draw(&mut rng);
    let (sender_node, receiver_node) =
        (handle.start_node("sender:1").unwrap(), handle.start_node("receiver:1").unwrap());
    let sender = worker(&sender_node, SENDER, setup).await;
    let receiver = worker(&receiver_node, RECEIVER, setup).await;
    let peer = receiver.peer_at("sender:1").await.unwrap();
    sender.publish("load", tensor(&handle, &sender, 1 << 40, 3000)).unwrap();
    let load = async {
        for _ in 0..20 {
            let fetched = peer.fetch("load").await.unwrap();
            handle.verify(1 << 40, fetched.bytes());
        }
    };
    let mut forks = (0..).map(|number| Rng::new(rng.next_u64()).fork(number));
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for stream in 0..setup.streams {
        let sending = send(handle.clone(), sender.clone(), stream, forks.next().unwrap());
        sends.push(sender_node.run("send", sending));
        let rng = forks.next().unwrap();
        let receiving = receive(handle.clone(), receiver.clone(), stream, setup.patience, rng);
        receives.push(receiver_node.run("receive", receiving));
    }
    let (_, (given_up, ())) = join(join_all(sends), join(join_all(receives), load)).await;
    join(receiver.shutdown(), sender.shutdown()).await;
    handle.runtime().sleep(Duration::from_secs(2)).await;
    let memory = receiver.receive_memory();
    assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0));
    given_up.into_iter().map(Option::unwrap).sum()
}

fn run_seed(seed: u64) -> (u64, Summary) {
    let world = World::new(seed);
    world.replayed_by("select");
    let given_up = world.run(scenario(world.handle())).unwrap();
    (given_up, world.finish().unwrap())
}

#[test]
fn s3_receives_given_up_in_a_loop_lose_and_double_nothing() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    if let Some(seed) = number("SIM_SEED") {
        eprintln!("{:?}", run_seed(seed));
        return;
    }
    let seeds = number("SIM_SEEDS").unwrap_or(SEEDS);
    let given_up: u64 = (0..seeds).map(|seed| run_seed(seed).0).sum();
    assert!(given_up > seeds * 20, "only {given_up} receives were given up");
    eprintln!("{seeds} seeds, {given_up} receives given up");
}

#[test]
fn one_seed_gives_one_history() {
    for seed in [1, 2, 3] {
        assert_eq!(run_seed(seed), run_seed(seed));
    }
}

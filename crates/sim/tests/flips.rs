//! Bits that flip in flight, between workers that validate contents.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use tensorwire_fabric::Runtime;
use tensorwire_protocol::{DataType, Mode, Validation};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};
use tensorwire_sim::{Handle, Node, Rng, Swarm, World};

use crate::common::builder;

const SENDER: &str = "/job:ps/replica:0/task:0";
const RECEIVER: &str = "/job:worker/replica:0/task:0";

/// Worlds of each test.
const SEEDS: u64 = 40;

/// Lengths that travel inside messages, and lengths that are written.
const LENGTHS: [usize; 6] = [1, 8, 100, 4096, 5003, 20_000];

/// The settings of the workers.
#[derive(Debug, Clone, Copy)]
struct Setting {
    mode: Mode,
    validation: Validation,
    /// The fabric writes many ranges at once.
    vectored: bool,
    eager_bytes_max: u32,
}

const COUNTED: Setting =
    Setting { mode: Mode::Counted, validation: Validation::Xxh3, vectored: true, eager_bytes_max: 4096 };
const ORIGINAL: Setting = Setting { mode: Mode::Original, ..COUNTED };

async fn worker(node: &Node, name: &str, setting: Setting, validation: Validation) -> Worker {
    let builder = builder(node, name).validation(validation).flow(|flow| {
        flow.mode = setting.mode;
        flow.eager_bytes_max = setting.eager_bytes_max;
    });
    builder.start().await.unwrap()
}

fn tensor(worker: &Worker, handle: &Handle, transfer: u64, length: usize) -> Tensor {
    let mut buffer = worker.pool().try_alloc(length).unwrap();
    handle.pattern().fill(transfer, &mut buffer);
    Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
}

/// Makes fetches one after the other: each fails exactly if a bit was flipped meanwhile. Returns how many failed.
async fn fetches(handle: &Handle, sender: &Worker, receiver: &Worker, count: u64) -> u64 {
    let peer = receiver.peer_at("sender:1").await.unwrap();
    let mut rng = Rng::new(handle.seed()).fork(5);
    let mut failed = 0;
    for transfer in 0..count {
        let length = rng.pick(LENGTHS);
        let name = format!("t{}", rng.below(3));
        sender.publish(&name, tensor(sender, handle, transfer, length)).unwrap();
        let before = handle.flips();
        let fetched = peer.fetch(&name).await;
        let has_flipped = handle.flips() > before;
        match fetched {
            Ok(got) => {
                handle.verify(transfer, got.bytes());
                assert_eq!(got.bytes().len(), length);
                assert!(!has_flipped, "seed {}: a flip went unseen in {got:?}", handle.seed());
            }
            Err(error @ WorkerError::Corrupted { .. }) => {
                assert!(has_flipped, "{error}");
                let text = error.to_string();
                assert!(text.contains(SENDER) && text.contains(&name), "{text}");
                failed += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    failed
}

/// How many fetches fail of `count` under each seed.
fn failing(setting: Setting, flips_of_65536: u32, count: u64) -> u64 {
    let mut failed = 0;
    for seed in 0..SEEDS {
        let world = World::with_swarm(
            seed,
            Swarm { vectored: setting.vectored, ..Swarm::draw(&mut Rng::new(seed).fork(1)) },
        );
        world.replayed_by("flips");
        let handle = world.handle();
        failed += world
            .run(async {
                let nodes = ["sender:1", "receiver:1"].map(|address| handle.start_node(address).unwrap());
                let sender = worker(&nodes[0], SENDER, setting, setting.validation).await;
                let receiver = worker(&nodes[1], RECEIVER, setting, Validation::Off).await;
                receiver.peer_at("sender:1").await.unwrap();
                handle.flip_bits(flips_of_65536);
                let failed = fetches(&handle, &sender, &receiver, count).await;
                let info = &receiver.peers()[0];
                assert_eq!(info.counters.checksums_mismatched, failed);
                assert_eq!(info.counters.checksums_matched, count - failed);
                handle.heal();
                // The connection is still open, and works.
                assert_eq!(fetches(&handle, &sender, &receiver, 3).await, 0);
                assert_eq!(receiver.peers()[0].counters.checksums_matched, count - failed + 3);
                // Memory that an eager content left unused returns later.
                handle.runtime().sleep(Duration::from_secs(1)).await;
                let memory = receiver.receive_memory();
                assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0));
                receiver.shutdown().await;
                sender.shutdown().await;
                failed
            })
            .unwrap();
        world.finish().unwrap();
    }
    failed
}

/// Some fail, most do not.
fn assert_some_fail(setting: Setting) {
    let failed = failing(setting, 2000, 40);
    assert!(failed > 20 && failed < SEEDS * 40 / 2, "{setting:?}: {failed} of {}", SEEDS * 40);
}

#[test]
fn d_flip_each_flip_is_an_error_of_its_fetch_and_of_no_other() {
    assert_some_fail(COUNTED);
    assert_some_fail(Setting { validation: Validation::Crc32c, ..COUNTED });
    assert_some_fail(ORIGINAL);
}

#[test]
fn d_flip_when_every_piece_is_changed_no_fetch_succeeds() {
    // Contents inside messages are not changed when their message wraps around the ring.
    assert_eq!(failing(Setting { eager_bytes_max: 0, ..COUNTED }, 1 << 16, 10), SEEDS * 10);
    assert_eq!(failing(Setting { validation: Validation::Crc32c, ..ORIGINAL }, 1 << 16, 10), SEEDS * 10);
}

#[test]
fn d_flip_without_vectored_writes_the_result_comes_first() {
    let setting = Setting { vectored: false, ..COUNTED };
    assert_some_fail(setting);
    assert_eq!(failing(Setting { eager_bytes_max: 0, ..setting }, 1 << 16, 10), SEEDS * 10);
}

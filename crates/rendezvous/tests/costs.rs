//! What a pull over shared memory costs each of two processes: locks, allocations, wake-ups, tasks.
//!
//! Both workers are in this process, each on a thread of its own, and what is counted is counted per thread.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::IntoFuture, sync::mpsc, thread};

use allocation_counter::measure;
use futures::{
    poll,
    stream::{FuturesUnordered, StreamExt},
};
use tensorwire_fabric::{FabricKind, Wait};
use tensorwire_protocol::Key;
use tensorwire_rendezvous::{Tensor, Worker};
use tokio::{runtime::Runtime, sync::mpsc::UnboundedReceiver};

/// A name that is too long for a catalogue, so that each pull of it asks the sender.
const ASKED: &str = concat!(
    "a name of more than a hundred and twelve bytes, which is the longest that a cell of the catalogue has room for, so ",
    "that it has no cell"
);

/// A name that the receiver finds in the catalogue.
const FOUND: &str = "w";

/// Times that the pulls are counted: what the process and its neighbours do beside them only adds.
const ROUNDS: usize = 3;

/// What one side spent on the counted pulls.
#[derive(Debug, Clone, Copy)]
struct Cost {
    locks: f64,
    allocations: f64,
    /// How often the thread slept in the kernel.
    sleeps: f64,
    tasks: usize,
}

impl Cost {
    fn least(self, other: Self) -> Self {
        Self {
            locks: self.locks.min(other.locks),
            allocations: self.allocations.min(other.allocations),
            sleeps: self.sleeps.min(other.sleeps),
            tasks: self.tasks.min(other.tasks),
        }
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs `work`, which is so many pulls, on this thread and counts.
fn counted(runtime: &Runtime, pulls: u32, work: impl Future<Output = ()>) -> Cost {
    let (locks, parks) = (tensorwire_testpoints::locks_taken(), runtime.metrics().worker_park_count(0));
    let allocated = measure(|| runtime.block_on(work));
    let of_one = |count: u64| count as f64 / f64::from(pulls);
    Cost {
        locks: of_one(tensorwire_testpoints::locks_taken() - locks),
        allocations: of_one(allocated.count_total),
        sleeps: of_one(runtime.metrics().worker_park_count(0) - parks),
        tasks: runtime.metrics().num_alive_tasks(),
    }
}

fn worker(name: &str, wait: Wait) -> tensorwire_rendezvous::WorkerBuilder {
    Worker::builder(name).require(FabricKind::SHM).wait(wait)
}

/// Publishes, and counts from one message to the next.
fn serve(
    wait: Wait,
    (name, bytes): (&str, usize),
    pulls: u32,
    address: &mpsc::Sender<String>,
    mut marks: UnboundedReceiver<()>,
    done: &mpsc::Sender<Cost>,
) {
    let runtime = runtime();
    let server = runtime.block_on(async {
        let server = worker("server", wait).start().await.unwrap();
        server
            .publish(name, Tensor::from_values(server.pool(), &[bytes as u64], &vec![7u8; bytes]).unwrap())
            .unwrap();
        address.send(server.address().to_owned()).unwrap();
        server
    });
    loop {
        let cost = counted(&runtime, pulls, async {
            let _mark = marks.recv().await;
        });
        done.send(cost).unwrap();
        if marks.is_closed() && marks.is_empty() {
            break;
        }
    }
    runtime.block_on(server.shutdown());
}

/// The least costs of a pull at the receiver and at the sender, counted over so many pulls.
fn costs(wait: Wait, tensor: (&'static str, usize), pulls: u32) -> (Cost, Cost) {
    let rounds = (0..ROUNDS).map(|_| costs_of_round(wait, tensor, pulls));
    let least = |(receiver, sender): (Cost, Cost), (at_receiver, at_sender)| {
        (receiver.least(at_receiver), sender.least(at_sender))
    };
    rounds.reduce(least).unwrap()
}

fn costs_of_round(wait: Wait, (name, bytes): (&'static str, usize), pulls: u32) -> (Cost, Cost) {
    let (say, address) = mpsc::channel();
    let (mark, marks) = tokio::sync::mpsc::unbounded_channel();
    let (done, spent) = mpsc::channel();
    let server = thread::spawn(move || serve(wait, (name, bytes), pulls, &say, marks, &done));
    let runtime = runtime();
    let address = address.recv().unwrap();
    let (client, peer) = runtime.block_on(async {
        let client = worker("client", wait).start().await.unwrap();
        let peer = client.peer_at(&address).await.unwrap();
        (client, peer)
    });
    let pull = async || {
        for _ in 0..pulls {
            assert_eq!(peer.fetch(name).await.unwrap().bytes().len(), bytes);
        }
    };
    runtime.block_on(pull());
    mark.send(()).unwrap();
    spent.recv().unwrap();
    let receiver = counted(&runtime, pulls, pull());
    mark.send(()).unwrap();
    let sender = spent.recv().unwrap();
    drop(mark);
    runtime.block_on(client.shutdown());
    server.join().unwrap();
    (receiver, sender)
}

/// What a receive of a step costs both sides together.
const LOCKS_OF_RECEIVE: f64 = 11.2 + BESIDE;
const ALLOCATIONS_OF_RECEIVE: f64 = 8.1 + BESIDE;

/// What happens beside the pulls once in a while counts too.
const BESIDE: f64 = 0.5;

#[test]
fn a_small_pull_takes_few_locks_and_allocations() {
    let _turn = super::turn();
    // Four on each side. With `Wait::Busy`, on a busy machine, a reply may come after the first poll: then
    // the task leaves its waker, or polls again.
    for (wait, most, most_sleeps) in [(Wait::Sleep, 4.0, 1.0 + BESIDE), (Wait::Busy, 6.0, 0.0)] {
        let (receiver, sender) = costs(wait, (ASKED, 8), 100);
        for (side, cost, locks, allocations) in
            [("receiver", receiver, most, 3.0), ("sender", sender, 4.0, 0.0)]
        {
            println!("8 B, {wait:?}, {side}: {cost:?}");
            assert!(cost.locks < locks + BESIDE, "{wait:?}, {side}: {cost:?}");
            assert!(cost.allocations < allocations + BESIDE, "{wait:?}, {side}: {cost:?}");
            assert_eq!(cost.tasks, 1, "{wait:?}, {side}");
            assert!(cost.sleeps <= most_sleeps, "{wait:?}, {side}: {cost:?}");
        }
    }
}

#[test]
fn a_pull_out_of_the_catalogue_costs_the_sender_nothing() {
    let _turn = super::turn();
    for bytes in [8, 64 << 10] {
        let (receiver, sender) = costs(Wait::Sleep, (FOUND, bytes), 100);
        println!("{bytes} B out of the catalogue: {receiver:?}, {sender:?}");
        assert!(receiver.locks < 2.0 + BESIDE && receiver.allocations < 2.0 + BESIDE, "{receiver:?}");
        assert!(receiver.sleeps < BESIDE, "nothing is waited for: {receiver:?}");
        assert!(sender.locks < BESIDE && sender.allocations < BESIDE && sender.sleeps < BESIDE, "{sender:?}");
    }
}

#[test]
fn a_large_pull_allocates_nothing_for_a_piece_and_takes_at_most_two_locks_for_it() {
    /// What a poll copies at most.
    const PIECE: usize = 256 << 10;
    const BYTES: usize = 64 << 20;
    let _turn = super::turn();
    let (receiver, sender) = costs(Wait::Sleep, (ASKED, BYTES), 10);
    println!("64 MiB: {receiver:?}, {sender:?}");
    let pieces = (BYTES / PIECE) as f64;
    // Each poll takes one: those that copy a piece, and those that wait for what the second copier has begun. Beside them are
    // those of any pull.
    assert!(receiver.locks < 2.0 * pieces + 40.0 && sender.locks < 40.0, "{receiver:?}, {sender:?}");
    assert!(receiver.allocations < 8.0 && sender.allocations < 8.0, "{receiver:?}, {sender:?}");
}

#[test]
fn a_pull_by_handle_allocates_once_and_into_a_buffer_not_at_all() {
    const PULLS: u32 = 100;
    let _turn = super::turn();
    for bytes in [8, 64 << 10] {
        let (say, address) = mpsc::channel();
        let (mark, marks) = tokio::sync::mpsc::unbounded_channel();
        let (done, _spent) = mpsc::channel();
        let server = thread::spawn(move || serve(Wait::Sleep, (FOUND, bytes), PULLS, &say, marks, &done));
        let (runtime, address) = (runtime(), address.recv().unwrap());
        let (client, tensor) = runtime.block_on(async {
            let client = worker("client", Wait::Sleep).start().await.unwrap();
            let tensor = client.peer_at(&address).await.unwrap().tensor(FOUND).unwrap();
            (client, tensor)
        });
        let mut buffer = Some(runtime.block_on(client.receive_pool().alloc(bytes)).unwrap());
        let mut filled = async |pulls| {
            for _ in 0..pulls {
                let filled = tensor.fetch_into(buffer.take().unwrap()).await.unwrap();
                assert_eq!(filled.bytes().len(), bytes);
                buffer = Some(filled.buffer);
            }
        };
        // The first is asked for, and makes what later ones use.
        runtime.block_on(filled(10));
        let into_a_buffer = counted(&runtime, PULLS, filled(PULLS));
        let as_a_tensor = counted(&runtime, PULLS, async {
            for _ in 0..PULLS {
                assert_eq!(tensor.fetch().await.unwrap().bytes().len(), bytes);
            }
        });
        println!("{bytes} B by handle: into a buffer {into_a_buffer:?}, as a tensor {as_a_tensor:?}");
        assert!(into_a_buffer.allocations < 0.1, "{into_a_buffer:?}");
        assert!(as_a_tensor.allocations < 1.0 + BESIDE, "{as_a_tensor:?}");
        assert!(into_a_buffer.locks < 3.0 + BESIDE, "{into_a_buffer:?}");
        drop(mark);
        runtime.block_on(client.shutdown());
        server.join().unwrap();
    }
}

/// Receives of a step that are outstanding at once: many more than the connection has entries for.
const OUTSTANDING: u32 = 2000;

/// Receives all values of a step, which are sent once all receives are outstanding.
async fn receive_step(server: &Worker, client: &Worker, keys: &[(Key, Key)], step: i64) {
    let (here, there) = (client.shared_step(step), server.shared_step(step));
    let mut open: FuturesUnordered<_> = keys.iter().map(|(key, _)| here.recv(key).into_future()).collect();
    assert!(poll!(open.next()).is_pending());
    for (_, key) in keys {
        there.send(key, Tensor::from_values(server.pool(), &[8], &[7u8; 8]).unwrap()).unwrap();
    }
    while let Some(received) = open.next().await {
        assert_eq!(received.unwrap().bytes(), [7; 8]);
    }
}

/// Two workers in one thread, so that all counts are those of both sides.
async fn two_workers() -> (Worker, Worker) {
    let server = worker("server", Wait::Sleep).start().await.unwrap();
    let client = worker("client", Wait::Sleep).start().await.unwrap();
    client.peer_at(server.address()).await.unwrap();
    (server, client)
}

#[test]
fn a_list_out_of_the_catalogue_pays_once_for_what_its_names_share() {
    const NAMES: u32 = 64;
    let _turn = super::turn();
    let runtime = runtime();
    let (server, client) = runtime.block_on(two_workers());
    let names: Vec<_> = (0..NAMES).map(|number| format!("tensor {number}")).collect();
    for name in &names {
        let tensor = Tensor::from_values(server.pool(), &[8], &[7u8; 8]).unwrap();
        server.publish(name, tensor).unwrap();
    }
    let cost = || {
        counted(&runtime, NAMES, async {
            let peer = client.peer_at(server.address()).await.unwrap();
            assert_eq!(peer.fetch_many(&names).await.unwrap().len(), names.len());
        })
    };
    // The first asks the peer for each.
    cost();
    let of_name = (0..ROUNDS).map(|_| cost()).reduce(Cost::least).unwrap();
    println!("a name of a list: {of_name:?}");
    assert!(of_name.locks < BESIDE && of_name.allocations < 2.0 + BESIDE, "{of_name:?}");
    assert!(of_name.sleeps < BESIDE, "nothing is waited for: {of_name:?}");
    runtime.block_on(async { tokio::join!(client.shutdown(), server.shutdown()) });
}

#[test]
fn a_receive_among_thousands_costs_no_more_than_one_among_a_few() {
    let _turn = super::turn();
    let runtime = runtime();
    let (server, client) = runtime.block_on(two_workers());
    let key = |worker: &Worker, number| {
        worker.key(server.name(), client.name(), &format!("edge {number}")).unwrap()
    };
    let keys: Vec<_> = (0..OUTSTANDING).map(|number| (key(&client, number), key(&server, number))).collect();
    let mut steps = 0..;
    let mut least_of = |count: u32| {
        let mut cost = || {
            let (step, keys) = (steps.next().unwrap(), &keys[..count as usize]);
            counted(&runtime, count, receive_step(&server, &client, keys, step))
        };
        // The receiver has seen each key, and the tables have grown.
        cost();
        (0..ROUNDS).map(|_| cost()).reduce(Cost::least).unwrap()
    };
    let (few, many) = (least_of(100), least_of(OUTSTANDING));
    println!("few outstanding: {few:?}; many: {many:?}");
    for (count, cost) in [("few", few), ("many", many)] {
        assert!(
            cost.locks < LOCKS_OF_RECEIVE && cost.allocations < ALLOCATIONS_OF_RECEIVE,
            "{count}: {cost:?}"
        );
        assert!(cost.sleeps < BESIDE, "{count}: messages wake in batches: {cost:?}");
    }
    runtime.block_on(async { tokio::join!(client.shutdown(), server.shutdown()) });
}

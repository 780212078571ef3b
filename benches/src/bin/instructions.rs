//! Operations of which `scripts/check-instructions` counts the instructions of both sides.
//!
//! Both workers are in this process and on one thread, and sleep as soon as they have no work. So the runtime steps
//! them in turns, no task polls in vain, and a count does not depend on a clock. Each printed line is a case and the
//! number of operations of one call of [`counted`], in the order of the calls.

#![allow(clippy::expect_used)] // a case that cannot run stops, and the check with it

use std::{cell::Cell, future::IntoFuture, pin::Pin, sync::Arc};

use futures::{
    poll,
    stream::{FuturesUnordered, StreamExt},
};
use tensorwire::{FabricKind, Key, Peer, RemoteTensor, Step, Tensor, Worker, settings::Wait};
use tensorwire_benches::fabric_pair::FabricPair;
use tensorwire_fabric::TokioRuntime;
use tensorwire_fabric_shm::ShmFabric;
use tokio::runtime::Runtime;

/// A name that the receiver finds in the catalogue.
const FOUND: &str = "w";

/// A name that is too long for a catalogue, so that each pull of it asks the sender.
const ASKED: &str = concat!(
    "a name of more than a hundred and twelve bytes, which is the longest that a cell of the catalogue has room for, so ",
    "that it has no cell"
);

/// A name that the receiver finds in the catalogue, of a longer value.
const LONG: &str = "long";
const LONG_BYTES: usize = 64 << 10;

/// Operations before the counted ones: after them connections, memory and caches exist.
const WARM_UP: usize = 200;

/// Operations that are counted. Work that a runtime does once in 61 turns, and occasional growth, is spread over them.
const OPERATIONS: usize = 2_000;

/// Pulls that are outstanding at once. Divides the numbers of operations.
const PULLS_OUTSTANDING: usize = 50;

/// Receives of a step that are outstanding at once.
const OUTSTANDING: usize = 1_000;

/// The counted operations: valgrind counts from here to the return, on this thread.
#[inline(never)]
fn counted(runtime: &Runtime, work: Pin<&mut dyn Future<Output = ()>>) {
    runtime.block_on(work);
}

/// Two workers on one host, which exchange values over one fabric.
struct Pair {
    server: Worker,
    /// Has a name, because a step's keys name the receiver.
    client: Worker,
    to_server: Peer,
    to_client: Peer,
}

impl Pair {
    async fn over(fabric: FabricKind) -> Self {
        let start = async |name: &str| {
            let builder = Worker::builder(&format!("{name}_{fabric}")).require(fabric).wait(Wait::Sleep);
            builder.start().await.expect("a worker")
        };
        let (server, client) = (start("server").await, start("client").await);
        for (name, bytes) in [(FOUND, 8), (ASKED, 8), (LONG, LONG_BYTES)] {
            server.publish(name, tensor(&server, bytes)).expect("a name");
        }
        let to_server = client.peer_at(server.address()).await.expect("the server");
        let to_client = server.peer_at(client.address()).await.expect("the client");
        Self { server, client, to_server, to_client }
    }

    /// Pulls of a published value.
    async fn pull(&self, name: &str, bytes: usize, count: usize) {
        for _ in 0..count {
            let pulled = self.to_server.fetch(name).await.expect("a pull");
            assert_eq!(pulled.bytes().len(), bytes);
        }
    }

    /// Pulls of a published value, [`PULLS_OUTSTANDING`] at a time.
    async fn pull_many(&self, name: &str, bytes: usize, count: usize) {
        for _ in 0..count / PULLS_OUTSTANDING {
            let pulls = (0..PULLS_OUTSTANDING).map(|_| self.to_server.fetch(name).into_future());
            let mut pulls: FuturesUnordered<_> = pulls.collect();
            while let Some(pulled) = pulls.next().await {
                assert_eq!(pulled.expect("a pull").bytes().len(), bytes);
            }
        }
    }

    /// Pulls of a published value, by a handle.
    async fn pull_by(&self, handle: &RemoteTensor, count: usize) {
        for _ in 0..count {
            let pulled = handle.fetch().await.expect("a pull");
            assert_eq!(pulled.bytes().len(), 8);
        }
    }

    /// Receives of a step, each of a value that was sent already.
    async fn receive(&self, steps: &(Step, Step), sent: &Tensor, count: usize) {
        let (sender, receiver) = (steps.0.to(&self.to_client), steps.1.from(&self.to_server));
        for _ in 0..count {
            sender.send("gradient", sent.clone()).expect("a send");
            let received = receiver.recv("gradient").await.expect("a receive");
            assert_eq!(received.bytes().len(), sent.bytes().len());
        }
    }

    /// Steps whose receives are all outstanding before their values are sent.
    async fn receive_outstanding(&self, keys: &[(Key, Key)], steps: &Cell<i64>, sent: &Tensor, count: usize) {
        for _ in 0..count.div_ceil(keys.len()) {
            let number = steps.replace(steps.get() + 1);
            let (here, there) = (self.client.step(number), self.server.step(number));
            let mut open: FuturesUnordered<_> =
                keys.iter().map(|(key, _)| here.recv(key).into_future()).collect();
            assert!(poll!(open.next()).is_pending());
            for (_, key) in keys {
                there.send(key, sent.clone()).expect("a send");
            }
            while let Some(received) = open.next().await {
                assert_eq!(received.expect("a receive").bytes().len(), sent.bytes().len());
            }
        }
    }

    async fn shutdown(self) {
        self.client.shutdown().await;
        self.server.shutdown().await;
    }
}

fn tensor(worker: &Worker, bytes: usize) -> Tensor {
    Tensor::from_values(worker.pool(), &[bytes as u64], &vec![7u8; bytes]).expect("a tensor")
}

/// The keys of one step, as the receiver and the sender make them.
fn outstanding_keys(pair: &Pair) -> Vec<(Key, Key)> {
    let key = |worker: &Worker, number| {
        worker.key(pair.server.name(), pair.client.name(), &format!("edge {number}")).expect("a key")
    };
    (0..OUTSTANDING).map(|number| (key(&pair.client, number), key(&pair.server, number))).collect()
}

/// Counts `operations`, whose argument is their number.
fn case<Done: Future<Output = ()>>(runtime: &Runtime, name: &str, operations: impl Fn(usize) -> Done) {
    runtime.block_on(operations(WARM_UP));
    counted(runtime, std::pin::pin!(operations(OPERATIONS)));
    println!("{name}\t{OPERATIONS}");
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let shm = runtime.block_on(Pair::over(FabricKind::SHM));
    case(&runtime, "shm, 8 B out of the catalogue", |count| shm.pull(FOUND, 8, count));
    let handle = shm.to_server.tensor(FOUND).expect("a name");
    case(&runtime, "shm, 8 B out of the catalogue by a handle", |count| shm.pull_by(&handle, count));
    case(&runtime, "shm, 64 KiB out of the catalogue", |count| shm.pull(LONG, LONG_BYTES, count));
    case(&runtime, "shm, 8 B by message", |count| shm.pull(ASKED, 8, count));
    let (steps, sent) = ((shm.server.step(1), shm.client.step(1)), tensor(&shm.server, 8));
    case(&runtime, "shm, 8 B sent and received in a step", |count| shm.receive(&steps, &sent, count));
    drop(steps);
    let keys = outstanding_keys(&shm);
    let steps = Cell::new(2);
    case(&runtime, "shm, 8 B received in a step, 1,000 outstanding", |count| {
        shm.receive_outstanding(&keys, &steps, &sent, count)
    });
    runtime.block_on(shm.shutdown());
    drop(handle);
    let inside = runtime.enter();
    let clock = Arc::new(TokioRuntime::current().expect("inside a runtime"));
    let fabric = ShmFabric::new(clock.clone()).expect("shared memory");
    let alone = runtime.block_on(FabricPair::connect(&fabric, &*clock));
    case(&runtime, "shm, 8 B written and taken, without a worker", async |count| {
        for _ in 0..count {
            alone.write_inline().await;
        }
    });
    drop((alone, fabric, inside));
    let tcp = runtime.block_on(Pair::over(FabricKind::TCP));
    case(&runtime, "tcp, 8 B", |count| tcp.pull(FOUND, 8, count));
    case(&runtime, "tcp, 8 B, 50 outstanding", |count| tcp.pull_many(FOUND, 8, count));
    runtime.block_on(tcp.shutdown());
}

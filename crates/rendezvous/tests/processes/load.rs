//! Many receives at once, with bounded memory.

use std::{fs, sync::Arc, thread, time::Duration};

use futures::{StreamExt, future::join, stream::FuturesUnordered};
use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_protocol::Key;
use tensorwire_rendezvous::{Tensor, Worker};

use crate::harness::{
    CHILD_CPU, Other, PARENT, PARENT_CPU, bounded, builder, info, kind, parents_lines, role, say, step,
};

const CHILD: &str = "/job:child/replica:0/task:0";

/// How long a whole test may take.
const LIMIT: Duration = Duration::from_secs(100);

/// Of each value, in bytes: more than travels within a message.
const BYTES: usize = 8 << 10;

/// Cap of the receive pool; far less than all values together.
const POOL: u64 = 16 << 20;

/// What a waiting receive may cost: its future, its request and its buffers.
const BYTES_PER_RECEIVE: usize = 8 << 10;

/// What a worker may need besides.
const BASE: usize = 96 << 20;

/// This process's resident memory, in bytes.
fn resident() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

fn key_of(worker: &Worker, number: usize) -> Key {
    worker.key(CHILD_CPU, PARENT_CPU, &format!("edge {number}")).unwrap()
}

/// Each number below `count` once, in an order far from theirs.
fn shuffled(count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |number| number * 7919 % count)
}

fn send_all(worker: &Worker, count: usize) {
    let value = Tensor::from_values(worker.pool(), &[BYTES as u64 / 4], &vec![7u32; BYTES / 4]).unwrap();
    for number in shuffled(count) {
        worker.shared_step(1).send(&key_of(worker, number), value.clone()).unwrap();
    }
}

/// Sends so many values at the parent's line; its runtime stands still until then.
async fn producer(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[0])).liveness(Duration::from_secs(1)).start().await.unwrap();
    let count = words[1].parse().unwrap();
    say(worker.address());
    let mut lines = parents_lines();
    assert_eq!(lines.recv().await.unwrap(), words[2]);
    if words[2] == "block" {
        say("blocked");
        // Nothing but the control plane's own thread runs until the next line.
        lines = thread::spawn(move || {
            assert_eq!(lines.blocking_recv().unwrap(), "go");
            lines
        })
        .join()
        .unwrap();
    }
    send_all(&worker, count);
    lines.recv().await;
}

/// Receives `count` values; `ready` runs once all receives have begun.
async fn receive_all(worker: &Worker, count: usize, ready: impl AsyncFnOnce()) {
    let at_step = worker.shared_step(1);
    let receive = async |number: usize| {
        let tensor = at_step.recv(&key_of(worker, number)).await.unwrap();
        assert!(tensor.bytes().len() == BYTES && tensor.bytes().iter().all(|byte| matches!(byte, 0 | 7)));
    };
    let mut receives: FuturesUnordered<_> = (0..count).map(receive).collect();
    assert!(futures::poll!(receives.next()).is_pending());
    let all = async { while receives.next().await.is_some() {} };
    join(all, ready()).await;
}

fn assert_bounded(worker: &Worker, before: usize, count: usize) {
    let grown = resident().saturating_sub(before);
    let bound = BASE + count * BYTES_PER_RECEIVE;
    assert!(grown < bound, "{count} receives took {grown} bytes, at most {bound} are allowed");
    let pool = worker.receive_memory();
    assert!(pool.block_bytes <= POOL && pool.leaked_bytes == 0, "{pool:?}");
}

fn parent(fabric: FabricKind) -> tensorwire_rendezvous::WorkerBuilder {
    builder(PARENT, fabric).timeout(LIMIT).liveness(Duration::from_secs(1)).memory(|memory| {
        memory.receive_bytes = POOL;
        memory.block_bytes = 1 << 20;
    })
}

fn ten_thousand(fabric: &'static str) {
    const COUNT: usize = 10_000;
    const TEST: &str = "load::ten_thousand_outstanding_receives_all_finish";
    bounded(LIMIT, |_| async move {
        let mut other = Other::start(TEST, &format!("{fabric} {COUNT} go"));
        let worker = parent(kind(fabric)).start().await.unwrap();
        worker.peer_at(&other.hear().await).await.unwrap();
        let before = resident();
        receive_all(&worker, COUNT, async || {
            assert_bounded(&worker, before, COUNT);
            other.tell("go");
        })
        .await;
        assert_bounded(&worker, before, COUNT);
        assert_eq!(worker.receive_memory().used_bytes, 0);
        worker.shutdown().await;
    });
}

#[test]
fn ten_thousand_outstanding_receives_all_finish() {
    if let Some(words) = role() {
        return bounded(LIMIT, |_| producer(words));
    }
    ten_thousand("shm");
    ten_thousand("tcp");
}

/// Three times the liveness bound: a reader that stands still is not dead.
const BLOCKED: Duration = Duration::from_secs(3);

fn stopped_reader(test: &'static str, fabric: &'static str) {
    const COUNT: usize = 100_000;
    if let Some(words) = role() {
        return bounded(LIMIT, |_| producer(words));
    }
    bounded(LIMIT, |runtime| async move {
        let mut other = Other::start(test, &format!("{fabric} {COUNT} block"));
        let worker = parent(kind(fabric)).start().await.unwrap();
        let peer = worker.peer_at(&other.hear().await).await.unwrap();
        // Sets up the data connection, by asking for what is not there.
        assert!(step("a connection", peer.fetch("nothing").into_future()).await.is_err());
        other.tell("block");
        assert_eq!(other.hear().await, "blocked");
        let before = resident();
        let going = async || {
            runtime.sleep(BLOCKED).await;
            assert_bounded(&worker, before, COUNT);
            other.tell("go");
        };
        receive_all(&worker, COUNT, going).await;
        assert_bounded(&worker, before, COUNT);
        assert_eq!(worker.receive_memory().used_bytes, 0);
        // Those that waited for a credit travelled together.
        assert!(info(&worker, &peer).counters.sent.tensor_request < COUNT as u64);
        worker.shutdown().await;
    });
}

#[test]
fn a_hundred_thousand_receives_wait_for_a_stopped_reader_over_shm() {
    stopped_reader("load::a_hundred_thousand_receives_wait_for_a_stopped_reader_over_shm", "shm");
}

#[test]
fn a_hundred_thousand_receives_wait_for_a_stopped_reader_over_tcp() {
    stopped_reader("load::a_hundred_thousand_receives_wait_for_a_stopped_reader_over_tcp", "tcp");
}

/// Bytes of an edge's name, so that few requests fill a ring.
const LONG_NAME: usize = 800;

async fn full_rings(runtime: Arc<dyn Runtime>, fabric: FabricKind) {
    const COUNT: usize = 3000;
    let small = |name| {
        builder(name, fabric).timeout(LIMIT).flow(|flow| {
            flow.ring_bytes = 8 << 10;
            flow.depth = 64;
            flow.requests_max = 1024;
        })
    };
    let (left, right) = (small(PARENT).start().await.unwrap(), small(CHILD).start().await.unwrap());
    left.peer_at(right.address()).await.unwrap();
    let name = "n".repeat(LONG_NAME);
    let edge = |number| format!("{name}{number}");
    let to_left = |number| right.key(CHILD_CPU, PARENT_CPU, &edge(number)).unwrap();
    let to_right = |number| left.key(PARENT_CPU, CHILD_CPU, &edge(number)).unwrap();
    let receive = async |worker: &Worker, key: Key, number: usize| {
        assert_eq!(worker.shared_step(2).recv(&key).await.unwrap().values::<u64>().unwrap(), [number as u64]);
    };
    let mut receives: FuturesUnordered<_> = (0..COUNT)
        .flat_map(|number| {
            [receive(&left, to_left(number), number), receive(&right, to_right(number), number)]
        })
        .collect();
    // Some requests come before their values, some after.
    let send = async {
        for number in shuffled(COUNT) {
            let value = |worker: &Worker| Tensor::from_values(worker.pool(), &[1], &[number as u64]).unwrap();
            right.shared_step(2).send(&to_left(number), value(&right)).unwrap();
            left.shared_step(2).send(&to_right(number), value(&left)).unwrap();
            if number % 16 == 0 {
                tokio::task::yield_now().await;
            }
        }
    };
    join(async { while receives.next().await.is_some() {} }, send).await;
    drop(receives);
    right.shutdown().await;
    left.shutdown().await;
    // The last values go with the tasks that wrote them.
    let gone = async {
        while left.pool().stats().used_bytes + right.pool().stats().used_bytes > 0 {
            runtime.sleep(Duration::from_millis(1)).await;
        }
    };
    step("the end of the values sent", gone).await;
}

#[test]
fn rings_that_are_full_in_both_directions_stop_nobody() {
    for fabric in [FabricKind::SHM, FabricKind::TCP] {
        bounded(LIMIT, |runtime| full_rings(runtime, fabric));
    }
}

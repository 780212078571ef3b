//! Receiving into the user's buffer: where the bytes land, how often they are copied, and what comes back with an error.
//! Alone in its binary and one test at a time, because the counters of copies are the process's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use crate::{
    bounded::bounded,
    fabrics::{kinds, only_verbs, over},
    rdma::patient,
};
use tensorwire_fabric::FabricKind;
use tensorwire_memory::{
    BufMut,
    copy::{CopyReason, count},
};
use tensorwire_protocol::{DataType, Key};
use tensorwire_rendezvous::{Filled, Peer, Tensor, Trust, Validation, Worker, WorkerError};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

const BYTES: usize = (3 << 20) + 77;
const SMALL: usize = 100;
const LIMIT: Duration = Duration::from_millis(300);

#[derive(Debug, Clone, Copy)]
struct Case {
    kind: FabricKind,
    validation: Validation,
    /// What the client takes the server for.
    trust: Trust,
}

struct Two {
    case: Case,
    server: Worker,
    client: Worker,
    peer: Peer,
}

impl Two {
    async fn start(case: Case) -> Self {
        let Case { kind, validation, trust } = case;
        // All that a test allocates is in one block: of another one, the peer would not know the region yet.
        let builder = |name| {
            let builder = over(Worker::builder(name), kind).memory(|memory| memory.block_bytes = 16 << 20);
            builder.validation(validation).timeout(patient(LIMIT * 60))
        };
        let (server, client) = (builder(SERVER), builder(CLIENT).trust(trust));
        let (server, client) = (server.start().await.unwrap(), client.start().await.unwrap());
        let peer = client.peer_at(server.address()).await.unwrap();
        Self { case, server, client, peer }
    }

    /// Whether what a write brings lands in memory that nothing else uses, and is copied to the buffer from there.
    fn bounces(&self) -> bool {
        self.case.trust == Trust::Hostile
    }

    fn tensor(&self, length: usize, seed: u8) -> Tensor {
        let mut buffer = self.server.pool().try_alloc(length).unwrap();
        buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8 ^ seed);
        Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
    }

    fn key(&self, worker: &Worker, edge: &str) -> Key {
        worker.key(SERVER_CPU, CLIENT_CPU, edge).unwrap()
    }

    fn send(&self, edge: &str, tensor: &Tensor) {
        self.server.shared_step(1).send(&self.key(&self.server, edge), tensor.clone()).unwrap();
    }

    /// Fetches `name` into a buffer, which must come back; what was copied for it here, beside the write itself.
    async fn fetch(&self, name: &str, buffer: BufMut, expected: &Tensor) -> [u64; 2] {
        let (before, given) = (copied(), buffer.as_ptr());
        let bounced = count(CopyReason::Bounce).bytes;
        let filled = self.peer.fetch(&asked(name)).into_buffer(buffer).dtype(DataType::U8).await.unwrap();
        assert_eq!(filled.buffer.as_ptr(), given, "in the buffer that was given");
        check(&filled, expected);
        let after = copied();
        let bounced = count(CopyReason::Bounce).bytes - bounced;
        let is_eager = after[1] > before[1];
        let whole = expected.bytes().len() as u64;
        // With its result slot, if it is validated.
        let whole = if self.case.validation.is_on() { whole + 64 } else { whole };
        assert_eq!(bounced, if self.bounces() && !is_eager { whole } else { 0 }, "{:?}", self.case);
        std::array::from_fn(|at| after[at] - before[at])
    }
}

/// A name that is too long for a catalogue: over shared memory, too, the tensor is asked for.
fn asked(name: &str) -> String {
    format!("{name} {}", "-".repeat(112))
}

fn check(filled: &Filled, expected: &Tensor) {
    assert!(filled.bytes() == expected.bytes());
    assert_eq!(filled.metadata, *expected.metadata());
}

fn copied() -> [u64; 2] {
    [CopyReason::Local, CopyReason::Eager].map(|reason| count(reason).bytes)
}

async fn published(two: &Two) {
    let is_validated = two.case.validation.is_on();
    let (large, small) = (two.tensor(BYTES, 1), two.tensor(SMALL, 2));
    two.server.publish(&asked("large"), large.clone()).unwrap();
    two.server.publish(&asked("small"), small.clone()).unwrap();
    let (pool, other) = (two.client.receive_pool(), two.client.pool());
    let straight = if is_validated { BYTES as u64 } else { 0 };
    // What bounces does so out of the peer's reach, whatever the buffer.
    let once_more = |length| if two.bounces() && !is_validated { 0 } else { length as u64 };
    for is_known in [false, true] {
        // Unknown, then known; longer than the tensor, too.
        let exact = pool.alloc(BYTES).await.unwrap();
        assert_eq!(two.fetch("large", exact, &large).await, [straight, 0]);
        let longer = pool.alloc(BYTES + 4096).await.unwrap();
        assert_eq!(two.fetch("large", longer, &large).await, [straight, 0]);
        // Memory that peers may not write: one copy.
        let elsewhere = other.alloc(BYTES).await.unwrap();
        assert_eq!(two.fetch("large", elsewhere, &large).await, [once_more(BYTES), 0]);
        // While it is unknown, out of the sender's memory into a message, and out of that.
        let (eager, local) = (2 * SMALL as u64, if is_validated { SMALL as u64 } else { 0 });
        let buffer = pool.alloc(SMALL).await.unwrap();
        let copied = [local, if is_known { 0 } else { eager }];
        assert_eq!(two.fetch("small", buffer, &small).await, copied);
        let elsewhere = other.alloc(SMALL).await.unwrap();
        // The first one that would bounce needs a block whose region is only now announced to the peer.
        let is_told = is_known || !two.bounces();
        let copied = [once_more(SMALL), if is_told { 0 } else { eager }];
        assert_eq!(two.fetch("small", elsewhere, &small).await, copied);
        while two.bounces() && two.fetch("small", pool.alloc(SMALL).await.unwrap(), &small).await[1] > 0 {}
    }
}

async fn mismatches(two: &Two) {
    let pool = two.client.receive_pool();
    let key = two.key(&two.client, "edge");
    let step = two.client.shared_step(1);
    for length in [SMALL, BYTES] {
        let tensor = two.tensor(length, 3);
        // What it is is unknown, and then known.
        for _ in 0..2 {
            two.send("edge", &tensor);
            let short = pool.alloc(length - 1).await.unwrap();
            let given = short.as_ptr();
            let failed = step.recv(&key).into_buffer(short).dtype(DataType::U8).await.unwrap_err();
            let text = failed.to_string();
            assert!(matches!(failed.error, WorkerError::Mismatch { field: "length", .. }), "{text}");
            assert!(text.contains(&format!("{length} bytes")), "{text}");
            assert!(text.contains(&format!("at most {} bytes", length - 1)), "{text}");
            let buffer = failed.buffer.expect("the buffer comes back");
            assert_eq!(buffer.as_ptr(), given);
            drop(buffer);

            let buffer = pool.alloc(length).await.unwrap();
            let failed = step.recv(&key).into_buffer(buffer).dtype(DataType::F32).await.unwrap_err();
            let text = failed.to_string();
            assert!(text.contains("element type is u8, but the buffer accepts f32"), "{text}");

            let buffer = failed.buffer.expect("the buffer comes back");
            check(&step.recv(&key).into_buffer(buffer).dtype(DataType::U8).await.unwrap(), &tensor);
        }
    }
}

async fn what_does_not_come(two: &Two) {
    let pool = two.client.receive_pool();
    let buffer = pool.alloc(SMALL).await.unwrap();
    let failed = two.peer.fetch("nothing").into_buffer(buffer).dtype(DataType::U8).await.unwrap_err();
    assert!(matches!(failed.error, WorkerError::Remote { .. }), "{failed}");
    assert!(failed.buffer.is_some());
    // A value without bytes, and one of this worker's own.
    let empty = Tensor::from_values::<f32>(two.server.pool(), &[0, 3], &[]).unwrap();
    two.send("empty", &empty);
    let buffer = pool.alloc(16).await.unwrap();
    let key = two.key(&two.client, "empty");
    let filled = two.client.shared_step(1).recv(&key).into_buffer(buffer).dtype(DataType::F32).await.unwrap();
    assert_eq!((filled.bytes().len(), filled.buffer.len()), (0, 16));

    let key = two.server.key(SERVER_CPU, SERVER_CPU, "own").unwrap();
    let (own, before) = (two.tensor(BYTES, 9), copied());
    two.server.shared_step(2).send(&key, own.clone()).unwrap();
    let buffer = two.server.pool().alloc(BYTES).await.unwrap();
    let filled = two.server.shared_step(2).recv(&key).into_buffer(buffer).dtype(DataType::U8).await.unwrap();
    check(&filled, &own);
    assert_eq!(copied()[0] - before[0], BYTES as u64);
    assert_eq!(filled.into_tensor().bytes(), own.bytes());
}

/// The buffer comes back with a deadline that is over, as long as no peer knows of it.
async fn too_late(kind: FabricKind) {
    let two = Two::start(Case { kind, validation: Validation::Off, trust: Trust::Cluster }).await;
    let client =
        over(Worker::builder("/job:worker/replica:0/task:1"), kind).timeout(LIMIT).start().await.unwrap();
    let peer = client.peer_at(two.server.address()).await.unwrap();
    assert_eq!(peer.name(), SERVER);
    let key = client.key(SERVER_CPU, "/job:worker/replica:0/task:1/device:CPU:0", "late").unwrap();
    let buffer = client.receive_pool().alloc(SMALL).await.unwrap();
    let failed = client.shared_step(1).recv(&key).into_buffer(buffer).dtype(DataType::U8).await.unwrap_err();
    assert!(matches!(failed.error, WorkerError::DeadlineExceeded { .. }), "{failed}");
    assert!(failed.buffer.is_some());
}

#[test]
fn values_land_in_the_users_buffer_and_what_does_not_fit_is_not_lost() {
    let _turn = crate::turn();
    let all = async {
        for &kind in kinds(&[FabricKind::SHM, FabricKind::TCP]) {
            for (validation, trust) in [
                (Validation::Off, Trust::Cluster),
                (Validation::Xxh3, Trust::Cluster),
                (Validation::Off, Trust::Hostile),
                (Validation::Xxh3, Trust::Hostile),
            ] {
                if (kind, trust) == (FabricKind::SHM, Trust::Hostile) {
                    continue;
                }
                let case = Case { kind, validation, trust };
                let two = Two::start(case).await;
                published(&two).await;
                mismatches(&two).await;
                what_does_not_come(&two).await;
                let memory = two.client.receive_memory();
                assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0), "{case:?}");
            }
            too_late(kind).await;
        }
    };
    bounded(patient(Duration::from_secs(100)), all);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn values_land_in_the_users_buffer_over_verbs() {
    only_verbs(values_land_in_the_users_buffer_and_what_does_not_fit_is_not_lost);
}

//! A peer that is killed and started again, at the same address and at another one: old keys go on working.

use std::time::Duration;

use tensorwire_fabric::Runtime;
use tensorwire_protocol::{Code, DataType};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};

use crate::harness::{
    CHILD_CPU, Other, PARENT, PARENT_CPU, bounded, builder, kind, parents_lines, role, say, step,
};

const CHILD: &str = "/job:child/replica:0/task:0";

/// Too long for a message.
const BYTES: usize = 100_000;

/// Sends a value of each step that the parent names, until it is killed.
async fn sender(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[1])).bind(&words[2]).start().await.unwrap();
    say(worker.address());
    say(&worker.incarnation().to_string());
    let key = worker.key(CHILD_CPU, PARENT_CPU, "edge").unwrap();
    let mut lines = parents_lines();
    while let Some(line) = lines.recv().await {
        let id: i64 = line.parse().unwrap();
        let mut buffer = worker.pool().alloc(BYTES).await.unwrap();
        buffer.fill(id as u8);
        worker
            .shared_step(id)
            .send(&key, Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap())
            .unwrap();
    }
}

/// One life of the sender.
struct Life {
    process: Other,
    address: String,
    incarnation: u64,
}

impl Life {
    async fn start(test: &str, fabric: &str, bind: &str) -> Self {
        let mut process = Other::start(test, &format!("sender {fabric} {bind}"));
        let (address, incarnation) = (process.hear().await, process.hear().await);
        Self { process, address, incarnation: incarnation.parse().unwrap() }
    }
}

/// Waits until the worker knows that this life of its only peer is over.
async fn is_over(worker: &Worker, runtime: &dyn Runtime, life: u64) {
    let over = async {
        while worker.peers().iter().any(|peer| peer.incarnation == Some(life)) {
            runtime.sleep(Duration::from_millis(1)).await;
        }
    };
    step("the end of the session with a killed peer", over).await;
}

fn killed_and_started_again(test: &'static str, fabric: &'static str) {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(120), |_| sender(words));
    }
    bounded(Duration::from_secs(110), |runtime| async move {
        let worker = builder(PARENT, kind(fabric)).start().await.unwrap();
        let key = worker.key(CHILD_CPU, PARENT_CPU, "edge");
        let mut life = Life::start(test, fabric, "127.0.0.1:0").await;
        worker.peer_at(&life.address).await.unwrap();
        let key = key.unwrap();
        for (round, at_same_address) in [true, false, true].into_iter().enumerate() {
            let id = 10 * round as i64;
            life.process.tell(&id.to_string());
            let got = worker.shared_step(id).recv(&key).await.unwrap();
            assert!(got.bytes().len() == BYTES && got.bytes().iter().all(|byte| *byte == id as u8));
            let lost = worker.shared_step(id + 1);
            let killed = async {
                runtime.sleep(Duration::from_millis(20)).await;
                life.process.kill();
            };
            let (waiting, ()) = futures::join!(lost.recv(&key).into_future(), killed);
            let error = waiting.unwrap_err();
            assert!(matches!(error, WorkerError::PeerLost { .. }), "{error}");
            is_over(&worker, &*runtime, life.incarnation).await;
            let bind = if at_same_address { life.address.as_str() } else { "127.0.0.1:0" };
            let next = Life::start(test, fabric, bind).await;
            assert_eq!(next.address == life.address, at_same_address);
            if !at_same_address {
                worker.peer_at(&next.address).await.unwrap();
            }
            // A key of the life before is refused by the next one, and both are named.
            let stale =
                worker.shared_step(id + 2).recv(&key.with_incarnation(life.incarnation)).await.unwrap_err();
            let text = stale.to_string();
            assert_eq!(stale.code(), Code::Aborted, "{text}");
            for life in [life.incarnation, next.incarnation] {
                assert!(text.contains(&format!("{life:016x}")), "{text}");
            }
            life = next;
        }
        life.process.kill();
        worker.shutdown().await;
    });
}

#[test]
fn d_restart_after_sigkill_keeps_keys_working_over_shm() {
    killed_and_started_again("restart::d_restart_after_sigkill_keeps_keys_working_over_shm", "shm");
}

#[test]
fn d_restart_after_sigkill_keeps_keys_working_over_tcp() {
    killed_and_started_again("restart::d_restart_after_sigkill_keeps_keys_working_over_tcp", "tcp");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_restart_after_sigkill_keeps_keys_working_over_verbs() {
    killed_and_started_again("restart::d_restart_after_sigkill_keeps_keys_working_over_verbs", "verbs");
}

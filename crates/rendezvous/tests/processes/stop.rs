//! A consumer that is stopped in the middle of a copy, and resumes when the bytes are others.

use std::time::Duration;

use futures::future::join_all;
use rustix::process::Signal;
use tensorwire_rendezvous::Worker;
use tensorwire_verbs_reactor::{FabricKind, Runtime};

use crate::harness::{
    Other, PARENT, bounded, builder, info, is_version, parents_lines, role, say, step, tensor,
};

const TEST: &str = "stop::a_consumer_stopped_in_mid_copy_never_gets_wrong_bytes";
const CHILD: &str = "/job:child/replica:0/task:0";
const ROUNDS: u64 = 50;

/// Pairs of processes that share the rounds: each waits for [`LIVENESS`] in every round.
const PAIRS: u64 = 5;

const LARGE: usize = 16 << 20;

/// What the source memory is overwritten with.
const GARBAGE: u64 = 1_000_003;

/// Long enough that a busy machine does not pass for a stopped one, short enough for many rounds.
const LIVENESS: Duration = Duration::from_millis(400);

/// Fetches again and again; reports each round's worst result when asked.
async fn consumer(address: String) {
    let worker = builder(CHILD, FabricKind::SHM).start().await.unwrap();
    let peer = worker.peer_at(&address).await.unwrap();
    let mut lines = parents_lines();
    while let Some(line) = lines.recv().await {
        let version = line.parse().unwrap();
        let mut whole = 0;
        say("fetching");
        let ended = loop {
            match peer.fetch("x").await {
                Ok(tensor) if is_version(tensor.bytes(), version) => whole += 1,
                Ok(_) => break "torn".to_owned(),
                // Lost in mid copy, or stopped before its request, which then finds no peer or no value.
                Err(_) => break format!("lost {whole}"),
            }
        };
        say(&ended);
    }
}

/// Waits until nothing of the peer is in use here any more.
async fn memory_is_free(runtime: &dyn Runtime, worker: &Worker) {
    let free = async {
        while worker.pool().stats().used_bytes > 0 {
            runtime.sleep(Duration::from_millis(1)).await;
        }
    };
    step("the loss of the stopped peer", free).await;
}

/// Every [`PAIRS`]th round, beginning with `first`. Returns how many stops fell into a copy.
async fn stops(runtime: &dyn Runtime, first: u64) -> u64 {
    // Memory for one tensor: the next one has the same address.
    let worker = builder(PARENT, FabricKind::SHM).liveness(LIVENESS);
    let worker = worker
        .memory(|memory| {
            memory.block_bytes = LARGE;
            memory.source_bytes = LARGE as u64;
        })
        .start()
        .await
        .unwrap();
    let mut other = Other::start(TEST, worker.address());
    let mut cut_short = 0;
    for round in (first..ROUNDS).step_by(PAIRS as usize) {
        worker.publish("x", tensor(&worker, LARGE, round).await).unwrap();
        other.tell(&round.to_string());
        assert_eq!(other.hear().await, "fetching");
        runtime.sleep(Duration::from_micros(round * 977 % 20_000)).await;
        other.signal(Signal::STOP);
        worker.withdraw("x");
        // The value is held by the copy under way, until its reader counts as lost.
        cut_short += u64::from(worker.pool().stats().used_bytes > 0);
        memory_is_free(runtime, &worker).await;
        let others = tensor(&worker, LARGE, GARBAGE).await;
        let lost = async {
            while worker.peer(CHILD).is_ok_and(|peer| info(&worker, &peer).transport.is_some()) {
                runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step("the loss of the stopped peer", lost).await;
        other.signal(Signal::CONT);
        let ended = other.hear().await;
        assert!(ended.starts_with("lost "), "round {round}: {ended}");
        drop(others);
    }
    worker.shutdown().await;
    cut_short
}

#[test]
fn a_consumer_stopped_in_mid_copy_never_gets_wrong_bytes() {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(120), |_| consumer(words[0].clone()));
    }
    bounded(Duration::from_secs(120), |runtime| async move {
        let stopped = join_all((0..PAIRS).map(|first| stops(&*runtime, first))).await;
        let cut_short: u64 = stopped.iter().sum();
        assert!(cut_short > ROUNDS / 4, "only {cut_short} of {ROUNDS} stops fell into a copy: {stopped:?}");
    });
}

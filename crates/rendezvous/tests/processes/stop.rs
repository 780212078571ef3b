//! A consumer that is stopped in the middle of a copy, or with a view, and resumes when the bytes are others.

use std::time::Duration;

use futures::future::join_all;
use rustix::process::Signal;
use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_rendezvous::{Sharing, Worker};

use crate::harness::{
    ALWAYS_ASKED, Other, PARENT, bounded, builder, info, is_version, parents_lines, role, say, step, tensor,
};

const ASKING: &str = "stop::a_consumer_stopped_in_mid_copy_never_gets_wrong_bytes";
const READING: &str = "stop::s2_a_reader_of_the_catalogue_stopped_in_mid_copy_never_gets_wrong_bytes";
const CHILD: &str = "/job:child/replica:0/task:0";
const ROUNDS: u64 = 50;

/// Pairs of processes that share the rounds: each waits for [`LIVENESS`] in every round.
const PAIRS: u64 = 5;

const LARGE: usize = 16 << 20;

/// Longer ones are not copied out of the catalogue.
const READ: usize = (2 << 20) - 64;

/// What the source memory is overwritten with.
const GARBAGE: u64 = 1_000_003;

/// Long enough that a busy machine does not pass for a stopped one, short enough for many rounds.
const LIVENESS: Duration = Duration::from_millis(400);

/// Fetches again and again; reports each round's worst result when asked.
async fn consumer(address: String, name: &str) {
    let worker = builder(CHILD, FabricKind::SHM).start().await.unwrap();
    let peer = worker.peer_at(&address).await.unwrap();
    let mut lines = parents_lines();
    while let Some(line) = lines.recv().await {
        let version = line.parse().unwrap();
        let mut whole = 0;
        say("fetching");
        let ended = loop {
            match peer.fetch(name).await {
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
async fn stops(runtime: &dyn Runtime, (test, name, length): (&'static str, &str, usize), first: u64) -> u64 {
    // Memory for one tensor: the next one has the same address.
    let worker = builder(PARENT, FabricKind::SHM).liveness(LIVENESS);
    let worker = worker
        .memory(|memory| {
            memory.block_bytes = length;
            memory.source_bytes = length as u64;
        })
        .start()
        .await
        .unwrap();
    let mut other = Other::start(test, worker.address());
    let mut cut_short = 0;
    for round in (first..ROUNDS).step_by(PAIRS as usize) {
        worker.publish(name, tensor(&worker, length, round).await).unwrap();
        other.tell(&round.to_string());
        assert_eq!(other.hear().await, "fetching");
        runtime.sleep(Duration::from_micros(round * 977 % 20_000)).await;
        other.signal(Signal::STOP);
        worker.withdraw(name);
        // The value is held by an answer under way, until its reader counts as lost.
        cut_short += u64::from(worker.pool().stats().used_bytes > 0);
        memory_is_free(runtime, &worker).await;
        let others = tensor(&worker, length, GARBAGE).await;
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

/// Stops the consumer of `name` in each round, and reuses the memory that it was copying from.
fn stopped(test: &'static str, name: &'static str, length: usize, is_held: bool) {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(120), |_| consumer(words[0].clone(), name));
    }
    bounded(Duration::from_secs(120), |runtime| async move {
        let stopped = join_all((0..PAIRS).map(|first| stops(&*runtime, (test, name, length), first))).await;
        let cut_short: u64 = stopped.iter().sum();
        let is_enough = !is_held || cut_short > ROUNDS / 4;
        assert!(is_enough, "only {cut_short} of {ROUNDS} stops fell into a copy: {stopped:?}");
    });
}

#[test]
fn a_consumer_stopped_in_mid_copy_never_gets_wrong_bytes() {
    stopped(ASKING, ALWAYS_ASKED, LARGE, true);
}

/// The copies of a reader hold nothing, so nobody but the reader knows how many are cut short.
#[test]
fn s2_a_reader_of_the_catalogue_stopped_in_mid_copy_never_gets_wrong_bytes() {
    stopped(READING, "x", READ, false);
}

const VIEWING: &str = "stop::s1_a_view_out_of_the_catalogue_outlives_the_session_of_a_stopped_reader";

/// Views the tensor without a message to its publisher, and tells whether the view is still what it was.
async fn viewer(address: String) {
    let worker = builder(CHILD, FabricKind::SHM).start().await.unwrap();
    let peer = worker.peer_at(&address).await.unwrap();
    let operations = || info(&worker, &peer).fabric.operations;
    let mut lines = parents_lines();
    // The first of them asks for the tensor, and makes its pages resident.
    let mut view = loop {
        let before = operations();
        let view = peer.fetch("x").sharing(Sharing::View).await.unwrap();
        if operations() == before {
            break Some(view);
        }
    };
    say("viewing");
    while let Some(line) = lines.recv().await {
        match line.parse() {
            Ok(version) => {
                let is_whole = view.as_ref().is_some_and(|view| is_version(view.bytes(), version));
                say(if is_whole { "whole" } else { "changed" });
            }
            Err(_) => view = None,
        }
    }
}

#[test]
fn s1_a_view_out_of_the_catalogue_outlives_the_session_of_a_stopped_reader() {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(120), |_| viewer(words[0].clone()));
    }
    bounded(Duration::from_secs(120), |runtime| async move {
        // Room for three tensors.
        let worker = builder(PARENT, FabricKind::SHM).liveness(LIVENESS);
        let worker = worker.memory(|memory| {
            memory.block_bytes = 4 * LARGE;
            memory.source_bytes = 4 * LARGE as u64;
        });
        let worker = worker.start().await.unwrap();
        // Once the view is dropped, and once its process is killed.
        for is_killed in [false, true] {
            worker.publish("x", tensor(&worker, LARGE, 1).await).unwrap();
            let mut other = Other::start(VIEWING, worker.address());
            assert_eq!(other.hear().await, "viewing");
            other.signal(Signal::STOP);
            let lost = async {
                while worker.peer(CHILD).is_ok_and(|peer| info(&worker, &peer).transport.is_some()) {
                    runtime.sleep(Duration::from_millis(1)).await;
                }
            };
            step("the loss of the stopped peer", lost).await;
            for version in 2..10 {
                worker.publish("x", tensor(&worker, LARGE, version).await).unwrap();
            }
            worker.withdraw("x");
            assert!(worker.pool().stats().used_bytes >= LARGE as u64, "the memory is viewed");
            let others = tensor(&worker, LARGE, GARBAGE).await;
            other.signal(Signal::CONT);
            other.tell("1");
            assert_eq!(other.hear().await, "whole");
            drop(others);
            if is_killed {
                other.kill();
                memory_is_free(&*runtime, &worker).await;
            } else {
                other.tell("drop");
                memory_is_free(&*runtime, &worker).await;
            }
            assert_eq!(worker.pool().stats().leaked_bytes, 0);
        }
        worker.shutdown().await;
    });
}

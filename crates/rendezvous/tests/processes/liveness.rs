//! Stopped processes are dead, blocked ones are not.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use futures::future::join;
use rustix::process::Signal;
use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_rendezvous::{PeerLoss, Worker, WorkerError, control::Secret};

use crate::harness::{
    CHILD_CPU, Other, PARENT, PARENT_CPU, bounded, builder, info, is_version, kind, parents_lines, role, say,
    step, tensor,
};

const CHILD: &str = "/job:child/replica:0/task:0";
const BYSTANDER: &str = "/job:bystander/replica:0/task:0";

/// The liveness bound of these tests. Silence is counted in tenths of it, so that a stop is noticed after 0.9 to
/// 1.1 of it, and what the machine adds.
const LIVENESS: Duration = Duration::from_secs(2);

const STOP: &str = "liveness::d_peer_sigstop_ends_requests_at_both_ends_within_the_liveness_bound";

/// Publishes `x`, and waits for a value that nobody sends.
async fn stopped_child(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[1])).timeout(Duration::from_secs(600)).liveness(LIVENESS);
    let worker = worker.start().await.unwrap();
    worker.publish("x", tensor(&worker, 1000, 1).await).unwrap();
    say(worker.address());
    let mut lines = parents_lines();
    let parent = worker.peer_at(&lines.recv().await.unwrap()).await.unwrap();
    parent.fetch("x").await.unwrap();
    let key = worker.key(PARENT_CPU, CHILD_CPU, "never").unwrap();
    let step = worker.shared_step(7);
    let (error, _) = join(step.recv(&key).into_future(), async { say("ready") }).await;
    let error = error.unwrap_err();
    assert!(matches!(&error, WorkerError::PeerLost { .. }), "{error}");
    say("lost");
    // Until the parent's next line; the worker still serves.
    lines.recv().await;
}

/// Another peer of the stopped one's peer, which goes on.
async fn bystander(words: Vec<String>) {
    let worker = builder(BYSTANDER, kind(&words[1])).start().await.unwrap();
    worker.publish("x", tensor(&worker, 100_000, 5).await).unwrap();
    say(worker.address());
    parents_lines().recv().await;
}

async fn child(words: Vec<String>) {
    match words[0].as_str() {
        "bystander" => bystander(words).await,
        _ => stopped_child(words).await,
    }
}

/// Fetches from a peer without rest until `stop` is set; any error fails the test.
async fn traffic(worker: &Worker, address: &str, stop: &AtomicBool, fetched: &AtomicU64) {
    let peer = worker.peer_at(address).await.unwrap();
    while !stop.load(Ordering::Relaxed) {
        let tensor = peer.fetch("x").await.unwrap();
        assert!(is_version(tensor.bytes(), 5));
        fetched.fetch_add(1, Ordering::Relaxed);
    }
}

/// The loss of the stopped child, as seen by a receive in flight; gives how long it took.
async fn loss_of(runtime: &dyn Runtime, worker: &Worker, other: &mut Other, address: &str) -> Duration {
    let peer = worker.peer_at(address).await.unwrap();
    assert!(is_version(peer.fetch("x").await.unwrap().bytes(), 1));
    let key = worker.key(CHILD_CPU, PARENT_CPU, "never").unwrap();
    let (at_step, stopped) = (worker.shared_step(3), async {
        assert_eq!(other.hear().await, "ready");
        other.signal(Signal::STOP);
        runtime.now()
    });
    let (received, stopped) = join(at_step.recv(&key).into_future(), stopped).await;
    let took = runtime.now() - stopped;
    let error = received.unwrap_err();
    let WorkerError::PeerLost { transfer, transport, loss, .. } = &error else { panic!("{error}") };
    assert_eq!(*loss, PeerLoss::Unresponsive, "{error}");
    assert_eq!((transfer.peer.as_str(), transfer.step), (CHILD, Some(3)));
    assert!(transfer.key.contains("never") && !transport.is_empty(), "{error}");
    let place = format!("the peer at {address} is lost");
    for word in ["answered none of", "2000 ms", "stopped", "the setting `liveness`", &place] {
        assert!(error.to_string().contains(word), "no `{word}`: {error}");
    }
    took
}

fn stop_is_noticed(fabric: &'static str) {
    bounded(Duration::from_secs(60), |runtime| async move {
        let worker = builder(PARENT, kind(fabric)).timeout(Duration::from_secs(600)).liveness(LIVENESS);
        let worker = worker.start().await.unwrap();
        worker.publish("x", tensor(&worker, 1000, 2).await).unwrap();
        let mut other = Other::start(STOP, &format!("stopped {fabric}"));
        let mut bystander = Other::start(STOP, &format!("bystander {fabric}"));
        let (address, neighbour) = (other.hear().await, bystander.hear().await);
        other.tell(worker.address());
        let (stop, fetched) = (AtomicBool::new(false), AtomicU64::new(0));
        let watched = async {
            let took = loss_of(&*runtime, &worker, &mut other, &address).await;
            stop.store(true, Ordering::Relaxed);
            took
        };
        let (took, ()) = join(watched, traffic(&worker, &neighbour, &stop, &fetched)).await;
        assert!(took > LIVENESS * 8 / 10 && took < LIVENESS * 12 / 10, "noticed after {took:?}");
        let others = fetched.load(Ordering::Relaxed);
        assert!(others > 100, "the other peer's traffic stood still: {others} fetches in {took:?}");
        // Once it runs again it learns that the connection is over, and is used again.
        other.signal(Signal::CONT);
        assert_eq!(other.hear().await, "lost");
        let peer = worker.peer_at(&address).await.unwrap();
        let again = step("a fetch from the resumed peer", peer.fetch("x").into_future()).await.unwrap();
        assert!(is_version(again.bytes(), 1));
        worker.shutdown().await;
    });
}

#[test]
fn d_peer_sigstop_ends_requests_at_both_ends_within_the_liveness_bound() {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(60), |_| child(words));
    }
    stop_is_noticed("shm");
    stop_is_noticed("tcp");
}

/// A short bound, so that three times it is a short test.
const SHORT: Duration = Duration::from_millis(500);

/// Blocks its only runtime thread for three times the bound, at the parent's line, and then sends what is waited for.
async fn blocked_child(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[0])).liveness(SHORT).start().await.unwrap();
    worker.publish("x", tensor(&worker, 1000, 1).await).unwrap();
    say(worker.address());
    let mut lines = parents_lines();
    lines.recv().await;
    thread::sleep(SHORT * 3);
    let key = worker.key(CHILD_CPU, PARENT_CPU, "late").unwrap();
    worker.shared_step(1).send(&key, tensor(&worker, 5000, 9).await).unwrap();
    lines.recv().await;
}

async fn outlives_the_block(runtime: Arc<dyn Runtime>, fabric: FabricKind, mut other: Other) {
    let worker = builder(PARENT, fabric).liveness(SHORT).start().await.unwrap();
    let peer = worker.peer_at(&other.hear().await).await.unwrap();
    peer.fetch("x").await.unwrap();
    let key = worker.key(CHILD_CPU, PARENT_CPU, "late").unwrap();
    let at_step = worker.shared_step(1);
    let began = runtime.now();
    let block = async { other.tell("block") };
    let (received, ()) = join(at_step.recv(&key).into_future(), block).await;
    let took = runtime.now() - began;
    assert!(is_version(received.unwrap().bytes(), 9));
    assert!(took >= SHORT * 3, "the child did not block: {took:?}");
    // The connection is the one from before: the fetch and the receive went over it.
    let known = info(&worker, &peer);
    assert_eq!((known.transport, known.fabric.arrivals >= 2), (Some(fabric), true));
    worker.shutdown().await;
}

#[test]
fn d_a_peer_whose_code_blocks_its_runtime_is_not_dead() {
    const TEST: &str = "liveness::d_a_peer_whose_code_blocks_its_runtime_is_not_dead";
    if let Some(words) = role() {
        return bounded(Duration::from_secs(60), |_| blocked_child(words));
    }
    for fabric in ["shm", "tcp"] {
        let other = Other::start(TEST, fabric);
        bounded(Duration::from_secs(60), |runtime| outlives_the_block(runtime, kind(fabric), other));
    }
}

/// A worker that was itself stopped does not blame its peers for the silence.
#[test]
fn a_worker_that_was_stopped_itself_asks_before_it_judges() {
    const TEST: &str = "liveness::a_worker_that_was_stopped_itself_asks_before_it_judges";
    if let Some(words) = role() {
        return bounded(Duration::from_secs(60), |_| async move {
            let worker = builder(CHILD, FabricKind::SHM).liveness(SHORT).start().await.unwrap();
            let parent = worker.peer_at(&words[0]).await.unwrap();
            let key = worker.key(PARENT_CPU, CHILD_CPU, "late").unwrap();
            parent.fetch("x").await.unwrap();
            say("ready");
            let received = worker.shared_step(1).recv(&key).await;
            say(if received.is_ok() { "received" } else { "lost" });
        });
    }
    bounded(Duration::from_secs(60), |runtime| async move {
        // This end is patient: only the child could call the other dead.
        let worker =
            builder(PARENT, FabricKind::SHM).liveness(Duration::from_secs(30)).start().await.unwrap();
        worker.publish("x", tensor(&worker, 1000, 1).await).unwrap();
        let mut other = Other::start(TEST, worker.address());
        assert_eq!(other.hear().await, "ready");
        other.signal(Signal::STOP);
        runtime.sleep(SHORT * 3).await;
        other.signal(Signal::CONT);
        runtime.sleep(SHORT).await;
        let key = worker.key(PARENT_CPU, CHILD_CPU, "late").unwrap();
        worker.shared_step(1).send(&key, tensor(&worker, 100, 3).await).unwrap();
        assert_eq!(other.hear().await, "received");
        worker.shutdown().await;
    });
}

/// The kernel still accepts connections for a stopped process. Both workers have a secret, so that none is asked for first.
#[test]
fn a_peer_that_stopped_before_it_was_met_is_lost_within_the_liveness_bound() {
    const TEST: &str = "liveness::a_peer_that_stopped_before_it_was_met_is_lost_within_the_liveness_bound";
    let secret = Secret::new(*b"known to both of them").unwrap();
    if let Some(words) = role() {
        return bounded(Duration::from_secs(60), |_| async move {
            let worker = builder(CHILD, kind(&words[0])).secret(secret).start().await.unwrap();
            say(worker.address());
            parents_lines().recv().await;
        });
    }
    bounded(Duration::from_secs(60), |runtime| async move {
        let worker = builder(PARENT, FabricKind::TCP).secret(secret).liveness(LIVENESS);
        let worker = worker.timeout(Duration::from_secs(600)).start().await.unwrap();
        let mut other = Other::start(TEST, "tcp");
        let address = other.hear().await;
        other.signal(Signal::STOP);
        let began = runtime.now();
        let error = worker.peer_at(&address).await.unwrap_err();
        let took = runtime.now() - began;
        assert!(matches!(error, WorkerError::Control(_)), "{error}");
        assert!(took > LIVENESS * 8 / 10 && took < LIVENESS * 12 / 10, "noticed after {took:?}: {error}");
        other.signal(Signal::CONT);
        worker.peer_at(&address).await.unwrap();
        worker.shutdown().await;
    });
}

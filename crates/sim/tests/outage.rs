//! How long a peer may be silent: an outage just shorter than the liveness bound is survived, one just longer is not.
//!
//! Silence is counted in tenths of the bound. The tenth in which the outage begins may already be silent, and the one
//! in which it ends may not count. So a peer that is silent for less than 0.8 of the bound is not lost, and one that is
//! silent for more than 1.1 of it is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use futures::future::join;
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{Code, DataType};
use tensorwire_rendezvous::{CancellationToken, PeerLoss, RecvArgs, Tensor, Worker, WorkerError};
use tensorwire_sim::{Fault, Handle, Node, OperationResult, World};

use crate::common::builder;

const LIVENESS: Duration = Duration::from_secs(5);

/// Maximum that the simulated network adds: delays and stalls of both ways of a ping.
const NETWORK: Duration = Duration::from_millis(200);

async fn worker(node: &Node, name: &str) -> Worker {
    worker_with(node, name, LIVENESS).await
}

async fn worker_with(node: &Node, name: &str, liveness: Duration) -> Worker {
    builder(node, name).liveness(liveness).timeout(liveness * 100).start().await.unwrap()
}

/// A receive waits while its sender's process is stopped for `outage`, and its value is sent after that. Returns how
/// the receive ended, and after how long.
async fn receive_across(
    handle: &Handle,
    outage: Duration,
    quiet: Duration,
) -> (Result<Tensor, WorkerError>, Duration) {
    let (sender_node, node) =
        (handle.start_node("sender:1").unwrap(), handle.start_node("receiver:1").unwrap());
    let sender = worker(&sender_node, "/job:ps/replica:0/task:0").await;
    let receiver = worker(&node, "/job:worker/replica:0/task:0").await;
    let peer = receiver.peer_at("sender:1").await.unwrap();
    sender.publish("x", Tensor::from_values(sender.pool(), &[1], &[5u32]).unwrap()).unwrap();
    peer.fetch("x").await.unwrap();
    // The outage begins anywhere in a tenth of the bound.
    handle.runtime().sleep(quiet).await;
    let cpu = |worker: &str| format!("{worker}/device:CPU:0");
    let key = receiver.key(&cpu(sender.name()), &cpu(receiver.name()), "late").unwrap();
    let (began, operation) = (handle.now(), node.begin(Some("sender:1"), "receive across an outage"));
    handle.inject(Fault::Pause(sender_node.id(), outage));
    let send = async {
        // In short sleeps, because the simulator counts long ones as deadlines, which are no progress.
        for _ in 0..20 {
            handle.runtime().sleep((outage + NETWORK) / 20).await;
        }
        let value = Tensor::dead(DataType::U8, &[0]).unwrap();
        // If the receiver's side has given up, the step has ended here, too.
        let _ = sender.shared_step(1).send(&key, value);
    };
    let step = receiver.shared_step(1);
    let receive = async {
        let received = step.recv(&key).await;
        (received, handle.now() - began)
    };
    let (ended, ()) = join(receive, send).await;
    match &ended.0 {
        Ok(_) => operation.end(&OperationResult::Done),
        Err(error) => operation.end_because(&OperationResult::PeerLost, error),
    }
    join(receiver.shutdown(), sender.shutdown()).await;
    ended
}

/// Runs `check` under several seeds, each with another time at which the outage begins.
fn on_seeds(check: impl Fn(&World, Duration)) {
    for seed in 0..40 {
        let world = World::new(seed);
        world.replayed_by("outage");
        check(&world, LIVENESS / 10 * (seed as u32) / 40);
    }
}

#[test]
fn d_outage_just_under_the_liveness_bound_is_survived() {
    on_seeds(|world, quiet| {
        let handle = world.handle();
        let scenario = async { receive_across(&handle, LIVENESS * 8 / 10 - NETWORK, quiet).await };
        let (received, _) = world.run(scenario).unwrap();
        assert!(received.unwrap().is_dead());
    });
}

#[test]
fn d_outage_just_over_the_liveness_bound_ends_what_waits() {
    on_seeds(|world, quiet| {
        let handle = world.handle();
        let scenario = async { receive_across(&handle, LIVENESS * 11 / 10 + NETWORK, quiet).await };
        let (received, took) = world.run(scenario).unwrap();
        let error = received.unwrap_err();
        assert!(
            matches!(&error, WorkerError::PeerLost { loss: PeerLoss::Unresponsive, .. }),
            "after {quiet:?} of quiet: {error}"
        );
        assert!(took >= LIVENESS * 8 / 10 && took <= LIVENESS * 11 / 10 + NETWORK, "{took:?}");
    });
}

/// Its address may be another one now, and nothing has been transferred yet.
async fn come_back_elsewhere(handle: Handle) {
    const NAME: &str = "/job:ps/replica:0/task:0";
    let [old_node, node, new_node] =
        ["old:1", "receiver:1", "new:1"].map(|address| handle.start_node(address).unwrap());
    let (old, receiver) =
        (worker(&old_node, NAME).await, worker(&node, "/job:worker/replica:0/task:0").await);
    let peer = receiver.peer_at("old:1").await.unwrap();
    handle.inject(Fault::Freeze(old_node.id()));
    let new = worker(&new_node, NAME).await;
    new.publish("x", Tensor::from_values(new.pool(), &[1], &[5u32]).unwrap()).unwrap();
    new.peer_at("receiver:1").await.unwrap();
    let is_known = || receiver.peers().iter().any(|known| known.incarnation == Some(new.incarnation()));
    let end = handle.now() + LIVENESS;
    while !is_known() && handle.now() < end {
        handle.runtime().sleep(Duration::from_millis(10)).await;
    }
    assert!(is_known(), "the session of the new life is not used");
    let fetched = peer.fetch("x").await.unwrap();
    assert_eq!(fetched.values::<u32>().unwrap(), [5]);
    handle.inject(Fault::Crash(old_node.id()));
    join(receiver.shutdown(), new.shutdown()).await;
    drop(old);
}

#[test]
fn d_peer_sigstop_a_new_life_is_used_although_the_session_of_the_old_one_is_still_open() {
    on_seeds(|world, _| world.run(come_back_elsewhere(world.handle())).unwrap());
}

/// Two workers connect to each other, one of them a `pause` later. The other's process is stopped `after` it has begun.
async fn stop_while_both_connect(handle: Handle, pause: Duration, after: Duration) {
    let [peer_node, node] = ["peer:1", "receiver:1"].map(|address| handle.start_node(address).unwrap());
    let stopped = worker(&peer_node, "/job:ps/replica:0/task:0").await;
    let other = worker(&node, "/job:worker/replica:0/task:0").await;
    for worker in [&stopped, &other] {
        worker.publish("x", Tensor::from_values(worker.pool(), &[1], &[5u32]).unwrap()).unwrap();
    }
    let (to_other, to_stopped) = (stopped.peer_at("receiver:1"), other.peer_at("peer:1"));
    let (to_other, to_stopped) = join(to_other, to_stopped).await;
    let fetching =
        peer_node.run("fetch from the other", async move { drop(to_other.unwrap().fetch("x").await) });
    let runtime = node.runtime();
    let fetched = node.run("fetch from the peer", async move {
        runtime.sleep(pause).await;
        to_stopped.unwrap().fetch("x").await.map(drop)
    });
    handle.runtime().sleep(after).await;
    handle.inject(Fault::Freeze(peer_node.id()));
    let began = handle.now();
    if let Err(error) = fetched.await.unwrap() {
        assert_eq!(error.code(), Code::Unavailable, "stopped after {after:?}: {error}");
    }
    let took = handle.now() - began;
    assert!(took <= LIVENESS * 11 / 10 + NETWORK, "stopped after {after:?}: {took:?}");
    handle.inject(Fault::Crash(peer_node.id()));
    other.shutdown().await;
    drop((stopped, fetching));
}

#[test]
fn d_peer_sigstop_while_both_workers_connect_is_noticed_within_the_bound() {
    for seed in 0..400 {
        let world = World::new(seed);
        world.replayed_by("outage");
        // Connecting takes a few milliseconds.
        let (after, steps) = (NETWORK / 4000 * seed as u32, seed as u32 % 4);
        world.run(stop_while_both_connect(world.handle(), after / 4 * steps, after)).unwrap();
    }
}

/// A receive whose token is already cancelled requests from a peer whose process is stopped.
async fn ask_who_is_silent(handle: Handle) {
    let [peer_node, node] = ["peer:1", "receiver:1"].map(|address| handle.start_node(address).unwrap());
    let sender = worker_with(&peer_node, "/job:ps/replica:0/task:0", LIVENESS * 6).await;
    let receiver = worker_with(&node, "/job:worker/replica:0/task:0", LIVENESS * 6).await;
    let peer = receiver.peer_at("peer:1").await.unwrap();
    sender.publish("x", Tensor::from_values(sender.pool(), &[1], &[5u32]).unwrap()).unwrap();
    peer.fetch("x").await.unwrap();
    let cpu = |worker: &str| format!("{worker}/device:CPU:0");
    let key = receiver.key(&cpu(sender.name()), &cpu(receiver.name()), "late").unwrap();
    let token = CancellationToken::new();
    token.cancel();
    handle.inject(Fault::Freeze(peer_node.id()));
    let began = handle.now();
    let args = RecvArgs { cancellation: Some(token), ..RecvArgs::default() };
    let ended = receiver.shared_step(1).recv(&key).with(args).await.unwrap_err();
    assert!(matches!(ended, WorkerError::Cancelled { .. }), "{ended}");
    assert!(handle.now() - began <= Duration::from_secs(5) + NETWORK, "{:?}", handle.now() - began);
    handle.inject(Fault::Crash(peer_node.id()));
    receiver.shutdown().await;
    drop(sender);
}

#[test]
fn l1_a_cancelled_receive_ends_soon_though_its_peer_is_silent() {
    on_seeds(|world, _| world.run(ask_who_is_silent(world.handle())).unwrap());
}

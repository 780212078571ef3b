//! Two processes call each other's handlers, and one of them is killed in the middle, again and again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt as _, future::join_all};
use tensorwire_protocol::Status;
use tensorwire_rendezvous::{
    Peer, Tensor, Worker, WorkerError,
    calls::{Call, Handling},
};

use crate::harness::{
    Other, PARENT, bounded, builder, is_version, kind, memory_returns, role, say, step, tensor,
};

const CHILD: &str = "/job:child/replica:0/task:0";
/// In a message, and in several pieces.
const BYTES: [usize; 2] = [300, 300_000];
/// Calls of each side that are under way.
const CALLS: usize = 6;
const KILLS: u64 = 12;

/// Answers calls with their argument, some at once and some later, and counts the handlers that run.
fn answers(worker: &Worker) -> (Handling, Arc<AtomicUsize>) {
    struct Run(Arc<AtomicUsize>);

    impl Drop for Run {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    let running = Arc::new(AtomicUsize::new(0));
    let (counted, runtime) = (running.clone(), worker.runtime().clone());
    let echo = move |call: Call| {
        let number = counted.fetch_add(1, Ordering::SeqCst) as u64;
        let (run, pause) = (Run(counted.clone()), runtime.sleep(Duration::from_micros(number % 3 * 700)));
        async move {
            let _run = run;
            if !number.is_multiple_of(3) {
                pause.await;
            }
            Ok::<_, Status>(call.into_arguments())
        }
    };
    (worker.handle("echo", echo).unwrap(), running)
}

/// Calls until that fails. Every answer is whole.
async fn calls(worker: &Worker, peer: &Peer, bytes: usize) -> WorkerError {
    for version in 1.. {
        let argument: Tensor = tensor(worker, bytes, version).await;
        match peer.call("echo", argument).await {
            Ok(answer) => assert!(is_version(answer[0].bytes(), version), "an answer is torn"),
            Err(error) => return error,
        }
    }
    unreachable!("numbers do not end")
}

async fn all_calls(worker: &Worker, peer: &Peer) -> Vec<WorkerError> {
    join_all((0..CALLS).map(|call| calls(worker, peer, BYTES[call % BYTES.len()]))).await
}

/// Calls until it is killed, or loses its parent.
async fn child(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[1])).bind(&words[3]).start().await.unwrap();
    let _answers = answers(&worker);
    let parent = worker.set_address(PARENT, &words[2]).unwrap();
    say(worker.address());
    all_calls(&worker, &parent).await;
}

/// Lets a child live for so long, and returns its address.
async fn life(test: &str, role: &str, worker: &Worker, time: Duration) -> String {
    let mut other = Other::start(test, role);
    let address = other.hear().await;
    let peer = worker.peer_at(&address).await.unwrap();
    let mut called = all_calls(worker, &peer).boxed_local();
    tokio::select! {
        early = &mut called => panic!("{early:?}"),
        () = worker.runtime().sleep(time) => {}
    }
    other.kill();
    for error in step("the end of all calls", called).await {
        // A call that began after the kill finds nobody.
        let is_lost = matches!(
            error,
            WorkerError::PeerLost { .. } | WorkerError::Control(_) | WorkerError::NoFabric { .. }
        );
        assert!(is_lost, "{error:?}");
    }
    address
}

fn killed_amid_calls(test: &'static str, fabric: &'static str) {
    let limit = Duration::from_secs(110);
    if let Some(words) = role() {
        return bounded(limit, |_| child(words));
    }
    bounded(limit, |_| async move {
        let worker = builder(PARENT, kind(fabric)).start().await.unwrap();
        let (handling, running) = answers(&worker);
        let mut address = "127.0.0.1:0".to_owned();
        for kill in 0..KILLS {
            let role = format!("child {fabric} {} {address}", worker.address());
            let time = Duration::from_micros(20_000 + kill * 1733 % 7000);
            address = life(test, &role, &worker, time).await;
            step("the end of the handlers", async {
                while running.load(Ordering::SeqCst) > 0 {
                    worker.runtime().sleep(Duration::from_millis(1)).await;
                }
            })
            .await;
            memory_returns(&worker).await;
        }
        drop(handling);
        worker.shutdown().await;
    });
}

#[test]
fn d_calls_end_on_both_sides_when_the_peer_is_killed_over_tcp() {
    killed_amid_calls("calls::d_calls_end_on_both_sides_when_the_peer_is_killed_over_tcp", "tcp");
}

#[test]
fn d_calls_end_on_both_sides_when_the_peer_is_killed_over_shm() {
    killed_amid_calls("calls::d_calls_end_on_both_sides_when_the_peer_is_killed_over_shm", "shm");
}

//! Calls between workers of one process, over shm and tcp.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    future::{IntoFuture as _, pending},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{
    FutureExt as _, StreamExt as _,
    future::{Either, join_all, select},
    join,
};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Code, Mode, Status, Validation};
use tensorwire_rendezvous::{
    Peer, Tensor, Trust, Worker, WorkerBuilder, WorkerError,
    calls::{Call, Handling},
};
use tokio::sync::{Barrier, Notify, Semaphore};

use crate::{
    fabrics::{assert_moves_over, kinds, over_verbs},
    sets::{USUAL, on, run},
    two::Two,
};

/// Numbers of elements: none, in a message, one write of every fabric, several pieces, and one that is no power of two.
const LENGTHS: [usize; 5] = [0, 5, 2000, 262_144, 777_777];

fn tensor(worker: &Worker, length: usize, first: u32) -> Tensor {
    let values: Vec<u32> = (first..).take(length).collect();
    Tensor::from_values(worker.pool(), &[length as u64], &values).unwrap()
}

/// Answers `echo` with the arguments, in reverse order.
fn echo(worker: &Worker) -> Handling {
    let echoed = |call: Call| async move {
        let mut arguments = call.into_arguments();
        arguments.reverse();
        Ok::<_, Status>(arguments)
    };
    worker.handle("echo", echoed).unwrap()
}

fn status(error: WorkerError) -> Status {
    match error {
        WorkerError::Remote { status, .. } => status,
        other => panic!("{other}"),
    }
}

/// Calls `echo` with lists of tensors.
async fn echoes(two: &Two, kind: &str) {
    for length in LENGTHS {
        for count in [0, 1, 3] {
            // Twice: the second time, the form of the answer is known.
            for round in 0..2 {
                let arguments: Vec<_> =
                    (0..count).map(|number| tensor(&two.client, length + number, number as u32)).collect();
                let answer = two.peer.call("echo", arguments.clone()).await.unwrap();
                assert_eq!(answer.len(), count, "{kind}: {count} tensors of {length}, round {round}");
                for (came, sent) in answer.iter().rev().zip(&arguments) {
                    assert_eq!((came.metadata(), came.bytes()), (sent.metadata(), sent.bytes()), "{kind}");
                    came.as_slice::<u32>().unwrap();
                }
            }
        }
    }
}

#[test]
fn tensors_of_all_lengths_go_to_a_handler_and_come_back() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let _handling = echo(&two.server);
            echoes(&two, kind.name()).await;
            assert_moves_over(&two.client, kind);
            two.end().await;
        }
    });
}

#[test]
fn calls_work_in_mode_original_validated_and_between_workers_without_trust() {
    run(async {
        type Set = fn(WorkerBuilder) -> WorkerBuilder;
        let settings: [(&[FabricKind], Set); 3] = [
            (USUAL, |builder| builder.flow(|flow| flow.mode = Mode::Original)),
            (USUAL, |builder| builder.validation(Validation::Xxh3)),
            // Shared memory needs trust.
            (&[FabricKind::TCP], |builder| builder.trust(Trust::Hostile)),
        ];
        for (kinds, set) in settings {
            for &kind in kinds {
                let two = Two::of(|name| set(on(kind, name))).await;
                let _handling = echo(&two.server);
                echoes(&two, kind.name()).await;
                two.end().await;
            }
        }
    });
}

#[test]
fn errors_of_a_handler_reach_the_caller_with_code_message_and_details() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let refuse = |call: Call| async move {
                match call.arguments() {
                    [] => {
                        Err::<(), _>(Status { details: vec![7, 8], ..Status::new(Code::OutOfRange, "row 9") })
                    }
                    [_] => Err(WorkerError::InvalidTensor { problem: "give two".to_owned() }.into()),
                    _ => panic!("a handler that panics"),
                }
            };
            let _handling = two.server.handle("refuse", refuse).unwrap();
            let refused = |count: usize| {
                let arguments = vec![tensor(&two.client, 1, 0); count];
                two.peer.call("refuse", arguments).into_future().map(|answer| status(answer.unwrap_err()))
            };
            let own = refused(0).await;
            assert_eq!((own.code, &*own.message, &*own.details), (Code::OutOfRange, "row 9", &[7, 8][..]));
            let converted = refused(1).await;
            assert_eq!((converted.code, &*converted.message), (Code::InvalidArgument, "tensor: give two"));
            let panicked = refused(2).await;
            assert!(panicked.code == Code::Internal && panicked.message.contains("panicked"), "{panicked}");

            let unknown = status(two.peer.call("embed", ()).await.unwrap_err());
            assert!(unknown.code == Code::NotFound && unknown.message.contains("`embed`"), "{unknown}");
            let many = vec![tensor(&two.client, 0, 0); 1025];
            let WorkerError::Local { status, .. } = two.peer.call("refuse", many).await.unwrap_err() else {
                panic!()
            };
            assert_eq!(status.code, Code::InvalidArgument);
            two.end().await;
        }
    });
}

#[test]
fn a_name_has_one_handler_at_a_time() {
    run(async {
        let two = Two::of(|name| on(USUAL[0], name)).await;
        let first = echo(&two.server);
        let error = two.server.handle("echo", |_| async { Ok::<_, Status>(()) }).unwrap_err();
        assert!(matches!(&error, WorkerError::Config { value, .. } if value == "echo"), "{error}");
        assert!(two.server.handle("", |_| async { Ok::<_, Status>(()) }).is_err());
        two.peer.call("echo", ()).await.unwrap();
        drop(first);
        assert_eq!(status(two.peer.call("echo", ()).await.unwrap_err()).code, Code::NotFound);
        let _second = echo(&two.server);
        two.peer.call("echo", ()).await.unwrap();
        two.end().await;
    });
}

/// Counts the handlers that run.
#[derive(Debug, Default)]
struct Running {
    now: AtomicUsize,
    changed: Notify,
}

struct Run(Arc<Running>);

impl Running {
    fn begin(self: &Arc<Self>) -> Run {
        self.now.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_one();
        Run(self.clone())
    }

    async fn are(&self, count: usize) {
        while self.now.load(Ordering::SeqCst) != count {
            self.changed.notified().await;
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_one();
    }
}

/// Answers `wait` never.
fn waits(worker: &Worker) -> (Handling, Arc<Running>) {
    let running = Arc::new(Running::default());
    let counted = running.clone();
    let wait = move |call: Call| {
        let run = counted.begin();
        async move {
            let _held = (call, run);
            pending::<Result<(), Status>>().await
        }
    };
    (worker.handle("wait", wait).unwrap(), running)
}

#[test]
fn a_call_that_is_dropped_or_late_ends_its_handler() {
    run(async {
        for &kind in kinds(USUAL) {
            for length in [1, 100_000] {
                let two = Two::of(|name| on(kind, name)).await;
                let (_handling, running) = waits(&two.server);
                let argument = tensor(&two.client, length, 0);
                let called = two.peer.call("wait", argument.clone()).into_future();
                // The call is dropped when its handler runs.
                match select(called, pin!(running.are(1))).await {
                    Either::Left((answer, _)) => panic!("{answer:?}"),
                    Either::Right(((), called)) => drop(called),
                }
                running.are(0).await;
                if length == 1 {
                    let late = two.peer.call("wait", argument).timeout(Duration::from_secs(1)).into_future();
                    let (late, ()) = join!(late, running.are(1));
                    let late = late.unwrap_err();
                    assert!(matches!(late, WorkerError::DeadlineExceeded { .. }), "{late}");
                }
                running.are(0).await;
                two.end().await;
            }
        }
    });
}

#[test]
fn both_sides_learn_of_the_end_of_the_other() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let (_handling, running) = waits(&two.server);
            let closed = async {
                running.are(1).await;
                two.client.shutdown().await;
            };
            let (called, ()) = join!(two.peer.call("wait", ()).into_future(), closed);
            assert!(called.is_err());
            running.are(0).await;

            let client = on(kind, "another").start().await.unwrap();
            let peer = client.peer_at(two.server.address()).await.unwrap();
            let closed = async {
                running.are(1).await;
                two.server.shutdown().await;
            };
            let (called, ()) = join!(peer.call("wait", ()).into_future(), closed);
            let lost = called.unwrap_err();
            assert!(matches!(lost, WorkerError::PeerLost { .. }), "{lost}");
            running.are(0).await;
            client.shutdown().await;
        }
    });
}

#[test]
fn clients_without_a_name_are_served_and_the_handler_learns_who_calls_and_for_how_long() {
    run(async {
        let server = on(USUAL[0], "server").start().await.unwrap();
        let (pool, runtime) = (server.pool().clone(), server.runtime().clone());
        let who = move |call: Call| {
            let (pool, runtime) = (pool.clone(), runtime.clone());
            async move {
                let before = call.time_left();
                runtime.sleep(Duration::from_millis(20)).await;
                let left = [before, call.time_left()].map(|left| left.as_millis() as u64);
                let name = Tensor::from_strings(&pool, &[], &[call.peer()])?;
                Ok::<_, WorkerError>([name, Tensor::from_values(&pool, &[2], &left)?])
            }
        };
        let _handling = server.handle("who", who).unwrap();
        for _ in 0..3 {
            let client = Worker::client().start().await.unwrap();
            let peer = client.peer_at(server.address()).await.unwrap();
            let answer = peer.call("who", ()).timeout(Duration::from_secs(20)).await.unwrap();
            assert_eq!(answer[0].strings().unwrap(), [client.name()]);
            let left = answer[1].values::<u64>().unwrap();
            assert!(left[0] <= 20_000 && left[1] + 20 <= left[0], "{left:?}");
            client.shutdown().await;
        }
        server.shutdown().await;
    });
}

#[test]
fn peers_that_join_come_as_a_stream_each_life_once() {
    run(async {
        let server = on(USUAL[0], "server").start().await.unwrap();
        let first = on(USUAL[0], "client").start().await.unwrap();
        let known = first.peer_at(server.address()).await.unwrap();
        known.list().await.unwrap();
        let mut joining = server.joining();
        let life = |peer: Option<Peer>| peer.map(|peer| (peer.name().to_owned(), peer.incarnation()));
        let of = |worker: &Worker| Some((worker.name().to_owned(), Some(worker.incarnation())));
        assert_eq!(life(joining.next().await), of(&first));
        known.list().await.unwrap();
        assert!(joining.next().now_or_never().is_none(), "the same life came twice");
        first.shutdown().await;

        let mut clients = Vec::new();
        for _ in 0..3 {
            let client = Worker::client().start().await.unwrap();
            client.peer_at(server.address()).await.unwrap();
            assert_eq!(life(joining.next().await), of(&client));
            clients.push(client);
        }
        let again = on(USUAL[0], "client").start().await.unwrap();
        again.peer_at(server.address()).await.unwrap();
        assert_eq!(life(joining.next().await), of(&again));
        server.shutdown().await;
        assert!(joining.next().await.is_none());
        assert!(joining.next().await.is_none());
        for client in clients.into_iter().chain([again]) {
            client.shutdown().await;
        }
    });
}

#[test]
fn a_worker_calls_itself_without_a_connection() {
    run(async {
        let worker = on(USUAL[0], "server").start().await.unwrap();
        let _handling = echo(&worker);
        let itself = worker.peer_at(worker.address()).await.unwrap();
        let sent = tensor(&worker, 2000, 0);
        let answer = itself.call("echo", sent.clone()).await.unwrap();
        assert_eq!(answer[0].bytes().as_ptr(), sent.bytes().as_ptr());
        assert_eq!(status(itself.call("embed", ()).await.unwrap_err()).code, Code::NotFound);
        worker.shutdown().await;
    });
}

#[test]
fn arguments_above_the_limit_are_refused_and_those_within_it_take_turns() {
    run(async {
        for &kind in kinds(USUAL) {
            let bytes = 4 * 100_000;
            let limits =
                |builder: WorkerBuilder| builder.limits(|limits| limits.call_bytes = 2 * bytes + 9000);
            let two = Two::of(|name| limits(on(kind, name))).await;
            let (running, gate) = (Arc::new(Running::default()), Arc::new(Semaphore::new(0)));
            let (counted, gates) = (running.clone(), gate.clone());
            let most = Arc::new(AtomicUsize::new(0));
            let seen = most.clone();
            let gated = move |call: Call| {
                let (run, gate) = (counted.begin(), gates.clone());
                seen.fetch_max(run.0.now.load(Ordering::SeqCst), Ordering::SeqCst);
                async move {
                    let _held = (call, run);
                    gate.acquire().await.unwrap().forget();
                    Ok::<_, Status>(())
                }
            };
            let _echo = echo(&two.server);
            let _handling = two.server.handle("gated", gated).unwrap();
            let huge = two.peer.call("gated", tensor(&two.client, 250_000, 0)).await;
            let refused = status(huge.unwrap_err());
            assert!(
                refused.code == Code::ResourceExhausted && refused.message.contains("`call_bytes`"),
                "{refused}"
            );
            let calls = (0..6)
                .map(|number| two.peer.call("gated", tensor(&two.client, 100_000, number)).into_future());
            let opened = async {
                running.are(2).await;
                // Short arguments do not wait for room.
                two.peer.call("echo", ()).await.unwrap();
                assert_eq!(running.now.load(Ordering::SeqCst), 2);
                gate.add_permits(6);
            };
            let (answers, ()) = join!(join_all(calls), opened);
            assert!(answers.into_iter().all(|answer| answer.is_ok()), "{kind}");
            assert_eq!(most.load(Ordering::SeqCst), 2, "{kind}");
            two.end().await;
        }
    });
}

#[test]
fn more_calls_run_at_the_same_time_than_arguments_are_requested() {
    run(async {
        const CALLS: usize = 60;
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let all = Arc::new(Barrier::new(CALLS));
            let meet = move |call: Call| {
                let all = all.clone();
                async move {
                    all.wait().await;
                    Ok::<_, Status>(call.into_arguments())
                }
            };
            let _handling = two.server.handle("meet", meet).unwrap();
            let calls = (0..CALLS as u32).map(|number| {
                let sent = tensor(&two.client, if number % 2 == 0 { 3 } else { 3000 }, number);
                let called = two.peer.call("meet", sent.clone()).into_future();
                async move { assert_eq!(called.await.unwrap()[0].bytes(), sent.bytes(), "{number}") }
            });
            join_all(calls).await;
            two.end().await;
        }
    });
}

over_verbs! {
    tensors_of_all_lengths_go_to_a_handler_and_come_back
    errors_of_a_handler_reach_the_caller_with_code_message_and_details
    a_call_that_is_dropped_or_late_ends_its_handler
    both_sides_learn_of_the_end_of_the_other
    arguments_above_the_limit_are_refused_and_those_within_it_take_turns
    more_calls_run_at_the_same_time_than_arguments_are_requested
}

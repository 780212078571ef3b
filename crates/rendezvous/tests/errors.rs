//! Errors name the true cause, the operation, and the side that refuses.

use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{BoxFuture, pending},
};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerError,
    control::{ControlError, Secret},
    sets::Policy,
};

use crate::bounded::bounded;

const LIMIT: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

fn secret() -> Secret {
    Secret::new(*b"the secret of these workers").unwrap()
}

fn tensor(worker: &Worker) -> Tensor {
    Tensor::from_values(worker.pool(), &[1], &[7_u8]).unwrap()
}

#[test]
fn what_is_late_is_named_with_what_to_look_at() {
    bounded(LIMIT, async {
        let server = Worker::builder("server").start().await.unwrap();
        let client = Worker::client().timeout(SHORT).start().await.unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        let _of_peer = server.step(1);
        for (error, hint) in [
            (client.wait_for_peer("nobody").await.unwrap_err(), "does it dial this worker?"),
            (peer.fetch("none").wait().await.unwrap_err(), "does it publish this name?"),
            (client.step(1).from(&peer).recv("none").await.unwrap_err(), "does it send this key?"),
        ] {
            assert!(matches!(error, WorkerError::DeadlineExceeded { .. }), "{error}");
            assert!(error.to_string().contains(hint), "{error}");
        }
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn every_operation_of_a_worker_that_is_shut_down_says_so() {
    bounded(LIMIT, async {
        let server = Worker::builder("server").start().await.unwrap();
        let worker = Worker::builder("client").start().await.unwrap();
        let (address, value) = (server.address().to_owned(), tensor(&worker));
        let peer = worker.peer_at(&address).await.unwrap();
        server.publish("t", tensor(&server)).unwrap();
        peer.fetch("t").await.unwrap();
        let step = worker.step(1);
        let buffer = worker.receive_pool().try_alloc(1).unwrap();
        let key = worker.key(worker.name(), "server", "edge").unwrap();
        let to_here = worker.key("server", worker.name(), "edge").unwrap();
        worker.shutdown().await;
        let ended = [
            ("publish", worker.publish("t", value.clone()).map(drop)),
            ("peer_at, known", worker.peer_at(&address).await.map(drop)),
            ("peer_at, unknown", worker.peer_at("127.0.0.1:1").await.map(drop)),
            ("wait_for_peer", worker.wait_for_peer("server").await.map(drop)),
            ("connect", peer.connect().await),
            ("fetch", peer.fetch("t").await.map(drop)),
            ("fetch into", peer.fetch("t").into_buffer(buffer).await.map(drop).map_err(|late| late.error)),
            ("fetch_many", peer.fetch_many(["t"]).await.map(drop)),
            ("tensor", peer.tensor("t").unwrap().fetch().await.map(drop)),
            ("list", peer.list().await.map(drop)),
            ("notes", peer.notes(1, 1).await.map(drop)),
            ("send", step.send(&key, value.clone())),
            ("send to", step.to(&peer).send("edge", value.clone())),
            ("send in a new step", worker.step(2).to(&peer).send("edge", value)),
            ("recv", step.recv(&to_here).await.map(drop)),
            ("recv_many", step.recv_many(std::slice::from_ref(&to_here)).await.map(drop)),
            ("recv_outputs", step.recv_outputs(&[to_here]).await.map(drop)),
        ];
        for (operation, ended) in ended {
            assert!(matches!(ended, Err(WorkerError::ShutDown)), "{operation}: {ended:?}");
        }
        server.shutdown().await;
    });
}

#[test]
fn what_is_under_way_when_its_worker_is_shut_down_says_so() {
    bounded(LIMIT, async {
        let (server, worker) = (
            Worker::builder("server").start().await.unwrap(),
            Worker::builder("client").start().await.unwrap(),
        );
        let _handling = server.handle("late", |_| pending::<Result<(), WorkerError>>()).unwrap();
        let peer = worker.peer_at(server.address()).await.unwrap();
        let (mut versions, mut values) =
            (peer.set("weights").follow(Policy::Latest), peer.subscribe("value"));
        let mut under_way: [BoxFuture<'_, Result<(), WorkerError>>; 3] = [
            async { peer.call("late", ()).await.map(drop) }.boxed(),
            async { versions.next().await.unwrap().map(drop) }.boxed(),
            async { values.next().await.unwrap().map(drop) }.boxed(),
        ];
        for operation in &mut under_way {
            assert!(futures::poll!(operation).is_pending());
        }
        peer.list().await.unwrap();
        worker.shutdown().await;
        for operation in under_way {
            let ended = operation.await;
            assert!(matches!(ended, Err(WorkerError::ShutDown)), "{ended:?}");
        }
        server.shutdown().await;
    });
}

#[test]
fn who_is_refused_after_it_has_met_its_peer_gets_the_reason_and_no_peer() {
    bounded(LIMIT, async {
        let server =
            Worker::builder("server").limits(|limits| limits.sessions_max = 1).start().await.unwrap();
        let first = Worker::builder("twin").start().await.unwrap();
        first.peer_at(server.address()).await.unwrap();
        for _ in 0..20 {
            let second = Worker::builder("other").start().await.unwrap();
            let error = second.peer_at(server.address()).await.unwrap_err();
            assert!(matches!(error, WorkerError::Control(ControlError::Refused { .. })), "{error}");
            assert!(error.to_string().contains("sessions_max"), "{error}");
            second.shutdown().await;
        }
        server.shutdown().await;
        let server = Worker::builder("server").start().await.unwrap();
        first.peer_at(server.address()).await.unwrap();
        for _ in 0..20 {
            let second = Worker::builder("twin").start().await.unwrap();
            let error = second.peer_at(server.address()).await.unwrap_err();
            assert!(matches!(error, WorkerError::NameTaken { .. }), "{error}");
            second.shutdown().await;
        }
        first.shutdown().await;
        server.shutdown().await;
    });
}

/// Passes one connection on to `target`, until the channel says so; then resets both its ends.
fn one_connection(target: String) -> (String, mpsc::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (cut, cutting) = mpsc::channel();
    thread::spawn(move || {
        let from = listener.accept().unwrap().0;
        drop(listener);
        let to = TcpStream::connect(target).unwrap();
        for (mut source, mut sink) in [(&from, &to), (&to, &from)]
            .map(|(one, other)| (one.try_clone().unwrap(), other.try_clone().unwrap()))
        {
            thread::spawn(move || io::copy(&mut source, &mut sink));
        }
        let _ = cutting.recv();
        for end in [from, to] {
            let _ = end.shutdown(Shutdown::Both);
        }
    });
    (address, cut)
}

#[test]
fn a_lost_session_is_told_without_the_words_of_the_library_that_carried_it() {
    bounded(LIMIT, async {
        let server = Worker::builder("server").secret(secret()).start().await.unwrap();
        let (address, cut) = one_connection(server.address().to_owned());
        let client = Worker::client().secret(secret()).fabrics([FabricKind::SHM]).start().await.unwrap();
        let peer = client.peer_at(&address).await.unwrap();
        peer.connect().await.unwrap();
        let waiting = async {
            let fetch = peer.fetch("none").wait().into_future();
            let cutting = async {
                while server.peers().iter().all(|peer| peer.counters.received.tensor_request == 0) {
                    tokio::task::yield_now().await;
                }
                cut.send(()).unwrap();
            };
            futures::join!(fetch, cutting).0
        };
        let error = waiting.await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, WorkerError::PeerLost { .. }), "{text}");
        for word in ["h2 ", "hyper", "transport error", "body", "stream"] {
            assert!(!text.contains(word), "`{word}` in: {text}");
        }
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn each_life_of_a_peer_is_waited_for_once() {
    bounded(LIMIT, async {
        let server = Worker::builder("server").timeout(SHORT).start().await.unwrap();
        let address = server.address().to_owned();
        let mut lives = Vec::new();
        for _ in 0..3 {
            let client = Worker::builder("client").start().await.unwrap();
            let (met, _peer) = futures::join!(server.wait_for_peer("client"), client.peer_at(&address));
            lives.push(met.unwrap().incarnation());
            assert_eq!(lives.last(), Some(&Some(client.incarnation())));
            // It is still there, and was returned.
            let again = server.wait_for_peer("client").await.unwrap_err();
            assert!(matches!(again, WorkerError::DeadlineExceeded { .. }), "{again}");
            client.shutdown().await;
            let gone = server.wait_for_peer("client").await.unwrap_err();
            assert!(matches!(gone, WorkerError::DeadlineExceeded { .. }), "{gone}");
        }
        lives.dedup();
        assert_eq!(lives.len(), 3);
        server.shutdown().await;
    });
}

#[test]
fn peers_that_dialled_and_left_are_no_longer_listed() {
    bounded(LIMIT, async {
        let server = Worker::builder("server").start().await.unwrap();
        server.publish("t", tensor(&server)).unwrap();
        let held = Worker::builder("held").start().await.unwrap();
        held.peer_at(server.address()).await.unwrap();
        let of_user = server.wait_for_peer("held").await.unwrap();
        for builder in [Worker::client(), Worker::client(), Worker::builder("named")] {
            let client = builder.start().await.unwrap();
            client.peer_at(server.address()).await.unwrap().fetch("t").await.unwrap();
            assert_eq!(server.peers().len(), 2);
            client.shutdown().await;
            while server.peers().len() > 1 {
                tokio::task::yield_now().await;
            }
        }
        held.shutdown().await;
        // The program has a peer in its hands, and the client has dialled its server: both stay.
        assert_eq!(server.peers()[0].name, of_user.name());
        let client = Worker::client().start().await.unwrap();
        client.peer_at(server.address()).await.unwrap();
        server.shutdown().await;
        assert_eq!(client.peers().len(), 1);
        client.shutdown().await;
    });
}

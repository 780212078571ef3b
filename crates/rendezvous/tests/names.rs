//! Workers' names: plain ones, none, the own one, and one that two workers have.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::future::pending;
use tensorwire_fabric::{FabricKind, Runtime as _, TokioRuntime};
use tensorwire_protocol::{Code, DataType, wire::control::ControlFrame};
use tensorwire_rendezvous::{
    ClusterSpec, Tensor, Worker, WorkerBuilder, WorkerError,
    control::{ControlPlane, ControlSession, GrpcConfig, GrpcPlane, Secret, handshake},
};
use tokio::net::{TcpListener, TcpStream};

use crate::bounded::bounded;

const SERVER: &str = "/job:ps/replica:0/task:0";
const TWIN: &str = "/job:twin/replica:0/task:0";
const LIMIT: Duration = Duration::from_secs(30);

async fn start(builder: WorkerBuilder) -> Worker {
    builder.require(FabricKind::TCP).start().await.unwrap()
}

fn tensor(worker: &Worker, values: &[u32]) -> Tensor {
    Tensor::from_values(worker.pool(), &[values.len() as u64], values).unwrap()
}

/// A worker that has published `x`.
async fn serve(builder: WorkerBuilder) -> Worker {
    let server = start(builder).await;
    server.publish("x", tensor(&server, &[5])).unwrap();
    server
}

async fn fetch(client: &Worker, address: &str) -> Result<u32, WorkerError> {
    let peer = client.peer_at(address).await?;
    Ok(peer.fetch("x").await?.values::<u32>()?[0])
}

fn assert_names_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
}

/// Passes connections on to `target`, and counts them.
pub(crate) async fn counted(target: String) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let count = Arc::<AtomicUsize>::default();
    let counter = count.clone();
    #[allow(clippy::disallowed_methods)] // part of the test, which runs on tokio itself
    tokio::spawn(async move {
        while let Ok((mut from, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::Relaxed);
            let target = target.clone();
            tokio::spawn(async move {
                if let Ok(mut to) = TcpStream::connect(&target).await {
                    let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                }
            });
        }
    });
    (address, count)
}

#[test]
fn d_of_two_live_workers_of_one_name_the_second_is_refused_and_comes_again_at_a_pace() {
    bounded(LIMIT, async {
        let secret = || Secret::new(*b"the secret of these workers").unwrap();
        let server = serve(Worker::builder(SERVER).secret(secret())).await;
        let (door, connections) = counted(server.address().to_owned()).await;
        let first = start(Worker::builder(TWIN).secret(secret())).await;
        assert_eq!(fetch(&first, server.address()).await.unwrap(), 5);
        let second = start(Worker::builder(TWIN).secret(secret())).await;
        let runtime = TokioRuntime::current().unwrap();
        let (end, mut refused) = (runtime.now() + Duration::from_millis(2500), 0);
        while runtime.now() < end {
            let error = fetch(&second, &door).await.unwrap_err();
            let WorkerError::NameTaken { name, .. } = &error else { panic!("{error}") };
            assert_eq!((name.as_str(), error.code()), (TWIN, Code::AlreadyExists));
            assert_names_all(&error.to_string(), &[TWIN, first.address(), second.address(), "its own name"]);
            refused += 1;
            // The one that has the name is not concerned.
            assert_eq!(fetch(&first, server.address()).await.unwrap(), 5);
        }
        let dialled = connections.load(Ordering::Relaxed);
        assert!(refused > dialled && dialled <= 4, "{refused} refused, {dialled} connections");
        // Who leaves makes room.
        first.shutdown().await;
        while let Err(error) = fetch(&second, &door).await {
            assert!(matches!(error, WorkerError::NameTaken { .. }), "{error}");
            tokio::task::yield_now().await;
        }
        second.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn d_a_worker_that_is_dialled_under_a_name_that_is_taken_is_refused_too() {
    bounded(LIMIT, async {
        let (first, second) = (serve(Worker::builder(TWIN)).await, serve(Worker::builder(TWIN)).await);
        let client = start(Worker::client()).await;
        assert_eq!(fetch(&client, first.address()).await.unwrap(), 5);
        let error = client.peer_at(second.address()).await.unwrap_err();
        assert!(matches!(error, WorkerError::NameTaken { .. }), "{error}");
        assert_names_all(&error.to_string(), &[TWIN, first.address(), second.address()]);
        // Its address is not taken for the other's.
        assert_eq!(client.peer(TWIN).unwrap().address().as_deref(), Some(first.address()));
        assert_eq!(fetch(&client, first.address()).await.unwrap(), 5);
        // Nor does it meet its own double.
        let error = second.peer_at(first.address()).await.unwrap_err();
        assert_names_all(&error.to_string(), &["is taken", TWIN, first.address(), second.address()]);
        assert!(second.peers().iter().all(|peer| peer.name != TWIN), "{:?}", second.peers());
        for worker in [client, second, first] {
            worker.shutdown().await;
        }
    });
}

/// A session of a worker of this name, authenticated, and nothing more.
async fn session(plane: &GrpcPlane, name: &str, incarnation: u64, address: &str) -> ControlSession {
    let mut session = plane.dial(address).await.unwrap();
    let secret = plane.ambient_secret(address).await.unwrap();
    let (worker, listen_address) = (name.to_owned(), Some("127.0.0.1:9".to_owned()));
    let me = handshake::Introduction { worker, incarnation, listen_address, fabrics: Vec::new() };
    let runtime = TokioRuntime::current().unwrap();
    handshake::dial(&mut session, &me, secret.as_ref(), &runtime, LIMIT, address).await.unwrap();
    session
}

/// The next frame that is no ping. Pings are answered, if `alive`.
async fn next_frame(session: &mut ControlSession, alive: bool) -> Option<ControlFrame> {
    loop {
        let bytes = session.receiver.recv().await.ok()??;
        match ControlFrame::decode(&bytes).unwrap() {
            ControlFrame::Ping { nonce } if alive => {
                session.sender.send(ControlFrame::Pong { nonce }.encode()).await.unwrap();
            }
            ControlFrame::Ping { .. } => {}
            frame => return Some(frame),
        }
    }
}

/// Waits until the server has the session: it answers on it.
async fn until_begun(session: &mut ControlSession) {
    session.sender.send(ControlFrame::Ping { nonce: 1 }.encode()).await.unwrap();
    assert_eq!(next_frame(session, true).await, Some(ControlFrame::Pong { nonce: 1 }));
}

#[test]
fn l2_a_worker_that_does_not_answer_makes_room_for_its_next_life() {
    bounded(LIMIT, async {
        let server = serve(Worker::builder(SERVER)).await;
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let mut stopped = session(&plane, TWIN, 1, server.address()).await;
        until_begun(&mut stopped).await;
        // Frames go on to come, for what was sent before it was stopped comes late; but it answers nothing.
        let runtime = TokioRuntime::current().unwrap();
        let speaking = async {
            loop {
                runtime.sleep(Duration::from_millis(5)).await;
                let late = stopped.sender.send(ControlFrame::Pong { nonce: 77 }.encode()).await;
                if late.is_err() {
                    // It is over once the next life is let in.
                    return std::future::pending().await;
                }
            }
        };
        let next = start(Worker::builder(TWIN)).await;
        let fetched = tokio::select! {
            fetched = fetch(&next, server.address()) => fetched,
            () = speaking => unreachable!("it never ends"),
        };
        assert_eq!(fetched.unwrap(), 5);
        // It gets the reason, in case it wakes.
        let told = next_frame(&mut stopped, false).await;
        let Some(ControlFrame::Goodbye { status }) = told else { panic!("{told:?}") };
        assert_names_all(&status.message, &["did not answer", next.address()]);
        plane.close().await;
        next.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn sessions_of_one_name_and_one_life_stay() {
    bounded(LIMIT, async {
        let server = serve(Worker::builder(SERVER)).await;
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let mut sessions = Vec::new();
        for _ in 0..3 {
            sessions.push(session(&plane, TWIN, 7, server.address()).await);
        }
        for session in &mut sessions {
            until_begun(session).await;
        }
        // Another life is refused while one of them answers.
        let mut other = session(&plane, TWIN, 8, server.address()).await;
        let refused = tokio::select! {
            refused = next_frame(&mut other, true) => refused,
            _ = futures::future::join_all(sessions.iter_mut().map(|session| next_frame(session, true))) => {
                panic!("the sessions ended")
            }
        };
        let Some(ControlFrame::Goodbye { status }) = refused else { panic!("{refused:?}") };
        assert_eq!(status.code, Code::AlreadyExists);
        for session in &mut sessions {
            until_begun(session).await;
        }
        plane.close().await;
        server.shutdown().await;
    });
}

#[test]
fn a_plain_name_is_a_workers_wherever_one_is_expected() {
    const FULL: &str = "/job:server/replica:0/task:0";
    bounded(LIMIT, async {
        let server = serve(Worker::builder("server")).await;
        assert_eq!(server.name(), FULL);
        let cluster = ClusterSpec::new().worker("server", server.address());
        let client = start(Worker::builder("client").cluster(cluster)).await;
        let peer = client.peer("server").unwrap();
        assert_eq!((peer.name(), client.peer(FULL).unwrap().name()), (FULL, FULL));
        assert_eq!(peer.fetch("x").await.unwrap().values::<u32>().unwrap(), [5]);
        assert_eq!(server.wait_for_peer("client").await.unwrap().name(), client.name());
        // Keys have the full names, whatever they are made from.
        let key = client.key("server", "client", "edge").unwrap();
        let full = client.key(FULL, client.name(), "edge").unwrap();
        assert_eq!(key, full);
        server
            .shared_step(1)
            .send(&key.with_incarnation(server.incarnation()), tensor(&server, &[7]))
            .unwrap();
        assert_eq!(client.shared_step(1).recv(&key).await.unwrap().values::<u32>().unwrap(), [7]);
        let moved = client.set_address("server", server.address()).unwrap();
        assert_eq!(moved.name(), FULL);
        assert!(client.set_address("client", "127.0.0.1:1").is_err());
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn a_clusters_protocol_names_the_fabric_unless_the_builder_does() {
    async fn offered(
        protocol: &str,
        set: fn(WorkerBuilder) -> WorkerBuilder,
    ) -> Result<Vec<FabricKind>, WorkerError> {
        let cluster = ClusterSpec::new().worker("server", "127.0.0.1:4242").protocol(protocol);
        let worker = set(Worker::client()).cluster(cluster).start().await?;
        let kinds = worker.offered_fabrics().into_iter().map(|(kind, _)| kind).collect();
        worker.shutdown().await;
        Ok(kinds)
    }
    bounded(LIMIT, async {
        assert_eq!(offered("grpc", |builder| builder).await.unwrap(), [FabricKind::TCP]);
        // There is no fallback: without a device it is an error.
        match offered("grpc+verbs", |builder| builder).await {
            Ok(kinds) => assert_eq!(kinds, [FabricKind::VERBS]),
            Err(error) => assert!(error.to_string().contains("verbs"), "{error}"),
        }
        let chosen = offered("grpc+verbs", |builder| builder.fabrics([FabricKind::TCP])).await.unwrap();
        assert_eq!(chosen, [FabricKind::TCP]);
        let unknown = offered("grpc+gdr", |builder| builder).await.unwrap_err();
        assert!(matches!(unknown, WorkerError::Cluster(_)), "{unknown}");
    });
}

#[test]
fn e_a_device_is_no_worker_and_the_error_says_what_to_write() {
    bounded(LIMIT, async {
        let device = format!("{SERVER}/device:CPU:0");
        for (name, remedy) in [
            (&*device, SERVER),
            ("my.server", "letters, digits, underscores and hyphens"),
            ("", "like server"),
        ] {
            let error = Worker::builder(name).start().await.unwrap_err();
            let WorkerError::Config { field: "name", value, remedy: told } = &error else {
                panic!("{error}")
            };
            assert_eq!(value, name);
            assert_names_all(told, &[remedy]);
        }
        let worker = start(Worker::builder(SERVER)).await;
        let told = worker.set_address(&device, "127.0.0.1:1").unwrap_err().to_string();
        assert_names_all(&told, &[&device, "write the worker's name", SERVER]);
        worker.shutdown().await;
    });
}

#[test]
fn a_client_needs_no_name() {
    bounded(LIMIT, async {
        let server = serve(Worker::builder(SERVER)).await;
        let mut clients = Vec::new();
        for _ in 0..3 {
            let client = start(Worker::client()).await;
            assert!(client.name().starts_with("/job:client_"), "{}", client.name());
            assert_eq!(fetch(&client, server.address()).await.unwrap(), 5);
            clients.push(client);
        }
        let mut names: Vec<_> = clients.iter().map(Worker::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 3);
        // It is a name like any other: keys can have it.
        let key = clients[0].key(SERVER, clients[0].name(), "edge").unwrap();
        server
            .shared_step(1)
            .send(&key.with_incarnation(server.incarnation()), tensor(&server, &[7]))
            .unwrap();
        assert_eq!(clients[0].step(1).recv(&key).await.unwrap().values::<u32>().unwrap(), [7]);
        for client in clients {
            client.shutdown().await;
        }
        server.shutdown().await;
    });
}

#[test]
fn own_values_are_had_without_a_connection_by_name_and_by_address() {
    bounded(LIMIT, async {
        let worker = serve(Worker::builder("own")).await;
        worker.publish("y", tensor(&worker, &[1, 2])).unwrap();
        let port = worker.address().rsplit_once(':').unwrap().1.to_owned();
        let by_name = worker.peer("own").unwrap();
        let mut peers = vec![by_name.clone(), worker.wait_for_peer(worker.name()).await.unwrap()];
        for address in [worker.address().to_owned(), format!("http://localhost:{port}/")] {
            peers.push(worker.peer_at(&address).await.unwrap());
        }
        for peer in &peers {
            assert_eq!((peer.name(), peer.incarnation()), (worker.name(), Some(worker.incarnation())));
            assert_eq!(peer.address().as_deref(), Some(worker.address()));
            assert_eq!(peer.fetch("x").await.unwrap().values::<u32>().unwrap(), [5]);
            let both = peer.fetch_many(["y", "x"]).await.unwrap();
            assert_eq!(both[0].values::<u32>().unwrap(), [1, 2]);
            let listed = peer.list().with_checksums().await.unwrap();
            assert_eq!(listed.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["x", "y"]);
            assert!(listed.iter().all(|entry| entry.checksum.is_some()));
        }
        let version = worker.publish("x", tensor(&worker, &[6])).unwrap();
        let fetched = by_name.fetch("x").versioned().await.unwrap();
        assert_eq!(fetched.version, version);
        let buffer = worker.receive_pool().alloc(4).await.unwrap();
        let filled = by_name.fetch("x").into_buffer(buffer).dtype(DataType::U32).await.unwrap();
        assert_eq!((filled.bytes(), filled.version), (&6u32.to_le_bytes()[..], None));
        let newer = by_name.fetch("x").newer_than(version).into_future();
        let next = async { worker.publish("x", tensor(&worker, &[7])).unwrap() };
        let (newer, _) = futures::join!(newer, next);
        assert_eq!(newer.unwrap().values::<u32>().unwrap(), [7]);
        let missing = by_name.fetch("z").await.unwrap_err();
        assert!(
            matches!(&missing, WorkerError::Remote { status, .. } if status.code == Code::NotFound),
            "{missing}"
        );
        let key = worker.key("own", "own", "edge").unwrap();
        worker.shared_step(1).send(&key, tensor(&worker, &[8])).unwrap();
        assert_eq!(worker.shared_step(1).recv(&key).await.unwrap().values::<u32>().unwrap(), [8]);
        assert!(worker.peers().is_empty(), "{:?}", worker.peers());
        worker.shutdown().await;
    });
}

#[test]
fn e_a_lost_peer_is_named_with_its_address() {
    bounded(LIMIT, async {
        for kind in [FabricKind::TCP, FabricKind::SHM] {
            let server = Worker::builder("other").fabrics([kind]).start().await.unwrap();
            let client = Worker::client().require(kind).start().await.unwrap();
            let peer = client.peer_at(server.address()).await.unwrap();
            let _handling = server.handle("never", |_| pending::<Result<(), WorkerError>>()).unwrap();
            let never = peer.call("never", ()).into_future();
            let leave = async {
                while server.peers().first().is_none_or(|peer| peer.counters.received.tensor_request == 0) {
                    tokio::task::yield_now().await;
                }
                server.shutdown().await;
            };
            let lost = futures::join!(never, leave).0.unwrap_err();
            assert!(matches!(lost, WorkerError::PeerLost { .. }), "{lost}");
            assert_names_all(
                &lost.to_string(),
                &[server.name(), &format!("the peer at {}", server.address())],
            );
            client.shutdown().await;
        }
    });
}

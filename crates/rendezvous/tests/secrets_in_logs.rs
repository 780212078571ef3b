//! Nothing secret is ever shown: not in the log, at any level, of any crate; not by `Debug`; not in errors, and not in
//! metrics. Two workers' whole life is watched, and their control sessions are tapped, so that every secret that there is is
//! known to the search.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{io::Write as _, net::TcpStream, sync::Arc, time::Duration};

use crate::bounded::bounded;
use crate::shown::{assert_not_shown, assert_shown, log_everything, show};
use crate::tap::Tap;
use metrics_util::debugging::DebuggingRecorder;
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime, timeout};
use tensorwire_protocol::{DataType, limits::WIRE_VERSION, wire::control::ControlFrame};
use tensorwire_rendezvous::{
    Peer, Sharing, Tensor, Trust, Worker, WorkerBuilder, WorkerError,
    control::{ControlPlane, GrpcConfig, GrpcPlane, Secret, handshake},
};

const SERVER: &str = "/job:server/replica:0/task:0";
const CLIENT: &str = "/job:client/replica:0/task:0";
const SERVER_CPU: &str = "/job:server/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:client/replica:0/task:0/device:CPU:0";
const SECRET: &str = "Xw7-planted-in-the-workers-Qb2";
const WRONG: &str = "Rt4-planted-as-a-wrong-one-Hn8";
const LIMIT: Duration = Duration::from_secs(20);

/// A worker whose control sessions are tapped.
async fn worker(tap: &Tap, name: &str, secret: &str, kind: FabricKind, trust: Trust) -> Worker {
    let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0").secret(Secret::new(secret))).unwrap();
    let builder: WorkerBuilder = Worker::builder(name)
        .secret(Secret::new(secret).unwrap())
        .dangerous_control_plane(Arc::new(tap.on(plane)))
        .require(kind)
        .trust(trust)
        .timeout(LIMIT);
    show(&builder);
    let worker = builder.start().await.unwrap();
    show(&worker);
    worker
}

fn filled(worker: &Worker, bytes: usize) -> Tensor {
    let mut buffer = worker.pool().try_alloc(bytes).unwrap();
    buffer.fill(7);
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

fn shown_error<T: std::fmt::Debug>(result: Result<T, WorkerError>) {
    let error = result.unwrap_err();
    show(&error);
    show(&error.to_string());
}

/// Everything that two workers do with each other.
async fn transfers(server: &Worker, client: &Worker, step: i64) -> Peer {
    let peer = client.peer_at(server.address()).await.unwrap();
    for (name, bytes) in [("small", 100), ("large", 300 << 10)] {
        server.publish(name, filled(server, bytes)).unwrap();
        for sharing in [Sharing::Copy, Sharing::View, Sharing::Copy] {
            let fetching = peer.fetch(name).sharing(sharing);
            show(&fetching);
            assert_eq!(fetching.await.unwrap().bytes().len(), bytes);
        }
    }
    show(&peer.list().with_checksums().await.unwrap());
    let key = |worker: &Worker| worker.key(SERVER_CPU, CLIENT_CPU, "edge").unwrap();
    let (sending, receiving) = (server.shared_step(step), client.shared_step(step));
    sending.send(&key(server), filled(server, 100 << 10)).unwrap();
    show(&receiving.recv(&key(client)).await.unwrap());
    // One that is given up, and one that nobody sends.
    drop(receiving.recv(&key(client)));
    shown_error(receiving.recv(&key(client)).timeout(Duration::from_millis(30)).await);
    shown_error(peer.fetch("nothing").await);
    show(&(&sending, &receiving, &peer, client.peers(), server.peers()));
    peer
}

/// A life over `kind`: transfers, the server's death, its next life, and misbehaviour.
async fn life(tap: &Tap, kind: FabricKind, trust: Trust) {
    let client = worker(tap, CLIENT, SECRET, kind, trust).await;
    let server = worker(tap, SERVER, SECRET, kind, trust).await;
    let peer = transfers(&server, &client, 1).await;
    server.shutdown().await;
    shown_error(peer.fetch("small").timeout(Duration::from_millis(300)).await);
    let server = worker(tap, SERVER, SECRET, kind, trust).await;
    transfers(&server, &client, 2).await;
    misbehave(tap, &server).await;
    let stranger = worker(tap, "/job:stranger/replica:0/task:0", WRONG, kind, trust).await;
    shown_error(stranger.peer_at(server.address()).await);
    for worker in [&server, &client, &stranger] {
        worker.record_metrics();
        worker.shutdown().await;
    }
}

/// Garbage of a stranger, and of a member a frame that is illegal and a connection that cannot be.
async fn misbehave(tap: &Tap, server: &Worker) {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let _may_be_cut = stream.write_all(&[0xAB; 1000]);
    let frames = tap.connects().into_iter().take(1).map(|offer| {
        let data = offer.data.iter().rev().copied().collect();
        ControlFrame::Connect(tensorwire_protocol::wire::control::Connect {
            connection: crate::tap::MADE_UP,
            data,
            ..offer
        })
    });
    let (worker, listen_address) = ("/job:rogue/replica:0/task:0".to_owned(), None);
    let hello = ControlFrame::Hello {
        wire_version: WIRE_VERSION,
        worker: worker.clone(),
        incarnation: 1,
        listen_address,
        nonce: [0x5C; 32],
    };
    let runtime = TokioRuntime::current().unwrap();
    for frame in frames.chain([hello, ControlFrame::Proof { proof: [0xA7; 32] }]).collect::<Vec<_>>() {
        // Not tapped: what it makes up is no secret.
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0").secret(Secret::new(SECRET))).unwrap();
        let mut session = plane.dial(server.address()).await.unwrap();
        let me = handshake::Introduction {
            worker: worker.clone(),
            incarnation: 1,
            listen_address: None,
            fabrics: Vec::new(),
        };
        let secret = Secret::new(SECRET);
        let them = handshake::dial(&mut session, &me, secret.as_ref(), &runtime, LIMIT, server.address())
            .await
            .unwrap();
        show(&(&session, &them, &frame, &secret));
        session.sender.send(frame.encode()).await.unwrap();
        // Until the worker has ended the session, or has had its time with a connection that cannot be.
        let heard = async { while let Ok(Some(_)) = session.receiver.recv().await {} };
        let _kept = timeout(&runtime, Duration::from_millis(300), heard).await;
    }
}

/// Two workers without a secret of their user's: it is handed over.
async fn handed_over() -> Vec<u8> {
    let start = |name: &str| Worker::builder(name).timeout(LIMIT).start();
    let (server, client) = (start(SERVER).await.unwrap(), start(CLIENT).await.unwrap());
    transfers(&server, &client, 3).await;
    let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
    let secret = plane.ambient_secret(server.address()).await.unwrap().unwrap();
    show(&(&plane, &secret));
    server.shutdown().await;
    client.shutdown().await;
    secret.expose().to_vec()
}

#[test]
fn e_no_secret_token_key_proof_or_nonce_is_ever_shown() {
    let _turn = crate::turn();
    log_everything();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().unwrap();
    bounded(Duration::from_secs(100), async {
        let tap = Tap::default();
        let runtime = TokioRuntime::current().unwrap();
        for (kind, trust) in [
            (FabricKind::TCP, Trust::Cluster),
            (FabricKind::TCP, Trust::Hostile),
            (FabricKind::SHM, Trust::Cluster),
        ] {
            let began = runtime.now();
            life(&tap, kind, trust).await;
            println!("a life over {kind}: {:?}", runtime.now() - began);
        }
        let handed_over = handed_over().await;
        for (key, _, _, value) in snapshotter.snapshot().into_vec() {
            show(&(key, value));
        }
        tap.frames().iter().for_each(show);
        // The search finds what is there, in whatever form.
        let planted: Vec<u8> = (0..4).flat_map(|_| runtime.random().to_le_bytes()).collect();
        assert_shown(&planted);
        let found = tap.secrets();
        assert!(found.nonces >= 20 && found.proofs >= 20 && found.tokens >= 16, "{found:?}");
        assert!(found.keys.len() >= 8, "{found:?}");
        let mut secrets = found.values;
        secrets.push(("the secret", SECRET.as_bytes().to_vec()));
        secrets.push(("a wrong secret", WRONG.as_bytes().to_vec()));
        secrets.push(("a secret that was handed over", handed_over));
        assert_not_shown(&secrets, &found.keys);
    });
}

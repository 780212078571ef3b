//! Reports of workers: their figures, what each reader may see, and peers that break the rules.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use futures::future::join;
use tensorwire_fabric::{FabricKind, TokioRuntime};
use tensorwire_protocol::{
    Code,
    limits::{REPORT_PEERS_MAX, REPORT_SETS_MAX},
    wire::control::ControlFrame,
};
use tensorwire_rendezvous::{
    Tensor, Trust, Worker, WorkerBuilder, WorkerError,
    control::{ControlPlane, ControlSession, GrpcConfig, GrpcPlane, handshake},
    report::{PeerReport, Waiting, WorkerReport},
};

use crate::{bounded::bounded, two::Two};

const LIMIT: Duration = Duration::from_secs(60);
const SERVER: &str = "/job:server/replica:0/task:0";
const CLIENT: &str = "/job:client/replica:0/task:0";

fn over_tcp(name: &str) -> WorkerBuilder {
    Worker::builder(name).require(FabricKind::TCP).timeout(Duration::from_secs(20))
}

fn bytes(worker: &Worker, length: usize) -> Tensor {
    Tensor::from_values(worker.pool(), &[length as u64], &vec![7_u8; length]).unwrap()
}

fn of_peer<'a>(report: &'a WorkerReport, name: &str) -> &'a PeerReport {
    report.peers.iter().find(|peer| peer.name == name).unwrap_or_else(|| panic!("no {name} in {report:?}"))
}

#[test]
fn a_report_has_every_value_and_byte_that_was_moved() {
    bounded(LIMIT, async {
        let two = Two::of(over_tcp).await;
        two.server.publish("short", bytes(&two.server, 4096)).unwrap();
        two.server.publish("long", bytes(&two.server, 100_000)).unwrap();
        for _ in 0..37 {
            two.peer.fetch("short").await.unwrap();
        }
        for _ in 0..5 {
            two.peer.fetch("long").await.unwrap();
        }
        assert!(two.peer.fetch("nothing").await.is_err());
        let asked = two.peer.report().await.unwrap();
        let sent = of_peer(&asked, CLIENT);
        assert_eq!((sent.traffic.values_sent, sent.traffic.bytes_sent), (42, 37 * 4096 + 500_000));
        assert_eq!((sent.traffic.values_received, sent.traffic.errors), (0, 0));
        assert_eq!((sent.traffic.connects, sent.traffic.reconnects, sent.traffic.losses), (1, 0, 0));
        assert_eq!(sent.transport.as_deref(), Some("tcp"));
        assert_eq!((sent.waiting_at_peer, sent.waiting_here), (Waiting::default(), Waiting::default()));
        assert_eq!((asked.total, asked.sessions), (Some(sent.traffic), Some(1)));
        assert_eq!((asked.peers.len(), asked.peers_left_out, asked.sets_left_out), (1, 0, 0));
        // Asking changes none of the numbers, and both ways lead to one report but for the time.
        let mut own = two.server.report();
        assert!(own.clock >= asked.clock);
        own.clock = asked.clock;
        // Messages take memory for a moment.
        own.pools[2..].clone_from_slice(&asked.pools[2..]);
        assert_eq!(own, asked);
        assert_eq!((own.name.as_str(), own.address.as_str()), (SERVER, two.server.address()));
        assert_eq!(
            (own.incarnation, own.version.as_str()),
            (two.server.incarnation(), env!("CARGO_PKG_VERSION"))
        );
        let source = &own.pools[0];
        assert_eq!((source.name.as_str(), source.used_bytes >= 104_096), ("source", true), "{source:?}");
        // The other side of the same transfers.
        let received = of_peer(&two.client.report(), SERVER).traffic;
        assert_eq!((received.values_received, received.bytes_received), (42, 37 * 4096 + 500_000));
        assert_eq!((received.values_sent, received.errors), (0, 1));
        // A worker is a peer of itself.
        let own_peer = two.client.peer(CLIENT).unwrap();
        assert_eq!(own_peer.report().await.unwrap().name, CLIENT);
        two.end().await;
    });
}

#[test]
fn a_request_that_waits_keeps_its_number_until_it_is_answered() {
    bounded(LIMIT, async {
        let two = Two::of(over_tcp).await;
        two.peer.connect().await.unwrap();
        let waiting = async {
            let fetched = two.peer.fetch("later").wait().await.unwrap();
            assert_eq!(fetched.bytes().len(), 10);
        };
        let watching = async {
            let here = async || of_peer(&two.peer.report().await.unwrap(), CLIENT).waiting_here;
            let first = loop {
                let found = here().await;
                if found.requests > 0 {
                    break found;
                }
            };
            assert_eq!((first.requests, here().await), (1, first));
            let at_peer = of_peer(&two.client.report(), SERVER).waiting_at_peer;
            assert_eq!((at_peer.requests, at_peer.oldest.is_some()), (1, true));
            two.server.publish("later", bytes(&two.server, 10)).unwrap();
        };
        join(waiting, watching).await;
        assert_eq!(of_peer(&two.client.report(), SERVER).waiting_at_peer, Waiting::default());
        two.end().await;
    });
}

#[test]
fn sets_are_in_a_report_with_their_newest_versions() {
    bounded(LIMIT, async {
        let two = Two::of(over_tcp).await;
        for version in [3, 8] {
            let tensors = [("w", bytes(&two.server, 64)), ("b", bytes(&two.server, 8))];
            two.server.set("policy").commit(version, tensors).await.unwrap();
        }
        let report = two.peer.report().await.unwrap();
        let set = &report.sets[0];
        assert_eq!((set.name.as_str(), set.version, set.tensors, set.bytes), ("policy", 8, 2, 72));
        two.end().await;
    });
}

#[test]
fn s4_a_report_of_thousands_of_peers_and_sets_is_bounded_and_says_how_many_are_left_out() {
    bounded(LIMIT, async {
        let two = Two::of(over_tcp).await;
        two.peer.connect().await.unwrap();
        for task in 0..REPORT_PEERS_MAX + 9 {
            two.server.set_address(&format!("/job:a/replica:0/task:{task}"), "h:1").unwrap();
        }
        for set in 0..REPORT_SETS_MAX + 5 {
            let tensor = [("w", bytes(&two.server, 1))];
            two.server.set(&format!("set {set:04}")).commit(1, tensor).await.unwrap();
        }
        let report = two.peer.report().await.unwrap();
        // One of the peers is the client, which is connected and comes first.
        assert_eq!((report.peers.len(), report.peers_left_out), (REPORT_PEERS_MAX, 10));
        assert_eq!(report.peers[0].name, CLIENT);
        assert!(report.peers[1..].is_sorted_by(|one, other| one.name < other.name));
        assert_eq!((report.sets.len(), report.sets_left_out), (REPORT_SETS_MAX, 5));
        two.end().await;
    });
}

#[test]
fn e_a_worker_that_does_not_trust_its_peers_names_no_other_one_to_them() {
    bounded(LIMIT, async {
        let server = over_tcp(SERVER).trust(Trust::Hostile).start().await.unwrap();
        server.publish("x", bytes(&server, 5000)).unwrap();
        let mut clients = Vec::new();
        for name in [CLIENT, "/job:other/replica:0/task:0"] {
            let client = over_tcp(name).start().await.unwrap();
            client.peer_at(server.address()).await.unwrap().fetch("x").await.unwrap();
            clients.push(client);
        }
        let report = clients[0].peer_at(server.address()).await.unwrap().report().await.unwrap();
        assert_eq!((report.peers.len(), report.peers_left_out), (1, 1));
        assert_eq!((report.peers[0].name.as_str(), report.peers[0].traffic.bytes_sent), (CLIENT, 5000));
        assert_eq!((report.total, report.sessions, report.pools.len()), (None, None, 0));
        // Its own program learns of all.
        let own = server.report();
        assert_eq!((own.peers.len(), own.total.unwrap().bytes_sent, own.pools.len()), (2, 10_000, 4));
        for worker in clients.into_iter().chain([server]) {
            worker.shutdown().await;
        }
    });
}

/// Accepts one session, and answers each request for a report as `answer` does.
async fn rogue(plane: GrpcPlane, answer: impl Fn(u32) -> Vec<u8>) {
    let runtime = TokioRuntime::current().unwrap();
    let mut session = plane.accept().await.unwrap();
    let (worker, listen_address) = (SERVER.to_owned(), None);
    let me = handshake::Introduction { worker, incarnation: 7, listen_address, fabrics: Vec::new() };
    handshake::accept(&mut session, &me, plane.secret(), &runtime, LIMIT).await.unwrap();
    let ControlSession { sender, mut receiver, .. } = session;
    while let Ok(Some(frame)) = receiver.recv().await {
        let answer = match ControlFrame::decode(&frame) {
            Ok(ControlFrame::ReportRequest { request }) => answer(request),
            Ok(ControlFrame::Ping { nonce }) => ControlFrame::Pong { nonce }.encode(),
            _ => continue,
        };
        // The client may be gone.
        let _ = sender.send(answer).await;
    }
    plane.close().await;
}

/// What the client of a rogue gets.
async fn asked_of_rogue(answer: impl Fn(u32) -> Vec<u8>) -> Result<WorkerReport, WorkerError> {
    let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
    let address = plane.local_address();
    let asking = async {
        let client = over_tcp(CLIENT).timeout(Duration::from_secs(2)).start().await.unwrap();
        let report = client.peer_at(&address).await.unwrap().report().await;
        client.shutdown().await;
        report
    };
    join(asking, rogue(plane, answer)).await.0
}

#[test]
fn s4_a_bad_report_is_an_error_and_ends_that_session_alone() {
    bounded(LIMIT, async {
        let answer = |request| ControlFrame::ReportResponse { request, report: Box::default() };
        // An empty report is a legal one: a peer may claim anything of itself.
        assert_eq!(
            asked_of_rogue(|request| answer(request).encode()).await.unwrap(),
            WorkerReport::default()
        );
        let cut = asked_of_rogue(|request| {
            let mut frame = answer(request).encode();
            frame.truncate(frame.len() - 1);
            let length = frame.len() as u32;
            frame[..4].copy_from_slice(&length.to_le_bytes());
            frame
        });
        let error = cut.await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert!(error.to_string().contains("broke the control protocol"), "{error}");
        // An answer to another request is none.
        let other = asked_of_rogue(|request| answer(request + 1).encode()).await.unwrap_err();
        assert!(matches!(other, WorkerError::DeadlineExceeded { .. }), "{other}");
    });
}

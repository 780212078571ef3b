//! What may be set, what peers may have at once, and what becomes of more.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use tensorwire_fabric::{FabricKind, TokioRuntime};
use tensorwire_memory::{HugePages, MemoryError};
use tensorwire_protocol::{
    Code, DataType, Destination, Parameters, Sharing, Status,
    limits::{REGIONS_MAX, SLOT_BYTES},
    wire::control::{Connect, ControlFrame, RegionRecord, RingOffer},
};
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerBuilder, WorkerError,
    control::{ControlPlane, ControlSession, GrpcConfig, GrpcPlane, handshake},
};

use crate::bounded::bounded;

const SERVER: &str = "/job:ps/replica:0/task:0";
const LIMIT: Duration = Duration::from_secs(30);

async fn server(sessions_max: usize) -> Worker {
    let builder =
        Worker::builder(SERVER).require(FabricKind::TCP).limits(|limits| limits.sessions_max = sessions_max);
    let server = builder.start().await.unwrap();
    server.publish("x", Tensor::from_values(server.pool(), &[1], &[5u32]).unwrap()).unwrap();
    server
}

async fn fetch(client: &Worker, address: &str) -> Result<(), String> {
    let peer = client.peer_at(address).await.map_err(|error| error.to_string())?;
    let fetched = peer.fetch("x").await.map_err(|error| error.to_string())?;
    assert_eq!(fetched.values::<u32>().unwrap(), [5]);
    Ok(())
}

#[test]
fn e_sessions_beyond_the_cap_are_refused_by_name_until_there_is_room() {
    bounded(LIMIT, async {
        let server = server(2).await;
        let mut clients = Vec::new();
        for task in 0..3 {
            let name = format!("/job:client/replica:0/task:{task}");
            clients.push(Worker::builder(&name).require(FabricKind::TCP).start().await.unwrap());
        }
        fetch(&clients[0], server.address()).await.unwrap();
        fetch(&clients[1], server.address()).await.unwrap();
        let refused = fetch(&clients[2], server.address()).await.unwrap_err();
        for word in ["ResourceExhausted", SERVER, "2 sessions are open", "sessions_max"] {
            assert!(refused.contains(word), "no `{word}`: {refused}");
        }
        // The others are not concerned, and one that leaves makes room.
        fetch(&clients[1], server.address()).await.unwrap();
        clients[0].shutdown().await;
        while fetch(&clients[2], server.address()).await.is_err() {
            tokio::task::yield_now().await;
        }
        clients[2].shutdown().await;
        clients[1].shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn settings_that_cannot_be_used_are_named_with_value_and_remedy() {
    bounded(LIMIT, async {
        let zero = Duration::ZERO;
        type Setting = fn(WorkerBuilder, Duration) -> WorkerBuilder;
        let refused: [(&str, &str, Setting); 12] = [
            ("liveness", "0ns", |builder, zero| builder.liveness(zero)),
            ("timeout", "0", |builder, zero| builder.timeout(zero)),
            ("sessions_max", "0", |builder, _| builder.limits(|limits| limits.sessions_max = 0)),
            ("sessions_per_peer_max", "0", |builder, _| {
                builder.limits(|limits| limits.sessions_per_peer_max = 0)
            }),
            ("connections_per_peer_max", "0", |builder, _| {
                builder.limits(|limits| limits.connections_per_peer_max = 0)
            }),
            ("values_max", "0", |builder, _| builder.limits(|limits| limits.values_max = 0)),
            ("block_bytes", "0", |builder, _| builder.memory(|memory| memory.block_bytes = 0)),
            ("source_bytes", "0", |builder, _| builder.memory(|memory| memory.source_bytes = 0)),
            ("receive_bytes", "0", |builder, _| builder.memory(|memory| memory.receive_bytes = 0)),
            ("requests_max", "0", |builder, _| builder.flow(|flow| flow.requests_max = 0)),
            ("ring_bytes", "1", |builder, _| builder.flow(|flow| flow.ring_bytes = 1)),
            ("fabrics", "none", |builder, _| builder.fabrics([])),
        ];
        for (name, wrong, set) in refused {
            let error = set(Worker::builder(SERVER), zero).start().await.map(drop).unwrap_err();
            let named = matches!(&error, WorkerError::Config { field, value, .. } if *field == name && value == wrong);
            assert!(named, "{name}: {error}");
        }
    });
}

/// A session of a worker of this name, authenticated, and nothing more.
pub(crate) async fn session(
    plane: &GrpcPlane,
    name: &str,
    incarnation: u64,
    address: &str,
) -> ControlSession {
    let mut session = plane.dial(address).await.unwrap();
    let secret = plane.ambient_secret(address).await.unwrap();
    let (worker, listen_address) = (name.to_owned(), None);
    let me = handshake::Introduction { worker, incarnation, listen_address, fabrics: Vec::new() };
    let runtime = TokioRuntime::current().unwrap();
    handshake::dial(&mut session, &me, secret.as_ref(), &runtime, LIMIT, address).await.unwrap();
    session
}

/// Why the peer refuses this session; `None` if it answers a ping on it.
pub(crate) async fn refusal(session: &mut ControlSession) -> Option<Status> {
    // It may be refused already.
    let _ = session.sender.send(ControlFrame::Ping { nonce: 7 }.encode()).await;
    loop {
        match ControlFrame::decode(&session.receiver.recv().await.unwrap().unwrap()).unwrap() {
            ControlFrame::Goodbye { status } => return Some(status),
            ControlFrame::Pong { nonce: 7 } => return None,
            _ => {}
        }
    }
}

#[test]
fn e_sessions_of_one_peer_beyond_its_cap_are_refused_by_name_until_there_is_room() {
    const GREEDY: &str = "/job:greedy/replica:0/task:0";
    bounded(LIMIT, async {
        let builder = Worker::builder(SERVER)
            .require(FabricKind::TCP)
            .limits(|limits| limits.sessions_per_peer_max = 3);
        let server = builder.start().await.unwrap();
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let mut held = Vec::new();
        for _ in 0..3 {
            let mut one = session(&plane, GREEDY, 1, server.address()).await;
            assert_eq!(refusal(&mut one).await, None);
            held.push(one);
        }
        for _ in 3..6 {
            let mut more = session(&plane, GREEDY, 1, server.address()).await;
            let status = refusal(&mut more).await.expect("a refusal");
            assert_eq!(status.code, Code::ResourceExhausted);
            for word in [SERVER, GREEDY, "3 sessions", "`sessions_per_peer_max`"] {
                assert!(status.message.contains(word), "no `{word}`: {status}");
            }
        }
        // Others are let in, those that it has live on, and one that ends makes room.
        let mut other = session(&plane, "/job:other/replica:0/task:0", 1, server.address()).await;
        assert_eq!(refusal(&mut other).await, None);
        for one in &mut held {
            assert_eq!(refusal(one).await, None);
        }
        drop(held.pop());
        while refusal(&mut session(&plane, GREEDY, 1, server.address()).await).await.is_some() {
            tokio::task::yield_now().await;
        }
        drop((held, other));
        server.shutdown().await;
    });
}

/// Asks for a data connection over tcp that is then never dialled, so that the peer waits for it.
pub(crate) fn connect(connection: u32) -> ControlFrame {
    let parameters = Parameters::default();
    let capacity = parameters.first_ring_bytes().into();
    let destination = Destination { region: 0, generation: 0, offset: 0, capacity, result: None };
    let slots = Destination { capacity: (2 * SLOT_BYTES).into(), ..destination };
    let ring = RingOffer { destination, slots };
    let data = nobodys_data();
    ControlFrame::Connect(Connect { connection, kind: 3, data, parameters, ring, regions: Vec::new() })
}

/// The answer to it: why not, if it is refused.
pub(crate) async fn answer(session: &mut ControlSession, connection: u32) -> Result<(), Status> {
    session.sender.send(connect(connection).encode()).await.unwrap();
    loop {
        match ControlFrame::decode(&session.receiver.recv().await.unwrap().unwrap()).unwrap() {
            ControlFrame::Connected(answer) if answer.connection == connection => return Ok(()),
            ControlFrame::Refused { connection: refused, status } if refused == connection => {
                return Err(status);
            }
            _ => {}
        }
    }
}

#[test]
fn e_data_connections_of_one_peer_are_counted_over_its_sessions() {
    const GREEDY: &str = "/job:greedy/replica:0/task:0";
    bounded(LIMIT, async {
        let builder = Worker::builder(SERVER)
            .require(FabricKind::TCP)
            .limits(|limits| limits.connections_per_peer_max = 3);
        let server = builder.start().await.unwrap();
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let mut one = session(&plane, GREEDY, 1, server.address()).await;
        let mut other = session(&plane, GREEDY, 1, server.address()).await;
        let mut neighbour = session(&plane, "/job:other/replica:0/task:0", 1, server.address()).await;
        answer(&mut one, 1).await.unwrap();
        answer(&mut one, 2).await.unwrap();
        answer(&mut other, 1).await.unwrap();
        for (session, number) in [(&mut one, 3), (&mut other, 2)] {
            let refused = answer(session, number).await.unwrap_err();
            assert_eq!(refused.code, Code::ResourceExhausted);
            for word in ["3 data connections", GREEDY, "`connections_per_peer_max`"] {
                assert!(refused.message.contains(word), "no `{word}`: {refused}");
            }
        }
        answer(&mut neighbour, 1).await.unwrap();
        // A session that ends makes room.
        drop(one);
        while answer(&mut other, 3).await.is_err() {
            tokio::task::yield_now().await;
        }
        server.shutdown().await;
    });
}

/// Sends `frames` until the peer ends the session, and returns its reason.
pub(crate) async fn outlasted(
    mut session: ControlSession,
    frames: impl Iterator<Item = ControlFrame>,
) -> Status {
    let sending = async {
        for frame in frames {
            if session.sender.send(frame.encode()).await.is_err() {
                break;
            }
        }
    };
    let refusing = async {
        loop {
            let received = session.receiver.recv().await;
            let Ok(Some(bytes)) = received else { panic!("the session ends without a word: {received:?}") };
            if let ControlFrame::Goodbye { status } = ControlFrame::decode(&bytes).unwrap() {
                return status;
            }
        }
    };
    futures::join!(sending, refusing).1
}

#[test]
fn e_a_peer_that_announces_regions_without_end_loses_its_session() {
    const ROGUE: &str = "/job:rogue/replica:0/task:0";
    bounded(LIMIT, async {
        let server = Worker::builder(SERVER).require(FabricKind::TCP).start().await.unwrap();
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let session = session(&plane, ROGUE, 1, server.address()).await;
        // A connection that the peer does not set up counts as being set up for a while.
        let region = |region| RegionRecord { region, generation: 0, base: 0, length: 1, key: 0 };
        let add = |number| ControlFrame::RegionAdd { connection: 1, region: region(number) };
        let frames = std::iter::once(connect(1)).chain((0..=REGIONS_MAX as u32).map(add));
        let status = outlasted(session, frames).await;
        assert!(status.message.contains("more than 65536 regions for connection 1"), "{status}");
        server.shutdown().await;
    });
}

/// Connection data of a TCP end that nobody is at.
fn nobodys_data() -> Vec<u8> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_le_bytes();
    let address = [127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // Version 1, address family, address, port, ticket and token.
    [&1_u16.to_le_bytes()[..], &[4], &address, &port, &[0; 8], &[9; 16]].concat()
}

#[test]
fn e_a_peer_that_asks_for_lists_without_end_loses_its_session() {
    bounded(LIMIT, async {
        let server = server(8).await;
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let mut session = session(&plane, "/job:rogue/replica:0/task:0", 1, server.address()).await;
        // It reads nothing meanwhile: what fits buffers and sockets is answered, no more.
        let ask = |request| ControlFrame::ListRequest { request, after: None, with_checksums: true };
        let entries: Vec<_> = (0..256).map(|number| format!("{number:03}{}", "x".repeat(1000))).collect();
        for name in &entries {
            server.publish(name, Tensor::from_values(server.pool(), &[1], &[5u32]).unwrap()).unwrap();
        }
        for request in 0..200 {
            session.sender.send(ask(request).encode()).await.unwrap();
        }
        let (mut pages, mut told) = (0, None);
        while let Ok(Some(bytes)) = session.receiver.recv().await {
            match ControlFrame::decode(&bytes).unwrap() {
                ControlFrame::ListResponse { entries, .. } => pages += entries.len() / 256,
                ControlFrame::Goodbye { status } => told = Some(status),
                _ => {}
            }
        }
        let told = told.expect("a word why").to_string();
        assert!(told.contains("more than 64 list requests") && pages < 150, "{pages}, {told}");
        server.shutdown().await;
    });
}

#[test]
fn e_a_peer_that_asks_for_reports_without_end_loses_its_session() {
    bounded(LIMIT, async {
        let server = server(8).await;
        for task in 0..1000 {
            server.set_address(&format!("/job:{}/replica:0/task:{task}", "x".repeat(100)), "h:1").unwrap();
        }
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        let mut session = session(&plane, "/job:rogue/replica:0/task:0", 1, server.address()).await;
        for request in 0..200 {
            session.sender.send(ControlFrame::ReportRequest { request }.encode()).await.unwrap();
        }
        let (mut reports, mut told) = (0, None);
        while let Ok(Some(bytes)) = session.receiver.recv().await {
            match ControlFrame::decode(&bytes).unwrap() {
                ControlFrame::ReportResponse { .. } => reports += 1,
                ControlFrame::Goodbye { status } => told = Some(status),
                _ => {}
            }
        }
        let told = told.expect("a word why").to_string();
        assert!(told.contains("requests for reports unanswered") && reports < 150, "{reports}, {told}");
        server.shutdown().await;
    });
}

/// Values in huge pages, as far as the system has any, arrive as they are: copied, as a view, and after they were published
/// again.
#[cfg(feature = "shm")]
#[test]
fn values_in_huge_pages_are_copied_and_viewed_by_a_neighbour() {
    bounded(LIMIT, async {
        let start = |name: &str| {
            let builder = Worker::builder(name).require(FabricKind::SHM);
            builder.memory(|memory| memory.huge_pages = HugePages::Try).start()
        };
        let (server, client) = (start("server").await.unwrap(), start("client").await.unwrap());
        let peer = client.peer_at(server.address()).await.unwrap();
        for (seed, sharing) in [(1, Sharing::Copy), (2, Sharing::View), (3, Sharing::Copy)] {
            let mut buffer = server.pool().try_alloc(5 << 20).unwrap();
            buffer.fill(seed);
            server.publish("w", Tensor::new(buffer, DataType::U8, &[5 << 20]).unwrap()).unwrap();
            let fetched = peer.fetch("w").sharing(sharing).await.unwrap();
            assert!(fetched.bytes().iter().all(|byte| *byte == seed) && fetched.bytes().len() == 5 << 20);
        }
        let stats = server.pool().stats();
        assert!(stats.huge_bytes <= stats.block_bytes, "{stats:?}");
        client.shutdown().await;
        server.shutdown().await;
    });
}

/// Either all memory for values is in huge pages, or the error says how to get some.
#[test]
fn huge_pages_that_are_required_and_not_there_are_an_error_with_the_remedy() {
    bounded(LIMIT, async {
        let builder = Worker::builder("server").memory(|memory| memory.huge_pages = HugePages::Require);
        let server = builder.start().await.unwrap();
        match server.pool().try_alloc(1 << 20) {
            Ok(_) => {
                let stats = server.pool().stats();
                assert_eq!(stats.huge_bytes, stats.block_bytes);
            }
            Err(error @ MemoryError::HugePages { .. }) => {
                assert!(error.to_string().contains("vm.nr_hugepages"), "{error}");
            }
            Err(error) => panic!("{error}"),
        }
        server.shutdown().await;
    });
}

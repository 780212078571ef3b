//! Every length that a peer sends, at its limit and above, through the real port.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    thread,
    time::Duration,
};

use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_protocol::{
    Code, DataType, Destination, Metadata, Parameters, Shape, Status,
    limits::{
        CONNECTION_DATA_BYTES_MAX, CONTROL_FRAME_BYTES_MAX, LIST_ENTRIES_MAX, NAME_BYTES_MAX, REGIONS_MAX,
        REPORT_PEERS_MAX, SLOT_BYTES,
    },
    report::{PeerReport, WorkerReport},
    wire::control::{Connect, ControlFrame, ListEntry, RegionRecord, RingOffer},
};
use tensorwire_rendezvous::control::{ControlPlane, GrpcConfig, GrpcPlane, Secret, handshake};

use crate::{
    attacker::opening,
    dials::impatient,
    harness::{bounded, step},
    stage::{HONEST, SECRET, SERVER, builder, fetch, held, publish, until},
};

const LIMIT: Duration = Duration::from_secs(60);

/// How much the worker's process may grow over all of them.
const GROWTH_MAX: u64 = 32 << 20;

/// A length field of a frame: what it is called, the frame, where it is in it, its width, and its limit.
struct Field {
    name: &'static str,
    frame: Vec<u8>,
    at: usize,
    width: usize,
    most: u64,
}

/// Lengths that nothing else in the frames looks like.
const LONG: usize = 0x0171;

fn frame_with(name: &'static str, frame: &ControlFrame, width: usize, most: usize) -> Field {
    let frame = frame.encode();
    let wanted = &LONG.to_le_bytes()[..width];
    let places: Vec<_> = frame.windows(width).enumerate().filter(|(_, bytes)| *bytes == wanted).collect();
    assert_eq!(places.len(), 1, "{name}");
    Field { name, at: places[0].0, width, most: most as u64, frame: frame.clone() }
}

fn connect(data: usize, regions: usize) -> ControlFrame {
    let destination = Destination { region: 0, generation: 0, offset: 0, capacity: 16 << 10, result: None };
    let slots = Destination { capacity: u64::from(2 * SLOT_BYTES), ..destination };
    let record = RegionRecord { region: 0, generation: 0, base: 0, length: 1, key: 0 };
    ControlFrame::Connect(Connect {
        connection: 1,
        kind: 3,
        data: vec![0xAA; data],
        parameters: Parameters::default(),
        ring: RingOffer { destination, slots },
        regions: vec![record; regions],
    })
}

/// A report with so many peers.
fn report(peers: usize) -> ControlFrame {
    let mut report = Box::<WorkerReport>::default();
    report.peers = vec![PeerReport::default(); peers];
    ControlFrame::ReportResponse { request: 7, report }
}

fn fields() -> Vec<Field> {
    let long = || "n".repeat(LONG);
    let entry = |name: String, rank: usize| {
        let metadata = Metadata::new(DataType::U8, Shape::new(vec![1; rank]).unwrap()).unwrap();
        ListEntry { name, metadata, version: 3, checksum: None }
    };
    let list = |entries| ControlFrame::ListResponse { request: 7, entries, more: false };
    let goodbye = |status| ControlFrame::Disconnected { connection: 9, status };
    let mut fields = vec![
        frame_with("connection data", &connect(LONG, 0), 2, CONNECTION_DATA_BYTES_MAX),
        frame_with("regions", &connect(0, LONG), 4, REGIONS_MAX),
        frame_with(
            "after",
            &ControlFrame::ListRequest { request: 7, after: Some(long()), with_checksums: false },
            2,
            NAME_BYTES_MAX,
        ),
        frame_with("name", &list(vec![entry(long(), 1)]), 2, NAME_BYTES_MAX),
        frame_with("entries", &list(vec![entry("n".into(), 1); LONG]), 4, LIST_ENTRIES_MAX),
        frame_with("peers", &report(LONG), 4, REPORT_PEERS_MAX),
        frame_with("message", &goodbye(Status::new(Code::Internal, long())), 2, 2048),
    ];
    for field in &fields.iter().map(|field| field.frame.clone()).collect::<Vec<_>>() {
        fields.push(Field {
            name: "frame",
            frame: field.clone(),
            at: 0,
            width: 4,
            most: CONTROL_FRAME_BYTES_MAX as u64,
        });
    }
    fields
}

/// The frame with the field at 0, at its limit, above, and at its type's maximum.
fn falsified(field: &Field) -> Vec<Vec<u8>> {
    let values = [0, field.most, field.most + 1, u64::MAX];
    let with = |value: u64| {
        let mut frame = field.frame.clone();
        frame[field.at..field.at + field.width].copy_from_slice(&value.to_le_bytes()[..field.width]);
        frame
    };
    values.map(with).into()
}

/// Sends one frame as an authenticated peer: why the worker ends the session.
async fn refusal(plane: &GrpcPlane, address: &str, frame: Vec<u8>, runtime: &dyn Runtime) -> String {
    let mut session = plane.dial(address).await.unwrap();
    let (worker, listen_address) = ("/job:rogue/replica:0/task:0".to_owned(), None);
    let me = handshake::Introduction { worker, incarnation: 1, listen_address, fabrics: Vec::new() };
    let secret = Secret::new(SECRET);
    handshake::dial(&mut session, &me, secret.as_ref(), runtime, LIMIT, address).await.unwrap();
    session.sender.send(frame).await.unwrap();
    while let Ok(Some(bytes)) = session.receiver.recv().await {
        if let ControlFrame::Goodbye { status } = ControlFrame::decode(&bytes).unwrap() {
            return status.to_string();
        }
    }
    "no word".to_owned()
}

#[test]
fn e_every_length_of_a_members_frame_is_refused_at_its_limit_and_above() {
    let _turn = crate::stage::alone();
    bounded(LIMIT, |runtime: Arc<dyn Runtime>| async move {
        let server = builder(SERVER, FabricKind::TCP)
            .limits(|limits| limits.sessions_per_peer_max = 64)
            .start()
            .await
            .unwrap();
        publish(&server, 1);
        let address = server.address().to_owned();
        let honest = builder(HONEST, FabricKind::TCP).start().await.unwrap();
        step("the first fetch", fetch(&honest, &address, 1)).await.unwrap();
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0").secret(Secret::new(SECRET))).unwrap();
        let before = held();
        for field in fields() {
            for frame in falsified(&field) {
                let refused = step(field.name, refusal(&plane, &address, frame, &*runtime)).await;
                assert!(refused.contains("broke the control protocol"), "{}: {refused}", field.name);
            }
        }
        before.assert_at_most(GROWTH_MAX, 80, "after all of them");
        step("a fetch", fetch(&honest, &address, 1)).await.unwrap();
        honest.shutdown().await;
        server.shutdown().await;
    });
}

/// What a stranger sends, and the server's end of the connection is waited for.
fn is_cut(address: &str, bytes: &[u8]) -> bool {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    let _may_be_cut_already = stream.write_all(bytes);
    let ended = stream.read_to_end(&mut Vec::new());
    !matches!(ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn e_every_length_of_a_strangers_bytes_is_refused_at_its_limit_and_above() {
    let _turn = crate::stage::alone();
    bounded(LIMIT, |_| async move {
        let server = impatient(0).await;
        publish(&server, 1);
        let address = server.address().to_owned();
        let honest = builder(HONEST, FabricKind::TCP).start().await.unwrap();
        step("the first fetch", fetch(&honest, &address, 1)).await.unwrap();
        let before = held();
        // A frame of HTTP/2, its length in three bytes.
        let http = |length: u32, kind: u8| [&length.to_be_bytes()[1..], &[kind, 0, 0, 0, 0, 1]].concat();
        // A message of gRPC, its length in four, inside such a frame.
        let grpc = |length: u32, content: &[u8]| {
            [&http(5 + content.len() as u32, 0)[..], &[0], &length.to_be_bytes(), content].concat()
        };
        // A field of protobuf, its length in up to ten.
        let protobuf = |varint: &[u8]| grpc(1 + varint.len() as u32, &[&[0x0A][..], varint].concat());
        let most = CONTROL_FRAME_BYTES_MAX as u32 + 16;
        let mut lengths = vec![
            http((1 << 14) + 1, 0),
            http((1 << 24) - 1, 0),
            http((1 << 24) - 1, 1),
            http(0, 1),
            grpc(most + 1, &[0; 64]),
            grpc(u32::MAX, &[0; 64]),
            grpc(0, &[]),
            protobuf(&[0xFF; 9]),
            protobuf(&[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1]),
            protobuf(&[0xFF, 0xFF, 0xFF, 0xFF, 0x0F]),
            protobuf(&[0]),
        ];
        // Hello, with each of its lengths.
        let hello = ControlFrame::Hello {
            wire_version: tensorwire_protocol::limits::WIRE_VERSION,
            worker: "w".repeat(0x71),
            incarnation: 1,
            listen_address: Some("a".repeat(0x72)),
            nonce: [9; 32],
        };
        let hello = hello.encode();
        for (length, most) in [(0x71_u16, 256_u16), (0x72, 256)] {
            let at = hello.windows(2).position(|bytes| bytes == length.to_le_bytes()).unwrap();
            for value in [0, most, most + 1, u16::MAX] {
                let mut frame = hello.clone();
                frame[at..at + 2].copy_from_slice(&value.to_le_bytes());
                let content =
                    [&[0x0A, frame.len() as u8 | 0x80, (frame.len() >> 7) as u8][..], &frame].concat();
                lengths.push(grpc(content.len() as u32, &content));
            }
        }
        // All at once: each is waited for until its time is over at most.
        let waiting: Vec<_> = lengths
            .into_iter()
            .map(|bytes| {
                let address = address.clone();
                thread::spawn(move || is_cut(&address, &[opening(), bytes].concat()))
            })
            .collect();
        until("the last one's end", || waiting.iter().all(thread::JoinHandle::is_finished)).await;
        for (number, cut) in waiting.into_iter().enumerate() {
            assert!(cut.join().unwrap(), "number {number} is kept");
        }
        before.assert_at_most(GROWTH_MAX, 80, "after all of them");
        step("a fetch", fetch(&honest, &address, 1)).await.unwrap();
        honest.shutdown().await;
        server.shutdown().await;
    });
}

//! A peer's text may contain an escape sequence, a forged line of a log, or a mark that reverses text. Neither a server
//! nor a client writes any of these to standard error or its log.

#![allow(clippy::disallowed_methods)] // the tests drive real processes, on tokio itself

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::Stdio,
    thread,
    time::Duration,
};

use tensorwire::{Tensor, Worker, fabric::TokioRuntime};
use tensorwire_protocol::{
    Code, DataType, Metadata, Shape, Status,
    limits::WIRE_VERSION,
    report::{PeerReport, SetReport, WorkerReport},
    text::is_active,
    wire::control::{ControlFrame, ListEntry},
};
use tensorwire_rendezvous::control::{ControlPlane, ControlSession, GrpcConfig, GrpcPlane, handshake};

use crate::common::{Process, finish, small_checkpoint, tensorwire};

/// Sets a terminal's title, rings, begins a new line, clears the screen and reverses the rest.
const ACTIVE: &str = "x\u{1b}]0;mine\u{7}\nFORGED WARN all is well\r\u{9b}2J\u{202e}\u{2028}";

/// The beginning of its escaped form.
const SHOWN: &str = r"x\u{1b}]0;mine\u{7}\nFORGED";

const NAME: &str = "/job:hostile/replica:0/task:0";
const LIMIT: Duration = Duration::from_secs(60);

/// The kind of tcp, which has no reach.
const TCP: (u8, Vec<u8>) = (3, Vec::new());

fn bounded<F: Future>(test: F) -> F::Output {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio.block_on(async {
        let ended = tokio::time::timeout(LIMIT, test).await;
        ended.unwrap_or_else(|_| panic!("the test hangs"))
    })
}

/// Checks that `shown` contains no control characters, and no line made by the peer.
fn assert_harmless(deed: &str, shown: &str) {
    let active = shown.chars().find(|character| *character != '\n' && is_active(*character));
    assert_eq!(active, None, "{deed}: {shown:?}");
    assert!(!shown.lines().any(|line| line.starts_with("FORGED")), "{deed}: {shown}");
}

/// The output of `tensorwire pull` from this server, with the whole log; it must fail.
fn pulled(deed: &str, address: &str, more: &[&str]) -> String {
    let mut pull = tensorwire(&[&["pull", address, "--fabric", "tcp"], more].concat());
    pull.env("RUST_LOG", "tensorwire=trace,warn");
    let output = finish(pull, LIMIT);
    assert!(matches!(output.status.code(), Some(1..=7)), "{deed}: {output:?}");
    let shown = String::from_utf8(output.stderr).unwrap();
    assert_harmless(deed, &shown);
    shown
}

fn introduction(worker: &str, listen_address: Option<&str>) -> handshake::Introduction {
    let (worker, listen_address) = (worker.to_owned(), listen_address.map(str::to_owned));
    handshake::Introduction { worker, incarnation: 7, listen_address, fabrics: vec![TCP] }
}

fn list(name: &str, request: u32) -> ControlFrame {
    let metadata = Metadata::new(DataType::U8, Shape::new([4]).unwrap()).unwrap();
    let entry = ListEntry { name: name.to_owned(), metadata, version: 1, checksum: None };
    ControlFrame::ListResponse { request, entries: vec![entry], more: false }
}

/// A report with an active name in the field that `deed` names.
fn report(deed: &str, request: u32) -> ControlFrame {
    let (mut report, mut peer, mut set) =
        (Box::<WorkerReport>::default(), PeerReport::default(), SetReport::default());
    match deed {
        "peer" => peer.name = ACTIVE.to_owned(),
        "transport" => peer.transport = Some(ACTIVE.to_owned()),
        "set" => set.name = ACTIVE.to_owned(),
        _ => report.version = ACTIVE.to_owned(),
    }
    (report.peers, report.sets) = (vec![peer], vec![set]);
    ControlFrame::ReportResponse { request, report }
}

/// Serves one session, and does `deed` in it.
async fn be_hostile(plane: GrpcPlane, deed: &str) {
    let runtime = TokioRuntime::current().unwrap();
    let mut session = plane.accept().await.unwrap();
    let me = match deed {
        "worker" => introduction(ACTIVE, None),
        "listen address" => introduction(NAME, Some(ACTIVE)),
        _ => introduction(NAME, None),
    };
    let _met = handshake::accept(&mut session, &me, plane.secret(), &runtime, LIMIT).await;
    let ControlSession { sender, mut receiver, .. } = session;
    let status = Status::new(Code::Unavailable, ACTIVE);
    while let Ok(Some(bytes)) = receiver.recv().await {
        let answer = match ControlFrame::decode(&bytes) {
            Ok(ControlFrame::ListRequest { request, .. }) if deed == "name" => list(ACTIVE, request),
            Ok(ControlFrame::ReportRequest { request }) => report(deed, request),
            Ok(ControlFrame::ListRequest { request, .. }) if deed == "refused" => list("w", request),
            // As an answer: a puller that has sent no request yet would connect again instead, in vain.
            Ok(ControlFrame::ListRequest { .. }) if deed == "goodbye" => {
                ControlFrame::Goodbye { status: status.clone() }
            }
            Ok(ControlFrame::Connect(offer)) => {
                ControlFrame::Refused { connection: offer.connection, status: status.clone() }
            }
            _ => continue,
        };
        // The puller may be gone.
        let _ = sender.send(answer.encode()).await;
    }
    plane.close().await;
}

#[test]
fn s5_nothing_that_a_worker_reports_acts_on_the_terminal_of_top() {
    for deed in ["peer", "transport", "set", "version"] {
        bounded(async {
            let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
            let address = plane.local_address();
            let top = tokio::task::spawn_blocking(move || {
                let mut top = tensorwire(&["top", &address, "--once", "--interval", "0.1"]);
                top.env("RUST_LOG", "tensorwire=trace,warn");
                finish(top, LIMIT)
            });
            let (output, ()) = futures::future::join(top, be_hostile(plane, deed)).await;
            let output = output.unwrap();
            assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(4), true), "{output:?}");
            let shown = String::from_utf8(output.stderr).unwrap();
            assert_harmless(deed, &shown);
            assert!(shown.contains(SHOWN) && shown.contains(deed), "{deed}: {shown}");
        });
    }
}

#[test]
fn s5_nothing_that_a_server_says_acts_on_the_terminal_or_log_of_a_pull() {
    for (deed, words) in [
        ("worker", SHOWN),
        ("listen address", SHOWN),
        ("name", SHOWN),
        ("refused", SHOWN),
        ("goodbye", SHOWN),
    ] {
        bounded(async {
            let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
            let address = plane.local_address();
            let pull = tokio::task::spawn_blocking(move || pulled(deed, &address, &[]));
            let serving = be_hostile(plane, deed);
            let (shown, ()) = futures::future::join(pull, serving).await;
            let shown = shown.unwrap();
            assert!(shown.contains(words), "{deed}: {shown}");
        });
    }
}

/// One header of HTTP/2, as HPACK writes it without a table.
fn header(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| {
        assert!(text.len() < 127, "a longer one takes several bytes of length");
        [&[text.len() as u8], text.as_bytes()].concat()
    };
    [vec![0], text(name), text(value)].concat()
}

/// A frame of HTTP/2.
fn http2(kind: u8, flags: u8, stream: u32, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), content].concat()
}

/// Answers the first call with these frames, and waits until the peer closes the connection.
fn answer_call(mut stream: TcpStream, answer: &[u8]) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(&http2(4, 0, 0, &[])).unwrap();
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        std::io::copy(&mut (&mut stream).take(length.into()), &mut std::io::sink()).unwrap();
        if head[3] == 1 {
            break;
        }
    }
    stream.write_all(answer).unwrap();
    let _until_the_end = stream.read_to_end(&mut Vec::new());
}

#[test]
fn s5_nothing_that_grpc_or_http_2_carry_acts_on_the_terminal_or_log_of_a_pull() {
    // Percent-encoded, as gRPC does it, and short enough for one byte of length.
    let encoded = |byte: u8| match byte {
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    let escaped: String = ACTIVE.bytes().map(encoded).collect();
    let refused = [
        vec![0x88], // :status: 200
        header("content-type", "application/grpc"),
        header("grpc-status", "7"),
        header("grpc-message", &escaped),
    ];
    let away = [&[0, 0, 0, 0, 0, 0, 0, 2][..], ACTIVE.as_bytes()].concat();
    for (deed, answer, words) in [
        ("status", http2(1, 5, 1, &refused.concat()), SHOWN),
        ("goaway", http2(7, 0, 0, &away), "cannot reach the worker"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = thread::spawn(move || answer_call(listener.accept().unwrap().0, &answer));
        let shown = pulled(deed, &address, &[]);
        assert!(shown.contains(words), "{deed}: {shown}");
        serving.join().unwrap();
    }
}

#[test]
fn s5_nothing_in_a_served_header_acts_on_the_terminal_or_log_of_a_pull() {
    let in_json = serde_json::to_string(ACTIVE).unwrap();
    let named = format!(r#"{{{in_json}:{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}}}"#);
    let typed = format!(r#"{{"w":{{"dtype":{in_json},"shape":[4],"data_offsets":[0,4]}}}}"#);
    for (deed, text, more) in [
        ("the name of a tensor", &named, &[][..]),
        ("names that there are", &named, &["--tensor", "absent"]),
        ("a type", &typed, &[]),
    ] {
        bounded(async {
            let worker = Worker::builder(NAME).start().await.unwrap();
            let header =
                Tensor::from_bytes(worker.pool(), DataType::U8, &[text.len() as u64], text.as_bytes());
            worker.publish("tensorwire:header", header.unwrap()).unwrap();
            let address = worker.address().to_owned();
            let pull = tokio::task::spawn_blocking(move || pulled(deed, &address, more));
            let shown = pull.await.unwrap();
            assert!(shown.contains(SHOWN), "{deed}: {shown}");
            worker.shutdown().await;
        });
    }
}

/// Sends the message of `deed` to the server.
async fn say(plane: &GrpcPlane, address: &str, deed: &str) {
    let runtime = TokioRuntime::current().unwrap();
    let mut session = plane.dial(address).await.unwrap();
    let secret = plane.ambient_secret(address).await.unwrap();
    let me = match deed {
        "worker" => introduction(ACTIVE, None),
        "listen address" => introduction(NAME, Some(ACTIVE)),
        _ => introduction(NAME, None),
    };
    let met = handshake::dial(&mut session, &me, secret.as_ref(), &runtime, LIMIT, address).await;
    let status = || Status::new(Code::Internal, ACTIVE);
    let frame = match deed {
        "after" => {
            ControlFrame::ListRequest { request: 1, after: Some(ACTIVE.to_owned()), with_checksums: false }
        }
        "illegal" => ControlFrame::Hello {
            wire_version: WIRE_VERSION,
            worker: ACTIVE.to_owned(),
            incarnation: 1,
            listen_address: None,
            nonce: [0; 32],
        },
        "disconnected" => ControlFrame::Disconnected { connection: 9, status: status() },
        "refused" => ControlFrame::Refused { connection: 9, status: status() },
        _ => ControlFrame::Goodbye { status: status() },
    };
    if met.is_ok() {
        session.sender.send(frame.encode()).await.unwrap();
        if ["disconnected", "refused"].contains(&deed) {
            session.sender.send(ControlFrame::Goodbye { status: status() }.encode()).await.unwrap();
        }
    }
    // Until the server has closed the session, after logging the reason.
    while let Ok(Some(_)) = session.receiver.recv().await {}
}

#[test]
fn s5_nothing_that_a_member_says_acts_on_the_terminal_or_log_of_a_server() {
    const DEEDS: [&str; 7] =
        ["worker", "listen address", "after", "illegal", "disconnected", "refused", "goodbye"];
    let directory = tempfile::tempdir().unwrap();
    let mut command = tensorwire(&["serve", small_checkpoint(directory.path()).to_str().unwrap()]);
    command.env("RUST_LOG", "tensorwire=trace,warn").stderr(Stdio::piped());
    let mut server = Process(command.spawn().unwrap());
    let mut stderr = server.0.stderr.take().unwrap();
    let log = thread::spawn(move || {
        let mut bytes = Vec::new();
        stderr.read_to_end(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    });
    let address = server.line_after("address ");
    bounded(async {
        let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
        for deed in DEEDS {
            say(&plane, &address, deed).await;
        }
        plane.close().await;
    });
    server.0.kill().unwrap();
    let log = log.join().unwrap();
    assert_harmless("any deed", &log);
    // Messages of statuses are escaped before the log quotes them, which would escape a part of them too.
    let quoted = SHOWN.replace('\\', r"\\");
    assert_eq!(log.matches(&format!("sent a goodbye: Internal: {quoted}")).count(), 3, "{log}");
    // Some fields of the log are in quotes, with backslashes doubled.
    assert_eq!(log.replace(r"\\", r"\").matches(SHOWN).count(), DEEDS.len(), "{log}");
}

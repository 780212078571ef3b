//! Peers that violate the rules.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use tensorwire_fabric::{Runtime, TokioRuntime};
use tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Streaming,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{
    ControlPlane, GrpcPlane, assert_works, bounded, config, connect, connect_past_the_dead, life::Part, plane,
};
use crate::control::{
    ControlError, ControlSession,
    grpc::frame::{Frame, attach},
};

/// What an HTTP/2 client sends first: the preface and empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

async fn raw_client(plane: &GrpcPlane) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{}", plane.local_address())).unwrap();
    endpoint.connect().await.unwrap()
}

/// A session whose frames the test makes: the sender, the received frames, and the plane's end.
async fn raw_session(plane: &GrpcPlane) -> (mpsc::Sender<Frame>, Streaming<Frame>, ControlSession) {
    let client = raw_client(plane).await;
    let (frames, stream) = mpsc::channel(1);
    let attached = futures::future::join(attach(client, ReceiverStream::new(stream)), plane.accept());
    let (back, session) = attached.await;
    (frames, back.unwrap(), session.unwrap())
}

/// Reads until the peer closes the connection, which must be within `limit`.
fn assert_hung_up(mut stream: &TcpStream, limit: Duration) {
    stream.set_read_timeout(Some(limit)).unwrap();
    let ended = stream.read_to_end(&mut Vec::new());
    let is_open = matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
    assert!(!is_open, "the connection was not closed");
}

#[test]
fn e_a_plane_without_tls_meets_nobody_who_has_it_and_says_why() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        // The answer of a plane with TLS to one without: an alert.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let secured = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 24]).unwrap();
            stream.write_all(&[21, 3, 3, 0, 2, 2, 10]).unwrap();
            // Until the peer closes the connection: a reset could overtake the alert.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = a.dial(&address).await.unwrap_err();
        assert!(matches!(error, ControlError::Tls { .. }), "{error}");
        assert!(error.to_string().contains("speaks TLS, and this worker does not"), "{error}");
        secured.join().unwrap();
        // The beginning of a TLS handshake gets no answer; the connection is closed.
        let mut client = TcpStream::connect(b.local_address()).unwrap();
        client.write_all(&[22, 3, 1, 0, 4, 1, 0, 0, 0]).unwrap();
        assert_hung_up(&client, Duration::from_secs(5));
        let (mut one, mut other) = connect(&a, &b).await;
        assert_works(&mut one, &mut other).await;
    });
}

#[test]
fn a_peer_that_says_nothing_is_not_greeted() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let silent = TcpStream::connect(b.local_address()).unwrap();
        // This session comes later, and is served.
        let (mut one, mut other) = connect(&a, &b).await;
        assert_works(&mut one, &mut other).await;
        silent.set_nonblocking(true).unwrap();
        let peeked = silent.peek(&mut [0; 1]);
        assert_eq!(peeked.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    });
}

#[test]
fn e_peers_that_talk_nonsense_are_let_in_at_a_pace() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let clock = TokioRuntime::current().unwrap();
        let began = clock.now();
        // One after another, 40 more than may come at once; beyond these, 200 a second are admitted.
        for _ in 0..104 {
            let mut nonsense = TcpStream::connect(b.local_address()).unwrap();
            nonsense.write_all(b"GET / HTTP/1.1\r\nHost: worker.example\r\n\r\n").unwrap();
            assert_hung_up(&nonsense, Duration::from_secs(5));
        }
        let took = clock.now() - began;
        assert!(took >= Duration::from_millis(180), "104 were refused within {took:?}");
        let (mut one, mut other) = connect(&a, &b).await;
        assert_works(&mut one, &mut other).await;
    });
}

#[test]
fn e_a_thousand_half_open_dials_leave_honest_sessions_working() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (mut one, mut other) = connect(&a, &b).await;
        // Like the handshake: from now on no other connection can evict the session.
        other.sender.admitted();
        let (_attacker, dials) = Part::start("half-open", &b.local_address(), 2048);
        assert_eq!(dials, "1000");
        assert_works(&mut one, &mut other).await;
        let (mut two, mut second) = connect(&a, &b).await;
        assert_works(&mut two, &mut second).await;
        let sockets = sockets_of(&b);
        assert!(sockets < 64 + 16, "{sockets} connections stay open for strangers");
    });
}

/// The number of this process's connections to the plane's port.
fn sockets_of(plane: &GrpcPlane) -> usize {
    let port: u16 = plane.local_address().rsplit(':').next().unwrap().parse().unwrap();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let established = table.lines().filter(|line| {
        let mut columns = line.split_whitespace().skip(1);
        let local = columns.next().unwrap_or_default();
        local.ends_with(&format!(":{port:04X}")) && columns.nth(1) == Some("01")
    });
    established.count()
}

#[test]
fn e_garbage_on_the_port_closes_that_connection_only() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (mut one, mut other) = connect(&a, &b).await;
        let huge = [0xff; 100_000];
        let wrong_frame = [PREFACE, &[0xff; 64]].concat();
        let bad_headers = [PREFACE, b"\0\0\x04\x01\x05\0\0\0\x01\xff\xff\xff\xff"].concat();
        for bytes in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &huge, &wrong_frame, &bad_headers] {
            let mut stream = TcpStream::connect(b.local_address()).unwrap();
            let _ = stream.write_all(bytes);
            // Before the arrival limit has passed.
            assert_hung_up(&stream, Duration::from_secs(8));
        }
        assert_works(&mut one, &mut other).await;
    });
}

#[test]
fn e_a_connection_without_a_session_is_cut_in_time() {
    bounded(|| async {
        let plane = GrpcPlane::bind(config().arrival_limit(Duration::from_millis(200))).unwrap();
        for bytes in [&b""[..], &b"PRI * HT"[..], PREFACE] {
            let mut stream = TcpStream::connect(plane.local_address()).unwrap();
            stream.write_all(bytes).unwrap();
            assert_hung_up(&stream, Duration::from_secs(8));
        }
        // An open session is not closed.
        let (mut one, mut other) = connect(&plane, &plane).await;
        std::thread::sleep(Duration::from_millis(500));
        assert_works(&mut one, &mut other).await;
    });
}

#[test]
fn e_a_frame_above_the_limit_loses_the_session() {
    bounded(|| async {
        let plane = plane();
        for excess in [1, 100] {
            let (frames, mut back, mut session) = raw_session(&plane).await;
            // From a stranger it would not even be read.
            session.sender.admitted();
            frames
                .send(Frame {
                    data: vec![0; CONTROL_FRAME_BYTES_MAX + excess],
                    goodbye: false,
                    checksum: None,
                })
                .await
                .unwrap();
            let error = session.receiver.recv().await.unwrap_err();
            let ControlError::Lost { detail } = &error else { panic!("{error}") };
            assert!(detail.contains("1048576"), "{detail}");
            assert!(back.message().await.is_err());
            assert!(matches!(session.sender.send(vec![1]).await, Err(ControlError::Lost { .. })));
        }
    });
}

#[test]
fn s2_a_frame_that_was_damaged_on_its_way_loses_the_session() {
    bounded(|| async {
        let plane = plane();
        let (frames, _back, mut session) = raw_session(&plane).await;
        let frame = |data: &[u8], checksum| Frame { data: data.to_vec(), goodbye: false, checksum };
        let of_both = Some(crc32c::crc32c(&[4, 1]));
        frames.send(frame(&[4, 1], of_both)).await.unwrap();
        assert_eq!(session.receiver.recv().await.unwrap(), Some(vec![4, 1]));
        frames.send(frame(&[0, 1], of_both)).await.unwrap();
        let error = session.receiver.recv().await.unwrap_err();
        let ControlError::Lost { detail } = &error else { panic!("{error}") };
        assert!(detail.contains("damaged"), "{detail}");
    });
}

#[test]
fn e_an_end_without_a_goodbye_is_a_loss() {
    bounded(|| async {
        let plane = plane();
        let (frames, _back, mut session) = raw_session(&plane).await;
        frames.send(Frame { data: vec![1], goodbye: false, checksum: None }).await.unwrap();
        assert_eq!(session.receiver.recv().await.unwrap(), Some(vec![1]));
        // The regular end of a gRPC request.
        drop(frames);
        let error = session.receiver.recv().await.unwrap_err();
        assert!(matches!(error, ControlError::Lost { .. }), "{error}");
    });
}

#[test]
fn e_a_connection_carries_one_session() {
    bounded(|| async {
        let plane = plane();
        let client = raw_client(&plane).await;
        let (_frames, stream) = mpsc::channel(1);
        let attached =
            futures::future::join(attach(client.clone(), ReceiverStream::new(stream)), plane.accept());
        let (back, session) = attached.await;
        drop((back, session));
        let (_frames, stream) = mpsc::channel(1);
        attach(client, ReceiverStream::new(stream)).await.unwrap_err();
    });
}

#[test]
fn e_a_call_of_another_method_is_refused() {
    bounded(|| async {
        let plane = plane();
        let mut grpc = tonic::client::Grpc::new(raw_client(&plane).await);
        grpc.ready().await.unwrap();
        let path = PathAndQuery::from_static("/tensorwire.control.v1.Control/Detach");
        let frames = tonic::Request::new(futures::stream::pending::<Frame>());
        let refused = grpc.streaming(frames, path, ProstCodec::<Frame, Frame>::default()).await;
        assert_eq!(refused.unwrap_err().code(), tonic::Code::Unimplemented);
    });
}

#[test]
fn e_a_stranger_cannot_fill_our_memory() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (one, mut other) = connect(&a, &b).await;
        let sent = std::sync::atomic::AtomicUsize::new(0);
        let sending = async {
            for _ in 0..64 {
                one.sender.send(vec![0; CONTROL_FRAME_BYTES_MAX]).await.unwrap();
                sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        };
        let reading = async {
            // Before the peer is admitted, not even the first frame is read completely.
            let mut next = other.receiver.recv();
            let waited = super::super::within(Duration::from_millis(300), &mut next).await;
            assert!(waited.is_err(), "a stranger's large frame was taken");
            drop(next);
            other.sender.admitted();
            for _ in 0..64 {
                other.receiver.recv().await.unwrap().unwrap();
            }
        };
        futures::future::join(sending, reading).await;
        assert_eq!(sent.into_inner(), 64);
    });
}

/// A PING of HTTP/2, or the answer to one.
fn ping(is_answer: bool) -> Vec<u8> {
    [&[0, 0, 8, 6, u8::from(is_answer), 0, 0, 0, 0][..], &[7; 8]].concat()
}

#[test]
fn s4_a_stranger_whose_frames_carry_nothing_is_cut_at_once() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        for flood in [ping(true), ping(false).repeat(17)] {
            let mut stranger = TcpStream::connect(b.local_address()).unwrap();
            stranger.write_all(&[PREFACE, &flood].concat()).unwrap();
            // Before the arrival limit has passed.
            assert_hung_up(&stranger, Duration::from_secs(5));
        }
        let (mut one, mut other) = connect(&a, &b).await;
        assert_works(&mut one, &mut other).await;
    });
}

/// An admitted session whose HTTP/2 frames the test makes: its connection, and the plane's end.
async fn raw_member(plane: &GrpcPlane) -> (TcpStream, ControlSession) {
    let path = b"/tensorwire.control.v1.Control/Attach";
    let headers = [
        &[0x83, 0x86, 0x04, path.len() as u8][..],
        path,
        b"\x01\x01h\x0f\x10\x10application/grpc\x00\x02te\x08trailers",
    ];
    let headers = headers.concat();
    let attach = [&[0, 0, headers.len() as u8, 1, 4, 0, 0, 0, 1][..], &headers].concat();
    let mut member = TcpStream::connect(plane.local_address()).unwrap();
    member.write_all(&[PREFACE, &attach].concat()).unwrap();
    let session = plane.accept().await.unwrap();
    session.sender.admitted();
    // The plane's settings, which raise the window, hold from their acknowledgement on.
    member.read_exact(&mut [0; 9]).unwrap();
    member.write_all(&[0, 0, 0, 4, 1, 0, 0, 0, 0]).unwrap();
    (member, session)
}

#[test]
fn a_window_full_of_the_shortest_frames_is_no_flood() {
    bounded(|| async {
        const FRAMES: usize = 32 << 10;
        let plane = plane();
        let (mut member, mut session) = raw_member(&plane).await;
        // A message of gRPC, with one byte for `data`, in a DATA frame.
        let shortest = [0, 0, 8, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 3, 0x0a, 1, b'x'];
        member.write_all(&shortest.repeat(FRAMES)).unwrap();
        for index in 0..FRAMES {
            let frame = session.receiver.recv().await;
            assert_eq!(frame.unwrap().as_deref(), Some(&b"x"[..]), "frame {index}");
        }
    });
}

#[test]
fn s4_a_members_flood_ends_its_session_and_says_why() {
    bounded(|| async {
        let plane = plane();
        let (mut member, mut session) = raw_member(&plane).await;
        // This number is no flood.
        member.write_all(&ping(false).repeat(900)).unwrap();
        member.read_exact(&mut [0; 900 * 17]).unwrap();
        session.sender.send(b"alive".to_vec()).await.unwrap();
        // The connection may be cut before all are sent.
        let _ = member.write_all(&ping(false).repeat(100_000));
        let error = session.receiver.recv().await.unwrap_err();
        assert!(error.to_string().contains("1000 at once"), "{error}");
    });
}

#[test]
fn s4_who_is_dialled_cannot_flood_either() {
    bounded(|| async {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let flooding = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 24]).unwrap();
            let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
            let _may_be_cut = stream.write_all(&[&settings[..], &ping(true).repeat(1000)].concat());
            assert_hung_up(&stream, Duration::from_secs(5));
        });
        let error = plane().dial(&address).await.unwrap_err();
        assert!(matches!(error, ControlError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("a PING that was not sent"), "{error}");
        flooding.join().unwrap();
    });
}

#[test]
fn e_a_session_whose_peer_hung_up_while_waiting_is_not_accepted() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        drop(a.dial(&b.local_address()).await.unwrap());
        a.close().await;
        let c = plane();
        let (mut one, mut other) = connect_past_the_dead(&c, &b).await;
        assert_works(&mut one, &mut other).await;
    });
}

//! What somebody between two workers sees, and what becomes of what they change or repeat.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use rendezvous::WorkerError;
use verbs_reactor::FabricKind;

use crate::{CLIENT, KEY, SERVER, bounded, builder, fetch, plain, serve, values};

/// What passed, of all connections one after the other; each direction for itself.
#[derive(Clone, Default)]
struct Seen {
    from_client: Arc<Mutex<Vec<Vec<u8>>>>,
    from_server: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Seen {
    /// Whether `part` passed in one piece.
    fn has(&self, part: &[u8]) -> bool {
        [&self.from_client, &self.from_server].into_iter().any(|direction| {
            let connections = direction.lock().unwrap();
            connections.iter().any(|seen| seen.windows(part.len()).any(|window| window == part))
        })
    }

    fn bytes(&self) -> usize {
        [&self.from_client, &self.from_server]
            .into_iter()
            .map(|direction| direction.lock().unwrap().iter().map(Vec::len).sum::<usize>())
            .sum()
    }
}

/// An address that leads to `to`, and flips a bit of the byte number `flip` that comes from there on each connection.
fn middle(to: &str, flip: Option<usize>) -> (String, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (to, seen) = (to.to_owned(), Seen::default());
    let recorded = seen.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(&to)) else { return };
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let (there, here) = (recorded.from_client.clone(), recorded.from_server.clone());
            std::thread::spawn(move || pass(client, server, &there, None));
            std::thread::spawn(move || pass(back.0, back.1, &here, flip));
        }
    });
    (address, seen)
}

fn pass(mut from: TcpStream, mut to: TcpStream, seen: &Mutex<Vec<Vec<u8>>>, flip: Option<usize>) {
    let connection = {
        let mut seen = seen.lock().unwrap();
        seen.push(Vec::new());
        seen.len() - 1
    };
    let (mut buffer, mut passed) = (vec![0; 64 << 10], 0);
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let bytes = &mut buffer[..read];
        if let Some(at) = flip.and_then(|flip| flip.checked_sub(passed))
            && at < read
        {
            bytes[at] ^= 4;
        }
        passed += read;
        seen.lock().unwrap()[connection].extend_from_slice(bytes);
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

/// What must not be seen: of the content, of the key, of the workers' names, and of what certificates say.
fn secrets() -> Vec<Vec<u8>> {
    let content: Vec<u8> = values().iter().flat_map(|value| value.to_le_bytes()).collect();
    vec![
        content[..16].to_vec(),
        content[content.len() - 16..].to_vec(),
        KEY.as_bytes().to_vec(),
        SERVER.as_bytes().to_vec(),
        CLIENT.as_bytes().to_vec(),
        b"tensorwire test member".to_vec(),
    ]
}

#[test]
fn e_a_recorder_sees_no_content_key_or_name() {
    // Without TLS it sees all but the certificates: the search finds what is there.
    for (is_encrypted, found) in [(true, 0), (false, 5)] {
        bounded(move || async move {
            let make = |name| match is_encrypted {
                true => builder(name, FabricKind::Grpc),
                false => plain(name, FabricKind::Grpc),
            };
            let server = serve(make(SERVER)).await;
            let (address, seen) = middle(server.address(), None);
            let client = match is_encrypted {
                true => make(CLIENT),
                // The port in the middle hands over no secret.
                false => make(CLIENT).secret(server_secret(&server).await),
            };
            let client = client.start().await.unwrap();
            assert_eq!(fetch(&client, &address).await.unwrap(), values());
            client.shutdown().await;
            server.shutdown().await;
            assert!(seen.bytes() > 400_000, "the tensor did not go through the middle");
            let seen = secrets().iter().filter(|secret| seen.has(secret)).count();
            assert_eq!(seen, found, "encrypted: {is_encrypted}");
        });
    }
}

/// What a plain server hands over to this user.
async fn server_secret(server: &rendezvous::Worker) -> rendezvous::control::Secret {
    use rendezvous::control::{ControlPlane, GrpcConfig, GrpcPlane};
    let plane = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap();
    plane.ambient_secret(server.address()).await.unwrap().unwrap()
}

#[test]
fn e_a_bit_flipped_on_the_way_gives_an_error_and_no_wrong_value() {
    bounded(|| async {
        let server = serve(builder(SERVER, FabricKind::Grpc)).await;
        let (address, seen) = middle(server.address(), Some(200_000));
        let client = builder(CLIENT, FabricKind::Grpc).start().await.unwrap();
        let error = fetch(&client, &address).await.unwrap_err();
        let is_typed = matches!(
            error,
            WorkerError::PeerLost { .. } | WorkerError::Control(_) | WorkerError::NoFabric { .. }
        );
        assert!(is_typed, "{error}");
        assert!(seen.bytes() > 200_000, "the bit was not flipped: {error}");
        // The same worker, reached without the middle, has its own and right value.
        let other = builder("/job:worker/replica:0/task:1", FabricKind::Grpc).start().await.unwrap();
        assert_eq!(fetch(&other, server.address()).await.unwrap(), values());
        other.shutdown().await;
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn e_a_replayed_session_is_refused() {
    bounded(|| async {
        let server = serve(builder(SERVER, FabricKind::Grpc)).await;
        let (address, seen) = middle(server.address(), None);
        let client = builder(CLIENT, FabricKind::Grpc).start().await.unwrap();
        assert_eq!(fetch(&client, &address).await.unwrap(), values());
        client.shutdown().await;
        let connections = seen.from_client.lock().unwrap().clone();
        assert!(connections.len() > 1, "a session, and a connection for tensors");
        for recorded in connections {
            // The plane answers on a thread of its own.
            let mut stream = TcpStream::connect(server.address()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let _ = stream.write_all(&recorded);
            let mut answer = Vec::new();
            // The end may come as a reset, since not all was read. A time-out would mean that it waits for more.
            let end = stream.read_to_end(&mut answer).err().map(|error| error.kind());
            let bytes = answer.len();
            assert!(matches!(end, None | Some(std::io::ErrorKind::ConnectionReset)), "{end:?}");
            // The server's part of a new handshake, and an alert: nothing of a session, nothing of the tensor.
            assert!(bytes < 10_000, "{bytes} bytes came back");
        }
        assert!(server.peers().iter().all(|peer| peer.transport.is_none()), "{:?}", server.peers());
        server.shutdown().await;
    });
}

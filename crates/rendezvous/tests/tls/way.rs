//! What somebody between two workers sees, and what becomes of what they change or repeat.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{WorkerError, control::Secret};

use super::{CLIENT, KEY, SERVER, bounded, builder, fetch, plain, serve, values};

/// What passed, of all connections one after the other; each direction for itself.
#[derive(Debug, Clone, Default)]
struct Seen {
    from_client: Arc<Mutex<Vec<Vec<u8>>>>,
    from_server: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// Stands between a server and its clients: sessions and data connections come in at one port.
#[derive(Debug)]
struct Middle {
    seen: Seen,
    /// The byte of which a bit is flipped, of those that come from the server on each connection.
    flip: Option<usize>,
}

impl Middle {
    fn new(flip: Option<usize>) -> Arc<Self> {
        Arc::new(Self { seen: Seen::default(), flip })
    }

    /// An address that leads to `to`.
    fn address(&self, to: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (to, recorded, flip) = (to.to_owned(), self.seen.clone(), self.flip);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(&to)) else { return };
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let (there, here) = (recorded.from_client.clone(), recorded.from_server.clone());
                std::thread::spawn(move || pass(client, server, &there, None));
                std::thread::spawn(move || pass(back.0, back.1, &here, flip));
            }
        });
        address
    }
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

/// What must not be seen: of the content, of the key, of the workers' names, and of the certificates.
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
            let middle = Middle::new(None);
            // One that is handed over goes through no middle.
            let clear = |name| plain(name, FabricKind::TCP).secret(Secret::new([1; 32]).unwrap());
            let (server, client) = match is_encrypted {
                true => (builder(SERVER, FabricKind::TCP), builder(CLIENT, FabricKind::TCP)),
                false => (clear(SERVER), clear(CLIENT)),
            };
            let (server, client) = (serve(server).await, client.start().await.unwrap());
            assert_eq!(fetch(&client, &middle.address(server.address())).await.unwrap(), values());
            client.shutdown().await;
            server.shutdown().await;
            assert!(middle.seen.bytes() > 400_000, "the tensor did not go through the middle");
            let seen = secrets().iter().filter(|secret| middle.seen.has(secret)).count();
            assert_eq!(seen, found, "encrypted: {is_encrypted}");
        });
    }
}

#[test]
fn e_a_bit_flipped_on_the_way_gives_an_error_and_no_wrong_value() {
    bounded(|| async {
        let middle = Middle::new(Some(200_000));
        let server = serve(builder(SERVER, FabricKind::TCP)).await;
        let client = builder(CLIENT, FabricKind::TCP).start().await.unwrap();
        let error = fetch(&client, &middle.address(server.address())).await.unwrap_err();
        let is_typed = matches!(
            error,
            WorkerError::PeerLost { .. } | WorkerError::Control(_) | WorkerError::NoFabric { .. }
        );
        assert!(is_typed, "{error}");
        assert!(middle.seen.bytes() > 200_000, "the bit was not flipped: {error}");
        client.shutdown().await;
        server.shutdown().await;
        // The same worker, reached without the middle, has its own and right value.
        let server = serve(builder(SERVER, FabricKind::TCP)).await;
        let other = builder("/job:worker/replica:0/task:1", FabricKind::TCP).start().await.unwrap();
        assert_eq!(fetch(&other, server.address()).await.unwrap(), values());
        other.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn e_a_replayed_session_is_refused() {
    bounded(|| async {
        let middle = Middle::new(None);
        let server = serve(builder(SERVER, FabricKind::TCP)).await;
        let client = builder(CLIENT, FabricKind::TCP).start().await.unwrap();
        assert_eq!(fetch(&client, &middle.address(server.address())).await.unwrap(), values());
        client.shutdown().await;
        let connections = middle.seen.from_client.lock().unwrap().clone();
        assert!(connections.len() > 1, "a session, and a connection for tensors");
        for recorded in &connections {
            // The plane answers on a thread of its own.
            let mut stream = TcpStream::connect(server.address()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let _ = stream.write_all(recorded);
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

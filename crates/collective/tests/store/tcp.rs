//! The store that one rank serves.

use std::{cell::Cell, net::SocketAddr, sync::Arc, time::Duration};

use futures::{FutureExt, future::join_all};
use tensorwire_collective::store::{Store, StoreError, TcpLimits, TcpStore};
use tensorwire_fabric::timeout;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{LONG, SHORT, keys, runtime, until, value};

pub(super) async fn serve(limits: TcpLimits) -> (TcpStore, SocketAddr) {
    TcpStore::serve_within(":0", limits, runtime()).await.unwrap()
}

pub(super) async fn connect(address: SocketAddr) -> Result<TcpStore, StoreError> {
    TcpStore::connect(&address.to_string(), LONG, runtime()).await
}

/// The bytes with which a client begins.
pub(super) async fn client_hello() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let client = connect(address);
    let accept = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut hello = vec![0; 24];
        stream.read_exact(&mut hello).await.unwrap();
        hello
    };
    tokio::select! {
        hello = accept => hello,
        connected = client => panic!("nobody answered: {connected:?}"),
    }
}

fn detail(error: &StoreError) -> &str {
    let StoreError::Unreachable { detail, .. } = error else { panic!("{error}") };
    detail
}

#[tokio::test]
async fn without_a_host_only_this_machine_can_connect() {
    let (_store, address) = TcpStore::serve(":0", runtime()).await.unwrap();
    assert!(address.ip().is_loopback() && address.port() != 0);
    let (_store, address) = TcpStore::serve("0.0.0.0:0", runtime()).await.unwrap();
    assert!(address.ip().is_unspecified());
}

#[tokio::test]
async fn an_address_that_is_taken_is_named() {
    let (_store, address) = serve(TcpLimits::default()).await;
    let error = TcpStore::serve(&address.to_string(), runtime()).await.unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    assert!(detail(&error).contains("free port"), "{error}");
}

#[tokio::test]
async fn a_client_may_come_before_the_server() {
    let reserved = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = reserved.local_addr().unwrap();
    drop(reserved);
    let mut early = Box::pin(connect(address));
    assert!(timeout(&*runtime(), SHORT, &mut early).await.is_err());
    let (_store, _) = TcpStore::serve(&address.to_string(), runtime()).await.unwrap();
    early.await.unwrap();
}

#[tokio::test]
async fn without_a_server_the_error_says_what_to_check() {
    let reserved = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = reserved.local_addr().unwrap();
    drop(reserved);
    let limit = Duration::from_secs(1);
    let error = TcpStore::connect(&address.to_string(), limit, runtime()).await.unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    assert!(detail(&error).contains("refused") && detail(&error).contains("serving rank runs"), "{error}");
}

/// Answers the first connection with `bytes`.
async fn answer_with(bytes: &[u8]) -> StoreError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    };
    let (connected, ()) = tokio::join!(connect(address), answer);
    connected.unwrap_err()
}

#[tokio::test]
async fn a_wrong_port_fails_at_once() {
    let error = answer_with(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    assert!(detail(&error).contains("another program"), "{error}");
    let error = answer_with(b"SSH-2.0-OpenSSH_9.6p1 Debian\r\n").await;
    assert!(detail(&error).contains("give the port"), "{error}");
}

#[tokio::test]
async fn another_version_is_named_with_the_own() {
    let mut hello = client_hello().await;
    hello[8] = 9;
    let error = answer_with(&hello).await;
    assert!(detail(&error).contains("version 9") && detail(&error).contains("version 1"), "{error}");
    // A server answers a client of another version with its own hello.
    let (_store, address) = serve(TcpLimits::default()).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&hello).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!((answer.len(), answer[8]), (24, 1));
}

#[tokio::test]
async fn a_port_that_closes_connections_fails() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let close = async {
        loop {
            // The client's bytes are read, because the connection would be reset otherwise.
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 64]).await;
        }
    };
    let limit = Duration::from_secs(1);
    let error = tokio::select! {
        connected = TcpStore::connect(&address, limit, runtime()) => connected.unwrap_err(),
        () = close => unreachable!(),
    };
    assert!(detail(&error).contains("does not answer as a store"), "{error}");
}

#[tokio::test]
async fn garbage_closes_its_own_connection_alone() {
    let (store, address) = serve(TcpLimits::default()).await;
    let client = connect(address).await.unwrap();
    let hello = client_hello().await;
    let long = (u32::MAX).to_le_bytes();
    let unknown = [&9u32.to_le_bytes()[..], &[0; 8], &[99]].concat();
    let garbage: [Vec<u8>; 4] = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        vec![0xff; 1 << 16],
        [&hello[..], &long].concat(),
        [&hello[..], &unknown].concat(),
    ];
    for bytes in garbage {
        let mut stream = TcpStream::connect(address).await.unwrap();
        // The server may close the connection before all is written.
        let _ = stream.write_all(&bytes).await;
        let ended = timeout(&*runtime(), LONG, stream.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "the server keeps a connection with garbage");
        client.add("n", 1).await.unwrap();
    }
    assert_eq!(value(&store, "n").await.unwrap(), b"4");
    until(|| store.connections() == Some(1)).await;
}

#[tokio::test]
async fn what_is_half_sent_is_given_up() {
    let limits = TcpLimits { request: SHORT, ..TcpLimits::default() };
    let (store, address) = serve(limits).await;
    let client = connect(address).await.unwrap();
    let hello = client_hello().await;
    for bytes in [&b""[..], &hello[..10], &[&hello[..], &[9, 0, 0, 0, 1]].concat()] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        // On a loaded machine the connection may be closed before.
        let _ = stream.write_all(bytes).await;
        let ended = timeout(&*runtime(), LONG, stream.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "the server keeps a connection with {} bytes", bytes.len());
    }
    // An idle client stays connected.
    until(|| store.connections() == Some(1)).await;
    client.set("a", b"").await.unwrap();
}

#[tokio::test]
async fn a_client_that_does_not_read_its_answers_is_closed() {
    let limits = TcpLimits { request: Duration::from_secs(1), ..TcpLimits::default() };
    let (store, address) = serve(limits).await;
    store.set("k", &vec![0; 1 << 20]).await.unwrap();
    let hello = client_hello().await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&hello).await.unwrap();
    stream.read_exact(&mut [0; 24]).await.unwrap();
    // The answers are more than the sockets' buffers hold. The connection may be closed before the last request.
    let get = [&16u32.to_le_bytes()[..], &[0; 8], &[2], &1u32.to_le_bytes(), &[1, 0], b"k"].concat();
    let _ = stream.write_all(&get.repeat(64)).await;
    until(|| store.connections() == Some(0)).await;
}

#[tokio::test]
async fn a_client_that_ends_while_it_waits_is_forgotten() {
    let (store, address) = serve(TcpLimits::default()).await;
    let names = keys(["never"]);
    let client = connect(address).await.unwrap();
    let mut wait = client.wait(&names, LONG);
    assert!((&mut wait).now_or_never().is_none());
    until(|| store.waits() == Some(1)).await;
    // A dropped wait ends on the server, and its connection stays.
    drop(wait);
    until(|| store.waits() == Some(0)).await;
    assert_eq!(store.connections(), Some(1));

    let mut wait = client.wait(&names, LONG);
    assert!((&mut wait).now_or_never().is_none());
    until(|| store.waits() == Some(1)).await;
    drop(wait);
    drop(client);
    until(|| store.waits() == Some(0) && store.connections() == Some(0)).await;
}

#[tokio::test]
async fn a_server_that_restarts_has_lost_its_keys_and_is_found_again() {
    let (store, address) = serve(TcpLimits::default()).await;
    let client = connect(address).await.unwrap();
    client.set("a", b"1").await.unwrap();
    let names = keys(["b"]);
    let mut wait = client.wait(&names, LONG);
    assert!((&mut wait).now_or_never().is_none());
    until(|| store.waits() == Some(1)).await;
    drop(store);
    let again = async {
        // The port is free when the task of the first server has ended.
        loop {
            if let Ok((store, _)) = TcpStore::serve(&address.to_string(), runtime()).await {
                until(|| store.waits() == Some(1)).await;
                store.set("b", b"2").await.unwrap();
                return store;
            }
            runtime().sleep(Duration::from_millis(1)).await;
        }
    };
    let (waited, store) = tokio::join!(wait, again);
    assert_eq!(waited.unwrap(), [b"2"], "the wait went on with the second server");
    assert_eq!(value(&client, "a").await, None);
    client.set("a", b"3").await.unwrap();
    assert_eq!(value(&store, "a").await.unwrap(), b"3");
}

/// Forwards one connection until `cut` ends, and all later ones. Counts them.
async fn forward(listener: TcpListener, to: SocketAddr, cut: impl Future<Output = ()>, count: &Cell<usize>) {
    let (mut near, _) = listener.accept().await.unwrap();
    let mut far = TcpStream::connect(to).await.unwrap();
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
        () = cut => {}
    }
    drop((near, far));
    loop {
        let (mut near, _) = listener.accept().await.unwrap();
        count.set(count.get() + 1);
        let mut far = TcpStream::connect(to).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
    }
}

#[tokio::test]
async fn a_connection_that_breaks_is_made_again() {
    let (store, address) = serve(TcpLimits::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = listener.local_addr().unwrap();
    let (cut, on_cut) = futures::channel::oneshot::channel::<()>();
    let again = Cell::new(0);
    let forward = forward(listener, address, on_cut.map(drop), &again);
    let talk = async {
        let client = connect(near).await.unwrap();
        let names = keys(["late"]);
        let mut wait = client.wait(&names, LONG);
        assert!((&mut wait).now_or_never().is_none());
        until(|| store.waits() == Some(1)).await;
        cut.send(()).unwrap();
        let set = async {
            until(|| again.get() == 1 && store.connections() == Some(1) && store.waits() == Some(1)).await;
            store.set("late", b"1").await.unwrap();
        };
        let (waited, ()) = tokio::join!(wait, set);
        assert_eq!(waited.unwrap(), [b"1"]);
        assert_eq!(client.add("n", 1).await.unwrap(), 1);
    };
    tokio::select! {
        () = forward => unreachable!(),
        () = talk => {}
    }
}

/// Answers the hello and reads one request, without an answer.
async fn swallow(listener: &TcpListener, hello: &[u8]) {
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.read_exact(&mut [0; 24]).await.unwrap();
    stream.write_all(hello).await.unwrap();
    stream.read_exact(&mut [0; 13]).await.unwrap();
}

#[tokio::test]
async fn a_write_that_may_have_happened_is_not_repeated() {
    let hello = client_hello().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // The request of `connect` is repeated, because it reads.
    let answer_connect = async {
        swallow(&listener, &hello).await;
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_exact(&mut [0; 24]).await.unwrap();
        stream.write_all(&hello).await.unwrap();
        let mut request = [0; 17];
        stream.read_exact(&mut request).await.unwrap();
        let answer = [&13u32.to_le_bytes()[..], &request[4..12], &[130], &[0; 4]].concat();
        stream.write_all(&answer).await.unwrap();
        stream
    };
    let (client, mut stream) = tokio::join!(connect(address), answer_connect);
    let client = client.unwrap();
    let close = async {
        stream.read_exact(&mut [0; 13]).await.unwrap();
        drop(stream);
    };
    let (added, ()) = tokio::join!(client.add("n", 1), close);
    let error = added.unwrap_err();
    assert!(detail(&error).contains("whether the write happened is unknown"), "{error}");
}

#[tokio::test]
async fn a_server_that_does_not_answer_ends_the_operation_in_time() {
    let hello = client_hello().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let silent = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&hello).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    };
    let limit = Duration::from_secs(1);
    let (connected, ()) = tokio::join!(TcpStore::connect(&address, limit, runtime()), silent);
    let error = connected.unwrap_err();
    assert!(detail(&error).contains("does not answer"), "{error}");
}

pub(super) fn assert_full(result: Result<impl std::fmt::Debug, StoreError>, what: &str, limit: usize) {
    match result {
        Err(StoreError::Full { what: named, limit: at, store }) => {
            assert_eq!((named, at), (what, limit));
            assert!(store.contains("127.0.0.1"), "{store}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_exceeds_a_limit_is_refused_with_its_name() {
    let limits = TcpLimits { connections: 1, keys: 2, bytes: 100, waits: 1, ..TcpLimits::default() };
    let (store, address) = serve(limits).await;
    let client = connect(address).await.unwrap();
    for side in [&client, &store] {
        side.set("a", b"").await.unwrap();
        side.set("b", b"").await.unwrap();
        assert_full(side.set("a", &[0; 99]).await, "bytes", 100);
        assert_full(side.set("c", b"").await, "keys", 2);
        assert_full(side.add("c", 1).await, "keys", 2);
        assert_full(side.compare_set("c", None, b"").await, "keys", 2);
    }
    let names = keys(["never"]);
    let mut wait = client.wait(&names, LONG);
    assert!((&mut wait).now_or_never().is_none());
    until(|| store.waits() == Some(1)).await;
    assert_full(client.wait(&names, LONG).await, "waits", 1);
    assert_full(store.wait(&names, LONG).await, "waits", 1);
    let long = ["k".repeat(101)];
    assert_full(client.wait(&long, LONG).await, "bytes", 100);
    drop(wait);

    assert_full(connect(address).await, "connections", 1);
    drop(client);
    until(|| store.connections() == Some(0)).await;
    connect(address).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_clients_find_each_other() {
    const CLIENTS: usize = 200;
    let (store, address) = serve(TcpLimits::default()).await;
    let names: Arc<Vec<String>> = Arc::new((0..CLIENTS).map(|rank| format!("rank/{rank}")).collect());
    let ranks = (0..CLIENTS).map(|rank| {
        let names = Arc::clone(&names);
        async move {
            let client = connect(address).await.unwrap();
            client.set(&names[rank], rank.to_string().as_bytes()).await.unwrap();
            let found = client.wait(&names, LONG).await.unwrap();
            assert!((0..).zip(&found).all(|(rank, value)| *value == u64::to_string(&rank).into_bytes()));
            client.add("done", 1).await.unwrap();
            client
        }
    });
    let clients = join_all(ranks).await;
    assert_eq!(store.connections(), Some(CLIENTS));
    assert_eq!(value(&store, "done").await.unwrap(), CLIENTS.to_string().as_bytes());
    drop(clients);
    until(|| store.connections() == Some(0)).await;
    assert_eq!(store.waits(), Some(0));
}

#[tokio::test]
async fn the_server_ends_with_its_last_clone() {
    let (store, address) = serve(TcpLimits::default()).await;
    let clone = store.clone();
    drop(store);
    let limit = Duration::from_secs(1);
    let client = TcpStore::connect(&address.to_string(), limit, runtime()).await.unwrap();
    client.set("a", b"1").await.unwrap();
    drop(clone);
    let error = loop {
        if let Err(error) = client.get(&keys(["a"])).await {
            break error;
        }
    };
    assert!(detail(&error).contains("no answer within 1s"), "{error}");
    let error = client.wait(&keys(["a"]), SHORT).await.unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
}

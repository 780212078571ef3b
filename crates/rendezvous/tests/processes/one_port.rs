//! What passes between two workers that reach each other through one address alone: a port forward, or a proxy.

#![allow(clippy::disallowed_methods)] // what is between the workers runs on tokio itself

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use h2::{RecvStream, SendStream};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Peer, Tensor, Worker, WorkerBuilder, WorkerError, control::Secret};
use tokio::net::{TcpListener, TcpStream};
use tonic::codegen::{Bytes, http};

use crate::harness::{bounded, step};

const LIMIT: Duration = Duration::from_secs(60);
const SERVER: &str = "/job:server/replica:0/task:0";
const CLIENT: &str = "/job:client/replica:0/task:0";

fn builder(name: &str) -> WorkerBuilder {
    // One that is handed over goes through no proxy.
    let secret = Secret::new(*b"given to both of them").unwrap();
    Worker::builder(name).require(FabricKind::TCP).secret(secret).timeout(Duration::from_secs(20))
}

async fn serving(name: &str) -> Worker {
    let worker = builder(name).start().await.unwrap();
    let mut buffer = worker.pool().try_alloc(100_000).unwrap();
    buffer.fill(7);
    worker.publish("x", Tensor::new(buffer, DataType::U8, &[100_000]).unwrap()).unwrap();
    worker
}

async fn fetch(peer: &Peer) -> Result<(), WorkerError> {
    let fetched = step("a fetch", async { peer.fetch("x").await }).await?;
    assert!(fetched.bytes().len() == 100_000 && fetched.bytes().iter().all(|&byte| byte == 7));
    Ok(())
}

/// An address that leads to `to`, and how many connections it has passed on.
async fn port_forward(to: String) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, passed) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicUsize::new(0)));
    let count = passed.clone();
    let forwarding = async move {
        while let Ok((mut client, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            let mut server = TcpStream::connect(&to).await.unwrap();
            let pass = async move { drop(tokio::io::copy_bidirectional(&mut client, &mut server).await) };
            tokio::spawn(pass);
        }
    };
    tokio::spawn(forwarding);
    (address, passed)
}

#[test]
fn whoever_dialled_the_session_dials_for_data_too_so_one_address_does_for_both_directions() {
    for server_fetches in [false, true] {
        bounded(LIMIT, |_| async move {
            let (server, client) = (serving(SERVER).await, serving(CLIENT).await);
            let (address, passed) = port_forward(server.address().to_owned()).await;
            let of_client = step("the session", client.peer_at(&address)).await.unwrap();
            step("the session", server.wait_for_peer(CLIENT)).await.unwrap();
            let of_server = server.peer(CLIENT).unwrap();
            if server_fetches {
                fetch(&of_server).await.unwrap();
                assert_eq!(passed.load(Ordering::Relaxed), 2, "a session, and a data connection");
            }
            fetch(&of_client).await.unwrap();
            fetch(&of_server).await.unwrap();
            assert_eq!(passed.load(Ordering::Relaxed), 2, "a session, and a data connection");
            client.shutdown().await;
            server.shutdown().await;
        });
    }
}

#[test]
fn a_data_address_of_its_own_is_used_beside_the_port_of_sessions() {
    bounded(LIMIT, |_| async move {
        let server = builder(SERVER).data_bind("127.0.0.2:0").start().await.unwrap();
        let mut buffer = server.pool().try_alloc(100_000).unwrap();
        buffer.fill(7);
        server.publish("x", Tensor::new(buffer, DataType::U8, &[100_000]).unwrap()).unwrap();
        let (address, passed) = port_forward(server.address().to_owned()).await;
        let client = builder(CLIENT).start().await.unwrap();
        let peer = step("the session", client.peer_at(&address)).await.unwrap();
        fetch(&peer).await.unwrap();
        assert_eq!(passed.load(Ordering::Relaxed), 1, "the session alone goes through the port forward");
        client.shutdown().await;
        server.shutdown().await;
        for wrong in ["127.0.0.1", "192.0.2.1:0"] {
            let error = builder(SERVER).data_bind(wrong).start().await.unwrap_err().to_string();
            assert!(error.contains("data_bind") || error.contains("listen"), "{error}");
        }
    });
}

/// A proxy that speaks nothing but HTTP/2, with the client and with the server at `to`.
async fn http_proxy(to: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let proxying = async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(proxy_connection(client, to.clone()));
        }
    };
    tokio::spawn(proxying);
    address
}

async fn proxy_connection(client: TcpStream, to: String) {
    let Ok(mut client) = h2::server::handshake(client).await else { return };
    while let Some(Ok((request, mut respond))) = client.accept().await {
        let server = TcpStream::connect(&to).await.unwrap();
        let call = async move {
            let (mut server, connection) = h2::client::handshake(server).await.unwrap();
            tokio::spawn(connection);
            let (head, body) = request.into_parts();
            let (response, up) = server.send_request(http::Request::from_parts(head, ()), false).unwrap();
            tokio::spawn(pump(body, up));
            let Ok(response) = response.await else { return };
            let (head, body) = response.into_parts();
            let down = respond.send_response(http::Response::from_parts(head, ()), false).unwrap();
            pump(body, down).await;
        };
        tokio::spawn(call);
    }
}

async fn pump(mut from: RecvStream, mut to: SendStream<Bytes>) {
    while let Some(Ok(data)) = from.data().await {
        let _ = from.flow_control().release_capacity(data.len());
        if to.send_data(data, false).is_err() {
            return;
        }
    }
    let _ended = match from.trailers().await {
        Ok(Some(trailers)) => to.send_trailers(trailers),
        _ => to.send_data(Bytes::new(), true),
    };
}

#[test]
fn behind_a_proxy_that_speaks_only_http_2_the_error_says_what_tensors_need() {
    bounded(LIMIT, |_| async move {
        let (server, client) = (serving(SERVER).await, serving(CLIENT).await);
        let address = http_proxy(server.address().to_owned()).await;
        let of_client = step("a session through the proxy", client.peer_at(&address)).await.unwrap();
        step("the session", server.wait_for_peer(CLIENT)).await.unwrap();
        let of_server = server.peer(CLIENT).unwrap();
        let began = std::time::Instant::now();
        for peer in [&of_client, &of_server] {
            let error = fetch(peer).await.unwrap_err();
            assert!(matches!(error, WorkerError::NoFabric { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("answers in HTTP"), "{text}");
            assert!(text.contains("passes TCP or TLS through unchanged"), "{text}");
        }
        assert!(
            began.elapsed() < Duration::from_secs(8),
            "an end that waits is told why the other has failed"
        );
        client.shutdown().await;
        server.shutdown().await;
    });
}

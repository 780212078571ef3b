//! Networks that lose packets: one address of two, one connection, large packets. Hosts are network namespaces.

use std::{collections::BTreeSet, fs, net::TcpListener, time::Duration};

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Peer, Worker, WorkerBuilder, WorkerError, control::Secret};

use crate::{
    harness::{Other, bounded, builder, info, is_version, parents_lines, role, say, tensor},
    namespaces::{ROUTED, TWOFOLD, ip, on, within},
};

const LIMIT: Duration = Duration::from_secs(60);

/// The liveness bound of these tests.
const LIVENESS: Duration = Duration::from_secs(3);

/// Where the server of a routed network listens.
const SERVER: &str = "10.2.0.2:4242";
const PORT: u16 = 4242;

const SMALL: usize = 100;
const LARGE: usize = 16 << 20;

fn worker(name: &str) -> WorkerBuilder {
    let secret = Secret::new(*b"a secret of these tests").unwrap();
    builder(name, FabricKind::TCP).liveness(LIVENESS).secret(secret)
}

/// A worker that listens on `address` and publishes two tensors.
async fn server(address: &str) -> Worker {
    let worker = worker("server").bind(address).start().await.unwrap();
    worker.publish("small", tensor(&worker, SMALL, 1).await).unwrap();
    worker.publish("large", tensor(&worker, LARGE, 2).await).unwrap();
    worker
}

/// The server of a routed network, as a process.
async fn serve() {
    let _server = server(SERVER).await;
    say("serving");
    parents_lines().recv().await;
}

/// Runs `body` on the host `client`, with a client and the server that is its peer. They have a data connection.
fn routed<F: Future<Output = ()>>(test: &'static str, body: impl FnOnce(Worker, Peer) -> F) {
    if role().is_some() {
        return bounded(LIMIT, |_| serve());
    }
    within(test, ROUTED, Some("client"), || {
        bounded(LIMIT, |_| async move {
            let mut other = Other::start_by(on("server"), test, "serve");
            assert_eq!(other.hear().await, "serving");
            let client = worker("client").start().await.unwrap();
            let peer = client.peer_at(SERVER).await.unwrap();
            body(client, peer).await;
        });
    });
}

async fn small(peer: &Peer) {
    let fetched = peer.fetch("small").await.unwrap_or_else(|error| panic!("{error}"));
    assert!(is_version(fetched.bytes(), 1));
}

/// The local ports of this host's established connections to port `to`.
fn ports(to: u16) -> BTreeSet<u16> {
    const ESTABLISHED: &str = "01";
    let port = |address: &str| u16::from_str_radix(address.rsplit(':').next().unwrap(), 16).unwrap();
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let rows = table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    let open = rows.filter(|row| row[3] == ESTABLISHED && port(row[2]) == to);
    open.map(|row| port(row[1])).collect()
}

/// Opens a data connection, and has the router swallow what the client sends on it.
async fn lose_new_connection(peer: &Peer) -> u16 {
    let before = ports(PORT);
    small(peer).await;
    let new: Vec<_> = ports(PORT).difference(&before).copied().collect();
    let [data] = new[..] else { panic!("not one new connection: {new:?}") };
    ip("router", &format!("rule add ipproto tcp sport {data} pref 10 blackhole"));
    data
}

#[test]
fn an_address_that_swallows_packets_costs_a_moment_and_the_next_one_is_used() {
    const TEST: &str = "networks::an_address_that_swallows_packets_costs_a_moment_and_the_next_one_is_used";
    within(TEST, TWOFOLD, None, || {
        bounded(LIMIT, |_| async {
            let server = server("127.0.0.1:0").await;
            let port = server.address().rsplit(':').next().unwrap();
            let client = worker("client").start().await.unwrap();
            let peer =
                client.peer_at(&format!("twofold:{port}")).await.unwrap_or_else(|error| panic!("{error}"));
            small(&peer).await;
        });
    });
}

#[test]
fn a_dial_that_the_system_connects_to_itself_is_refused_and_leaves_the_port_free() {
    const TEST: &str =
        "networks::a_dial_that_the_system_connects_to_itself_is_refused_and_leaves_the_port_free";
    // The system tries the first port first.
    let ports = "echo 40000 40001 >/proc/sys/net/ipv4/ip_local_port_range";
    within(TEST, ports, None, || {
        bounded(LIMIT, |_| async {
            let client = worker("client").bind("127.0.0.1:50000").start().await.unwrap();
            let error = client.peer_at("127.0.0.1:40000").await.unwrap_err().to_string();
            assert!(error.contains("127.0.0.1:40000: connection refused"), "{error}");
            let free = TcpListener::bind("127.0.0.1:40000");
            assert!(free.is_ok(), "{free:?}");
        });
    });
}

#[test]
fn the_zone_of_a_link_local_address_leads_to_the_data_connection_too() {
    const TEST: &str = "networks::the_zone_of_a_link_local_address_leads_to_the_data_connection_too";
    let set_up = "ip link add link0 type veth peer name link1; ip link set link0 up; ip address add fe80::1/64 dev link0 nodad";
    within(TEST, set_up, None, || {
        bounded(LIMIT, |_| async {
            let _server = server("[fe80::1%link0]:4242").await;
            let client = worker("client").start().await.unwrap();
            small(&client.peer_at("[fe80::1%link0]:4242").await.unwrap()).await;
            let error = client.peer_at("[fe80::1]:4242").await.unwrap_err().to_string();
            assert!(error.contains("needs its zone"), "{error}");
        });
    });
}

#[test]
fn a_data_connection_whose_path_alone_is_lost_ends_and_fetches_use_another_one() {
    const TEST: &str =
        "networks::a_data_connection_whose_path_alone_is_lost_ends_and_fetches_use_another_one";
    routed(TEST, |client, peer| async move {
        lose_new_connection(&peer).await;
        // Nothing is acknowledged, which the error names before the bound is over.
        let late = peer.fetch("small").timeout(LIVENESS * 2 / 3).await.unwrap_err();
        assert!(matches!(late, WorkerError::DeadlineExceeded { .. }), "{late}");
        assert!(late.to_string().contains("over tcp has stalled: nothing was acknowledged for"), "{late}");
        // The fetch is repeated on a new connection.
        small(&peer).await;
        assert_eq!(info(&client, &peer).transport, Some(FabricKind::TCP));
    });
}

#[test]
fn an_idle_data_connection_whose_path_alone_is_lost_ends_within_liveness() {
    const TEST: &str = "networks::an_idle_data_connection_whose_path_alone_is_lost_ends_within_liveness";
    routed(TEST, |client, peer| async move {
        let data = lose_new_connection(&peer).await;
        let begun = client.runtime().now();
        while ports(PORT).contains(&data) {
            client.runtime().sleep(Duration::from_millis(20)).await;
            let time = client.runtime().now() - begun;
            assert!(time < LIVENESS * 2, "open after {time:?}");
        }
        small(&peer).await;
    });
}

#[test]
fn a_link_that_loses_large_packets_is_named_and_small_tensors_pass() {
    const TEST: &str = "networks::a_link_that_loses_large_packets_is_named_and_small_tensors_pass";
    routed(TEST, |_client, peer| async move {
        small(&peer).await;
        // A veth drops what is longer than its other end's MTU, unless it is segmented later, and tells nobody.
        ip("server", "link set server gso_max_segs 1");
        ip("router", "link set to-server mtu 600");
        let lost = peer.fetch("large").await.unwrap_err();
        assert!(matches!(lost, WorkerError::PeerLost { .. }), "{lost}");
        let text = lost.to_string();
        for word in ["over tcp has stalled: nothing was acknowledged for", "MTU", "tcp_mtu_probing"] {
            assert!(text.contains(word), "no `{word}`: {text}");
        }
        small(&peer).await;
    });
}

#[test]
fn a_peer_that_reads_nothing_for_long_is_not_taken_for_a_lost_path() {
    bounded(LIMIT, |_| async {
        let server = server("127.0.0.1:0").await;
        let address = server.address().to_owned();
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        let (end, ended) = tokio::sync::oneshot::channel();
        let reader = std::thread::spawn(move || {
            bounded(LIMIT, |_| async move {
                let client = worker("client").start().await.unwrap();
                let peer = client.peer_at(&address).await.unwrap();
                // The next answer needs no exchange about the shape.
                assert!(is_version(peer.fetch("large").await.unwrap().bytes(), 2));
                let connections = ports(port);
                let mut large = Box::pin(peer.fetch("large").into_future());
                // The request leaves, and then user code blocks the runtime while the answer fills the socket.
                assert!(futures::poll!(large.as_mut()).is_pending());
                std::thread::sleep(LIVENESS * 2);
                assert!(is_version(large.await.unwrap().bytes(), 2));
                assert_eq!(ports(port), connections);
            });
            let _ = end.send(());
        });
        // Fails if the reader has panicked.
        ended.await.unwrap();
        reader.join().unwrap();
    });
}

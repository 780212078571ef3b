//! Contents that are validated, between workers of one process over shm and tcp; and one whose bits are flipped.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    future::Future,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use crate::watched::{Watcher, watched};
use crate::{
    bounded::bounded,
    fabrics::{kinds, over, over_verbs},
    rdma::patient,
};
use tensorwire_fabric::{ConnectionData, FabricKind, TokioRuntime};
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_protocol::{Counters, DataType};
use tensorwire_rendezvous::{Damage, Sharing, Tensor, Validation, Worker, WorkerBuilder, WorkerError};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENTS: [&str; 3] =
    ["/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1", "/job:worker/replica:0/task:2"];
const BYTES: usize = (1 << 20) + 5;
const KINDS: &[FabricKind] = &[FabricKind::SHM, FabricKind::TCP];

/// Runs `test` with a watchdog.
fn run(test: impl Future<Output = ()>) {
    bounded(patient(Duration::from_secs(55)), test);
}

fn builder(name: &str, kind: FabricKind, validation: Validation) -> WorkerBuilder {
    over(Worker::builder(name), kind).validation(validation).timeout(patient(Duration::from_secs(20)))
}

fn pattern(worker: &Worker, bytes: usize, seed: u8) -> Tensor {
    let mut buffer = worker.pool().try_alloc(bytes).unwrap();
    for (index, byte) in buffer.iter_mut().enumerate() {
        *byte = seed.wrapping_add((index % 251) as u8);
    }
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

fn sum(worker: &Worker, count: impl Fn(&Counters) -> u64) -> u64 {
    worker.peers().iter().map(|peer| count(&peer.counters)).sum()
}

fn matched(worker: &Worker) -> u64 {
    assert_eq!(sum(worker, |counters| counters.checksums_mismatched), 0);
    sum(worker, |counters| counters.checksums_matched)
}

fn computed(worker: &Worker) -> u64 {
    sum(worker, |counters| counters.checksums_computed)
}

#[test]
fn a_value_is_summed_once_for_all_its_receivers() {
    for &kind in kinds(KINDS) {
        run(async {
            let server = builder(SERVER, kind, Validation::Xxh3).start().await.unwrap();
            server.publish("t", pattern(&server, BYTES, 3)).unwrap();
            let mut clients = Vec::new();
            for name in CLIENTS {
                let client = builder(name, kind, Validation::Off).start().await.unwrap();
                let peer = client.peer_at(server.address()).await.unwrap();
                clients.push((client, peer));
            }
            let at_once = clients.iter().map(|(_, peer)| peer.fetch("t").into_future());
            for got in futures::future::join_all(at_once).await {
                assert!(got.unwrap().bytes() == pattern(&server, BYTES, 3).bytes());
            }
            let (client, peer) = &clients[0];
            for sharing in [Sharing::View, Sharing::Copy, Sharing::View] {
                let got = peer.fetch("t").sharing(sharing).await.unwrap();
                assert_eq!(got.buf().is_foreign(), sharing == Sharing::View && kind == FabricKind::SHM);
            }
            assert_eq!(clients.iter().map(|(client, _)| matched(client)).sum::<u64>(), 6);
            assert_eq!(computed(&server), 1, "{kind}");
            // What was received and validated is not summed again to be sent on.
            let got = peer.fetch("t").await.unwrap();
            client.publish("again", got).unwrap();
            let own = server.peer(CLIENTS[0]).unwrap();
            own.fetch("again").await.unwrap();
            assert_eq!((computed(client), matched(&server)), (0, 1));
            for (client, _) in clients {
                client.shutdown().await;
            }
            server.shutdown().await;
        });
    }
}

#[test]
fn every_kind_of_value_is_validated() {
    for &kind in kinds(KINDS) {
        for validation in [Validation::Crc32c, Validation::Xxh3] {
            run(async {
                let server = builder(SERVER, kind, Validation::Off).start().await.unwrap();
                let client = builder(CLIENTS[0], kind, validation).start().await.unwrap();
                let peer = client.peer_at(server.address()).await.unwrap();
                let strings = ["a", "", "three"];
                let tensor = Tensor::from_strings(server.pool(), &[3], &strings).unwrap();
                server.publish("strings", tensor).unwrap();
                server.publish("small", pattern(&server, 64, 1)).unwrap();
                let own = server.user_memory().join(Arc::new(vec![9_u8; 100_000])).unwrap();
                let tensor = Tensor::shared(own.buf().clone(), DataType::U8, &[100_000]).unwrap();
                server.publish("own", tensor).unwrap();
                for round in 1..=3 {
                    let got = peer.fetch("strings").await.unwrap().strings().unwrap();
                    assert_eq!(got, strings);
                    let got = peer.fetch("small").await.unwrap();
                    assert!(got.bytes() == pattern(&server, 64, 1).bytes());
                    let got = peer.fetch("own").await.unwrap();
                    assert!(got.bytes().iter().all(|byte| *byte == 9));
                    assert_eq!((matched(&client), computed(&server)), (round * 3, 3));
                }
                client.shutdown().await;
                server.shutdown().await;
                drop(own);
            });
        }
    }
}

/// Passes a TCP stream on, and flips a bit of as many long payloads as the test asks for.
#[derive(Debug, Default)]
struct Proxy {
    flips: AtomicU32,
}

/// Bytes of a frame's header, of the acceptor's welcome, and of payloads that are long.
const HEADER: usize = 40;
const WELCOME: usize = 10;
const LONG: usize = 10_000;

/// The kinds of frames that bring payload of a write.
const WRITES: [u8; 3] = [1, 2, 5];

impl Proxy {
    /// Connection data that leads through the proxy.
    fn lead(self: &Arc<Self>, data: &ConnectionData) -> ConnectionData {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = u16::from_le_bytes(data.0[19..21].try_into().unwrap());
        let mut led = data.clone();
        led.0[19..21].copy_from_slice(&listener.local_addr().unwrap().port().to_le_bytes());
        let proxy = self.clone();
        std::thread::spawn(move || {
            let (dialer, _) = listener.accept().unwrap();
            let acceptor = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).unwrap();
            dialer.set_nodelay(true).unwrap();
            acceptor.set_nodelay(true).unwrap();
            let (mut from, mut into) = (dialer.try_clone().unwrap(), acceptor.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut into);
                let _ = into.shutdown(std::net::Shutdown::Both);
            });
            // One of the two has ended.
            let _ = proxy.pass(acceptor, dialer);
        });
        led
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream) -> std::io::Result<()> {
        let mut welcome = [0; WELCOME];
        from.read_exact(&mut welcome)?;
        to.write_all(&welcome)?;
        loop {
            let mut header = [0; HEADER];
            from.read_exact(&mut header)?;
            let length = u32::from_le_bytes(header[20..24].try_into().unwrap()) as usize;
            let mut body = vec![0; if WRITES.contains(&header[0]) { length } else { 0 }];
            from.read_exact(&mut body)?;
            if body.len() >= LONG && self.flips.load(Ordering::SeqCst) > 0 {
                self.flips.fetch_sub(1, Ordering::SeqCst);
                body[LONG / 3] ^= 0x10;
            }
            to.write_all(&header)?;
            to.write_all(&body)?;
        }
    }
}

/// Acceptors are reached through it.
impl Watcher for Proxy {
    fn connection_data(self: Arc<Self>, data: ConnectionData) -> ConnectionData {
        self.lead(&data)
    }
}

#[test]
fn d_flip_bits_flipped_on_tcp_are_errors_and_the_connection_lives_on() {
    for validation in [Validation::Crc32c, Validation::Xxh3] {
        run(async {
            let proxy = Arc::new(Proxy::default());
            let fabric = TcpFabric::new(Arc::new(TokioRuntime::current().unwrap()), TcpConfig::default());
            let proxied = watched(Arc::new(fabric), &proxy);
            let server = Worker::builder(SERVER).local_fabrics(vec![proxied]).start().await.unwrap();
            let client = builder(CLIENTS[0], FabricKind::TCP, validation).start().await.unwrap();
            let peer = client.peer_at(server.address()).await.unwrap();
            server.publish("t", pattern(&server, BYTES, 3)).unwrap();
            assert!(peer.fetch("t").await.unwrap().bytes() == pattern(&server, BYTES, 3).bytes());
            for mismatches in 1..=5 {
                proxy.flips.store(1, Ordering::SeqCst);
                let error = peer.fetch("t").await.unwrap_err();
                let WorkerError::Corrupted { sent, received, damage, .. } = &error else { panic!("{error}") };
                assert!(sent != received && *damage == Damage::Content);
                let text = error.to_string();
                for part in ["`t`", SERVER, "tcp", validation.name(), &format!("{sent:016x}")] {
                    assert!(text.contains(part), "{part}: {text}");
                }
                assert!(peer.fetch("t").await.is_ok());
                assert_eq!(sum(&client, |counters| counters.checksums_mismatched), mismatches);
                assert_eq!(sum(&client, |counters| counters.checksums_matched), mismatches + 1);
            }
            assert_eq!(client.receive_memory().used_bytes, 0);
            client.shutdown().await;
            server.shutdown().await;
        });
    }
}

#[test]
fn d_flip_a_damaged_value_of_a_step_is_gone_and_the_next_comes() {
    run(async {
        let proxy = Arc::new(Proxy::default());
        let fabric = TcpFabric::new(Arc::new(TokioRuntime::current().unwrap()), TcpConfig::default());
        let proxied = watched(Arc::new(fabric), &proxy);
        let server = Worker::builder(SERVER).local_fabrics(vec![proxied]).start().await.unwrap();
        let client = builder(CLIENTS[0], FabricKind::TCP, Validation::Xxh3).start().await.unwrap();
        client.peer_at(server.address()).await.unwrap();
        let device = |worker: &str| format!("{worker}/device:CPU:0");
        let key = |worker: &Worker| worker.key(&device(SERVER), &device(CLIENTS[0]), "edge").unwrap();
        for seed in [1, 2, 3] {
            server.shared_step(7).send(&key(&server), pattern(&server, BYTES, seed)).unwrap();
        }
        proxy.flips.store(1, Ordering::SeqCst);
        let error = client.shared_step(7).recv(&key(&client)).await.unwrap_err();
        assert!(
            matches!(error, WorkerError::Corrupted { .. }) && error.to_string().contains("step 7"),
            "{error}"
        );
        for seed in [2, 3] {
            let got = client.shared_step(7).recv(&key(&client)).await.unwrap();
            assert!(got.bytes() == pattern(&server, BYTES, seed).bytes());
        }
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn without_validation_a_flip_goes_unseen() {
    run(async {
        let proxy = Arc::new(Proxy::default());
        let fabric = TcpFabric::new(Arc::new(TokioRuntime::current().unwrap()), TcpConfig::default());
        let proxied = watched(Arc::new(fabric), &proxy);
        let server = Worker::builder(SERVER).local_fabrics(vec![proxied]).start().await.unwrap();
        let client = builder(CLIENTS[0], FabricKind::TCP, Validation::Off).start().await.unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, BYTES, 3)).unwrap();
        proxy.flips.store(1, Ordering::SeqCst);
        let got = peer.fetch("t").await.unwrap();
        let whole = pattern(&server, BYTES, 3);
        let differing = got.bytes().iter().zip(whole.bytes()).filter(|(one, other)| one != other).count();
        assert_eq!(differing, 1);
        assert_eq!((matched(&client), computed(&server)), (0, 0));
        client.shutdown().await;
        server.shutdown().await;
    });
}

over_verbs! {
    a_value_is_summed_once_for_all_its_receivers
    every_kind_of_value_is_validated
}

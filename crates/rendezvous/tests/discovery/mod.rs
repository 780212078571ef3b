//! Discovery of real workers on loopback addresses, by names that the test resolves.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod plane;
#[cfg(feature = "test-certificates")]
mod tls;

use std::{
    collections::BTreeSet,
    io::{self, Write},
    net::TcpListener,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{Either, join_all, select},
};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    Peer, Tensor, Worker, WorkerError,
    control::{ControlError, GrpcConfig, Secret},
    discovery::{Discovered, Discovery},
};

use self::plane::Names;
use crate::{bounded::bounded, names::counted};

const LIMIT: Duration = Duration::from_secs(60);

/// The name that workers are discovered by. Nothing resolves it but a test.
const NAME: &str = "trainers.test:7000";

/// The interval of lookups, except where only a loss may cause one.
const OFTEN: Duration = Duration::from_millis(10);
const NEVER: Duration = Duration::from_secs(3600);

fn secret() -> Secret {
    Secret::new(*b"the secret of these workers").unwrap()
}

/// A worker that has published its name as `x`.
async fn serve(name: &str, bind: &str) -> Worker {
    let builder = Worker::builder(name).bind(bind).secret(secret()).require(FabricKind::TCP);
    let worker = builder.start().await.unwrap();
    let x = Tensor::from_values(worker.pool(), &[name.len() as u64], name.as_bytes()).unwrap();
    worker.publish("x", x).unwrap();
    worker
}

/// A worker that discovers by `names`.
async fn searcher(names: &Names) -> Worker {
    let plane = names.plane(GrpcConfig::new("127.0.0.1:0").secret(Some(secret())));
    let builder = Worker::client().dangerous_control_plane(plane).secret(secret());
    builder.require(FabricKind::TCP).start().await.unwrap()
}

async fn changed(discovery: &mut Discovery) -> Discovered {
    discovery.next().await.unwrap().unwrap()
}

/// The next worker that is found, after one was lost whose address may be dialled before it is taken away or served again.
async fn found_again(discovery: &mut Discovery) -> Peer {
    loop {
        match changed(discovery).await {
            Discovered::Found(peer) => return peer,
            Discovered::Failed { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

async fn found(discovery: &mut Discovery) -> Peer {
    match changed(discovery).await {
        Discovered::Found(peer) => peer,
        other => panic!("{other:?}"),
    }
}

async fn gone(discovery: &mut Discovery) -> Peer {
    match changed(discovery).await {
        Discovered::Gone(peer) => peer,
        other => panic!("{other:?}"),
    }
}

async fn failed(discovery: &mut Discovery) -> (String, WorkerError) {
    match changed(discovery).await {
        Discovered::Failed { address, error } => (address, error),
        other => panic!("{other:?}"),
    }
}

/// Nothing changes during so many lookups.
async fn nothing_changes(discovery: &mut Discovery, names: &Names, lookups: usize) {
    let looked_up = std::pin::pin!(names.looked_up(lookups));
    if let Either::Left((change, _)) = select(discovery.next(), looked_up).await {
        panic!("{change:?}");
    }
}

fn is(peer: &Peer, worker: &Worker) -> bool {
    (peer.name(), peer.incarnation()) == (worker.name(), Some(worker.incarnation()))
}

async fn fetch(peer: &Peer) -> String {
    String::from_utf8(peer.fetch("x").await.unwrap().values::<u8>().unwrap()).unwrap()
}

async fn shut_down(workers: impl IntoIterator<Item = &Worker>) {
    join_all(workers.into_iter().map(Worker::shutdown)).await;
}

/// An address at which nothing listens.
fn closed() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn peers_are_found_when_a_name_gets_their_address_and_gone_when_it_loses_it() {
    bounded(LIMIT, async {
        let workers = join_all(["a", "b", "c"].map(async |name| serve(name, "127.0.0.1:0").await)).await;
        let names = Names::of(workers[..2].iter().map(Worker::address));
        let client = searcher(&names).await;
        let mut discovery = client.discover(NAME).every(OFTEN);
        let mut peers = [found(&mut discovery).await, found(&mut discovery).await];
        peers.sort_by_key(|peer| peer.name().to_owned());
        assert!(peers.iter().zip(&workers).all(|(peer, worker)| is(peer, worker)), "{peers:?}");
        assert_eq!([fetch(&peers[0]).await, fetch(&peers[1]).await], ["a", "b"]);

        names.set([workers[1].address(), workers[2].address()]);
        assert!(is(&gone(&mut discovery).await, &workers[0]));
        assert!(is(&found(&mut discovery).await, &workers[2]));
        // Only the name has lost it: it stays connected, and a name that does not resolve loses nobody.
        assert_eq!(fetch(&peers[0]).await, "a");
        names.fail();
        nothing_changes(&mut discovery, &names, 5).await;
        names.set(workers.iter().map(Worker::address));
        assert!(is(&found(&mut discovery).await, &workers[0]));
        nothing_changes(&mut discovery, &names, 5).await;
        shut_down(workers.iter().chain([&client])).await;
    });
}

#[test]
fn d_a_worker_that_is_replaced_is_gone_and_found_in_its_next_life_without_waiting_for_the_interval() {
    bounded(LIMIT, async {
        let first = serve("a", "127.0.0.1:0").await;
        let names = Names::of([first.address()]);
        let client = searcher(&names).await;
        let mut discovery = client.discover(NAME).every(NEVER);
        let peer = found(&mut discovery).await;
        assert!(is(&peer, &first));

        let second = serve("a", "127.0.0.2:0").await;
        names.set([second.address()]);
        shut_down([&first]).await;
        assert_eq!(gone(&mut discovery).await.name(), first.name());
        assert!(is(&found_again(&mut discovery).await, &second));
        // A `Peer` that was held meanwhile reaches the new worker.
        assert_eq!((fetch(&peer).await.as_str(), is(&peer, &second)), ("a", true));

        // At the same address.
        let address = second.address().to_owned();
        shut_down([&second]).await;
        let third = serve("a", &address).await;
        assert_eq!(gone(&mut discovery).await.name(), second.name());
        assert!(is(&found_again(&mut discovery).await, &third));
        shut_down([&third, &client]).await;
    });
}

#[test]
fn a_worker_with_two_addresses_is_one_peer_until_it_has_lost_both() {
    bounded(LIMIT, async {
        let worker = serve("a", "[::]:0").await;
        let port = worker.address().rsplit(':').next().unwrap();
        let [v4, v6] = [format!("127.0.0.1:{port}"), format!("[::1]:{port}")];
        let names = Names::of([&v4, &v6]);
        let client = searcher(&names).await;
        let mut discovery = client.discover(NAME).every(OFTEN);
        assert!(is(&found(&mut discovery).await, &worker));
        nothing_changes(&mut discovery, &names, 20).await;
        names.set([&v6]);
        nothing_changes(&mut discovery, &names, 5).await;
        names.set([&v4]);
        // The last address of the peer has left before the other one was dialled again.
        assert!(is(&gone(&mut discovery).await, &worker));
        let again = found(&mut discovery).await;
        assert_eq!(fetch(&again).await, "a");
        names.set::<String>([]);
        assert!(is(&gone(&mut discovery).await, &worker));
        shut_down([&worker, &client]).await;
    });
}

#[test]
fn a_worker_does_not_discover_itself() {
    bounded(LIMIT, async {
        let names = Names::none();
        let client = searcher(&names).await;
        let other = serve("a", "127.0.0.1:0").await;
        // Behind a relay only the handshake shows whose address it is.
        let (relayed, connections) = counted(client.address().to_owned()).await;
        names.set([client.address(), &relayed, other.address()]);
        let mut discovery = client.discover(NAME).every(OFTEN);
        assert!(is(&found(&mut discovery).await, &other));
        nothing_changes(&mut discovery, &names, 20).await;
        assert_eq!(connections.load(std::sync::atomic::Ordering::Relaxed), 1);
        shut_down([&other, &client]).await;
    });
}

#[test]
fn d_addresses_that_do_not_answer_do_not_hold_up_the_others() {
    bounded(LIMIT, async {
        // More than are dialled at a time. The kernel accepts connections to them, and no process answers.
        let silent: Vec<_> = (0..20).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let silent = silent.iter().map(|it| it.local_addr().unwrap().to_string());
        let closed = closed();
        // The last one in the order of dialling.
        let worker = serve("a", "127.0.0.9:0").await;
        let addresses: Vec<String> = silent.chain([closed.clone(), worker.address().to_owned()]).collect();
        let names = Names::of(addresses);
        let client = searcher(&names).await;
        let mut discovery = client.discover(NAME).every(OFTEN);
        let began = client.runtime().now();
        let mut failures = BTreeSet::new();
        let peer = loop {
            match changed(&mut discovery).await {
                Discovered::Found(peer) => break peer,
                Discovered::Failed { address, error } => {
                    assert!(
                        matches!(&error, WorkerError::Control(ControlError::Unreachable { .. })),
                        "{error}"
                    );
                    assert!(failures.insert(address), "twice: {error}");
                }
                other => panic!("{other:?}"),
            }
        };
        assert!(is(&peer, &worker));
        let took = client.runtime().now() - began;
        assert!(took < Duration::from_secs(8), "{took:?}, and a dial may take 10 s");
        assert!(!failures.is_empty());

        // An address that failed is found once a worker listens there.
        names.set([closed.as_str(), worker.address()]);
        let late = serve("b", &closed).await;
        let late_peer = loop {
            match changed(&mut discovery).await {
                Discovered::Found(peer) => break peer,
                Discovered::Failed { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        assert!(is(&late_peer, &late));
        shut_down([&worker, &late, &client]).await;
    });
}

/// The lines of the log that this thread writes.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn with(&self, text: &str) -> usize {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap().matches(text).count()
    }
}

#[test]
fn a_name_that_does_not_resolve_yet_is_asked_again_with_one_line_of_the_log() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
    let test = async {
        let names = Names::none();
        let (client, worker) = (searcher(&names).await, serve("a", "127.0.0.1:0").await);
        let mut discovery = client.discover(NAME).every(OFTEN);
        nothing_changes(&mut discovery, &names, 5).await;
        let counts = || ["does not resolve", "resolves again"].map(|text| lines.with(text));
        assert_eq!(counts(), [1, 0]);
        names.set([worker.address()]);
        assert!(is(&found(&mut discovery).await, &worker));
        nothing_changes(&mut discovery, &names, 5).await;
        assert_eq!(counts(), [1, 1]);
        shut_down([&worker, &client]).await;
    };
    tracing::subscriber::with_default(subscriber.finish(), || bounded(LIMIT, test));
}

#[test]
fn d_of_two_workers_of_one_name_the_second_is_reported_with_both_addresses_until_the_first_has_gone() {
    bounded(LIMIT, async {
        let (first, second) = (serve("a", "127.0.0.1:0").await, serve("a", "127.0.0.2:0").await);
        let names = Names::of([first.address()]);
        let client = searcher(&names).await;
        let mut discovery = client.discover(NAME).every(OFTEN);
        assert!(is(&found(&mut discovery).await, &first));
        names.set([first.address(), second.address()]);
        let (address, error) = failed(&mut discovery).await;
        assert_eq!(address, second.address());
        assert!(matches!(&error, WorkerError::NameTaken { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(first.address()) && text.contains(second.address()), "{text}");
        nothing_changes(&mut discovery, &names, 20).await;

        shut_down([&first]).await;
        names.set([second.address()]);
        assert_eq!(gone(&mut discovery).await.name(), first.name());
        assert!(is(&found(&mut discovery).await, &second));
        shut_down([&second, &client]).await;
    });
}

#[test]
fn bad_names_and_intervals_end_the_stream_with_field_value_and_remedy() {
    bounded(LIMIT, async {
        let names = Names::none();
        let client = searcher(&names).await;
        let bad = ["", "trainers", "trainers:0", "trainers:x", "http://trainers:1"]
            .map(|name| (client.discover(name), "name", name.to_owned()));
        let interval = (client.discover(NAME).every(Duration::ZERO), "every", "0ns".to_owned());
        for (mut discovery, field, value) in bad.into_iter().chain([interval]) {
            match discovery.next().await {
                Some(Err(WorkerError::Config { field: named, value: shown, remedy })) => {
                    assert_eq!((named, shown), (field, value));
                    assert!(!remedy.is_empty());
                }
                other => panic!("{other:?}"),
            }
            assert!(discovery.next().await.is_none());
        }
        assert_eq!(names.lookups(), 0);
        shut_down([&client]).await;
    });
}

#[test]
fn a_discovery_ends_with_its_worker_and_by_its_drop() {
    bounded(LIMIT, async {
        let worker = serve("a", "127.0.0.1:0").await;
        let names = Names::of([worker.address()]);
        let client = searcher(&names).await;
        let (mut dropped, mut ended) =
            (client.discover(NAME).every(OFTEN), client.discover(NAME).every(NEVER));
        let peer = found(&mut dropped).await;
        assert!(is(&found(&mut ended).await, &worker), "each discovery finds all peers");
        nothing_changes(&mut dropped, &names, 3).await;
        drop(dropped);
        assert_eq!(names.lookups(), {
            assert!(ended.next().now_or_never().is_none());
            names.lookups()
        });
        assert_eq!(fetch(&peer).await, "a", "peers stay");

        let (last, ()) = futures::join!(ended.next(), client.shutdown());
        assert!(matches!(last, Some(Err(WorkerError::ShutDown))), "{last:?}");
        assert!(ended.next().await.is_none());
        let mut late = client.discover(NAME);
        assert!(matches!(late.next().await, Some(Err(WorkerError::ShutDown))));
        shut_down([&worker]).await;
    });
}

#[test]
fn s4_so_many_addresses_of_a_name_are_used_and_no_more() {
    bounded(LIMIT, async {
        let names = Names::of((0..5_000).map(|at| format!("127.0.{}.{}:1", at / 250, at % 250 + 1)));
        let client = searcher(&names).await;
        let mut discovery = client.discover(NAME).every(NEVER);
        let mut addresses = BTreeSet::new();
        for _ in 0..4_096 {
            let (address, error) = failed(&mut discovery).await;
            assert!(matches!(error, WorkerError::Control(ControlError::Unreachable { .. })), "{error}");
            addresses.insert(address);
        }
        assert_eq!(addresses.len(), 4_096);
        assert!(discovery.next().now_or_never().is_none());
        shut_down([&client]).await;
    });
}

#[test]
fn the_systems_resolver_is_asked() {
    bounded(LIMIT, async {
        let worker = serve("a", "localhost:0").await;
        let port = worker.address().rsplit(':').next().unwrap();
        let client = Worker::client().secret(secret()).require(FabricKind::TCP).start().await.unwrap();
        let mut discovery = client.discover(&format!("localhost:{port}"));
        let peer = loop {
            match changed(&mut discovery).await {
                Discovered::Found(peer) => break peer,
                // `localhost` may have an address of the other family.
                Discovered::Failed { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        assert!(is(&peer, &worker));
        assert_eq!(fetch(&peer).await, "a");
        shut_down([&worker, &client]).await;
    });
}

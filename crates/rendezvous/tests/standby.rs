//! A fabric that could not be used can be used again: the workers move to it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::join;
use tensorwire_fabric::{FabricError, FabricKind, Runtime, TokioRuntime, timeout};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_rendezvous::{Peer, Tensor, Worker};

use crate::{
    bounded::bounded,
    watched::{Watcher, watched},
};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";

const LIMIT: Duration = Duration::from_secs(60);

/// How soon a better fabric is used once it can be.
const BACK_WITHIN: Duration = Duration::from_secs(5);

/// Makes every connection fail while it is closed, as a limit on descriptors does.
#[derive(Debug, Default)]
struct Gate {
    is_open: AtomicBool,
}

impl Watcher for Gate {
    fn preparing(&self) -> Result<(), FabricError> {
        if self.is_open.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(FabricError::device(FabricKind::SHM, "opening the gate", io::Error::other("it is closed")))
    }
}

fn runtime() -> Arc<dyn Runtime> {
    Arc::new(TokioRuntime::current().unwrap())
}

/// Prefers shared memory, through `gate`, to tcp.
async fn worker(name: &str, gate: &Arc<Gate>) -> Worker {
    let shm = watched(Arc::new(ShmFabric::new(runtime()).unwrap()), gate);
    let tcp = Arc::new(TcpFabric::new(runtime(), TcpConfig::default()));
    Worker::builder(name).local_fabrics(vec![shm, tcp]).start().await.unwrap()
}

/// Two workers that are connected over tcp, because shared memory cannot be used by one of them.
struct Pair {
    server: Worker,
    client: Worker,
    peer: Peer,
    gate: Arc<Gate>,
}

impl Pair {
    async fn begin(is_gate_the_clients: bool) -> Self {
        let (gate, open) = (Arc::<Gate>::default(), Arc::new(Gate { is_open: AtomicBool::new(true) }));
        let [servers, clients] = if is_gate_the_clients { [&open, &gate] } else { [&gate, &open] };
        let (server, client) = (worker(SERVER, servers).await, worker(CLIENT, clients).await);
        let peer = client.peer_at(server.address()).await.unwrap();
        let pair = Self { server, client, peer, gate };
        pair.publish("w", 1);
        assert_eq!(pair.fetch("w").await, [1]);
        assert_eq!(pair.transports(), [Some(FabricKind::TCP); 2]);
        pair
    }

    fn publish(&self, name: &str, value: u32) {
        let tensor = Tensor::from_values(self.server.pool(), &[1], &[value]).unwrap();
        self.server.publish(name, tensor).unwrap();
    }

    async fn fetch(&self, name: &str) -> Vec<u32> {
        self.peer.fetch(name).wait().await.unwrap().values::<u32>().unwrap().to_vec()
    }

    fn transports(&self) -> [Option<FabricKind>; 2] {
        [&self.server, &self.client].map(|worker| worker.peers()[0].transport)
    }

    /// Waits until both use shared memory.
    async fn moved(&self) {
        let moving = async {
            while self.transports() != [Some(FabricKind::SHM); 2] {
                tokio::task::yield_now().await;
            }
        };
        timeout(&*runtime(), BACK_WITHIN, moving).await.expect("still over tcp");
    }

    async fn end(self) {
        assert_eq!(self.fetch("w").await, [1]);
        assert!(self.client.peers()[0].not_used.is_empty());
        self.client.shutdown().await;
        self.server.shutdown().await;
    }
}

#[test]
fn d_a_fabric_that_is_back_is_used_within_five_seconds() {
    for is_gate_the_clients in [true, false] {
        bounded(LIMIT, async {
            let pair = Pair::begin(is_gate_the_clients).await;
            pair.gate.is_open.store(true, Ordering::SeqCst);
            pair.moved().await;
            pair.end().await;
        });
    }
}

#[test]
fn d_a_fetch_that_waits_while_its_connection_is_replaced_ends_with_its_value() {
    bounded(LIMIT, async {
        let pair = Pair::begin(true).await;
        pair.gate.is_open.store(true, Ordering::SeqCst);
        let publish = async {
            pair.moved().await;
            pair.publish("later", 2);
        };
        assert_eq!(join(pair.fetch("later"), publish).await.0, [2]);
        pair.end().await;
    });
}

/// The connection stays until the value has come.
#[test]
fn s3_a_receive_of_a_step_is_awaited_on_the_connection_that_it_began_on() {
    bounded(LIMIT, async {
        let pair = Pair::begin(true).await;
        let key = pair
            .client
            .key(&format!("{SERVER}/device:CPU:0"), &format!("{CLIENT}/device:CPU:0"), "x")
            .unwrap();
        let (sending, receiving) = (pair.server.shared_step(1), pair.client.shared_step(1));
        let send = async |value| {
            let tensor = Tensor::from_values(pair.server.pool(), &[1], &[value]).unwrap();
            sending.send(&key, tensor).unwrap();
        };
        let receive = async {
            for expected in [1u32, 2] {
                let received = receiving.recv(&key).await.unwrap();
                assert_eq!(received.values::<u32>().unwrap(), [expected]);
            }
        };
        let steps = async {
            pair.gate.is_open.store(true, Ordering::SeqCst);
            // The server is idle, and moves; the client waits.
            while pair.transports()[0] != Some(FabricKind::SHM) {
                tokio::task::yield_now().await;
            }
            assert_eq!(pair.transports()[1], Some(FabricKind::TCP));
            send(1u32).await;
            send(2).await;
            pair.moved().await;
        };
        join(receive, steps).await;
        pair.end().await;
    });
}

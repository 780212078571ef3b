//! Cancelled operations of whole workers.

use std::{slice, sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::{DataType, Mode, Status};
use tensorwire_rendezvous::{
    AllocatorAttributes, CancellationToken, ClusterSpec, DeviceContext, Filled, Peer, RecvArgs, Sharing,
    Tensor, Worker, WorkerBuilder, WorkerError, discovery::Discovered, sets::ShardedSet,
};
use tensorwire_sim::{Handle, Node};

use super::{for_every_k, on_seeds, polled};

use crate::common::builder;

/// What this file cancels.
pub(super) const CASES: [&str; 32] = [
    "commit",
    "connect",
    "discover",
    "fetch",
    "fetch_as",
    "fetch_into",
    "fetch_many",
    "fetch_many_versioned",
    "fetch_offered",
    "fetch_set",
    "fetch_set_slice",
    "fetch_shards",
    "fetch_slice",
    "fetch_timeout",
    "fetch_versioned",
    "list",
    "list_sets",
    "list_with_checksums",
    "notes",
    "peer_at",
    "recv",
    "recv_as",
    "recv_into",
    "recv_many",
    "recv_outputs",
    "recv_timeout",
    "recv_with",
    "report",
    "follow_shards",
    "shutdown",
    "start",
    "wait_for_peer",
];

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";
const CLIENT_GPU: &str = "/job:worker/replica:0/task:0/device:GPU:0";

/// Bytes of each tensor: more than fit into a message, so that memory is granted.
const BYTES: usize = 12_000;

/// A worker with one request at a time and memory for two tensors.
fn narrow(node: &Node, name: &str) -> WorkerBuilder {
    let builder = builder(node, name).memory(|memory| {
        memory.receive_bytes = 32 << 10;
        memory.block_bytes = 32 << 10;
    });
    builder.flow(|flow| {
        flow.requests_max = 1;
        flow.contents_max = 1;
        flow.ring_bytes = 8 << 10;
    })
}

/// A server and a client that knows it.
pub(super) struct Two {
    server_node: Node,
    client_node: Node,
    pub(super) handle: Handle,
    pub(super) server: Worker,
    pub(super) client: Worker,
    pub(super) peer: Peer,
}

impl Two {
    pub(super) async fn start(handle: &Handle, mode: Mode) -> Self {
        let server_node = handle.start_node("server:1").unwrap();
        let client_node = handle.start_node("client:1").unwrap();
        let server = narrow(&server_node, SERVER).flow(|flow| flow.mode = mode).start().await.unwrap();
        let client = narrow(&client_node, CLIENT).flow(|flow| flow.mode = mode).start().await.unwrap();
        let peer = client.peer_at("server:1").await.unwrap();
        Self { handle: handle.clone(), server_node, client_node, server, client, peer }
    }

    pub(super) fn tensor(&self, transfer: u64) -> Tensor {
        let mut buffer = self.server.pool().try_alloc(BYTES).unwrap();
        self.handle.pattern().fill(transfer, &mut buffer);
        Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()
    }

    pub(super) fn publish(&self, transfer: u64) {
        self.server.publish("x", self.tensor(transfer)).unwrap();
    }

    /// Fetches what is published, which must be `transfer`.
    pub(super) async fn fetches(&self, transfer: u64) {
        let tensor = self.peer.fetch("x").await.unwrap();
        self.handle.verify(transfer, tensor.bytes());
    }

    /// Waits until all cancellations are settled, and checks that the client uses no memory.
    async fn is_quiet(&self) {
        self.handle.runtime().sleep(Duration::from_millis(900)).await;
        let memory = self.client.receive_memory();
        assert_eq!((memory.used_bytes, memory.leaked_bytes, memory.waiting), (0, 0, 0));
    }

    pub(super) async fn end(self) {
        self.is_quiet().await;
        join(self.client.shutdown(), self.server.shutdown()).await;
        self.handle.runtime().sleep(Duration::from_secs(2)).await;
        assert!(self.server_node.is_alive() && self.client_node.is_alive());
        self.server.withdraw("x");
        let memory = self.server.pool().stats();
        assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0));
    }
}

/// Cancels `operation` after every number k of polls; a fetch right after it works.
pub(super) fn every_k_beside_fetches(what: &'static str, operation: &impl AsyncFn(&Two, usize) -> bool) {
    for mode in [Mode::Original, builder_mode()] {
        on_seeds(async |handle: Handle| {
            let two = Two::start(&handle, mode).await;
            two.publish(1);
            for_every_k(what, async |polls| {
                let completed = operation(&two, polls).await;
                two.fetches(1).await;
                completed
            })
            .await;
            two.end().await;
        });
    }
}

/// The default mode of workers.
pub(super) fn builder_mode() -> Mode {
    Mode::Counted
}

#[test]
fn s3_a_fetch_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("fetch", &async |two, polls| {
        let fetched = polled(polls, two.peer.fetch("x").into_future()).await;
        fetched.map(|tensor| two.handle.verify(1, tensor.unwrap().bytes())).is_some()
    });
}

#[test]
fn fetches_of_many_and_of_views_given_up_leave_nothing_behind() {
    every_k_beside_fetches("fetch_many", &async |two, polls| {
        let fetched = polled(polls, two.peer.fetch_many(["x"]).into_future()).await;
        fetched.map(|tensors| two.handle.verify(1, tensors.unwrap()[0].bytes())).is_some()
    });
    every_k_beside_fetches("fetch_as", &async |two, polls| {
        let fetched = polled(polls, two.peer.fetch("x").sharing(Sharing::View).into_future()).await;
        fetched.map(|tensor| two.handle.verify(1, tensor.unwrap().bytes())).is_some()
    });
}

#[test]
fn s3_a_fetch_of_an_offer_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("fetch_offered", &async |two, polls| {
        let offer = two.server.offer(two.tensor(2));
        let limit = Duration::from_secs(30);
        let fetched = polled(polls, two.peer.fetch_offered(offer.ticket(), limit)).await;
        fetched.map(|tensor| two.handle.verify(2, tensor.unwrap().unwrap().bytes())).is_some()
    });
}

#[test]
fn s3_a_fetch_into_a_buffer_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("fetch_into", &async |two, polls| {
        let buffer = two.client.receive_pool().alloc(BYTES).await.unwrap();
        let fetched =
            polled(polls, two.peer.fetch("x").into_buffer(buffer).dtype(DataType::U8).into_future()).await;
        fetched.map(|filled| two.handle.verify(1, filled.unwrap().bytes())).is_some()
    });
}

#[test]
fn s3_a_fetch_with_a_limit_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("fetch_timeout", &async |two, polls| {
        let limit = Duration::from_secs(30);
        let fetched = polled(polls, two.peer.fetch("x").timeout(limit).into_future()).await;
        fetched.map(|tensor| two.handle.verify(1, tensor.unwrap().bytes())).is_some()
    });
}

#[test]
fn s3_a_fetch_with_a_version_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("fetch_versioned", &async |two, polls| {
        let older = two.client.publish("own", two.tensor(1)).unwrap();
        let fetch = two.peer.fetch("x").newer_than(older).versioned().into_future();
        let fetched = polled(polls, fetch).await;
        two.client.withdraw("own");
        fetched.map(|fetched| two.handle.verify(1, fetched.unwrap().tensor.bytes())).is_some()
    });
    every_k_beside_fetches("fetch_many_versioned", &async |two, polls| {
        let fetched = polled(polls, two.peer.fetch_many(["x", "x"]).versioned().into_future()).await;
        let Some(fetched) = fetched else { return false };
        fetched.unwrap().iter().for_each(|one| two.handle.verify(1, one.tensor.bytes()));
        true
    });
}

#[test]
fn s3_a_fetch_given_up_while_others_fetch_holds_nobody_up() {
    every_k_beside_fetches("fetch", &async |two, polls| {
        // One request at a time: the others wait behind the cancelled one.
        let others = join(two.fetches(1), two.fetches(1));
        let (fetched, _) = join(polled(polls, two.peer.fetch("x").into_future()), others).await;
        fetched.map(|tensor| two.handle.verify(1, tensor.unwrap().bytes())).is_some()
    });
}

#[test]
fn s3_operations_on_a_set_given_up_leave_nothing_behind() {
    every_k_beside_fetches("commit", &async |two, polls| {
        let set = two.server.set("w");
        let before = set.version();
        let next = before.unwrap_or(0) + 1;
        let committed = polled(polls, set.commit(next, [("t", two.tensor(2))])).await;
        assert_eq!(set.version(), if committed.is_some() { Some(next) } else { before });
        committed.map(Result::unwrap).is_some()
    });
    every_k_beside_fetches("fetch_set", &async |two, polls| {
        let own = two.server.set("w");
        if own.version().is_none() {
            own.commit(1, [("t", two.tensor(2))]).await.unwrap();
        }
        let fetched = polled(polls, two.peer.set("w").fetch()).await;
        fetched.map(|snapshot| two.handle.verify(2, snapshot.unwrap().get("t").unwrap().bytes())).is_some()
    });
    every_k_beside_fetches("list_sets", &async |two, polls| {
        polled(polls, two.peer.list_sets()).await.map(|sets| assert!(sets.unwrap().is_empty())).is_some()
    });
}

#[test]
fn s3_a_slice_given_up_leaves_nothing_behind() {
    let part = slice::from_ref(&(10..20));
    every_k_beside_fetches("fetch_slice", &async |two, polls| {
        let fetched = polled(polls, two.peer.fetch_slice("x", part)).await;
        fetched.map(|slice| assert_eq!(slice.unwrap().bytes().len(), 10)).is_some()
    });
    every_k_beside_fetches("fetch_set_slice", &async |two, polls| {
        let own = two.server.set("w");
        if own.version().is_none() {
            own.commit(1, [("t", two.tensor(2))]).await.unwrap();
        }
        let fetched = polled(polls, two.peer.set("w").fetch_slice("t", part)).await;
        fetched.map(|slice| assert_eq!(slice.unwrap().1.bytes().len(), 10)).is_some()
    });
}

#[test]
fn s3_a_sharded_fetch_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("fetch_shards", &async |two, polls| {
        let own = two.server.set("w");
        if own.version().is_none() {
            own.commit(1, [("t", two.tensor(2))]).await.unwrap();
        }
        let fetched = polled(polls, ShardedSet::new([two.peer.set("w")]).fetch()).await;
        fetched.map(|snapshot| two.handle.verify(2, snapshot.unwrap().get("t").unwrap().bytes())).is_some()
    });
    every_k_beside_fetches("follow_shards", &async |two, polls| {
        let (own, set) = (two.server.set("w"), ShardedSet::new([two.peer.set("w")]));
        let next = own.version().unwrap_or(0) + 1;
        own.commit(next, [("t", Tensor::from_values(two.server.pool(), &[1], &[next]).unwrap())])
            .await
            .unwrap();
        let mut versions = set.follow();
        versions.next().await.unwrap().unwrap().apply();
        own.commit(next + 1, [("t", two.tensor(2))]).await.unwrap();
        let polled = polled(polls, versions.next()).await;
        let staged = polled.map(|staged| staged.unwrap().unwrap());
        staged.map(|staged| two.handle.verify(2, staged.apply().get("t").unwrap().bytes())).is_some()
    });
}

#[test]
fn s3_a_list_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("list", &async |two, polls| {
        polled(polls, two.peer.list().into_future())
            .await
            .map(|list| assert_eq!(list.unwrap().len(), 1))
            .is_some()
    });
}

#[test]
fn s3_a_report_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("report", &async |two, polls| {
        polled(polls, two.peer.report())
            .await
            .map(|report| assert_eq!(report.unwrap().name, two.server.name()))
            .is_some()
    });
}

#[test]
fn s3_a_list_with_checksums_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("list_with_checksums", &async |two, polls| {
        let list = polled(polls, two.peer.list().with_checksums().into_future()).await;
        list.map(|list| assert!(list.unwrap()[0].checksum.is_some())).is_some()
    });
}

/// How a value is received.
#[derive(Debug, Clone, Copy)]
enum Receiving {
    Plain,
    Limited(Duration),
    Shared(Sharing),
    Many,
    Outputs,
    Into,
    OnDevice,
}

/// A device whose copies take time.
#[derive(Debug)]
pub(super) struct Slow(pub(super) Arc<dyn Runtime>);

impl Slow {
    async fn copy(&self, tensor: Tensor) -> Result<Tensor, Status> {
        for _ in 0..2 {
            self.0.sleep(Duration::from_micros(20)).await;
        }
        Ok(tensor)
    }
}

impl DeviceContext for Slow {
    fn to_host(&self, tensor: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(self.copy(tensor))
    }

    fn to_device(&self, tensor: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
        Box::pin(self.copy(tensor))
    }
}

/// Receives the values 0, 1, 2, … of one key in order, and cancels receives after every number k of polls.
async fn receives(two: &Two, how: Receiving) {
    let destination = if matches!(how, Receiving::OnDevice) { CLIENT_GPU } else { CLIENT_CPU };
    let sent_by = two.server.key(SERVER_CPU, destination, "edge").unwrap();
    let wanted_by = two.client.key(SERVER_CPU, destination, "edge").unwrap();
    let device: Arc<dyn DeviceContext> = Arc::new(Slow(two.client_node.runtime()));
    let mut next = 0;
    for_every_k("recv", async |polls| {
        let step = two.client.shared_step(1);
        let receive = async {
            match how {
                Receiving::Plain => step.recv(&wanted_by).await,
                Receiving::Limited(limit) => step.recv(&wanted_by).timeout(limit).await,
                Receiving::Shared(sharing) => step.recv(&wanted_by).sharing(sharing).await,
                Receiving::OnDevice => {
                    let device_context = Some(device.clone());
                    let cancellation = Some(CancellationToken::new());
                    let args = RecvArgs { device_context, cancellation, ..RecvArgs::default() };
                    step.recv(&wanted_by).with(args).await.map(|delivered| delivered.tensor)
                }
                Receiving::Into => {
                    let buffer = two.client.receive_pool().alloc(BYTES).await.unwrap();
                    let received = step.recv(&wanted_by).into_buffer(buffer).dtype(DataType::U8).await;
                    received.map(Filled::into_tensor).map_err(WorkerError::from)
                }
                Receiving::Many => {
                    let received = step.recv_many(slice::from_ref(&wanted_by)).await;
                    received.map(|tensors| tensors.into_iter().next().unwrap())
                }
                Receiving::Outputs => {
                    let received = step.recv_outputs(slice::from_ref(&wanted_by)).await;
                    received.map(|mut outputs| outputs.remove(&wanted_by).unwrap())
                }
            }
        };
        // The value is available already, or arrives while the receive waits.
        let send = async {
            if next % 2 == 1 {
                two.server_node.runtime().sleep(Duration::from_micros(100)).await;
            }
            two.server.shared_step(1).send(&sent_by, two.tensor(next)).unwrap();
        };
        let (given_up, ()) = join(polled(polls, receive), send).await;
        let completed = given_up.is_some();
        let tensor = match given_up {
            Some(tensor) => tensor,
            None => step.recv(&wanted_by).await,
        };
        two.handle.verify(next, tensor.unwrap().bytes());
        next += 1;
        completed && polls > 3
    })
    .await;
    let nothing = two.client.shared_step(1).recv(&wanted_by).timeout(Duration::from_millis(500)).await;
    assert!(matches!(nothing, Err(WorkerError::DeadlineExceeded { .. })), "a value came twice: {nothing:?}");
}

#[test]
fn s3_a_receive_given_up_loses_and_doubles_nothing() {
    for mode in [Mode::Original, builder_mode()] {
        on_seeds(async |handle: Handle| {
            let two = Two::start(&handle, mode).await;
            receives(&two, Receiving::Plain).await;
            two.end().await;
        });
    }
}

#[test]
fn s3_a_receive_of_many_keys_or_of_a_view_given_up_loses_and_doubles_nothing() {
    let shared = [Sharing::View, Sharing::Copy].map(Receiving::Shared);
    for how in [Receiving::Many, Receiving::Outputs].into_iter().chain(shared) {
        on_seeds(async |handle: Handle| {
            let two = Two::start(&handle, builder_mode()).await;
            receives(&two, how).await;
            two.end().await;
        });
    }
}

#[test]
fn s3_a_receive_into_a_buffer_given_up_loses_and_doubles_nothing() {
    for mode in [Mode::Original, builder_mode()] {
        on_seeds(async |handle: Handle| {
            let two = Two::start(&handle, mode).await;
            receives(&two, Receiving::Into).await;
            two.end().await;
        });
    }
}

#[test]
fn s3_a_receive_onto_a_device_given_up_loses_and_doubles_nothing() {
    for mode in [Mode::Original, builder_mode()] {
        on_seeds(async |handle: Handle| {
            let two = Two::start(&handle, mode).await;
            receives(&two, Receiving::OnDevice).await;
            two.end().await;
        });
    }
}

#[test]
fn s3_a_receive_with_a_limit_given_up_loses_and_doubles_nothing() {
    on_seeds(async |handle: Handle| {
        let two = Two::start(&handle, builder_mode()).await;
        receives(&two, Receiving::Limited(Duration::from_secs(30))).await;
        two.end().await;
    });
}

/// Cancels the first operation of one new client after the other, after every number k of polls, while nothing is
/// connected yet.
fn first_contacts(what: &'static str, operation: &impl AsyncFn(&Worker, usize) -> bool) {
    on_seeds(async |handle: Handle| {
        let server_node = handle.start_node("server:1").unwrap();
        let server = narrow(&server_node, SERVER).start().await.unwrap();
        server.publish("x", Tensor::from_values(server.pool(), &[3], &[1u32, 2, 3]).unwrap()).unwrap();
        let mut clients = 0;
        for_every_k(what, async |polls| {
            clients += 1;
            let node = handle.start_node(&format!("client{clients}:1")).unwrap();
            let cluster = ClusterSpec::new().worker(SERVER, "server:1");
            let client = narrow(&node, CLIENT).cluster(cluster).start().await.unwrap();
            let completed = operation(&client, polls).await;
            let peer = client.peer_at("server:1").await.unwrap();
            let fetched = peer.fetch("x").await.unwrap();
            assert_eq!(fetched.values::<u32>().unwrap(), [1, 2, 3]);
            drop(fetched);
            client.shutdown().await;
            handle.runtime().sleep(Duration::from_millis(900)).await;
            assert_eq!(client.receive_memory().used_bytes, 0);
            completed
        })
        .await;
        server.shutdown().await;
    });
}

#[test]
fn s3_a_first_contact_given_up_leaves_nothing_behind() {
    first_contacts("peer_at", &async |client, polls| {
        polled(polls, client.peer_at("server:1")).await.is_some()
    });
}

#[test]
fn s3_a_discovery_given_up_leaves_nothing_behind() {
    first_contacts("discover", &async |client, polls| {
        let mut discovery = client.discover("server:1");
        let polled = polled(polls, discovery.next()).await;
        drop(discovery);
        polled.map(|found| assert!(matches!(found, Some(Ok(Discovered::Found(_)))), "{found:?}")).is_some()
    });
}

#[test]
fn s3_a_wait_for_a_peer_given_up_leaves_nothing_behind() {
    first_contacts("wait_for_peer", &async |client, polls| {
        let both = async { futures::join!(client.wait_for_peer(SERVER), client.peer_at("server:1")) };
        polled(polls, both).await.map(|(waited, _)| waited.unwrap()).is_some()
    });
}

#[test]
fn s3_a_connection_given_up_leaves_nothing_behind() {
    first_contacts("connect", &async |client, polls| {
        let peer = client.peer(SERVER).unwrap();
        polled(polls, peer.connect()).await.map(Result::unwrap).is_some()
    });
}

#[test]
fn s3_a_channel_of_notes_given_up_is_not_open() {
    first_contacts("notes", &async |client, polls| {
        let peer = client.peer(SERVER).unwrap();
        let completed = polled(polls, peer.notes(7, 1)).await.map(Result::unwrap).is_some();
        assert!(peer.notes(7, 1).await.is_ok(), "it can be opened again");
        completed
    });
}

#[test]
fn s3_a_first_fetch_given_up_leaves_nothing_behind() {
    first_contacts("fetch", &async |client, polls| {
        let peer = client.peer(SERVER).unwrap();
        polled(polls, peer.fetch("x").into_future()).await.map(|fetched| fetched.unwrap()).is_some()
    });
}

#[test]
fn s3_a_first_list_given_up_leaves_nothing_behind() {
    first_contacts("list", &async |client, polls| {
        let peer = client.peer(SERVER).unwrap();
        polled(polls, peer.list().into_future()).await.map(|list| list.unwrap()).is_some()
    });
}

#[test]
fn s3_a_start_given_up_leaves_nothing_behind() {
    on_seeds(async |handle: Handle| {
        let mut number = 0;
        for_every_k("start", async |polls| {
            number += 1;
            let node = handle.start_node(&format!("w{number}:1")).unwrap();
            let started = polled(polls, narrow(&node, CLIENT).start()).await;
            let completed = started.is_some();
            drop(started);
            handle.runtime().sleep(Duration::from_millis(100)).await;
            let again = narrow(&node, CLIENT).start().await.unwrap();
            again.shutdown().await;
            completed
        })
        .await;
    });
}

#[test]
fn l3_a_shutdown_given_up_goes_on() {
    on_seeds(async |handle: Handle| {
        let server_node = handle.start_node("server:1").unwrap();
        let server = narrow(&server_node, SERVER).start().await.unwrap();
        server.publish("x", Tensor::from_values(server.pool(), &[3], &[1u32, 2, 3]).unwrap()).unwrap();
        let mut number = 0;
        for_every_k("shutdown", async |polls| {
            number += 1;
            let node = handle.start_node(&format!("client{number}:1")).unwrap();
            let client = narrow(&node, CLIENT).start().await.unwrap();
            let peer = client.peer_at("server:1").await.unwrap();
            drop(peer.fetch("x").await.unwrap());
            let completed = polled(polls, client.shutdown()).await.is_some();
            client.shutdown().await;
            assert!(matches!(peer.fetch("x").await, Err(WorkerError::ShutDown)));
            handle.runtime().sleep(Duration::from_millis(900)).await;
            let memory = client.receive_memory();
            assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0));
            completed
        })
        .await;
        server.shutdown().await;
    });
}

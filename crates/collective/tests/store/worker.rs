//! The store that a worker serves.

use std::{cell::Cell, sync::Arc, time::Duration};

use futures::FutureExt;
use tensorwire_collective::store::{MemoryLimits, MemoryStore, Store, StoreError, WorkerStore};
use tensorwire_fabric::{FabricKind, timeout};
use tensorwire_protocol::{
    Code, Status,
    wire::control::ControlFrame::{self, Goodbye, StoreRequest, StoreResponse},
};
use tensorwire_rendezvous::{Worker, WorkerBuilder, control::Secret};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{
    LONG, SHORT, keys,
    member::{Member, Place},
    runtime, until, value,
};
use crate::join_all::join_all;

pub(super) const SECRET: &[u8] = b"a secret of all the ranks";

pub(super) fn builder() -> WorkerBuilder {
    Worker::client().require(FabricKind::TCP).secret(Secret::new(SECRET).unwrap())
}

/// A store and the worker that serves it.
pub(super) struct Serving {
    pub(super) store: MemoryStore,
    pub(super) worker: Worker,
}

impl Serving {
    pub(super) async fn start(limits: MemoryLimits) -> Self {
        Self::at("127.0.0.1:0", limits).await
    }

    async fn at(address: &str, limits: MemoryLimits) -> Self {
        let worker = builder().bind(address).start().await.unwrap();
        let store = MemoryStore::within(limits, runtime());
        store.serve(&worker).unwrap();
        Self { store, worker }
    }

    pub(super) async fn connect(&self) -> WorkerStore {
        connect(self.worker.address()).await.unwrap()
    }

    fn peers(&self) -> usize {
        self.worker.peers().iter().filter(|peer| peer.incarnation.is_some()).count()
    }
}

pub(super) async fn connect(address: &str) -> Result<WorkerStore, StoreError> {
    connect_within(address, LONG).await
}

async fn connect_within(address: &str, limit: Duration) -> Result<WorkerStore, StoreError> {
    WorkerStore::connect(&builder().start().await.unwrap(), address, limit).await
}

fn detail(error: &StoreError) -> &str {
    let StoreError::Unreachable { detail, .. } = error else { panic!("{error}") };
    detail
}

/// An address at which nothing listens.
async fn free() -> String {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string()
}

#[tokio::test]
async fn a_worker_serves_one_store_until_its_last_clone_is_dropped() {
    let Serving { store, worker } = Serving::start(MemoryLimits::default()).await;
    let other = MemoryStore::new(runtime());
    let error = other.serve(&worker).unwrap_err();
    assert!(detail(&error).contains("serves another store"), "{error}");
    let clone = store.clone();
    drop(store);
    let client = connect_within(worker.address(), Duration::from_secs(1)).await.unwrap();
    client.set("a", b"1").await.unwrap();
    assert_eq!(value(&clone, "a").await.unwrap(), b"1");
    drop(clone);
    let error = client.get(&keys(["a"])).await.unwrap_err();
    assert!(detail(&error).contains("no answer within 1.0s: the worker there serves no store"), "{error}");
    let error = client.wait(&keys(["a"]), SHORT).await.unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    other.serve(&worker).unwrap();
    assert_eq!(value(&client, "a").await, None);
}

#[tokio::test]
async fn a_client_may_come_before_the_worker_and_before_its_store() {
    let address = free().await;
    let mut early = Box::pin(connect(&address));
    assert!(timeout(&*runtime(), SHORT, &mut early).await.is_err());
    let worker = builder().bind(&*address).start().await.unwrap();
    assert!(timeout(&*runtime(), 10 * SHORT, &mut early).await.is_err());
    let store = MemoryStore::new(runtime());
    store.serve(&worker).unwrap();
    early.await.unwrap();
}

#[tokio::test]
async fn without_a_worker_the_error_says_what_to_check() {
    let address = free().await;
    let error = connect_within(&address, Duration::from_secs(1)).await.unwrap_err();
    assert!(error.to_string().contains(&address), "{error}");
    assert!(detail(&error).contains("refused") && detail(&error).contains("serving rank runs"), "{error}");
}

#[tokio::test]
async fn a_worker_of_another_secret_or_none_reads_nothing() {
    let serving = Serving::start(MemoryLimits::default()).await;
    let address = serving.worker.address();
    let other = builder().secret(Secret::new(*b"another secret of ranks").unwrap()).start().await.unwrap();
    let error = WorkerStore::connect(&other, address, LONG).await.unwrap_err();
    assert!(detail(&error).contains("does not know the secret"), "{error}");
    let without = Worker::client().require(FabricKind::TCP).start().await.unwrap();
    let error = WorkerStore::connect(&without, address, LONG).await.unwrap_err();
    assert!(detail(&error).contains("secret file"), "{error}");
    // An address for documentation, which no machine has.
    let error = WorkerStore::connect(&without, "192.0.2.1:7", LONG).await.unwrap_err();
    assert!(
        detail(&error).contains("on another machine") && detail(&error).contains("give all ranks"),
        "{error}"
    );
}

#[tokio::test]
async fn ranks_of_one_machine_need_no_secret_whichever_of_its_addresses_is_given() {
    let worker = Worker::client().require(FabricKind::TCP).start().await.unwrap();
    let store = MemoryStore::new(runtime());
    store.serve(&worker).unwrap();
    let port = worker.address().rsplit_once(':').unwrap().1;
    // The operating system takes it for an address of this machine.
    for host in ["127.0.0.1", "localhost", "0.0.0.0"] {
        let client = Worker::client().require(FabricKind::TCP).start().await.unwrap();
        let client = WorkerStore::connect(&client, &format!("{host}:{port}"), LONG).await.unwrap();
        client.add("n", 1).await.unwrap();
    }
    assert_eq!(value(&store, "n").await.unwrap(), b"3");
}

/// Answers each connection with `bytes`.
async fn answer_with(bytes: &[u8]) -> StoreError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answer = async {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            // What comes is read, because the connection would be reset otherwise.
            let _ = stream.read(&mut [0; 64]).await;
            let _ = stream.write_all(bytes).await;
        }
    };
    tokio::select! {
        connected = connect_within(&address, Duration::from_secs(1)) => connected.unwrap_err(),
        () = answer => unreachable!(),
    }
}

#[tokio::test]
async fn a_port_of_another_program_is_named() {
    for bytes in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b"SSH-2.0-OpenSSH_9.6p1 Debian\r\n", b""] {
        let error = answer_with(bytes).await;
        assert!(detail(&error).contains("cannot reach the worker at"), "{error}");
        assert!(detail(&error).contains("that this is its address"), "{error}");
    }
}

#[tokio::test]
async fn a_worker_of_an_earlier_release_is_a_clear_error() {
    let place = Place::open().await;
    let connecting = connect_within(&place.address, Duration::from_secs(1));
    let refuse = async {
        loop {
            let mut peer = place.accept().await;
            let StoreRequest { .. } = peer.receive().await else { panic!("a request") };
            let status = Status::new(Code::InvalidArgument, "kind has the unknown value 16");
            peer.send(Goodbye { status }).await;
        }
    };
    let error = tokio::select! {
        connected = connecting => connected.unwrap_err(),
        () = refuse => unreachable!(),
    };
    assert!(detail(&error).contains("kind has the unknown value 16"), "{error}");
}

/// The kind of a request for the values of keys.
const GET: u8 = 1;

/// The answer to such a request for no keys.
const NO_VALUES: [u8; 3] = [0, 1, 0];

#[tokio::test]
async fn s5_garbage_ends_the_session_that_it_comes_from_alone() {
    let serving = Serving::start(MemoryLimits::default()).await;
    let client = serving.connect().await;
    let unknown_kind = vec![99];
    let too_many_keys = postcard::to_stdvec(&(GET, vec!["k"; 4097])).unwrap();
    let claimed_keys = postcard::to_stdvec(&(GET, u32::MAX)).unwrap();
    let after_the_end = postcard::to_stdvec(&(GET, ["k"].as_slice(), 0)).unwrap();
    let long = vec![0xff; 1 << 16];
    for body in [vec![], unknown_kind, too_many_keys, claimed_keys, after_the_end, long] {
        let mut member = Member::of(&serving).await;
        member.send(StoreRequest { request: 1, body }).await;
        let Goodbye { status } = member.receive().await else { panic!("an end") };
        assert!(status.message.contains("sent a store"), "{status}");
        client.add("n", 1).await.unwrap();
    }
    assert_eq!(value(&serving.store, "n").await.unwrap(), b"6");
    // Answers that nobody asked for, and cancels of what is over.
    let mut member = Member::of(&serving).await;
    for request in [0, 1, u32::MAX] {
        member.send(StoreResponse { request, body: Some(vec![0; 100]) }).await;
        member.send(ControlFrame::StoreCancel { request }).await;
    }
    member.send(StoreRequest { request: 1, body: vec![GET, 0] }).await;
    assert_eq!(member.receive().await, StoreResponse { request: 1, body: Some(NO_VALUES.to_vec()) });
}

#[tokio::test]
async fn a_client_that_ends_while_it_waits_is_forgotten() {
    let serving = Serving::start(MemoryLimits::default()).await;
    let (store, names) = (&serving.store, keys(["never"]));
    let client = serving.connect().await;
    let mut wait = client.wait(&names, LONG);
    assert!((&mut wait).now_or_never().is_none());
    let drive = async { assert!(timeout(&*runtime(), LONG, &mut wait).await.is_err()) };
    tokio::select! {
        () = drive => unreachable!(),
        () = until(|| store.waits() == 1) => {}
    }
    // A dropped wait ends on the server, and its session stays.
    drop(wait);
    until(|| store.waits() == 0).await;
    assert_eq!(serving.peers(), 1);

    tokio::select! {
        waited = client.wait(&names, LONG) => panic!("{waited:?}"),
        () = until(|| store.waits() == 1) => {}
    }
    drop(client);
    until(|| store.waits() == 0 && serving.peers() == 0).await;
}

#[tokio::test]
async fn a_worker_that_restarts_has_lost_its_keys_and_is_found_again() {
    let Serving { store, worker } = Serving::start(MemoryLimits::default()).await;
    let address = worker.address().to_owned();
    let client = connect(&address).await.unwrap();
    client.set("a", b"1").await.unwrap();
    let names = keys(["b"]);
    let again = async {
        until(|| store.waits() == 1).await;
        worker.shutdown().await;
        drop(store);
        let serving = Serving::at(&address, MemoryLimits::default()).await;
        until(|| serving.store.waits() == 1).await;
        serving.store.set("b", b"2").await.unwrap();
        serving
    };
    let (waited, serving) = tokio::join!(client.wait(&names, LONG), again);
    assert_eq!(waited.unwrap(), [b"2"], "the wait went on with the second worker");
    assert_eq!(value(&client, "a").await, None);
    client.set("a", b"3").await.unwrap();
    assert_eq!(value(&serving.store, "a").await.unwrap(), b"3");
}

/// Forwards one connection until `cut` ends, and all later ones. Counts them.
async fn forward(listener: TcpListener, to: &str, cut: impl Future<Output = ()>, count: &Cell<usize>) {
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
async fn a_session_that_breaks_is_opened_again() {
    let serving = Serving::start(MemoryLimits::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = listener.local_addr().unwrap().to_string();
    let (cut, on_cut) = futures::channel::oneshot::channel::<()>();
    let again = Cell::new(0);
    let forward = forward(listener, serving.worker.address(), on_cut.map(drop), &again);
    let talk = async {
        let client = connect(&near).await.unwrap();
        let names = keys(["late"]);
        let set = async {
            until(|| serving.store.waits() == 1).await;
            cut.send(()).unwrap();
            until(|| again.get() == 1 && serving.store.waits() == 1).await;
            serving.store.set("late", b"1").await.unwrap();
        };
        let (waited, ()) = tokio::join!(client.wait(&names, LONG), set);
        assert_eq!(waited.unwrap(), [b"1"]);
        assert_eq!(client.add("n", 1).await.unwrap(), 1);
    };
    tokio::select! {
        () = forward => unreachable!(),
        () = talk => {}
    }
}

#[tokio::test]
async fn a_write_that_may_have_happened_is_not_repeated() {
    let place = Place::open().await;
    let answer_connect = async {
        // The request of `connect` is repeated, because it reads.
        let mut first = place.accept().await;
        first.receive().await;
        drop(first);
        let mut peer = place.accept().await;
        let StoreRequest { request, .. } = peer.receive().await else { panic!("a request") };
        peer.send(StoreResponse { request, body: Some(NO_VALUES.to_vec()) }).await;
        peer
    };
    let (client, mut peer) = tokio::join!(connect(&place.address), answer_connect);
    let client = client.unwrap();
    let close = async {
        let StoreRequest { .. } = peer.receive().await else { panic!("a request") };
        drop(peer);
    };
    let (added, ()) = tokio::join!(client.add("n", 1), close);
    let error = added.unwrap_err();
    assert!(detail(&error).contains("whether the write happened is unknown"), "{error}");
}

#[tokio::test]
async fn a_worker_that_does_not_answer_ends_the_operation_in_time() {
    let place = Place::open().await;
    let silent = async {
        let mut peer = place.accept().await;
        loop {
            peer.receive().await;
        }
    };
    let error = tokio::select! {
        connected = connect_within(&place.address, Duration::from_secs(1)) => connected.unwrap_err(),
        () = silent => unreachable!(),
    };
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
    let serving = Serving::start(MemoryLimits { keys: 2, bytes: 100, waits: 1 }).await;
    let (store, client) = (&serving.store, serving.connect().await);
    for side in [&client as &dyn Store, store] {
        side.set("a", b"").await.unwrap();
        side.set("b", b"").await.unwrap();
        assert_full(side.set("a", &[0; 99]).await, "bytes", 100);
        assert_full(side.set("c", b"").await, "keys", 2);
        assert_full(side.add("c", 1).await, "keys", 2);
        assert_full(side.compare_set("c", None, b"").await, "keys", 2);
    }
    let names = keys(["never"]);
    let refused = async {
        until(|| store.waits() == 1).await;
        assert_full(client.wait(&names, LONG).await, "waits", 1);
        assert_full(store.wait(&names, LONG).await, "waits", 1);
    };
    tokio::select! {
        waited = client.wait(&names, LONG) => panic!("{waited:?}"),
        () = refused => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_clients_find_each_other() {
    const CLIENTS: usize = 200;
    let serving = Serving::start(MemoryLimits::default()).await;
    let (store, address) = (&serving.store, serving.worker.address());
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
    assert_eq!(serving.peers(), CLIENTS);
    assert_eq!(value(store, "done").await.unwrap(), CLIENTS.to_string().as_bytes());
    drop(clients);
    until(|| serving.peers() == 0).await;
    assert_eq!(store.waits(), 0);
}

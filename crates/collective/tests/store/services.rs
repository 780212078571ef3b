//! Stores in servers of Redis and etcd: what happens when these reject requests, end, or stop.

use std::{sync::Arc, thread, time::Duration};

#[cfg(feature = "etcd")]
use futures::FutureExt;
use rustix::process::Signal;
use tensorwire_collective::{
    Group,
    store::{Store, StoreError},
};
use tensorwire_fabric::{FabricKind, timeout};
use tensorwire_rendezvous::Worker;

use super::{
    LONG, SHORT, keys, open_url, runtime,
    server::{Server, Service},
    value, worker,
};
use crate::{block_on::block_on, join_all::join_all, outside::tokio_runtime};

/// The limit of stores whose server does not answer.
const LIMIT: Duration = Duration::from_secs(1);

macro_rules! over_services {
    ($($test:ident)*) => {
        #[cfg(feature = "redis")]
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(super::Service::Redis).await; })*
        }
        #[cfg(feature = "etcd")]
        mod etcd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(super::Service::Etcd).await; })*
        }
    };
}

over_services! {
    a_server_that_is_not_there_is_named
    another_server_is_none
    a_server_that_restarts_is_connected_to_again
    a_server_that_stops_ends_a_wait_in_time
    a_server_that_stops_ends_every_call_in_time
    a_wait_goes_on_while_others_use_the_store
    three_ranks_join_and_two_go_on
    a_store_may_be_used_outside_of_tokio
}

async fn a_store_may_be_used_outside_of_tokio(service: Service) {
    let used = thread::spawn(move || {
        let Some(mut server) = Server::start(service) else { return };
        let (tokio, _) = tokio_runtime();
        let worker = tokio.block_on(worker::builder().start()).unwrap();
        block_on(async {
            let store = server.url().open(LONG, &worker).await.unwrap();
            store.set("a", b"1").await.unwrap();
            assert_eq!(store.wait(&keys(["a"]), LONG).await.unwrap(), [b"1"]);
            assert!(store.wait(&keys(["b"]), SHORT).await.is_err());
            server.kill();
            server.restart();
            store.set("a", b"2").await.unwrap();
            assert_eq!(value(&*store, "a").await.unwrap(), b"2");
        });
    });
    used.join().unwrap();
}

async fn open(server: &Server, limit: Duration) -> Arc<dyn Store> {
    open_url(server.url(), limit).await.unwrap()
}

/// The text of the error, which names the server.
#[track_caller]
fn detail(error: &StoreError, server: &Server) -> String {
    let StoreError::Unreachable { store, detail } = error else { panic!("{error}") };
    assert!(store.contains(&server.address.to_string()), "{error}");
    detail.clone()
}

async fn a_server_that_is_not_there_is_named(service: Service) {
    let Some(mut server) = Server::start(service) else { return };
    server.kill();
    let opened = timeout(&*runtime(), LONG, open_url(server.url(), LONG)).await;
    let error = opened.expect("at once").unwrap_err();
    let text = detail(&error, &server);
    assert!(text.contains("refused") && text.contains("runs there"), "{text}");
}

/// A worker listens there.
async fn another_server_is_none(service: Service) {
    let Some(server) = Server::start(service) else { return };
    let other = worker::builder().start().await.unwrap();
    let address = other.address();
    let url = server.url().to_string().replace(&server.address.to_string(), address);
    let error = open_url(url.parse().unwrap(), LONG).await.unwrap_err();
    let StoreError::Unreachable { store, detail } = &error else { panic!("{error}") };
    assert!(store.contains(address) && detail.contains("check that"), "{error}");
}

async fn a_server_that_restarts_is_connected_to_again(service: Service) {
    let Some(mut server) = Server::start(service) else { return };
    let store = open(&server, LONG).await;
    store.set("a", b"1").await.unwrap();
    server.kill();
    for error in [
        store.get(&keys(["a"])).await.unwrap_err(),
        store.set("a", b"2").await.unwrap_err(),
        store.add("n", 1).await.unwrap_err(),
        store.wait(&keys(["b"]), LONG).await.unwrap_err(),
    ] {
        assert!(detail(&error, &server).contains("check that"), "{error}");
    }
    server.restart();
    store.set("a", b"3").await.unwrap();
    assert_eq!(value(&*store, "a").await.unwrap(), b"3");
    assert_eq!(store.add("n", 1).await.unwrap(), 1);

    // The connection is an old one again; calls that may happen twice do not notice.
    server.kill();
    server.restart();
    store.get(&keys(["a"])).await.unwrap();
}

async fn a_server_that_stops_ends_a_wait_in_time(service: Service) {
    let Some(server) = Server::start(service) else { return };
    let store = open(&server, LIMIT).await;
    let names = keys(["never"]);
    let mut wait = store.wait(&names, Duration::from_secs(2));
    assert!(timeout(&*runtime(), SHORT, &mut wait).await.is_err(), "it waits");
    server.signal(Signal::STOP);
    let ended = timeout(&*runtime(), LONG / 2, wait).await.expect("bounded").unwrap_err();
    assert!(detail(&ended, &server).contains("did not answer within 1s"), "{ended}");
    server.signal(Signal::CONT);
    store.set("never", b"1").await.unwrap();
    assert_eq!(store.wait(&names, LONG).await.unwrap(), [b"1"]);
}

async fn a_server_that_stops_ends_every_call_in_time(service: Service) {
    let Some(server) = Server::start(service) else { return };
    let store = open(&server, LIMIT).await;
    server.signal(Signal::STOP);
    let clock = runtime();
    let begun = clock.now();
    let named = keys(["a"]);
    let (set, get, add, compared, deleted, wait) = tokio::join!(
        store.set("a", b""),
        store.get(&named),
        store.add("a", 1),
        store.compare_set("a", None, b""),
        store.delete("a"),
        store.wait(&named, Duration::ZERO),
    );
    let errors = [
        set.unwrap_err(),
        get.unwrap_err(),
        add.unwrap_err(),
        compared.unwrap_err(),
        deleted.unwrap_err(),
        wait.unwrap_err(),
        open_url(server.url(), LIMIT).await.unwrap_err(),
    ];
    assert!(clock.now() - begun < LONG / 2);
    for error in errors {
        assert!(detail(&error, &server).contains("stopped or overloaded"), "{error}");
    }
    server.signal(Signal::CONT);
    store.set("b", b"").await.unwrap();
}

async fn a_wait_goes_on_while_others_use_the_store(service: Service) {
    let Some(server) = Server::start(service) else { return };
    let store = open(&server, LONG).await;
    let names = keys(["k/1", "k/3"]);
    let others = async {
        for round in 0..200 {
            store.set("k/2", &[round]).await.unwrap();
            store.delete("k/2").await.unwrap();
        }
        store.set("k/3", b"3").await.unwrap();
        store.set("k/1", b"1").await.unwrap();
    };
    let (waited, ()) = tokio::join!(store.wait(&names, LONG), others);
    assert_eq!(waited.unwrap(), [b"1", b"3"]);
}

async fn three_ranks_join_and_two_go_on(service: Service) {
    let Some(server) = Server::start(service) else { return };
    let joining = (0..3usize).map(async |rank| {
        let worker = Worker::builder(&format!("rank_{rank}")).require(FabricKind::SHM).start().await.unwrap();
        let store = open(&server, LONG).await;
        let group =
            Group::builder(store, rank, 3).name("services").timeout(LONG).join(&worker).await.unwrap();
        (worker, group)
    });
    let mut ranks = join_all(joining).await;
    let sums = join_all(ranks.iter().map(async |(_, group)| {
        let mut values = [group.rank() as i32; 100];
        group.all_reduce(&mut values).await.unwrap();
        values[99]
    }));
    assert_eq!(sums.await, [3, 3, 3]);

    let (lost, group) = ranks.remove(1);
    drop(group);
    let shrinking = join_all(ranks.iter().map(async |(_, group)| {
        group.barrier().await.unwrap_err();
        let shrunk = group.shrink().await.unwrap();
        let mut values = [10 + shrunk.rank() as i32];
        shrunk.all_reduce(&mut values).await.unwrap();
        let size = shrunk.size();
        shrunk.close().await.unwrap();
        (size, values[0])
    }));
    let ((), shrunk) = tokio::join!(lost.shutdown(), shrinking);
    assert_eq!(shrunk, [(2, 21), (2, 21)]);
    join_all(ranks.iter().map(|(worker, _)| worker.shutdown())).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn redis_knows_users_passwords_and_databases() {
    let options = [
        "--requirepass",
        "s3cret",
        "--databases",
        "4",
        "--user",
        "alice",
        "on",
        ">won/der",
        "~job*",
        "+@all",
    ];
    let Some(server) = Server::start_with(Service::Redis, &options) else { return };
    let open = async |credentials: &str, path: &str| open_url(server.url_with(credentials, path), LONG).await;
    let (first, other) = (open(":s3cret@", "/3").await.unwrap(), open("alice:won%2Fder@", "").await.unwrap());
    first.set("job", b"1").await.unwrap();
    assert_eq!(value(&*other, "job").await, None, "it is in another database");
    other.set("job", b"2").await.unwrap();
    assert_eq!(value(&*first, "job").await.unwrap(), b"1");

    let refused = [
        (open("", "").await.unwrap_err(), "give the password in the URL"),
        (open(":wr0ng@", "").await.unwrap_err(), "check the user and the password"),
        (open("bob:s3cret@", "").await.unwrap_err(), "check the user and the password"),
        (open(":s3cret@", "/4").await.unwrap_err(), "no such database"),
        (other.set("another", b"").await.unwrap_err(), "let the user call"),
        (other.compare_set("another", None, b"").await.unwrap_err(), "let the user call"),
    ];
    for (error, text) in refused {
        assert!(detail(&error, &server).contains(text), "{error}");
        let text = format!("{error}{error:?}{first:?}{other:?}");
        assert!(!text.contains("s3cret") && !text.contains("wr0ng") && !text.contains("won"), "{text}");
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_value_of_another_type_is_no_number() {
    let Some(server) = Server::start(Service::Redis) else { return };
    let store = open(&server, LONG).await;
    let client = ::redis::Client::open(format!("redis://{}", server.address)).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let _: i64 = ::redis::cmd("LPUSH").arg("list").arg("x").query_async(&mut connection).await.unwrap();
    let error = store.add("list", 1).await.unwrap_err();
    assert!(matches!(&error, StoreError::NotANumber { key, .. } if key == "list"), "{error}");
    assert_eq!(value(&*store, "list").await, None);
}

#[cfg(feature = "etcd")]
#[tokio::test]
async fn etcd_knows_users_and_passwords() {
    let Some(mut server) = Server::start(Service::Etcd) else { return };
    let open = async |server: &Server, credentials: &str, path: &str| {
        open_url(server.url_with(credentials, path), LONG).await
    };
    let early = open(&server, "root:s3cret@", "").await.unwrap_err();
    assert!(detail(&early, &server).contains("leave the user and the password out"), "{early}");
    let before = open(&server, "", "").await.unwrap();
    for (path, json) in [
        ("/v3/auth/role/add", r#"{"name":"root"}"#),
        ("/v3/auth/user/add", r#"{"name":"root","password":"s3cret"}"#),
        ("/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("/v3/auth/role/add", r#"{"name":"jobs"}"#),
        // `job/` to `job0`, in base 64.
        (
            "/v3/auth/role/grant",
            r#"{"name":"jobs","perm":{"permType":"READWRITE","key":"am9iLw==","range_end":"am9iMA=="}}"#,
        ),
        ("/v3/auth/user/add", r#"{"name":"alice","password":"won/der"}"#),
        ("/v3/auth/user/grant", r#"{"user":"alice","role":"jobs"}"#),
        ("/v3/auth/enable", "{}"),
    ] {
        server.post(path, json);
    }
    let root = open(&server, "root:s3cret@", "").await.unwrap();
    let alice = open(&server, "alice:won%2Fder@", "/job").await.unwrap();
    alice.set("a", b"1").await.unwrap();
    assert_eq!(value(&*root, "job/a").await.unwrap(), b"1", "the path is a prefix");
    let names = keys(["b", "c"]);
    let (waited, set) = tokio::join!(alice.wait(&names, LONG), async {
        root.set("job/c", b"").await?;
        root.set("job/b", b"").await
    });
    set.unwrap();
    assert_eq!(waited.unwrap(), [b"", b""]);

    let elsewhere = open(&server, "alice:won%2Fder@", "").await.unwrap();
    let refused = [
        (before.set("a", b"").await.unwrap_err(), "give a user in the URL"),
        (open(&server, "root:wr0ng@", "").await.unwrap_err(), "check the user and the password"),
        (open(&server, "bob:s3cret@", "").await.unwrap_err(), "check the user and the password"),
        (elsewhere.set("a", b"").await.unwrap_err(), "grant the user a role"),
        (elsewhere.wait(&keys(["a"]), LONG).await.unwrap_err(), "grant the user a role"),
    ];
    for (error, text) in refused {
        assert!(detail(&error, &server).contains(text), "{error}");
        let text = format!("{error}{error:?}{root:?}{alice:?}");
        assert!(!text.contains("s3cret") && !text.contains("wr0ng") && !text.contains("won"), "{text}");
    }

    // The server forgets its tokens.
    server.kill();
    server.restart();
    root.set("job/a", b"2").await.unwrap();
    assert_eq!(alice.add("n", 1).await.unwrap(), 1);
}

#[cfg(feature = "etcd")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_outlives_a_compaction() {
    let Some(server) = Server::start(Service::Etcd) else { return };
    let store = open(&server, LONG).await;
    for round in 0..20 {
        store.set("k/2", &[round]).await.unwrap();
    }
    let names = keys(["k/1"]);
    let mut wait = store.wait(&names, LONG);
    assert!(timeout(&*runtime(), SHORT, &mut wait).await.is_err(), "it waits");
    server.post("/v3/kv/compaction", r#"{"revision":"20"}"#);
    let (waited, set) = tokio::join!(wait, store.set("k/1", b"1"));
    set.unwrap();
    assert_eq!(waited.unwrap(), [b"1"]);
}

/// Forwards connections to `to`. Holds the second request back that is made after `begin`, until `go_on`: a request for 128 keys
/// has more than `LARGE` bytes, and the next one follows its answer.
#[cfg(feature = "etcd")]
async fn hold_back(
    listener: tokio::net::TcpListener,
    to: std::net::SocketAddr,
    begin: &std::cell::Cell<bool>,
    held: futures::channel::oneshot::Sender<()>,
    go_on: futures::channel::oneshot::Receiver<()>,
) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    const LARGE: usize = 8 << 10;
    let (near, _) = listener.accept().await.unwrap();
    let far = tokio::net::TcpStream::connect(to).await.unwrap();
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (near.into_split(), far.into_split());
    let (asked, mut go_on, mut held) = (std::cell::Cell::new(0), go_on.fuse(), Some(held));
    let is_answered = std::cell::Cell::new(false);
    let requests = async {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
            if is_answered.get()
                && let Some(held) = held.take()
            {
                held.send(()).unwrap();
                (&mut go_on).await.unwrap();
            }
            asked.set(asked.get() + if begin.get() { count } else { 0 });
            to_server.write_all(&bytes[..count]).await.unwrap();
        }
    };
    let answers = async {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from_server.read(&mut bytes).await {
            is_answered.set(asked.get() > LARGE && count > LARGE / 2);
            to_client.write_all(&bytes[..count]).await.unwrap();
        }
    };
    tokio::join!(requests, answers);
}

/// A wait that needs two reads watches from before the first one.
#[cfg(feature = "etcd")]
#[tokio::test]
async fn a_wait_for_many_keys_misses_no_write_between_two_reads() {
    let Some(server) = Server::start(Service::Etcd) else { return };
    let direct = open(&server, LONG).await;
    let names: Vec<String> = (0..200).map(|at| format!("key/{at:03}/{}", "k".repeat(90))).collect();
    let (early, late) = (&names[7], &names[190]);
    for name in names.iter().filter(|name| *name != early && *name != late) {
        direct.set(name, b"1").await.unwrap();
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: tensorwire_collective::store::StoreUrl =
        format!("etcd://{}", listener.local_addr().unwrap()).parse().unwrap();
    let (held, on_held) = futures::channel::oneshot::channel();
    let (go_on, on_go_on) = futures::channel::oneshot::channel();
    let begin = std::cell::Cell::new(false);
    let forward = hold_back(listener, server.address, &begin, held, on_go_on);
    let waiting = async {
        let store = open_url(url, LONG).await.unwrap();
        begin.set(true);
        let write = async {
            on_held.await.unwrap();
            // The first read has found it missing, and the second one does not look for it.
            direct.set(early, b"early").await.unwrap();
            direct.set(late, b"late").await.unwrap();
            go_on.send(()).unwrap();
        };
        let clock = runtime();
        let (found, ()) = tokio::join!(timeout(&*clock, LONG / 2, store.wait(&names, LONG)), write);
        let found = found.expect("no write is missed").unwrap();
        assert_eq!((&*found[7], &*found[190]), (&b"early"[..], &b"late"[..]));
    };
    tokio::select! {
        () = forward => panic!("the connection ended"),
        () = waiting => {}
    }
}

//! The rules for any store that a rank serves, whichever processes reach its port.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    time::Duration,
};

use futures::{FutureExt, StreamExt, future, stream::FuturesUnordered};
use rustix::process::{Resource, getrlimit, setrlimit};
use tensorwire_collective::store::{MemoryLimits, Store, StoreError};
use tensorwire_fabric::timeout;
use tensorwire_protocol::wire::control::ControlFrame::StoreRequest;
use tensorwire_rendezvous::Tensor;
use tokio::{io::AsyncWriteExt, net::TcpStream};

use super::{
    LONG, SHORT, keys,
    member::Member,
    runtime, until, value,
    worker::{Serving, assert_full, builder, connect},
};
use crate::join_all::join_all;

/// The variable with the limits of a rank in a process of its own: open files, and bytes of the store.
const LIMITS: &str = "TENSORWIRE_TEST_SERVED_STORE";

/// The most memory of a process beside what is counted: code, heaps of threads, and a frame that is being decoded.
const BESIDE: usize = 32 << 20;

/// What a session takes that sends as much as it can and reads nothing: both directions' queues, and the requests that wait.
const SESSION: usize = 3 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "another test runs it in a process of its own"]
async fn serving_rank() {
    let Ok(limits) = env::var(LIMITS) else { return };
    let limits: Vec<u64> = limits.split(' ').map(|limit| limit.parse().unwrap()).collect();
    let &[files, bytes] = &*limits else { panic!("two limits") };
    set_files(files);
    let limits = MemoryLimits { bytes: usize::try_from(bytes).unwrap(), ..MemoryLimits::default() };
    let Serving { worker, store: _store } = Serving::start(limits).await;
    worker.publish("w", Tensor::from_values(worker.pool(), &[1], &[7u8]).unwrap()).unwrap();
    println!("@@{}", worker.address());
    // Until the parent ends.
    let (ended, end) = futures::channel::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        drop(ended);
    });
    end.await.unwrap_err();
}

fn set_files(files: u64) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(limit.maximum.map_or(files, |most| most.min(files)));
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// A rank in a process of its own. Killed when dropped.
struct Rank {
    process: Child,
    address: String,
}

impl Rank {
    fn start(files: u64, bytes: usize) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "store::served::serving_rank", "--ignored", "--nocapture"])
            .env(LIMITS, format!("{files} {bytes}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("@@")).expect("it serves");
        Self { process, address: line.split_once("@@").unwrap().1.to_owned() }
    }

    /// The most memory that it has had, in bytes.
    fn peak(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        1024 * peak.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Connections that have sent these bytes. The worker may close them before.
async fn strangers(to: &str, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let one = async |_| {
        let mut stream = TcpStream::connect(to).await.ok()?;
        let _ = stream.write_all(bytes).await;
        Some(stream)
    };
    join_all((0..count).map(one)).await.into_iter().flatten().collect()
}

async fn strangers_keep_nobody_out(bytes: &[u8]) {
    set_files(4096);
    let rank = Rank::start(256, 1 << 20);
    let member = connect(&rank.address).await.unwrap();
    member.set("rank/0", b"0").await.unwrap();
    let names = keys(["rank/1"]);
    let mut waiting = member.wait(&names, LONG);
    assert!((&mut waiting).now_or_never().is_none());
    let come = async {
        let mut idle = strangers(&rank.address, 500, bytes).await;
        idle.extend(strangers(&rank.address, 500, bytes).await);
        let newcomer =
            timeout(&*runtime(), LONG, connect(&rank.address)).await.expect("a newcomer is let in").unwrap();
        newcomer.set("rank/1", b"1").await.unwrap();
        idle
    };
    let (waited, idle) = tokio::join!(waiting, come);
    assert_eq!(waited.unwrap(), [b"1"], "a member that waits keeps its session");
    assert_eq!(value(&member, "rank/0").await.unwrap(), b"0");
    let worker = builder().start().await.unwrap();
    let tensor = worker.peer_at(&rank.address).await.unwrap().fetch("w").await.unwrap();
    assert_eq!(tensor.values::<u8>().unwrap(), [7]);
    worker.shutdown().await;
    drop(idle);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_a_thousand_silent_connections_keep_no_member_from_the_store_and_its_ranks_worker() {
    strangers_keep_nobody_out(b"").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_a_thousand_idle_clients_keep_no_member_from_the_store_and_its_ranks_worker() {
    // The preface of HTTP/2 and empty settings.
    strangers_keep_nobody_out(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    strangers_keep_nobody_out(b"PRI * HTTP/2.0\r\n").await;
}

/// Members that send `request` again and again, and read nothing, cost the worker no more memory than its limits, and others are
/// served meanwhile.
async fn stays_within_the_limit(request: Vec<u8>) {
    const LIMIT: usize = 16 << 20;
    const MEMBERS: usize = 16;
    let rank = Rank::start(1024, LIMIT);
    let member = connect(&rank.address).await.unwrap();
    for key in ["a", "b", "c", "d"] {
        member.set(key, &[1; 256 << 10]).await.unwrap();
    }
    let before = rank.peak();
    let hostile = join_all((0..MEMBERS).map(|_| Member::at(&rank.address))).await;
    let flood = hostile.iter().map(async |hostile| {
        for number in 0.. {
            hostile.send(StoreRequest { request: number, body: request.clone() }).await;
        }
    });
    let use_store = async {
        for round in 0..500 {
            let key = format!("rank/{round}");
            member.set(&key, &[0; 300]).await.unwrap();
            assert_eq!(member.wait(&[key], LONG).await.unwrap(), [[0; 300]]);
        }
        member.set("a", &[2; 256 << 10]).await.unwrap();
        assert_eq!(value(&member, "a").await.unwrap().len(), 256 << 10);
    };
    tokio::select! {
        // Not `Send`, which futures that are erased must be.
        _ = future::join_all(flood) => unreachable!(),
        () = use_store => {}
    }
    let more = rank.peak().saturating_sub(before);
    assert!(more < MEMBERS * SESSION + BESIDE, "{more} bytes more for {MEMBERS} members");
}

/// A request for `keys`, which waits for a minute if `waits`.
fn request(waits: bool, keys: &[&str]) -> Vec<u8> {
    let limit = LONG.as_micros() as u64;
    let request =
        if waits { postcard::to_stdvec(&(2u8, limit, keys)) } else { postcard::to_stdvec(&(1u8, keys)) };
    request.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_requests_that_wait_stay_within_the_limit() {
    let never = "n".repeat(1000);
    stays_within_the_limit(request(true, &[&*never; 60])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_unread_answers_stay_within_the_limit() {
    stays_within_the_limit(request(false, &["a", "b", "c", "d"])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_unread_answers_of_waits_stay_within_the_limit() {
    stays_within_the_limit(request(true, &["a", "b", "c", "d"])).await;
}

#[tokio::test]
async fn s4_waits_that_end_in_any_way_give_everything_back() {
    const ROUNDS: usize = 100;
    let serving = Serving::start(MemoryLimits { waits: 1, bytes: 4096, ..MemoryLimits::default() }).await;
    let (store, client) = (&serving.store, serving.connect().await);
    let never = keys(["never"]);
    let refused = async {
        until(|| store.waits() == 1).await;
        for _ in 0..ROUNDS {
            assert_full(client.wait(&never, LONG).await, "waits", 1);
        }
    };
    tokio::select! {
        waited = client.wait(&never, LONG) => panic!("{waited:?}"),
        () = refused => {}
    }
    until(|| store.waits() == 0).await;
    client.set("there", b"").await.unwrap();
    for _ in 0..ROUNDS {
        client.wait(&keys(["there"]), LONG).await.unwrap();
        client.wait(&never, Duration::ZERO).await.unwrap_err();
        assert!(client.wait(&never, LONG).now_or_never().is_none());
        // The server has read the request and its cancellation when it answers a later one.
        client.get(&never).await.unwrap();
        until(|| store.waits() == 0).await;
    }
    let error = client.wait(&vec!["k".repeat(1000); 3], SHORT).await.unwrap_err();
    assert!(matches!(error, StoreError::TimedOut { .. }), "{error}");

    // Requests that are refused otherwise.
    client.set("text", b"x").await.unwrap();
    for _ in 0..ROUNDS {
        assert_full(client.set("large", &[0; 4096]).await, "bytes", 4096);
        client.add("text", 1).await.unwrap_err();
    }
    client.set("large", &[0; 3000]).await.unwrap();
    assert_eq!(client.wait(&keys(["large"]), LONG).await.unwrap(), [[0; 3000]]);

    // What a session held comes back with its end.
    for _ in 0..10 {
        let gone = Member::of(&serving).await;
        gone.send(StoreRequest { request: 1, body: request(true, &["never"]) }).await;
        until(|| store.waits() == 1).await;
        drop(gone);
        until(|| store.waits() == 0).await;
    }
    assert!(matches!(client.wait(&never, SHORT).await, Err(StoreError::TimedOut { .. })));
}

/// A session has room for so many short waits. More are refused and change nothing, however the others end.
#[tokio::test]
async fn s4_waits_of_one_session_are_counted() {
    const ROOM: usize = 512;
    let serving = Serving::start(MemoryLimits::default()).await;
    let (store, client, other) = (&serving.store, serving.connect().await, serving.connect().await);
    for round in 0..3 {
        let key = keys([["first", "second", "third"][round]]);
        let mut waits: FuturesUnordered<_> = (0..ROOM + 100).map(|_| client.wait(&key, LONG)).collect();
        for _ in 0..100 {
            assert_full(waits.next().await.unwrap(), "waits", ROOM);
        }
        assert_eq!(store.waits(), ROOM);
        let (others, set) = tokio::join!(other.wait(&key, LONG), async {
            until(|| store.waits() == ROOM + 1).await;
            if round == 1 {
                // Dropped waits give their room back, too.
                waits.clear();
                until(|| store.waits() == 1).await;
            }
            store.set(&key[0], b"1").await
        });
        set.unwrap();
        assert_eq!(others.unwrap(), [b"1"]);
        while let Some(waited) = waits.next().await {
            assert_eq!(waited.unwrap(), [b"1"]);
        }
        assert_eq!(store.waits(), 0);
    }
}

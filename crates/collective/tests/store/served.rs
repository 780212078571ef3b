//! The rules for any store that a rank serves, whichever processes reach its port.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::Duration,
};

use futures::{FutureExt, future::join_all};
use rustix::process::{Resource, getrlimit, setrlimit};
use tensorwire_collective::store::{Store, StoreError, TcpLimits};
use tensorwire_fabric::{FabricKind, timeout};
use tensorwire_rendezvous::{Tensor, Worker};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    LONG, SHORT, keys, runtime,
    tcp::{assert_full, client_hello, connect, serve},
    until, value,
};

/// The variable with the limits of a rank in a process of its own: open files, bytes of the store, milliseconds for a request.
const LIMITS: &str = "TENSORWIRE_TEST_SERVED_STORE";

/// The most memory of a process beside what is counted: code, heaps of threads, and a frame that is being decoded.
const BESIDE: usize = 32 << 20;

async fn start_worker(name: &str) -> Worker {
    Worker::builder(name).require(FabricKind::TCP).start().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "another test runs it in a process of its own"]
async fn serving_rank() {
    let Ok(limits) = env::var(LIMITS) else { return };
    let limits: Vec<u64> = limits.split(' ').map(|limit| limit.parse().unwrap()).collect();
    let &[files, bytes, request] = &*limits else { panic!("three limits") };
    set_files(files);
    let worker = start_worker("rank_0").await;
    worker.publish("w", Tensor::from_values(worker.pool(), &[1], &[7u8]).unwrap()).unwrap();
    let bytes = usize::try_from(bytes).unwrap();
    let limits = TcpLimits { bytes, request: Duration::from_millis(request), ..TcpLimits::default() };
    let (_store, address) = serve(limits).await;
    println!("@@{address} {}", worker.address());
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
struct Serving {
    process: Child,
    store: SocketAddr,
    worker: String,
}

impl Serving {
    fn start(files: u64, bytes: usize, request: Duration) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "store::served::serving_rank", "--ignored", "--nocapture"])
            .env(LIMITS, format!("{files} {bytes} {}", request.as_millis()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("@@")).expect("it serves");
        let (_, addresses) = line.split_once("@@").unwrap();
        let (store, worker) = addresses.split_once(' ').unwrap();
        Self { process, store: store.parse().unwrap(), worker: worker.to_owned() }
    }

    /// The most memory that it has had, in bytes.
    fn peak(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        1024 * peak.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A request for the values of `count` keys of one letter.
fn get(count: u8) -> Vec<u8> {
    let keys: Vec<u8> = (0..count).flat_map(|key| [1, 0, b'a' + key]).collect();
    let length = 13 + keys.len() as u32;
    [&length.to_le_bytes()[..], &[0; 8], &[2], &u32::from(count).to_le_bytes(), &keys].concat()
}

/// Connections that have sent these bytes. The server may close them before.
async fn strangers(to: SocketAddr, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let one = async |_| {
        let mut stream = TcpStream::connect(to).await.ok()?;
        let _ = stream.write_all(bytes).await;
        Some(stream)
    };
    join_all((0..count).map(one)).await.into_iter().flatten().collect()
}

/// `request` is the server's limit for requests.
async fn idle_connections_keep_nobody_out(bytes: &[u8], request: Duration) {
    set_files(4096);
    let serving = Serving::start(256, 1 << 20, request);
    let member = connect(serving.store).await.unwrap();
    member.set("rank/0", b"0").await.unwrap();
    let names = keys(["rank/1"]);
    let mut waiting = member.wait(&names, LONG);
    assert!((&mut waiting).now_or_never().is_none());
    let mut idle = strangers(serving.store, 500, bytes).await;
    idle.extend(strangers(serving.store, 500, bytes).await);

    let clock = runtime();
    let newcomer = timeout(&*clock, LONG, async {
        loop {
            // It is full while all have just made a request.
            match connect(serving.store).await {
                Ok(newcomer) => return newcomer,
                Err(StoreError::Full { what: "connections", .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    let newcomer = newcomer.await.expect("a newcomer is let in");
    newcomer.set("rank/1", b"1").await.unwrap();
    assert_eq!(waiting.await.unwrap(), [b"1"], "a member that waits keeps its connection");
    assert_eq!(value(&member, "rank/0").await.unwrap(), b"0");
    let worker = start_worker("rank_1").await;
    let tensor = worker.peer_at(&serving.worker).await.unwrap().fetch("w").await.unwrap();
    assert_eq!(tensor.values::<u8>().unwrap(), [7]);
    worker.shutdown().await;
    drop(idle);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_a_thousand_silent_connections_keep_no_member_from_the_store_and_its_ranks_worker() {
    idle_connections_keep_nobody_out(b"", LONG).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_a_thousand_idle_clients_keep_no_member_from_the_store_and_its_ranks_worker() {
    let hello = client_hello().await;
    idle_connections_keep_nobody_out(&hello, LONG).await;
    idle_connections_keep_nobody_out(&[&hello[..], &get(1)].concat(), Duration::from_millis(300)).await;
}

/// `strangers` cost the server no more memory than its limit, twice, and members of the group are served meanwhile.
async fn stays_within_the_limit(requests: &[u8]) {
    const LIMIT: usize = 16 << 20;
    let serving = Serving::start(1024, LIMIT, LONG);
    let member = connect(serving.store).await.unwrap();
    for key in ["a", "b", "c", "d"] {
        member.set(key, &vec![1; (1 << 20) - 16]).await.unwrap();
    }
    let before = serving.peak();
    let bytes = [&client_hello().await[..], requests].concat();
    let strangers = strangers(serving.store, 64, &bytes).await;
    for round in 0..2000 {
        let key = format!("rank/{round}");
        member.set(&key, &[0; 300]).await.unwrap();
        assert_eq!(member.wait(&[key], LONG).await.unwrap(), [[0; 300]]);
    }
    member.set("a", &vec![2; 1 << 20]).await.unwrap();
    assert_eq!(value(&member, "a").await.unwrap().len(), 1 << 20);
    let more = serving.peak().saturating_sub(before);
    assert!(more < 2 * LIMIT + BESIDE, "{more} bytes more for {} strangers", strangers.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_half_sent_requests_stay_within_the_limit() {
    let longest = 4u32 << 20;
    let half = [&longest.to_le_bytes()[..], &vec![0; longest as usize - 1]].concat();
    stays_within_the_limit(&half).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_unread_answers_stay_within_the_limit() {
    // More than the sockets' buffers hold.
    stays_within_the_limit(&get(4).repeat(16)).await;
}

#[tokio::test]
async fn s4_waits_that_end_in_any_way_give_everything_back() {
    const ROUNDS: usize = 300;
    let limits = TcpLimits { waits: 1, bytes: 4096, ..TcpLimits::default() };
    let (store, address) = serve(limits).await;
    let client = connect(address).await.unwrap();
    let (never, long) = (keys(["never"]), vec!["k".repeat(1000); 4]);
    let mut waiting = client.wait(&never, LONG);
    assert!((&mut waiting).now_or_never().is_none());
    until(|| store.waits() == Some(1)).await;
    for _ in 0..ROUNDS {
        assert_full(client.wait(&never, LONG).await, "waits", 1);
        assert_full(client.wait(&long, LONG).await, "bytes", 4096);
    }
    drop(waiting);
    until(|| store.waits() == Some(0)).await;
    client.set("there", b"").await.unwrap();
    for _ in 0..ROUNDS {
        client.wait(&keys(["there"]), LONG).await.unwrap();
        client.wait(&never, Duration::ZERO).await.unwrap_err();
        assert!(client.wait(&never, LONG).now_or_never().is_none());
        until(|| store.waits() == Some(0)).await;
    }
    let error = client.wait(&long[..3], SHORT).await.unwrap_err();
    assert!(matches!(error, StoreError::TimedOut { .. }), "{error}");

    // Requests that are refused otherwise.
    client.set("text", b"x").await.unwrap();
    for _ in 0..ROUNDS {
        assert_full(client.set("large", &[0; 4096]).await, "bytes", 4096);
        client.add("text", 1).await.unwrap_err();
    }
    client.set("large", &[0; 3000]).await.unwrap();
    assert_eq!(client.wait(&keys(["large"]), LONG).await.unwrap(), [[0; 3000]]);

    // What a connection held comes back with its end.
    for _ in 0..ROUNDS {
        let gone = connect(address).await.unwrap();
        assert!(gone.wait(&never, LONG).now_or_never().is_none());
        drop(gone);
    }
    until(|| store.connections() == Some(1) && store.waits() == Some(0)).await;
    assert!(matches!(client.wait(&long[..3], SHORT).await, Err(StoreError::TimedOut { .. })));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&client_hello().await).await.unwrap();
    stream.read_exact(&mut [0; 24]).await.unwrap();
}

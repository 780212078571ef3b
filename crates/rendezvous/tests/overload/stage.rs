//! What every test of overload works with: a worker, honest peers of it, and what it takes.

use std::{
    env, fs,
    path::Path,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, Worker, WorkerBuilder, control::Secret};

use crate::{
    harness::{STEP, step},
    rdma::patient,
};

pub(crate) const SERVER: &str = "/job:server/replica:0/task:0";
pub(crate) const HONEST: &str = "/job:honest/replica:0/task:0";

/// What every worker here knows.
pub(crate) const SECRET: &str = "overload-Zk81-for-these-tests";

/// What is fetched.
pub(crate) const BYTES: usize = 20_000;

/// `plain`, unless the environment sets another size.
pub(crate) fn size(variable: &str, plain: usize) -> usize {
    env::var(variable).map_or(plain, |text| text.parse().unwrap())
}

/// Tests of one process take turns: they look at all that it holds.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As many descriptors as this process may have at all.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

/// A worker that takes little memory for itself.
pub(crate) fn builder(name: &str, kind: FabricKind) -> WorkerBuilder {
    let secret = Secret::new(SECRET).unwrap();
    Worker::builder(name)
        .require(kind)
        .secret(secret)
        .memory(|memory| memory.block_bytes = 128 << 10)
        .timeout(Duration::from_secs(30))
}

pub(crate) fn publish(server: &Worker, fill: u8) {
    let mut buffer = server.pool().try_alloc(BYTES).unwrap();
    buffer.fill(fill);
    server.publish("x", Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()).unwrap();
}

/// Fetches once over whatever connection there is, or a new one.
pub(crate) async fn fetch(client: &Worker, address: &str, fill: u8) -> Result<(), String> {
    let peer = client.peer_at(address).await.map_err(|error| error.to_string())?;
    let fetched = peer.fetch("x").await.map_err(|error| error.to_string())?;
    assert!(fetched.bytes().len() == BYTES && fetched.bytes().iter().all(|&byte| byte == fill));
    Ok(())
}

/// An honest peer that is new: starts, connects, fetches, and leaves.
pub(crate) async fn one_honest_visit(address: &str, kind: FabricKind) {
    static VISITS: AtomicUsize = AtomicUsize::new(0);
    let name = format!("/job:visitor/replica:0/task:{}", VISITS.fetch_add(1, Ordering::Relaxed));
    let visitor = builder(&name, kind).start().await.unwrap();
    step("a visit", fetch(&visitor, address, 1)).await.unwrap();
    visitor.shutdown().await;
}

/// What this process holds.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    bytes: u64,
    /// What they lead to.
    descriptors: Vec<String>,
}

pub(crate) fn held() -> Held {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let bytes = line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
    Held { bytes, descriptors: own_descriptors() }
}

impl Held {
    /// What is held now may be so much more than then.
    pub(crate) fn assert_at_most(&self, bytes: u64, descriptors: usize, when: &str) {
        let now = held();
        let more = now.bytes.saturating_sub(self.bytes);
        let (open, opened) = (now.descriptors.len(), self.descriptors.len() as i64);
        println!("{when}: {} KiB and {} descriptors more", more >> 10, open as i64 - opened);
        assert!(cfg!(asan) || more <= bytes, "{when}: {more} bytes more are resident, {bytes} may be");
        assert!(open <= self.descriptors.len() + descriptors, "{when}: {opened} were open, now {open}");
    }

    /// Waits until no more descriptors are open than then.
    pub(crate) async fn until_closed(&self, when: &str) {
        let runtime = TokioRuntime::current().unwrap();
        let limit = runtime.now() + patient(STEP);
        while own_descriptors().len() > self.descriptors.len() {
            let open = own_descriptors();
            let times = |links: &[String], link: &String| links.iter().filter(|other| *other == link).count();
            let is_new = |link: &&String| times(&open, link) > times(&self.descriptors, link);
            let new: Vec<_> = open.iter().filter(is_new).collect();
            assert!(runtime.now() < limit, "{when}: still open: {new:?}, {:?}", lines_of(&new));
            runtime.sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Waits until `done`.
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let runtime = TokioRuntime::current().unwrap();
    let waited = async {
        while !done() {
            runtime.sleep(Duration::from_millis(2)).await;
        }
    };
    step(what, waited).await;
}

/// The kernel's figures of these sockets.
fn lines_of(sockets: &[&String]) -> Vec<String> {
    let tables = ["tcp", "unix"].map(|table| fs::read_to_string(format!("/proc/self/net/{table}")).unwrap());
    let inodes: Vec<&str> =
        sockets.iter().map(|link| link.trim_matches(|it: char| !it.is_ascii_digit())).collect();
    let is_of = |line: &&str| line.split_whitespace().any(|column| inodes.contains(&column));
    tables.iter().flat_map(|table| table.lines().filter(is_of)).map(str::to_owned).collect()
}

/// The ports that this process listens on, but for that of `address`.
pub(crate) fn other_ports(address: &str) -> Vec<u16> {
    let known: u16 = address.rsplit(':').next().unwrap().parse().unwrap();
    let own = own_descriptors();
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let listening = table.lines().skip(1).filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let is_ours = columns[3] == "0A" && own.contains(&format!("socket:[{}]", columns[9]));
        is_ours.then(|| u16::from_str_radix(columns[1].rsplit(':').next().unwrap(), 16).unwrap())
    });
    listening.filter(|&port| port != known).collect()
}

fn own_descriptors() -> Vec<String> {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap();
    let links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let links = links.map(|link| Path::to_string_lossy(&link).into_owned());
    // Pools keep their blocks for what comes next: these are memory, and stay below the pools' caps.
    links.filter(|link| !link.starts_with("/memfd:tensorwire-block")).collect()
}

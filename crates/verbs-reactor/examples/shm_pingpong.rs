//! Measures the shared-memory fabric between two processes, with each limit measured in the same run:
//!
//! - half a round trip of an 8-byte write with immediate, both ends waiting as the second word says, against two bare processes that
//!   ring each other's eventfd and wait in epoll;
//! - writes of 16 MiB and 1 MiB against memcpy.
//!
//! `cargo run --release -p tensorwire-verbs-reactor --example shm_pingpong [one-cpu|two-cpus|free] [sleep|adaptive|busy]`

#![allow(clippy::unwrap_used, clippy::expect_used)] // a measurement that cannot be made should say so and stop

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    os::fd::RawFd,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use memory::{
    Block, BlockVisitor, Buf, Granted, Pool, PoolConfig, VisitError,
    copy::{CopyReason, copy_bytes},
};
use verbs_reactor::{
    Access, ConnectParams, ConnectionData, Domain, Fabric, Immediate, QueuePair, QueuePairConfig,
    RegionGeneration, RegionId, RemoteRange, RemoteRegion, Role, Runtime, TokioRuntime, Wait, shm::ShmFabric,
};

const ROUNDS: usize = 7;
const TRIPS: u32 = 20_000;
const LARGE: usize = 16 << 20;
const MEDIUM: usize = 1 << 20;
const CHILD: &str = "SHM_PINGPONG_CHILD";
const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 16, receive_depth: 64 };

fn main() {
    let placement = env::args().nth(1).unwrap_or_default();
    let child = env::var(CHILD).is_ok();
    match placement.as_str() {
        "one-cpu" => pin(0),
        "two-cpus" => pin(usize::from(child)),
        _ => {}
    }
    let wait: Wait = env::args().nth(2).map_or(Wait::Sleep, |word| word.parse().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let task = if child {
        runtime.spawn(echo(wait))
    } else {
        println!("placement: {}, wait: {wait:?}", if placement.is_empty() { "free" } else { &placement });
        runtime.spawn(measure(placement, wait))
    };
    runtime.block_on(task).unwrap();
}

/// One process's memory and connection.
struct End {
    queue_pair: QueuePair,
    source: Pool,
    /// 8 bytes and 16 MiB lent to the other process.
    lent: [Granted; 2],
    /// The same of the other process.
    theirs: [RemoteRange; 2],
    clock: Arc<dyn Runtime>,
}

#[derive(Debug)]
struct Registrar(Arc<dyn Domain>, Access, Mutex<Vec<RemoteRegion>>);

impl BlockVisitor for Registrar {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        let region = self.0.register(block, self.1).map_err(|error| VisitError(Arc::new(error)))?;
        self.2.lock().unwrap().push(region);
        Ok(())
    }
}

impl End {
    /// Connects over lines of text: each process writes one and reads the other's.
    async fn connect(role: Role, wait: Wait, mut write: impl Write, mut read: impl BufRead) -> Self {
        let clock: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
        let domain = ShmFabric::new(clock.clone()).unwrap().with_wait(wait).open_domain().unwrap();
        let pool = |name, access| {
            let config = PoolConfig { block_bytes: 3 * LARGE, ..PoolConfig::new(name) };
            let pool = Pool::new(config).unwrap();
            let registrar = Arc::new(Registrar(domain.clone(), access, Mutex::default()));
            pool.add_visitor(registrar.clone()).unwrap();
            (pool, registrar)
        };
        let (source, _) = pool("source", Access::LOCAL);
        let (receive, registrar) = pool("receive", Access::RECEIVE);
        let lent = [8, LARGE].map(|length| {
            let mut buffer = receive.try_alloc(length).unwrap();
            buffer.fill(1);
            buffer.grant()
        });
        let region = registrar.2.lock().unwrap()[0];
        let prepared = domain.prepare(DEPTHS).unwrap();
        let mut line: String =
            prepared.connection_data().0.iter().map(|byte| format!("{byte:02x}")).collect();
        let numbers = [region.generation.0, region.key, lent[0].offset() as u32, lent[1].offset() as u32];
        for number in numbers {
            line.push_str(&format!(" {number}"));
        }
        writeln!(write, "{line}").unwrap();
        write.flush().unwrap();
        let mut answer = String::new();
        read.read_line(&mut answer).unwrap();
        let (peer, region, theirs) = parse(&answer, region.length);
        let params = ConnectParams { peer, role, peer_host: None, limit: Duration::from_secs(5) };
        let queue_pair = prepared.connect(params).await.unwrap();
        queue_pair.add_remote_region(region);
        Self { queue_pair, source, lent, theirs, clock }
    }

    fn filled(&self, length: usize) -> Buf {
        let mut buffer = self.source.try_alloc(length).unwrap();
        buffer.fill(7);
        buffer.freeze()
    }

    async fn arrival(&self) {
        self.queue_pair.next_arrival().await.unwrap();
    }

    async fn write(&self, bytes: &Buf) {
        let whole = self.theirs[usize::from(bytes.len() > 8)];
        let range = RemoteRange { length: bytes.len() as u64, ..whole };
        self.queue_pair.write_imm(bytes.clone(), range, Immediate(0)).await.unwrap();
    }
}

fn parse(line: &str, length: u64) -> (ConnectionData, RemoteRegion, [RemoteRange; 2]) {
    let mut words = line.split_whitespace();
    let hex = words.next().unwrap();
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let data = (0..hex.len()).step_by(2).map(byte).collect();
    let numbers: Vec<u32> = words.map(|word| word.parse().unwrap()).collect();
    let (region, generation) = (RegionId(0), RegionGeneration(numbers[0]));
    let remote = RemoteRegion { region, generation, base: 0, length, key: numbers[1] };
    let range = |offset: u32, length: usize| RemoteRange {
        region,
        generation,
        offset: u64::from(offset),
        length: length as u64,
    };
    (ConnectionData(data), remote, [range(numbers[2], 8), range(numbers[3], LARGE)])
}

/// The child: answers as the parent needs it, in the parent's order.
async fn echo(wait: Wait) {
    let (mine, theirs) = bells();
    let epoll = epoll(mine);
    let end = End::connect(Role::Dialer, wait, io::stdout(), BufReader::new(io::stdin())).await;
    let small = end.filled(8);
    for _ in 0..ROUNDS {
        for _ in 0..TRIPS {
            await_bell(epoll);
            ring(theirs);
        }
        for _ in 0..TRIPS {
            end.arrival().await;
            end.write(&small).await;
        }
    }
    // The large writes need nothing but a runtime that polls: the driver executes them.
    while end.queue_pair.next_arrival().await.is_ok() {}
}

async fn measure(placement: String, wait: Wait) {
    make_bells();
    let (mine, theirs) = bells();
    // Registered before the child runs: an edge must not be missed, nor an old count seen as one.
    let epoll = epoll(mine);
    let mut child = spawn(&placement, wait);
    let (write, read) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let end = End::connect(Role::Acceptor, wait, write, read).await;
    latency(&end, epoll, theirs).await;
    bandwidth(&end, LARGE, 1).await;
    bandwidth(&end, MEDIUM, 4).await;
    println!("lent: {} + {} bytes", end.lent[0].length(), end.lent[1].length());
    end.queue_pair.close().await;
    child.wait().unwrap();
}

/// Round trips of 8 bytes against bare processes, in turns.
async fn latency(end: &End, epoll: RawFd, theirs: RawFd) {
    let small = end.filled(8);
    let half = |spent: Duration| spent.as_secs_f64() / f64::from(TRIPS) / 2.0 * 1e6;
    let (mut bare, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = end.clock.now();
        for _ in 0..TRIPS {
            ring(theirs);
            await_bell(epoll);
        }
        let middle = end.clock.now();
        for _ in 0..TRIPS {
            futures::future::join(end.write(&small), end.arrival()).await;
        }
        ours.push(half(end.clock.now() - middle));
        bare.push(half(middle - start));
        // The child's last write must have ended before this thread blocks in epoll again.
        end.clock.sleep(Duration::from_millis(5)).await;
    }
    let ratio = median(ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect());
    let (bare, ours) = (median(bare), median(ours));
    println!("8 B half round trip: {ours:.2} us; bare eventfd + epoll {bare:.2} us; {ratio:.2}x");
}

/// Writes of `length` bytes, `outstanding` at a time, against memcpy of as many, in turns.
async fn bandwidth(end: &End, length: usize, outstanding: usize) {
    let (bytes, repeats) = (end.filled(length), (256 << 20) / length);
    let mut local = end.source.try_alloc(length).unwrap();
    local.fill(1);
    let (mut ours, mut limit) = (Vec::new(), Vec::new());
    end.write(&bytes).await;
    for _ in 0..ROUNDS {
        let start = end.clock.now();
        for _ in 0..repeats / outstanding {
            futures::future::join_all((0..outstanding).map(|_| end.write(&bytes))).await;
        }
        let middle = end.clock.now();
        for _ in 0..repeats {
            copy_bytes(&mut local, &bytes, CopyReason::Local);
        }
        let gigabytes = (repeats * length) as f64 / 1e9;
        ours.push(gigabytes / (middle - start).as_secs_f64());
        limit.push(gigabytes / (end.clock.now() - middle).as_secs_f64());
    }
    let ratio = median(ours.iter().zip(&limit).map(|(ours, limit)| ours / limit).collect());
    let (ours, limit, kib) = (median(ours), median(limit), length >> 10);
    println!(
        "{kib} KiB writes, {outstanding} at a time: {ours:.2} GB/s; memcpy {limit:.2} GB/s; {ratio:.2}x"
    );
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn make_bells() {
    let bells: Vec<String> = (0..2).map(|_| eventfd().to_string()).collect();
    // SAFETY: nothing else runs yet in this process.
    unsafe { env::set_var("SHM_PINGPONG_BELLS", bells.join(" ")) };
}

fn spawn(placement: &str, wait: Wait) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([placement, &format!("{wait:?}").to_lowercase()])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command.spawn().unwrap()
}

/// The two inherited eventfds, own first.
fn bells() -> (RawFd, RawFd) {
    let bells = env::var("SHM_PINGPONG_BELLS").unwrap();
    let mut bells = bells.split(' ').map(|bell| bell.parse().unwrap());
    let (first, second) = (bells.next().unwrap(), bells.next().unwrap());
    if env::var(CHILD).is_ok() { (second, first) } else { (first, second) }
}

fn eventfd() -> RawFd {
    // SAFETY: no pointers are involved. Without EFD_CLOEXEC the child inherits it.
    unsafe { libc::eventfd(0, libc::EFD_NONBLOCK) }
}

fn epoll(bell: RawFd) -> RawFd {
    let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
    // SAFETY: `event` is readable for the call.
    unsafe {
        let epoll = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        assert_eq!(libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, bell, &raw mut event), 0);
        epoll
    }
}

fn await_bell(epoll: RawFd) {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: `event` is writable for the call.
    let ready = unsafe { libc::epoll_wait(epoll, &raw mut event, 1, 5000) };
    assert_eq!(ready, 1, "the other process did not answer");
}

fn ring(bell: RawFd) {
    let one = 1_u64;
    // SAFETY: `one` is readable for eight bytes.
    assert_eq!(unsafe { libc::write(bell, (&raw const one).cast(), 8) }, 8);
}

fn pin(cpu: usize) {
    // SAFETY: all-zero is an empty set, and `set` is valid for the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

//! The TCP fabric against a raw TCP stream, in one interleaved run of two processes.
//!
//! `cargo run --release -p tensorwire-verbs-reactor --example tcp_bandwidth [ROUNDS]`
//!
//! Prints, per size, the median bandwidth of both and the median ratio of a round; and half a round trip of an
//! 8-byte write with immediate against the same bytes over bare epoll, both sleeping. The raw stream is blocking,
//! with NODELAY and the same congestion control as the fabric's. The two processes run on CPU 0 and CPU 1.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a measurement: any failure ends it
#![allow(clippy::disallowed_methods)] // it reads the clock

use std::{
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::{ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use memory::{Block, BlockVisitor, Pool, PoolConfig, VisitError};
use verbs_reactor::{
    Access, ConnectParams, ConnectionData, Domain, Fabric, Immediate, Prepared, QueuePair, QueuePairConfig,
    RegionGeneration, RegionId, RemoteRange, RemoteRegion, Role, Runtime, TokioRuntime,
    tcp::{TcpConfig, TcpFabric},
};

const MIB: usize = 1 << 20;
const SIZES: [usize; 4] = [64 << 10, MIB, 16 * MIB, 64 * MIB];
/// Bytes of one measurement of bandwidth.
const TOTAL: usize = 512 * MIB;
const ROUND_TRIPS: usize = 5_000;
/// A header of the fabric and 8 bytes.
const MESSAGE: usize = 48;
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn main() {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("target") {
        pin(1);
        target();
    } else {
        let rounds = argument.and_then(|rounds| rounds.parse().ok()).unwrap_or(5);
        pin(0);
        source(rounds);
    }
}

/// The fabric's end and the raw stream of one process.
struct End {
    tokio: tokio::runtime::Runtime,
    queue_pair: QueuePair,
    domain: Arc<dyn Domain>,
    raw: TcpStream,
}

// ---- the process that writes ----

/// The other process: takes one order a line, answers one line.
struct Target {
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Target {
    fn say(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    fn hear(&mut self) -> String {
        read_line(&mut self.answers)
    }
}

fn source(rounds: usize) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let mut child = command
        .arg("target")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the other process");
    let answers = BufReader::new(child.stdout.take().unwrap());
    let mut target = Target { orders: child.stdin.take().unwrap(), answers };
    let end = connect_source(&mut target);
    for size in SIZES {
        let (mut raw, mut fabric) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            raw.push(raw_bandwidth(&end, &mut target, size));
            fabric.push(fabric_bandwidth(&end, &mut target, size));
        }
        report(&format!("{:>6} KiB, GB/s", size >> 10), &raw, &fabric);
    }
    let (mut raw, mut fabric) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        raw.push(raw_latency(&end, &mut target));
        fabric.push(fabric_latency(&end, &mut target));
    }
    report("half round trip of 8 B, µs", &raw, &fabric);
    drop(target);
    child.wait().unwrap();
}

fn report(what: &str, raw: &[f64], fabric: &[f64]) {
    let ratios: Vec<f64> = raw.iter().zip(fabric).map(|(raw, fabric)| fabric / raw).collect();
    let [low, .., high] = &sorted(&ratios)[..] else { panic!("at least two rounds") };
    println!(
        "{what:<28} raw {:6.2}   fabric {:6.2}   ratio {:.2} [{low:.2}..{high:.2}]",
        median(raw),
        median(fabric),
        median(&ratios)
    );
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn median(values: &[f64]) -> f64 {
    sorted(values)[values.len() / 2]
}

fn raw_bandwidth(end: &End, target: &mut Target, size: usize) -> f64 {
    let count = (TOTAL / size).max(4);
    let bytes = vec![7; size];
    target.say(&format!("raw {size} {count}"));
    target.hear();
    let start = Instant::now();
    for _ in 0..count {
        (&end.raw).write_all(&bytes).unwrap();
    }
    (&end.raw).read_exact(&mut [0]).unwrap();
    (size * count) as f64 / start.elapsed().as_nanos() as f64
}

fn fabric_bandwidth(end: &End, target: &mut Target, size: usize) -> f64 {
    let count = (TOTAL / size).max(4);
    let pool = registered(&end.domain, Access::LOCAL, size).0;
    let mut bytes = pool.try_alloc(size).unwrap();
    bytes.fill(7);
    let bytes = bytes.freeze();
    target.say(&format!("fabric {size} {count}"));
    let (region, range) = parse_range(&target.hear());
    end.queue_pair.add_remote_region(region);
    end.tokio.block_on(async {
        let start = Instant::now();
        for _ in 0..count {
            end.queue_pair.write_imm(bytes.clone(), range, Immediate(1)).await.unwrap();
        }
        end.queue_pair.next_arrival().await.unwrap();
        (size * count) as f64 / start.elapsed().as_nanos() as f64
    })
}

fn raw_latency(end: &End, target: &mut Target) -> f64 {
    target.say("raw-latency");
    target.hear();
    let epoll = Epoll::new(&end.raw);
    let mut message = [0; MESSAGE];
    let start = Instant::now();
    for _ in 0..ROUND_TRIPS {
        (&end.raw).write_all(&message).unwrap();
        epoll.read_exact(&end.raw, &mut message);
    }
    let took = start.elapsed();
    end.raw.set_nonblocking(false).unwrap();
    half_round_trip(took)
}

fn half_round_trip(took: Duration) -> f64 {
    took.as_nanos() as f64 / 1e3 / (2 * ROUND_TRIPS) as f64
}

fn fabric_latency(end: &End, target: &mut Target) -> f64 {
    let (pool, regions) = registered(&end.domain, Access::RECEIVE, 4096);
    let bytes = registered(&end.domain, Access::LOCAL, 4096).0.try_alloc(8).unwrap().freeze();
    let granted = pool.try_alloc(8).unwrap().grant();
    let mine = show_range(&regions, granted.offset(), 8);
    target.say(&format!("latency {mine}"));
    let (region, range) = parse_range(&target.hear());
    end.queue_pair.add_remote_region(region);
    end.tokio.block_on(async {
        let start = Instant::now();
        for _ in 0..ROUND_TRIPS {
            end.queue_pair.write_imm(bytes.clone(), range, Immediate(1)).await.unwrap();
            end.queue_pair.next_arrival().await.unwrap();
        }
        half_round_trip(start.elapsed())
    })
}

// ---- the process that is written to ----

fn target() {
    let mut orders = BufReader::new(io::stdin());
    let end = connect_target(&mut orders);
    loop {
        let order = read_line(&mut orders);
        match order.split(' ').collect::<Vec<_>>()[..] {
            ["raw", size, count] => take_raw(&end, size.parse().unwrap(), count.parse().unwrap()),
            ["fabric", size, count] => take_fabric(&end, size.parse().unwrap(), count.parse().unwrap()),
            ["raw-latency"] => echo_raw(&end),
            ["latency", range] => echo_fabric(&end, range),
            _ => return,
        }
    }
}

fn answer(line: &str) {
    println!("{line}");
    io::stdout().flush().unwrap();
}

fn take_raw(end: &End, size: usize, count: usize) {
    let mut bytes = vec![1; size];
    answer("ready");
    for _ in 0..count {
        (&end.raw).read_exact(&mut bytes).unwrap();
    }
    (&end.raw).write_all(&[0]).unwrap();
}

fn take_fabric(end: &End, size: usize, count: usize) {
    let (pool, regions) = registered(&end.domain, Access::RECEIVE, size);
    let mut bytes = pool.try_alloc(size).unwrap();
    bytes.fill(1);
    let granted = bytes.grant();
    answer(&show_range(&regions, granted.offset(), size));
    end.tokio.block_on(async {
        for _ in 0..count {
            end.queue_pair.next_arrival().await.unwrap();
        }
        end.queue_pair.notify(Immediate(2)).await.unwrap();
    });
    granted.end(memory::GrantEnd::Content).unwrap();
}

fn echo_raw(end: &End) {
    let epoll = Epoll::new(&end.raw);
    let mut message = [0; MESSAGE];
    answer("ready");
    for _ in 0..ROUND_TRIPS {
        epoll.read_exact(&end.raw, &mut message);
        (&end.raw).write_all(&message).unwrap();
    }
    end.raw.set_nonblocking(false).unwrap();
}

fn echo_fabric(end: &End, theirs: &str) {
    let (region, range) = parse_range(theirs);
    end.queue_pair.add_remote_region(region);
    let (pool, regions) = registered(&end.domain, Access::RECEIVE, 4096);
    let bytes = registered(&end.domain, Access::LOCAL, 4096).0.try_alloc(8).unwrap().freeze();
    let granted = pool.try_alloc(8).unwrap().grant();
    answer(&show_range(&regions, granted.offset(), 8));
    end.tokio.block_on(async {
        for _ in 0..ROUND_TRIPS {
            end.queue_pair.next_arrival().await.unwrap();
            end.queue_pair.write_imm(bytes.clone(), range, Immediate(1)).await.unwrap();
        }
    });
    granted.end(memory::GrantEnd::Content).unwrap();
}

// ---- both ----

fn prepared() -> (tokio::runtime::Runtime, Arc<dyn Domain>, Box<dyn Prepared>) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let runtime: Arc<dyn Runtime> = {
        let _inside = tokio.enter();
        Arc::new(TokioRuntime::current().unwrap())
    };
    let domain = TcpFabric::new(runtime, TcpConfig::default()).open_domain().unwrap();
    let depths = QueuePairConfig { send_depth: 64, receive_depth: 16_384 };
    let prepared = {
        let _inside = tokio.enter();
        domain.prepare(depths).unwrap()
    };
    (tokio, domain, prepared)
}

fn connect_source(target: &mut Target) -> End {
    let (tokio, domain, prepared) = prepared();
    target.say(&hex(&prepared.connection_data().0));
    let answer = target.hear();
    let (data, port) = answer.split_once(' ').unwrap();
    let queue_pair = connect(&tokio, prepared, data, Role::Dialer);
    let to = SocketAddr::new(HOST, port.parse().unwrap());
    let raw = tokio.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        use_cubic(&socket);
        socket.connect(to).await.unwrap()
    });
    End { raw: plain(raw.into_std().unwrap()), tokio, queue_pair, domain }
}

fn connect_target(orders: &mut impl BufRead) -> End {
    let (tokio, domain, prepared) = prepared();
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    use_cubic(&listener);
    let data = read_line(orders);
    answer(&format!("{} {}", hex(&prepared.connection_data().0), listener.local_addr().unwrap().port()));
    let queue_pair = connect(&tokio, prepared, &data, Role::Acceptor);
    let (raw, _) = listener.accept().unwrap();
    End { raw: plain(raw), tokio, queue_pair, domain }
}

fn connect(
    tokio: &tokio::runtime::Runtime,
    prepared: Box<dyn Prepared>,
    peer: &str,
    role: Role,
) -> QueuePair {
    let peer = ConnectionData(unhex(peer));
    let params = ConnectParams { peer, role, peer_host: None, limit: Duration::from_secs(5) };
    tokio.block_on(prepared.connect(params)).unwrap()
}

fn plain(stream: TcpStream) -> TcpStream {
    stream.set_nonblocking(false).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// The regions of one pool.
#[derive(Debug)]
struct Regions {
    domain: Arc<dyn Domain>,
    access: Access,
    last: Mutex<Option<RemoteRegion>>,
}

impl BlockVisitor for Regions {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        *self.last.lock().unwrap() = Some(self.domain.register(block, self.access).unwrap());
        Ok(())
    }
}

fn registered(domain: &Arc<dyn Domain>, access: Access, bytes: usize) -> (Pool, Arc<Regions>) {
    let pool = Pool::new(PoolConfig { block_bytes: bytes, ..PoolConfig::new("measured") }).unwrap();
    let regions = Arc::new(Regions { domain: domain.clone(), access, last: Mutex::default() });
    pool.add_visitor(regions.clone()).unwrap();
    (pool, regions)
}

fn show_range(regions: &Regions, offset: usize, length: usize) -> String {
    let region = regions.last.lock().unwrap().unwrap();
    let (id, generation) = (region.region.0, region.generation.0);
    format!("{id}/{generation}/{}/{}/{offset}/{length}", region.length, region.key)
}

fn parse_range(text: &str) -> (RemoteRegion, RemoteRange) {
    let numbers: Vec<u64> = text.split('/').map(|number| number.parse().unwrap()).collect();
    let [id, generation, region_length, key, offset, length] = numbers[..] else { panic!("{text}") };
    let (region, generation) = (RegionId(id as u32), RegionGeneration(generation as u32));
    (
        RemoteRegion { region, generation, base: 0, length: region_length, key: key as u32 },
        RemoteRange { region, generation, offset, length },
    )
}

fn read_line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Bare epoll on one stream, edge-triggered.
struct Epoll(OwnedFd);

impl Epoll {
    fn new(stream: &TcpStream) -> Self {
        stream.set_nonblocking(true).unwrap();
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
        // SAFETY: the new descriptor is ours alone, and `event` outlives the call that reads it.
        unsafe {
            let epoll = OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC));
            let failed =
                libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, stream.as_raw_fd(), &raw mut event);
            assert_eq!(failed, 0);
            Self(epoll)
        }
    }

    fn read_exact(&self, mut stream: &TcpStream, into: &mut [u8]) {
        let mut read = 0;
        while read < into.len() {
            match stream.read(&mut into[read..]) {
                Ok(0) => panic!("the other process ended"),
                Ok(bytes) => read += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn wait(&self) {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: `event` is writable for the one event that is asked for.
        unsafe { libc::epoll_wait(self.0.as_raw_fd(), &raw mut event, 1, -1) };
    }
}

fn use_cubic(socket: &impl AsRawFd) {
    let name = b"cubic";
    // SAFETY: the pointer and the length are those of `name`, which the call only reads.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_ptr().cast(),
            name.len() as libc::socklen_t,
        )
    };
}

fn pin(cpu: usize) {
    // SAFETY: an all-zero set is valid, and the call only reads it. Best effort: one CPU is fine too.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

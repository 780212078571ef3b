//! Checks the verbs fabric between two RDMA devices, through the public API alone: data, order, splitting,
//! back-pressure, and every way a connection ends. Run in the Soft-RoCE machine by `scripts/rxe-vm/spike`.
//!
//! usage: `verbs_spike DEVICE DEVICE` (for example `rxe1 rxe2`). Prints one line for each check and ends with
//! status 1 if one failed.

use std::{
    error::Error,
    future::Future,
    io::{BufRead, BufReader, Write},
    process::{Child, Command, ExitCode, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::{join, join_all};
use memory::{
    Block, BlockId, BlockVisitor, Buf, GrantEnd, Granted, Pool, PoolConfig, VisitError,
    copy::{CopyReason, copy_bytes},
};
use verbs_reactor::{
    Access, Arrival, ConnectParams, ConnectionData, Domain, Fabric, FabricError, Immediate, LossCause,
    PeerViolation, QueuePair, QueuePairConfig, RegionGeneration, RegionId, RemoteRange, RemoteRegion, Role,
    Runtime, TokioRuntime, timeout,
    verbs::{Availability, VerbsFabric, VerbsSettings},
};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const LIMIT: Duration = Duration::from_secs(60);
const CONFIG: QueuePairConfig = QueuePairConfig { send_depth: 8, receive_depth: 8 };
const MIB: usize = 1 << 20;

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+).into());
        }
    };
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match (&runtime, arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice()) {
        (Err(error), _) => Err(error.to_string().into()),
        (Ok(runtime), ["victim", device]) => runtime.block_on(victim(device)),
        (Ok(runtime), [one, other]) => runtime.block_on(checks(one, other)),
        _ => Err("usage: verbs_spike DEVICE DEVICE".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("FAIL {error}");
            ExitCode::FAILURE
        }
    }
}

async fn checks(one: &str, other: &str) -> Outcome {
    let runtime = current()?;
    let Availability::Devices(devices) = Availability::probe() else {
        return Err(format!("no RDMA here: {:?}", Availability::probe()).into());
    };
    println!("devices: {}", devices.join(", "));
    let (here, there) = (Side::open(one)?, Side::open(other)?);
    println!("from {} ({}) to {} ({})", one, here.fabric.source().gid, other, there.fabric.source().gid);

    let mut failed = 0;
    let mut check = async |name: &str, check: &mut (dyn Future<Output = Outcome> + Unpin)| {
        let outcome = timeout(&*runtime, LIMIT, check).await.unwrap_or_else(|elapsed| Err(elapsed.into()));
        match outcome {
            Ok(()) => println!("PASS {name}"),
            Err(error) => {
                failed += 1;
                println!("FAIL {name}: {error}");
            }
        }
    };
    let (here, there) = (&here, &there);
    check("a write with immediate arrives whole", &mut Box::pin(writes_arrive(here, there))).await;
    check("waiting sleeps on the completion channel", &mut Box::pin(waiting_sleeps(here, there))).await;
    check("plain writes are visible after a later immediate", &mut Box::pin(plain_writes(here, there))).await;
    check("writes longer than a message are split", &mut Box::pin(long_writes(here, there))).await;
    check("a full send queue makes writes wait", &mut Box::pin(back_pressure(here, there))).await;
    check("a dropped future's write lands and frees its bytes", &mut Box::pin(dropped(here, there))).await;
    check("a refused request touches nothing but itself", &mut Box::pin(local_refusals(here, there))).await;
    check("a wrong remote key ends its connection alone", &mut Box::pin(wrong_key(here, there))).await;
    check("an immediate without a receive ends both sides", &mut Box::pin(overrun(here, there))).await;
    check("closing drains, frees grants and tells the peer", &mut Box::pin(close(here, there))).await;
    check("connecting to nobody times out", &mut Box::pin(nobody(here, there))).await;
    check("a killed peer is lost", &mut Box::pin(killed_peer(here, other))).await;
    ensure!(failed == 0, "{failed} checks failed");
    Ok(())
}

/// A device with a domain, memory to send from and memory to lend.
struct Side {
    runtime: Arc<TokioRuntime>,
    fabric: VerbsFabric,
    domain: Arc<dyn Domain>,
    sources: Pool,
    destinations: Pool,
    announced: Arc<Announcer>,
}

/// Registers each block of a pool and keeps what peers must know of it.
#[derive(Debug)]
struct Announcer {
    domain: Arc<dyn Domain>,
    access: Access,
    regions: Mutex<Vec<(BlockId, RemoteRegion)>>,
}

impl BlockVisitor for Announcer {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        let region = self.domain.register(block, self.access).map_err(|error| VisitError(Arc::new(error)))?;
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).push((block.id(), region));
        Ok(())
    }
}

fn current() -> Outcome<Arc<TokioRuntime>> {
    Ok(Arc::new(TokioRuntime::current().ok_or("not on a tokio runtime")?))
}

impl Side {
    fn open(device: &str) -> Outcome<Self> {
        let runtime = current()?;
        let settings = VerbsSettings { device: Some(device.to_owned()), ..VerbsSettings::default() };
        let fabric = VerbsFabric::open(runtime.clone(), &settings)?;
        let domain = fabric.open_domain()?;
        let (sources, _) = pool("source", &domain, Access::LOCAL)?;
        let (destinations, announced) = pool("receive", &domain, Access::RECEIVE)?;
        Ok(Self { runtime, fabric, domain, sources, destinations, announced })
    }

    fn pattern(&self, length: usize, seed: u8) -> Outcome<Buf> {
        let (mut buffer, pattern) = (self.sources.try_alloc(length)?, pattern(seed));
        for chunk in buffer.chunks_mut(pattern.len()) {
            copy_bytes(chunk, &pattern, CopyReason::Import);
        }
        Ok(buffer.freeze())
    }

    /// Memory lent to the peer, zeroed, and how the peer names it.
    fn lend(&self, length: usize) -> Outcome<(Granted, RemoteRange)> {
        let mut buffer = self.destinations.try_alloc(length)?;
        buffer.fill(0);
        let granted = buffer.grant();
        let block = granted.block().map(Block::id).ok_or("an empty grant")?;
        let regions = self.announced.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, region) = regions.iter().find(|(id, _)| *id == block).ok_or("a block without a region")?;
        let range = RemoteRange {
            region: region.region,
            generation: region.generation,
            offset: granted.offset() as u64,
            length: length as u64,
        };
        Ok((granted, range))
    }

    fn regions(&self) -> Vec<RemoteRegion> {
        let regions = self.announced.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.iter().map(|(_, region)| *region).collect()
    }
}

fn pool(name: &'static str, domain: &Arc<dyn Domain>, access: Access) -> Outcome<(Pool, Arc<Announcer>)> {
    let pool = Pool::new(PoolConfig { block_bytes: 80 * MIB, ..PoolConfig::new(name) })?;
    let announcer = Arc::new(Announcer { domain: domain.clone(), access, regions: Mutex::default() });
    pool.add_visitor(announcer.clone())?;
    drop(pool.try_alloc(64)?); // makes the block, so that it is announced before anyone connects
    Ok((pool, announcer))
}

/// What a test writes, again and again: of a length that no piece or page is a multiple of.
fn pattern(seed: u8) -> Vec<u8> {
    (0..65_521_u32).map(|index| (index.wrapping_mul(7) ^ (index >> 9)) as u8 ^ seed).collect()
}

/// Ends the grant and compares what landed.
fn expect_landed(granted: Granted, length: usize, seed: u8) -> Outcome {
    let (landed, pattern) = (granted.end(GrantEnd::Content)?, pattern(seed));
    ensure!(landed.len() == length, "{} bytes instead of {length}", landed.len());
    for (number, chunk) in landed.chunks(pattern.len()).enumerate() {
        ensure!(chunk == &pattern[..chunk.len()], "chunk {number} of {length} bytes differs");
    }
    Ok(())
}

/// Connects the two sides; each knows the other's regions then.
async fn connect(here: &Side, there: &Side, config: QueuePairConfig) -> Outcome<(QueuePair, QueuePair)> {
    let (dialer, acceptor) = (here.domain.prepare(config)?, there.domain.prepare(config)?);
    let (to_acceptor, to_dialer) = (acceptor.connection_data(), dialer.connection_data());
    let params = |peer, role| ConnectParams { peer, role, peer_host: None, limit: Duration::from_secs(20) };
    let dial = dialer.connect(params(to_acceptor, Role::Dialer));
    let accept = acceptor.connect(params(to_dialer, Role::Acceptor));
    let (dialer, acceptor) = join(dial, accept).await;
    let (dialer, acceptor) = (dialer?, acceptor?);
    there.regions().into_iter().for_each(|region| dialer.add_remote_region(region));
    here.regions().into_iter().for_each(|region| acceptor.add_remote_region(region));
    Ok((dialer, acceptor))
}

async fn close_both((one, other): (QueuePair, QueuePair)) {
    join(one.close(), other.close()).await;
}

async fn writes_arrive(here: &Side, there: &Side) -> Outcome {
    let (dialer, acceptor) = connect(here, there, CONFIG).await?;
    for (seed, length) in [1, 8, 64, 65, 4096, 100_000].into_iter().enumerate() {
        let seed = u8::try_from(seed)?;
        let (granted, range) = there.lend(length)?;
        let immediate = Immediate(0xABCD_0000 | u32::from(seed));
        let write = dialer.write_imm(here.pattern(length, seed)?, range, immediate);
        let (written, arrival) = join(write, acceptor.next_arrival()).await;
        written?;
        let expected = Arrival::Immediate { immediate, length: length as u64 };
        ensure!(arrival.as_ref().is_ok_and(|arrival| *arrival == expected), "arrived: {arrival:?}");
        expect_landed(granted, length, seed)?;
    }
    // And back.
    let (granted, range) = here.lend(4096)?;
    let write = acceptor.write_imm(there.pattern(4096, 9)?, range, Immediate(9));
    let (written, arrival) = join(write, dialer.next_arrival()).await;
    written?;
    arrival?;
    expect_landed(granted, 4096, 9)?;
    close_both((dialer, acceptor)).await;
    Ok(())
}

async fn waiting_sleeps(here: &Side, there: &Side) -> Outcome {
    let (dialer, acceptor) = connect(here, there, CONFIG).await?;
    let before = cpu_ticks()?;
    let late = async {
        here.runtime.sleep(Duration::from_secs(2)).await;
        dialer.notify(Immediate(1)).await
    };
    let (sent, arrival) = join(late, acceptor.next_arrival()).await;
    sent?;
    arrival?;
    let spent = cpu_ticks()? - before;
    ensure!(spent <= 20, "{spent} of 200 clock ticks were spent while waiting 2 s");
    close_both((dialer, acceptor)).await;
    Ok(())
}

/// Processor time of this process, in hundredths of a second.
fn cpu_ticks() -> Outcome<u64> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    let fields = text.rsplit_once(')').ok_or("no name in /proc/self/stat")?.1;
    let number =
        |index: usize| fields.split_whitespace().nth(index).and_then(|field| field.parse::<u64>().ok());
    Ok(number(11).zip(number(12)).map(|(user, system)| user + system).ok_or("no times in /proc/self/stat")?)
}

async fn plain_writes(here: &Side, there: &Side) -> Outcome {
    let (dialer, acceptor) = connect(here, there, CONFIG).await?;
    let mut lent = Vec::new();
    let mut writes = Vec::new();
    for seed in 0..4 {
        let (granted, range) = there.lend(10_000)?;
        lent.push((granted, seed));
        writes.push(dialer.write(here.pattern(10_000, seed)?, range));
    }
    writes.push(dialer.notify(Immediate(77)));
    let (written, arrival) = join(join_all(writes), acceptor.next_arrival()).await;
    written.into_iter().collect::<Result<Vec<()>, _>>()?;
    let expected = Arrival::Immediate { immediate: Immediate(77), length: 0 };
    ensure!(arrival.as_ref().is_ok_and(|arrival| *arrival == expected), "arrived: {arrival:?}");
    for (granted, seed) in lent {
        expect_landed(granted, 10_000, seed)?;
    }
    close_both((dialer, acceptor)).await;
    Ok(())
}

async fn long_writes(here: &Side, there: &Side) -> Outcome {
    let pair = connect(here, there, CONFIG).await?;
    let piece = usize::try_from(here.fabric.capabilities().piece_bytes_max)?;
    ensure!(piece == 8 * MIB, "a piece is {piece} bytes");
    for (seed, length) in [piece - 1, piece, piece + 1, 64 * MIB].into_iter().enumerate() {
        let seed = u8::try_from(seed)?;
        let (granted, range) = there.lend(length)?;
        let write = pair.0.write_imm(here.pattern(length, seed)?, range, Immediate(u32::from(seed)));
        let (written, arrival) = join(write, pair.1.next_arrival()).await;
        written?;
        let expected = Arrival::Immediate { immediate: Immediate(u32::from(seed)), length: length as u64 };
        ensure!(arrival.as_ref().is_ok_and(|arrival| *arrival == expected), "arrived: {arrival:?}");
        expect_landed(granted, length, seed)?;
    }
    ensure!(pair.0.stats().operations == 4, "a split write counts as one operation: {:?}", pair.0.stats());
    close_both(pair).await;
    Ok(())
}

async fn back_pressure(here: &Side, there: &Side) -> Outcome {
    const WRITES: u32 = 64;
    let config = QueuePairConfig { send_depth: 3, receive_depth: WRITES };
    let (dialer, acceptor) = connect(here, there, config).await?;
    let (granted, range) = there.lend(1000)?;
    let source = here.pattern(1000, 5)?;
    let writes: Vec<_> =
        (0..WRITES).map(|number| dialer.write_imm(source.clone(), range, Immediate(number))).collect();
    let arrivals = async {
        for number in 0..WRITES {
            let arrival = acceptor.next_arrival().await?;
            let expected = Arrival::Immediate { immediate: Immediate(number), length: 1000 };
            ensure!(arrival == expected, "write {number}: {arrival:?}");
        }
        Outcome::Ok(())
    };
    let (written, arrived) = join(join_all(writes), arrivals).await;
    written.into_iter().collect::<Result<Vec<()>, _>>()?;
    arrived?;
    expect_landed(granted, 1000, 5)?;
    close_both((dialer, acceptor)).await;
    Ok(())
}

async fn dropped(here: &Side, there: &Side) -> Outcome {
    let (dialer, acceptor) = connect(here, there, CONFIG).await?;
    let before = here.sources.stats().used_bytes;
    let (granted, range) = there.lend(MIB)?;
    drop(dialer.write_imm(here.pattern(MIB, 3)?, range, Immediate(3)));
    ensure!(here.sources.stats().used_bytes > before, "the slot does not hold the bytes");
    acceptor.next_arrival().await?;
    expect_landed(granted, MIB, 3)?;
    dialer.notify(Immediate(4)).await?; // completes after the write
    ensure!(here.sources.stats().used_bytes == before, "the bytes were not given back");
    close_both((dialer, acceptor)).await;
    Ok(())
}

async fn local_refusals(here: &Side, there: &Side) -> Outcome {
    let (dialer, acceptor) = connect(here, there, CONFIG).await?;
    let (granted, range) = there.lend(64)?;
    let source = here.pattern(64, 1)?;
    let stale = RemoteRange { generation: RegionGeneration(range.generation.0 ^ 1), ..range };
    let error = dialer.write(source.clone(), stale).await;
    ensure!(matches!(error, Err(FabricError::UnknownRemoteRegion { .. })), "stale generation: {error:?}");
    let outside = RemoteRange { offset: u64::MAX - 8, ..range };
    let error = dialer.write(source.clone(), outside).await;
    ensure!(matches!(error, Err(FabricError::LengthMismatch { .. })), "outside the region: {error:?}");
    let foreign = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("foreign") })?.try_alloc(64)?;
    let error = dialer.write(foreign.freeze(), range).await;
    ensure!(matches!(error, Err(FabricError::NotRegistered { .. })), "unregistered block: {error:?}");
    let write = dialer.write_imm(source, range, Immediate(1));
    let (written, arrival) = join(write, acceptor.next_arrival()).await;
    written?;
    arrival?;
    expect_landed(granted, 64, 1)?;
    close_both((dialer, acceptor)).await;
    Ok(())
}

async fn wrong_key(here: &Side, there: &Side) -> Outcome {
    let victim = connect(here, there, CONFIG).await?;
    let bystander = connect(here, there, CONFIG).await?;
    let (granted, range) = there.lend(4096)?;
    let mut forged = there.regions().into_iter().find(|r| r.region == range.region).ok_or("no region")?;
    forged.key ^= 0xFF00;
    victim.0.add_remote_region(forged);
    let source = here.pattern(4096, 1)?;
    let writes = (0..4).map(|number| victim.0.write_imm(source.clone(), range, Immediate(number)));
    let (written, arrival) = join(join_all(writes), victim.1.next_arrival()).await;
    for written in written {
        let refused = FabricError::RemoteRefused { kind: victim.0.kind(), reason: PeerViolation::WrongKey };
        ensure!(
            written.as_ref().is_err_and(|error| error.to_string() == refused.to_string()),
            "wrote: {written:?}"
        );
    }
    ensure!(
        matches!(arrival, Err(FabricError::PeerMisbehaved { violation: PeerViolation::WrongKey, .. })),
        "the target saw: {arrival:?}"
    );
    close_both(victim).await;
    let untouched = granted.end(GrantEnd::QueuePairDrained)?;
    ensure!(untouched.iter().all(|&byte| byte == 0), "memory was touched");

    let (granted, range) = there.lend(4096)?;
    let write = bystander.0.write_imm(source, range, Immediate(2));
    let (written, arrival) = join(write, bystander.1.next_arrival()).await;
    written?;
    arrival?;
    expect_landed(granted, 4096, 1)?;
    close_both(bystander).await;
    Ok(())
}

async fn overrun(here: &Side, there: &Side) -> Outcome {
    let config = QueuePairConfig { send_depth: 64, receive_depth: 4 };
    let (dialer, acceptor) = connect(here, there, config).await?;
    let notices = (0..12).map(|number| dialer.notify(Immediate(number)));
    drop(join_all(notices).await); // some complete, the rest end with the connection
    let seen = dialer.next_arrival().await;
    ensure!(matches!(seen, Err(FabricError::ReceiverNotReady { depth: 4, .. })), "the sender saw: {seen:?}");
    for number in 0..4 {
        let Arrival::Immediate { immediate, .. } = acceptor.next_arrival().await? else {
            return Err("no immediate".into());
        };
        ensure!(immediate == Immediate(number), "arrived: {immediate:?}");
    }
    let seen = acceptor.next_arrival().await;
    ensure!(matches!(seen, Err(FabricError::ReceiverNotReady { depth: 4, .. })), "the target saw: {seen:?}");
    close_both((dialer, acceptor)).await;
    Ok(())
}

async fn close(here: &Side, there: &Side) -> Outcome {
    let (dialer, acceptor) = connect(here, there, CONFIG).await?;
    let (granted, range) = there.lend(MIB)?;
    let write = dialer.write_imm(here.pattern(MIB, 8)?, range, Immediate(8));
    let ((), written) = join(dialer.close(), write).await;
    written?; // posted before the close, so it goes first
    let Arrival::Immediate { immediate, .. } = acceptor.next_arrival().await? else {
        return Err("no immediate".into());
    };
    ensure!(immediate == Immediate(8), "arrived: {immediate:?}");
    let seen = acceptor.next_arrival().await;
    ensure!(
        matches!(seen, Err(FabricError::PeerLost { cause: LossCause::ClosedByPeer, .. })),
        "the peer saw: {seen:?}"
    );
    let refused = dialer.notify(Immediate(9)).await;
    ensure!(matches!(refused, Err(FabricError::Closed)), "after the close: {refused:?}");
    acceptor.close().await;
    granted.end(GrantEnd::QueuePairDrained)?;
    Ok(())
}

async fn nobody(here: &Side, there: &Side) -> Outcome {
    let (alone, silent) = (here.domain.prepare(CONFIG)?, there.domain.prepare(CONFIG)?);
    let limit = Duration::from_millis(300);
    let params =
        ConnectParams { peer: silent.connection_data(), role: Role::Acceptor, peer_host: None, limit };
    let result = alone.connect(params).await;
    ensure!(
        matches!(result, Err(FabricError::ConnectTimeout { limit_ms: 300, .. })),
        "connected: {result:?}"
    );
    let garbage =
        ConnectParams { peer: ConnectionData(vec![1, 2, 3]), role: Role::Dialer, peer_host: None, limit };
    let result = silent.connect(garbage).await;
    ensure!(matches!(result, Err(FabricError::Connect { .. })), "connected: {result:?}");
    Ok(())
}

async fn killed_peer(here: &Side, device: &str) -> Outcome {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["victim", device])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let result = outlive(here, &mut child).await;
    child.kill().ok();
    child.wait()?;
    result
}

async fn outlive(here: &Side, child: &mut Child) -> Outcome {
    let mut words = BufReader::new(child.stdout.take().ok_or("no output")?);
    let (mut line, end) = (String::new(), here.domain.prepare(CONFIG)?);
    words.read_line(&mut line)?;
    let mut parts = line.split_whitespace();
    let peer = ConnectionData(unhex(parts.next().ok_or("no connection data")?)?);
    let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok()).ok_or("no region");
    let (base, length) = (number()?, number()?);
    let (key, generation) = (u32::try_from(number()?)?, RegionGeneration(u32::try_from(number()?)?));
    writeln!(child.stdin.as_ref().ok_or("no input")?, "{}", hex(&end.connection_data().0))?;

    let params = ConnectParams { peer, role: Role::Dialer, peer_host: None, limit: Duration::from_secs(20) };
    let queue_pair = end.connect(params).await?;
    let region = RegionId(0);
    queue_pair.add_remote_region(RemoteRegion { region, generation, base, length, key });
    let range = RemoteRange { region, generation, offset: 0, length: 4096 };
    queue_pair.write(here.pattern(4096, 1)?, range).await?;
    child.kill()?;
    child.wait()?;

    let start = here.runtime.now();
    let lost = queue_pair.write(here.pattern(4096, 2)?, range).await;
    let took = here.runtime.now().saturating_sub(start);
    ensure!(
        matches!(lost, Err(FabricError::PeerLost { cause: LossCause::RetryExceeded, .. })),
        "the write ended with {lost:?}"
    );
    ensure!(took < Duration::from_secs(10), "noticing took {took:?}");
    queue_pair.close().await;
    Ok(())
}

/// The other process: connects, and waits to be killed.
async fn victim(device: &str) -> Outcome {
    let side = Side::open(device)?;
    let end = side.domain.prepare(CONFIG)?;
    let region = side.regions().into_iter().next().ok_or("no region")?;
    let data = hex(&end.connection_data().0);
    println!("{data} {} {} {} {}", region.base, region.length, region.key, region.generation.0);
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let peer = ConnectionData(unhex(line.trim())?);
    let params =
        ConnectParams { peer, role: Role::Acceptor, peer_host: None, limit: Duration::from_secs(20) };
    let queue_pair = end.connect(params).await?;
    queue_pair.next_arrival().await?;
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Outcome<Vec<u8>> {
    let digits: Vec<u8> =
        text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>().ok_or("no hex")?;
    Ok(digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect())
}

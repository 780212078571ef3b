//! Peers that are killed with signal 9 in the middle of a transfer.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use tensorwire_fabric::{
    Arrival, ConnectParams, ConnectionData, FabricError, Immediate, LossCause, QueuePair, RegionGeneration,
    RegionId, RemoteRange, RemoteRegion, Role, Runtime,
};
use tensorwire_memory::GrantEnd;

use super::raw::Local;
use crate::contract::{
    Flavour, bounded, bounded_by,
    pair::{STEP_LIMIT, end_of, yield_once},
};

const BYTES: usize = 64 << 20;

/// Number of peers that are killed, each at another offset.
const ROUNDS: u64 = 20;

/// Limit of all rounds together: each starts a process and moves up to 64 MiB.
const ROUNDS_LIMIT: Duration = Duration::from_secs(60);

/// The seed of the sources' content.
const CONTENT: u64 = 5;

/// Starts every line from a child to its parent, because the test harness prints lines, too.
const MARK: &str = "tcp-child ";

/// Another process of this test binary, killed when dropped.
struct Peer {
    process: Child,
    stdin: ChildStdin,
    lines: Box<dyn Iterator<Item = String> + Send>,
}

impl Peer {
    fn start(test: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        // The mark may follow the beginning of a line of the harness.
        let lines = lines.filter_map(|line| Some(line.ok()?.split_once(MARK)?.1.to_owned()));
        Self { stdin: process.stdin.take().unwrap(), lines: Box::new(lines), process }
    }

    fn hear(&mut self) -> String {
        self.lines.next().expect("the child ended early; its output says why")
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The child's end of the pipes.
struct Parent;

impl Parent {
    fn say(&self, line: &str) {
        println!("\n{MARK}{line}");
    }

    fn hear(&self) -> String {
        let mut line = String::new();
        assert_ne!(std::io::stdin().lock().read_line(&mut line).unwrap(), 0, "the parent has gone");
        line.trim_end().to_owned()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> ConnectionData {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    ConnectionData((0..text.len()).step_by(2).map(byte).collect())
}

/// Both processes: exchanges connection data and connects.
async fn connect(
    local: &Local,
    role: Role,
    say: impl FnOnce(&str),
    hear: impl FnOnce() -> String,
) -> QueuePair {
    let prepared = local.prepare();
    say(&hex(&prepared.connection_data().0));
    let peer = unhex(&hear());
    let params = ConnectParams { peer, role, peer_address: None, limit: STEP_LIMIT };
    local.step("connecting", prepared.connect(params)).await.unwrap().spawn(&*local.runtime)
}

async fn connect_child(local: &Local, peer: &mut Peer) -> QueuePair {
    let theirs = peer.hear();
    connect(local, Role::Acceptor, |line| peer.say(line), move || theirs).await
}

fn show(region: &RemoteRegion, range: &RemoteRange) -> String {
    let numbers = [region.region.0, region.generation.0, region.key].map(|number| number.to_string());
    format!("{} {} {}", numbers.join(" "), region.length, range.offset)
}

fn parse(text: &str) -> (RemoteRegion, RemoteRange) {
    let numbers: Vec<u64> = text.split(' ').map(|number| number.parse().unwrap()).collect();
    let [region, generation, key, length, offset] = numbers[..] else { panic!("{text}") };
    let (region, generation) = (RegionId(region as u32), RegionGeneration(generation as u32));
    (
        RemoteRegion { region, generation, base: 0, length, key: key as u32 },
        RemoteRange { region, generation, offset, length: BYTES as u64 },
    )
}

fn assert_lost(error: &FabricError) {
    let causes = [LossCause::EndOfFile, LossCause::Reset];
    assert!(
        matches!(error, FabricError::PeerLost { cause, .. } if causes.contains(cause)),
        "unexpected: {error}"
    );
}

async fn received(queue_pair: &QueuePair, at_least: u64) {
    while queue_pair.stats().bytes_received < at_least {
        yield_once().await;
    }
}

#[test]
fn a_writer_killed_in_the_middle_of_64_mib_is_noticed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let mut peer = Peer::start("tcp::death::child_that_writes_until_it_is_killed");
        let queue_pair = connect_child(&local, &mut peer).await;
        let grant = local.receive.grant(BYTES);
        peer.say(&show(&grant.region, &grant.range));
        // The child writes without end, so it dies in the middle of a write.
        local.step("the first bytes", received(&queue_pair, BYTES as u64 / 4)).await;
        peer.kill();
        assert_lost(&end_of(&local.runtime, &queue_pair).await);
        local.step("the close", queue_pair.close()).await;
        grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
        assert_eq!(local.receive.pool.stats().used_bytes, 0);
    });
}

#[test]
fn a_target_killed_in_the_middle_of_64_mib_is_noticed() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let mut peer = Peer::start("tcp::death::child_that_is_written_until_it_is_killed");
        let queue_pair = connect_child(&local, &mut peer).await;
        let (region, range) = parse(&peer.hear());
        peer.say(&(BYTES / 4).to_string());
        queue_pair.add_remote_region(region);
        let source = local.source.filled(BYTES, CONTENT);
        let writes: Vec<_> = (0..16).map(|_| queue_pair.write(source.clone(), range)).collect();
        // The child reports that the first bytes have arrived, while a GiB is still to be sent.
        local.step("the child's word", queue_pair.next_arrival()).await.unwrap();
        peer.kill();
        let mut failed = 0;
        for write in writes {
            if let Err(error) = local.step("a write", write).await {
                assert_lost(&error);
                failed += 1;
            }
        }
        assert!(failed > 0, "all writes ended before the child did");
        assert_lost(&end_of(&local.runtime, &queue_pair).await);
        drop(source);
        assert_eq!(local.source.pool.stats().used_bytes, 0);
    });
}

/// An offset inside a write for this round: the same in each run.
fn offset(round: u64) -> u64 {
    let mut state = (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (state ^ (state >> 31)) % BYTES as u64
}

/// Peers that die while they write: announced writes are complete, the loss is reported, and memory returns to its
/// pool.
#[test]
fn d_peer_sigkill_of_writers_at_many_offsets() {
    bounded_by(ROUNDS_LIMIT, Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let whole = local.source.filled(BYTES, CONTENT);
        for round in 0..ROUNDS {
            let mut peer = Peer::start("tcp::death::child_that_writes_once_with_an_immediate");
            let queue_pair = connect_child(&local, &mut peer).await;
            let grant = local.receive.grant(BYTES);
            peer.say(&show(&grant.region, &grant.range));
            local.step("the bytes before the end", received(&queue_pair, offset(round))).await;
            peer.kill();
            let arrival = local.step("the content, or the end", queue_pair.next_arrival()).await;
            if let Err(error) = &arrival {
                assert_lost(error);
            }
            assert_lost(&end_of(&local.runtime, &queue_pair).await);
            local.step("the close", queue_pair.close()).await;
            let received = queue_pair.stats().bytes_received;
            assert!(offset(round) <= received && received <= BYTES as u64, "round {round}: {received}");
            if let Ok(arrival) = arrival {
                assert_eq!(arrival, Arrival::Immediate { immediate: Immediate(1), length: BYTES as u64 });
                let content = grant.granted.end(GrantEnd::Content).unwrap();
                assert!(content[..] == whole[..], "round {round}: torn");
            } else {
                grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
            }
            assert_eq!(local.receive.pool.stats().used_bytes, 0, "round {round}");
        }
    });
}

/// Peers that die while they are written to: every write ends, and sources return to their pool.
#[test]
fn d_peer_sigkill_of_targets_at_many_offsets() {
    bounded_by(ROUNDS_LIMIT, Flavour::TwoWorkers, |runtime| async move {
        let local = Local::new(runtime);
        let source = local.source.filled(BYTES, CONTENT);
        for round in 0..ROUNDS {
            let mut peer = Peer::start("tcp::death::child_that_is_written_until_it_is_killed");
            let queue_pair = connect_child(&local, &mut peer).await;
            let (region, range) = parse(&peer.hear());
            peer.say(&offset(round).to_string());
            queue_pair.add_remote_region(region);
            // Because of the second write, the first is not the last data in the kernel's buffer.
            let writes = [(); 2].map(|()| queue_pair.write(source.clone(), range));
            local.step("the child's word", queue_pair.next_arrival()).await.unwrap();
            peer.kill();
            for write in writes {
                if let Err(error) = local.step("a write", write).await {
                    assert_lost(&error);
                }
            }
            assert_lost(&end_of(&local.runtime, &queue_pair).await);
            local.step("the close", queue_pair.close()).await;
        }
        drop(source);
        assert_eq!(local.source.pool.stats().used_bytes, 0);
    });
}

/// What a child does until its parent kills it.
fn child(act: impl AsyncFnOnce(Local, QueuePair) + Send + 'static) {
    bounded(Flavour::CurrentThread, |runtime: Arc<dyn Runtime>| async move {
        let local = Local::new(runtime);
        let queue_pair = connect(&local, Role::Dialer, |line| Parent.say(line), || Parent.hear()).await;
        act(local, queue_pair).await;
    });
}

#[test]
#[ignore = "the other process of a_writer_killed_in_the_middle_of_64_mib_is_noticed"]
fn child_that_writes_until_it_is_killed() {
    child(async |local: Local, queue_pair: QueuePair| {
        let (region, range) = parse(&Parent.hear());
        queue_pair.add_remote_region(region);
        let source = local.source.filled(BYTES, CONTENT);
        loop {
            queue_pair.write(source.clone(), range).await.unwrap();
        }
    });
}

#[test]
#[ignore = "the other process of d_peer_sigkill_of_writers_at_many_offsets"]
fn child_that_writes_once_with_an_immediate() {
    child(async |local: Local, queue_pair: QueuePair| {
        let (region, range) = parse(&Parent.hear());
        queue_pair.add_remote_region(region);
        let source = local.source.filled(BYTES, CONTENT);
        queue_pair.write_imm(source, range, Immediate(1)).await.unwrap();
        end_of(&local.runtime, &queue_pair).await;
    });
}

#[test]
#[ignore = "the other process of a_target_killed_in_the_middle_of_64_mib_is_noticed and d_peer_sigkill_of_targets_at_many_offsets"]
fn child_that_is_written_until_it_is_killed() {
    child(async |local: Local, queue_pair: QueuePair| {
        let grant = local.receive.grant(BYTES);
        Parent.say(&show(&grant.region, &grant.range));
        let offset = Parent.hear().parse().unwrap();
        received(&queue_pair, offset).await;
        queue_pair.notify(Immediate(1)).await.unwrap();
        end_of(&local.runtime, &queue_pair).await;
    });
}

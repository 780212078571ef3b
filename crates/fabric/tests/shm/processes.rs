//! Two processes, one of which is killed or stopped, or whose copies and descriptors are counted.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use futures::future::join_all;
use tensorwire_fabric::{
    Access, ConnectParams, ConnectionData, Domain, FabricError, Immediate, LossCause, QueuePair,
    QueuePairConfig, RegionGeneration, RegionId, RemoteRange, RemoteRegion, Role, Runtime, TokioRuntime,
    WorkRequest,
};
use tensorwire_memory::{GrantEnd, Granted, copy};

use super::SETUP;
use crate::{
    contract::{
        Flavour, TEST_LIMIT, bounded,
        pair::{DEPTHS, Grant, Pair, RegisteredPool, immediate, pattern, step, yield_once},
    },
    process::{Other, alone, is_child, listen, say},
};

/// How soon a process must notice the death of its peer.
pub(crate) const DEATH_LIMIT: Duration = Duration::from_secs(5);

/// The domain and memory of one process.
pub(crate) struct Half {
    pub(crate) domain: Arc<dyn Domain>,
    pub(crate) source: RegisteredPool,
    pub(crate) receive: RegisteredPool,
}

impl Half {
    pub(crate) fn new(runtime: Arc<dyn Runtime>) -> Self {
        let domain = (SETUP.fabric)(runtime).open_domain().unwrap();
        let source = RegisteredPool::new(&domain, "source", Access::LOCAL, 256 << 20);
        let receive = RegisteredPool::new(&domain, "receive", Access::RECEIVE, 256 << 20);
        Self { domain, source, receive }
    }

    /// Connects; `exchange` sends a line and returns the other process's.
    pub(crate) async fn connect(&self, role: Role, exchange: impl FnOnce(&str) -> String) -> QueuePair {
        let prepared = self.domain.prepare(DEPTHS).unwrap();
        let mine: Vec<String> = prepared.connection_data().0.iter().map(u8::to_string).collect();
        let theirs = exchange(&mine.join(" "));
        let bytes = theirs.split(' ').map(|byte| byte.parse().unwrap()).collect();
        let limit = Duration::from_secs(10);
        let params = ConnectParams { peer: ConnectionData(bytes), role, peer_address: None, limit };
        prepared.connect(params).await.unwrap().spawn(&TokioRuntime::current().unwrap())
    }

    /// Connects with the other process.
    pub(crate) async fn accept(&self, other: &mut Other) -> QueuePair {
        let theirs = other.hear();
        let connecting = self.connect(Role::Acceptor, |mine| {
            other.tell(mine);
            theirs
        });
        connecting.await
    }

    /// Called in the other process: connects with the process that started it.
    pub(crate) async fn dial(&self) -> QueuePair {
        let connecting = self.connect(Role::Dialer, |mine| {
            say(mine);
            listen()
        });
        connecting.await
    }
}

/// The data that a peer needs to write to `grant`, as text.
pub(crate) fn describe(grant: &Grant) -> String {
    let (region, range) = (grant.region, grant.range);
    format!(
        "{} {} {} {} {} {}",
        region.region.0, region.generation.0, region.length, region.key, range.offset, range.length
    )
}

pub(crate) fn understand(text: &str) -> (RemoteRegion, RemoteRange) {
    let numbers: Vec<u64> = text.split(' ').map(|number| number.parse().unwrap()).collect();
    let (region, generation) = (RegionId(numbers[0] as u32), RegionGeneration(numbers[1] as u32));
    let remote = RemoteRegion { region, generation, base: 0, length: numbers[2], key: numbers[3] as u32 };
    (remote, RemoteRange { region, generation, offset: numbers[4], length: numbers[5] })
}

pub(crate) fn assert_end_of_file(error: &FabricError) {
    let cause = LossCause::EndOfFile;
    assert!(
        matches!(error, FabricError::PeerLost { cause: seen, .. } if *seen == cause),
        "unexpected: {error}"
    );
}

const LARGE: usize = 8 << 20;

#[test]
fn a_killed_writer_is_lost_at_once_and_its_last_write_is_whole_or_absent() {
    if is_child() {
        return bounded(Flavour::CurrentThread, |runtime| async move {
            let half = Half::new(runtime);
            let queue_pair = half.dial().await;
            let (region, range) = understand(&listen());
            queue_pair.add_remote_region(region);
            // Until killed: each write has its own pattern.
            for round in 0.. {
                let source = half.source.filled(LARGE, u64::from(round));
                queue_pair.write_imm(source, range, Immediate(round)).await.unwrap();
            }
        });
    }
    bounded(Flavour::TwoWorkers, |runtime| async move {
        for kill_after in [1, 2, 5] {
            let mut other = Other::start_as(
                "shm::processes::a_killed_writer_is_lost_at_once_and_its_last_write_is_whole_or_absent",
                "1",
            );
            let half = Half::new(runtime.clone());
            let grant = half.receive.grant(LARGE);
            let queue_pair = half.accept(&mut other).await;
            other.tell(&describe(&grant));
            for round in 0..kill_after {
                let arrival = step(&runtime, "an arrival", queue_pair.next_arrival()).await.unwrap();
                assert_eq!(immediate(arrival), (round, LARGE as u64));
            }
            let killed = runtime.now();
            other.signal(libc::SIGKILL);
            let error = loop {
                match step(&runtime, "the loss", queue_pair.next_arrival()).await {
                    Ok(arrival) => assert_eq!(immediate(arrival).1, LARGE as u64),
                    Err(error) => break error,
                }
            };
            assert_end_of_file(&error);
            assert!(runtime.now() - killed < DEATH_LIMIT);
            step(&runtime, "the close", queue_pair.close()).await;
            grant.granted.end(GrantEnd::QueuePairDrained).expect("nothing touches the memory any more");
        }
    });
}

#[test]
fn a_killed_target_ends_every_operation_and_frees_every_buffer() {
    if is_child() {
        return bounded(Flavour::CurrentThread, |runtime| async move {
            let half = Half::new(runtime);
            let grant = half.receive.grant(LARGE);
            let queue_pair = half.dial().await;
            say(&describe(&grant));
            while queue_pair.next_arrival().await.is_ok() {}
        });
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let mut other = Other::start_as(
            "shm::processes::a_killed_target_ends_every_operation_and_frees_every_buffer",
            "1",
        );
        let half = Half::new(runtime.clone());
        let queue_pair = half.accept(&mut other).await;
        let (region, range) = understand(&other.hear());
        queue_pair.add_remote_region(region);
        let write = |round| queue_pair.write_imm(half.source.filled(LARGE, 0), range, Immediate(round));
        step(&runtime, "a first write", write(0)).await.unwrap();
        // A stopped process completes nothing: all these writes are under way when it dies.
        other.signal(libc::SIGSTOP);
        let mut posted: VecDeque<_> = (1..9).map(write).collect();
        drop(posted.pop_back());
        let killed = runtime.now();
        other.signal(libc::SIGKILL);
        let results = step(&runtime, "the operations", join_all(posted)).await;
        assert!(runtime.now() - killed < DEATH_LIMIT);
        // The stop takes effect when the child next runs, so the first writes may still have been executed.
        let ended: Vec<_> = results.iter().skip_while(|result| result.is_ok()).collect();
        assert!(!ended.is_empty());
        for result in ended {
            assert_end_of_file(result.as_ref().unwrap_err());
        }
        assert_eq!(half.source.pool.stats().used_bytes, 0, "a buffer was kept");
    });
}

pub(crate) fn counted(reason: copy::CopyReason) -> (u64, u64) {
    let count = copy::count(reason);
    (count.calls, count.bytes)
}

#[test]
fn a_write_is_copied_once() {
    use copy::CopyReason::{ShmInline, ShmMessage, ShmPayload};
    alone("shm::processes::a_write_is_copied_once", |runtime| {
        Box::pin(async move {
            let pair = Pair::new(SETUP, runtime).await;
            let ring = RegisteredPool::new(&pair.right.domain, "ring", Access::RING, 1 << 20);
            for (length, calls) in [(193, 1), (4096, 1), (256 << 10, 1), (16 << 20, 64)] {
                let before = counted(ShmPayload);
                let grant = pair.grant_right(length);
                let write =
                    pair.to_right.write_imm(pair.left.source.filled(length, 1), grant.range, Immediate(0));
                pair.step("the write", write).await.unwrap();
                let after = counted(ShmPayload);
                assert_eq!((after.0 - before.0, after.1 - before.1), (calls, length as u64));
            }
            assert_eq!((counted(ShmMessage), counted(ShmInline)), ((0, 0), (0, 0)));
            // A write into a message ring is copied once, too, and counted separately.
            let (grant, before) = (ring.grant(1000), counted(ShmPayload));
            pair.to_right.add_remote_region(grant.region);
            let source = pair.left.source.filled(1000, 1);
            pair.step("a message", pair.to_right.write(source, grant.range)).await.unwrap();
            assert_eq!((counted(ShmMessage), counted(ShmPayload)), ((1, 1000), before));
            // A tiny write is staged in the ring, and then copied once like any other.
            let grant = pair.grant_right(64);
            let source = pair.left.source.filled(64, 1);
            pair.step("a tiny write", pair.to_right.write(source, grant.range)).await.unwrap();
            assert_eq!(counted(ShmInline), (1, 64));
            assert_eq!(counted(ShmPayload), (before.0 + 1, before.1 + 64));
            // The counters of all other reasons stay at zero: no copy is counted under another name.
            assert_eq!(counted(copy::CopyReason::Message), (0, 0));
        })
    });
}

pub(crate) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn nothing_is_left_behind_by_ended_connections() {
    alone("shm::processes::nothing_is_left_behind_by_ended_connections", |runtime| {
        Box::pin(async move {
            let pair = Pair::new(SETUP, runtime.clone()).await;
            let metrics = tokio::runtime::Handle::current().metrics();
            pair.works(&pair.to_right, &pair.to_left).await;
            let (descriptors, tasks) = (open_descriptors(), metrics.num_alive_tasks());
            let mappings =
                || std::fs::read_to_string("/proc/self/maps").unwrap().matches("tensorwire").count();
            let mapped = mappings();
            for round in 0..40 {
                let (left, right) = pair.connect_again().await;
                assert!(open_descriptors() > descriptors && metrics.num_alive_tasks() > tasks);
                pair.works(&left, &right).await;
                match round % 4 {
                    0 => drop((left, right)),
                    1 => {
                        left.close().await;
                        right.close().await;
                    }
                    2 => {
                        let grant = pair.right.receive.grant(1 << 20);
                        left.add_remote_region(grant.region);
                        let source = pair.left.source.filled(1 << 20, 1);
                        drop(left.write_imm(source, grant.range, Immediate(0)));
                        drop(left);
                        right.close().await;
                        grant.granted.end(GrantEnd::QueuePairDrained).unwrap();
                    }
                    _ => {
                        // A refused access.
                        let grant = pair.right.receive.grant(64);
                        left.add_remote_region(RemoteRegion { key: !grant.region.key, ..grant.region });
                        let source = pair.left.source.filled(64, 1);
                        left.write(source, grant.range).await.unwrap_err();
                        grant.granted.end(GrantEnd::NeverSent).unwrap();
                    }
                }
            }
            let ended = async {
                while (open_descriptors(), metrics.num_alive_tasks(), mappings())
                    != (descriptors, tasks, mapped)
                {
                    yield_once().await;
                }
            };
            pair.step("the last descriptor, task and mapping to go", ended).await;
        })
    });
}

#[test]
fn a_full_socket_makes_writes_wait_in_order() {
    // Each source lies in a block of its own, whose descriptor must cross the socket before the write can; the
    // socket holds fewer than that at once, and nobody reads it until something is awaited.
    const BLOCKS: u32 = 400;
    // Shorter ones would travel in the ring, and need no block.
    const BYTES: usize = 200;
    alone("shm::processes::a_full_socket_makes_writes_wait_in_order", |runtime| {
        Box::pin(async move {
            // So deep that the first quiet write allows more of them than there are blocks.
            let depths = QueuePairConfig { send_depth: 2048, receive_depth: 512 };
            let pair = Pair::with_depths(SETUP, runtime, depths).await;
            let grant = pair.grant_right(BYTES * BLOCKS as usize);
            let mut sources: Vec<_> = (0..BLOCKS)
                .map(|value| {
                    let single = RegisteredPool::new(&pair.left.domain, "single", Access::LOCAL, 4096);
                    single.filled(BYTES, u64::from(value))
                })
                .collect();
            // The peer already knows the block of the last write: that write must not overtake the waiting ones.
            sources.push(sources[0].clone());
            let quiet = || pair.to_right.post_inline(&[1], Some(&grant.part(0, 1)), None);
            assert!(quiet().is_some(), "there is room for many");
            let mut posted = Vec::new();
            for (value, local) in sources.into_iter().enumerate() {
                let remote = Some(grant.part(value as u64 % u64::from(BLOCKS) * BYTES as u64, BYTES as u64));
                let request = WorkRequest::Write { local, remote, immediate: Some(Immediate(value as u32)) };
                posted.push(pair.to_right.post_now(&request).unwrap());
            }
            assert!(quiet().is_none(), "it would overtake those that wait");
            for value in 0..=BLOCKS {
                assert_eq!(pair.arrival_at_right().await, (value, BYTES as u64));
            }
            for result in pair.step("the writes", join_all(posted)).await {
                result.unwrap();
            }
            for (value, bytes) in grant.take().chunks(BYTES).enumerate() {
                assert_eq!(bytes, pattern(BYTES, value as u64), "write {value}");
            }
        })
    });
}

#[test]
fn an_idle_connection_costs_no_processor_time() {
    alone("shm::processes::an_idle_connection_costs_no_processor_time", |runtime| {
        Box::pin(async move {
            let pair = Pair::new(SETUP, runtime.clone()).await;
            pair.works(&pair.to_right, &pair.to_left).await;
            let switches = || {
                let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
                let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
                line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
            };
            let before = switches();
            runtime.sleep(Duration::from_secs(1)).await;
            let woken = switches() - before;
            assert!(woken <= 5, "{woken} wake-ups in an idle second");
            let _: &Granted = &pair.grant_right(1).granted;
            assert!(TEST_LIMIT > Duration::from_secs(1));
        })
    });
}

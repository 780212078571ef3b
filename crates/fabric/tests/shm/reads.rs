//! One-sided reads between processes: their copies are counted, and either process is killed.

use std::sync::Arc;

use futures::future::join;
use tensorwire_fabric::{Access, FabricError, PeerViolation, RemoteRange, RemoteRegion, Runtime};
use tensorwire_memory::{Buf, UserMemory, copy::CopyReason};

use super::{
    SETUP,
    processes::{DEATH_LIMIT, Half, assert_end_of_file, counted, understand},
};
use crate::{
    contract::{
        Flavour, bounded,
        pair::{Pair, RegisteredPool, end_of, pattern, step},
    },
    process::{Other, alone, is_child, listen, say},
};

const LENGTH: usize = 8 << 20;

/// The data that a peer needs to read `bytes`.
fn named(pool: &RegisteredPool, bytes: &Buf) -> (RemoteRegion, RemoteRange) {
    let region = pool.region(bytes.block().unwrap());
    let (id, generation) = (region.region, region.generation);
    let (offset, length) = (bytes.offset() as u64, bytes.len() as u64);
    (region, RemoteRange { region: id, generation, offset, length })
}

#[test]
fn a_read_is_copied_once() {
    alone("shm::reads::a_read_is_copied_once", |runtime| {
        Box::pin(async move {
            let pair = Pair::new(SETUP, runtime.clone()).await;
            let pool = RegisteredPool::new(&pair.right.domain, "exposed", Access::READABLE, 256 << 20);
            let (mut chunks, mut bytes) = (0, 0);
            for length in [1, 64, 65, LENGTH] {
                let source = pool.filled(length, 3);
                let (region, range) = named(&pool, &source);
                let _exposure = source.expose();
                pair.to_right.add_remote_region(region);
                let into = pair.left.receive.pool.try_alloc(length).unwrap();
                let read = step(&runtime, "the read", pair.to_right.read(range, into)).await.unwrap();
                assert!(read[..] == source[..]);
                bytes += length as u64;
                let counted = counted(CopyReason::ShmRead);
                assert_eq!(counted.1, bytes);
                assert!(counted.0 > chunks);
                chunks = counted.0;
            }
            for reason in [CopyReason::ShmPayload, CopyReason::ShmMessage, CopyReason::ShmInline] {
                assert_eq!(self::counted(reason), (0, 0), "{reason:?}");
            }
        })
    });
}

#[test]
fn a_users_own_memory_is_not_readable_by_neighbours() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(SETUP, runtime.clone()).await;
        let users = UserMemory::new();
        let joined = users.join(Arc::new(vec![7_u8; 4096])).unwrap();
        let region = pair.right.domain.register(joined.buf().block().unwrap(), Access::READABLE).unwrap();
        let _exposure = joined.buf().expose();
        pair.to_right.add_remote_region(region);
        let (id, generation) = (region.region, region.generation);
        let range = RemoteRange { region: id, generation, offset: 0, length: 4096 };
        let read = pair.to_right.read(range, pair.left.receive.pool.try_alloc(4096).unwrap());
        let both = join(read, end_of(&runtime, &pair.to_left));
        let (result, _end) = step(&runtime, "the refusal", both).await;
        let error = result.unwrap_err();
        let reason = PeerViolation::NoRight;
        assert!(
            matches!(error, FabricError::RemoteRefused { reason: seen, .. } if seen == reason),
            "{error}"
        );
    });
}

/// Exposes a buffer, prints the peer's name for it, and waits until the connection is over.
async fn be_read(runtime: Arc<dyn Runtime>) {
    let half = Half::new(runtime);
    let pool = RegisteredPool::new(&half.domain, "exposed", Access::READABLE, 256 << 20);
    let queue_pair = half.dial().await;
    let source = pool.filled(LENGTH, 9);
    let _exposure = source.expose();
    let (region, range) = named(&pool, &source);
    say(&format!(
        "{} {} {} {} {} {}",
        range.region.0, range.generation.0, region.length, region.key, range.offset, range.length
    ));
    while queue_pair.next_arrival().await.is_ok() {}
}

#[test]
fn d_peer_sigkill_a_read_of_the_dead_is_whole_or_lost() {
    const TEST: &str = "shm::reads::d_peer_sigkill_a_read_of_the_dead_is_whole_or_lost";
    if is_child() {
        return bounded(Flavour::CurrentThread, be_read);
    }
    bounded(Flavour::TwoWorkers, |runtime| async move {
        for reads_before in [0, 1, 3] {
            let mut other = Other::start_as(TEST, "1");
            let half = Half::new(runtime.clone());
            let queue_pair = half.accept(&mut other).await;
            let (region, range) = understand(&other.hear());
            queue_pair.add_remote_region(region);
            let read = || queue_pair.read(range, half.receive.pool.try_alloc(LENGTH).unwrap());
            for _ in 0..reads_before {
                let bytes = step(&runtime, "a read", read()).await.unwrap();
                assert!(bytes[..] == pattern(LENGTH, 9)[..]);
            }
            let under_way: Vec<_> = (0..4).map(|_| read()).collect();
            let killed = runtime.now();
            other.signal(libc::SIGKILL);
            for read in under_way {
                match step(&runtime, "the end of a read", read).await {
                    Ok(bytes) => assert!(bytes[..] == pattern(LENGTH, 9)[..], "torn"),
                    Err(error) => assert_end_of_file(&error),
                }
            }
            let error = step(&runtime, "the loss", end_of(&runtime, &queue_pair)).await;
            assert_end_of_file(&error);
            assert!(runtime.now() - killed < DEATH_LIMIT);
            let stats = half.receive.pool.stats();
            assert_eq!((stats.used_bytes, stats.leaked_bytes), (0, 0));
        }
    });
}

/// Reads the parent's exposed buffer until it is killed.
async fn read_on(runtime: Arc<dyn Runtime>) {
    let half = Half::new(runtime);
    let queue_pair = half.dial().await;
    let (region, range) = understand(&listen());
    queue_pair.add_remote_region(region);
    loop {
        let read = queue_pair.read(range, half.receive.pool.try_alloc(LENGTH).unwrap());
        let bytes = read.await.unwrap();
        say(if bytes[..] == pattern(LENGTH, 9)[..] { "whole" } else { "torn" });
    }
}

#[test]
fn d_peer_sigkill_bytes_that_the_dead_read_come_back() {
    const TEST: &str = "shm::reads::d_peer_sigkill_bytes_that_the_dead_read_come_back";
    if is_child() {
        return bounded(Flavour::CurrentThread, read_on);
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let mut other = Other::start_as(TEST, "1");
        let half = Half::new(runtime.clone());
        let pool = RegisteredPool::new(&half.domain, "exposed", Access::READABLE, 256 << 20);
        let queue_pair = half.accept(&mut other).await;
        let source = pool.filled(LENGTH, 9);
        let exposure = source.expose();
        let (region, range) = named(&pool, &source);
        other.tell(&format!(
            "{} {} {} {} {} {}",
            range.region.0, range.generation.0, region.length, region.key, range.offset, range.length
        ));
        for _ in 0..3 {
            assert_eq!(other.hear_meanwhile(&runtime, "a read").await, "whole");
        }
        other.signal(libc::SIGKILL);
        let error = step(&runtime, "the loss", end_of(&runtime, &queue_pair)).await;
        assert_end_of_file(&error);
        drop((exposure, source));
        let stats = pool.pool.stats();
        assert_eq!((stats.used_bytes, stats.retired_bytes, stats.leaked_bytes), (0, 0, 0));
    });
}

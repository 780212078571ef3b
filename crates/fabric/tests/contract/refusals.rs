//! Refused accesses: which side refuses them, and which state stays intact.

use std::sync::Arc;

use tensorwire_fabric::{
    Access, FabricError, Immediate, PeerViolation, QueuePairConfig, RegionGeneration, RegionId, RemoteRange,
    RemoteRegion, Runtime,
};
use tensorwire_memory::{GrantEnd, Pool, PoolConfig};

use super::{
    Setup,
    pair::{Grant, Pair, RegisteredPool, end_of},
};

pub async fn an_unknown_remote_region_fails_that_operation_only(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    // Granted, but never announced to left.
    let grant = pair.right.receive.grant(64);
    let error = fails_alone(&pair, &grant, grant.range).await;
    let expected = grant.range.region;
    assert!(
        matches!(error, FabricError::UnknownRemoteRegion { region } if region == expected),
        "unexpected: {error}"
    );
    // Announced, but under another generation.
    pair.to_right.add_remote_region(grant.region);
    let outdated = RemoteRange { generation: other_generation(grant.range.generation), ..grant.range };
    let error = fails_alone(&pair, &grant, outdated).await;
    assert!(matches!(error, FabricError::UnknownRemoteRegion { .. }), "unexpected: {error}");
}

pub async fn a_length_mismatch_fails_that_operation_only(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(64);
    for length in [0, 1, 63, 65, u64::MAX] {
        let error = fails_alone(&pair, &grant, grant.part(0, length)).await;
        assert!(
            matches!(error, FabricError::LengthMismatch { local: 64, remote } if remote == length),
            "unexpected: {error}"
        );
    }
}

pub async fn an_unregistered_source_fails_that_operation_only(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(6400);
    let stranger = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("stranger") }).unwrap();
    for length in [64, 6400] {
        let source = stranger.try_alloc(length).unwrap().freeze();
        let id = source.block().unwrap().id().get();
        let write = pair.to_right.write_imm(source, grant.part(0, length as u64), Immediate(1));
        let error = pair.step("the write", write).await.unwrap_err();
        assert!(
            matches!(error, FabricError::NotRegistered { block, .. } if block == id),
            "unexpected: {error}"
        );
    }
    assert_eq!(grant.bytes(), vec![0; 6400]);
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn a_removed_remote_region_fails_that_operation_only(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(64);
    pair.to_right.remove_remote_region(grant.range.region);
    let error = fails_alone(&pair, &grant, grant.range).await;
    assert!(matches!(error, FabricError::UnknownRemoteRegion { .. }), "unexpected: {error}");
}

/// Writes 64 bytes to `range`, expects an error of that operation alone, and returns it.
async fn fails_alone(pair: &Pair, grant: &Grant, range: RemoteRange) -> FabricError {
    let write = pair.to_right.write_imm(pair.left.source.filled(64, 1), range, Immediate(1));
    let error = pair.step("the write", write).await.unwrap_err();
    assert_eq!(grant.bytes(), vec![0; grant.granted.length()], "memory was touched");
    assert!(pair.to_right.failure().is_none() && pair.to_left.failure().is_none());
    pair.works(&pair.to_right, &pair.to_left).await;
    error
}

pub async fn a_wrong_generation_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(64);
    let generation = other_generation(grant.range.generation);
    let claim = RemoteRegion { generation, ..grant.region };
    // Over verbs only the key carries the generation.
    let claim = if pair.names_violations() { claim } else { RemoteRegion { key: !claim.key, ..claim } };
    let range = RemoteRange { generation, ..grant.range };
    refused(&pair, &grant, claim, range, PeerViolation::UnknownRegion).await;
}

pub async fn a_wrong_region_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for region in [RegionId(1000), RegionId(u32::MAX)] {
        let (grant, range) = renamed(&pair, region);
        let key = if pair.names_violations() { grant.region.key } else { !grant.region.key };
        let claim = RemoteRegion { region, key, ..grant.region };
        refused(&pair, &grant, claim, range, PeerViolation::UnknownRegion).await;
    }
}

fn renamed(pair: &Pair, region: RegionId) -> (Grant, RemoteRange) {
    let grant = pair.grant_right(64);
    let range = RemoteRange { region, ..grant.range };
    (grant, range)
}

pub async fn a_wrong_key_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(64);
    let claim = RemoteRegion { key: grant.region.key ^ 1, ..grant.region };
    refused(&pair, &grant, claim, grant.range, PeerViolation::WrongKey).await;
}

pub async fn a_range_outside_the_region_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    for offset in [region_end(&pair), region_end(&pair) - 32, 1 << 40] {
        let grant = pair.grant_right(64);
        let claim = RemoteRegion { length: u64::MAX, ..grant.region };
        let range = RemoteRange { offset, ..grant.range };
        refused(&pair, &grant, claim, range, PeerViolation::OutOfBounds).await;
    }
}

/// Length of the receive pool's first region, from which its next buffer is allocated.
fn region_end(pair: &Pair) -> u64 {
    pair.grant_right(64).region.length
}

pub async fn a_range_that_overflows_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let grant = pair.grant_right(64);
    let claim = RemoteRegion { length: u64::MAX, ..grant.region };
    let range = RemoteRange { offset: u64::MAX - 10, ..grant.range };
    let (left_end, right_end) = pair.connect_again().await;
    left_end.add_remote_region(claim);
    let write = left_end.write_imm(pair.left.source.filled(64, 1), range, Immediate(1));
    let error = pair.step("the write", write).await.unwrap_err();
    // The requester may detect the overflow itself; then only the operation fails.
    match error {
        FabricError::LengthMismatch { .. } => pair.works(&left_end, &right_end).await,
        FabricError::RemoteRefused { .. } => pair.works(&pair.to_right, &pair.to_left).await,
        other => panic!("unexpected: {other}"),
    }
    assert_eq!(grant.bytes(), vec![0; 64]);
}

pub async fn memory_that_was_never_granted_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    if !pair.knows_ranges() {
        return;
    }
    let grant = pair.grant_right(64);
    let mut owned = pair.right.receive.pool.try_alloc(64).unwrap();
    owned.fill(0);
    let offset = grant.range.offset + (owned.as_ptr() as u64 - grant.address as u64);
    refused(&pair, &grant, grant.region, RemoteRange { offset, ..grant.range }, PeerViolation::NotGranted)
        .await;
    assert_eq!(owned[..], [0; 64]);
}

pub async fn memory_past_the_grant_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    if !pair.knows_ranges() {
        return;
    }
    for offset in [1, 64] {
        let grant = pair.grant_right(64);
        let range = grant.part(offset, 64);
        refused(&pair, &grant, grant.region, range, PeerViolation::NotGranted).await;
    }
}

pub async fn a_grant_that_has_ended_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    if !pair.knows_ranges() {
        return;
    }
    let ended = pair.grant_right(64);
    let grant = pair.grant_right(64);
    let (region, range) = (ended.region, ended.range);
    let owned = ended.granted.end(GrantEnd::NeverSent).unwrap();
    refused(&pair, &grant, region, range, PeerViolation::NotGranted).await;
    assert_eq!(owned[..], [0; 64]);
}

pub async fn a_region_without_the_right_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime).await;
    let private = RegisteredPool::new(&pair.right.domain, "private", Access::LOCAL, 1 << 20);
    let grant = private.grant(64);
    refused(&pair, &grant, grant.region, grant.range, PeerViolation::NoRight).await;
}

pub async fn memory_of_another_domain_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let pair = Pair::new(setup, runtime.clone()).await;
    let other = (setup.fabric)(runtime).open_domain().unwrap();
    let foreign = RegisteredPool::new(&other, "other domain", Access::RECEIVE, 1 << 20);
    let grant = foreign.grant(64);
    refused(&pair, &grant, grant.region, grant.range, PeerViolation::UnknownRegion).await;
}

/// Writes 64 bytes to `range` on a connection of its own whose left side believes in `claim`; expects that the
/// target refuses for `reason`, that both sides of that connection fail, that nothing was written or delivered,
/// and that the pair's first connection still works.
async fn refused(pair: &Pair, grant: &Grant, claim: RemoteRegion, range: RemoteRange, reason: PeerViolation) {
    let (left_end, right_end) = pair.connect_again().await;
    left_end.add_remote_region(claim);
    let write = left_end.write_imm(pair.left.source.filled(64, 1), range, Immediate(1));
    match pair.step("the write", write).await {
        Ok(()) => {} // The local bytes may be reused; the refusal shows below.
        Err(error) => assert_refused(pair, &error, reason),
    }
    assert_refused(pair, &end_of(&pair.runtime, &left_end).await, reason);
    assert_violated(pair, &end_of(&pair.runtime, &right_end).await, reason);
    assert_eq!(grant.bytes(), vec![0; grant.granted.length()], "memory was touched");
    assert_eq!(right_end.stats().bytes_received, 0);
    left_end.notify(Immediate(0)).await.unwrap_err();
    right_end.notify(Immediate(0)).await.unwrap_err();
    pair.works(&pair.to_right, &pair.to_left).await;
}

/// The target's error for an access of its peer that it refused.
pub(super) fn assert_violated(pair: &Pair, error: &FabricError, expected: PeerViolation) {
    match error {
        FabricError::PeerMisbehaved { violation, .. } => {
            assert!(!pair.names_violations() || *violation == expected, "{violation}, expected {expected}");
        }
        other => panic!("the target reported: {other}"),
    }
}

/// The requester's error for it.
pub(super) fn assert_refused(pair: &Pair, error: &FabricError, expected: PeerViolation) {
    match error {
        FabricError::RemoteRefused { reason, .. } => {
            assert!(!pair.names_violations() || *reason == expected, "{reason}, expected {expected}");
        }
        other => panic!("the requester reported: {other}"),
    }
}

fn other_generation(generation: RegionGeneration) -> RegionGeneration {
    RegionGeneration(generation.0.wrapping_add(1))
}

pub async fn an_immediate_without_a_receive_fails_both_ends(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 16, receive_depth: 4 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    let (left_end, right_end) = pair.connect_again().await;
    for value in 0..4 {
        pair.step("a notification", pair.to_right.notify(Immediate(value))).await.unwrap();
    }
    // The fifth finds no receive. Its own completion may already report that.
    let fifth = pair.step("the fifth", pair.to_right.notify(Immediate(4))).await;
    if let Err(error) = fifth {
        assert_not_ready(&error);
    }
    let error = pair.end_at_left().await;
    assert_not_ready(&error);
    // The four arrivals that found a receive are still queued.
    for value in 0..4 {
        assert_eq!(pair.arrival_at_right().await.0, value);
    }
    assert_not_ready(&pair.end_at_right().await);
    pair.works(&left_end, &right_end).await;
}

fn assert_not_ready(error: &FabricError) {
    assert!(matches!(error, FabricError::ReceiverNotReady { depth: 4, .. }), "unexpected: {error}");
}

pub async fn taking_an_arrival_gives_its_receive_back(setup: Setup, runtime: Arc<dyn Runtime>) {
    let depths = QueuePairConfig { send_depth: 16, receive_depth: 4 };
    let pair = Pair::with_depths(setup, runtime, depths).await;
    for round in 0..50 {
        for value in 0..4 {
            pair.step("a notification", pair.to_right.notify(Immediate(round * 4 + value))).await.unwrap();
        }
        for value in 0..4 {
            assert_eq!(pair.arrival_at_right().await.0, round * 4 + value);
        }
    }
    let private = RegisteredPool::new(&pair.right.domain, "idle", Access::RING, 1 << 20);
    assert!(private.regions().is_empty(), "a pool that gave nothing out registered something");
}

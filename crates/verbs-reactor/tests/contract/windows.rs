//! Windows: one granted range, writable through one queue pair, from a bind to its end.

use std::sync::Arc;

use memory::GrantEnd;
use verbs_reactor::{
    Access, FabricError, Immediate, PeerViolation, QueuePair, QueuePairConfig, RemoteRange, RemoteRegion,
    Runtime, Window, WorkRequest,
};

use super::{
    Setup, is_able,
    pair::{Lent, Pair, RegisteredPool, end_of, immediate},
    refusals::{assert_refused, assert_violated},
};

/// A pair whose right end has a pool that nobody may write but through windows; `None` where the fabric has none.
async fn windowed(setup: Setup, runtime: Arc<dyn Runtime>) -> Option<(Pair, RegisteredPool)> {
    let pair = Pair::new(setup, runtime).await;
    if !is_able(&pair, "windows", pair.to_right.capabilities().windows) {
        return None;
    }
    let pool = RegisteredPool::new(&pair.right.domain, "windowed", Access::WINDOWED, 64 << 20);
    Some((pair, pool))
}

/// Whether the fabric holds each access against the window's own range; Soft-RoCE does not.
fn is_exact(pair: &Pair) -> bool {
    is_able(pair, "exact_windows", pair.to_right.capabilities().exact_windows)
}

/// Right opens a window over `lent`, and left knows of it.
async fn open(
    pair: &Pair,
    lent: &Lent,
    left_end: &QueuePair,
    right_end: &QueuePair,
) -> (Window, RemoteRange) {
    let window = pair.step("a bind", right_end.bind(&lent.granted)).await.unwrap();
    let region = window.region();
    left_end.add_remote_region(region);
    (window, whole(region))
}

fn whole(region: RemoteRegion) -> RemoteRange {
    let RemoteRegion { region, generation, length, .. } = region;
    RemoteRange { region, generation, offset: 0, length }
}

/// Writes 64 bytes to `range` with immediate; expects that the target refuses for `reason`, that both ends fail, that
/// nothing landed in `lent`, and that the pair's first connection still works.
async fn refused(
    pair: &Pair,
    (left_end, right_end): (&QueuePair, &QueuePair),
    lent: &Lent,
    range: RemoteRange,
    reason: PeerViolation,
) {
    let before = lent.bytes();
    let write = left_end.write_imm(pair.left.source.filled(64, 1), range, Immediate(1));
    if let Err(error) = pair.step("the write", write).await {
        assert_refused(pair, &error, reason);
    }
    assert_refused(pair, &end_of(&pair.runtime, left_end).await, reason);
    assert_violated(pair, &end_of(&pair.runtime, right_end).await, reason);
    assert_eq!(lent.bytes(), before, "memory was touched");
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn a_write_through_a_window_lands(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    for length in [1, 64, 4096, 100_000] {
        let lent = pool.lend(length);
        let (window, range) = open(&pair, &lent, &pair.to_right, &pair.to_left).await;
        assert_eq!(range.length, length as u64);
        let source = pair.left.source.filled(length, 5);
        let write = pair.to_right.write_imm(source.clone(), range, Immediate(7));
        let (written, arrival) =
            pair.step("the write", futures::future::join(write, pair.to_left.next_arrival())).await;
        written.unwrap();
        assert_eq!(immediate(arrival.unwrap()), (7, length as u64));
        pair.step("the end of the window", pair.to_left.unbind(window)).await.unwrap();
        pair.to_right.remove_remote_region(range.region);
        assert_eq!(lent.granted.end(GrantEnd::WindowEnded).unwrap()[..], source[..]);
    }
}

pub async fn a_window_takes_parts_of_its_range(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let lent = pool.lend(300);
    let (window, range) = open(&pair, &lent, &pair.to_right, &pair.to_left).await;
    for part in [2, 0, 1] {
        let range = RemoteRange { offset: part * 100, length: 100, ..range };
        let write =
            pair.to_right.write_imm(pair.left.source.filled(100, part), range, Immediate(part as u32));
        pair.step("a part", write).await.unwrap();
        assert_eq!(pair.arrival_at_right().await, (part as u32, 100));
    }
    pair.step("the end of the window", pair.to_left.unbind(window)).await.unwrap();
    let bytes = lent.granted.end(GrantEnd::WindowEnded).unwrap();
    for part in 0..3 {
        assert_eq!(bytes[part * 100..][..100], super::pair::pattern(100, part as u64), "part {part}");
    }
}

pub async fn memory_for_windows_is_refused_without_one(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let lent = pool.lend(64);
    let (left_end, right_end) = pair.connect_again().await;
    left_end.add_remote_region(lent.region);
    refused(&pair, (&left_end, &right_end), &lent, lent.range, PeerViolation::NoRight).await;
}

pub async fn a_write_outside_the_window_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    if !is_exact(&pair) {
        return;
    }
    for offset in [1, 64, 4096, 1 << 40] {
        let (left_end, right_end) = pair.connect_again().await;
        let lent = pool.lend(64);
        let (window, range) = open(&pair, &lent, &left_end, &right_end).await;
        // The writer believes in a longer one.
        left_end.add_remote_region(RemoteRegion { length: u64::MAX, ..window.region() });
        let range = RemoteRange { offset, length: 64, ..range };
        refused(&pair, (&left_end, &right_end), &lent, range, PeerViolation::OutOfBounds).await;
    }
}

pub async fn a_write_before_the_window_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    if !is_exact(&pair) {
        return;
    }
    let (left_end, right_end) = pair.connect_again().await;
    let (first, second) = (pool.lend(4096), pool.lend(4096));
    let (one, range) = open(&pair, &first, &left_end, &right_end).await;
    let (other, _) = open(&pair, &second, &left_end, &right_end).await;
    // With the window of the one, aim at the other, which lies next to it.
    let apart = second.address.wrapping_sub(first.address) as u64;
    let claim = RemoteRegion { length: u64::MAX, ..one.region() };
    left_end.add_remote_region(RemoteRegion { base: claim.base.wrapping_add(apart), ..claim });
    // Where no address counts, the offset does.
    let offset = if claim.base == 0 { apart } else { 0 };
    let range = RemoteRange { offset, length: 64, ..range };
    let write = left_end.write_imm(pair.left.source.filled(64, 1), range, Immediate(1));
    drop((pair.step("the write", write).await, other));
    let error = end_of(&pair.runtime, &right_end).await;
    assert!(matches!(error, FabricError::PeerMisbehaved { .. }), "unexpected: {error}");
    assert_eq!((first.bytes(), second.bytes()), (vec![0; 4096], vec![0; 4096]));
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn a_write_after_the_end_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let (left_end, right_end) = pair.connect_again().await;
    let lent = pool.lend(64);
    let (window, range) = open(&pair, &lent, &left_end, &right_end).await;
    let write = left_end.write_imm(pair.left.source.filled(64, 3), range, Immediate(3));
    pair.step("the write", write).await.unwrap();
    assert_eq!(immediate(pair.step("an arrival", right_end.next_arrival()).await.unwrap()), (3, 64));
    pair.step("the end of the window", right_end.unbind(window)).await.unwrap();
    refused(&pair, (&left_end, &right_end), &lent, range, PeerViolation::UnknownRegion).await;
}

pub async fn the_key_of_an_earlier_window_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let (left_end, right_end) = pair.connect_again().await;
    let lent = pool.lend(64);
    let (first, range) = open(&pair, &lent, &left_end, &right_end).await;
    pair.step("the end of the first", right_end.unbind(first)).await.unwrap();
    // The device may use the same window again, with another key.
    let (_second, _) = open(&pair, &lent, &left_end, &right_end).await;
    refused(&pair, (&left_end, &right_end), &lent, range, PeerViolation::UnknownRegion).await;
}

pub async fn the_window_of_another_queue_pair_is_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let (left_end, right_end) = pair.connect_again().await;
    let lent = pool.lend(64);
    let (window, range) = open(&pair, &lent, &pair.to_right, &pair.to_left).await;
    left_end.add_remote_region(window.region());
    refused(&pair, (&left_end, &right_end), &lent, range, PeerViolation::WrongKey).await;
    // Through its own it still works.
    let write = pair.to_right.write_imm(pair.left.source.filled(64, 9), range, Immediate(9));
    pair.step("the write", write).await.unwrap();
    assert_eq!(pair.arrival_at_right().await, (9, 64));
}

pub async fn a_window_of_another_queue_pair_cannot_be_ended(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let (_left_end, right_end) = pair.connect_again().await;
    let lent = pool.lend(64);
    let (window, _) = open(&pair, &lent, &pair.to_right, &pair.to_left).await;
    let error = pair.step("the end", right_end.unbind(window)).await.unwrap_err();
    assert!(matches!(error, FabricError::Unsupported { .. }), "unexpected: {error}");
}

pub async fn many_windows_are_open_and_end_in_any_order(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let mut open_now: Vec<(Window, Lent, RemoteRange)> = Vec::new();
    for round in 0..40_u64 {
        let lent = pool.lend(128);
        let (window, range) = open(&pair, &lent, &pair.to_right, &pair.to_left).await;
        open_now.push((window, lent, range));
        let seed = round % open_now.len() as u64;
        let (_, lent, range) = &open_now[seed as usize];
        let source = pair.left.source.filled(128, round);
        let write = pair.to_right.write_imm(source.clone(), *range, Immediate(round as u32));
        pair.step("a write", write).await.unwrap();
        assert_eq!(pair.arrival_at_right().await, (round as u32, 128));
        assert_eq!(lent.bytes(), source[..]);
        if round % 3 == 2 {
            let (window, lent, range) = open_now.remove(seed as usize);
            pair.step("the end", pair.to_left.unbind(window)).await.unwrap();
            pair.to_right.remove_remote_region(range.region);
            drop(lent.granted.end(GrantEnd::WindowEnded).unwrap());
        }
    }
}

pub async fn binds_wait_for_room_in_the_send_queue(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let depths = QueuePairConfig { send_depth: 4, receive_depth: 16 };
    let (_left_end, right_end) = pair.connect_with(depths).await;
    let lent: Vec<Lent> = (0..20).map(|_| pool.lend(64)).collect();
    let binds = lent.iter().map(|lent| right_end.bind(&lent.granted));
    let windows = pair.step("the binds", futures::future::join_all(binds)).await;
    let windows: Vec<Window> = windows.into_iter().map(Result::unwrap).collect();
    let ends = windows.into_iter().map(|window| right_end.unbind(window));
    for ended in pair.step("the ends", futures::future::join_all(ends)).await {
        ended.unwrap();
    }
    for lent in lent {
        drop(lent.granted.end(GrantEnd::WindowEnded).unwrap());
    }
}

pub async fn what_cannot_be_bound_fails_alone(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let lent = pair.right.receive.lend(64);
    let error = pair.step("a bind", pair.to_left.bind(&lent.granted)).await.unwrap_err();
    assert!(matches!(error, FabricError::NotBindable { .. }), "unexpected: {error}");
    assert!(error.to_string().contains("Access::WINDOWED"), "{error}");
    let nothing = pool.pool.try_alloc(0).unwrap().grant();
    let error = pair.step("a bind", pair.to_left.bind(&nothing)).await.unwrap_err();
    assert!(matches!(error, FabricError::Unsupported { .. }), "unexpected: {error}");
    drop(nothing.end(GrantEnd::NeverSent).unwrap());
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn a_dropped_bind_is_gone_with_its_queue_pair(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let (_left_end, right_end) = pair.connect_again().await;
    let lent = pool.lend(64);
    drop(right_end.bind(&lent.granted));
    drop(pair.step("a bind", right_end.bind(&lent.granted)).await.unwrap());
    pair.step("the close", right_end.close()).await;
    assert_eq!(lent.granted.end(GrantEnd::QueuePairDrained).unwrap()[..], [0; 64]);
    pair.works(&pair.to_right, &pair.to_left).await;
}

pub async fn a_close_ends_windows_and_later_ones_are_refused(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((pair, pool)) = windowed(setup, runtime).await else { return };
    let (left_end, right_end) = pair.connect_again().await;
    let (one, other) = (pool.lend(64), pool.lend(64));
    let (window, _range) = open(&pair, &one, &left_end, &right_end).await;
    pair.step("the close", right_end.close()).await;
    drop(one.granted.end(GrantEnd::QueuePairDrained).unwrap());
    pair.step("the end", right_end.unbind(window)).await.unwrap_err();
    pair.step("a bind", right_end.bind(&other.granted)).await.unwrap_err();
    // Its domain is as good as before.
    let (window, range) = open(&pair, &other, &pair.to_right, &pair.to_left).await;
    let write = pair.to_right.write_imm(pair.left.source.filled(64, 2), range, Immediate(2));
    pair.step("the write", write).await.unwrap();
    assert_eq!(pair.arrival_at_right().await, (2, 64));
    pair.step("the end", pair.to_left.unbind(window)).await.unwrap();
}

pub async fn windows_weigh_one_entry_of_the_send_queue(setup: Setup, runtime: Arc<dyn Runtime>) {
    let Some((_pair, pool)) = windowed(setup, runtime).await else { return };
    let lent = pool.lend(1 << 20);
    let window = verbs_reactor::WindowBinding::over(&lent.granted).unwrap();
    for request in [WorkRequest::Bind { window: window.clone() }, WorkRequest::Unbind { window }] {
        assert_eq!((request.weight(64), request.length(), request.pieces(64).count()), (1, 0, 0));
        assert!(request.immediate().is_none());
    }
}

//! Bytes that a lost peer may still read are not allocated again until the peer is dead.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use tensorwire_memory::{Buf, ForeignMemory, MemoryError, Pool, PoolConfig};

fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: 4096, cap_bytes: 1024, ..PoolConfig::new("retired") }).unwrap()
}

fn buffer(pool: &Pool, length: usize) -> Buf {
    pool.try_alloc(length).unwrap().freeze()
}

/// `(retired, leaked, used)`.
fn counts(pool: &Pool) -> (u64, u64, u64) {
    let stats = pool.stats();
    (stats.retired_bytes, stats.leaked_bytes, stats.used_bytes)
}

#[test]
fn retired_bytes_come_back_when_they_are_released_and_not_before() {
    let pool = pool();
    let retired = buffer(&pool, 1000).retire();
    assert_eq!(counts(&pool), (1024, 0, 1024));
    assert!(matches!(pool.try_alloc(1), Err(MemoryError::Exhausted { .. })));
    assert_eq!(retired.buf().unwrap().len(), 1000);
    retired.release();
    assert_eq!(counts(&pool), (0, 0, 0));
    drop(pool.try_alloc(1024).unwrap());
}

#[test]
fn a_release_leaves_the_buffers_that_are_held_elsewhere() {
    let pool = pool();
    let held = buffer(&pool, 100);
    held.slice(10..20).unwrap().retire().release();
    assert_eq!((counts(&pool), held.len()), ((0, 0, 128), 100));
    drop(held);
    assert_eq!(counts(&pool), (0, 0, 0));
}

#[test]
fn buffers_are_retired_with_the_one_that_they_are_attached_to() {
    let pool = pool();
    let attached = vec![buffer(&pool, 100), buffer(&pool, 200).slice(50..60).unwrap()];
    let table = pool.try_alloc(64).unwrap().freeze_with(attached);
    assert_eq!(table.attached().map(|attached| attached.len()).collect::<Vec<_>>(), [100, 10]);
    let kept = table.attached().next().unwrap();
    let retired = table.retire();
    assert_eq!(counts(&pool), (448, 0, 448));
    retired.release();
    assert_eq!(counts(&pool), (0, 0, 128));
    drop(kept);
    assert_eq!(counts(&pool), (0, 0, 0));
    let attached = vec![buffer(&pool, 100)];
    drop(pool.try_alloc(64).unwrap().freeze_with(attached).retire());
    assert_eq!(counts(&pool), (0, 192, 192), "leaked without a release");
}

#[test]
fn many_leases_on_one_allocation_count_once_and_the_last_release_frees_it() {
    let pool = pool();
    let whole = buffer(&pool, 200);
    let leases = [0..100, 50..150, 0..200].map(|range| whole.slice(range).unwrap().retire());
    drop(whole);
    assert_eq!(counts(&pool), (256, 0, 256));
    let [first, second, third] = leases;
    second.release();
    third.release();
    assert_eq!(counts(&pool), (256, 0, 256));
    first.release();
    assert_eq!(counts(&pool), (0, 0, 0));
}

#[test]
fn dropped_without_a_release_it_is_leaked_and_counted_once() {
    let pool = pool();
    let whole = buffer(&pool, 200);
    let (first, second, third) = (whole.clone().retire(), whole.clone().retire(), whole.clone().retire());
    drop((first, whole));
    assert_eq!(counts(&pool), (256, 256, 256));
    drop(second);
    third.release();
    assert_eq!(counts(&pool), (0, 256, 256), "leaked once, for ever");
    assert!(pool.try_alloc(1024).is_err() && pool.try_alloc(768).is_ok());
}

#[test]
fn retired_bytes_are_no_part_of_the_early_share() {
    let pool = pool();
    let retired = buffer(&pool, 512).retire();
    let error = pool.try_alloc_early(257).unwrap_err();
    assert!(matches!(error, MemoryError::EarlyExhausted { share: 256, .. }), "{error}");
    drop(pool.try_alloc_early(256).unwrap());
    retired.release();
    drop(pool.try_alloc_early(512).unwrap());
}

#[test]
fn a_block_stays_mapped_until_its_retired_bytes_are_released() {
    let pool = pool();
    let retired = buffer(&pool, 100).retire();
    drop(pool);
    assert_eq!(retired.buf().unwrap()[..].len(), 100);
    assert!(retired.buf().unwrap().iter().all(|byte| *byte == 0));
    retired.release();
}

#[test]
fn what_is_in_no_pool_can_be_retired_too() {
    Buf::empty().retire().release();
    drop(Buf::empty().retire());
    let owner: Arc<dyn ForeignMemory> = Arc::new(vec![1; 10]);
    Buf::foreign(owner.clone()).retire().release();
    assert_eq!(Arc::strong_count(&owner), 1);
    drop(Buf::foreign(owner.clone()).retire());
    assert!(Arc::strong_count(&owner) > 1, "leaked: the peer may still read it");
}

//! Granted memory: which accesses are allowed, and when it may be used again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use proptest::prelude::*;
use tensorwire_memory::{
    Block, GrantEnd, Granted, MemoryError, Pool, PoolConfig, RemoteTarget, copy::CopyReason,
};

fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: 4096, cap_bytes: 4096, ..PoolConfig::new("grants") }).unwrap()
}

fn lend(pool: &Pool, length: usize) -> Granted {
    let mut buffer = pool.try_alloc(length).unwrap();
    buffer.fill(0);
    buffer.grant()
}

fn target(granted: &Granted, offset: u64, length: u64) -> Result<RemoteTarget, MemoryError> {
    granted.block().unwrap().remote_target(granted.offset() as u64 + offset, length)
}

fn is_refused<T>(result: &Result<T, MemoryError>) -> bool {
    matches!(result, Err(MemoryError::NotGranted { .. }))
}

const WHY: CopyReason = CopyReason::SimPiece;

#[test]
fn a_target_covers_its_grant_and_not_one_byte_more() {
    let pool = pool();
    let granted = lend(&pool, 100);
    for (offset, length) in [(0, 100), (0, 0), (0, 1), (99, 1), (100, 0), (50, 50)] {
        assert_eq!(target(&granted, offset, length).unwrap().length() as u64, length);
    }
    for (offset, length) in [(0, 101), (100, 1), (1, 100), (50, u64::MAX), (u64::MAX - 1000, 1), (1 << 40, 0)]
    {
        assert!(is_refused(&target(&granted, offset, length)), "{offset} {length}");
    }
    let before = granted.block().unwrap().remote_target(granted.offset() as u64, 100).unwrap();
    for (offset, length) in [(0, 101), (100, 1), (usize::MAX, 1), (1, usize::MAX)] {
        assert!(is_refused(&before.access(offset, length)), "{offset} {length}");
    }
    granted.end(GrantEnd::NeverSent).unwrap();
}

#[test]
fn one_grant_must_cover_the_whole_range() {
    let pool = pool();
    // Neighbours: together they cover 128 bytes, but they are two grants.
    let (first, second) = (lend(&pool, 64), lend(&pool, 64));
    assert_eq!(first.offset() + 64, second.offset());
    assert!(is_refused(&target(&first, 32, 64)));
    assert!(is_refused(&target(&first, 0, 128)));
    let across = target(&first, 0, 64).unwrap();
    across.write_at(0, &[1; 64], WHY).unwrap();
    assert!(is_refused(&across.write_at(32, &[1; 64], WHY)));
    let second = second.end(GrantEnd::NeverSent).unwrap();
    assert_eq!(second[..], [0; 64]);
    assert_eq!(first.end(GrantEnd::Content).unwrap()[..], [1; 64]);
}

#[test]
fn what_is_not_lent_cannot_be_reached() {
    let pool = pool();
    let owned = pool.try_alloc(64).unwrap();
    let block = owned.block().unwrap().clone();
    assert!(is_refused(&block.remote_target(0, 64)));
    let frozen = owned.freeze();
    assert!(is_refused(&block.remote_target(0, 64)));
    assert!(is_refused(&block.remote_target(4096, 0)));
    assert_eq!(frozen.len(), 64);
}

#[test]
fn an_empty_loan_reaches_nothing_and_ends_well() {
    let pool = pool();
    let granted = pool.try_alloc(0).unwrap().grant();
    assert!(granted.block().is_none() && granted.length() == 0 && granted.offset() == 0);
    granted.read_at(0, &mut [], WHY).unwrap();
    assert!(is_refused(&granted.read_at(0, &mut [0], WHY)));
    assert!(granted.end(GrantEnd::Content).unwrap().is_empty());
    drop(pool.try_alloc(0).unwrap().grant());
    assert_eq!(pool.stats().leaked_bytes, 0);
}

#[test]
fn a_target_found_before_the_end_is_dead_after_it_and_for_the_next_loan_too() {
    let pool = pool();
    let granted = lend(&pool, 64);
    let old = target(&granted, 0, 64).unwrap();
    old.write_at(0, &[7; 64], WHY).unwrap();
    let place = (granted.block().unwrap().id(), granted.offset());
    let mut memory = granted.end(GrantEnd::Content).unwrap();
    assert_eq!(memory[..], [7; 64]);
    assert!(is_refused(&old.write_at(0, &[8; 64], WHY)));
    assert!(is_refused(&old.access(0, 1)));
    assert!(is_refused(&old.access(0, 0)));
    memory.fill(9);
    // The same bytes, granted again: the target of the old grant stays invalid.
    let again = memory.grant();
    assert_eq!((again.block().unwrap().id(), again.offset()), place);
    assert!(is_refused(&old.write_at(0, &[8; 64], WHY)));
    target(&again, 0, 64).unwrap().write_at(63, &[1], WHY).unwrap();
    let memory = again.end(GrantEnd::Content).unwrap();
    assert_eq!((memory[0], memory[63]), (9, 1));
}

#[test]
fn a_loan_that_ends_while_it_is_accessed_is_leaked_and_counted() {
    let pool = pool();
    let granted = lend(&pool, 100);
    let target = target(&granted, 0, 100).unwrap();
    let access = target.access(10, 20).unwrap();
    assert_eq!(access.length(), 20);
    let error = granted.end(GrantEnd::Content).unwrap_err();
    assert!(matches!(error, MemoryError::GrantBusy { length: 100, .. }), "{error}");
    let stats = pool.stats();
    assert_eq!((stats.used_bytes, stats.leaked_bytes), (128, 128));
    drop(access);
    assert!(is_refused(&target.access(0, 1)));
}

#[test]
fn a_dropped_loan_is_leaked_and_its_bytes_are_never_given_out_again() {
    let pool = pool();
    let granted = lend(&pool, 1024);
    let target = target(&granted, 0, 1024).unwrap();
    let leaked = granted.offset();
    drop(granted);
    assert_eq!(pool.stats().leaked_bytes, 1024);
    assert!(is_refused(&target.write_at(0, &[1], WHY)));
    let rest: Vec<_> = (0..3).map(|_| pool.try_alloc(1024).unwrap().freeze()).collect();
    assert!(rest.iter().all(|buffer| buffer.offset() != leaked));
    assert!(matches!(pool.try_alloc(1), Err(MemoryError::Exhausted { .. })));
}

#[test]
fn bytes_are_read_out_of_a_loan_inside_it_only() {
    let pool = pool();
    let granted = lend(&pool, 100);
    target(&granted, 40, 20).unwrap().write_at(0, &[5; 20], WHY).unwrap();
    let mut out = [0; 30];
    granted.read_at(35, &mut out, WHY).unwrap();
    assert_eq!(out[..5], [0; 5]);
    assert_eq!(out[5..25], [5; 20]);
    for offset in [71, 100, 101, usize::MAX, usize::MAX - 10] {
        assert!(is_refused(&granted.read_at(offset, &mut out, WHY)), "{offset}");
    }
    drop(granted.end(GrantEnd::Content).unwrap());
}

/// A peer that writes into the current grant as fast as it can, from another thread.
fn hammer(block: &Block, offset: &AtomicU64, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        if let Ok(target) = block.remote_target(offset.load(Ordering::Relaxed), 256) {
            let _refused_or_not = target.write_at(0, &[0xEE; 256], WHY);
        }
    }
}

#[test]
fn memory_taken_back_is_never_written_by_a_racing_peer() {
    let pool = Pool::new(PoolConfig { block_bytes: 1 << 20, ..PoolConfig::new("race") }).unwrap();
    let mut memory = Some(pool.try_alloc(256).unwrap());
    let block = memory.as_ref().unwrap().block().unwrap().clone();
    let (offset, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let peer = {
        let (offset, stop) = (offset.clone(), stop.clone());
        thread::spawn(move || hammer(&block, &offset, &stop))
    };
    let (mut taken_back, mut written, mut busy) = (0, 0_u32, 0_u32);
    while (taken_back < 5000 || written + busy == 0) && taken_back < 5_000_000 && busy < 3000 {
        let mut buffer = memory.take().unwrap_or_else(|| pool.try_alloc(256).unwrap());
        buffer.fill(1);
        assert!(buffer.iter().all(|byte| *byte == 1), "written while it was not lent");
        let granted = buffer.grant();
        offset.store(granted.offset() as u64, Ordering::Relaxed);
        // Yielding in every round would take minutes where many processes want the processor.
        match taken_back % 16 {
            0 => thread::yield_now(),
            _ => (0..64).for_each(|_| hint::spin_loop()),
        }
        match granted.end(GrantEnd::Content) {
            Ok(buffer) => {
                taken_back += 1;
                written += u32::from(buffer[255] == 0xEE);
                memory = Some(buffer);
            }
            // Ended in the middle of an access: leaked, so the next grant is of other bytes.
            Err(MemoryError::GrantBusy { .. }) => busy += 1,
            Err(error) => panic!("{error}"),
        }
    }
    stop.store(true, Ordering::Relaxed);
    peer.join().unwrap();
    assert!(written + busy > 0, "the peer never met a loan");
    assert_eq!(pool.stats().leaked_bytes, 256 * u64::from(busy));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// Random grants in one block, and accesses anywhere: exactly those inside one grant are allowed.
    #[test]
    fn accesses_are_allowed_exactly_inside_one_loan(
        lengths in proptest::collection::vec((1..300usize, any::<bool>()), 1..12),
        accesses in proptest::collection::vec((0..5000u64, 0..400u64), 1..40),
    ) {
        let pool = pool();
        let mut lent = Vec::new();
        let mut owned = Vec::new();
        for (length, is_lent) in lengths {
            match pool.try_alloc(length) {
                Ok(buffer) if is_lent => lent.push(buffer.grant()),
                Ok(buffer) => owned.push(buffer),
                Err(_) => break,
            }
        }
        let block = match (lent.first(), owned.first()) {
            (Some(granted), _) => granted.block().unwrap().clone(),
            (None, Some(buffer)) => buffer.block().unwrap().clone(),
            (None, None) => return Ok(()),
        };
        for (offset, length) in accesses {
            let inside = |granted: &Granted| {
                let start = granted.offset() as u64;
                start <= offset && offset + length <= start + granted.length() as u64
            };
            prop_assert_eq!(block.remote_target(offset, length).is_ok(), lent.iter().any(inside));
        }
        lent.into_iter().for_each(|granted| drop(granted.end(GrantEnd::NeverSent).unwrap()));
    }
}

//! Destinations of unanswered requests hold at most a share of the pool.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
};

use tensorwire_memory::{GrantEnd, MemoryError, Pool, PoolConfig};

fn pool(early_share: u8) -> Pool {
    let config = PoolConfig { block_bytes: 4096, cap_bytes: 1024, early_share, ..PoolConfig::new("early") };
    Pool::new(config).unwrap()
}

fn is_early(result: &Result<tensorwire_memory::BufMut, MemoryError>) -> bool {
    matches!(result, Err(MemoryError::EarlyExhausted { .. }))
}

#[test]
fn early_buffers_take_half_of_the_pool_and_the_rest_takes_all_of_it() {
    let pool = pool(50);
    let early: Vec<_> = (0..4).map(|_| pool.try_alloc_early(128).unwrap()).collect();
    let error = pool.try_alloc_early(1).unwrap_err();
    assert!(
        matches!(error, MemoryError::EarlyExhausted { early: 512, share: 512, requested: 1, .. }),
        "{error}"
    );
    assert!(error.is_exhausted() && error.to_string().contains("512 of 512"));
    let late = pool.try_alloc(512).unwrap();
    assert_eq!((pool.stats().used_bytes, pool.stats().early_bytes), (1024, 512));
    drop((early, late));
    assert_eq!((pool.stats().used_bytes, pool.stats().early_bytes), (0, 0));
}

#[test]
fn shares_at_their_bounds() {
    assert!(is_early(&pool(0).try_alloc_early(1)));
    assert!(pool(0).try_alloc_early(0).is_ok(), "nothing takes no memory");
    for all in [100, 101, 255] {
        assert_eq!(pool(all).try_alloc_early(1024).unwrap().len(), 1024);
    }
    assert!(is_early(&pool(50).try_alloc_early(513)));
    assert!(matches!(pool(50).try_alloc_early(1025), Err(MemoryError::TooLarge { .. })));
}

#[test]
fn an_answer_or_the_end_of_the_grant_or_freezing_gives_the_share_back() {
    let pool = pool(50);
    let granted = pool.try_alloc_early(512).unwrap().grant();
    assert!(is_early(&pool.try_alloc_early(1)));
    granted.answered();
    granted.answered();
    assert_eq!((pool.stats().early_bytes, pool.stats().used_bytes), (0, 512));
    let second = pool.try_alloc_early(512).unwrap().grant();
    assert_eq!(pool.stats().early_bytes, 512);
    let memory = second.end(GrantEnd::CancelAck).unwrap();
    assert_eq!((pool.stats().early_bytes, pool.stats().used_bytes), (0, 1024));
    drop((memory, granted.end(GrantEnd::Content).unwrap()));
    let frozen = pool.try_alloc_early(512).unwrap().freeze();
    assert_eq!((pool.stats().early_bytes, pool.stats().used_bytes), (0, 512));
    drop(frozen);
}

#[test]
fn what_was_not_taken_early_has_nothing_to_give_back() {
    let pool = pool(50);
    let early = pool.try_alloc_early(64).unwrap();
    let granted = pool.try_alloc(64).unwrap().grant();
    granted.answered();
    drop(granted.end(GrantEnd::ReadCompleted).unwrap());
    assert_eq!(pool.stats().early_bytes, 64);
    drop(early);
}

#[test]
fn leaked_memory_counts_neither_as_early_nor_as_part_of_the_pool() {
    let pool = pool(50);
    drop(pool.try_alloc_early(512).unwrap().grant());
    let stats = pool.stats();
    assert_eq!((stats.early_bytes, stats.leaked_bytes, stats.used_bytes), (0, 512, 512));
    assert!(is_early(&pool.try_alloc_early(257)), "half of what is left");
    drop(pool.try_alloc_early(256).unwrap());
}

#[test]
fn an_early_buffer_neither_waits_nor_overtakes_those_who_wait() {
    let pool = pool(50);
    let held = pool.try_alloc(1024).unwrap();
    let mut waiting = pin!(pool.alloc(1024));
    let mut context = Context::from_waker(Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    assert!(matches!(pool.try_alloc_early(64), Err(MemoryError::Exhausted { .. })));
    drop(held);
    // There is room, but it belongs to the caller that waits.
    assert!(matches!(pool.try_alloc_early(64), Err(MemoryError::Exhausted { .. })));
    let Poll::Ready(Ok(buffer)) = waiting.as_mut().poll(&mut context) else {
        panic!("room and first in line")
    };
    drop(buffer);
    assert!(pool.try_alloc_early(64).is_ok());
}

#[test]
fn those_who_wait_are_not_held_up_by_a_full_early_share() {
    let pool = pool(50);
    let early = pool.try_alloc_early(512).unwrap();
    let mut waiting = pin!(pool.alloc(512));
    let ready = waiting.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(ready, Poll::Ready(Ok(_))));
    drop(early);
}

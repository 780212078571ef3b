//! What a peer may read: exactly the exposed ranges, and as long as they are exposed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use tensorwire_memory::{Block, Buf, MemoryError, Pool, PoolConfig};

fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: 4096, cap_bytes: 4096, ..PoolConfig::new("exposures") }).unwrap()
}

fn filled(pool: &Pool, length: usize) -> Buf {
    let mut buffer = pool.try_alloc(length).unwrap();
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
    buffer.freeze()
}

fn find(buffer: &Buf, offset: u64, length: u64) -> Result<Buf, MemoryError> {
    buffer.block().unwrap().exposed(buffer.offset() as u64 + offset, length)
}

fn is_refused(result: &Result<Buf, MemoryError>) -> bool {
    matches!(result, Err(MemoryError::NotExposed { .. }))
}

#[test]
fn exactly_the_exposed_bytes_are_found() {
    let pool = pool();
    let buffer = filled(&pool, 100);
    assert!(is_refused(&find(&buffer, 0, 1)), "nothing is exposed yet");
    let exposure = buffer.slice(10..90).unwrap().expose();
    for (offset, length) in [(10, 80), (10, 0), (89, 1), (90, 0), (50, 7)] {
        let found = find(&buffer, offset, length).unwrap();
        assert_eq!(found[..], buffer[offset as usize..(offset + length) as usize]);
        assert_eq!(found.offset() as u64, buffer.offset() as u64 + offset);
    }
    for (offset, length) in
        [(9, 1), (9, 10), (10, 81), (90, 1), (10, u64::MAX), (u64::MAX - 4096, 1), (1 << 40, 0)]
    {
        assert!(is_refused(&find(&buffer, offset, length)), "{offset} {length}");
    }
    drop(exposure);
    assert!(is_refused(&find(&buffer, 10, 1)), "the exposure is over");
}

#[test]
fn one_exposure_must_cover_the_whole_range() {
    let pool = pool();
    let (first, second) = (filled(&pool, 64), filled(&pool, 64));
    assert_eq!(first.offset() + 64, second.offset());
    let exposures = (first.expose(), second.expose());
    assert!(is_refused(&find(&first, 32, 64)));
    let halves = (first.slice(0..40).unwrap().expose(), first.slice(30..64).unwrap().expose());
    drop(exposures.0);
    assert!(find(&first, 0, 40).is_ok() && find(&first, 35, 5).is_ok() && find(&first, 30, 34).is_ok());
    assert!(is_refused(&find(&first, 20, 30)), "two exposures cover it together, none alone");
    drop(halves);
}

#[test]
fn a_range_exposed_twice_stays_exposed_until_both_are_over() {
    let pool = pool();
    let buffer = filled(&pool, 64);
    let (first, second) = (buffer.expose(), buffer.expose());
    drop(first);
    assert!(find(&buffer, 0, 64).is_ok());
    drop(second);
    assert!(is_refused(&find(&buffer, 0, 64)));
}

#[test]
fn bytes_that_were_found_outlive_their_exposure() {
    let pool = pool();
    let buffer = filled(&pool, 100);
    let exposure = buffer.expose();
    let found = find(&buffer, 20, 10).unwrap();
    drop((exposure, buffer));
    assert_eq!((pool.stats().used_bytes, found[0]), (128, 20));
    drop(found);
    assert_eq!(pool.stats().used_bytes, 0);
}

#[test]
fn an_exposure_keeps_its_bytes_from_being_given_out_again() {
    let pool = pool();
    let buffer = filled(&pool, 4096);
    let exposure = buffer.expose();
    drop(buffer);
    assert!(pool.try_alloc(1).unwrap_err().is_exhausted());
    drop(exposure);
    drop(pool.try_alloc(4096).unwrap());
}

#[test]
fn memory_used_again_is_not_exposed() {
    let pool = pool();
    let buffer = filled(&pool, 64);
    let (block, offset): (Block, _) = (buffer.block().unwrap().clone(), buffer.offset() as u64);
    drop(buffer.expose());
    drop(buffer);
    let again = filled(&pool, 64);
    assert_eq!(again.offset() as u64, offset);
    assert!(is_refused(&block.exposed(offset, 64)));
    assert!(block.remote_target(offset, 64).is_err(), "readable is not writable");
    let exposure = again.expose();
    assert!(block.exposed(offset, 64).is_ok() && block.remote_target(offset, 64).is_err());
    drop(exposure);
}

#[test]
fn an_empty_buffer_exposes_nothing() {
    let exposure = Buf::empty().expose();
    assert!(exposure.buf().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn reads_are_allowed_exactly_inside_one_exposure(
        ranges in proptest::collection::vec((0..12usize, 0..300usize, 0..300usize), 1..20),
        reads in proptest::collection::vec((0..4200u64, 0..300u64), 1..60),
    ) {
        let pool = pool();
        let buffers: Vec<_> = (0..12).map(|_| filled(&pool, 300)).collect();
        let block = buffers[0].block().unwrap().clone();
        let exposures: Vec<_> = ranges
            .iter()
            .filter_map(|&(which, start, end)| buffers[which].slice(start..end))
            .map(|part| part.expose())
            .collect();
        for (offset, length) in reads {
            let covers = |part: &Buf| {
                let start = part.offset() as u64;
                start <= offset && offset + length <= start + part.len() as u64
            };
            let inside = exposures.iter().any(|exposure| covers(exposure.buf()));
            prop_assert_eq!(block.exposed(offset, length).is_ok(), inside);
        }
        drop((exposures, buffers));
        prop_assert_eq!(pool.stats().used_bytes, 0);
    }
}

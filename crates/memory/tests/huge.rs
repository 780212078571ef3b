//! Huge pages: the pages obtained are counted, and if required ones are not available, that is an error.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use tensorwire_memory::{HugePages, MemoryError, Pool, PoolConfig};

const HUGE: usize = 2 << 20;

fn pool(huge_pages: HugePages, block_bytes: usize) -> Pool {
    Pool::new(PoolConfig { huge_pages, block_bytes, ..PoolConfig::new("huge") }).unwrap()
}

#[test]
fn huge_pages_are_tried_and_counted_and_bytes_are_where_they_belong() {
    let pool = pool(HugePages::Try, 2 * HUGE);
    let mut buffer = pool.try_alloc(2 * HUGE).unwrap();
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index % 251) as u8);
    assert!(buffer.iter().enumerate().all(|(index, byte)| *byte == (index % 251) as u8));
    let stats = pool.stats();
    let block = buffer.block().unwrap();
    assert_eq!((stats.block_bytes, stats.huge_bytes), (2 * HUGE as u64, block.huge_bytes() as u64));
    assert!(block.huge_bytes() <= block.length() && block.huge_bytes().is_multiple_of(HUGE));
    assert!(block.shareable());
    println!("{} of {} bytes are in huge pages", stats.huge_bytes, stats.block_bytes);
}

#[test]
fn required_huge_pages_are_got_for_the_whole_block_or_named_in_an_error() {
    let pool = pool(HugePages::Require, 100_000);
    match pool.try_alloc(1) {
        Ok(buffer) => {
            let block = buffer.block().unwrap();
            assert!(block.length().is_multiple_of(HUGE), "rounded up to whole huge pages");
            assert_eq!(block.huge_bytes(), block.length());
        }
        Err(error) => {
            assert!(matches!(error, MemoryError::HugePages { .. } | MemoryError::Limit { .. }), "{error}");
            assert_eq!((pool.stats().block_bytes, pool.stats().used_bytes), (0, 0));
        }
    }
}

#[test]
fn blocks_smaller_than_a_huge_page_are_made_of_small_ones() {
    let pool = pool(HugePages::Try, 8192);
    let buffer = pool.try_alloc(100).unwrap();
    assert_eq!((buffer.block().unwrap().length(), pool.stats().huge_bytes), (8192, 0));
}

#[test]
fn without_being_asked_a_pool_takes_no_trouble() {
    let pool = pool(PoolConfig::new("default").huge_pages, 2 * HUGE);
    let buffer = pool.try_alloc(1).unwrap();
    assert_eq!((buffer.block().unwrap().huge_bytes(), pool.stats().huge_bytes), (0, 0));
}

//! Buffers in parts.

use tensorwire_memory::{BufMut, GrantEnd, Pool, PoolConfig, copy::CopyReason};

fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: 4096, cap_bytes: 4096, ..PoolConfig::new("division") }).unwrap()
}

fn buffer(pool: &Pool, length: usize) -> BufMut {
    let mut buffer = pool.try_alloc(length).unwrap();
    buffer.fill(0);
    buffer
}

#[test]
fn parts_are_the_buffer_and_are_written_side_by_side() {
    let pool = pool();
    let (divided, mut parts) = buffer(&pool, 100).divide(&[10, 10, 64]).unwrap();
    assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [10, 0, 54, 36]);
    for (part, value) in parts.iter_mut().zip(1..) {
        part.fill(value);
    }
    let divided = divided.joined().unwrap_err();
    drop(parts);
    let joined = divided.joined().unwrap();
    assert_eq!(joined[..], [vec![1; 10], vec![3; 54], vec![4; 36]].concat());
}

#[test]
fn cuts_that_do_not_fit_are_refused() {
    let pool = pool();
    for cuts in [&[101][..], &[20, 10], &[50, usize::MAX]] {
        assert!(buffer(&pool, 100).divide(cuts).is_none());
        assert_eq!(pool.stats().used_bytes, 0);
    }
    let (divided, parts) = buffer(&pool, 0).divide(&[0]).unwrap();
    assert_eq!(parts.len(), 2);
    drop(parts);
    assert!(divided.joined().unwrap().is_empty());
}

#[test]
fn a_peer_that_may_write_a_part_reaches_no_other() {
    let pool = pool();
    let (divided, mut parts) = buffer(&pool, 128).divide(&[64]).unwrap();
    let [first, second] = [parts.remove(0).grant(), parts.remove(0).grant()];
    let target = |offset, length| first.block().unwrap().remote_target(offset as u64, length);
    assert!(target(first.offset(), 65).is_err());
    assert!(target(first.offset() + 32, 64).is_err());
    target(first.offset(), 64).unwrap().write_at(0, &[7; 64], CopyReason::SimPiece).unwrap();
    let block = first.block().unwrap().clone();
    let offset = first.offset();
    drop(first.end(GrantEnd::Content).unwrap());
    // The peer has lost this part, and the other one is still granted.
    assert!(block.remote_target(offset as u64, 64).is_err());
    let divided = divided.joined().unwrap_err();
    drop(second.end(GrantEnd::NeverSent).unwrap());
    assert_eq!(divided.joined().unwrap()[..], [[7; 64], [0; 64]].concat());
}

#[test]
fn the_memory_returns_with_the_last_part_and_never_if_one_is_leaked() {
    let pool = pool();
    let (divided, mut parts) = buffer(&pool, 128).divide(&[64]).unwrap();
    let used = pool.stats().used_bytes;
    let shared = parts.remove(0).freeze();
    drop((divided, parts));
    assert_eq!(pool.stats().used_bytes, used);
    drop(shared);
    assert_eq!((pool.stats().used_bytes, pool.stats().leaked_bytes), (0, 0));

    let (divided, mut parts) = buffer(&pool, 128).divide(&[64]).unwrap();
    // Nobody knows whether its peer still writes.
    drop(parts.remove(0).grant());
    drop(parts);
    drop(divided.joined().unwrap_err());
    assert_eq!((pool.stats().used_bytes, pool.stats().leaked_bytes), (used, used));
}

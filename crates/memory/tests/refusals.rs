//! Allocations that are refused although the pool has room.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
};

use tensorwire_memory::{GrantEnd, GrantId, MemoryError, MemoryObserver, Pool, PoolConfig, Span};

/// Refuses the allocation after `successes` others.
#[derive(Debug, Default)]
struct Refusing {
    successes: AtomicU64,
    out: AtomicU64,
}

impl MemoryObserver for Refusing {
    fn allocating(&self, _bytes: usize) -> io::Result<()> {
        match self.successes.fetch_sub(1, Ordering::Relaxed) {
            0 => Err(io::Error::from_raw_os_error(12)),
            _ => Ok(()),
        }
    }
    fn allocated(&self, _span: &Span) {
        self.out.fetch_add(1, Ordering::Relaxed);
    }
    fn freed(&self, _span: &Span) {
        self.out.fetch_sub(1, Ordering::Relaxed);
    }
    fn granted(&self, _span: &Span, _grant: GrantId) {}
    fn grant_ended(&self, _span: &Span, _grant: GrantId, _end: Option<GrantEnd>) {}
}

fn pool(successes: u64) -> (Pool, Arc<Refusing>) {
    let observer = Arc::new(Refusing { successes: AtomicU64::new(successes), ..Refusing::default() });
    let config = PoolConfig { block_bytes: 4096, cap_bytes: 4096, ..PoolConfig::new("refused") };
    (Pool::new(PoolConfig { observer: Some(observer.clone()), ..config }).unwrap(), observer)
}

#[test]
fn d_memory_exhaustion_a_refused_allocation_takes_nothing() {
    for successes in 0..3 {
        let (pool, observer) = pool(successes);
        let mut buffers = Vec::new();
        for number in 0..4 {
            let buffer = if number % 2 == 0 { pool.try_alloc(1000) } else { pool.try_alloc_early(1000) };
            match buffer {
                Ok(buffer) => buffers.push(buffer),
                Err(error) => {
                    assert_eq!(number, successes);
                    let named = matches!(error, MemoryError::Block { bytes: 1024, pool: "refused", .. });
                    assert!(named && !error.is_exhausted(), "{error}");
                }
            }
        }
        assert_eq!((buffers.len(), observer.out.load(Ordering::Relaxed)), (3, 3));
        assert_eq!(pool.stats().used_bytes, 3 * 1024);
        buffers.clear();
        assert_eq!((pool.stats().used_bytes, pool.stats().early_bytes), (0, 0));
        assert_eq!(pool.try_alloc(4096).unwrap().len(), 4096);
    }
}

#[test]
fn d_memory_exhaustion_a_refused_waiter_makes_room_for_the_next() {
    let (pool, _observer) = pool(1);
    let all = pool.try_alloc(4096).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let (mut first, mut second) = (pin!(pool.alloc(4096)), pin!(pool.alloc(4096)));
    assert!(first.as_mut().poll(&mut context).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    drop(all);
    let refused = first.as_mut().poll(&mut context);
    assert!(matches!(refused, Poll::Ready(Err(MemoryError::Block { .. }))), "{refused:?}");
    let Poll::Ready(Ok(buffer)) = second.as_mut().poll(&mut context) else { panic!("it waits on") };
    assert_eq!((buffer.len(), pool.stats().waiting), (4096, 0));
}

//! Buffers over memory that is not a pool's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use tensorwire_memory::{Buf, ForeignMemory, Loan, Pool, PoolConfig};

/// A lease on some bytes, which counts its end.
#[derive(Debug)]
struct Lease {
    bytes: Box<[u8]>,
    ended: Arc<AtomicUsize>,
}

// SAFETY: the box owns its bytes for as long as the value lives, does not move them, and nobody writes them.
unsafe impl ForeignMemory for Lease {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&*self.bytes).cast()
    }

    fn length(&self) -> usize {
        self.bytes.len()
    }
}

fn lease(length: usize) -> (Buf, Arc<AtomicUsize>) {
    let ended = Arc::new(AtomicUsize::new(0));
    let bytes = (0..length).map(|index| index as u8).collect();
    (Buf::foreign(Arc::new(Lease { bytes, ended: ended.clone() })), ended)
}

#[test]
fn a_foreign_buffer_shows_its_owners_bytes_and_lies_in_no_block() {
    let (buffer, _) = lease(100);
    assert!(buffer.is_foreign() && buffer.block().is_none());
    assert_eq!((buffer.len(), buffer[0], buffer[99], buffer.offset()), (100, 0, 99, 0));
    let part = buffer.slice(10..20).unwrap();
    assert_eq!((part[0], part.len(), part.offset(), part.is_foreign()), (10, 10, 10, true));
    assert!(buffer.slice(0..101).is_none());
    let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("own") }).unwrap();
    assert!(!pool.try_alloc(1).unwrap().freeze().is_foreign() && !Buf::empty().is_foreign());
}

#[test]
fn the_owner_ends_when_its_last_buffer_does() {
    let (buffer, ended) = lease(100);
    let (part, bytes) = (buffer.slice(50..60).unwrap(), Bytes::from(buffer.clone()));
    assert_eq!(bytes.as_ptr(), buffer.as_ptr(), "the bytes were copied");
    drop((buffer, bytes));
    assert_eq!((ended_count(&ended), part[0]), (0, 50));
    drop(part);
    assert_eq!(ended_count(&ended), 1);
}

#[test]
fn a_foreign_buffer_can_be_empty() {
    let (buffer, ended) = lease(0);
    assert!(buffer.is_empty() && buffer.is_foreign());
    drop(buffer);
    assert_eq!(ended_count(&ended), 1);
}

#[test]
fn exposing_a_foreign_buffer_permits_nothing_and_keeps_it() {
    let (buffer, ended) = lease(100);
    let exposure = buffer.expose();
    drop(buffer);
    assert_eq!((ended_count(&ended), exposure.buf().len()), (0, 100));
    drop(exposure);
    assert_eq!(ended_count(&ended), 1);
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

fn ended_count(ended: &AtomicUsize) -> usize {
    ended.load(Ordering::Relaxed)
}

#[test]
fn a_loan_shows_a_buffer_without_its_pool_and_tells_its_end_once() {
    let pool = Pool::new(PoolConfig::new("lender")).unwrap();
    let mut bytes = pool.try_alloc(1000).unwrap();
    bytes.fill(7);
    let bytes = bytes.freeze().slice(100..200).unwrap();
    let address = bytes.as_ptr();
    let ended = Arc::new(AtomicUsize::new(0));
    let count = ended.clone();
    let loan = Loan::new(bytes, move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let view = Buf::foreign(Arc::new(loan));
    assert!(view.is_foreign() && view.block().is_none());
    assert_eq!((view.len(), view.as_ptr(), &view[..]), (100, address, &[7; 100][..]));
    let part = view.slice(90..100).unwrap();
    drop(view);
    assert_eq!((ended.load(Ordering::Relaxed), pool.stats().used_bytes), (0, 1024));
    assert_eq!(part[..], [7; 10]);
    drop(part);
    assert_eq!((ended.load(Ordering::Relaxed), pool.stats().used_bytes), (1, 0));
}

#[test]
fn a_loan_of_nothing_is_a_loan() {
    let ended = Arc::new(AtomicUsize::new(0));
    let count = ended.clone();
    let view = Buf::foreign(Arc::new(Loan::new(Buf::empty(), move || {
        count.fetch_add(1, Ordering::Relaxed);
    })));
    assert!(view.is_empty());
    drop(view);
    assert_eq!(ended.load(Ordering::Relaxed), 1);
}

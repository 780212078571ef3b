//! Readable memory that belongs to no pool.

use std::{fmt, ptr::NonNull};

use bytes::Bytes;
use zerocopy::{Immutable, IntoBytes};

use crate::Buf;

/// Memory of a [`Buf`](crate::Buf) that is not a range of a pool: a view of a neighbour's block under a
/// lease, or a read-only mapping of a file.
///
/// The last `Buf` that is dropped drops the owner, and with it the lease or the mapping.
///
/// # Safety
/// From the moment the value is given to this crate in an `Arc` until it is dropped:
/// - [`base`](Self::base) and [`length`](Self::length) return the same at every call;
/// - the `length` bytes from `base` are mapped, initialised and readable by any thread; `base` need not be
///   readable where `length` is 0;
/// - nobody, in this process or another, writes them. Where another process could write them, a lease
///   keeps it from that, and an implementation documents who enforces the lease.
pub unsafe trait ForeignMemory: fmt::Debug + Send + Sync {
    /// First byte.
    fn base(&self) -> NonNull<u8>;

    /// Length in bytes, at most `isize::MAX`.
    fn length(&self) -> usize;
}

// SAFETY: the allocation of a vector that is behind a shared `Arc` neither moves nor changes, because nobody can get
// a `&mut` to the vector, and `Immutable` elements have no interior mutability. `IntoBytes` elements have no padding, so
// each of their bytes is initialised.
unsafe impl<T: IntoBytes + Immutable + fmt::Debug + Send + Sync> ForeignMemory for Vec<T> {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(self.as_slice()).cast()
    }

    fn length(&self) -> usize {
        size_of_val(self.as_slice())
    }
}

// SAFETY: as for a vector.
unsafe impl ForeignMemory for Box<[u8]> {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&**self).cast()
    }

    fn length(&self) -> usize {
        self.len()
    }
}

// SAFETY: `Bytes` is a shared, immutable slice; its address is kept alive and unchanged by its count.
unsafe impl ForeignMemory for Bytes {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&**self).cast()
    }

    fn length(&self) -> usize {
        self.len()
    }
}

/// A buffer's bytes as a view: a foreign buffer over this does not know the pool or block of the bytes. For fabrics
/// whose two sides are in one process: they lend without a copy and without `unsafe`.
///
/// A callback runs once, when the last view is dropped.
pub struct Loan {
    bytes: Buf,
    ended: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Loan {
    /// Holds `bytes` until it is dropped, and calls `ended` then. `ended` runs in whatever thread drops the last view, so it
    /// must not wait, nor take a lock under which buffers are dropped.
    pub fn new(bytes: Buf, ended: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { bytes, ended: Some(Box::new(ended)) }
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

// SAFETY: a `Buf` shows the same immutable, initialised bytes for as long as it lives, which is as long as this value
// does; the buffer types of this crate keep everybody from writing them.
unsafe impl ForeignMemory for Loan {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&*self.bytes).cast()
    }

    fn length(&self) -> usize {
        self.bytes.len()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.take() {
            ended();
        }
    }
}

//! Readable memory that is not a pool's.

use std::{fmt, ptr::NonNull};

use bytes::Bytes;

use crate::Buf;

/// Memory that a [`Buf`](crate::Buf) shows without owning a pool's range: a view of a neighbour's block under a
/// lease, or a read-only mapping of a file.
///
/// The last `Buf` that is dropped drops the owner, and with it the lease or the mapping.
///
/// # Safety
/// From the moment the value is given to this crate in an `Arc` until it is dropped:
/// - [`base`](Self::base) and [`length`](Self::length) answer the same at every call;
/// - the `length` bytes from `base` are mapped, initialised and readable by any thread; `base` need not be
///   readable where `length` is 0;
/// - nobody, in this process or another, writes them. Where the writer is another process, its lease is what keeps
///   it from writing, and an implementation says who enforces that.
pub unsafe trait ForeignMemory: fmt::Debug + Send + Sync {
    /// First byte.
    fn base(&self) -> NonNull<u8>;

    /// Length in bytes, at most `isize::MAX`.
    fn length(&self) -> usize;
}

// SAFETY: the allocation of a vector that is behind a shared `Arc` neither moves nor changes, because nobody can get
// a `&mut` to the vector; its elements are initialised.
unsafe impl ForeignMemory for Vec<u8> {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(self.as_slice()).cast()
    }

    fn length(&self) -> usize {
        self.len()
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

/// A buffer's bytes as their borrower sees them: a foreign buffer over this knows nothing of the pool or block that they
/// lie in. For fabrics whose two ends are in one process, which lend without a copy and without `unsafe`.
///
/// Its owner's end ([`Buf::foreign`]: the last view is gone) is told once.
pub struct Loan {
    bytes: Buf,
    ended: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Loan {
    /// Shows `bytes` until it is dropped, which calls `ended`. That runs wherever the last view is dropped, so it must
    /// not wait, nor take a lock under which buffers are dropped.
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

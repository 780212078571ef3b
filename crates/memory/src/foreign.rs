//! Readable memory that is not a pool's.

use std::{fmt, ptr::NonNull};

use bytes::Bytes;

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

//! Readable memory that belongs to no pool.

use std::{fmt, ptr::NonNull, sync::Arc, task::Poll};

use bytes::Bytes;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Where bytes are in a block of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The number of the block in that process ([`BlockId::get`](crate::BlockId::get)).
    pub block: u64,
    /// Bytes from the start of the block.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Memory of a [`Buf`](crate::Buf) that is not a range of a pool: a view of a neighbour's block under a
/// lease, or a read-only mapping of a file.
///
/// The last `Buf` that is dropped drops the owner, and with it the lease or the mapping.
///
/// # Safety
/// From the moment when this crate gets the value in an `Arc` until it is dropped:
/// - [`base`](Self::base) and [`length`](Self::length) return the same at every call;
/// - the `length` bytes from `base` are mapped, initialised and readable by any thread; `base` need not be
///   readable where `length` is 0;
/// - nobody, in this process or another, writes them. Where another process could write them, a lease
///   prevents that, and an implementation documents who enforces the lease.
pub unsafe trait ForeignMemory: fmt::Debug + Send + Sync {
    /// First byte.
    fn base(&self) -> NonNull<u8>;

    /// Length in bytes, at most `isize::MAX`.
    fn length(&self) -> usize;

    /// As [`Buf::attached_at`](crate::Buf::attached_at). Default: there is none.
    fn attached_at(&self, place: &Place) -> Poll<Option<Arc<dyn ForeignMemory>>> {
        let _ = place;
        Poll::Ready(None)
    }
}

/// Memory of the program that it gives away: from then on, this crate alone reads and writes it
/// ([`UserMemory::give`](crate::UserMemory::give)). The value is dropped when nobody uses the memory any more, so its `Drop` may give the
/// memory back to the program. That may happen on any thread of the library, and somewhat later than the last buffer was dropped: `Drop` must
/// not panic, and must not wait for a worker.
///
/// # Safety
/// - The bytes of [`bytes`](Self::bytes) are mapped, initialised, and readable and writable by any thread, from the call until the value is
///   dropped, wherever the value is moved. A slice of no bytes may have any address.
/// - Nothing else reads or writes them during that time, in this process or another.
/// - Any values may be written to them.
pub unsafe trait GivenMemory: Send + Sync {
    /// All of it: at most `isize::MAX` bytes. Called once.
    fn bytes(&mut self) -> NonNull<[u8]>;
}

// SAFETY: moving a vector does not move its elements, nobody else has access to them while a vector exists that nobody can get at, and
// nothing but `Drop` is called on it. All bytes of `IntoBytes` elements are initialised, and `FromBytes` elements may have any.
unsafe impl<T: IntoBytes + FromBytes + Send + Sync> GivenMemory for Vec<T> {
    fn bytes(&mut self) -> NonNull<[u8]> {
        let length = size_of_val(self.as_slice());
        let first = NonNull::new(self.as_mut_ptr()).unwrap_or(NonNull::dangling());
        NonNull::slice_from_raw_parts(first.cast(), length)
    }
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

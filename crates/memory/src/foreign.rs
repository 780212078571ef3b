//! Readable memory that is not a pool's.

use std::{fmt, ptr::NonNull};

/// Memory that a [`Buf`](crate::Buf) shows without owning a pool's range: a view of a neighbour's block under a
/// lease, or a read-only mapping of a file.
///
/// The last `Buf` that is dropped drops the owner, and with it the lease or the mapping.
///
/// # Safety
/// For as long as the value lives, wherever it is moved:
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

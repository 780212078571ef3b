//! Buffers cut from pool blocks.

use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
};

use bytes::Bytes;

use crate::{Block, Granted, MemoryObserver, Span, pool::PoolShared};

/// A range of a block that left the pool. Returns to the pool on drop.
pub(crate) struct Allocation {
    /// `None` for an empty buffer, which needs no memory.
    home: Option<(Arc<PoolShared>, Block)>,
    offset: usize,
    /// Bytes the user sees.
    length: usize,
    /// Bytes taken from the pool, a multiple of [`crate::ALIGNMENT`].
    reserved: usize,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let block = self.block().map(|block| block.id().get());
        f.debug_struct("Allocation").field("block", &block).field("range", &self.range()).finish()
    }
}

impl Allocation {
    pub(crate) fn empty() -> Self {
        Self { home: None, offset: 0, length: 0, reserved: 0 }
    }

    pub(crate) fn new(pool: Arc<PoolShared>, block: Block, range: Range<usize>, length: usize) -> Self {
        Self { home: Some((pool, block)), offset: range.start, length, reserved: range.len() }
    }

    pub(crate) fn block(&self) -> Option<&Block> {
        self.home.as_ref().map(|(_, block)| block)
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.length
    }

    /// First byte; dangling (but aligned) for an empty allocation.
    pub(crate) fn pointer(&self) -> *mut u8 {
        match &self.home {
            // SAFETY: `offset` lies inside the block, by the pool's construction.
            Some((_, block)) => unsafe { block.base().as_ptr().add(self.offset) },
            None => std::ptr::without_provenance_mut(crate::ALIGNMENT),
        }
    }

    pub(crate) fn observe(&self, tell: impl FnOnce(&dyn MemoryObserver, &Span)) {
        let Some((pool, block)) = &self.home else { return };
        if let Some(observer) = pool.observer() {
            tell(observer, &Span { block: block.id(), range: self.range() });
        }
    }

    /// Never returns to the pool.
    pub(crate) fn leak(mut self) {
        if let Some((pool, block)) = self.home.take() {
            pool.count_leak(self.reserved);
            // A peer may still write it: the mapping stays for the life of the process.
            std::mem::forget(block);
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.observe(|observer, span| observer.freed(span));
        if let Some((pool, block)) = self.home.take() {
            pool.give_back(&block, self.offset..self.offset + self.reserved);
        }
    }
}

/// A buffer with one owner, who alone reads and writes it. Its bytes start out as the pool left them.
#[derive(Debug)]
pub struct BufMut {
    allocation: Allocation,
}

impl BufMut {
    pub(crate) fn from_allocation(allocation: Allocation) -> Self {
        Self { allocation }
    }

    /// Ends writing: the bytes can be shared and sent from now on, and never change again.
    pub fn freeze(self) -> Buf {
        let length = self.allocation.length();
        Buf { allocation: Arc::new(self.allocation), range: 0..length }
    }

    /// The block the bytes lie in; `None` for an empty buffer.
    pub fn block(&self) -> Option<&Block> {
        self.allocation.block()
    }

    /// Lends the whole buffer to a peer.
    pub fn grant(self) -> Granted {
        Granted::new(self.allocation)
    }
}

impl Deref for BufMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this value owns the range alone, and it is mapped while the allocation lives.
        unsafe { std::slice::from_raw_parts(self.allocation.pointer(), self.allocation.length()) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes any other slice of it.
        unsafe { std::slice::from_raw_parts_mut(self.allocation.pointer(), self.allocation.length()) }
    }
}

/// Immutable bytes, shared by reference count. Goes back to the pool when the last clone is dropped.
#[derive(Clone)]
pub struct Buf {
    allocation: Arc<Allocation>,
    range: Range<usize>,
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buf").field("allocation", &self.allocation).field("range", &self.range).finish()
    }
}

impl Buf {
    /// A buffer of no bytes, which needs no pool.
    pub fn empty() -> Self {
        Self { allocation: Arc::new(Allocation::empty()), range: 0..0 }
    }

    /// The block the bytes lie in; `None` for an empty buffer.
    pub fn block(&self) -> Option<&Block> {
        self.allocation.block()
    }

    /// First byte inside the block.
    pub fn offset(&self) -> usize {
        self.allocation.offset() + self.range.start
    }

    /// A view of a part of the bytes, or `None` when `range` leaves them. No copy.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start;
        Some(Self { allocation: self.allocation.clone(), range: start + range.start..start + range.end })
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies inside the allocation, which is mapped while this handle lives, and nobody
        // writes frozen bytes: `BufMut::freeze` consumed the only writer.
        unsafe {
            std::slice::from_raw_parts(self.allocation.pointer().add(self.range.start), self.range.len())
        }
    }
}

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Buf> for Bytes {
    /// Without a copy: the `Bytes` keeps the buffer alive.
    fn from(buffer: Buf) -> Self {
        Self::from_owner(buffer)
    }
}

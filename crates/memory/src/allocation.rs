//! What lies under a buffer, and where it goes when the buffer is gone.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{Block, ForeignMemory, MemoryObserver, Span, pool::PoolShared};

/// A range of memory under a buffer. What came from a pool returns to it on drop.
pub(crate) struct Allocation {
    home: Home,
    /// First byte inside the block; 0 for memory without one.
    offset: usize,
    /// Bytes the user sees.
    length: usize,
}

enum Home {
    /// An empty buffer needs no memory.
    Nowhere,
    Pool(PoolHome),
    Foreign(Arc<dyn ForeignMemory>),
}

struct PoolHome {
    pool: Arc<PoolShared>,
    block: Block,
    /// Bytes taken from the pool, a multiple of [`crate::ALIGNMENT`].
    reserved: usize,
    /// Whether it counts against the pool's early share (DESIGN §4).
    early: AtomicBool,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Allocation");
        match &self.home {
            Home::Nowhere => out.field("home", &"nowhere"),
            Home::Pool(home) => out.field("block", &home.block.id().get()),
            Home::Foreign(owner) => out.field("owner", owner),
        };
        out.field("range", &self.range()).finish()
    }
}

impl Allocation {
    pub(crate) fn empty() -> Self {
        Self { home: Home::Nowhere, offset: 0, length: 0 }
    }

    /// `length` bytes of `range`, which the pool gave out; `early` if they count against its early share.
    pub(crate) fn pooled(
        pool: Arc<PoolShared>,
        block: Block,
        range: Range<usize>,
        length: usize,
        early: bool,
    ) -> Self {
        let home = PoolHome { pool, block, reserved: range.len(), early: AtomicBool::new(early) };
        Self { home: Home::Pool(home), offset: range.start, length }
    }

    /// All bytes of `owner`.
    pub(crate) fn foreign(owner: Arc<dyn ForeignMemory>) -> Self {
        let length = owner.length();
        Self { home: Home::Foreign(owner), offset: 0, length }
    }

    pub(crate) fn block(&self) -> Option<&Block> {
        match &self.home {
            Home::Pool(home) => Some(&home.block),
            Home::Nowhere | Home::Foreign(_) => None,
        }
    }

    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.home, Home::Foreign(_))
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
            Home::Pool(home) => unsafe { home.block.base().as_ptr().add(self.offset) },
            Home::Foreign(owner) => owner.base().as_ptr(),
            Home::Nowhere => std::ptr::without_provenance_mut(crate::ALIGNMENT),
        }
    }

    pub(crate) fn observe(&self, tell: impl FnOnce(&dyn MemoryObserver, &Span)) {
        let Home::Pool(home) = &self.home else { return };
        if let Some(observer) = home.pool.observer() {
            tell(observer, &Span { block: home.block.id(), range: self.range() });
        }
    }

    /// No longer counts against the pool's early share.
    pub(crate) fn answered(&self) {
        if let Home::Pool(home) = &self.home
            && home.early.swap(false, Ordering::AcqRel)
        {
            home.pool.answered(home.reserved);
        }
    }

    /// Never returns to the pool.
    pub(crate) fn leak(mut self) {
        self.answered();
        if let Home::Pool(home) = std::mem::replace(&mut self.home, Home::Nowhere) {
            home.pool.count_leak(home.reserved);
            // A peer may still write it: the mapping stays for the life of the process.
            std::mem::forget(home.block);
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.observe(|observer, span| observer.freed(span));
        if let Home::Pool(home) = std::mem::replace(&mut self.home, Home::Nowhere) {
            let early = home.early.into_inner();
            home.pool.give_back(&home.block, self.offset..self.offset + home.reserved, early);
        }
    }
}

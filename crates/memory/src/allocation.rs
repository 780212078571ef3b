//! The memory under a buffer, and its return to the pool.

use std::{fmt, mem, ops::Range, sync::Arc};

use crate::{
    Block, ForeignMemory, MemoryObserver, Span,
    pool::{Place, PoolShared},
    sync::{AtomicBool, AtomicU64, Ordering},
    user::JoinedBlock,
};

/// A range of memory under a buffer. A range of a pool returns to the pool on drop.
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
    Joined(JoinedBlock),
    Foreign(Arc<dyn ForeignMemory>),
}

struct PoolHome {
    pool: Arc<PoolShared>,
    block: Block,
    place: Place,
    /// Bytes taken from the pool, a multiple of [`crate::ALIGNMENT`].
    reserved: usize,
    /// Whether it counts against the pool's early share.
    early: AtomicBool,
    /// How many [`crate::Retired`] hold it.
    retired: AtomicU64,
    /// Whether one of those was dropped without a release.
    leaked: AtomicBool,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Allocation");
        match &self.home {
            Home::Nowhere => out.field("home", &"nowhere"),
            Home::Pool(home) => out.field("block", &home.block.id().get()),
            Home::Joined(home) => out.field("block", &home.block().id().get()),
            Home::Foreign(owner) => out.field("owner", owner),
        };
        out.field("range", &self.range()).finish()
    }
}

impl Allocation {
    pub(crate) fn empty() -> Self {
        Self { home: Home::Nowhere, offset: 0, length: 0 }
    }

    /// The first `length` bytes of `range`, which the pool gave out.
    pub(crate) fn pooled(
        pool: Arc<PoolShared>,
        block: Block,
        range: Range<usize>,
        place: Place,
        length: usize,
    ) -> Self {
        let home = PoolHome {
            pool,
            block,
            place,
            reserved: range.len(),
            early: AtomicBool::new(false),
            retired: AtomicU64::new(0),
            leaked: AtomicBool::new(false),
        };
        Self { home: Home::Pool(home), offset: range.start, length }
    }

    /// Notes whether the pool counted it against its early share.
    pub(crate) fn counted_early(mut self, early: bool) -> Self {
        if let Home::Pool(home) = &mut self.home {
            home.early = AtomicBool::new(early);
        }
        self
    }

    /// All of a joined block.
    pub(crate) fn joined(block: JoinedBlock) -> Self {
        let length = block.block().length();
        Self { home: Home::Joined(block), offset: 0, length }
    }

    /// All bytes of `owner`.
    pub(crate) fn foreign(owner: Arc<dyn ForeignMemory>) -> Self {
        let length = owner.length();
        Self { home: Home::Foreign(owner), offset: 0, length }
    }

    pub(crate) fn block(&self) -> Option<&Block> {
        match &self.home {
            Home::Pool(home) => Some(&home.block),
            Home::Joined(home) => Some(home.block()),
            Home::Nowhere | Home::Foreign(_) => None,
        }
    }

    pub(crate) fn joined_block(&self) -> Option<&JoinedBlock> {
        match &self.home {
            Home::Joined(home) => Some(home),
            Home::Nowhere | Home::Pool(_) | Home::Foreign(_) => None,
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
            Home::Joined(home) => home.block().base().as_ptr(),
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

    /// Stops counting it against the pool's early share.
    pub(crate) fn answered(&self) {
        if let Home::Pool(home) = &self.home
            && home.early.swap(false, Ordering::AcqRel)
        {
            home.pool.count(|stats| stats.early_bytes -= home.reserved as u64);
        }
    }

    /// Counts it as retired until [`release`](Self::release) was called as often.
    pub(crate) fn retire(&self) {
        if let Home::Pool(home) = &self.home
            && home.retired.fetch_add(1, Ordering::AcqRel) == 0
        {
            home.pool.count(|stats| stats.retired_bytes += home.reserved as u64);
        }
    }

    pub(crate) fn release(&self) {
        if let Home::Pool(home) = &self.home
            && home.retired.fetch_sub(1, Ordering::AcqRel) == 1
        {
            home.pool.count(|stats| stats.retired_bytes -= home.reserved as u64);
        }
    }

    /// Counts it as leaked, once, however often this is called.
    pub(crate) fn count_leak(&self) {
        if let Home::Pool(home) = &self.home
            && !home.leaked.swap(true, Ordering::AcqRel)
        {
            home.pool.count(|stats| stats.leaked_bytes += home.reserved as u64);
        }
    }

    /// Keeps it from ever returning to the pool: a peer may still write it.
    pub(crate) fn leak(self) {
        self.answered();
        self.count_leak();
        // The mapping stays for the life of the process.
        mem::forget(self);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.observe(|observer, span| observer.freed(span));
        if let Home::Pool(home) = mem::replace(&mut self.home, Home::Nowhere) {
            let early = home.early.load(Ordering::Acquire);
            home.pool.give_back(&home.block, self.offset, home.reserved, home.place, early);
        }
    }
}

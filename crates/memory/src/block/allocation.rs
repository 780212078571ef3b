//! The memory under a buffer, and its return to the pool.

use std::{fmt, mem, ops::Range, sync::Arc};

use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{
    Block, JoinedBlock, MemoryObserver, Span,
    stock::{Caller, Stock, Taken},
};
use crate::{
    ForeignMemory, MemoryError,
    copy::{CopyReason, copy_bytes},
    sync::{AtomicBool, AtomicU64, Ordering},
};

/// A range of memory under a buffer. A range of a pool returns to the pool on drop.
pub(crate) struct Allocation {
    home: Home,
    /// First byte inside the block; 0 for memory without one.
    offset: usize,
    /// Bytes the user sees.
    length: usize,
    /// Parts of it are allocations of their own.
    is_divided: bool,
    /// Ranges of frozen allocations, dropped with it.
    attached: Box<[(Arc<Allocation>, Range<usize>)]>,
}

enum Home {
    /// An empty buffer needs no memory.
    Nowhere,
    Pool(PoolRange),
    /// A part of another one, which nobody else reads or writes.
    Part(Arc<Allocation>),
    Joined(Arc<JoinedBlock>),
    Foreign(Arc<dyn ForeignMemory>),
    /// Few bytes, aligned for every element type. Never written after they were made.
    Heap(SmallVec<[u128; HEAP_WORDS]>),
}

/// Words that need no memory of their own.
const HEAP_WORDS: usize = 4;

/// A range of a pool; at least as long as the allocation.
struct PoolRange {
    stock: Arc<Stock>,
    taken: Taken,
    /// Whether it counts against the pool's early share.
    early: AtomicBool,
    /// How many [`crate::Retired`] hold it.
    retired: AtomicU64,
    /// Whether one of those was dropped without a release.
    leaked: AtomicBool,
}

impl PoolRange {
    fn bytes(&self) -> u64 {
        self.taken.range.len() as u64
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Allocation");
        match &self.home {
            Home::Nowhere => out.field("home", &"nowhere"),
            Home::Pool(home) => out.field("block", &home.taken.block.id().get()),
            Home::Part(whole) => out.field("part of", whole),
            Home::Joined(home) => out.field("block", &home.block().id().get()),
            Home::Foreign(owner) => out.field("owner", owner),
            Home::Heap(_) => out.field("home", &"heap"),
        };
        out.field("range", &self.range()).finish()
    }
}

impl Allocation {
    pub(crate) fn empty() -> Self {
        Self::at(Home::Nowhere, 0, 0)
    }

    fn at(home: Home, offset: usize, length: usize) -> Self {
        Self { home, offset, length, is_divided: false, attached: Box::default() }
    }

    /// `length` bytes, more than 0, of a pool.
    pub(crate) fn from_stock(stock: &Arc<Stock>, length: usize, caller: Caller) -> Result<Self, MemoryError> {
        let taken = stock.take(length, caller)?;
        let offset = taken.range.start;
        let range = PoolRange {
            stock: stock.clone(),
            taken,
            early: AtomicBool::new(caller == Caller::Early),
            retired: AtomicU64::new(0),
            leaked: AtomicBool::new(false),
        };
        let allocation = Self::at(Home::Pool(range), offset, length);
        allocation.observe(|observer, span| observer.allocated(span));
        Ok(allocation)
    }

    /// Before parts of it are made, or after all of them are gone. An observer is told that it is freed, or allocated.
    pub(crate) fn set_divided(&mut self, is_divided: bool) {
        self.is_divided = is_divided;
        self.observe(
            |observer, span| if is_divided { observer.freed(span) } else { observer.allocated(span) },
        );
    }

    /// `range` of `whole`, which has it and is divided. No other part has these bytes.
    pub(crate) fn part(whole: Arc<Self>, range: Range<usize>) -> Self {
        if range.is_empty() {
            return Self::empty();
        }
        let offset = whole.offset + range.start;
        let part = Self::at(Home::Part(whole), offset, range.len());
        part.observe(|observer, span| observer.allocated(span));
        part
    }

    /// All of a joined block.
    pub(crate) fn joined(block: Arc<JoinedBlock>) -> Self {
        let length = block.block().length();
        let allocation = Self::at(Home::Joined(block), 0, length);
        allocation.observe(|observer, span| observer.allocated(span));
        allocation
    }

    /// All bytes of `owner`.
    pub(crate) fn foreign(owner: Arc<dyn ForeignMemory>) -> Self {
        let length = owner.length();
        Self::at(Home::Foreign(owner), 0, length)
    }

    /// A copy of `bytes` on the heap.
    pub(crate) fn heap(bytes: &[u8], reason: CopyReason) -> Self {
        let mut words = SmallVec::from_elem(0, bytes.len().div_ceil(size_of::<u128>()));
        copy_bytes(words.as_mut_slice().as_mut_bytes(), bytes, reason);
        Self::at(Home::Heap(words), 0, bytes.len())
    }

    pub(crate) fn attach(&mut self, attached: impl Iterator<Item = (Arc<Self>, Range<usize>)>) {
        self.attached = attached.collect();
    }

    pub(crate) fn attached(&self) -> &[(Arc<Self>, Range<usize>)] {
        &self.attached
    }

    /// The owner, if it is foreign memory.
    pub(crate) fn owner(&self) -> Option<&dyn ForeignMemory> {
        match &self.home {
            Home::Foreign(owner) => Some(&**owner),
            _ => None,
        }
    }

    pub(crate) fn block(&self) -> Option<&Block> {
        match &self.home {
            Home::Pool(home) => Some(&home.taken.block),
            Home::Part(whole) => whole.block(),
            Home::Joined(home) => Some(home.block()),
            Home::Nowhere | Home::Foreign(_) | Home::Heap(_) => None,
        }
    }

    pub(crate) fn joined_block(&self) -> Option<&Arc<JoinedBlock>> {
        match &self.home {
            Home::Joined(home) => Some(home),
            Home::Nowhere | Home::Pool(_) | Home::Part(_) | Home::Foreign(_) | Home::Heap(_) => None,
        }
    }

    /// The range of a pool that has it.
    fn pool_range(&self) -> Option<&PoolRange> {
        match &self.home {
            Home::Pool(home) => Some(home),
            Home::Part(whole) => whole.pool_range(),
            Home::Nowhere | Home::Joined(_) | Home::Foreign(_) | Home::Heap(_) => None,
        }
    }

    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.home, Home::Foreign(_) | Home::Heap(_))
    }

    /// Whether its only owner may write it: it is of a pool, or was given away by a user, or has no bytes.
    pub(crate) fn is_writable(&self) -> bool {
        match &self.home {
            Home::Pool(_) | Home::Part(_) | Home::Nowhere => true,
            Home::Joined(home) => home.block().is_writable(),
            Home::Foreign(_) | Home::Heap(_) => false,
        }
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
            Home::Pool(home) => unsafe { home.taken.block.base().as_ptr().add(self.offset) },
            // SAFETY: the part lies inside the whole one, by `part`.
            Home::Part(whole) => unsafe { whole.pointer().add(self.offset - whole.offset) },
            Home::Joined(home) => home.block().base().as_ptr(),
            Home::Foreign(owner) => owner.base().as_ptr(),
            // Only read: no `BufMut`, which writes, is made of it.
            Home::Heap(words) => words.as_ptr().cast_mut().cast(),
            Home::Nowhere => std::ptr::without_provenance_mut(crate::ALIGNMENT),
        }
    }

    pub(crate) fn observe(&self, tell: impl FnOnce(&dyn MemoryObserver, &Span)) {
        if let (Some(observer), Some(block)) = (self.observer(), self.block()) {
            tell(observer, &Span { block: block.id(), range: self.range() });
        }
    }

    fn observer(&self) -> Option<&dyn MemoryObserver> {
        match &self.home {
            Home::Pool(home) => home.stock.observer(),
            Home::Part(whole) => whole.observer(),
            Home::Joined(home) => home.observer(),
            Home::Nowhere | Home::Foreign(_) | Home::Heap(_) => None,
        }
    }

    /// Stops counting it against the pool's early share.
    pub(crate) fn answered(&self) {
        if let Some(home) = self.pool_range()
            && home.early.swap(false, Ordering::AcqRel)
        {
            home.stock.answered(home.bytes());
        }
    }

    /// Counts it as retired until [`release`](Self::release) was called as many times.
    pub(crate) fn retire(&self) {
        if let Some(home) = self.pool_range()
            && home.retired.fetch_add(1, Ordering::AcqRel) == 0
        {
            home.stock.count(|stats| stats.retired_bytes += home.bytes());
        }
    }

    pub(crate) fn release(&self) {
        if let Some(home) = self.pool_range()
            && home.retired.fetch_sub(1, Ordering::AcqRel) == 1
        {
            home.stock.count(|stats| stats.retired_bytes -= home.bytes());
        }
    }

    /// Counts it as leaked, once, however often this is called.
    pub(crate) fn count_leak(&self) {
        if let Some(home) = self.pool_range()
            && !home.leaked.swap(true, Ordering::AcqRel)
        {
            home.stock.count(|stats| stats.leaked_bytes += home.bytes());
        }
    }

    /// Prevents its return to the pool forever, because a peer may still write it.
    pub(crate) fn leak(self) {
        self.answered();
        self.count_leak();
        // The mapping stays for the life of the process.
        mem::forget(self);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.is_divided {
            self.observe(|observer, span| observer.freed(span));
        }
        if let Home::Pool(home) = mem::replace(&mut self.home, Home::Nowhere) {
            home.stock.give_back(&home.taken, home.early.load(Ordering::Acquire));
        }
    }
}

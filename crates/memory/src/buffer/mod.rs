//! Buffers: types that say who may touch the bytes.

mod division;
mod exposure;
mod grant;
mod loan;
mod retirement;

use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
    task::Poll,
};

use bytes::Bytes;

use crate::{
    Block, ForeignMemory, Place,
    block::{Allocation, JoinedBlock},
    copy::CopyReason,
};

pub use division::Divided;
pub use exposure::Exposure;
pub use grant::Granted;
pub use loan::Loan;
pub use retirement::Retired;

/// A buffer with one owner, which alone reads and writes it. Its bytes are not cleared: they may be those of an earlier
/// buffer.
#[derive(Debug)]
pub struct BufMut {
    allocation: Allocation,
}

impl BufMut {
    pub(crate) fn from_allocation(allocation: Allocation) -> Self {
        Self { allocation }
    }

    /// Ends writing: from now on the bytes can be shared and sent, and never change.
    ///
    /// A buffer taken early no longer counts against its pool's early share: its content exists.
    pub fn freeze(self) -> Buf {
        self.allocation.answered();
        Buf::whole(self.allocation)
    }

    /// As [`freeze`](Self::freeze). The buffers `attached` live as long as this one, and a peer that gets a view of this one can view
    /// them, too ([`Buf::attached_at`]).
    pub fn freeze_with(mut self, attached: Vec<Buf>) -> Buf {
        self.allocation.attach(attached.into_iter().map(|buffer| (buffer.allocation, buffer.range)));
        self.freeze()
    }

    /// The block the bytes lie in; `None` for an empty buffer.
    #[doc(hidden)]
    pub fn block(&self) -> Option<&Block> {
        self.allocation.block()
    }

    /// Grants the whole buffer to a peer.
    #[doc(hidden)]
    pub fn grant(self) -> Granted {
        Granted::new(self.allocation)
    }
}

impl Deref for BufMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this value owns the range alone: pools give ranges that do not overlap, `divide` parts that do not, and
        // `joined` the whole only after all parts are gone. It is mapped while the allocation lives.
        unsafe { std::slice::from_raw_parts(self.allocation.pointer(), self.allocation.length()) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes any other slice of it.
        unsafe { std::slice::from_raw_parts_mut(self.allocation.pointer(), self.allocation.length()) }
    }
}

/// Immutable bytes, shared by reference count. The memory returns to its pool or owner when the last clone is dropped.
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

    /// All bytes of `owner`, which are not a pool's. `owner` lives until the last `Buf` of it is dropped. No copy.
    pub fn foreign(owner: Arc<dyn ForeignMemory>) -> Self {
        Self::whole(Allocation::foreign(owner))
    }

    /// A copy of a few bytes on the heap, in no pool and aligned for every element type. As
    /// [`foreign`](Self::foreign) bytes, they are copied before a fabric that needs registered memory sends them.
    pub fn on_heap(bytes: &[u8], reason: CopyReason) -> Self {
        Self::whole(Allocation::heap(bytes, reason))
    }

    /// All bytes of an allocation without a writer.
    pub(crate) fn whole(allocation: Allocation) -> Self {
        let length = allocation.length();
        Self { allocation: Arc::new(allocation), range: 0..length }
    }

    /// Whether the bytes lie in no block ([`foreign`](Self::foreign), [`on_heap`](Self::on_heap)). A fabric that sends from registered memory
    /// needs a copy of them in a pool first (`CopyReason::Import`).
    pub fn is_foreign(&self) -> bool {
        self.allocation.is_foreign()
    }

    /// Lets peers with the read right read exactly these bytes while the returned value lives.
    #[must_use = "the permission ends when the exposure is dropped"]
    #[doc(hidden)]
    pub fn expose(&self) -> Exposure {
        Exposure::new(self.clone())
    }

    /// The buffers that were [attached](BufMut::freeze_with) to this one.
    pub fn attached(&self) -> impl ExactSizeIterator<Item = Self> {
        let attached = self.allocation.attached().iter();
        attached.map(|(allocation, range)| Self::part_of(allocation.clone(), range.clone()))
    }

    /// Of a view of a peer's memory: a view of a buffer that the peer [attached](BufMut::freeze_with) to these bytes. It shares their lease.
    /// `place` comes from the peer. `None` if there is no such memory, or the connection is over. Pending if a part of it was made
    /// resident, up to some 256 KiB; then the caller lets other tasks run and calls again.
    pub fn attached_at(&self, place: &Place) -> Poll<Option<Self>> {
        let Some(owner) = self.allocation.owner() else { return Poll::Ready(None) };
        owner.attached_at(place).map(|attached| attached.map(Self::foreign))
    }

    /// Prevents the pool from reusing the bytes until it is certain that a lost peer no longer reads them.
    #[doc(hidden)]
    pub fn retire(self) -> Retired {
        Retired::new(self)
    }

    /// The bytes for writing again, if nobody else has the memory: no clone, no slice, no operation under way, no exposure. Otherwise,
    /// and for memory that is no pool's, the unchanged buffer.
    ///
    /// # Errors
    /// The buffer.
    pub fn try_into_mut(self) -> Result<BufMut, Self> {
        let Self { allocation, range } = self;
        if range.len() != allocation.length() || !allocation.is_writable() {
            return Err(Self { allocation, range });
        }
        // If this was the last handle, no other can be made: an exposure has one of its own.
        let sole = Arc::try_unwrap(allocation);
        sole.map(BufMut::from_allocation).map_err(|allocation| Self { allocation, range })
    }

    /// Whether both are the same range of the same allocation.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.allocation, &other.allocation) && self.range == other.range
    }

    pub(crate) fn joined_block(&self) -> Option<&Arc<JoinedBlock>> {
        self.allocation.joined_block()
    }

    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }

    /// The range inside the allocation.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// `range` must lie inside `allocation`, which must be frozen.
    pub(crate) fn part_of(allocation: Arc<Allocation>, range: Range<usize>) -> Self {
        Self { allocation, range }
    }

    /// The block the bytes lie in; `None` for an empty buffer and for a foreign one
    /// ([`is_foreign`](Self::is_foreign)).
    #[doc(hidden)]
    pub fn block(&self) -> Option<&Block> {
        self.allocation.block()
    }

    /// Where the bytes are in a block; `None` if they lie in none.
    pub fn place(&self) -> Option<Place> {
        let (offset, length) = (self.offset() as u64, self.range.len() as u64);
        self.block().map(|block| Place { block: block.id().get(), offset, length })
    }

    /// First byte inside the block; inside the owner's memory for a foreign buffer.
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
        // writes these bytes: `BufMut::freeze` consumed the only writer, `try_into_mut` makes one of the last handle only, or
        // `ForeignMemory` promises it.
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
    /// Copies nothing: the `Bytes` keeps the buffer alive.
    fn from(buffer: Buf) -> Self {
        Self::from_owner(buffer)
    }
}

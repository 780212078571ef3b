//! Memory lent to a peer.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, atomic},
};

use crate::{
    Block, BufMut, MemoryError,
    allocation::Allocation,
    copy::{CopyReason, copy_raw},
    sync::{AtomicU64, Ordering, lock},
};

/// Names one grant within this process; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantId(u64);

static NEXT_GRANT: atomic::AtomicU64 = atomic::AtomicU64::new(1);

/// The evidence that no write of the peer can still land in the granted range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GrantEnd {
    /// The content arrived: the peer writes a range once per request phase.
    Content,
    /// The peer answered with META_DATA_RESPONSE, which it sends only when no write is posted.
    MetaDataResponse,
    /// The peer answered with ERROR_STATUS, likewise.
    ErrorStatus,
    /// The peer answered a CANCEL, likewise.
    CancelAck,
    /// The request was never sent, so no peer knows the range.
    NeverSent,
    /// The range was a message ring, and the peer's last message in it has arrived: RING_MOVED, after which it
    /// writes another ring.
    RingMoved,
    /// This end's own `read` into the range completed, and no peer was told of it.
    ReadCompleted,
    /// Every queue pair the peer could write through is destroyed and drained.
    QueuePairDrained,
}

/// A buffer lent to a peer. There is no way to form a slice of it, only to copy bytes out
/// ([`read_at`](Self::read_at)).
///
/// Dropping it without [`end`](Self::end) leaks the memory and counts it
/// ([`PoolStats::leaked_bytes`](crate::PoolStats::leaked_bytes)): bytes a peer may still write are never
/// reused.
pub struct Granted {
    allocation: Option<Allocation>,
    id: GrantId,
    state: Arc<GrantState>,
}

impl fmt::Debug for Granted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Granted").field("id", &self.id).field("allocation", &self.allocation).finish()
    }
}

impl Granted {
    pub(crate) fn new(allocation: Allocation) -> Self {
        let id = GrantId(NEXT_GRANT.fetch_add(1, atomic::Ordering::Relaxed));
        let state = Arc::new(GrantState::default());
        if let Some(block) = allocation.block() {
            let entry = GrantEntry { length: allocation.length(), state: state.clone() };
            let mut grants = lock(block.grants());
            grants.entries.insert(allocation.offset(), entry);
        }
        allocation.observe(|observer, span| observer.granted(span, id));
        Self { allocation: Some(allocation), id, state }
    }

    /// This grant's number.
    pub fn id(&self) -> GrantId {
        self.id
    }

    /// The block the range lies in; `None` for an empty buffer.
    pub fn block(&self) -> Option<&Block> {
        self.allocation.as_ref().and_then(Allocation::block)
    }

    /// First byte inside the block.
    pub fn offset(&self) -> usize {
        self.allocation.as_ref().map_or(0, Allocation::offset)
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.allocation.as_ref().map_or(0, Allocation::length)
    }

    /// The peer has said that the content exists: the range no longer counts against its pool's early share
    /// ([`Pool::try_alloc_early`](crate::Pool::try_alloc_early)). Ending the grant does the same; for a buffer that
    /// was not taken early there is nothing to do.
    pub fn answered(&self) {
        if let Some(allocation) = &self.allocation {
            allocation.answered();
        }
    }

    /// Copies bytes out while the peer may still write elsewhere in the range (message rings).
    ///
    /// # Errors
    /// [`MemoryError::NotGranted`] when the range leaves the buffer.
    pub fn read_at(&self, offset: usize, into: &mut [u8], reason: CopyReason) -> Result<(), MemoryError> {
        let (Some(allocation), Some(end)) = (&self.allocation, offset.checked_add(into.len())) else {
            return Err(not_granted(self.block(), offset, into.len()));
        };
        if end > allocation.length() {
            return Err(not_granted(self.block(), offset, into.len()));
        }
        if !into.is_empty() {
            // SAFETY: the range lies inside this allocation, which stays mapped while `self` owns it; the
            // protocol reads a range only after the immediate that ends the peer's write of it. No reference into it is
            // formed: a peer that writes it all the same spoils the bytes that are copied, and nothing else.
            unsafe {
                copy_raw(into.as_mut_ptr(), allocation.pointer().add(offset), into.len(), reason);
            };
        }
        Ok(())
    }

    /// Takes the memory back. `why` is the evidence that the peer can no longer write it.
    ///
    /// # Errors
    /// [`MemoryError::GrantBusy`] if a fabric is inside the range at this moment, which a correct peer cannot
    /// cause; the memory is leaked and counted.
    pub fn end(mut self, why: GrantEnd) -> Result<BufMut, MemoryError> {
        let Some(allocation) = self.allocation.take() else {
            return Err(not_granted(None, 0, 0));
        };
        forget_grant(&allocation);
        allocation.answered();
        if !self.state.close() {
            let error = MemoryError::GrantBusy {
                block: allocation.block().map_or(0, |block| block.id().get()),
                length: allocation.length() as u64,
            };
            allocation.observe(|observer, span| observer.grant_ended(span, self.id, None));
            allocation.leak();
            return Err(error);
        }
        allocation.observe(|observer, span| observer.grant_ended(span, self.id, Some(why)));
        Ok(BufMut::from_allocation(allocation))
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        let Some(allocation) = self.allocation.take() else {
            return;
        };
        forget_grant(&allocation);
        self.state.close();
        allocation.observe(|observer, span| observer.grant_ended(span, self.id, None));
        allocation.leak();
    }
}

fn forget_grant(allocation: &Allocation) {
    if let Some(block) = allocation.block() {
        let mut grants = lock(block.grants());
        grants.entries.remove(&allocation.offset());
    }
}

fn not_granted(block: Option<&Block>, offset: usize, length: usize) -> MemoryError {
    MemoryError::NotGranted {
        block: block.map_or(0, |block| block.id().get()),
        offset: offset as u64,
        length: length as u64,
    }
}

/// The grants on one block, by first byte. Ranges never overlap, because allocations do not.
#[derive(Debug, Default)]
pub(crate) struct GrantTable {
    entries: BTreeMap<usize, GrantEntry>,
}

#[derive(Debug)]
struct GrantEntry {
    length: usize,
    state: Arc<GrantState>,
}

/// Count of fabric accesses under way, with [`ENDED`] set once the grant is over.
#[derive(Debug, Default)]
struct GrantState(AtomicU64);

const ENDED: u64 = 1 << 63;

impl GrantState {
    /// Counts an access in; false once the grant has ended.
    fn enter(&self) -> bool {
        let before = self.0.fetch_add(1, Ordering::Acquire);
        if before & ENDED != 0 {
            self.0.fetch_sub(1, Ordering::Release);
        }
        before & ENDED == 0
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Ends the grant; false if an access was under way.
    fn close(&self) -> bool {
        self.0.fetch_or(ENDED, Ordering::AcqRel) & !ENDED == 0
    }
}

/// A fabric's handle on granted memory: the only way a peer's access reaches this process's bytes.
///
/// Holding it keeps the block mapped but not the grant alive: each access counts itself in and fails once the
/// grant has ended.
#[derive(Debug, Clone)]
pub struct RemoteTarget {
    block: Block,
    offset: usize,
    length: usize,
    state: Arc<GrantState>,
}

impl RemoteTarget {
    pub(crate) fn find(block: &Block, offset: u64, length: u64) -> Result<Self, MemoryError> {
        let refused = || MemoryError::NotGranted { block: block.id().get(), offset, length };
        let start = usize::try_from(offset).map_err(|_| refused())?;
        let bytes = usize::try_from(length).map_err(|_| refused())?;
        let end = start.checked_add(bytes).ok_or_else(refused)?;
        let grants = lock(block.grants());
        let (&first, entry) = grants.entries.range(..=start).next_back().ok_or_else(refused)?;
        if end > first + entry.length {
            return Err(refused());
        }
        Ok(Self { block: block.clone(), offset: start, length: bytes, state: entry.state.clone() })
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Copies `bytes` to `offset` within this target.
    ///
    /// # Errors
    /// [`MemoryError::NotGranted`] once the grant has ended, or when the range leaves the target.
    pub fn write_at(&self, offset: usize, bytes: &[u8], reason: CopyReason) -> Result<(), MemoryError> {
        let access = self.access(offset, bytes.len())?;
        if !bytes.is_empty() {
            // SAFETY: the access covers `bytes.len()` bytes of a live grant, which no slice of this process
            // aliases.
            unsafe { copy_raw(access.pointer(), bytes.as_ptr(), bytes.len(), reason) };
        }
        Ok(())
    }

    /// Counts an access in and hands out its raw address, for a fabric that lets the kernel write the bytes
    /// (`recv` straight into the destination). The grant cannot end successfully while the access lives, so
    /// keep it for one system call, not longer.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn access(&self, offset: usize, length: usize) -> Result<RemoteAccess<'_>, MemoryError> {
        let refused = || not_granted(Some(&self.block), self.offset.saturating_add(offset), length);
        let end = offset.checked_add(length).ok_or_else(refused)?;
        if end > self.length || !self.state.enter() {
            return Err(refused());
        }
        Ok(RemoteAccess { target: self, offset, length })
    }
}

/// One access under way; see [`RemoteTarget::access`].
#[derive(Debug)]
pub struct RemoteAccess<'target> {
    target: &'target RemoteTarget,
    offset: usize,
    length: usize,
}

impl RemoteAccess<'_> {
    /// First byte of the access, writable for [`length`](Self::length) bytes while this value lives.
    pub fn pointer(&self) -> *mut u8 {
        // SAFETY: `offset` was checked against the target, which lies inside the mapped block.
        unsafe { self.target.block.base().as_ptr().add(self.target.offset + self.offset) }
    }

    /// Bytes covered.
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for RemoteAccess<'_> {
    fn drop(&mut self) {
        self.target.state.leave();
    }
}

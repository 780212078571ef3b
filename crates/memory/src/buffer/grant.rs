//! Memory that a peer may write.

use std::{fmt, sync::Arc};

use super::BufMut;
use crate::{
    Block, GrantEnd, GrantId, MemoryError,
    block::{Allocation, GrantState},
    copy::{CopyReason, copy_raw},
    sync::lock,
};

/// A buffer that a peer may write. No slice of it can be formed; bytes can only be copied out
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
        let id = GrantId::next();
        let state = Arc::new(GrantState::default());
        if let Some(block) = allocation.block() {
            lock(block.grants()).add(allocation.offset(), allocation.length(), state.clone());
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

    /// The peer has announced the content, so it exists: the range no longer counts against its pool's early share
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
            // formed: a peer that writes it nevertheless corrupts the bytes that are copied, and nothing else.
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
        lock(block.grants()).remove(allocation.offset());
    }
}

fn not_granted(block: Option<&Block>, offset: usize, length: usize) -> MemoryError {
    MemoryError::NotGranted {
        block: block.map_or(0, |block| block.id().get()),
        offset: offset as u64,
        length: length as u64,
    }
}

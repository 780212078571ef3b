//! A peer's access to granted memory.

use std::sync::Arc;

use super::{Block, grant_table::GrantState, range_of};
use crate::{
    MemoryError,
    copy::{CopyReason, copy_raw},
    sync::lock,
};

/// A fabric's handle on granted memory: the only way a peer's access reaches this process's bytes.
///
/// Holding it keeps the block mapped, but not the grant alive: each access is counted, and fails once the grant has
/// ended.
#[derive(Debug, Clone)]
pub struct RemoteTarget {
    block: Block,
    offset: usize,
    length: usize,
    state: Arc<GrantState>,
}

impl RemoteTarget {
    /// All of the grant that covers the range.
    pub(super) fn around(block: &Block, offset: u64, length: u64) -> Result<Self, MemoryError> {
        let refused = || MemoryError::NotGranted { block: block.id().get(), offset, length };
        let range = range_of(offset, length).ok_or_else(refused)?;
        let (granted, state) = lock(block.grants()).find(&range).ok_or_else(refused)?;
        Ok(Self { block: block.clone(), offset: granted.start, length: granted.len(), state })
    }

    /// The part that covers `offset..offset + length` of the block. `None` if that leaves this target, or the grant has
    /// ended.
    pub fn part(&self, offset: u64, length: u64) -> Option<Self> {
        let range = range_of(offset, length)?;
        let is_inside = self.offset <= range.start && range.end <= self.offset + self.length;
        let part = Self {
            block: self.block.clone(),
            offset: range.start,
            length: range.len(),
            state: self.state.clone(),
        };
        (is_inside && !self.state.has_ended()).then_some(part)
    }

    /// An [access](Self::access) to the [part](Self::part) that covers `offset..offset + length` of the block, without
    /// cloning a handle on the memory.
    #[inline]
    pub fn access_part(&self, offset: u64, length: u64) -> Option<RemoteAccess<'_>> {
        let range = range_of(offset, length)?;
        self.access(range.start.checked_sub(self.offset)?, range.len()).ok()
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether both have a byte of the same memory.
    pub fn overlaps(&self, other: &Self) -> bool {
        let is_before = |left: &Self, right: &Self| left.offset + left.length <= right.offset;
        self.block.id() == other.block.id() && !is_before(self, other) && !is_before(other, self)
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

    /// Counts an access and returns its raw address, for a fabric that lets the kernel write the bytes (`recv` straight
    /// into the destination). The grant cannot end successfully while the access lives, so keep it for one system call,
    /// not longer.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    #[inline]
    pub fn access(&self, offset: usize, length: usize) -> Result<RemoteAccess<'_>, MemoryError> {
        let refused = || MemoryError::NotGranted {
            block: self.block.id().get(),
            offset: self.offset.saturating_add(offset) as u64,
            length: length as u64,
        };
        let end = offset.checked_add(length).ok_or_else(refused)?;
        if end > self.length || !self.state.enter() {
            return Err(refused());
        }
        Ok(RemoteAccess { target: self, offset, length })
    }
}

/// One access in progress; see [`RemoteTarget::access`].
#[derive(Debug)]
pub struct RemoteAccess<'target> {
    target: &'target RemoteTarget,
    offset: usize,
    length: usize,
}

impl RemoteAccess<'_> {
    /// First byte of the access, writable for [`length`](Self::length) bytes while this value lives.
    #[inline]
    pub fn pointer(&self) -> *mut u8 {
        // SAFETY: `offset` was checked against the target, which lies inside the mapped block.
        unsafe { self.target.block.base().as_ptr().add(self.target.offset + self.offset) }
    }

    /// Bytes covered.
    #[inline]
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for RemoteAccess<'_> {
    #[inline]
    fn drop(&mut self) {
        self.target.state.leave();
    }
}

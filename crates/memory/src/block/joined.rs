//! A block over users' memory, and the devices that have registered it.

use std::{
    fmt,
    ptr::NonNull,
    sync::{Arc, PoisonError, RwLock},
};

use super::{Block, BlockVisitor, MemoryObserver};
use crate::{ForeignMemory, GivenMemory, VisitError};

/// Memory that a user has given away.
pub(super) struct Given {
    bytes: NonNull<[u8]>,
    /// Only dropped.
    _owner: Box<dyn GivenMemory>,
}

// SAFETY: any thread may read and write the bytes, by the contract of `GivenMemory`, and the owner is `Send` and `Sync`.
unsafe impl Send for Given {}
// SAFETY: as for `Send`. `Given` itself accesses no bytes; the buffer types keep accesses apart.
unsafe impl Sync for Given {}

/// Without the owner, which might show bytes that are being written.
impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Given").field("length", &self.length()).finish_non_exhaustive()
    }
}

impl Given {
    pub(super) fn base(&self) -> NonNull<u8> {
        self.bytes.cast()
    }

    pub(super) fn length(&self) -> usize {
        self.bytes.len()
    }
}

/// The block of a joined memory, and the devices that have registered it.
pub(crate) struct JoinedBlock {
    block: Block,
    visitors: RwLock<Vec<Arc<dyn BlockVisitor>>>,
    /// Of memory that is written.
    observer: Option<Arc<dyn MemoryObserver>>,
}

impl JoinedBlock {
    pub(crate) fn new(owner: Arc<dyn ForeignMemory>) -> Self {
        Self { block: Block::joined(owner), visitors: RwLock::default(), observer: None }
    }

    pub(crate) fn given(mut owner: Box<dyn GivenMemory>, observer: Option<Arc<dyn MemoryObserver>>) -> Self {
        let given = Given { bytes: owner.bytes(), _owner: owner };
        Self { block: Block::given(given), visitors: RwLock::default(), observer }
    }

    pub(crate) fn block(&self) -> &Block {
        &self.block
    }

    pub(super) fn observer(&self) -> Option<&dyn MemoryObserver> {
        self.observer.as_deref()
    }

    pub(crate) fn visit(&self, visitor: &Arc<dyn BlockVisitor>) -> Result<(), VisitError> {
        visitor.block_added(&self.block)?;
        self.visitors.write().unwrap_or_else(PoisonError::into_inner).push(visitor.clone());
        Ok(())
    }

    pub(crate) fn visit_again(&self) {
        // Under the lock, so that a visitor that is removed meanwhile is not added again.
        let mut visitors = self.visitors.write().unwrap_or_else(PoisonError::into_inner);
        visitors.retain(|visitor| {
            visitor.block_removed(&self.block);
            visitor.block_added(&self.block).is_ok()
        });
    }

    pub(crate) fn leave(&self, visitor: &Arc<dyn BlockVisitor>) {
        let mut visitors = self.visitors.write().unwrap_or_else(PoisonError::into_inner);
        visitors.retain(|other| !Arc::ptr_eq(other, visitor));
        drop(visitors);
        visitor.block_removed(&self.block);
    }
}

impl Drop for JoinedBlock {
    fn drop(&mut self) {
        let visitors = self.visitors.get_mut().unwrap_or_else(PoisonError::into_inner);
        visitors.drain(..).for_each(|visitor| visitor.block_removed(&self.block));
    }
}

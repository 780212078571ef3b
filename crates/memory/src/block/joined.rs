//! A block over users' memory, and the devices that have registered it.

use std::sync::{Arc, PoisonError, RwLock};

use super::{Block, BlockVisitor};
use crate::{ForeignMemory, VisitError};

/// The block of a joined memory, and the devices that have registered it.
pub(crate) struct JoinedBlock {
    block: Block,
    visitors: RwLock<Vec<Arc<dyn BlockVisitor>>>,
}

impl JoinedBlock {
    pub(crate) fn new(owner: Arc<dyn ForeignMemory>) -> Self {
        Self { block: Block::joined(owner), visitors: RwLock::default() }
    }

    pub(crate) fn block(&self) -> &Block {
        &self.block
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

//! Hooks: for devices, which register every block, and for tests that watch who owns every byte.

use std::{fmt, ops::Range};

use super::{Block, BlockId, GrantEnd, GrantId};
use crate::VisitError;

/// A range of one block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Span {
    /// The block.
    pub block: BlockId,
    /// Byte range inside the block.
    pub range: Range<usize>,
}

/// Gets every block of a pool once: existing blocks when it is added, and each later one before the first buffer is cut
/// from it. So a device registers whole blocks and no single buffer.
pub trait BlockVisitor: Send + Sync + fmt::Debug {
    /// Registers `block`. An error makes the allocation that needed the block fail, without any other effect.
    ///
    /// # Errors
    /// The reason why the device cannot use the block.
    fn block_added(&self, block: &Block) -> Result<(), VisitError>;

    /// Deregisters `block`: this process does not use it any more, or this visitor was removed
    /// ([`Pool::remove_visitor`](crate::Pool::remove_visitor)). For users' memory ([`UserMemory`](crate::UserMemory))
    /// it is called in the thread that drops the last buffer, so it must not wait, nor take a lock under which buffers
    /// are dropped. Pools never release blocks.
    fn block_removed(&self, _block: &Block) {}
}

/// Watches every change of ownership. The simulator's owner map is one; production pools have none.
///
/// Called without any pool lock held, before the new owner can act.
pub trait MemoryObserver: Send + Sync + fmt::Debug {
    /// Called before the pool allocates a buffer of `bytes` bytes for which it has room. An error makes the allocation
    /// fail, as if the operating system had refused it: the caller gets
    /// [`MemoryError::Block`](crate::MemoryError::Block).
    ///
    /// # Errors
    /// The error of the simulated operating system.
    fn allocating(&self, _bytes: usize) -> std::io::Result<()> {
        Ok(())
    }
    /// The pool allocated `span`, or it is part of a buffer that is being [divided](crate::BufMut::divide), or all of one whose parts are gone.
    fn allocated(&self, span: &Span);
    /// `span` returned to the pool, or it is part of a divided buffer and no longer used, or all of one that is being divided.
    fn freed(&self, span: &Span);
    /// `span` was granted to a peer.
    fn granted(&self, span: &Span, grant: GrantId);
    /// The grant of `span` ended; with `None` the memory was leaked instead.
    fn grant_ended(&self, span: &Span, grant: GrantId, end: Option<GrantEnd>);
}

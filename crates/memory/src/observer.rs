//! Hooks: devices that register every block, and tests that watch who owns every byte.

use std::{fmt, ops::Range, sync::Arc};

use crate::{Block, BlockId, GrantEnd, GrantId};

/// A range of one block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Span {
    /// The block.
    pub block: BlockId,
    /// Byte range inside the block.
    pub range: Range<usize>,
}

/// Handed every block of a pool once: those that exist when it is added, and each later one before the first
/// buffer is cut from it (the allocator-visitor idea of `tensorflow-verbs.md` §6).
pub trait BlockVisitor: Send + Sync + fmt::Debug {
    /// Registers `block`. An error makes the allocation that needed the block fail; nothing is half-made.
    ///
    /// # Errors
    /// Whatever keeps the device from using the block.
    fn block_added(&self, block: &Block) -> Result<(), VisitError>;

    /// The device lets `block` go: nobody in this process uses it any more, or the device is not to
    /// ([`Pool::remove_visitor`](crate::Pool::remove_visitor)). Called for users' memory
    /// ([`UserMemory`](crate::UserMemory)) wherever its last buffer is dropped, so it must not wait, nor take a lock
    /// under which buffers are dropped. Pools keep their blocks.
    fn block_removed(&self, _block: &Block) {}
}

/// A visitor's refusal, shared so that it can be cloned into every waiter's error.
#[derive(Clone)]
pub struct VisitError(pub Arc<dyn std::error::Error + Send + Sync>);

impl fmt::Debug for VisitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for VisitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for VisitError {}

/// Watches every change of ownership. The simulator's owner map is one; production pools have none.
///
/// Called without any pool lock held, before the new owner can act.
pub trait MemoryObserver: Send + Sync + fmt::Debug {
    /// Whether a buffer of `bytes` bytes for which there is room may be had: a test that answers with an error sees what
    /// becomes of an allocation that the operating system refuses. The caller gets it as
    /// [`MemoryError::Block`](crate::MemoryError::Block).
    ///
    /// # Errors
    /// What the operating system says.
    fn allocating(&self, _bytes: usize) -> std::io::Result<()> {
        Ok(())
    }
    /// `span` left the pool for a user.
    fn allocated(&self, span: &Span);
    /// `span` went back to the pool.
    fn freed(&self, span: &Span);
    /// `span` was lent to a peer.
    fn granted(&self, span: &Span, grant: GrantId);
    /// The loan ended; `None` means that it was leaked instead.
    fn grant_ended(&self, span: &Span, grant: GrantId, end: Option<GrantEnd>);
}

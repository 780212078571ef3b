//! Buffers that a peer may read (one-sided `read`).

use std::fmt;

use super::Buf;
use crate::{Block, MemoryError, block::range_of, sync::lock};

impl Block {
    /// The bytes `offset..offset + length`, for a fabric that executes a peer's read. They stay alive and unchanged
    /// while the returned buffer lives, even if the exposure ends meanwhile.
    ///
    /// # Errors
    /// [`MemoryError::NotExposed`] when no single [`Exposure`] covers the whole range now.
    pub fn exposed(&self, offset: u64, length: u64) -> Result<Buf, MemoryError> {
        let refused = || MemoryError::NotExposed { block: self.id().get(), offset, length };
        let range = range_of(offset, length).ok_or_else(refused)?;
        let found = lock(self.exposures()).find(range);
        // Upgraded without the lock: if this is the last handle, dropping the allocation takes the lock.
        let (allocation, range) = found.ok_or_else(refused)?;
        let allocation = allocation.upgrade().ok_or_else(refused)?;
        Ok(Buf::part_of(allocation, range))
    }
}

/// While it lives, a peer with the read right may read exactly the bytes of one [`Buf`].
///
/// Dropping it ends the permission: no later lookup finds the bytes. A read that found them earlier keeps them alive
/// and unchanged until it ends, because it holds a `Buf` of its own. An empty or foreign buffer lies in no block, so no
/// peer can name it, and exposing it permits nothing.
pub struct Exposure {
    buffer: Buf,
}

impl Exposure {
    pub(crate) fn new(buffer: Buf) -> Self {
        if let Some(block) = buffer.block() {
            lock(block.exposures()).add(buffer.allocation(), buffer.range());
        }
        Self { buffer }
    }

    /// The bytes that may be read.
    pub fn buf(&self) -> &Buf {
        &self.buffer
    }
}

impl fmt::Debug for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Exposure").field(&self.buffer).finish()
    }
}

impl Drop for Exposure {
    fn drop(&mut self) {
        if let Some(block) = self.buffer.block() {
            lock(block.exposures()).remove(self.buffer.allocation().offset(), &self.buffer.range());
        }
    }
}

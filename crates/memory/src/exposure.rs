//! Buffers that a peer may read (one-sided `read`).

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::{Arc, Weak},
};

use crate::{Block, Buf, MemoryError, allocation::Allocation, sync::lock};

/// While it lives, a peer with the read right may read exactly the bytes of one [`Buf`].
///
/// Dropping it ends the permission: no later lookup finds the bytes. A read that found them before keeps them alive
/// and unchanged until it is done, because it holds a `Buf` of its own. An empty or foreign buffer lies in no block,
/// so no peer can name it, and exposing it permits nothing.
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

/// The exposed ranges of one block, by the first byte of their allocation.
#[derive(Debug, Default)]
pub(crate) struct ExposureTable {
    allocations: BTreeMap<usize, Exposed>,
}

#[derive(Debug)]
struct Exposed {
    /// Alive while an exposure is. Weak, because the allocation holds the block, which holds this table.
    allocation: Weak<Allocation>,
    /// How many exposures there are of each range, by `(start, end)` inside the allocation.
    ranges: BTreeMap<(usize, usize), usize>,
}

impl ExposureTable {
    fn add(&mut self, allocation: &Arc<Allocation>, range: Range<usize>) {
        let fresh = || Exposed { allocation: Arc::downgrade(allocation), ranges: BTreeMap::new() };
        let exposed = self.allocations.entry(allocation.offset()).or_insert_with(fresh);
        *exposed.ranges.entry((range.start, range.end)).or_insert(0) += 1;
    }

    fn remove(&mut self, offset: usize, range: &Range<usize>) {
        let Some(exposed) = self.allocations.get_mut(&offset) else { return };
        if let Some(count) = exposed.ranges.get_mut(&(range.start, range.end)) {
            *count -= 1;
            if *count == 0 {
                exposed.ranges.remove(&(range.start, range.end));
            }
        }
        if exposed.ranges.is_empty() {
            self.allocations.remove(&offset);
        }
    }

    /// The allocation with an exposure that covers `start..end`, and the range inside it.
    fn find(&self, start: usize, end: usize) -> Option<(Weak<Allocation>, Range<usize>)> {
        let (&offset, exposed) = self.allocations.range(..=start).next_back()?;
        let (start, end) = (start - offset, end - offset);
        let before = exposed.ranges.range(..=(start, usize::MAX));
        before.rev().find(|((_, last), _)| end <= *last)?;
        Some((exposed.allocation.clone(), start..end))
    }
}

/// The exposed bytes at `offset..offset + length` of `block`.
pub(crate) fn find(block: &Block, offset: u64, length: u64) -> Result<Buf, MemoryError> {
    let refused = || MemoryError::NotExposed { block: block.id().get(), offset, length };
    let start = usize::try_from(offset).map_err(|_| refused())?;
    let bytes = usize::try_from(length).map_err(|_| refused())?;
    let end = start.checked_add(bytes).ok_or_else(refused)?;
    let found = lock(block.exposures()).find(start, end);
    // Upgraded without the lock: if this is the last handle, dropping the allocation takes the lock.
    let (allocation, range) = found.ok_or_else(refused)?;
    let allocation = allocation.upgrade().ok_or_else(refused)?;
    Ok(Buf::part_of(allocation, range))
}

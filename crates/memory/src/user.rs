//! Users' own memory that fabrics send from without a copy.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::{Arc, PoisonError, RwLock},
};

use crate::{
    BlockVisitor, Buf, ForeignMemory, MemoryError,
    block::{Allocation, JoinedBlock},
};

/// Memory that users have joined: registered with the devices, and found again by address.
///
/// Neighbours cannot map joined memory, so the fabric over shared memory sends it with one copy into a pool. The other fabrics
/// send it in place. Nothing is ever received into it.
///
/// ```no_run
/// use std::{fs::File, sync::Arc};
///
/// use tensorwire_memory::{Mapping, UserMemory};
///
/// fn join(memory: &UserMemory) -> Result<(), Box<dyn std::error::Error>> {
///     let file = File::open("weights.bin")?;
///     let joined = memory.join(Arc::new(Mapping::of_file(&file)?))?;
///     println!("{} bytes can be sent from where they lie", joined.buf().len());
///     Ok(())
/// }
/// ```
#[derive(Clone, Default)]
pub struct UserMemory {
    shared: Arc<RwLock<Registry>>,
}

#[derive(Default)]
struct Registry {
    visitors: Vec<Arc<dyn BlockVisitor>>,
    /// Each joined memory as a whole, by its first address. Ranges do not overlap.
    joined: BTreeMap<usize, Buf>,
}

impl fmt::Debug for UserMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let registry = self.shared.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("UserMemory").field("joined", &registry.joined.values()).finish_non_exhaustive()
    }
}

impl UserMemory {
    /// Without any memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives every joined block, present and future, to `visitor`, and calls it again when one is withdrawn.
    ///
    /// # Errors
    /// [`MemoryError::Register`] when the visitor refuses a present block; it is not added then, and the
    /// blocks that it had registered are deregistered.
    #[doc(hidden)]
    pub fn add_visitor(&self, visitor: Arc<dyn BlockVisitor>) -> Result<(), MemoryError> {
        let mut registry = self.shared.write().unwrap_or_else(PoisonError::into_inner);
        let blocks: Vec<_> = registry.joined.values().filter_map(Buf::joined_block).collect();
        for (number, block) in blocks.iter().enumerate() {
            if let Err(source) = block.visit(&visitor) {
                blocks.iter().take(number).for_each(|block| block.leave(&visitor));
                return Err(MemoryError::Register { pool: POOL, source });
            }
        }
        registry.visitors.push(visitor);
        Ok(())
    }

    /// Lets `visitor` deregister all joined blocks, and gives it no more. Does nothing if it was not added. Memory
    /// whose [`Joined`] was dropped while buffers of it are left is deregistered with the last of them.
    #[doc(hidden)]
    pub fn remove_visitor(&self, visitor: &Arc<dyn BlockVisitor>) {
        let blocks: Vec<Buf> = {
            let mut registry = self.shared.write().unwrap_or_else(PoisonError::into_inner);
            let before = registry.visitors.len();
            registry.visitors.retain(|known| !Arc::ptr_eq(known, visitor));
            if registry.visitors.len() == before {
                return;
            }
            registry.joined.values().cloned().collect()
        };
        // Without the lock: devices deregister the blocks, which can take long.
        blocks.iter().filter_map(Buf::joined_block).for_each(|block| block.leave(visitor));
    }

    /// Registers `owner`'s memory with the devices for as long as the returned value lives. Buffers of that memory
    /// extend this: devices deregister it when the returned value and the last buffer are dropped.
    ///
    /// # Errors
    /// [`MemoryError::Overlaps`] when some of it has joined already; [`MemoryError::Register`] when a device refuses
    /// it. Then nothing has changed.
    pub fn join(&self, owner: Arc<dyn ForeignMemory>) -> Result<Joined, MemoryError> {
        if owner.length() == 0 {
            return Ok(Joined { registry: self.clone(), bytes: Buf::empty() });
        }
        let addresses = addresses(&owner);
        let mut registry = self.shared.write().unwrap_or_else(PoisonError::into_inner);
        let before = registry.joined.range(..addresses.end).next_back();
        if before.is_some_and(|(start, bytes)| start + bytes.len() > addresses.start) {
            return Err(MemoryError::Overlaps { length: addresses.len() });
        }
        let block = JoinedBlock::new(owner);
        for visitor in &registry.visitors {
            // A refusal drops the block, and the devices that registered it deregister it.
            block.visit(visitor).map_err(|source| MemoryError::Register { pool: POOL, source })?;
        }
        let bytes = Buf::whole(Allocation::joined(block));
        registry.joined.insert(addresses.start, bytes.clone());
        Ok(Joined { registry: self.clone(), bytes })
    }

    /// The joined memory at `addresses` (of a slice: `as_ptr_range()`), as a buffer. No copy.
    ///
    /// # Errors
    /// [`MemoryError::NotJoined`] unless one joined memory covers all of it now.
    pub fn find(&self, addresses: Range<*const u8>) -> Result<Buf, MemoryError> {
        let (start, end) = (addresses.start.addr(), addresses.end.addr());
        let refused = || MemoryError::NotJoined { length: end.saturating_sub(start) };
        if start == end {
            return Ok(Buf::empty());
        }
        let registry = self.shared.read().unwrap_or_else(PoisonError::into_inner);
        let (first, bytes) = registry.joined.range(..=start).next_back().ok_or_else(refused)?;
        end.checked_sub(*first).and_then(|end| bytes.slice(start - first..end)).ok_or_else(refused)
    }
}

const POOL: &str = "users' memory";

fn addresses(owner: &Arc<dyn ForeignMemory>) -> Range<usize> {
    let start = owner.base().addr().get();
    start..start + owner.length()
}

/// A user's memory that has joined. Dropping this value withdraws it.
#[derive(Debug)]
#[must_use = "the memory leaves when this is dropped"]
pub struct Joined {
    registry: UserMemory,
    bytes: Buf,
}

impl Joined {
    /// All bytes of it. The buffer may outlive this value, and keeps the memory registered.
    pub fn buf(&self) -> &Buf {
        &self.bytes
    }

    /// Deregisters the memory from all devices and registers it again: other pages are at its addresses now. If a
    /// device refuses, its transfers are copied from then on.
    pub fn register_again(&self) {
        if let Some(block) = self.bytes.joined_block() {
            block.visit_again();
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let start = self.bytes.as_ptr().addr();
        let left = {
            let mut registry = self.registry.shared.write().unwrap_or_else(PoisonError::into_inner);
            let ours = registry.joined.get(&start).is_some_and(|bytes| bytes.is_same(&self.bytes));
            ours.then(|| registry.joined.remove(&start)).flatten()
        };
        // Without the lock: if it is the last buffer, devices deregister the memory.
        drop(left);
    }
}

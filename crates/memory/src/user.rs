//! Users' own memory, which fabrics use where it lies.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc, PoisonError, RwLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    BlockVisitor, Buf, BufMut, ForeignMemory, GivenMemory, MemoryError, MemoryObserver,
    block::{Allocation, JoinedBlock},
};

/// Memory of users that is registered with the devices. Memory that was [joined](Self::join) is only read, and is found again by address;
/// memory that was [given](Self::give) away is a buffer, which can also be written.
///
/// Neighbours cannot map such memory, so the fabric over shared memory sends it with one copy into a pool. The other fabrics
/// send it in place. All of them receive into given memory in place.
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
    observer: Option<Arc<dyn MemoryObserver>>,
    visitors: Vec<Arc<dyn BlockVisitor>>,
    /// By their first address. Ranges do not overlap.
    members: BTreeMap<usize, Member>,
    /// How often memory was found.
    hits: AtomicU64,
}

/// One memory, as a whole.
#[derive(Debug)]
enum Member {
    Joined(Buf),
    /// With its length. The entry outlives the buffer, and is removed when others come.
    Given(Weak<JoinedBlock>, usize),
}

impl Member {
    fn length(&self) -> usize {
        match self {
            Self::Joined(bytes) => bytes.len(),
            Self::Given(_, length) => *length,
        }
    }

    /// `None` if the buffer is gone.
    fn block(&self) -> Option<Arc<JoinedBlock>> {
        match self {
            Self::Joined(bytes) => bytes.joined_block().cloned(),
            Self::Given(block, _) => block.upgrade(),
        }
    }

    fn is_gone(&self) -> bool {
        matches!(self, Self::Given(block, _) if block.strong_count() == 0)
    }

    fn joined(&self) -> Option<&Buf> {
        match self {
            Self::Joined(bytes) => Some(bytes),
            Self::Given(..) => None,
        }
    }
}

impl Registry {
    fn blocks(&self) -> Vec<Arc<JoinedBlock>> {
        self.members.values().filter_map(Member::block).collect()
    }

    /// Registers `block`, whose memory is at `addresses`, with all devices. After an error the caller drops the block without the lock:
    /// devices that have registered it deregister it then, and its owner is dropped, which is the user's code.
    fn add(&mut self, addresses: &Range<usize>, block: &JoinedBlock) -> Result<(), MemoryError> {
        while let Some((&start, before)) = self.members.range(..addresses.end).next_back()
            && start + before.length() > addresses.start
        {
            if !before.is_gone() {
                return Err(MemoryError::Overlaps { length: addresses.len() });
            }
            self.members.remove(&start);
        }
        self.register(block)
    }

    fn register(&self, block: &JoinedBlock) -> Result<(), MemoryError> {
        let registered = self.visitors.iter().try_for_each(|visitor| block.visit(visitor));
        registered.map_err(|source| MemoryError::Register { pool: POOL, source })
    }
}

impl fmt::Debug for UserMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let registry = self.shared.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("UserMemory").field("members", &registry.members.values()).finish_non_exhaustive()
    }
}

impl UserMemory {
    /// Without any memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// With an observer of the memory that is given.
    #[doc(hidden)]
    pub fn observed(observer: Option<Arc<dyn MemoryObserver>>) -> Self {
        let registry = Registry { observer, ..Registry::default() };
        Self { shared: Arc::new(RwLock::new(registry)) }
    }

    /// Gives every block of joined and given memory, present and future, to `visitor`, and calls it again when one is withdrawn.
    ///
    /// # Errors
    /// [`MemoryError::Register`] when the visitor refuses a present block; it is not added then, and the
    /// blocks that it had registered are deregistered.
    #[doc(hidden)]
    pub fn add_visitor(&self, visitor: Arc<dyn BlockVisitor>) -> Result<(), MemoryError> {
        let blocks;
        // Released before the blocks, of which the last handle of given memory may be one: its owner is the user's code.
        let mut registry = self.shared.write().unwrap_or_else(PoisonError::into_inner);
        blocks = registry.blocks();
        for (number, block) in blocks.iter().enumerate() {
            if let Err(source) = block.visit(&visitor) {
                blocks.iter().take(number).for_each(|block| block.leave(&visitor));
                return Err(MemoryError::Register { pool: POOL, source });
            }
        }
        registry.visitors.push(visitor);
        Ok(())
    }

    /// Lets `visitor` deregister all these blocks, and gives it no more. Does nothing if it was not added. Memory
    /// whose [`Joined`] was dropped while buffers of it are left is deregistered with the last of them.
    #[doc(hidden)]
    pub fn remove_visitor(&self, visitor: &Arc<dyn BlockVisitor>) {
        let blocks = {
            let mut registry = self.shared.write().unwrap_or_else(PoisonError::into_inner);
            let before = registry.visitors.len();
            registry.visitors.retain(|known| !Arc::ptr_eq(known, visitor));
            if registry.visitors.len() == before {
                return;
            }
            registry.blocks()
        };
        // Without the lock: devices deregister the blocks, which can take long.
        blocks.iter().for_each(|block| block.leave(visitor));
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
        let addresses = addresses(owner.base(), owner.length());
        let block = Arc::new(JoinedBlock::new(owner));
        let mut registry = self.shared.write().unwrap_or_else(PoisonError::into_inner);
        registry.add(&addresses, &block)?;
        let bytes = Buf::whole(Allocation::joined(block));
        registry.members.insert(addresses.start, Member::Joined(bytes.clone()));
        Ok(Joined { registry: self.clone(), bytes })
    }

    /// `owner`'s memory as a buffer, without a copy, registered with the devices that are open now. Devices deregister it, and `owner` is
    /// dropped, with the last buffer of it. Unlike [joined](Self::join) memory it is not [found](Self::find) by its address. So any part of
    /// it may have joined, or be in another such buffer.
    ///
    /// # Errors
    /// [`MemoryError::Register`] when a device refuses it. `owner` is dropped then.
    pub fn buffer_of(&self, owner: Arc<dyn ForeignMemory>) -> Result<Buf, MemoryError> {
        if owner.length() == 0 {
            return Ok(Buf::empty());
        }
        let block = Arc::new(JoinedBlock::new(owner));
        // Released before the block, if a device refuses it: its owner is the user's code.
        let registry = self.shared.read().unwrap_or_else(PoisonError::into_inner);
        registry.register(&block)?;
        Ok(Buf::whole(Allocation::joined(block)))
    }

    /// Takes `owner`'s memory as a buffer, for instance for the pages of an arena, and registers it with the devices. Peers can write it
    /// where a receive pool could be written. Devices deregister it, and `owner` is dropped, when the buffer and all that became of it are
    /// dropped.
    ///
    /// # Errors
    /// As [`join`](Self::join). `owner` is dropped then.
    pub fn give(&self, owner: impl GivenMemory + 'static) -> Result<BufMut, MemoryError> {
        let observer = self.shared.read().unwrap_or_else(PoisonError::into_inner).observer.clone();
        let block = Arc::new(JoinedBlock::given(Box::new(owner), observer));
        let length = block.block().length();
        if length == 0 {
            return Ok(BufMut::from_allocation(Allocation::empty()));
        }
        let addresses = addresses(block.block().base(), length);
        let mut registry = self.shared.write().unwrap_or_else(PoisonError::into_inner);
        registry.add(&addresses, &block)?;
        registry.members.retain(|_, member| !member.is_gone());
        registry.members.insert(addresses.start, Member::Given(Arc::downgrade(&block), length));
        Ok(BufMut::from_allocation(Allocation::joined(block)))
    }

    /// How often [`find`](Self::find) has found memory.
    pub fn hits(&self) -> u64 {
        self.shared.read().unwrap_or_else(PoisonError::into_inner).hits.load(Ordering::Relaxed)
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
        let (first, member) = registry.members.range(..=start).next_back().ok_or_else(refused)?;
        let bytes = member.joined().ok_or_else(refused)?;
        let found = end.checked_sub(*first).and_then(|end| bytes.slice(start - first..end));
        let found = found.ok_or_else(refused)?;
        registry.hits.fetch_add(1, Ordering::Relaxed);
        Ok(found)
    }
}

const POOL: &str = "users' memory";

fn addresses(base: NonNull<u8>, length: usize) -> Range<usize> {
    let start = base.addr().get();
    start..start + length
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
            let member = registry.members.get(&start).and_then(Member::joined);
            let is_ours = member.is_some_and(|bytes| bytes.is_same(&self.bytes));
            is_ours.then(|| registry.members.remove(&start)).flatten()
        };
        // Without the lock: if it is the last buffer, devices deregister the memory.
        drop(left);
    }
}

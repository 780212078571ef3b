//! Blocks: memory that devices register and from which buffers are cut; these buffers, and the ranges that peers may
//! write and read.

mod allocation;
mod exposure_table;
mod grant_table;
mod joined;
mod observer;
mod remote_target;
mod stock;

use std::{
    fmt,
    ops::Range,
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{ForeignMemory, HugePages, MemoryError, memfd::Memfd, sync::Mutex};
use exposure_table::ExposureTable;
use grant_table::GrantTable;

pub(crate) use allocation::Allocation;
pub(crate) use grant_table::GrantState;
pub use grant_table::{GrantEnd, GrantId};
pub(crate) use joined::JoinedBlock;
pub use observer::{BlockVisitor, MemoryObserver, Span};
pub use remote_target::{RemoteAccess, RemoteTarget};
pub(crate) use stock::{Caller, Stock};
pub use stock::{PoolConfig, PoolStats};

/// Names a block within this process; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u64);

impl BlockId {
    /// The number itself, for wire formats and logs.
    pub fn get(self) -> u64 {
        self.0
    }
}

static NEXT_BLOCK: AtomicU64 = AtomicU64::new(1);

/// A shared handle on memory that devices register as a whole: a page-aligned memfd of a pool, or memory that a user
/// joined or gave away ([`UserMemory`](crate::UserMemory)). Cheap to clone. The memory is unmapped when the last handle is dropped, so a
/// device that registered a block holds a clone.
#[derive(Clone)]
pub struct Block {
    inner: Arc<BlockInner>,
}

#[derive(Debug)]
struct BlockInner {
    id: BlockId,
    backing: Backing,
    grants: Mutex<GrantTable>,
    exposures: Mutex<ExposureTable>,
}

#[derive(Debug)]
enum Backing {
    /// Memory of a pool.
    Memfd(Memfd),
    /// Memory of a user, for reading.
    Joined(Arc<dyn ForeignMemory>),
    /// Memory of a user, for reading and writing.
    Given(joined::Given),
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("id", &self.inner.id).field("length", &self.length()).finish()
    }
}

impl Block {
    /// A memfd of `length` bytes (rounded up to whole pages): made, sized, mapped, sealed and pre-faulted.
    pub(crate) fn new(pool: &'static str, length: usize, huge: HugePages) -> Result<Self, MemoryError> {
        Memfd::new(pool, length, huge).map(|memfd| Self::over(Backing::Memfd(memfd)))
    }

    /// A user's memory.
    pub(crate) fn joined(owner: Arc<dyn ForeignMemory>) -> Self {
        Self::over(Backing::Joined(owner))
    }

    /// Memory that a user has given away.
    fn given(given: joined::Given) -> Self {
        Self::over(Backing::Given(given))
    }

    fn over(backing: Backing) -> Self {
        let id = BlockId(NEXT_BLOCK.fetch_add(1, Ordering::Relaxed));
        let inner = BlockInner { id, backing, grants: Mutex::default(), exposures: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// This block's number.
    pub fn id(&self) -> BlockId {
        self.inner.id
    }

    /// Bytes: whole pages for a block of a pool, any number for a user's.
    #[inline]
    pub fn length(&self) -> usize {
        match &self.inner.backing {
            Backing::Memfd(memfd) => memfd.length(),
            Backing::Joined(owner) => owner.length(),
            Backing::Given(given) => given.length(),
        }
    }

    /// The memfd, sealed against resizing and against new writable mappings, for a neighbour on this host to
    /// map read-only. `None` for a user's memory, which is in no memfd: see
    /// [`shareable`](Self::shareable).
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.inner.backing {
            Backing::Memfd(memfd) => Some(memfd.fd()),
            Backing::Joined(_) | Backing::Given(_) => None,
        }
    }

    /// Whether a neighbour can map it. If not, a fabric over shared memory sends a copy in a pool's block; other
    /// fabrics send it in place.
    pub fn shareable(&self) -> bool {
        matches!(self.inner.backing, Backing::Memfd(_))
    }

    /// Whether this process may write it: memory of a pool, or memory that a user has [given](crate::UserMemory::give) away.
    pub fn is_writable(&self) -> bool {
        !matches!(self.inner.backing, Backing::Joined(_))
    }

    /// Bytes that are backed by huge pages.
    pub fn huge_bytes(&self) -> usize {
        match &self.inner.backing {
            Backing::Memfd(memfd) => memfd.huge_bytes(),
            Backing::Joined(_) | Backing::Given(_) => 0,
        }
    }

    /// Start of the memory. Forming a reference through it is subject to the buffer types' rules; a device uses
    /// it to register the block. A user's memory may be mapped for reading only ([`is_writable`](Self::is_writable)).
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        match &self.inner.backing {
            Backing::Memfd(memfd) => memfd.base(),
            Backing::Joined(owner) => owner.base(),
            Backing::Given(given) => given.base(),
        }
    }

    /// The grant that covers all of `offset..offset + length`, for a fabric that executes a peer's access.
    ///
    /// # Errors
    /// [`MemoryError::NotGranted`] when no single grant covers the whole range now; nothing was touched.
    pub fn remote_target(&self, offset: u64, length: u64) -> Result<RemoteTarget, MemoryError> {
        let refused = MemoryError::NotGranted { block: self.id().get(), offset, length };
        self.grant_around(offset, length)?.part(offset, length).ok_or(refused)
    }

    /// As [`remote_target`](Self::remote_target), but of the whole grant. While the grant lasts, its
    /// [parts](RemoteTarget::part) need no search.
    ///
    /// # Errors
    /// As [`remote_target`](Self::remote_target).
    pub fn grant_around(&self, offset: u64, length: u64) -> Result<RemoteTarget, MemoryError> {
        RemoteTarget::around(self, offset, length)
    }

    pub(crate) fn exposures(&self) -> &Mutex<ExposureTable> {
        &self.inner.exposures
    }

    pub(crate) fn grants(&self) -> &Mutex<GrantTable> {
        &self.inner.grants
    }
}

/// `offset..offset + length`; `None` when it exceeds the address space.
pub(crate) fn range_of(offset: u64, length: u64) -> Option<Range<usize>> {
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(usize::try_from(length).ok()?)?;
    Some(start..end)
}

#[cfg(test)]
impl Block {
    pub(crate) fn for_tests(length: usize) -> Self {
        #[allow(clippy::unwrap_used)]
        Self::new("test", length, HugePages::Never).unwrap()
    }
}

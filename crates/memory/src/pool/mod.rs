//! A bounded pool of blocks.

mod shared;
mod space;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

pub(crate) use shared::{Place, PoolShared};

use crate::{BlockVisitor, BufMut, HugePages, MemoryError, MemoryObserver};
use shared::Caller;

/// Settings of a pool.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// The name in errors and logs.
    pub name: &'static str,
    /// Size of a block in bytes; a larger buffer gets a block of its own, at most a quarter larger than it.
    /// Pre-faulted when made, so this many bytes become resident at the first allocation. Default 16 MiB.
    pub block_bytes: usize,
    /// Bytes that buffers may take together, rounded up to [`ALIGNMENT`](crate::ALIGNMENT) each. Default 1 GiB.
    ///
    /// Blocks are reused and not given back, so fragmentation can map more than the cap. Small buffers go into the holes of
    /// usual blocks, and into empty large blocks only once the cap is mapped. Large blocks grow in steps of a
    /// quarter, so that buffers of ever larger sizes, one at a time, map about seven times the cap at most.
    pub cap_bytes: u64,
    /// How much of the cap, in percent, buffers of [`Pool::try_alloc_early`] may take together. Leaked bytes lower the cap
    /// for this purpose. Default 50, more than 100 counts as 100.
    pub early_share: u8,
    /// Whether blocks are backed by huge pages. Default [`HugePages::Never`].
    pub huge_pages: HugePages,
    /// Watches ownership in tests. Default none.
    pub observer: Option<Arc<dyn MemoryObserver>>,
}

impl PoolConfig {
    /// The defaults under `name`.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            block_bytes: 16 << 20,
            cap_bytes: 1 << 30,
            early_share: 50,
            huge_pages: HugePages::Never,
            observer: None,
        }
    }
}

/// What a pool holds, in bytes and callers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes mapped.
    pub block_bytes: u64,
    /// Bytes of them that are backed by huge pages.
    pub huge_bytes: u64,
    /// Bytes in use by buffers, retired and leaked ones included.
    pub used_bytes: u64,
    /// Bytes in use by buffers taken early whose content does not exist yet.
    pub early_bytes: u64,
    /// Bytes leaked because a peer may still write or read them.
    pub leaked_bytes: u64,
    /// Bytes that a dead or lost peer may still read ([`Buf::retire`](crate::Buf::retire)).
    pub retired_bytes: u64,
    /// Callers waiting in [`Pool::alloc`].
    pub waiting: usize,
}

/// A bounded source of buffers. Cheap to clone.
///
/// ```
/// use memory::{Pool, PoolConfig};
///
/// let pool = Pool::new(PoolConfig { block_bytes: 64 << 10, ..PoolConfig::new("example") })?;
/// let mut buffer = pool.try_alloc(4096)?;
/// buffer.fill(1);
/// // From now on its bytes never change, and clones share them.
/// let shared = buffer.freeze();
/// assert_eq!(shared.clone().len(), 4096);
/// # Ok::<(), memory::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    shared: Arc<PoolShared>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("name", &self.shared.config.name).field("stats", &self.stats()).finish()
    }
}

impl Pool {
    /// An empty pool; the first allocation makes its first block.
    ///
    /// # Errors
    /// None today; fallible so that limits can be checked here.
    pub fn new(mut config: PoolConfig) -> Result<Self, MemoryError> {
        // A block larger than the cap could never be used up.
        let cap = usize::try_from(config.cap_bytes).unwrap_or(usize::MAX);
        config.block_bytes = config.block_bytes.min(cap);
        Ok(Self { shared: Arc::new(PoolShared::new(config)) })
    }

    /// A buffer of `length` bytes, or an error at the cap.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`] at the cap (also while earlier callers wait), [`MemoryError::TooLarge`],
    /// [`MemoryError::Limit`], [`MemoryError::Block`], [`MemoryError::HugePages`], [`MemoryError::Register`].
    pub fn try_alloc(&self, length: usize) -> Result<BufMut, MemoryError> {
        self.shared.allocate(length, Caller::Now)
    }

    /// A buffer of `length` bytes for content that may not exist for long: the destination of a request that its
    /// peer has not answered. All of them together take at most [`PoolConfig::early_share`] of the pool, so that
    /// requests whose values exist always find room.
    ///
    /// It counts as early until it is freed, frozen, leaked, or its grant is
    /// [answered](crate::Granted::answered) or ended. Never waits, and never overtakes callers that wait in
    /// [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// [`MemoryError::EarlyExhausted`] at the share, else as [`try_alloc`](Self::try_alloc).
    /// After an error for which [`MemoryError::is_exhausted`] holds, a request can be sent without a destination.
    pub fn try_alloc_early(&self, length: usize) -> Result<BufMut, MemoryError> {
        self.shared.allocate(length, Caller::Early)
    }

    /// A buffer of `length` bytes; waits at the cap, first come first served.
    ///
    /// # Errors
    /// As [`try_alloc`](Self::try_alloc) without `Exhausted`.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue; nothing else is lost.
    pub fn alloc(&self, length: usize) -> Alloc {
        Alloc { pool: self.shared.clone(), length, ticket: None }
    }

    /// Hands every block, present and future, to `visitor` once.
    ///
    /// # Errors
    /// [`MemoryError::Register`] when the visitor refuses a present block; it is not added then, and has been told
    /// that the blocks it took leave.
    pub fn add_visitor(&self, visitor: Arc<dyn BlockVisitor>) -> Result<(), MemoryError> {
        self.shared.add_visitor(visitor)
    }

    /// Takes all blocks back from `visitor` and hands it no more. Does nothing if it was not added. The pool's buffers do
    /// not change, but no operation of the visitor's device may use them any more.
    pub fn remove_visitor(&self, visitor: &Arc<dyn BlockVisitor>) {
        self.shared.remove_visitor(visitor);
    }

    /// What the pool holds now.
    pub fn stats(&self) -> PoolStats {
        self.shared.stats()
    }
}

/// The future of [`Pool::alloc`].
#[derive(Debug)]
pub struct Alloc {
    pool: Arc<PoolShared>,
    length: usize,
    ticket: Option<u64>,
}

impl Future for Alloc {
    type Output = Result<BufMut, MemoryError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.ticket.is_none() && testpoints::chance!("an allocation lets others go first") {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut answer = self.pool.allocate(self.length, Caller::Waiter(self.ticket));
        if matches!(answer, Err(MemoryError::Exhausted { .. })) {
            self.ticket = Some(self.pool.wait(self.ticket, context.waker()));
            // Memory may have been freed between the refusal and joining the queue, without waking this task: try again.
            answer = self.pool.allocate(self.length, Caller::Waiter(self.ticket));
        }
        if matches!(answer, Err(MemoryError::Exhausted { .. })) {
            return Poll::Pending;
        }
        if let Some(ticket) = self.ticket.take() {
            self.pool.stop_waiting(ticket);
        }
        Poll::Ready(answer)
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        if testpoints::planted!("an allocation that is given up stays in line") {
            return;
        }
        if let Some(ticket) = self.ticket.take() {
            self.pool.stop_waiting(ticket);
        }
    }
}

//! A bounded pool of blocks.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use crate::{
    BlockVisitor, BufMut, MemoryError, PoolConfig, PoolStats,
    block::{Allocation, Caller, Stock},
};

/// A bounded source of buffers. Cheap to clone.
///
/// ```
/// use tensorwire_memory::{Pool, PoolConfig};
///
/// let pool = Pool::new(PoolConfig { block_bytes: 64 << 10, ..PoolConfig::new("example") })?;
/// let mut buffer = pool.try_alloc(4096)?;
/// buffer.fill(1);
/// // From now on its bytes never change, and clones share them.
/// let shared = buffer.freeze();
/// assert_eq!(shared.clone().len(), 4096);
/// # Ok::<(), tensorwire_memory::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    stock: Arc<Stock>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("name", &self.stock.name()).field("stats", &self.stats()).finish()
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
        Ok(Self { stock: Arc::new(Stock::new(config)) })
    }

    /// A buffer of `length` bytes, or an error at the cap.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`] at the cap (also while earlier callers wait), [`MemoryError::TooLarge`],
    /// [`MemoryError::Limit`], [`MemoryError::Block`], [`MemoryError::HugePages`], [`MemoryError::Register`].
    pub fn try_alloc(&self, length: usize) -> Result<BufMut, MemoryError> {
        allocate(&self.stock, length, Caller::Now)
    }

    /// A buffer of `length` bytes for content that may not exist for long: the destination of a request that its peer
    /// has not answered. All of them together take at most [`PoolConfig::early_share`] of the pool, so that requests
    /// whose values exist always get room.
    ///
    /// It counts as early until it is freed, frozen, leaked, or its grant is
    /// [answered](crate::Granted::answered) or ended. Never waits, and never overtakes callers that wait in
    /// [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// [`MemoryError::EarlyExhausted`] at the share, else as [`try_alloc`](Self::try_alloc).
    /// After an error for which [`MemoryError::is_exhausted`] holds, a request can be sent without a destination.
    pub fn try_alloc_early(&self, length: usize) -> Result<BufMut, MemoryError> {
        allocate(&self.stock, length, Caller::Early)
    }

    /// A buffer of `length` bytes; waits at the cap, first come first served.
    ///
    /// # Errors
    /// As [`try_alloc`](Self::try_alloc) without `Exhausted`.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue; nothing else is lost.
    pub fn alloc(&self, length: usize) -> Alloc {
        Alloc { stock: self.stock.clone(), length, ticket: None }
    }

    /// Gives every block, present and future, to `visitor` once.
    ///
    /// # Errors
    /// [`MemoryError::Register`] when the visitor refuses a present block; it is not added then, and the
    /// blocks that it had registered are deregistered.
    #[doc(hidden)]
    pub fn add_visitor(&self, visitor: Arc<dyn BlockVisitor>) -> Result<(), MemoryError> {
        self.stock.add_visitor(visitor)
    }

    /// Lets `visitor` deregister all blocks, and gives it no more. Does nothing if it was not added. The pool's buffers
    /// do not change, but no operation of the visitor's device may use them any more.
    #[doc(hidden)]
    pub fn remove_visitor(&self, visitor: &Arc<dyn BlockVisitor>) {
        self.stock.remove_visitor(visitor);
    }

    /// The most bytes that its buffers may have together ([`PoolConfig::cap_bytes`]).
    pub fn cap_bytes(&self) -> u64 {
        self.stock.cap_bytes()
    }

    /// The pool's figures now.
    pub fn stats(&self) -> PoolStats {
        self.stock.stats()
    }
}

fn allocate(stock: &Arc<Stock>, length: usize, caller: Caller) -> Result<BufMut, MemoryError> {
    let allocation =
        if length == 0 { Allocation::empty() } else { Allocation::from_stock(stock, length, caller)? };
    Ok(BufMut::from_allocation(allocation))
}

/// The future of [`Pool::alloc`].
#[derive(Debug)]
pub struct Alloc {
    stock: Arc<Stock>,
    length: usize,
    ticket: Option<u64>,
}

impl Future for Alloc {
    type Output = Result<BufMut, MemoryError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.ticket.is_none()
            && tensorwire_testpoints::chance!("an allocation yields once before it begins")
        {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut answer = allocate(&self.stock, self.length, Caller::Waiter(self.ticket));
        if matches!(answer, Err(MemoryError::Exhausted { .. })) {
            self.ticket = Some(self.stock.wait(self.ticket, context.waker()));
            // Memory may have been freed between the refusal and joining the queue, without waking this task: try again.
            answer = allocate(&self.stock, self.length, Caller::Waiter(self.ticket));
        }
        if matches!(answer, Err(MemoryError::Exhausted { .. })) {
            return Poll::Pending;
        }
        if let Some(ticket) = self.ticket.take() {
            self.stock.stop_waiting(ticket);
        }
        Poll::Ready(answer)
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        if tensorwire_testpoints::planted!("a cancelled allocation stays in the queue") {
            return;
        }
        if let Some(ticket) = self.ticket.take() {
            self.stock.stop_waiting(ticket);
        }
    }
}

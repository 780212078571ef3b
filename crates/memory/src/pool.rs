//! A bounded pool of blocks.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    future::Future,
    mem,
    ops::Range,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use crate::{
    ALIGNMENT, Block, BlockId, BlockVisitor, BufMut, MemoryError, MemoryObserver, buffer::Allocation,
};

/// How a pool is made.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Appears in errors and logs.
    pub name: &'static str,
    /// Size of a block in bytes; a larger buffer gets a block of its own, at most a quarter larger than it.
    /// Pre-faulted when made, so this many bytes become resident at the first allocation. Default 16 MiB.
    pub block_bytes: usize,
    /// Bytes that buffers may take together, rounded up to [`ALIGNMENT`] each. Default 1 GiB. Blocks are kept
    /// for reuse, so fragmentation can map more than the cap. Large blocks grow in steps of a quarter, so that
    /// buffers of ever larger sizes, one at a time, map about seven times the cap at most.
    pub cap_bytes: u64,
    /// Watches ownership in tests. Default none.
    pub observer: Option<Arc<dyn MemoryObserver>>,
}

impl PoolConfig {
    /// The defaults under `name`.
    pub fn new(name: &'static str) -> Self {
        Self { name, block_bytes: 16 << 20, cap_bytes: 1 << 30, observer: None }
    }
}

/// What a pool holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes mapped.
    pub block_bytes: u64,
    /// Bytes in use by buffers, leaked ones included.
    pub used_bytes: u64,
    /// Bytes leaked because a peer may still write them.
    pub leaked_bytes: u64,
    /// Callers waiting in [`Pool::alloc`].
    pub waiting: usize,
}

/// A bounded source of buffers. Cheap to clone.
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
    /// None today; kept fallible for limits that are checked at the start.
    pub fn new(mut config: PoolConfig) -> Result<Self, MemoryError> {
        // Nothing could ever use the rest of a block.
        let cap = usize::try_from(config.cap_bytes).unwrap_or(usize::MAX);
        config.block_bytes = config.block_bytes.min(cap);
        Ok(Self { shared: Arc::new(PoolShared { config, state: Mutex::default() }) })
    }

    /// A buffer of `length` bytes, or an error at the cap.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`] at the cap (also while earlier callers wait), [`MemoryError::TooLarge`],
    /// [`MemoryError::Block`], [`MemoryError::Register`].
    pub fn try_alloc(&self, length: usize) -> Result<BufMut, MemoryError> {
        self.shared.allocate(length, None)
    }

    /// A buffer of `length` bytes; waits at the cap, first come first served.
    ///
    /// # Errors
    /// As [`try_alloc`](Self::try_alloc) without `Exhausted`.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the queue and nothing else.
    pub fn alloc(&self, length: usize) -> Alloc {
        Alloc { pool: self.shared.clone(), length, ticket: None }
    }

    /// Hands every block, present and future, to `visitor` once.
    ///
    /// # Errors
    /// [`MemoryError::Register`] when the visitor refuses a present block; it is not added then.
    pub fn add_visitor(&self, visitor: Arc<dyn BlockVisitor>) -> Result<(), MemoryError> {
        let mut state = self.shared.lock();
        for home in state.blocks.values() {
            visitor.block_added(&home.block).map_err(|source| self.shared.refused(source))?;
        }
        state.visitors.push(visitor);
        Ok(())
    }

    /// What the pool holds now.
    pub fn stats(&self) -> PoolStats {
        let state = self.shared.lock();
        PoolStats { waiting: state.waiting.len(), ..state.stats }
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
        let mut answer = self.pool.allocate(self.length, self.ticket);
        if matches!(answer, Err(MemoryError::Exhausted { .. })) {
            self.ticket = Some(self.pool.wait(self.ticket, context.waker()));
            // Room may have come between the refusal and the place in the queue: nobody would wake us for it.
            answer = self.pool.allocate(self.length, self.ticket);
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
        if let Some(ticket) = self.ticket.take() {
            self.pool.stop_waiting(ticket);
        }
    }
}

pub(crate) struct PoolShared {
    config: PoolConfig,
    state: Mutex<PoolState>,
}

impl fmt::Debug for PoolShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolShared").field("config", &self.config).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct PoolState {
    blocks: BTreeMap<BlockId, Home>,
    unfinished: Option<Unfinished>,
    visitors: Vec<Arc<dyn BlockVisitor>>,
    waiting: VecDeque<(u64, Waker)>,
    next_ticket: u64,
    stats: PoolStats,
}

/// A block that a visitor refused after others had taken it. The next growth offers it to the rest first, so
/// that repeated refusals don't pile up registrations.
struct Unfinished {
    block: Block,
    /// Visitors that have it, in the order of `PoolState::visitors`.
    served: usize,
}

/// A block and its free ranges, by first byte; neighbours are always merged.
struct Home {
    block: Block,
    free: BTreeMap<usize, usize>,
}

impl Home {
    fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let (&start, &length) = self.free.iter().find(|&(_, &length)| length >= bytes)?;
        self.free.remove(&start);
        if length > bytes {
            self.free.insert(start + bytes, length - bytes);
        }
        Some(start..start + bytes)
    }

    fn put(&mut self, range: Range<usize>) {
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        self.free.insert(start, end - start);
    }
}

impl PoolShared {
    pub(crate) fn observer(&self) -> Option<&dyn MemoryObserver> {
        self.config.observer.as_deref()
    }

    pub(crate) fn count_leak(&self, reserved: usize) {
        self.lock().stats.leaked_bytes += reserved as u64;
    }

    pub(crate) fn give_back(&self, block: &Block, range: Range<usize>) {
        let waker = {
            let mut state = self.lock();
            state.stats.used_bytes -= range.len() as u64;
            if let Some(home) = state.blocks.get_mut(&block.id()) {
                home.put(range);
            }
            state.waiting.front().map(|(_, waker)| waker.clone())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Cuts a buffer. `ticket` is the caller's place in the queue; others wait behind the queue's head.
    fn allocate(self: &Arc<Self>, length: usize, ticket: Option<u64>) -> Result<BufMut, MemoryError> {
        if length == 0 {
            return Ok(BufMut::from_allocation(Allocation::empty()));
        }
        let reserved = length.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        let (pool, cap) = (self.config.name, self.config.cap_bytes);
        if reserved as u64 > cap || block_bytes_for(reserved, self.config.block_bytes).is_none() {
            return Err(MemoryError::TooLarge { pool, requested: length, cap });
        }
        let mut state = self.lock();
        let behind = state.waiting.front().is_some_and(|&(head, _)| Some(head) != ticket);
        let used = state.stats.used_bytes;
        if behind || used.saturating_add(reserved as u64) > cap {
            return Err(MemoryError::Exhausted { pool, requested: length, used, cap });
        }
        let (block, range) =
            match state.blocks.values_mut().find_map(|h| Some((h.block.clone(), h.take(reserved)?))) {
                Some(found) => found,
                None => self.grow(&mut state, reserved)?,
            };
        state.stats.used_bytes += range.len() as u64;
        drop(state);
        let allocation = Allocation::new(self.clone(), block, range, length);
        allocation.observe(|observer, span| observer.allocated(span));
        Ok(BufMut::from_allocation(allocation))
    }

    fn grow(&self, state: &mut PoolState, reserved: usize) -> Result<(Block, Range<usize>), MemoryError> {
        let unfinished = state.unfinished.take().filter(|unfinished| unfinished.block.length() >= reserved);
        let Unfinished { block, served } = match unfinished {
            Some(unfinished) => unfinished,
            None => {
                let bytes = block_bytes_for(reserved, self.config.block_bytes).unwrap_or(reserved);
                Unfinished { block: Block::new(self.config.name, bytes)?, served: 0 }
            }
        };
        for (served, visitor) in state.visitors.iter().enumerate().skip(served) {
            if let Err(source) = visitor.block_added(&block) {
                state.unfinished = Some(Unfinished { block, served });
                return Err(self.refused(source));
            }
        }
        let mut home = Home { block: block.clone(), free: BTreeMap::from([(0, block.length())]) };
        let range = home.take(reserved).unwrap_or(0..0);
        state.stats.block_bytes += block.length() as u64;
        state.blocks.insert(block.id(), home);
        Ok((block, range))
    }

    fn refused(&self, source: crate::VisitError) -> MemoryError {
        MemoryError::Register { pool: self.config.name, source }
    }

    fn wait(&self, ticket: Option<u64>, waker: &Waker) -> u64 {
        let mut state = self.lock();
        if let Some(ticket) = ticket
            && let Some(place) = state.waiting.iter_mut().find(|(held, _)| *held == ticket)
        {
            let before = mem::replace(&mut place.1, waker.clone());
            drop(state);
            // The last handle on a task may own buffers of this pool.
            drop(before);
            return ticket;
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.waiting.push_back((ticket, waker.clone()));
        ticket
    }

    fn stop_waiting(&self, ticket: u64) {
        let mut state = self.lock();
        let place = state.waiting.iter().position(|(held, _)| *held == ticket);
        let left = place.and_then(|place| state.waiting.remove(place));
        let next = state.waiting.front().map(|(_, waker)| waker.clone());
        drop(state);
        // The last handle on a task may own buffers of this pool.
        drop(left);
        if let Some(waker) = next {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Size of the block for a buffer of `reserved` bytes: the usual one, or else four sizes per doubling, so that
/// buffers of ever larger sizes reuse each other's blocks. `None` when it exceeds the address space.
fn block_bytes_for(reserved: usize, usual: usize) -> Option<usize> {
    let bytes = if reserved <= usual {
        usual
    } else {
        reserved.checked_next_multiple_of((reserved.checked_next_power_of_two()? / 8).max(1))?
    };
    // Whole pages are mapped, and no mapping exceeds half the address space.
    (bytes <= isize::MAX as usize / 2).then_some(bytes)
}

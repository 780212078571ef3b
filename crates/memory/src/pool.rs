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
    ALIGNMENT, Block, BlockId, BlockVisitor, BufMut, MemoryError, MemoryObserver, allocation::Allocation,
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
    /// How much of the cap, in percent, buffers of [`Pool::try_alloc_early`] may take together. What is leaked
    /// lowers the cap for this purpose. Default 50, more than 100 counts as 100.
    pub early_share: u8,
    /// Watches ownership in tests. Default none.
    pub observer: Option<Arc<dyn MemoryObserver>>,
}

impl PoolConfig {
    /// The defaults under `name`.
    pub fn new(name: &'static str) -> Self {
        Self { name, block_bytes: 16 << 20, cap_bytes: 1 << 30, early_share: 50, observer: None }
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
    /// Bytes in use by buffers taken early whose content does not exist yet.
    pub early_bytes: u64,
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
        self.shared.allocate(length, Caller::Now)
    }

    /// A buffer of `length` bytes for content that may not exist for long: the destination of a request that its
    /// peer has not answered. All of them together take at most [`PoolConfig::early_share`] of the pool, so that
    /// those whose values exist always find room (DESIGN §4).
    ///
    /// It counts as early until it is freed, frozen, leaked, or its grant is
    /// [answered](crate::Granted::answered) or ended. Never waits, and never overtakes those who wait in
    /// [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// [`MemoryError::EarlyExhausted`] at the share, else as [`try_alloc`](Self::try_alloc).
    /// [`MemoryError::is_exhausted`] tells the errors after which a request goes out without a destination.
    pub fn try_alloc_early(&self, length: usize) -> Result<BufMut, MemoryError> {
        self.shared.allocate(length, Caller::Early)
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
        let mut answer = self.pool.allocate(self.length, Caller::Waiter(self.ticket));
        if matches!(answer, Err(MemoryError::Exhausted { .. })) {
            self.ticket = Some(self.pool.wait(self.ticket, context.waker()));
            // Room may have come between the refusal and the place in the queue: nobody would wake us for it.
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
        if let Some(ticket) = self.ticket.take() {
            self.pool.stop_waiting(ticket);
        }
    }
}

/// Who asks for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caller {
    /// [`Pool::try_alloc`].
    Now,
    /// [`Pool::try_alloc_early`].
    Early,
    /// [`Pool::alloc`], with its place in the queue once it has one.
    Waiter(Option<u64>),
}

impl Caller {
    fn ticket(self) -> Option<u64> {
        match self {
            Self::Waiter(ticket) => ticket,
            Self::Now | Self::Early => None,
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

    pub(crate) fn answered(&self, reserved: usize) {
        self.lock().stats.early_bytes -= reserved as u64;
    }

    pub(crate) fn give_back(&self, block: &Block, range: Range<usize>, early: bool) {
        let waker = {
            let mut state = self.lock();
            state.stats.used_bytes -= range.len() as u64;
            if early {
                state.stats.early_bytes -= range.len() as u64;
            }
            if let Some(home) = state.blocks.get_mut(&block.id()) {
                home.put(range);
            }
            state.waiting.front().map(|(_, waker)| waker.clone())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Cuts a buffer for `caller`. All but the head of the queue wait behind it.
    fn allocate(self: &Arc<Self>, length: usize, caller: Caller) -> Result<BufMut, MemoryError> {
        if length == 0 {
            return Ok(BufMut::from_allocation(Allocation::empty()));
        }
        let reserved = length.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        let (pool, cap) = (self.config.name, self.config.cap_bytes);
        if reserved as u64 > cap || block_bytes_for(reserved, self.config.block_bytes).is_none() {
            return Err(MemoryError::TooLarge { pool, requested: length, cap });
        }
        let mut state = self.lock();
        let behind = state.waiting.front().is_some_and(|&(head, _)| Some(head) != caller.ticket());
        let used = state.stats.used_bytes;
        if behind || used.saturating_add(reserved as u64) > cap {
            return Err(MemoryError::Exhausted { pool, requested: length, used, cap });
        }
        if caller == Caller::Early {
            self.check_early(&state, length, reserved)?;
        }
        let (block, range) =
            match state.blocks.values_mut().find_map(|h| Some((h.block.clone(), h.take(reserved)?))) {
                Some(found) => found,
                None => self.grow(&mut state, reserved)?,
            };
        state.stats.used_bytes += range.len() as u64;
        let early = caller == Caller::Early;
        if early {
            state.stats.early_bytes += range.len() as u64;
        }
        drop(state);
        let allocation = Allocation::pooled(self.clone(), block, range, length, early);
        allocation.observe(|observer, span| observer.allocated(span));
        Ok(BufMut::from_allocation(allocation))
    }

    fn check_early(&self, state: &PoolState, length: usize, reserved: usize) -> Result<(), MemoryError> {
        let early = state.stats.early_bytes;
        let usable = self.config.cap_bytes.saturating_sub(state.stats.leaked_bytes);
        let share = percent_of(usable, self.config.early_share);
        if early.saturating_add(reserved as u64) > share {
            return Err(MemoryError::EarlyExhausted {
                pool: self.config.name,
                requested: length,
                early,
                share,
            });
        }
        Ok(())
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

/// `percent` of `bytes`, at most all of them, rounded down.
fn percent_of(bytes: u64, percent: u8) -> u64 {
    let share = u128::from(bytes) * u128::from(percent.min(100)) / 100;
    u64::try_from(share).unwrap_or(u64::MAX)
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

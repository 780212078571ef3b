//! What all handles on a pool share: its blocks, their free pieces, its counts and its waiters.

mod space;

use std::{collections::VecDeque, fmt, mem, ops::Range, sync::Arc, task::Waker};

use super::{Block, BlockVisitor, MemoryObserver};
use crate::{
    ALIGNMENT, HugePages, MemoryError, VisitError, poison,
    sync::{AtomicU64, Mutex, MutexGuard, Ordering, lock},
};
use space::{Cut, PieceId, Space};

/// Settings of a pool.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// The name in errors and logs.
    pub name: &'static str,
    /// Size of a block in bytes; a larger buffer gets a block of its own, at most a quarter larger than it.
    /// Pre-faulted when made, so this many bytes become resident at the first allocation. Default 16 MiB.
    pub block_bytes: usize,
    /// Bytes that buffers may take together, rounded up to [`ALIGNMENT`] each. Default 1 GiB.
    ///
    /// Blocks are reused and never released, so fragmentation can map more than the cap. Small buffers go into the
    /// holes of usual blocks, and into empty large blocks only once the cap is mapped. Large blocks grow in steps of a
    /// quarter, so that buffers of ever larger sizes, one at a time, map about seven times the cap at most.
    pub cap_bytes: u64,
    /// How much of the cap, in percent, buffers of
    /// [`Pool::try_alloc_early`](crate::Pool::try_alloc_early) may take together. Leaked bytes lower the cap for this purpose. Default 50, more than 100 counts as 100.
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
    /// Callers waiting in [`Pool::alloc`](crate::Pool::alloc).
    pub waiting: usize,
}

/// The call that asks for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// [`Pool::try_alloc`](crate::Pool::try_alloc).
    Now,
    /// [`Pool::try_alloc_early`](crate::Pool::try_alloc_early).
    Early,
    /// [`Pool::alloc`](crate::Pool::alloc), with its position in the queue once it has one.
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

/// A range that was taken from a pool and must be returned.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) block: Block,
    /// Bytes inside the block; the length is a multiple of [`ALIGNMENT`].
    pub(crate) range: Range<usize>,
    size: BlockSize,
    piece: PieceId,
}

/// The two kinds of blocks: a small buffer must not keep a large block from being reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockSize {
    Usual,
    Large,
}

/// The blocks of a pool, and the order in which callers get parts of them.
pub(crate) struct Stock {
    config: PoolConfig,
    state: Mutex<PoolState>,
    /// Bytes of `used_bytes` that are counted against the early share. Grows under the lock only.
    early_bytes: AtomicU64,
}

impl fmt::Debug for Stock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stock").field("config", &self.config).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct PoolState {
    usual: Space,
    large: Space,
    unfinished: Option<Unfinished>,
    visitors: Vec<Arc<dyn BlockVisitor>>,
    waiting: VecDeque<(u64, Waker)>,
    next_ticket: u64,
    stats: PoolStats,
}

/// A block that a visitor refused after others had registered it. The next growth offers it to the remaining visitors
/// first, so that repeated refusals do not accumulate registrations.
struct Unfinished {
    block: Block,
    size: BlockSize,
    /// Number of visitors that have registered it, in the order of `PoolState::visitors`.
    served: usize,
}

impl PoolState {
    /// The blocks that buffers are cut from.
    fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.usual.blocks().iter().chain(self.large.blocks())
    }

    fn space(&mut self, size: BlockSize) -> &mut Space {
        match size {
            BlockSize::Usual => &mut self.usual,
            BlockSize::Large => &mut self.large,
        }
    }

    fn take(&mut self, size: BlockSize, reserved: usize) -> Option<Taken> {
        let Cut { block, piece, range } = self.space(size).take(reserved)?;
        Some(Taken { block, range, size, piece })
    }
}

impl Stock {
    pub(crate) fn new(config: PoolConfig) -> Self {
        Self { config, state: Mutex::default(), early_bytes: AtomicU64::new(0) }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.config.name
    }

    pub(crate) fn cap_bytes(&self) -> u64 {
        self.config.cap_bytes
    }

    pub(crate) fn observer(&self) -> Option<&dyn MemoryObserver> {
        self.config.observer.as_deref()
    }

    pub(crate) fn stats(&self) -> PoolStats {
        let state = self.lock();
        let early_bytes = self.early_bytes.load(Ordering::Acquire);
        PoolStats { waiting: state.waiting.len(), early_bytes, ..state.stats }
    }

    /// Changes the counts of bytes that are neither free nor usable: leaked and retired.
    pub(crate) fn count(&self, change: impl FnOnce(&mut PoolStats)) {
        change(&mut self.lock().stats);
    }

    /// Stops counting `bytes` against the early share.
    pub(crate) fn answered(&self, bytes: u64) {
        self.early_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    pub(crate) fn add_visitor(&self, visitor: Arc<dyn BlockVisitor>) -> Result<(), MemoryError> {
        let mut state = self.lock();
        for (number, block) in state.blocks().enumerate() {
            if let Err(source) = visitor.block_added(block) {
                state.blocks().take(number).for_each(|block| visitor.block_removed(block));
                return Err(self.refused(source));
            }
        }
        state.visitors.push(visitor);
        Ok(())
    }

    pub(crate) fn remove_visitor(&self, visitor: &Arc<dyn BlockVisitor>) {
        let (removed, blocks) = {
            let mut state = self.lock();
            let place = state.visitors.iter().position(|known| Arc::ptr_eq(known, visitor));
            let Some(place) = place else { return };
            let removed = state.visitors.remove(place);
            let mut blocks: Vec<Block> = state.blocks().cloned().collect();
            if let Some(unfinished) = state.unfinished.as_mut().filter(|kept| kept.served > place) {
                unfinished.served -= 1;
                blocks.push(unfinished.block.clone());
            }
            (removed, blocks)
        };
        // Without the lock, because deregistering can take long.
        blocks.iter().for_each(|block| removed.block_removed(block));
    }

    pub(crate) fn give_back(&self, taken: &Taken, early: bool) {
        let reserved = taken.range.len();
        if early {
            self.answered(reserved as u64);
        }
        // Before the range can be allocated again.
        poison::forbid(taken.block.base(), taken.range.start, reserved);
        let waker = {
            let mut state = self.lock();
            state.stats.used_bytes -= reserved as u64;
            state.space(taken.size).put(taken.piece);
            state.waiting.front().map(|(_, waker)| waker.clone())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes a range of at least `length` bytes, more than 0, for `caller`. While callers wait, only the head of the queue
    /// gets one.
    pub(crate) fn take(&self, length: usize, caller: Caller) -> Result<Taken, MemoryError> {
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
        let early = caller == Caller::Early;
        if early {
            self.check_early(&state, length, reserved)?;
        }
        let taken = self.find_room(&mut state, reserved)?;
        state.stats.used_bytes += reserved as u64;
        if early {
            self.early_bytes.fetch_add(reserved as u64, Ordering::AcqRel);
        }
        drop(state);
        let refused = self.observer().and_then(|observer| observer.allocating(length).err());
        if let Some(source) = refused {
            self.give_back(&taken, early);
            let source = Arc::new(source);
            return Err(MemoryError::Block { pool, bytes: reserved, step: "memfd_create", source });
        }
        poison::permit(taken.block.base(), taken.range.start, reserved);
        Ok(taken)
    }

    fn check_early(&self, state: &PoolState, length: usize, reserved: usize) -> Result<(), MemoryError> {
        let PoolStats { leaked_bytes, retired_bytes, .. } = state.stats;
        let early = self.early_bytes.load(Ordering::Acquire);
        let usable = self.config.cap_bytes.saturating_sub(leaked_bytes).saturating_sub(retired_bytes);
        let share = percent_of(usable, self.config.early_share);
        let is_beyond = early.saturating_add(reserved as u64) > share;
        if is_beyond || tensorwire_testpoints::chance!("the early share counts as full") {
            return Err(MemoryError::EarlyExhausted {
                pool: self.config.name,
                requested: length,
                early,
                share,
            });
        }
        Ok(())
    }

    /// Takes a free piece, the cheapest first: a hole in a block of the buffer's own kind; a new block, while less than
    /// the cap is mapped; an empty large block, also for a small buffer; a new block beyond the cap.
    fn find_room(&self, state: &mut PoolState, reserved: usize) -> Result<Taken, MemoryError> {
        let size = if reserved <= self.config.block_bytes { BlockSize::Usual } else { BlockSize::Large };
        if let Some(found) = state.take(size, reserved) {
            return Ok(found);
        }
        let mapped = state.stats.block_bytes.saturating_add(self.config.block_bytes as u64);
        if size == BlockSize::Usual
            && mapped > self.config.cap_bytes
            && let Some(found) = state.take(BlockSize::Large, reserved)
        {
            return Ok(found);
        }
        match self.grow(state, size, reserved) {
            Ok(found) => Ok(found),
            Err(error) => state.take(BlockSize::Large, reserved).ok_or(error),
        }
    }

    fn grow(&self, state: &mut PoolState, size: BlockSize, reserved: usize) -> Result<Taken, MemoryError> {
        let refused = state.unfinished.take_if(|unfinished| unfinished.block.length() >= reserved);
        let Unfinished { block, size, served } = match refused {
            Some(unfinished) => unfinished,
            None => {
                let bytes = block_bytes_for(reserved, self.config.block_bytes).unwrap_or(reserved);
                let block = Block::new(self.config.name, bytes, self.config.huge_pages)?;
                Unfinished { block, size, served: 0 }
            }
        };
        for (served, visitor) in state.visitors.iter().enumerate().skip(served) {
            if let Err(source) = visitor.block_added(&block) {
                let smaller = |kept: &Unfinished| kept.block.length() < block.length();
                if state.unfinished.as_ref().is_none_or(smaller) {
                    state.unfinished = Some(Unfinished { block, size, served });
                }
                return Err(self.refused(source));
            }
        }
        state.stats.block_bytes += block.length() as u64;
        state.stats.huge_bytes += block.huge_bytes() as u64;
        poison::forbid(block.base(), 0, block.length());
        state.space(size).add(block);
        let (pool, requested) = (self.config.name, reserved);
        let too_large = MemoryError::TooLarge { pool, requested, cap: self.config.cap_bytes };
        state.take(size, reserved).ok_or(too_large)
    }

    fn refused(&self, source: VisitError) -> MemoryError {
        MemoryError::Register { pool: self.config.name, source }
    }

    /// Joins the queue, or stays in it with `ticket`, and stores the waker.
    pub(crate) fn wait(&self, ticket: Option<u64>, waker: &Waker) -> u64 {
        let mut state = self.lock();
        if let Some(ticket) = ticket
            && let Ok(place) = state.waiting.binary_search_by_key(&ticket, |(held, _)| *held)
        {
            let before = mem::replace(&mut state.waiting[place].1, waker.clone());
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

    pub(crate) fn stop_waiting(&self, ticket: u64) {
        let mut state = self.lock();
        let place = state.waiting.binary_search_by_key(&ticket, |(held, _)| *held).ok();
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
        lock(&self.state)
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

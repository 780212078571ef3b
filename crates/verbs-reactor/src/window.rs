//! Memory windows: one granted range, writable through one queue pair, from a bind to its end.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, OnceLock, Weak},
    task::{Context, Poll},
};

use memory::{Block, Granted};

use crate::{FabricError, Operation, QueuePairCore, RegionId, RemoteRegion};

/// Set in the numbers of windows, so that none is that of a registered block.
pub(crate) const WINDOW: u32 = 1 << 31;

/// What a bind or an unbind is about: the range, and what peers must know of the window once the fabric has bound it.
///
/// Clones are one window. It keeps the block mapped.
#[derive(Debug, Clone)]
pub struct WindowBinding(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    block: Block,
    offset: u64,
    length: u64,
    region: OnceLock<RemoteRegion>,
}

impl WindowBinding {
    /// A window over all of `granted` that is not bound yet; `None` if that is empty.
    pub fn over(granted: &Granted) -> Option<Self> {
        let block = granted.block()?.clone();
        let (offset, length) = (granted.offset() as u64, granted.length() as u64);
        Some(Self(Arc::new(Inner { block, offset, length, region: OnceLock::new() })))
    }

    /// A window over `length` bytes of this one's range, from its byte `offset` on, that is not bound yet; `None` if
    /// these are none or leave the range.
    pub fn part(&self, offset: u64, length: u64) -> Option<Self> {
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= self.length());
        let (block, offset) = (self.block().clone(), self.offset() + offset.min(self.length()));
        (is_inside && length > 0)
            .then(|| Self(Arc::new(Inner { block, offset, length, region: OnceLock::new() })))
    }

    /// The block that the range lies in.
    pub fn block(&self) -> &Block {
        &self.0.block
    }

    /// First byte inside the block.
    pub fn offset(&self) -> u64 {
        self.0.offset
    }

    /// Length in bytes, at least 1.
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// What a peer must know; `None` before a fabric has taken the bind.
    pub fn region(&self) -> Option<RemoteRegion> {
        self.0.region.get().copied()
    }

    /// Says what a peer must know; called once, by the fabric that takes the bind.
    pub fn set_region(&self, region: RemoteRegion) {
        // A second call could only come from a fabric that binds twice: the first answer stays.
        let _ = self.0.region.set(region);
    }

    /// The number of a window that is bound as the `count`th.
    pub(crate) fn region_id(count: u32) -> RegionId {
        RegionId(WINDOW | count)
    }
}

/// A window that is open: the peer of one queue pair, and nobody else, may write its range, until
/// [`QueuePair::unbind`](crate::QueuePair::unbind) or the end of that queue pair.
///
/// Dropping it leaves it open until the queue pair is [closed](crate::QueuePair::close).
#[derive(Debug)]
#[must_use = "a window that is dropped stays open until its queue pair is closed"]
pub struct Window {
    pub(crate) binding: WindowBinding,
    pub(crate) region: RemoteRegion,
    /// Of the queue pair that it is bound to.
    pub(crate) owner: Weak<QueuePairCore>,
}

impl Window {
    /// What the peer must know to write through it: a region of its own, as long as the window, with a key of its own.
    /// For [`QueuePair::add_remote_region`](crate::QueuePair::add_remote_region) there.
    pub fn region(&self) -> RemoteRegion {
        self.region
    }
}

/// A bind under way. See [`QueuePair::bind`](crate::QueuePair::bind).
///
/// Dropping it ends interest in the window, not the operation: nobody knows the key of a window that nobody got, and it
/// is gone when the queue pair is.
#[derive(Debug)]
#[must_use = "a bind that still waits for a slot is posted only when polled"]
pub struct BindOperation {
    operation: Operation,
    /// `None` for a range of no bytes, whose operation has failed.
    binding: Option<WindowBinding>,
    owner: Weak<QueuePairCore>,
}

impl BindOperation {
    pub(crate) fn new(
        operation: Operation,
        binding: Option<WindowBinding>,
        owner: Weak<QueuePairCore>,
    ) -> Self {
        Self { operation, binding, owner }
    }
}

impl Future for BindOperation {
    type Output = Result<Window, FabricError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(result) = Pin::new(&mut self.operation).poll(context) else { return Poll::Pending };
        let bound = self.binding.take().and_then(|binding| Some((binding.region()?, binding)));
        let owner = self.owner.clone();
        Poll::Ready(result.and_then(|()| {
            let (region, binding) = bound.ok_or(FabricError::Closed)?;
            Ok(Window { binding, region, owner })
        }))
    }
}

#[cfg(test)]
mod tests {
    use memory::{GrantEnd, Pool, PoolConfig};

    use super::*;

    #[test]
    fn a_part_lies_inside_its_range() {
        let pool = Pool::new(PoolConfig::new("test")).unwrap();
        let (_before, granted) = (pool.try_alloc(64).unwrap(), pool.try_alloc(1000).unwrap().grant());
        let whole = WindowBinding::over(&granted).unwrap();
        let part = whole.part(100, 900).unwrap();
        assert_eq!((part.offset(), part.length()), (whole.offset() + 100, 900));
        assert_eq!(part.block().id(), whole.block().id());
        assert!(part.region().is_none());
        for (offset, length) in [(0, 0), (1000, 0), (1000, 1), (0, 1001), (1, 1000), (u64::MAX, 2)] {
            assert!(whole.part(offset, length).is_none(), "{length} bytes at {offset}");
        }
        drop(granted.end(GrantEnd::NeverSent).unwrap());
    }
}

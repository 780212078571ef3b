//! Bounds on the fetched tensors that are held at once.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of tensors that are held at once.
pub(crate) const HELD_MAX: u32 = 64;

/// Bytes are counted in units of this many.
const UNIT: u64 = 4 << 10;

/// The right to hold one tensor, until it is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    _held: Option<OwnedSemaphorePermit>,
}

/// A number of bytes that tensors may take together. Waiting callers get room in the order of their calls.
#[derive(Debug)]
pub(crate) struct Budget {
    units: Arc<Semaphore>,
    most: u32,
}

impl Budget {
    /// Room for `bytes` bytes.
    pub(crate) fn of(bytes: u64) -> Self {
        let most = u32::try_from(bytes / UNIT).unwrap_or(u32::MAX).max(HELD_MAX);
        // A semaphore can have this many permits on every machine.
        let most = most.min(u32::MAX >> 4);
        Self { units: Arc::new(Semaphore::new(most as usize)), most }
    }

    /// Waits for room for a tensor of `bytes` bytes. A tensor larger than the whole budget gets all of it, so it is fetched
    /// alone.
    ///
    /// # Cancel safety
    /// Cancel-safe: dropping the future leaves the line.
    pub(crate) async fn take(&self, bytes: u64) -> Room {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let units = units.clamp(self.most.div_ceil(HELD_MAX), self.most);
        // The semaphore is never closed.
        Room { _held: self.units.clone().acquire_many_owned(units).await.ok() }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::{Budget, HELD_MAX, Room};

    const MIB: u64 = 1 << 20;

    fn now(budget: &Budget, bytes: u64) -> Option<Room> {
        match pin!(budget.take(bytes)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(room) => Some(room),
            Poll::Pending => None,
        }
    }

    #[test]
    fn s4_tensors_that_are_held_take_no_more_than_was_allowed() {
        let budget = Budget::of(192 * MIB);
        let held = [100, 90].map(|size| now(&budget, size * MIB).unwrap());
        assert!(now(&budget, 3 * MIB).is_none());
        drop(held);
        assert!(now(&budget, 192 * MIB).is_some());
    }

    #[test]
    fn a_tensor_larger_than_all_there_is_is_alone() {
        let budget = Budget::of(MIB);
        let small = now(&budget, 1).unwrap();
        assert!(now(&budget, u64::MAX).is_none());
        drop(small);
        let large = now(&budget, u64::MAX).unwrap();
        assert!(now(&budget, 0).is_none());
        drop(large);
        assert!(now(&budget, 0).is_some());
    }

    #[test]
    fn s4_tensors_without_bytes_are_bounded_too() {
        for bytes in [1, MIB, 100 * MIB + 1, 1 << 50] {
            let budget = Budget::of(bytes);
            let held: Vec<Room> = (0..=HELD_MAX).map_while(|_| now(&budget, 0)).collect();
            assert!((HELD_MAX / 2..=HELD_MAX).contains(&(held.len() as u32)), "{bytes}: {}", held.len());
        }
    }
}

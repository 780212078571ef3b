//! Buffers that a lost peer may still read.

use std::{fmt, iter, mem};

use super::Buf;
use crate::block::Allocation;

/// Bytes that a peer was reading when its connection ended. The pool does not reuse them before
/// [`release`](Self::release), which the holder of this value calls when the peer's process is known to be dead.
///
/// Dropping it without a release leaks the bytes and counts them
/// ([`PoolStats::leaked_bytes`](crate::PoolStats::leaked_bytes)): it is unknown when the peer stops reading. Before
/// that they count as [`PoolStats::retired_bytes`](crate::PoolStats::retired_bytes), once per allocation however many
/// leases there were on it.
#[must_use = "dropping it without a release leaks the memory"]
pub struct Retired {
    /// `None` once released.
    buffer: Option<Buf>,
}

impl Retired {
    pub(crate) fn new(buffer: Buf) -> Self {
        allocations(&buffer).for_each(Allocation::retire);
        Self { buffer: Some(buffer) }
    }

    /// The bytes that the peer may read.
    pub fn buf(&self) -> Option<&Buf> {
        self.buffer.as_ref()
    }

    /// The peer is dead: the bytes are free once no other holder is left.
    pub fn release(self) {
        drop(self.end());
    }

    /// As [`release`](Self::release), but returns the bytes, so that the caller can drop them where tasks may be woken.
    pub fn end(mut self) -> Option<Buf> {
        let buffer = self.buffer.take()?;
        allocations(&buffer).for_each(Allocation::release);
        Some(buffer)
    }
}

/// Those of the buffer and of the buffers attached to it, which the peer views, too.
fn allocations(buffer: &Buf) -> impl Iterator<Item = &Allocation> {
    let own = buffer.allocation();
    iter::once(&**own).chain(own.attached().iter().map(|(attached, _)| &**attached))
}

impl fmt::Debug for Retired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Retired").field(&self.buffer).finish()
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            allocations(&buffer).for_each(|allocation| {
                allocation.count_leak();
                allocation.release();
            });
            mem::forget(buffer);
        }
    }
}

//! Memory of the peer that this side views: the consumer's half of a lease.

use std::{ptr::NonNull, sync::Arc, task::Poll};

use tensorwire_memory::{ForeignMemory, Place};

use crate::{
    catalogue::Claims,
    doorbell::Ringer,
    import::ImportedBlocks,
    limits::CHUNK_BYTES,
    ring::{OwnPage, PeerPage},
    sys::Mapping,
};

/// A lease that the peer has granted. Dropping it releases the lease: this process no longer reads the bytes. The peer is rung if it
/// waits for that.
#[derive(Debug)]
pub(super) struct HeldLease {
    pub(super) own: Arc<OwnPage>,
    pub(super) peer: Arc<PeerPage>,
    pub(super) ringer: Arc<Ringer>,
    pub(super) slot: u32,
    pub(super) generation: u64,
    /// Counts the views together with those of the peer's catalogue.
    pub(super) counted: Option<Arc<Claims>>,
    /// The blocks of the peer, until the connection is over.
    pub(super) blocks: Arc<ImportedBlocks>,
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.own.release(self.slot, self.generation);
        self.ringer.ring_for_release(&self.peer);
    }
}

/// A range of the peer's block under a lease. Keeps the block mapped, even after the connection has ended.
#[derive(Debug)]
pub(super) struct Loan {
    mapping: Arc<Mapping>,
    offset: usize,
    length: usize,
    /// Shared by all views under it.
    lease: Arc<HeldLease>,
}

impl Loan {
    /// A view of the range, which must lie inside the mapping and be resident.
    pub(super) fn new(
        mapping: Arc<Mapping>,
        (offset, length): (usize, usize),
        lease: Arc<HeldLease>,
    ) -> Self {
        debug_assert!(offset.checked_add(length).is_some_and(|end| end <= mapping.length()));
        if let Some(claims) = &lease.counted {
            claims.count(length as u64);
        }
        Self { mapping, offset, length, lease }
    }

    /// A view of another range under the same lease, once it is resident.
    fn beside(&self, place: &Place) -> Poll<Option<Self>> {
        let block = self.lease.blocks.get(place.block);
        let Some(block) = block.filter(|block| block.covers(place.offset, place.length)) else {
            return Poll::Ready(None);
        };
        // `covers` has shown that both fit the address space.
        let (offset, length) = (place.offset as usize, place.length as usize);
        match block.populate(offset, length, CHUNK_BYTES) {
            Ok((_, true)) => {}
            Ok((_, false)) => return Poll::Pending,
            Err(_) => return Poll::Ready(None),
        }
        let mapping = block.mapping().ok().cloned();
        Poll::Ready(mapping.map(|mapping| Self::new(mapping, (offset, length), self.lease.clone())))
    }
}

// SAFETY: the range lies inside the mapping: `Target` and `beside`, which call the constructor, check it against the block. The
// mapping lives as long as this value. Every page of it is allocated and the file cannot shrink or lose pages: `import`
// verifies the seals. The peer does not write the bytes until the lease is released, which only the drop of the last value
// that shares it does: the peer's `Leases` enforces that. A peer of the same trust domain that breaks it spoils only its own values.
unsafe impl ForeignMemory for Loan {
    fn base(&self) -> NonNull<u8> {
        // SAFETY: the range lies inside the mapping, by the constructor's contract.
        unsafe { self.mapping.base().add(self.offset) }
    }

    fn length(&self) -> usize {
        self.length
    }

    fn attached_at(&self, place: &Place) -> Poll<Option<Arc<dyn ForeignMemory>>> {
        self.beside(place).map(|loan| Some(Arc::new(loan?) as _))
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(claims) = &self.lease.counted {
            claims.uncount(self.length as u64);
        }
    }
}

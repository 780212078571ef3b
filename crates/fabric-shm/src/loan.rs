//! Memory of the peer that this side views: the consumer's half of a lease.

use std::{ptr::NonNull, sync::Arc};

use tensorwire_memory::ForeignMemory;

use crate::{
    catalogue::Claims,
    doorbell::Ringer,
    ring::{OwnPage, PeerPage},
    sys::Mapping,
};

/// What is needed to release a lease.
#[derive(Debug)]
pub(super) struct Release {
    pub(super) own: Arc<OwnPage>,
    pub(super) peer: Arc<PeerPage>,
    pub(super) ringer: Arc<Ringer>,
    pub(super) slot: u32,
    pub(super) generation: u64,
}

impl Release {
    /// Stores that this process no longer reads the bytes, and rings the peer if it waits for that.
    pub(super) fn tell(&self) {
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
    release: Release,
    /// Counts this view together with those of the peer's catalogue.
    counted: Option<Arc<Claims>>,
}

impl Loan {
    /// A view of the range, which must lie inside the mapping and be resident.
    pub(super) fn new(
        mapping: Arc<Mapping>,
        (offset, length): (usize, usize),
        release: Release,
        counted: Option<Arc<Claims>>,
    ) -> Self {
        debug_assert!(offset.checked_add(length).is_some_and(|end| end <= mapping.length()));
        if let Some(claims) = &counted {
            claims.count(length as u64);
        }
        Self { mapping, offset, length, release, counted }
    }
}

// SAFETY: the range lies inside the mapping: `Target`, which calls the constructor, checks it against the block. The
// mapping lives as long as this value. Every page of it is allocated and the file cannot shrink or lose pages: `import`
// verifies the seals. The peer does not write the bytes until the lease is released, which only this value's drop does:
// the peer's `Leases` enforces that. A peer of the same trust domain that breaks it spoils only its own values.
unsafe impl ForeignMemory for Loan {
    fn base(&self) -> NonNull<u8> {
        // SAFETY: the range lies inside the mapping, by the constructor's contract.
        unsafe { self.mapping.base().add(self.offset) }
    }

    fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.release.tell();
        if let Some(claims) = &self.counted {
            claims.uncount(self.length as u64);
        }
    }
}

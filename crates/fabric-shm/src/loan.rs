//! Memory of the peer that this side views: the consumer's half of a lease.

use std::{ptr::NonNull, sync::Arc};

use tensorwire_memory::ForeignMemory;

use crate::{
    doorbell::Ringer,
    ring::{OwnPage, PeerPage},
    sys::Mapping,
};

/// What releases a lease.
#[derive(Debug)]
pub(super) struct Release {
    pub(super) own: Arc<OwnPage>,
    pub(super) peer: Arc<PeerPage>,
    pub(super) ringer: Arc<Ringer>,
    pub(super) slot: u32,
    pub(super) generation: u64,
}

impl Release {
    /// Tells the peer that this process reads the bytes no more.
    pub(super) fn tell(&self) {
        self.own.release(self.slot, self.generation);
        self.ringer.ring_for_release(&self.peer);
    }
}

/// A range of the peer's block under a lease. Keeps the block mapped, whatever becomes of the connection.
#[derive(Debug)]
pub(super) struct Loan {
    mapping: Arc<Mapping>,
    offset: usize,
    length: usize,
    release: Release,
}

impl Loan {
    /// The range must lie inside the mapping, and be resident.
    pub(super) fn new(mapping: Arc<Mapping>, offset: usize, length: usize, release: Release) -> Self {
        debug_assert!(offset.checked_add(length).is_some_and(|end| end <= mapping.length()));
        Self { mapping, offset, length, release }
    }
}

// SAFETY: the range lies inside the mapping, by the constructor's caller (`Target`, which checks it against the
// block), and the mapping lives as long as this value. Every page of it is allocated and the file can't shrink or
// lose pages, by the seals that `import` verifies. The peer does not write the bytes until the lease is released,
// which only this value's drop does: the peer's `Leases` enforces that; a peer of the same trust domain that breaks
// it spoils only its own values.
unsafe impl ForeignMemory for Loan {
    fn base(&self) -> NonNull<u8> {
        // SAFETY: the offset lies inside the mapping.
        unsafe { self.mapping.base().add(self.offset) }
    }

    fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.release.tell();
    }
}

//! Views of the peer's published contents: claims, and the claimed memory.

use std::{
    ptr::NonNull,
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tensorwire_memory::ForeignMemory;
use tensorwire_testpoints::sync::Mutex;

use crate::{
    doorbell::Ringer,
    limits::CLAIMS_MAX,
    ring::{OwnPage, PeerPage},
    sys::Mapping,
};

/// The claim words of one connection, on this side's page.
#[derive(Debug)]
pub(crate) struct Claims {
    own: Arc<OwnPage>,
    peer: Arc<PeerPage>,
    ringer: Arc<Ringer>,
    /// Words without a claim.
    free: Mutex<Vec<u32>>,
    /// The peer's memory that this side views over this connection, under claims and under leases.
    viewed: Viewed,
}

#[derive(Debug, Default)]
struct Viewed {
    views: AtomicU64,
    bytes: AtomicU64,
}

impl Claims {
    pub(crate) fn new(own: Arc<OwnPage>, peer: Arc<PeerPage>, ringer: Arc<Ringer>) -> Self {
        let free = Mutex::new((0..CLAIMS_MAX).rev().collect());
        Self { own, peer, ringer, free, viewed: Viewed::default() }
    }

    /// Counts a view; returns the number of views before it, and the bytes including it.
    pub(crate) fn count(&self, bytes: u64) -> (u64, u64) {
        let views = self.viewed.views.fetch_add(1, Ordering::Relaxed);
        (views, self.viewed.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes))
    }

    /// Removes a view from the counts.
    pub(crate) fn uncount(&self, bytes: u64) {
        self.viewed.views.fetch_sub(1, Ordering::Relaxed);
        self.viewed.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much of a catalogue one process may view.
#[derive(Debug, Clone, Copy)]
pub(super) struct ViewCaps {
    pub(super) views: u64,
    pub(super) bytes: u64,
}

/// A claim on a content of the peer's catalogue. The peer does not reuse the content's memory before this is dropped, if the
/// cell was unchanged after [`new`](Self::new).
#[derive(Debug)]
pub(super) struct Claim {
    claims: Arc<Claims>,
    slot: u32,
    bytes: u64,
}

impl Claim {
    /// `None` if the peer ignores claims, or a limit is reached.
    pub(super) fn new(claims: &Arc<Claims>, caps: ViewCaps, content: u64, bytes: u64) -> Option<Self> {
        if !claims.peer.is_claimable() {
            return None;
        }
        let slot = claims.free().pop()?;
        let (views, sum) = claims.count(bytes);
        let claim = Self { claims: claims.clone(), slot, bytes };
        // If this is dropped, its drop undoes the count.
        (views < caps.views && sum <= caps.bytes).then(|| {
            claims.own.claim(slot, content);
            claim
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Self { claims, slot, bytes } = self;
        claims.own.end_claim(*slot);
        claims.ringer.ring_for_release(&claims.peer);
        claims.uncount(*bytes);
        claims.free().push(*slot);
    }
}

/// A claimed range of the peer's block. Keeps the block mapped, even after the connection has ended.
#[derive(Debug)]
pub(super) struct ClaimedView {
    pub(super) mapping: Arc<Mapping>,
    /// First byte inside the block.
    pub(super) offset: usize,
    pub(super) length: usize,
    /// Dropped last of all that this process does with the bytes.
    pub(super) _claim: Claim,
}

// SAFETY: the range lies inside the mapping and is resident: `NeighbourCatalogue::view`, the only one that makes this,
// checks both. The mapping lives as long as this value. Every page of it is allocated and the file cannot shrink or lose
// pages: `import` verifies the seals. The peer does not reuse the bytes while they are claimed: its `OwnCatalogue` enforces
// that, and `NeighbourCatalogue::view` found the cell unchanged after the claim. A peer of the same trust domain that breaks
// it spoils only its own values.
unsafe impl ForeignMemory for ClaimedView {
    fn base(&self) -> NonNull<u8> {
        // SAFETY: the range lies inside the mapping, as said above.
        unsafe { self.mapping.base().add(self.offset) }
    }

    fn length(&self) -> usize {
        self.length
    }
}

//! The grants on a block: ranges that a peer may write, and the count of writes in progress.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, atomic},
};

use crate::sync::{AtomicU64, Ordering};

/// Names one grant within this process; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantId(u64);

impl GrantId {
    pub(crate) fn next() -> Self {
        Self(NEXT_GRANT.fetch_add(1, atomic::Ordering::Relaxed))
    }
}

static NEXT_GRANT: atomic::AtomicU64 = atomic::AtomicU64::new(1);

/// The evidence that no write of the peer can still land in the granted range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GrantEnd {
    /// The content arrived: the peer writes a range once per request phase.
    Content,
    /// The peer answered with META_DATA_RESPONSE, which it sends only when no write is posted.
    MetaDataResponse,
    /// The peer answered with ERROR_STATUS, which it sends only when no write is posted.
    ErrorStatus,
    /// The peer answered a CANCEL, which it does only when no write is posted.
    CancelAck,
    /// The request was never sent, so no peer knows the range.
    NeverSent,
    /// The range was a message ring, and the peer's last message in it has arrived: RING_MOVED, after which it
    /// writes another ring.
    RingMoved,
    /// This side's own `read` into the range completed, and the range was announced to no peer.
    ReadCompleted,
    /// Every queue pair the peer could write through is destroyed and drained.
    QueuePairDrained,
}

/// The grants on one block, by first byte. Ranges never overlap: allocations do not, and of a divided one only the parts are granted.
#[derive(Debug, Default)]
pub(crate) struct GrantTable {
    entries: BTreeMap<usize, GrantEntry>,
}

impl GrantTable {
    pub(crate) fn add(&mut self, offset: usize, length: usize, state: Arc<GrantState>) {
        self.entries.insert(offset, GrantEntry { length, state });
    }

    pub(crate) fn remove(&mut self, offset: usize) {
        self.entries.remove(&offset);
    }

    /// The grant that covers all of `range`, and its own range.
    pub(super) fn find(&self, range: &Range<usize>) -> Option<(Range<usize>, Arc<GrantState>)> {
        let (&first, entry) = self.entries.range(..=range.start).next_back()?;
        let end = first + entry.length;
        (range.end <= end).then(|| (first..end, entry.state.clone()))
    }
}

#[derive(Debug)]
struct GrantEntry {
    length: usize,
    state: Arc<GrantState>,
}

/// Count of fabric accesses in progress, with [`ENDED`] set once the grant has ended.
#[derive(Debug, Default)]
pub(crate) struct GrantState(AtomicU64);

const ENDED: u64 = 1 << 63;

impl GrantState {
    /// Counts a new access; false once the grant has ended.
    pub(super) fn enter(&self) -> bool {
        let before = self.0.fetch_add(1, Ordering::Acquire);
        if before & ENDED != 0 {
            self.0.fetch_sub(1, Ordering::Release);
        }
        before & ENDED == 0
    }

    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::Acquire) & ENDED != 0
    }

    pub(super) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Ends the grant; false if an access was in progress.
    pub(crate) fn close(&self) -> bool {
        self.0.fetch_or(ENDED, Ordering::AcqRel) & !ENDED == 0
    }
}

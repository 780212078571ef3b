//! The memory that flow control is written into: the message ring, and the slots of ASK and ANSWER.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memory::{GrantEnd, Granted, copy::CopyReason};
use protocol::{ChannelError, Destination, RecordSlot, limits::SLOT_BYTES};

use crate::{announce::Announcer, enclosure::Enclosure};

/// Where a slot begins among the slots.
pub(crate) fn slot_offset(slot: RecordSlot) -> u64 {
    match slot {
        RecordSlot::Ask => 0,
        RecordSlot::Answer => SLOT_BYTES.into(),
    }
}

/// The message ring that the peer writes, and the slots beside it: lent to it for the life of the connection,
/// except a ring that was replaced by a larger one, whose loan ends when the peer has said that it moved.
#[derive(Debug)]
pub(crate) struct OwnRing(Mutex<Lent>);

#[derive(Debug)]
struct Lent {
    ring: Option<Granted>,
    /// The larger ring that was offered.
    offered: Option<Granted>,
    slots: Option<Granted>,
}

impl OwnRing {
    pub(crate) fn new(ring: Granted, slots: Granted) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Lent { ring: Some(ring), offered: None, slots: Some(slots) })))
    }

    pub(crate) fn read(&self, offset: u32, into: &mut [u8]) -> Result<(), ChannelError> {
        read(self.lock().ring.as_ref(), offset as usize, into)
    }

    pub(crate) fn read_slot(&self, slot: RecordSlot, into: &mut [u8]) -> Result<(), ChannelError> {
        read(self.lock().slots.as_ref(), slot_offset(slot) as usize, into)
    }

    /// Keeps a larger ring that the peer will be offered.
    pub(crate) fn offer(&self, granted: Granted) {
        let mut lent = self.lock();
        if lent.ring.is_some() {
            lent.offered = Some(granted);
        } else {
            // The connection ended meanwhile, and the peer never heard of this ring.
            drop(lent);
            take_back(granted, GrantEnd::NeverSent);
        }
    }

    /// The peer's last message in the old ring has arrived: it writes the offered one from now on.
    pub(crate) fn moved(&self) {
        let old = {
            let mut lent = self.lock();
            let Some(offered) = lent.offered.take() else { return };
            lent.ring.replace(offered)
        };
        if let Some(old) = old {
            take_back(old, GrantEnd::RingMoved);
        }
    }

    /// The queue pair is destroyed and drained, or never was connected: everything goes back to its pool.
    pub(crate) fn end(&self) {
        let lent = {
            let mut lent = self.lock();
            [lent.ring.take(), lent.offered.take(), lent.slots.take()]
        };
        for granted in lent.into_iter().flatten() {
            take_back(granted, GrantEnd::QueuePairDrained);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lent> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(granted: Option<&Granted>, offset: usize, into: &mut [u8]) -> Result<(), ChannelError> {
    let granted = granted.ok_or_else(|| ChannelError("the connection is over".to_owned()))?;
    let read = granted.read_at(offset, into, CopyReason::Message);
    read.map_err(|error| ChannelError(error.to_string()))
}

fn take_back(granted: Granted, why: GrantEnd) {
    if let Err(error) = granted.end(why) {
        tracing::warn!(%error, "a message ring could not be taken back");
    }
}

/// Makes larger rings for one peer.
#[derive(Debug)]
pub(crate) struct RingMaker {
    pub(crate) enclosure: Arc<Enclosure>,
    pub(crate) announcer: Arc<Announcer>,
}

impl RingMaker {
    /// A ring that the peer may write as soon as it is told of it; `None` without memory for one, or when the
    /// connection is over.
    pub(crate) async fn make(&self, ring_bytes: u32) -> Option<(Granted, Destination)> {
        let buffer = self.enclosure.ring.try_alloc(ring_bytes as usize).ok()?;
        let regions = &self.enclosure.regions;
        let region = buffer.block().and_then(|block| regions.get(block.id()))?;
        self.announcer.confirmed(region).await.ok()?;
        let granted = buffer.grant();
        let destination = regions.destination(&granted)?;
        Some((granted, destination))
    }
}

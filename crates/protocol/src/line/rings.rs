//! The memory that messages are written into, in both directions.

use crate::{Channel, ChannelError, Destination, RecordSlot, credit::RingConsumer};

/// The message rings of a new connection, and the own [record slots](RecordSlot).
#[derive(Debug)]
pub struct Rings<L> {
    /// The own ring, of the local [first size](crate::Parameters::first_ring_bytes).
    pub own: L,
    /// The own record slots, [`SLOT_BYTES`](crate::limits::SLOT_BYTES) each.
    pub own_slots: L,
    /// The peer's ring.
    pub peer: Destination,
}

/// Rings in use. The own ones are granted until the connection is [drained](crate::Connection::drain), or until the peer has
/// left a ring for a larger one.
pub(super) struct RingsInUse<L> {
    own: Option<L>,
    /// The larger own ring, which was made and is being offered to the peer.
    offered: Option<L>,
    own_slots: Option<L>,
    pub(super) peer: Destination,
}

impl<L> RingsInUse<L> {
    pub(super) fn new(Rings { own, own_slots, peer }: Rings<L>) -> Self {
        Self { own: Some(own), offered: None, own_slots: Some(own_slots), peer }
    }

    /// Stores the larger ring that will be offered.
    pub(super) fn offer(&mut self, ring: L) {
        self.offered = Some(ring);
    }

    /// The peer has written its last byte into the own ring. Returns that ring, whose grant has ended.
    pub(super) fn moved(&mut self) -> Option<L> {
        let offered = self.offered.take()?;
        self.own.replace(offered)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = L> + use<L> {
        [self.own.take(), self.offered.take(), self.own_slots.take()].into_iter().flatten()
    }

    /// Copies the next bytes of the own ring into `into`.
    pub(super) fn read<C: Channel<Lent = L>>(
        &self,
        channel: &C,
        consumer: &RingConsumer,
        into: &mut [u8],
    ) -> Result<(), ChannelError> {
        let beyond = || ChannelError("the message is longer than the own ring".to_owned());
        let ring = self.own.as_ref().ok_or_else(over)?;
        let place = consumer.place(into.len() as u32).ok_or_else(beyond)?;
        let (head, tail) = into.split_at_mut_checked(place.first.length as usize).ok_or_else(beyond)?;
        channel.read(ring, place.first.offset.into(), head)?;
        if tail.is_empty() { Ok(()) } else { channel.read(ring, place.second.offset.into(), tail) }
    }

    /// Copies the first bytes of an own slot.
    pub(super) fn read_slot<C: Channel<Lent = L>, const BYTES: usize>(
        &self,
        channel: &C,
        slot: RecordSlot,
    ) -> Result<[u8; BYTES], ChannelError> {
        let mut bytes = [0; BYTES];
        let slots = self.own_slots.as_ref().ok_or_else(over)?;
        channel.read(slots, slot.offset(), &mut bytes)?;
        Ok(bytes)
    }
}

fn over() -> ChannelError {
    ChannelError("the connection is over".to_owned())
}

//! Contents that all other ranks read in place.
//!
//! The sender [offers](tensorwire_rendezvous::Offer) a tensor, and sends its ticket to each other rank in a message of the call. So a content
//! needs no request, and all ranks read one copy of it.

use std::{collections::VecDeque, sync::atomic::Ordering};

use futures::future::try_join_all;
use tensorwire_rendezvous::{Offer, Tensor, Ticket};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U64};

use super::{Arrived, Awaited, Calling, Received};
use crate::{error::GroupError, group::CALLS_UNDER_WAY};

/// The first bytes of an announcement. A note with the end of the group begins with other bytes.
const MAGIC: [u8; 4] = *b"TWGo";

/// Announces an offer to another rank.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Announcement {
    magic: [u8; 4],
    ticket: Ticket,
    /// All calls of the sender below this number are complete.
    complete: U64,
}

/// The contents that a rank offers in one call. Each rank offers its next content after it has received those before from all others, and
/// has dropped its views of them except for the last of each rank.
pub(crate) struct Offers<'calling> {
    calling: &'calling Calling,
    recent: VecDeque<Offer>,
}

impl<'calling> Offers<'calling> {
    pub(crate) fn new(calling: &'calling Calling) -> Self {
        Self { calling, recent: VecDeque::new() }
    }

    /// Offers the next content.
    pub(crate) async fn offer(&mut self, content: Tensor) -> Result<(), GroupError> {
        self.recent.push_back(self.calling.offer(content).await?);
        Ok(())
    }

    /// The next contents of the other ranks. Before they offered these they had received all contents of this rank but the last, and
    /// dropped their views of all but the last two. So no offer ends that is unread, and none that is viewed.
    pub(crate) async fn next(&mut self, length: impl Fn(usize) -> usize) -> Result<Vec<Arrived>, GroupError> {
        let arrived = self.calling.next_offered(length).await?;
        while self.recent.len() > 2 {
            self.recent.pop_front();
        }
        Ok(arrived)
    }

    /// This rank has received everything. The others may still read its last content.
    pub(crate) fn end(mut self) {
        if let Some(last) = self.recent.pop_back() {
            self.calling.group.offers.keep(self.calling.call.number, last);
        }
    }
}

impl Calling {
    /// Lets all other ranks read `content` until the offer is dropped.
    pub(crate) async fn offer(&self, content: Tensor) -> Result<Offer, GroupError> {
        let offer = self.group.worker.offer(content);
        let announcement =
            Announcement { magic: MAGIC, ticket: offer.ticket(), complete: self.complete_below().into() };
        for to in self.others() {
            self.send_beside_header(to, announcement.as_bytes()).await?;
        }
        Ok(offer)
    }

    /// The next content of each other rank, in the order of [`others`](Self::others). `length` gives that of each rank.
    pub(crate) async fn next_offered(
        &self,
        length: impl Fn(usize) -> usize,
    ) -> Result<Vec<Arrived>, GroupError> {
        try_join_all(self.others().map(|from| self.next_offered_by(from, length(from)))).await
    }

    async fn next_offered_by(&self, from: usize, length: usize) -> Result<Arrived, GroupError> {
        let message = self.receive_beside_header(from, size_of::<Announcement>()).await?;
        let announcement = Announcement::ref_from_bytes(message.bytes());
        let Ok(&Announcement { magic: MAGIC, ticket, complete }) = announcement else {
            return Err(self.misbehaved(from, "an offer comes with its ticket"));
        };
        self.group.offers.are_complete(from, complete.get());
        let awaited = Awaited::begin(self, from);
        let fetched = self.peer(from)?.fetch_offered(ticket, self.limit.saturating_mul(2)).await;
        drop(awaited);
        match fetched.map_err(|error| self.failed(from, error))? {
            Some(content) => self.content(from, content, length),
            // The group is over on that rank. Its end follows all notes that it has sent before.
            None => loop {
                self.next_note(from, true).await?;
            },
        }
    }

    /// Sends short `bytes` with the call header, or behind it.
    pub(crate) async fn send_beside_header(&self, to: usize, bytes: &[u8]) -> Result<(), GroupError> {
        if self.claim_send(to) { self.send_call(to, bytes).await } else { self.note(to, &[bytes]).await }
    }

    /// Receives what `from` sent with [`send_beside_header`](Self::send_beside_header): `length` bytes, if they come with the call header.
    pub(crate) async fn receive_beside_header(
        &self,
        from: usize,
        length: usize,
    ) -> Result<Arrived, GroupError> {
        if self.claim_receive(from) {
            return self.receive_short(from, length).await;
        }
        Ok(Arrived { message: Received::Note(self.next_note(from, true).await?), at: 0 })
    }

    /// All calls of this rank below this number are complete.
    fn complete_below(&self) -> u64 {
        let incomplete = (0..).zip(&self.group.lanes).map(|(at, lane)| {
            let complete = lane.complete.load(Ordering::Acquire);
            at + complete * CALLS_UNDER_WAY as u64
        });
        incomplete.min().unwrap_or_default()
    }
}

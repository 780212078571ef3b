//! The state of flow control on one side: credits, ring room and counts of both directions.

use super::{
    Agreed, Mode,
    ring::{RingCursor, RingPlace},
};
use crate::{Destination, PeerMisbehaved};

/// Receives that are not credits: one for ASK, one for ANSWER.
const RESERVED: u32 = 2;

/// What a side has read since the connection began, modulo 2³².
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Counts {
    /// Receives reposted after a message or a content.
    pub receives: u32,
    /// Bytes of messages read out of the ring.
    pub ring_bytes: u32,
}

/// ASK: something is blocked because credits or ring room are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ask {
    /// What the asking side has read.
    pub counts: Counts,
    /// ANSWERs that the asking side has read, modulo 2³²: the receive of the last one is free again.
    pub answers: u32,
    /// Length of the message for which the ring has no room; 0 when only a credit is missing.
    pub wanted: u32,
}

/// ANSWER: returns everything that was read before the ASK.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Answer {
    /// What the answering side has read.
    pub counts: Counts,
    /// ASKs that the answering side has read, modulo 2³²: the receive of the last one is free again.
    pub asks: u32,
}

/// Something cannot be posted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// Length of the message for which the ring has no room; 0 when only a credit is missing.
    pub wanted: u32,
}

/// What is unreturned on one side, as a report for tests and models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Open {
    /// Immediates posted and not returned.
    pub immediates: u32,
    /// Bytes written into the peer's ring and not returned.
    pub ring_bytes: u32,
    /// Immediates read and not returned.
    pub unreturned: u32,
    /// Bytes read out of the own ring and not returned.
    pub unreturned_bytes: u32,
    /// Immediates and ring bytes that were posted before the unanswered ASK and are not returned.
    pub asked: Option<(u32, u32)>,
}

/// The state at the time of the unanswered ASK.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Asking {
    sent: u64,
    produced: u64,
    wanted: u32,
}

/// Flow control of one side: what it may post, and what it must return.
///
/// The owner posts what it has registered by these methods, in that order, and passes every arrival, in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Flow {
    mode: Mode,
    /// Immediates that may be posted and not returned.
    credits: u32,
    /// Receives that may be unreturned before counts are sent on their own.
    return_after: u32,
    /// Immediates posted, and how many of them the peer has returned.
    sent: u64,
    returned: u64,
    /// Bytes written into the peer's rings, and how many of them the peer has returned.
    produced: u64,
    drained: u64,
    /// The peer's ring.
    ring: RingCursor,
    /// `produced` when the ring was begun.
    ring_from: u64,
    /// Size that the peer's ring never exceeds.
    ring_bytes_max: u32,
    /// The larger ring that the peer has offered.
    offered: Option<Destination>,
    /// Immediates and ring bytes read.
    taken: u64,
    consumed: u64,
    /// The part of these that was returned to the peer.
    confirmed: u64,
    confirmed_bytes: u64,
    own_ring_bytes: u32,
    /// Size of the larger ring that was offered to the peer.
    own_offer: Option<u32>,
    asking: Option<Asking>,
    asks_sent: u32,
    asks_taken: u32,
}

impl Flow {
    /// Both rings are empty. `ring_bytes` is the size of the peer's, which never exceeds `ring_bytes_max`.
    pub fn new(agreed: &Agreed, ring_bytes: u32, ring_bytes_max: u32, own_ring_bytes: u32) -> Self {
        let credits = if agreed.mode.is_counted() { agreed.depth - RESERVED } else { 1 };
        Self {
            mode: agreed.mode,
            credits,
            return_after: agreed.depth / 2,
            sent: 0,
            returned: 0,
            produced: 0,
            drained: 0,
            ring: RingCursor::new(ring_bytes),
            ring_from: 0,
            ring_bytes_max,
            offered: None,
            taken: 0,
            consumed: 0,
            confirmed: 0,
            confirmed_bytes: 0,
            own_ring_bytes,
            own_offer: None,
            asking: None,
            asks_sent: 0,
            asks_taken: 0,
        }
    }

    /// Most immediates of this side that may be posted and unreturned.
    pub fn credits(&self) -> u32 {
        self.credits
    }

    /// Whether a message may be posted, ring room aside.
    pub fn has_credit(&self) -> bool {
        self.sent - self.returned < u64::from(self.credits)
    }

    /// Whether exactly one more message or content may be posted. Never in mode original, which does not count contents.
    pub fn is_last_credit(&self) -> bool {
        self.mode.is_counted() && self.sent - self.returned + 1 == u64::from(self.credits)
    }

    /// Whether a content may be posted. In mode original it always may.
    pub fn has_content_credit(&self) -> bool {
        !self.mode.is_counted() || self.has_credit()
    }

    /// Immediates that the peer has returned: it has read what they announced.
    pub fn returned(&self) -> u64 {
        self.returned
    }

    /// What [`returned`](Self::returned) will be once the peer has read everything posted so far. `None` in mode original,
    /// which does not count contents.
    pub fn posted(&self) -> Option<u64> {
        self.mode.is_counted().then_some(self.sent)
    }

    /// Whether an ASK is unanswered.
    pub fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Whether a blocked message should be tried again: it can be posted, or an ASK can be.
    pub fn may_try_message(&self) -> bool {
        match self.asking {
            None => self.mode.is_counted() || self.has_credit(),
            Some(asking) => self.has_credit() && self.room() >= u64::from(asking.wanted),
        }
    }

    /// As [`may_try_message`](Self::may_try_message), for a content.
    pub fn may_try_content(&self) -> bool {
        self.has_content_credit() || !self.is_asking()
    }

    fn room(&self) -> u64 {
        u64::from(self.ring.ring_bytes) - (self.produced - self.drained.max(self.ring_from))
    }

    /// The counts that the next record carries; none in mode original.
    pub(crate) fn record_counts(&self) -> Option<Counts> {
        self.mode.is_counted().then_some(self.counts())
    }

    /// What this side has read.
    pub fn counts(&self) -> Counts {
        // Modulo 2³², by the wire format.
        Counts { receives: self.taken as u32, ring_bytes: self.consumed as u32 }
    }

    fn describe(&mut self) {
        self.confirmed = self.taken;
        self.confirmed_bytes = self.consumed;
    }

    /// Registers that a message of `length` bytes, which carries [`counts`](Self::counts), is posted. Returns its position
    /// in the peer's ring.
    ///
    /// # Errors
    /// [`Blocked`]; nothing has changed.
    pub fn post_message(&mut self, length: u32) -> Result<RingPlace, Blocked> {
        if u64::from(length) > self.room() {
            return Err(Blocked { wanted: length });
        }
        if length == 0 || !self.has_credit() {
            return Err(Blocked { wanted: 0 });
        }
        self.sent += 1;
        self.produced += u64::from(length);
        self.describe();
        Ok(self.ring.advance(length))
    }

    /// Registers that a content is posted.
    ///
    /// # Errors
    /// [`Blocked`]; nothing has changed.
    pub fn post_content(&mut self) -> Result<(), Blocked> {
        if !self.has_content_credit() {
            return Err(Blocked { wanted: 0 });
        }
        self.sent += u64::from(self.mode.is_counted());
        Ok(())
    }

    /// Something is blocked. Returns the ASK to post, unless one is unanswered.
    pub fn ask(&mut self, blocked: Blocked) -> Option<Ask> {
        if !self.mode.is_counted() || self.is_asking() {
            return None;
        }
        self.asking = Some(Asking { sent: self.sent, produced: self.produced, wanted: blocked.wanted });
        let ask = Ask { counts: self.counts(), answers: self.asks_sent, wanted: blocked.wanted };
        self.asks_sent = self.asks_sent.wrapping_add(1);
        self.describe();
        Some(ask)
    }

    /// The peer's acknowledgement came, in mode original.
    ///
    /// # Errors
    /// [`PeerMisbehaved::AcknowledgementUnasked`] without a message in flight.
    pub fn acknowledged(&mut self) -> Result<(), PeerMisbehaved> {
        if self.sent == self.returned {
            return Err(PeerMisbehaved::AcknowledgementUnasked);
        }
        self.returned = self.sent;
        self.drained = self.produced;
        Ok(())
    }

    /// A message of `length` bytes was read; it carried `counts`.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_message(&mut self, length: u32, counts: Counts) -> Result<(), PeerMisbehaved> {
        self.learn(counts)?;
        self.consumed += u64::from(length);
        self.take()
    }

    /// A content has arrived.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_content(&mut self) -> Result<(), PeerMisbehaved> {
        if self.mode.is_counted() { self.take() } else { Ok(()) }
    }

    fn take(&mut self) -> Result<(), PeerMisbehaved> {
        if tensorwire_testpoints::planted!("the credits of some arrivals are not returned")
            && self.consumed % 8 == 5
        {
            return Ok(());
        }
        self.taken += 1;
        // Each post of the peer takes a credit, even while returned credits are on their way to it.
        if self.taken - self.confirmed > u64::from(self.credits) {
            Err(PeerMisbehaved::Overrun)
        } else {
            Ok(())
        }
    }

    /// Whether half the depth or half the own ring is unreturned, so that counts should be sent. Call it after a message or
    /// a content was read, and never after a message of nothing but counts: two idle peers would exchange counts for ever.
    /// In mode original it is always false.
    pub fn is_return_due(&self) -> bool {
        self.taken - self.confirmed >= u64::from(self.return_after)
            || 2 * (self.consumed - self.confirmed_bytes) >= u64::from(self.own_ring_bytes)
    }

    /// An ASK was read. Returns the ANSWER, which must be posted at once.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_ask(&mut self, ask: Ask) -> Result<Answer, PeerMisbehaved> {
        if ask.answers != self.asks_taken {
            return Err(PeerMisbehaved::AskedTwice);
        }
        self.learn(ask.counts)?;
        self.asks_taken = self.asks_taken.wrapping_add(1);
        self.describe();
        Ok(Answer { counts: self.counts(), asks: self.asks_taken })
    }

    /// An ANSWER was read.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_answer(&mut self, answer: Answer) -> Result<(), PeerMisbehaved> {
        let Some(asking) = self.asking.filter(|_| answer.asks == self.asks_sent) else {
            return Err(PeerMisbehaved::AnswerWithoutAsk);
        };
        self.learn(answer.counts)?;
        if self.returned < asking.sent || self.drained < asking.produced {
            return Err(PeerMisbehaved::AnswerShort);
        }
        self.asking = None;
        Ok(())
    }

    /// Takes the peer's `counts` into account.
    fn learn(&mut self, counts: Counts) -> Result<(), PeerMisbehaved> {
        // Modulo 2³², by the wire format; what is unreturned is always less.
        let receives = u64::from(counts.receives.wrapping_sub(self.returned as u32));
        let bytes = u64::from(counts.ring_bytes.wrapping_sub(self.drained as u32));
        if receives > self.sent - self.returned || bytes > self.produced - self.drained {
            return Err(PeerMisbehaved::ReturnedTooMuch);
        }
        self.returned += receives;
        self.drained += bytes;
        Ok(())
    }

    /// The peer offers a larger ring.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_ring_offer(&mut self, ring: Destination) -> Result<(), PeerMisbehaved> {
        if self.offered.is_some() {
            return Err(PeerMisbehaved::RingOfferedTwice);
        }
        let larger = u64::from(self.ring.ring_bytes) + 1..=u64::from(self.ring_bytes_max);
        if !larger.contains(&ring.capacity) {
            return Err(PeerMisbehaved::RingOfferUnfit);
        }
        self.offered = Some(ring);
        Ok(())
    }

    /// Whether the peer has offered a larger ring that is not used yet.
    pub fn has_ring_offer(&self) -> bool {
        self.offered.is_some()
    }

    /// RING_MOVED is posted: later messages go into the ring that was offered. Returns that ring.
    pub fn move_ring(&mut self) -> Option<Destination> {
        let ring = self.offered.take()?;
        // At most the negotiated size, which is a u32.
        self.ring = RingCursor::new(ring.capacity as u32);
        self.ring_from = self.produced;
        Some(ring)
    }

    /// The size of the larger ring that should be offered to a peer without room for a message of `wanted` bytes. `None`
    /// if none should be; no ring is offered while an offer is open.
    pub fn growth(&self, wanted: u32, own_ring_bytes_max: u32) -> Option<u32> {
        let larger = self.own_ring_bytes.saturating_mul(2).min(own_ring_bytes_max);
        (wanted > 0 && self.own_offer.is_none() && larger > self.own_ring_bytes).then_some(larger)
    }

    /// An offer of a larger ring is posted.
    pub fn offer_ring(&mut self, ring_bytes: u32) {
        self.own_offer = Some(ring_bytes);
    }

    /// RING_MOVED was read. Returns the new ring's size.
    ///
    /// # Errors
    /// [`PeerMisbehaved::RingMoveUnasked`] when none was offered.
    pub fn take_ring_move(&mut self) -> Result<u32, PeerMisbehaved> {
        self.own_ring_bytes = self.own_offer.take().ok_or(PeerMisbehaved::RingMoveUnasked)?;
        Ok(self.own_ring_bytes)
    }

    /// What is unreturned.
    pub fn open(&self) -> Open {
        // Differences of counts, which credits and ring sizes bound; both are u32.
        let low = |difference: u64| difference as u32;
        Open {
            immediates: low(self.sent - self.returned),
            ring_bytes: low(self.produced - self.drained),
            unreturned: low(self.taken - self.confirmed),
            unreturned_bytes: low(self.consumed - self.confirmed_bytes),
            asked: self.asking.map(|asking| {
                let unreturned = asking.sent.saturating_sub(self.returned);
                (low(unreturned), low(asking.produced.saturating_sub(self.drained)))
            }),
        }
    }
}

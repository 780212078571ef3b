//! The state of flow control at one end: credits, room and counts of both directions.

use super::{
    Agreed, Mode,
    ring::{RingCursor, RingPlace},
};
use crate::{Destination, PeerMisbehaved};

/// Receives that are kept apart from the credits: one for ASK, one for ANSWER.
const RESERVED: u32 = 2;

/// What an end has taken in since the connection began, modulo 2³².
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Counts {
    /// Receives reposted after a message or a content.
    pub receives: u32,
    /// Bytes of messages read out of the ring.
    pub ring_bytes: u32,
}

/// ASK: something is blocked for want of credits or ring room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ask {
    /// What the asking end has taken in.
    pub counts: Counts,
    /// ANSWERs that the asking end has taken in, modulo 2³²: the receive of the last one is free again.
    pub answers: u32,
    /// Length of the message for which the ring has no room; 0 when only a credit is missing.
    pub wanted: u32,
}

/// ANSWER: returns all that was taken in before the ASK.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Answer {
    /// What the answering end has taken in.
    pub counts: Counts,
    /// ASKs that the answering end has taken in, modulo 2³²: the receive of the last one is free again.
    pub asks: u32,
}

/// Something cannot be posted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// Length of the message for which the ring has no room; 0 when only a credit is missing.
    pub wanted: u32,
}

/// What is open at one end, as a report for tests and models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Open {
    /// Immediates posted and not returned.
    pub immediates: u32,
    /// Bytes written into the peer's ring and not returned.
    pub ring_bytes: u32,
    /// Immediates taken in and not returned.
    pub unreturned: u32,
    /// Bytes read out of the own ring and not returned.
    pub unreturned_bytes: u32,
    /// Immediates and ring bytes that were posted before the unanswered ASK and are not returned.
    pub asked: Option<(u32, u32)>,
}

/// How an unanswered ASK found things.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Asking {
    sent: u64,
    produced: u64,
    wanted: u32,
}

/// Flow control of one end: what it may post, and what it must return.
///
/// Whoever owns it posts what its methods say was posted, in their order, and tells it of every arrival, in order.
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
    /// Immediates and ring bytes taken in.
    taken: u64,
    consumed: u64,
    /// What of these the peer was told.
    told: u64,
    told_bytes: u64,
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
        let credits = match agreed.mode {
            Mode::Original => 1,
            Mode::Counted => agreed.depth - RESERVED,
        };
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
            told: 0,
            told_bytes: 0,
            own_ring_bytes,
            own_offer: None,
            asking: None,
            asks_sent: 0,
            asks_taken: 0,
        }
    }

    /// Immediates that this end may have posted and not had returned.
    pub fn credits(&self) -> u32 {
        self.credits
    }

    /// Whether a message may be posted, ring room aside.
    pub fn has_credit(&self) -> bool {
        self.sent - self.returned < u64::from(self.credits)
    }

    /// Whether a content may be posted. In mode original it always may.
    pub fn has_content_credit(&self) -> bool {
        self.mode == Mode::Original || self.has_credit()
    }

    /// Immediates that the peer has returned: what they brought, it has taken in.
    pub fn returned(&self) -> u64 {
        self.returned
    }

    /// What [`returned`](Self::returned) will be once the peer has taken in all that was posted so far. `None` in mode
    /// original, which does not count contents.
    pub fn posted(&self) -> Option<u64> {
        (self.mode == Mode::Counted).then_some(self.sent)
    }

    /// Whether an ASK is unanswered.
    pub fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// Whether it is worth trying again to post a message: it may be possible, or may be asked for.
    pub fn may_try_message(&self) -> bool {
        match (self.mode, self.asking) {
            (Mode::Counted, None) => true,
            (_, asking) => {
                let wanted = asking.map_or(0, |asking| asking.wanted);
                self.has_credit() && self.room() >= u64::from(wanted)
            }
        }
    }

    /// As [`may_try_message`](Self::may_try_message), for a content.
    pub fn may_try_content(&self) -> bool {
        self.has_content_credit() || !self.is_asking()
    }

    fn room(&self) -> u64 {
        u64::from(self.ring.ring_bytes) - (self.produced - self.drained.max(self.ring_from))
    }

    /// What this end has taken in, for the next record.
    pub fn counts(&self) -> Counts {
        // Modulo 2³², by the wire format.
        Counts { receives: self.taken as u32, ring_bytes: self.consumed as u32 }
    }

    fn tell(&mut self) {
        self.told = self.taken;
        self.told_bytes = self.consumed;
    }

    /// A message of `length` bytes, which carries [`counts`](Self::counts), is posted; gives where.
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
        self.tell();
        Ok(self.ring.advance(length))
    }

    /// A content is posted.
    ///
    /// # Errors
    /// [`Blocked`]; nothing has changed.
    pub fn post_content(&mut self) -> Result<(), Blocked> {
        if !self.has_content_credit() {
            return Err(Blocked { wanted: 0 });
        }
        self.sent += u64::from(self.mode == Mode::Counted);
        Ok(())
    }

    /// Something was blocked: the ASK to post, unless one is unanswered.
    pub fn ask(&mut self, blocked: Blocked) -> Option<Ask> {
        if self.mode == Mode::Original || self.is_asking() {
            return None;
        }
        self.asking = Some(Asking { sent: self.sent, produced: self.produced, wanted: blocked.wanted });
        let ask = Ask { counts: self.counts(), answers: self.asks_sent, wanted: blocked.wanted };
        self.asks_sent = self.asks_sent.wrapping_add(1);
        self.tell();
        Some(ask)
    }

    /// A message was taken in, in mode original.
    pub fn take_uncounted(&mut self, length: u32) {
        self.consumed += u64::from(length);
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

    /// A message of `length` bytes was taken in; it carried `counts`.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_message(&mut self, length: u32, counts: Counts) -> Result<(), PeerMisbehaved> {
        self.learn(counts)?;
        self.consumed += u64::from(length);
        self.take()
    }

    /// A content was taken in.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_content(&mut self) -> Result<(), PeerMisbehaved> {
        if self.mode == Mode::Original { Ok(()) } else { self.take() }
    }

    fn take(&mut self) -> Result<(), PeerMisbehaved> {
        if testpoints::planted!("some arrivals are not returned") && self.consumed % 8 == 5 {
            return Ok(());
        }
        self.taken += 1;
        // What the peer may have posted without knowing of a return has a credit each.
        if self.taken - self.told > u64::from(self.credits) { Err(PeerMisbehaved::Overrun) } else { Ok(()) }
    }

    /// Whether half the depth or half the own ring is unreturned: counts are to go out, if they can. To be asked
    /// after a message or content was taken in, and never after a message of nothing but counts.
    pub fn is_return_due(&self) -> bool {
        self.mode == Mode::Counted
            && (self.taken - self.told >= u64::from(self.return_after)
                || 2 * (self.consumed - self.told_bytes) >= u64::from(self.own_ring_bytes))
    }

    /// An ASK was taken in. Gives the ANSWER, which must be posted at once.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn take_ask(&mut self, ask: Ask) -> Result<Answer, PeerMisbehaved> {
        if ask.answers != self.asks_taken {
            return Err(PeerMisbehaved::AskedTwice);
        }
        self.learn(ask.counts)?;
        self.asks_taken = self.asks_taken.wrapping_add(1);
        self.tell();
        Ok(Answer { counts: self.counts(), asks: self.asks_taken })
    }

    /// An ANSWER was taken in.
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

    /// The peer has taken in what `counts` say.
    fn learn(&mut self, counts: Counts) -> Result<(), PeerMisbehaved> {
        // Modulo 2³², by the wire format; what is open is always less.
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

    /// RING_MOVED is posted: what follows goes into the ring that was offered. Gives it.
    pub fn move_ring(&mut self) -> Option<Destination> {
        let ring = self.offered.take()?;
        // At most the negotiated size, which is a u32.
        self.ring = RingCursor::new(ring.capacity as u32);
        self.ring_from = self.produced;
        Some(ring)
    }

    /// The size of the larger ring that should be offered to the peer, which has no room for a message of
    /// `wanted` bytes; `None` when none should. No ring is offered while an offer is open.
    pub fn growth(&self, wanted: u32, own_ring_bytes_max: u32) -> Option<u32> {
        let larger = self.own_ring_bytes.saturating_mul(2).min(own_ring_bytes_max);
        (wanted > 0 && self.own_offer.is_none() && larger > self.own_ring_bytes).then_some(larger)
    }

    /// An offer of a larger ring is posted.
    pub fn offer_ring(&mut self, ring_bytes: u32) {
        self.own_offer = Some(ring_bytes);
    }

    /// RING_MOVED was taken in. Gives the new ring's size.
    ///
    /// # Errors
    /// [`PeerMisbehaved::RingMoveUnasked`] when none was offered.
    pub fn take_ring_move(&mut self) -> Result<u32, PeerMisbehaved> {
        self.own_ring_bytes = self.own_offer.take().ok_or(PeerMisbehaved::RingMoveUnasked)?;
        Ok(self.own_ring_bytes)
    }

    /// What is open.
    pub fn open(&self) -> Open {
        // Differences of counts, which credits and ring sizes bound; both are u32.
        let low = |difference: u64| difference as u32;
        Open {
            immediates: low(self.sent - self.returned),
            ring_bytes: low(self.produced - self.drained),
            unreturned: low(self.taken - self.told),
            unreturned_bytes: low(self.consumed - self.told_bytes),
            asked: self.asking.map(|asking| {
                let unreturned = asking.sent.saturating_sub(self.returned);
                (low(unreturned), low(asking.produced.saturating_sub(self.drained)))
            }),
        }
    }
}

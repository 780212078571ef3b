//! One side of a queue pair, and the writes that it has under way.

use std::{collections::VecDeque, ops::Range, sync::Arc, time::Duration};

use futures::channel::oneshot;
use memory::{BlockId, Buf, RemoteTarget};
use verbs_reactor::{
    FabricError, Immediate, QueuePair, QueuePairConfig, QueuePairCore, RemoteRange, Role, SlotKey,
};

use crate::{
    Rng, Swarm,
    fabric::DomainShared,
    ids::{BlockNumber, EndpointId, LeaseId, NodeId},
    owners::PostedUnder,
    reads::Read,
    schedule::WireStep,
};

/// The state of a side.
///
/// ```text
/// Prepared → Meeting → Open → Failed → Closing → Flushed → Drained
///                        └──────────────↗
/// any → Dead (its node crashed)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Made, `connect` not called.
    Prepared,
    /// Waits for the other side to call `connect`.
    Meeting,
    /// Connected.
    Open,
    /// The connection is over, and this side has seen that.
    Failed,
    /// The user closed it; operations may still complete, the peer's bytes may still land.
    Closing,
    /// Its operations have ended; the peer's bytes may still land.
    Flushed,
    /// Nothing of the peer reaches it any more.
    Drained,
    /// Its process is gone.
    Dead,
}

impl Phase {
    /// Whether bytes of the peer may still land.
    pub(crate) fn is_reachable(self) -> bool {
        (Self::Open..Self::Drained).contains(&self)
    }
}

/// One side of a queue pair.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) node: NodeId,
    pub(crate) domain: Arc<DomainShared>,
    pub(crate) core: Arc<QueuePairCore>,
    pub(crate) token: u64,
    pub(crate) phase: Phase,
    pub(crate) wish: Option<(EndpointId, Role)>,
    pub(crate) peer: Option<EndpointId>,
    /// Gives the connected queue pair to the waiting `connect`.
    pub(crate) meet: Option<oneshot::Sender<Result<QueuePair, FabricError>>>,
    /// Whether its process is stopped, and executes this side's work itself.
    pub(crate) stopped: bool,
    /// Whether completions come once the source is read, as a socket's do.
    pub(crate) completes_after_reading: bool,
    /// Whether the user has dropped the queue pair.
    pub(crate) is_dropped: bool,
    pub(crate) outbound: Outbound,
}

impl Endpoint {
    pub(crate) fn config(&self) -> QueuePairConfig {
        self.core.config()
    }

    /// Offers every step that is possible, with the time from which it is possible.
    pub(crate) fn offers(&self, all: &[Endpoint], mut offer: impl FnMut(WireStep, Duration)) {
        let outbound = &self.outbound;
        let Some(peer) = self.peer.and_then(|peer| all.get(peer.index())) else { return };
        if outbound.writes.is_empty() {
            return;
        }
        if self.may_act() && outbound.unread > 0 {
            offer(WireStep::Read, outbound.read_at);
        }
        if peer.can_be_reached() && outbound.carried > 0 {
            offer(WireStep::Land, outbound.land_at);
        }
        if peer.phase == Phase::Open && !peer.stopped && outbound.next_delivery().is_some() {
            offer(WireStep::Deliver, outbound.deliver_at);
        }
        if self.may_act() && peer.phase == Phase::Open && !peer.stopped && outbound.next_sample().is_some() {
            offer(WireStep::Sample, outbound.sample_at);
        }
        if self.may_act() && outbound.next_return().is_some() {
            offer(WireStep::Return, outbound.return_at);
        }
        if self.may_act() && outbound.next_completion(self.completes_after_reading).is_some() {
            offer(WireStep::Complete, outbound.complete_at);
        }
    }

    /// Whether this side still executes what it posted.
    fn may_act(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Closing) && !self.outbound.cut && !self.stopped
    }

    /// Whether the peer's bytes can land here now.
    pub(crate) fn can_be_reached(&self) -> bool {
        self.phase.is_reachable() && !self.stopped
    }
}

/// The writes of one direction, in posting order, from post until both completed and delivered.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    pub(crate) writes: VecDeque<Write>,
    pub(crate) next_number: u64,
    /// Whether nothing more is read or completed, because the peer cannot be reached.
    pub(crate) cut: bool,
    pub(crate) unread: usize,
    pub(crate) carried: usize,
    pub(crate) read_at: Duration,
    pub(crate) land_at: Duration,
    pub(crate) deliver_at: Duration,
    pub(crate) complete_at: Duration,
    pub(crate) sample_at: Duration,
    pub(crate) return_at: Duration,
}

/// The source of a write inside its block.
#[derive(Debug, Clone)]
pub(crate) struct SourceSpan {
    pub(crate) block: BlockNumber,
    pub(crate) range: Range<usize>,
}

/// The target of a write.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    pub(crate) range: RemoteRange,
    pub(crate) key: u32,
    pub(crate) posted_under: PostedUnder,
    /// The result of the first piece's check, which covers the whole range.
    pub(crate) target: Option<RemoteTarget>,
}

/// One work request of a logical write.
#[derive(Debug)]
pub(crate) struct Part {
    /// Only where the owner map watches the source.
    pub(crate) source: Option<SourceSpan>,
    pub(crate) remote: Option<Remote>,
}

/// The kind of an operation, besides its parts.
#[derive(Debug)]
pub(crate) enum Kind {
    Write,
    /// The peer gets a view under `lease`, or nothing once it was withdrawn.
    Loan {
        lease: LeaseId,
        withdrawn: bool,
    },
    Read(Box<Read>),
}

/// What operations release when they end together.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    pub(crate) sources: Vec<SourceSpan>,
    /// Of the peer, which this end was reading. To be dropped without a lock.
    pub(crate) read: Vec<Buf>,
    /// Of loans that the peer never got.
    pub(crate) leases: Vec<LeaseId>,
}

/// One logical write: its parts land in any order, then it is delivered and completes as one. Or a loan, or a read.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) kind: Kind,
    pub(crate) number: u64,
    pub(crate) key: SlotKey,
    pub(crate) length: u64,
    pub(crate) immediate: Option<Immediate>,
    pub(crate) parts: Vec<Part>,
    pub(crate) pieces: Vec<Piece>,
    /// The error of a write that was refused before it left; it only completes.
    pub(crate) refused: Option<FabricError>,
    pub(crate) delivered: bool,
    pub(crate) completed: bool,
}

impl Write {
    /// An operation without parts.
    pub(crate) fn new(number: u64, key: SlotKey, length: u64, kind: Kind) -> Self {
        Self {
            kind,
            number,
            key,
            length,
            immediate: None,
            parts: Vec::new(),
            pieces: Vec::new(),
            refused: None,
            delivered: false,
            completed: false,
        }
    }

    fn has_landed(&self) -> bool {
        match &self.kind {
            Kind::Loan { withdrawn, .. } => return !withdrawn,
            Kind::Read(read) => return read.is_sampled(),
            Kind::Write => {}
        }
        self.pieces.iter().all(|piece| matches!(piece.state, PieceState::Landed))
    }

    fn is_read(&self) -> bool {
        !self.pieces.iter().any(|piece| matches!(piece.state, PieceState::Unread))
    }

    /// Whether it may complete. `after_reading` is whether writes do once their source is read.
    fn is_done(&self, after_reading: bool) -> bool {
        match &self.kind {
            Kind::Write if after_reading => self.is_read(),
            Kind::Write | Kind::Loan { .. } => self.delivered,
            Kind::Read(read) => self.delivered && read.has_landed(),
        }
    }

    /// Its entries in the send queue, until it has completed.
    pub(crate) fn weight(&self) -> usize {
        match &self.kind {
            _ if self.completed => 0,
            Kind::Read(read) => read.weight,
            _ => self.parts.len().max(1),
        }
    }

    /// A loan that is on its way is lost there; its lease stays.
    pub(crate) fn lose(&mut self) {
        if let Kind::Loan { withdrawn, .. } = &mut self.kind
            && !self.delivered
        {
            *withdrawn = true;
        }
    }

    /// A loan that is on its way never arrives: neither it nor anything posted after it is delivered any more.
    pub(crate) fn withdraw(&mut self) -> Option<LeaseId> {
        match &mut self.kind {
            Kind::Loan { lease, withdrawn } if !self.delivered => {
                *withdrawn = true;
                Some(*lease)
            }
            _ => None,
        }
    }

    /// The sources that it releases.
    pub(crate) fn take_sources(&mut self) -> Vec<SourceSpan> {
        self.parts.iter_mut().filter_map(|part| part.source.take()).collect()
    }

    /// Whether bytes of it may still land in `range` of the peer's block.
    pub(crate) fn can_still_touch(
        &self,
        domain: &DomainShared,
        (block, range): (BlockId, &Range<usize>),
        cut: bool,
    ) -> bool {
        self.pieces.iter().any(|piece| {
            let coming = match piece.state {
                PieceState::Unread => !cut,
                PieceState::Carried(_) => true,
                PieceState::Landed => false,
            };
            let remote = self.parts.get(piece.part).and_then(|part| part.remote.as_ref());
            coming && remote.is_some_and(|remote| remote.overlaps(domain, &piece.range, block, range))
        })
    }
}

impl Remote {
    /// Whether `part` of it overlaps `range` of the peer's block.
    fn overlaps(
        &self,
        domain: &DomainShared,
        part: &Range<usize>,
        block: BlockId,
        range: &Range<usize>,
    ) -> bool {
        domain.place(&self.range, part).is_some_and(|(aimed, place)| {
            aimed == block && place.start < range.end && range.start < place.end
        })
    }
}

/// Bytes that are read in one step and land in one step.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Which part of the write.
    pub(crate) part: usize,
    /// Bytes of that part.
    pub(crate) range: Range<usize>,
    pub(crate) state: PieceState,
}

#[derive(Debug)]
pub(crate) enum PieceState {
    Unread,
    /// Read, not yet written at the target.
    Carried(Vec<u8>),
    Landed,
}

impl Outbound {
    pub(crate) fn next_delivery(&self) -> Option<usize> {
        let index = self.writes.iter().position(|write| !write.delivered)?;
        let write = &self.writes[index];
        (write.refused.is_some() || write.has_landed()).then_some(index)
    }

    pub(crate) fn next_completion(&self, after_reading: bool) -> Option<usize> {
        let index = self.writes.iter().position(|write| !write.completed)?;
        let write = &self.writes[index];
        (write.is_done(after_reading) || write.refused.is_some()).then_some(index)
    }

    /// The `nth` piece that is unread (or carried), over all writes.
    pub(crate) fn nth_piece(&self, mut nth: usize, carried: bool) -> Option<(usize, usize)> {
        for (write, pieces) in self.writes.iter().map(|write| &write.pieces).enumerate() {
            for (piece, found) in pieces.iter().enumerate() {
                let fits = match found.state {
                    PieceState::Unread => !carried,
                    PieceState::Carried(_) => carried,
                    PieceState::Landed => false,
                };
                if fits && nth == 0 {
                    return Some((write, piece));
                }
                nth -= usize::from(fits);
            }
        }
        None
    }

    pub(crate) fn by_number(&mut self, number: u64) -> Option<&mut Write> {
        self.writes.iter_mut().find(|write| write.number == number)
    }

    /// Removes the writes that are completed and delivered.
    pub(crate) fn retire(&mut self) {
        while self.writes.front().is_some_and(|write| write.completed && write.delivered) {
            if let Some(write) = self.writes.pop_front() {
                self.unread -= count(&write, |state| matches!(state, PieceState::Unread));
                self.carried -= count(&write, |state| matches!(state, PieceState::Carried(_)));
            }
        }
    }

    /// Writes that have landed partly.
    pub(crate) fn torn(&self) -> usize {
        let landed = |write: &Write| count(write, |state| matches!(state, PieceState::Landed));
        self.writes.iter().filter(|write| (1..write.pieces.len()).contains(&landed(write))).count()
    }

    /// The peer cannot be reached any more: nothing more is read. Each piece under way is lost if `is_lost` returns true.
    /// Returns how many were.
    pub(crate) fn cut(&mut self, mut is_lost: impl FnMut() -> bool) -> usize {
        self.cut = true;
        let carried = self.carried;
        for piece in self.writes.iter_mut().flat_map(|write| &mut write.pieces) {
            if matches!(piece.state, PieceState::Carried(_)) && is_lost() {
                // It was not read: it never arrives, and later immediates are not delivered.
                piece.state = PieceState::Unread;
                self.carried -= 1;
                self.unread += 1;
            }
        }
        carried - self.carried
    }

    /// Marks every outstanding operation as ended and returns what they release.
    pub(crate) fn end_all(&mut self) -> Ended {
        let mut ended = Ended { read: self.take_read(), ..Ended::default() };
        for write in &mut self.writes {
            ended.leases.extend(write.withdraw());
            if !write.completed {
                write.completed = true;
                ended.sources.extend(write.take_sources());
            }
        }
        self.retire();
        ended
    }

    /// The peer's bytes that reads hold.
    pub(crate) fn take_read(&mut self) -> Vec<Buf> {
        let reads = self.writes.iter_mut().filter_map(|write| match &mut write.kind {
            Kind::Read(read) => Some(read),
            Kind::Write | Kind::Loan { .. } => None,
        });
        reads.flat_map(|read| read.take_sources()).collect()
    }
}

fn count(write: &Write, matching: impl Fn(&PieceState) -> bool) -> usize {
    write.pieces.iter().filter(|piece| matching(&piece.state)).count()
}

/// Cuts the `length` bytes of a part into pieces at random places.
pub(crate) fn cut_into_pieces(part: usize, length: usize, swarm: &Swarm, rng: &mut Rng) -> Vec<Piece> {
    let mut cuts = vec![0, length];
    if swarm.tiny_pieces {
        cuts.extend(1..length.min(swarm.pieces_max));
    } else {
        let inner = rng.below(swarm.pieces_max);
        cuts.extend((0..inner).map(|_| rng.below(length + 1)));
    }
    cuts.sort_unstable();
    cuts.dedup();
    let ranges = cuts.windows(2).map(|ends| ends[0]..ends[1]);
    ranges.map(|range| Piece { part, range, state: PieceState::Unread }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_write_once_and_stay_few() {
        let mut rng = Rng::new(1);
        for length in [0, 1, 2, 63, 64, 10_000] {
            for tiny_pieces in [false, true] {
                let swarm = Swarm { pieces_max: 16, tiny_pieces, ..Swarm::calm() };
                let pieces = cut_into_pieces(0, length, &swarm, &mut rng);
                let end = pieces.iter().fold(0, |end, piece| {
                    assert_eq!(piece.range.start, end);
                    assert!(!piece.range.is_empty());
                    piece.range.end
                });
                assert_eq!(end, length);
                assert!(pieces.len() <= 17);
            }
        }
    }
}

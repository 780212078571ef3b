//! The operations of one side of a queue pair that are in progress: writes, loans and reads.

use std::{collections::VecDeque, ops::Range, time::Duration};

use tensorwire_fabric::{FabricError, Immediate, RemoteRange, SlotKey};
use tensorwire_memory::{BlockId, Buf, RemoteTarget};

use super::{
    domain::DomainShared,
    owners::PostedUnder,
    pieces::{Piece, PieceState},
    read::{Read, is_carried},
};
use crate::ids::{BlockNumber, LeaseId};

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
    /// Bytes of the peer that this side was reading. To be dropped without a lock.
    pub(crate) read: Vec<Buf>,
    /// The leases of loans that the peer never got.
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
    /// The error of a write that was refused before it left; such a write only completes.
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

    /// Whether it may complete. `after_reading`: whether a write completes once its source is read.
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

    /// Loses a loan that is in flight; its lease stays.
    pub(crate) fn lose(&mut self) {
        if let Kind::Loan { withdrawn, .. } = &mut self.kind
            && !self.delivered
        {
            *withdrawn = true;
        }
    }

    /// Withdraws a loan that is in flight: neither the loan nor anything posted after it is delivered.
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

    /// Whether its bytes may still land in `range` of the peer's block.
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

    /// Number of writes of which only a part has landed.
    pub(crate) fn torn(&self) -> usize {
        let landed = |write: &Write| count(write, |state| matches!(state, PieceState::Landed));
        self.writes.iter().filter(|write| (1..write.pieces.len()).contains(&landed(write))).count()
    }

    /// Stops reading, because the peer cannot be reached any more. A piece in flight is lost if `is_lost` returns true.
    /// Returns how many were lost.
    pub(crate) fn cut(&mut self, mut is_lost: impl FnMut() -> bool) -> usize {
        self.cut = true;
        let carried = self.carried;
        for piece in self.writes.iter_mut().flat_map(|write| &mut write.pieces) {
            if matches!(piece.state, PieceState::Carried(_)) && is_lost() {
                // As if it had not been read: it never arrives, and later immediates are not delivered.
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

impl Outbound {
    /// The read that the target executes next, if its next operation is a read.
    pub(crate) fn next_sample(&self) -> Option<usize> {
        let index = self.writes.iter().position(|write| !write.delivered)?;
        let write = self.writes.get(index).filter(|write| !write.completed && write.refused.is_none())?;
        matches!(&write.kind, Kind::Read(read) if !read.is_sampled()).then_some(index)
    }

    /// A read with bytes on their way back.
    pub(crate) fn next_return(&self) -> Option<usize> {
        self.writes.iter().position(|write| {
            let returning = |read: &Read| read.count(is_carried) > 0;
            !write.completed && matches!(&write.kind, Kind::Read(read) if returning(read))
        })
    }

    pub(crate) fn read_mut(&mut self, number: u64) -> Option<&mut Read> {
        match &mut self.by_number(number)?.kind {
            Kind::Read(read) => Some(read),
            _ => None,
        }
    }

    /// Whether bytes of a read may still land in `range` of `block`.
    pub(crate) fn reads_into(&self, block: BlockNumber, range: &Range<usize>) -> bool {
        let open = self.writes.iter().filter(|write| !write.completed && write.refused.is_none());
        open.filter_map(|write| match &write.kind {
            Kind::Read(read) => Some(read),
            _ => None,
        })
        .any(|read| read.lands_in(block, range))
    }
}

fn count(write: &Write, matching: impl Fn(&PieceState) -> bool) -> usize {
    write.pieces.iter().filter(|piece| matching(&piece.state)).count()
}

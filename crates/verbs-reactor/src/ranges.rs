//! Local and remote ranges of an operation, with their checks.

use tensorwire_memory::Buf;

use tensorwire_fabric::{
    FabricError, FabricKind, Immediate, Piece, QueuePairCore, ReadPart, RemoteRange, SlotKey, WorkRequest,
};

use super::{
    doorbell::{Direction, LocalRange},
    pending::{Pending, RequestLimits},
    registrations::Registrations,
};

/// The ranges of an operation. All of them are checked before the first is posted. Most operations have one range and
/// allocate nothing here.
#[derive(Debug)]
pub(super) struct Ranges {
    earlier: Vec<Pending>,
    last: Pending,
}

impl Ranges {
    /// The ranges of `request`, in order. Ranges that are adjacent at the peer are merged if one work request can hold
    /// them. A range longer than a piece is split later, when it is posted.
    pub(super) fn of(
        request: &WorkRequest,
        key: SlotKey,
        aim: &Aim<'_>,
        limits: &RequestLimits,
    ) -> Result<Self, FabricError> {
        let mut reads = request.reads();
        if let Some(first) = reads.next() {
            let mut ranges = Self { earlier: Vec::new(), last: aim.read(key, 0, &first)? };
            for part in reads {
                ranges.push(|before| aim.read(key, before, &part), limits)?;
            }
            return Ok(ranges);
        }
        let mut pieces = request.pieces(u64::MAX);
        let first = pieces.next().ok_or_else(|| request.unsupported(FabricKind::VERBS))?;
        let mut ranges = Self { earlier: Vec::new(), last: aim.write(key, 0, &first)? };
        for piece in pieces {
            ranges.push(|before| aim.write(key, before, &piece), limits)?;
        }
        Ok(ranges)
    }

    /// Adds the range that `next` makes from the number of bytes before it.
    fn push(
        &mut self,
        next: impl FnOnce(u64) -> Result<Pending, FabricError>,
        limits: &RequestLimits,
    ) -> Result<(), FabricError> {
        let next = next(self.last.earlier + self.last.length)?;
        if let Some(next) = self.last.gather(next, limits) {
            self.earlier.push(std::mem::replace(&mut self.last, next));
        }
        Ok(())
    }

    pub(super) fn into_iter(self) -> impl Iterator<Item = Pending> {
        self.earlier.into_iter().chain([self.last])
    }
}

/// The regions of both sides, to find local and remote bytes.
#[derive(Debug)]
pub(super) struct Aim<'link> {
    pub(super) core: &'link QueuePairCore,
    pub(super) domain: &'link Registrations,
}

impl Aim<'_> {
    fn write(&self, key: SlotKey, earlier: u64, piece: &Piece) -> Result<Pending, FabricError> {
        let Piece { local, remote, immediate, is_last } = piece;
        let local = self.source(local)?;
        let pending = self.pending(key, Direction::Write, local, remote.as_ref())?;
        let immediate = immediate.map(|Immediate(value)| value);
        Ok(Pending { immediate, earlier, is_last: *is_last, ..pending })
    }

    fn read(&self, key: SlotKey, earlier: u64, part: &ReadPart<'_>) -> Result<Pending, FabricError> {
        let ReadPart { remote, into, is_last } = *part;
        let mut local = LocalRange { address: 0, length: into.length(), key: 0 };
        if let (Some((block, _)), Some(offset)) = (into.target()?, into.offset()) {
            local.address = block.base().as_ptr() as u64 + offset as u64;
            local.key = self.domain.local_key(&block)?;
        }
        let pending = self.pending(key, Direction::Read, local, Some(remote))?;
        Ok(Pending { earlier, is_last, ..pending })
    }

    fn source(&self, local: &Buf) -> Result<LocalRange, FabricError> {
        let length = local.len() as u64;
        match local.block() {
            Some(block) => Ok(LocalRange {
                address: block.base().as_ptr() as u64 + local.offset() as u64,
                length,
                key: self.domain.local_key(block)?,
            }),
            None if length > 0 => {
                let what = "send memory that is in no pool: copy it into one first";
                Err(FabricError::Unsupported { kind: FabricKind::VERBS, what })
            }
            None => Ok(LocalRange { address: 0, length, key: 0 }),
        }
    }

    /// An operation of this single range.
    fn pending(
        &self,
        key: SlotKey,
        direction: Direction,
        local: LocalRange,
        remote: Option<&RemoteRange>,
    ) -> Result<Pending, FabricError> {
        let region = self.core.remote_regions().aim(local.length, remote)?;
        // `aim` has checked that the range lies inside the region. The base comes from the peer, so the sum may wrap;
        // the device refuses the result then.
        let (there, remote_key) = match (remote, region) {
            (Some(range), Some(region)) => (region.base.wrapping_add(range.offset), region.key),
            _ => (0, 0),
        };
        Ok(Pending {
            key,
            direction,
            local,
            gathered: Vec::new(),
            remote: there,
            remote_key,
            length: local.length,
            immediate: None,
            earlier: 0,
            is_last: true,
            posted: 0,
        })
    }
}

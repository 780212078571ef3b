//! Payloads that the target copies out of the peer's blocks.
//!
//! Pieces of one write that follow each other in the ring, as those of a vectored write do, are one payload for the second core: alone,
//! none of them is long enough to wake it.

use std::{mem, sync::Arc};

use tensorwire_fabric::{LatestTargets, PeerViolation, Purpose};
use tensorwire_memory::{
    RemoteTarget,
    copy::{CopyReason, PAST_CACHES_BYTES, copy_raw, copy_raw_past_caches},
};

use crate::{
    connection::Connection,
    ending::End,
    helper::{HelpedCopy, Segment},
    import::ImportedBlock,
    limits::{BATCH_DESCRIPTORS, GATHER_BYTES, GATHERED_BYTES, HELP_BYTES},
    ring::{Descriptor, Source},
};

/// Payloads that are copied one after another.
#[derive(Debug, Clone, Copy, Default)]
struct Row {
    /// Where the first one is in the peer's memory: block and offset.
    first: Option<(u32, u64)>,
    bytes: usize,
}

impl Row {
    /// Whether the payload at `source` is copied past the caches: because the first one of the row has left them. A peer that comes back
    /// to that one repeats what the caches have, and begins another row.
    fn is_past_caches(&mut self, source: (u32, u64), bytes: usize) -> bool {
        if self.first.is_none_or(|first| first == source) {
            *self = Self { first: Some(source), bytes: 0 };
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.bytes >= PAST_CACHES_BYTES
    }
}

/// A payload of a block of the peer that is being copied by one core.
#[derive(Debug)]
pub(super) struct Payload {
    index: u32,
    offset: u64,
    destination: RemoteTarget,
    reason: CopyReason,
    is_past_caches: bool,
    /// Bytes copied so far.
    done: usize,
}

impl Payload {
    /// The payload that fills `destination` from the peer's block `index`, beginning at `offset`.
    pub(super) fn new((index, offset): (u32, u64), destination: RemoteTarget, reason: CopyReason) -> Self {
        Self { index, offset, destination, reason, is_past_caches: false, done: 0 }
    }

    /// The number of the peer's block.
    pub(super) fn block(&self) -> u32 {
        self.index
    }

    /// Where it is in the peer's memory: block and offset.
    fn place(&self) -> (u32, u64) {
        (self.index, self.offset)
    }

    fn length(&self) -> usize {
        self.destination.length()
    }

    pub(super) fn is_inside(&self, block: &ImportedBlock) -> bool {
        block.covers(self.offset, self.length() as u64)
    }

    pub(super) fn is_done(&self) -> bool {
        self.done >= self.length()
    }

    /// Copies up to `limit` bytes out of its block and returns their number.
    pub(super) fn copy(&mut self, block: &ImportedBlock, limit: usize) -> Result<usize, End> {
        let length = limit.min(self.length() - self.done);
        let resident = block.resident(self.offset + self.done as u64, length);
        let source = resident.map_err(End::unreadable)?.ok_or(PeerViolation::OutOfBounds)?;
        let access = self.destination.access(self.done, length).map_err(|_| PeerViolation::NotGranted)?;
        let copy_chunk = if self.is_past_caches { copy_raw_past_caches } else { copy_raw };
        // SAFETY: `source` is readable for `length` bytes: `resident` promises it. `access` covers `length` bytes of a live
        // grant that no slice of this process aliases, in another mapping. The peer may change the source meanwhile: `finish`
        // of the target checks its `closed` word before the arrival is passed on.
        unsafe { copy_chunk(access.pointer(), source, length, self.reason) };
        self.done += length;
        Ok(length)
    }
}

/// How a payload is copied.
#[derive(Debug)]
pub(super) enum Begun {
    Alone(Payload),
    /// With a second core, and together with the payloads of these descriptors, which follow its own.
    Shared(HelpedCopy, Vec<Descriptor>),
}

/// What is known of the descriptor that is executed.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    pub(super) connection: &'a Connection,
    /// Its position.
    pub(super) head: u64,
    /// Whether the next one is a piece of the same write.
    pub(super) continues: bool,
    pub(super) latest: &'a mut LatestTargets,
    /// The peer's blocks.
    pub(super) blocks: &'a [Arc<ImportedBlock>],
}

/// What the target knows of its copies so far.
#[derive(Debug, Default)]
pub(super) struct Copying {
    row: Row,
    /// Pieces at earlier positions are copied without help, because nobody could help when that was tried.
    alone_until: u64,
}

impl Copying {
    /// There was nothing to copy for a while.
    pub(super) fn pause(&mut self) {
        self.row = Row::default();
    }

    /// Begins to copy `payload`, which is inside of its block.
    pub(super) fn begin(&mut self, mut payload: Payload, turn: &mut Turn<'_>) -> Begun {
        payload.is_past_caches = self.row.is_past_caches(payload.place(), payload.length());
        match self.share(&payload, turn) {
            Some((shared, gathered)) => Begun::Shared(shared, gathered),
            None => Begun::Alone(payload),
        }
    }

    /// Lets a second core copy, too, if that is worth it.
    fn share(&mut self, payload: &Payload, turn: &mut Turn<'_>) -> Option<(HelpedCopy, Vec<Descriptor>)> {
        let Gathered { segments, descriptors, row, is_past_caches } = match payload.length() {
            HELP_BYTES.. => Gathered::alone(payload, self.row, turn)?,
            GATHER_BYTES.. if turn.head >= self.alone_until => self.gather(payload, turn)?,
            _ => return None,
        };
        // Should nobody help now, then not with the rest of these either.
        self.alone_until = turn.head + segments.len() as u64;
        let shared = HelpedCopy::begin(segments, (payload.reason, is_past_caches))?;
        self.row = row;
        Some((shared, descriptors))
    }

    /// `payload` with those that follow it, if they are long together. If one of them cannot be accessed, it is not among them: its own turn
    /// shows why.
    fn gather(&mut self, payload: &Payload, turn: &mut Turn<'_>) -> Option<Gathered> {
        let mut following: Vec<_> = turn.following(payload.length()).collect();
        let bytes = following.iter().map(Descriptor::length).sum::<u64>() + payload.length() as u64;
        if bytes < HELP_BYTES as u64 {
            // No more will come if the write ends with these.
            if following.last().is_some_and(|last| !last.continues) {
                self.alone_until = turn.head + 1 + following.len() as u64;
            }
            return None;
        }
        let mut gathered = Gathered::alone(payload, self.row, turn)?;
        for piece in &following {
            let Some((place, segment)) = turn.segment_of(piece, payload.reason) else { break };
            // Both cores would write these bytes at once. A peer that follows the contract names no byte twice.
            if gathered.segments.iter().any(|earlier| earlier.overlaps(&segment)) {
                break;
            }
            gathered.is_past_caches |= gathered.row.is_past_caches(place, segment.length());
            gathered.segments.push(segment);
        }
        following.truncate(gathered.segments.len() - 1);
        gathered.descriptors = following;
        Some(gathered)
    }
}

/// Payloads for two cores.
#[derive(Debug)]
struct Gathered {
    /// No two of them have a byte of the same destination.
    segments: Vec<Segment>,
    /// Those of all segments but the first.
    descriptors: Vec<Descriptor>,
    /// The row with all segments.
    row: Row,
    is_past_caches: bool,
}

impl Gathered {
    /// Only `payload`, which is in `row`.
    fn alone(payload: &Payload, row: Row, turn: &Turn<'_>) -> Option<Self> {
        let segment = turn.segment(payload.place(), payload.destination.clone())?;
        let (segments, is_past_caches) = (vec![segment], payload.is_past_caches);
        Some(Self { segments, descriptors: Vec::new(), row, is_past_caches })
    }
}

impl Turn<'_> {
    /// The pieces that follow in the same write and are in the ring, as long as they are of a length that is worth it, and together with
    /// `first` bytes no more than [`GATHERED_BYTES`].
    fn following(&self, first: usize) -> impl Iterator<Item = Descriptor> + use<'_> {
        let (connection, mut continues, mut bytes) = (self.connection, self.continues, first as u64);
        (self.head.saturating_add(1)..).take(BATCH_DESCRIPTORS - 1).map_while(move |position| {
            if !mem::replace(&mut continues, false) {
                return None;
            }
            let piece = connection.peer.descriptor(position).ok().flatten()?;
            continues = piece.continues;
            bytes = bytes.saturating_add(piece.length());
            let lengths = GATHER_BYTES as u64..HELP_BYTES as u64;
            let is_long = matches!(piece.source, Source::Block { .. }) && lengths.contains(&piece.length());
            (is_long && bytes <= GATHERED_BYTES).then_some(piece)
        })
    }

    /// The segment of a piece, and where it is in the peer's memory; `None` if it has to be copied alone.
    fn segment_of(&mut self, piece: &Descriptor, counted: CopyReason) -> Option<((u32, u64), Segment)> {
        let (Source::Block { index, offset }, Some((range, key))) = (piece.source, piece.remote) else {
            return None;
        };
        let written = self.latest.write_target(&self.connection.regions, &range, key);
        let (destination, purpose) = written.ok()?;
        let segment = self.segment((index, offset), destination)?;
        (reason(purpose) == counted).then_some(((index, offset), segment))
    }

    /// `None` if the bytes are not known to be resident: the first copy out of a block is made without help, because it records which
    /// pages are.
    fn segment(&self, (index, offset): (u32, u64), destination: RemoteTarget) -> Option<Segment> {
        let mapping = self.blocks.get(index as usize)?.if_resident(offset, destination.length())?;
        // It is resident, so the offset fits the address space.
        Segment::new(mapping.clone(), offset as usize, destination)
    }
}

/// How copies into a region are counted.
pub(super) fn reason(purpose: Purpose) -> CopyReason {
    match purpose {
        Purpose::Payload => CopyReason::ShmPayload,
        Purpose::Messages => CopyReason::ShmMessage,
    }
}

#[cfg(test)]
impl Copying {
    /// How many descriptors are copied with `payload`.
    pub(super) fn gathered(&mut self, payload: &Payload, turn: &mut Turn<'_>) -> usize {
        self.gather(payload, turn).map_or(0, |gathered| gathered.descriptors.len())
    }
}

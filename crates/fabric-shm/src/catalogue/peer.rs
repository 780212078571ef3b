//! The catalogue of a connection's peer.

use std::{
    hint,
    os::fd::BorrowedFd,
    sync::{Arc, OnceLock, atomic::Ordering},
};

use tensorwire_fabric::{
    CELL_CONTENT_BYTES, CELL_WORDS, CellNumber, CellOrigin, CellReading, PeerCatalogue, PeerViolation,
};
use tensorwire_memory::{
    Buf,
    copy::{CopyReason, copy_bytes, copy_raw},
};

use super::{
    BLOCK_AT, CATALOGUE_BYTES, CONTENT_AT, Cells, EMPTY, LENGTH_AT, MAGIC, MAGIC_AT, OFFSET_AT, SEQUENCE_AT,
    VIEWED_BYTES_AT, VIEWS_AT, WORD_BYTES, WORDS_AT, claim_of,
    name::Name,
    view::{Claim, ClaimedView, Claims, ViewCaps},
};
use crate::{
    import::{ImportError, ImportedBlocks, map_sealed},
    ring::PeerPage,
    sequence, words,
};

/// Polls of a cell that is being replaced, before a message asks the peer instead. Replacing takes some 100 ns.
const LOOKS: usize = 32;

/// The catalogue of a connection's peer, mapped read-only. Nothing in it is trusted.
#[derive(Debug)]
pub(crate) struct NeighbourCatalogue {
    pub(super) cells: Cells,
    page: Arc<PeerPage>,
    blocks: Arc<ImportedBlocks>,
    caps: ViewCaps,
    /// Set before the connection is used.
    claims: OnceLock<Arc<Claims>>,
}

impl NeighbourCatalogue {
    /// Checks and maps the catalogue of the peer that writes `page` and sends `blocks`.
    pub(crate) fn import(
        fd: BorrowedFd<'_>,
        page: Arc<PeerPage>,
        blocks: Arc<ImportedBlocks>,
    ) -> Result<Self, ImportError> {
        // Most cells are never read, so only pages that are read become resident.
        let cells = Cells { mapping: map_sealed(fd, CATALOGUE_BYTES as u64)? };
        let load = |at| words::load(cells.header(at));
        if load(MAGIC_AT) != MAGIC {
            return Err(PeerViolation::Malformed.into());
        }
        let caps = ViewCaps { views: load(VIEWS_AT), bytes: load(VIEWED_BYTES_AT) };
        Ok(Self { cells, page, blocks, caps, claims: OnceLock::new() })
    }

    /// Makes views possible.
    pub(crate) fn with_claims(self, claims: Claims) -> Self {
        let _first = self.claims.set(Arc::new(claims));
        self
    }

    /// The views of the peer's memory.
    pub(crate) fn claims(&self) -> Option<&Arc<Claims>> {
        self.claims.get()
    }

    /// The content of the cell; `None` if it was replaced meanwhile.
    #[inline]
    fn read(&self, cell: usize) -> Option<CellReading> {
        let word = |at| self.cells.word(cell, at);
        let edition = sequence::begin(word(SEQUENCE_AT))?;
        let load = |at| word(at).load(Ordering::Relaxed);
        let words: [u64; CELL_WORDS] = std::array::from_fn(|index| load(WORDS_AT + index * WORD_BYTES));
        let length = load(LENGTH_AT);
        let mut content = [0; CELL_CONTENT_BYTES];
        let (mut block, mut offset) = (0, 0);
        if length <= CELL_CONTENT_BYTES as u64 {
            let parts = content.as_chunks_mut().0.iter_mut().take((length as usize).div_ceil(WORD_BYTES));
            for (index, part) in parts.enumerate() {
                *part = load(CONTENT_AT + index * WORD_BYTES).to_le_bytes();
            }
        } else {
            (block, offset) = (load(BLOCK_AT), load(OFFSET_AT));
        }
        let origin = CellOrigin { cell: CellNumber(cell as u32), edition, block, offset };
        let reading = CellReading { words, length, content, origin };
        sequence::is_unchanged(word(SEQUENCE_AT), edition).then_some(reading)
    }

    /// The content of the cell, if it can be used. Waits while it is being replaced.
    fn read_usable(&self, cell: usize) -> Option<CellReading> {
        for _ in 0..LOOKS {
            if let Some(reading) = self.read(cell) {
                let is_usable = reading.length != EMPTY && self.is_here(&reading) && self.page.closed() == 0;
                return is_usable.then_some(reading);
            }
            hint::spin_loop();
        }
        None
    }

    /// Whether the whole content is in the cell, or in memory that is mapped here.
    fn is_here(&self, reading: &CellReading) -> bool {
        let CellReading { length, origin, .. } = reading;
        *length <= CELL_CONTENT_BYTES as u64
            || self.blocks.get(origin.block).is_some_and(|block| {
                // A block that cannot be mapped now is requested by a message, whose answer may be an error with the
                // reason.
                block.covers(origin.offset, *length) && block.mapping().is_ok()
            })
    }

    /// Copies out of the peer's block. `None` if the part exceeds it, or cannot be made resident.
    fn copy_out(&self, origin: &CellOrigin, offset: usize, into: &mut [u8]) -> Option<()> {
        let block = self.blocks.get(origin.block)?;
        let offset = origin.offset.checked_add(offset as u64)?;
        let source = block.resident(offset, into.len()).ok()??;
        // SAFETY: `resident` promises that `source` is readable for as many bytes; `block` keeps them mapped. `into` is
        // exclusive memory of this process in another mapping. The peer may replace the content and reuse its memory
        // meanwhile: the caller uses the copy only if `copy` finds afterwards that the cell is unchanged, which the peer
        // marks first.
        unsafe { copy_raw(into.as_mut_ptr(), source, into.len(), CopyReason::Catalogue) };
        Some(())
    }
}

impl PeerCatalogue for NeighbourCatalogue {
    fn find(&self, name: &str) -> Option<CellReading> {
        self.read_usable(self.cells.look_up(Name::new(name)?).ok()?)
    }

    fn find_nameless(&self, number: u32) -> Option<CellReading> {
        // Edition 0 is a cell that was never written.
        self.read_usable(Cells::nameless(number)?).filter(|reading| reading.origin.edition != 0)
    }

    fn copy(&self, reading: &CellReading, offset: usize, into: &mut [u8]) -> bool {
        let CellReading { length, content, origin, .. } = reading;
        if *length <= CELL_CONTENT_BYTES as u64 {
            let content = content.get(..*length as usize).and_then(|content| content.get(offset..));
            return content.is_some_and(|part| copy_bytes(into, part, CopyReason::Catalogue) == into.len());
        }
        let sequence = self.cells.word(origin.cell.0 as usize, SEQUENCE_AT);
        self.copy_out(origin, offset, into).is_some()
            && sequence::is_unchanged(sequence, origin.edition)
            && self.page.closed() == 0
    }

    fn view(&self, reading: &CellReading) -> Option<Buf> {
        let CellReading { length, origin, .. } = reading;
        let (block, claims) = (self.blocks.get(origin.block)?, self.claims.get()?);
        // The connection's driver makes missing pages resident, piece by piece, so this content is requested by a
        // message.
        let (at, bytes) = (usize::try_from(origin.offset).ok()?, usize::try_from(*length).ok()?);
        if bytes <= CELL_CONTENT_BYTES {
            return None;
        }
        let mapping = block.if_resident(origin.offset, bytes)?.clone();
        let sequence = self.cells.word(origin.cell.0 as usize, SEQUENCE_AT);
        let content = claim_of(origin.cell.0, origin.edition);
        let claim = || Claim::new(claims, self.caps, content, *length);
        let claim = sequence::view(sequence, origin.edition, claim, || self.page.closed() != 0)?;
        let view = ClaimedView { mapping, offset: at, length: bytes, _claim: claim };
        Some(Buf::foreign(Arc::new(view)))
    }
}

//! The catalogue: published contents that neighbours read without a message.
//!
//! Each domain makes one memfd and maps it for writing. Peers map it read-only. It has a header page and a fixed number
//! of cells. A cell belongs to one name for as long as the catalogue lives, so a reader that has found the cell of a name
//! needs no further check of the name. The last cells have no names: their contents are found by number.
//!
//! ```text
//! 0     sequence   odd while the cell is being replaced; each content has an even number of its own
//! 8     length     of the content in bytes, or EMPTY
//! 16    words      six words that the fabric does not interpret
//! 64    block      number of the content's block, if the content is longer than 48 bytes
//! 72    offset     first byte inside that block
//! 80    content    if it is not longer than 48 bytes
//! 128   hash       of the name; 0 while the cell belongs to no name
//! 136   bytes      length of the name
//! 144   name       up to 112 bytes, filled up with zeros
//! ```
//!
//! The header has a magic number and the limits of a peer's views.
//!
//! The hash of a name decides its cell: the one at the hash, or one of the next. A name is written once, its hash last.
//! The module `sequence` has the steps of the two sides on a cell.

mod name;
mod own;
mod peer;
mod view;

pub(super) use own::{OwnCatalogue, Reader};
pub(super) use peer::NeighbourCatalogue;
pub(super) use view::Claims;

use name::Name;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{sys::Mapping, words};

/// Number of cells for names.
const NAMED: usize = 4096;
/// Number of cells without names, behind the others.
const NAMELESS: usize = 256;
const CELLS: usize = NAMED + NAMELESS;
const CELL_BYTES: usize = 256;
const HEADER_BYTES: usize = 4096;
/// Bytes of a catalogue: a header, 1 MiB, and 64 KiB.
const CATALOGUE_BYTES: usize = HEADER_BYTES + CELLS * CELL_BYTES;

/// Number of cells in which a name may be. If all belong to other names, the name is not in the catalogue.
const PROBES: usize = 16;

const MAGIC: u64 = u64::from_le_bytes(*b"TWSCAT\0\x01");
const MAGIC_AT: usize = 0;
/// The number of views that one process may hold, and then their bytes.
const VIEWS_AT: usize = 8;
const VIEWED_BYTES_AT: usize = 16;

const SEQUENCE_AT: usize = 0;
const LENGTH_AT: usize = 8;
const WORDS_AT: usize = 16;
const BLOCK_AT: usize = 64;
const OFFSET_AT: usize = 72;
const CONTENT_AT: usize = 80;
const HASH_AT: usize = 128;
const NAME_LENGTH_AT: usize = 136;
const NAME_AT: usize = 144;
const WORD_BYTES: usize = 8;

/// The length of the content of an empty cell.
const EMPTY: u64 = u64::MAX;

/// A claim of the content `edition` of `cell`. It is not 0, because no edition is 0.
pub(super) fn claim_of(cell: u32, edition: u64) -> u64 {
    edition.wrapping_mul(CELLS as u64).wrapping_add(u64::from(cell) % CELLS as u64)
}

/// A mapping of a catalogue.
#[derive(Debug)]
struct Cells {
    /// Of [`CATALOGUE_BYTES`]: `OwnCatalogue::new` makes it so, and `NeighbourCatalogue::import` checks it.
    mapping: Mapping,
}

impl Cells {
    /// The word at `at`, which is a multiple of 8 below [`CELL_BYTES`], of a cell. `cell` is taken modulo the number of
    /// cells.
    fn word(&self, cell: usize, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(WORD_BYTES) && at < CELL_BYTES);
        self.at(HEADER_BYTES + cell % CELLS * CELL_BYTES + at)
    }

    /// The word at `at` of the header page.
    fn header(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(WORD_BYTES) && at < HEADER_BYTES);
        self.at(at)
    }

    /// The cell of `name`; if it has none, `Err` with the first free cell that it may get.
    fn look_up(&self, name: Name<'_>) -> Result<usize, Option<usize>> {
        for probe in 0..PROBES {
            let cell = (name.hash() as usize).wrapping_add(probe) % NAMED;
            match words::load(self.word(cell, HASH_AT)) {
                0 => return Err(Some(cell)),
                hash if hash == name.hash() && self.is_of(cell, name) => return Ok(cell),
                _ => {}
            }
        }
        Err(None)
    }

    /// Whether the cell belongs to `name`, whose hash it has.
    fn is_of(&self, cell: usize, name: Name<'_>) -> bool {
        let load = |at| self.word(cell, at).load(Ordering::Relaxed);
        let words = (0..).map(|index| load(NAME_AT + index * WORD_BYTES));
        load(NAME_LENGTH_AT) == name.length() && name.words().zip(words).all(|(own, there)| own == there)
    }

    /// The cell of the nameless content `number`.
    fn nameless(number: u32) -> Option<usize> {
        let number = usize::try_from(number).ok().filter(|number| *number < NAMELESS)?;
        Some(NAMED + number)
    }

    fn at(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the callers give a multiple of 8 inside the mapping, which lives as long as `self`. All words are
        // accessed atomically by both processes; readers of a read-only mapping use relaxed loads only, which work on
        // read-only memory.
        unsafe { AtomicU64::from_ptr(self.mapping.base().as_ptr().add(at).cast()) }
    }
}

#[cfg(test)]
mod tests;

//! Catalogues: contents that a peer on the same host reads directly. Most are found by a name. The others have the number of their
//! cell.
//!
//! A fabric that maps memory between processes may have a catalogue for each domain. The contract names two traits, for
//! the side that writes it and for the peers that read it; a fabric without one implements neither.

use std::fmt;

use tensorwire_memory::Buf;

/// Words of a cell that the fabric carries and does not interpret.
pub const CELL_WORDS: usize = 6;

/// The longest content that a cell itself has room for, in bytes.
pub const CELL_CONTENT_BYTES: usize = 48;

/// Number of a cell. A cell belongs to one name, or to none, for as long as the catalogue lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CellNumber(pub u32);

/// The new content of a cell.
#[derive(Debug, Clone)]
pub struct CellContent {
    /// For the readers.
    pub words: [u64; CELL_WORDS],
    /// The bytes. The catalogue holds them until no reader can use them any more.
    pub bytes: Buf,
}

/// The catalogue that this side writes.
pub trait Catalogue: Send + Sync + fmt::Debug + 'static {
    /// The cell of `name`, assigned by the first call; `None` if the name is too long, or there is no room for it.
    fn cell(&self, name: &str) -> Option<CellNumber>;

    /// The cell of the nameless content `number`; `None` if there is no room for so many.
    fn nameless_cell(&self, number: u32) -> Option<CellNumber>;

    /// Replaces the content of `cell`; `None` empties the cell. A content that the peers cannot map empties it, too. A
    /// reader that is copying the previous content sees that it was replaced. A content with views is held until the
    /// last view is dropped.
    ///
    /// Returns memory that no reader can use any more. The caller drops it without a lock, because that may wake tasks.
    #[must_use = "memory of pools is dropped without a lock"]
    fn write(&self, cell: CellNumber, content: Option<CellContent>) -> Vec<Buf>;
}

/// The catalogue of one connection's peer. Nothing in it is trusted.
pub trait PeerCatalogue: Send + Sync + fmt::Debug + 'static {
    /// The present content of the cell of `name`. `None` if the name has no cell, the cell is empty or is being
    /// replaced, its content is not mapped here, or the connection is over: then the caller asks the peer.
    fn find(&self, name: &str) -> Option<CellReading>;

    /// As [`find`](Self::find), of the nameless content `number`, which may be any number.
    fn find_nameless(&self, number: u32) -> Option<CellReading>;

    /// Fills `into` with the content from `offset` on. That range must lie inside the content. True if the content had
    /// not been replaced, and the peer had not closed the connection, when all bytes were copied. After the last part
    /// of a content, true means that all parts are of the same content.
    fn copy(&self, reading: &CellReading, offset: usize, into: &mut [u8]) -> bool;

    /// A view of the content, without a copy. The peer does not reuse its memory while the view exists, even after the
    /// connection has ended. `None` if the content was replaced, lies in the cell itself, or would exceed the limit of
    /// views: then the caller asks the peer, or copies.
    fn view(&self, reading: &CellReading) -> Option<Buf>;
}

/// The content of a cell at one moment.
#[derive(Debug, Clone, Copy)]
pub struct CellReading {
    /// The value of [`CellContent::words`].
    pub words: [u64; CELL_WORDS],
    /// Length of the content in bytes.
    pub length: u64,
    /// The content, if it fits.
    pub content: [u8; CELL_CONTENT_BYTES],
    /// Identifies the content and its cell. For the fabric.
    pub origin: CellOrigin,
}

/// The edition of a cell's content, and where the bytes are. For the fabric.
#[derive(Debug, Clone, Copy)]
pub struct CellOrigin {
    /// The cell.
    pub cell: CellNumber,
    /// A number that differs from those of the previous and of the next content.
    pub edition: u64,
    /// The peer's number of the block.
    pub block: u64,
    /// First byte inside the block.
    pub offset: u64,
}

//! Pages of arenas that answer a peer's request.

use std::sync::Arc;

use tensorwire_memory::Buf;
use tensorwire_protocol::{DataType, Metadata, Shape, pages::PageMoves};

use crate::{
    peer_memory::arena::{Sending, Token},
    values::{arenas::PendingWrite, tensor::Tensor},
};

/// Pages that are to be sent.
#[derive(Debug)]
pub(crate) struct SentPages {
    /// What is sent, without its bytes.
    pub(super) described: Tensor,
    /// Each with its place in the receiver's arena.
    pub(super) pages: Vec<(Buf, u64)>,
    /// Held until the pages were written, and dropped after them.
    _held: Held,
}

/// What must not end before pages were written.
#[derive(Debug)]
pub(super) enum Held {
    Exposed { _sending: Sending, _token: Token },
    Write { _write: Arc<PendingWrite> },
}

/// The metadata of so many pages together.
pub(super) fn of_pages(count: usize, page_bytes: usize) -> Metadata {
    let bytes = (count as u64).saturating_mul(page_bytes as u64);
    let shape = Shape::new([bytes]).unwrap_or_default();
    Metadata::new(DataType::U8, shape).unwrap_or_else(|| Metadata::dead(DataType::U8, Shape::default()))
}

impl SentPages {
    /// `pages`, each to the place that its move names.
    pub(super) fn new(pages: Vec<Buf>, moves: &PageMoves, held: Held) -> Self {
        let page_bytes = pages.first().map_or(0, |page| page.len());
        let described = of_pages(pages.len(), page_bytes);
        let places = moves.as_slice().iter().map(|page| u64::from(page.to) * page_bytes as u64);
        let pages = pages.into_iter().zip(places).collect();
        Self { described: Tensor::received(described, Buf::empty(), None), pages, _held: held }
    }
}

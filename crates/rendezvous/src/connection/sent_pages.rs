//! Pages of arenas that answer a peer's request.

use std::sync::Weak;

use tensorwire_memory::Buf;
use tensorwire_protocol::{Code, DataType, Metadata, Shape, Status, pages::PageMoves};

use crate::{
    connection::DataConnection,
    peer_memory::arena::SharedPages,
    values::{arenas::Outgoing, tensor::Tensor},
};

/// Pages that answer a request.
#[derive(Debug)]
pub(crate) struct AnswerPages {
    /// What is sent, without its bytes.
    pub(super) described: Tensor,
    /// Each with its place in the receiver's arena.
    pub(super) pages: Vec<(Buf, u64)>,
    /// `None` once it is dropped.
    held: Option<Held>,
    connection: Weak<DataConnection>,
}

/// What must not end before the pages were written.
#[derive(Debug)]
pub(crate) enum Held {
    Exposed { _pages: SharedPages },
    Write { _pages: Outgoing },
}

/// The metadata of so many pages together.
pub(super) fn of_pages(count: usize, page_bytes: usize) -> Metadata {
    let bytes = (count as u64).saturating_mul(page_bytes as u64);
    let shape = Shape::new([bytes]).unwrap_or_default();
    Metadata::new(DataType::U8, shape).unwrap_or_else(|| Metadata::dead(DataType::U8, Shape::default()))
}

impl AnswerPages {
    /// `pages`, each to the place that its move names.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a place that no memory has.
    pub(super) fn new(
        pages: Vec<Buf>,
        moves: &PageMoves,
        (held, connection): (Held, Weak<DataConnection>),
    ) -> Result<Self, Status> {
        let page_bytes = pages.first().map_or(0, |page| page.len());
        let described = of_pages(pages.len(), page_bytes);
        let place = |to: u32| {
            let outside = || {
                Status::new(Code::InvalidArgument, format!("no memory has a page {to} of {page_bytes} bytes"))
            };
            u64::from(to).checked_mul(page_bytes as u64).ok_or_else(outside)
        };
        let places = moves.as_slice().iter().map(|page| place(page.to)).collect::<Result<Vec<_>, _>>()?;
        let pages = pages.into_iter().zip(places).collect();
        let described = Tensor::received(described, Buf::empty(), None);
        Ok(Self { described, pages, held: Some(held), connection })
    }
}

impl Drop for AnswerPages {
    fn drop(&mut self) {
        self.pages.clear();
        // A write that a lost connection has under way ends when the queue pair is closed.
        if let (Some(connection), Some(held)) = (self.connection.upgrade(), self.held.take()) {
            connection.keep_until_closed(held);
        }
    }
}

//! Pages of arenas, and tensors that travel together, which answer a peer's request.

use std::sync::Weak;

use tensorwire_memory::Buf;
use tensorwire_protocol::{Code, Metadata, Status, pages::PageMoves};

use crate::{
    connection::{DataConnection, call_turns::CallPermits},
    values::{arenas::Outgoing, sets::bytes_of, tensor::Tensor},
};

/// Pages, or tensors that travel together, which answer a request.
#[derive(Debug)]
pub(crate) struct AnswerPages {
    /// What is sent, without its bytes.
    pub(super) described: Tensor,
    /// Each with its place in the receiver's memory.
    pub(super) pages: Vec<(Buf, u64)>,
    /// What must not end before they were written. `None` once this is dropped.
    held: Option<Outgoing>,
    /// What a call uses whose answer this is.
    _permits: Option<CallPermits>,
    connection: Weak<DataConnection>,
}

impl AnswerPages {
    /// Those of `held` in `pages`, each to the place that its move names.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a place that no memory has.
    pub(super) fn new(
        pages: Vec<Buf>,
        moves: &PageMoves,
        (held, connection): (Outgoing, Weak<DataConnection>),
    ) -> Result<Self, Status> {
        let page_bytes = pages.first().map_or(0, |page| page.len());
        let place = |to: u32| {
            let outside = || {
                Status::new(Code::InvalidArgument, format!("no memory has a page {to} of {page_bytes} bytes"))
            };
            u64::from(to).checked_mul(page_bytes as u64).ok_or_else(outside)
        };
        let places = moves.as_slice().iter().map(|page| place(page.to)).collect::<Result<Vec<_>, _>>()?;
        let bytes = pages.iter().map(|page| page.len() as u64).sum();
        let pages = pages.into_iter().zip(places).collect();
        let described = Tensor::received(bytes_of(bytes), Buf::empty(), None);
        Ok(Self { described, pages, held: Some(held), _permits: None, connection })
    }
}

impl AnswerPages {
    /// Tensors that travel together, with the metadata of their content. The fabric holds their memory while it writes them.
    pub(super) fn of_list(pieces: Vec<(Buf, u64)>, metadata: Metadata, permits: Option<CallPermits>) -> Self {
        let described = Tensor::received(metadata, Buf::empty(), None);
        Self { described, pages: pieces, held: None, _permits: permits, connection: Weak::new() }
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

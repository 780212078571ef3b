//! The request whose content goes past the table to its task.

use std::sync::Arc;

use super::{Arrived, RequestIndex, RequestPhase, Requests};
use crate::{Metadata, reply_cell::ReplyCell};

/// The cell, and the request that has it.
#[derive(Debug)]
pub(super) struct Direct {
    cell: Arc<ReplyCell>,
    /// The request, until its content is in the cell or the table lets go of it, and the metadata that its task knows. Its
    /// task looks into the cell so long.
    assigned: Option<(RequestIndex, Arc<[Metadata]>)>,
}

impl Direct {
    pub(super) fn new() -> Self {
        Self { cell: Arc::new(ReplyCell::new()), assigned: None }
    }

    /// The table lets go of request `index`.
    pub(super) fn forget(&mut self, index: RequestIndex) {
        self.assigned.take_if(|(assigned, _)| *assigned == index);
    }
}

impl<L> Requests<L> {
    /// Where the content of the request that has the cell comes.
    pub(crate) fn cell(&self) -> Arc<ReplyCell> {
        self.direct.cell.clone()
    }

    /// Has the content of a published value, which comes inside a message, put into the cell, so that the task of request
    /// `index` takes it without the lock. Returns false if the cell has another content or request.
    pub(crate) fn answer_in_cell(&mut self, index: RequestIndex, known: &Arc<[Metadata]>) -> bool {
        let Direct { cell, assigned } = &mut self.direct;
        let is_free = assigned.is_none() && cell.is_empty();
        if is_free {
            *assigned = Some((index, known.clone()));
        }
        is_free
    }

    /// Puts the content of an open request into the cell, if that is the request's, and lets go of the request: its task
    /// has no other use for the entry.
    pub(super) fn put_in_cell(
        &mut self,
        index: RequestIndex,
        metadata: &Metadata,
        content: &[u8],
    ) -> Option<Arrived<L>> {
        let (_, known) = self.direct.assigned.as_ref().filter(|(assigned, _)| *assigned == index)?;
        let which = known.iter().position(|known| known == metadata)?;
        if content.is_empty() || !self.direct.cell.put(which, content) {
            return None;
        }
        self.direct.assigned = None;
        let entry = self.entry(index)?;
        (entry.phase, entry.is_awaited) = (RequestPhase::Answered, false);
        let arrived = Arrived { wake: entry.waker.take(), ..Arrived::HANDLED };
        self.landed += 1;
        self.free_finished(index.slot());
        Some(arrived)
    }
}

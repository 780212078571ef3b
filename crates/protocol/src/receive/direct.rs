//! A content that comes past the table of requests.

use super::Request;
use crate::{
    Channel, Metadata,
    requests::{Check, Content, Landed, Reply},
};

impl<C: Channel> Request<'_, C> {
    /// The content, if the cell is this request's and it has come; with one of the metadata that were `known` as it was asked
    /// for. The table has let go of the request then.
    pub(super) fn take_from_cell(&mut self, known: &[Metadata]) -> Option<Reply<C::Lent>> {
        if !self.is_in_cell {
            return None;
        }
        let content = self.connection.reply_cell().take()?;
        (self.is_in_cell, self.is_released) = (false, true);
        let metadata = known.get(content.which)?.clone();
        // Published values have no order.
        let number = 0;
        let content = Content::Eager(content.bytes().into());
        Some(Reply::Content(Landed { number, metadata, content, check: Check::None }))
    }
}

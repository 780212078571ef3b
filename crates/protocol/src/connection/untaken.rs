//! Notes that have come, for sides that look for notes elsewhere, too.

use std::task::{Context, Poll};

use super::Connection;
use crate::{Channel, ChannelError, EagerContent};

impl<C: Channel> Connection<C> {
    /// The next note of the peer in a lane, if it has come by message. `has_earlier` says whether one before it lies elsewhere: then
    /// it is `None`. That is asked only when a message has come, also one of no bytes. Looks for no arrivals. Without a note, the task
    /// of `context`, if there is one, is woken by the next.
    ///
    /// # Errors
    /// The connection is over, and all notes were taken.
    pub fn poll_untaken(
        &self,
        channel: u64,
        lane: u16,
        context: Option<&Context<'_>>,
        has_earlier: impl FnOnce() -> bool,
    ) -> Poll<Result<Option<EagerContent>, ChannelError>> {
        let mut state = self.lock();
        if state.notes.has_news(channel, lane) {
            if has_earlier() {
                return Poll::Ready(Ok(None));
            }
            if let Some(note) = state.notes.take(channel, lane) {
                return Poll::Ready(Ok(Some(note)));
            }
        }
        let replaced = context.and_then(|context| state.notes.wait(channel, lane, context.waker()));
        let failure = state.failure();
        drop(state);
        drop(replaced);
        failure.map_or_else(|error| Poll::Ready(Err(error)), |()| Poll::Pending)
    }
}

//! Notes: short messages that no request asks for, for two sides each of which knows what the other sends next, as the ranks of a
//! group do. A note takes one message, where a value of a step takes a request and an answer.

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use super::{Connection, send};
use crate::{
    Channel, ChannelError, EagerContent, Message, Note,
    limits::{NOTE_BYTES_MAX, NOTE_LANES_MAX},
};

impl<C: Channel> Connection<C> {
    /// Takes in the peer's notes of `channel` from now on; earlier ones were ignored. It has `lanes` lanes, at most
    /// [`NOTE_LANES_MAX`]. False if it is open already.
    pub fn open_notes(&self, channel: u64, lanes: u16) -> bool {
        self.lock().notes.open(channel, lanes.min(NOTE_LANES_MAX))
    }

    /// Ignores the peer's notes of `channel` from now on, and drops those that were not taken.
    pub fn close_notes(&self, channel: u64) {
        let untaken = self.lock().notes.close(channel);
        drop(untaken);
    }

    /// Sends a note of at most [`NOTE_BYTES_MAX`] bytes now, if no message waits, and credits and ring space suffice. Returns
    /// `None` if it is not sent.
    ///
    /// # Errors
    /// The connection is over.
    pub fn send_note_now(&self, note: &Message) -> Option<Result<(), ChannelError>> {
        let sent = self.try_change(|state, after| state.post_now(after, |state| state.post(note)));
        sent.map(|is_sent| is_sent.then_some(())).transpose()
    }

    /// Sends a note when it is its turn.
    ///
    /// # Errors
    /// The connection is over.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is ready, the note may have been sent, because any task may post a message that waits for
    /// room.
    pub async fn send_note(&self, note: Message) -> Result<(), ChannelError> {
        send(self, note).await
    }

    /// The next note of the peer in a lane. One task at a time.
    ///
    /// # Errors
    /// The connection is over, and all notes were taken.
    ///
    /// # Cancel safety
    /// Cancel-safe: a note is taken by the poll that returns it.
    pub async fn next_note(&self, channel: u64, lane: u16) -> Result<EagerContent, ChannelError> {
        poll_fn(|context| self.poll_note(channel, lane, context)).await
    }

    /// As [`next_note`](Self::next_note).
    pub fn poll_note(
        &self,
        channel: u64,
        lane: u16,
        context: &Context<'_>,
    ) -> Poll<Result<EagerContent, ChannelError>> {
        let mut may_find = true;
        loop {
            let mut state = self.lock();
            if let Some(note) = state.notes.take(channel, lane) {
                return Poll::Ready(Ok(note));
            }
            if may_find && self.channel.may_help() {
                drop(state);
                may_find = self.channel.help();
                continue;
            }
            // The waker is stored under the lock under which notes arrive.
            let replaced = state.notes.wait(channel, lane, context.waker());
            let failure = state.failure();
            drop(state);
            drop(replaced);
            return failure.map_or_else(|error| Poll::Ready(Err(error)), |()| Poll::Pending);
        }
    }

    /// The next note of the peer in a lane, if it has come by message. Returns `None` if `has_earlier` reports that an earlier note
    /// of the lane waits in another place. `has_earlier` is called only if a message has come, even one of no bytes. Does not poll
    /// the fabric for arrivals. Without a note, the next one wakes the task of `context`, if `context` is given.
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

impl Note {
    /// A message of `parts`, one behind the other. `None` if it is too long.
    pub fn of(channel: u64, lane: u16, parts: &[&[u8]]) -> Option<Message> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length > NOTE_BYTES_MAX {
            return None;
        }
        let mut bytes = EagerContent::with_capacity(length);
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        Some(Message::Note(Self { channel, lane, bytes }))
    }
}

//! [`Notes`]: short messages to and from one peer that nobody asks for.

use std::{
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_protocol::{
    ChannelError, EagerContent, Message, Note,
    limits::{NOTE_BYTES_MAX, NOTE_EVERY_LANE, NOTE_LANES_MAX},
};

use crate::{
    error::{Transfer, WorkerError},
    link::connection::DataConnection,
    worker::peer::Peer,
};

/// A channel of short messages between this worker and one peer, over the connection that they have when it is opened. A note takes
/// one message, where a value of a step takes a request and an answer.
///
/// [`Peer::notes`] opens it. Both sides open it, with the same number, before either sends: a note of a channel that is not open is
/// ignored. Notes are for sides that know how far the other one is, as the ranks of a group do: a lane holds
/// [`Notes::UNTAKEN_MAX`] that were not taken, and a peer that sends more loses its connection. Whatever may be longer,
/// or come at any time, is a value of a step.
///
/// Dropping it closes the channel. It ends with its connection.
pub struct Notes {
    peer: Peer,
    connection: Arc<DataConnection>,
    channel: u64,
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notes").field("peer", &self.peer.name()).field("channel", &self.channel).finish()
    }
}

impl Peer {
    /// Opens channel `channel` with this peer, of `lanes` lanes. Connects if there is no connection.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if the channel is open on this side already, there are no or too many lanes, or the peer is this
    /// worker itself; others as from [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// Cancel-safe: an attempt to connect that is under way continues, and no channel is open.
    pub async fn notes(&self, channel: u64, lanes: u16) -> Result<Notes, WorkerError> {
        let refused = |field, value: String, remedy: String| WorkerError::Config { field, value, remedy };
        if lanes == 0 || lanes > NOTE_LANES_MAX {
            return Err(refused("lanes", lanes.to_string(), format!("give 1 to {NOTE_LANES_MAX}")));
        }
        if self.name() == self.worker.name() {
            let remedy = "notes go to another worker: keep what is for this one";
            return Err(refused("peer", self.name().to_owned(), remedy.to_owned()));
        }
        let connection = self.worker.node.connected(&self.known).await?;
        if !connection.protocol.open_notes(channel, lanes) {
            let remedy =
                "the channel is open with this peer already: take another number, or drop its `Notes`";
            return Err(refused("channel", channel.to_string(), remedy.to_owned()));
        }
        Ok(Notes { peer: self.clone(), connection, channel })
    }
}

impl Notes {
    /// Longest note, in bytes.
    pub const BYTES_MAX: usize = NOTE_BYTES_MAX;
    /// Most lanes of a channel.
    pub const LANES_MAX: u16 = NOTE_LANES_MAX;
    /// A note that is sent in this lane comes in every lane.
    pub const EVERY_LANE: u16 = NOTE_EVERY_LANE;
    /// Most notes of a lane that its receiver has not taken.
    pub const UNTAKEN_MAX: usize = tensorwire_protocol::limits::NOTES_UNTAKEN_MAX;

    /// Sends a note of all `parts`, one behind the other, in `lane`. Ready at once, but for a connection that has no room for a
    /// message.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if it is longer than [`BYTES_MAX`](Self::BYTES_MAX); [`WorkerError::PeerLost`] once the connection is
    /// over. That a note was sent does not mean that the peer has it.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is ready, the note may have been sent: a message that waits for room is posted by whoever finds
    /// it.
    pub async fn send(&self, lane: u16, parts: &[&[u8]]) -> Result<(), WorkerError> {
        let note = self.note(lane, parts)?;
        let protocol = &self.connection.protocol;
        let sent = match protocol.send_note_now(&note) {
            Some(sent) => sent,
            None => protocol.send_note(note).await,
        };
        sent.map_err(|error| self.lost(lane, error))
    }

    fn note(&self, lane: u16, parts: &[&[u8]]) -> Result<Message, WorkerError> {
        Note::of(self.channel, lane, parts).ok_or_else(|| {
            let value = parts.iter().map(|part| part.len()).sum::<usize>().to_string();
            let remedy = format!("a note has at most {NOTE_BYTES_MAX} bytes: send longer values in a step");
            WorkerError::Config { field: "note", value, remedy }
        })
    }

    /// The peer's next note in `lane`, after those that were taken. One task at a time awaits a lane.
    ///
    /// # Errors
    /// [`WorkerError::PeerLost`] once the connection is over and all notes were taken.
    ///
    /// # Cancel safety
    /// Cancel-safe: a note is taken by the poll that returns it.
    pub async fn recv(&self, lane: u16) -> Result<EagerContent, WorkerError> {
        poll_fn(|context| self.poll_recv(lane, context)).await
    }

    /// As [`recv`](Self::recv), for futures that are written by hand.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn poll_recv(&self, lane: u16, context: &Context<'_>) -> Poll<Result<EagerContent, WorkerError>> {
        let polled = self.connection.protocol.poll_note(self.channel, lane, context);
        polled.map_err(|error| self.lost(lane, error))
    }

    fn lost(&self, lane: u16, error: ChannelError) -> WorkerError {
        let key = format!("note in lane {lane} of channel {}", self.channel);
        let transfer = Transfer { peer: self.peer.name(), key: &key, step: None };
        self.connection.lost_error(transfer.name(), error.0)
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        self.connection.protocol.close_notes(self.channel);
    }
}

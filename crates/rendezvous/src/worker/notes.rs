//! [`Notes`]: short messages to and from one peer that no request asks for.

use std::{
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_protocol::{
    ChannelError, EagerContent, Note, NoteChannel,
    limits::{NOTE_BYTES_MAX, NOTE_EVERY_LANE, NOTE_LANES_MAX},
};

use crate::{
    connection::{DataConnection, fabric_channel::FabricChannel},
    error::{Transfer, WorkerError},
    worker::peer::Peer,
};

/// A channel of short messages between this worker and one peer, over the connection that they have when it is opened. A note takes
/// one message, where a value of a step takes a request and an answer. Between two workers of one host, notes in the first 16 lanes
/// take none: they travel in the connection's mailbox, in shared memory.
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
    number: u64,
    channel: NoteChannel<FabricChannel>,
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notes").field("peer", &self.peer.name()).field("channel", &self.number).finish()
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
    #[doc(hidden)]
    pub async fn notes(&self, channel: u64, lanes: u16) -> Result<Notes, WorkerError> {
        let refused = |field, value: String, remedy: String| WorkerError::Config { field, value, remedy };
        if lanes == 0 || lanes > NOTE_LANES_MAX {
            return Err(refused("lanes", lanes.to_string(), format!("give 1 to {NOTE_LANES_MAX}")));
        }
        if self.name() == self.worker.name() {
            let remedy = "notes go to another worker: keep what is for this one";
            return Err(refused("peer", self.name().to_owned(), remedy.to_owned()));
        }
        self.worker.check_runs()?;
        loop {
            let connection = self.worker.node.connected(&self.known).await?;
            let Some(opened) = connection.protocol.open_notes(channel, lanes) else {
                let remedy =
                    "the channel is open with this peer already: take another number, or drop its `Notes`";
                return Err(refused("channel", channel.to_string(), remedy.to_owned()));
            };
            // A connection with an open channel is not retired.
            if connection.is_usable() || connection.is_over() {
                return Ok(Notes { peer: self.clone(), connection, number: channel, channel: opened });
            }
        }
    }
}

impl Notes {
    /// Longest note, in bytes.
    pub const BYTES_MAX: usize = NOTE_BYTES_MAX;
    /// Most lanes of a channel.
    pub const LANES_MAX: u16 = NOTE_LANES_MAX;
    /// A note that is sent in this lane comes in every lane.
    pub const EVERY_LANE: u16 = NOTE_EVERY_LANE;
    /// Most notes of a lane that have come and that its receiver has not taken.
    pub const UNTAKEN_MAX: usize = tensorwire_protocol::limits::NOTES_UNTAKEN_MAX;

    /// Sends a note of all `parts`, one behind the other, in `lane`. Ready at once, but for a connection that has no room for a
    /// message.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if it has no bytes, or more than [`BYTES_MAX`](Self::BYTES_MAX); [`WorkerError::PeerLost`] once the
    /// connection is over. That a note was sent does not mean that the peer has it.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is ready, the note may have been sent: another task may post a message that waits for room.
    pub async fn send(&self, lane: u16, parts: &[&[u8]]) -> Result<(), WorkerError> {
        if let Some(_wakes) = self.put(lane, parts) {
            return Ok(());
        }
        let note = self.note(lane, parts)?;
        self.channel.send(note).await.map_err(|error| self.lost(lane, error))
    }

    /// Sends a note as [`send`](Self::send) does, if it takes no message. `None` if it was not sent.
    pub fn put(&self, lane: u16, parts: &[&[u8]]) -> Option<PutNote<'_>> {
        let put = self.channel.put(lane, parts)?;
        Some(PutNote { put, connection: &self.connection })
    }

    /// Whether the runtime's other tasks should have a turn before the next note is looked for, because many notes were found without a
    /// wait since this was last true. The caller gives them one: this is false when it is asked again.
    pub fn other_tasks_are_due(&self) -> bool {
        self.connection.queue_pair.other_tasks_are_due()
    }

    /// The peer's next note in `lane`, after those that were taken. One task at a time awaits a lane.
    ///
    /// # Errors
    /// [`WorkerError::PeerLost`] once the connection is over and all notes were taken.
    ///
    /// # Cancel safety
    /// Cancel-safe: a note is taken by the poll that returns it.
    pub async fn recv(&self, lane: u16) -> Result<EagerContent, WorkerError> {
        poll_fn(|context| self.poll_recv(lane, context, true)).await
    }

    /// As [`recv`](Self::recv), for a task that awaits something else, too: polling it never looks for the note, which would hold up
    /// the rest.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv).
    pub async fn recv_beside(&self, lane: u16) -> Result<EagerContent, WorkerError> {
        poll_fn(|context| self.poll_recv(lane, context, false)).await
    }

    /// The peer's next note in `lane`, if it has come. The peer does not learn that this side waits and sends no wake-up, so the caller
    /// polls again soon, or calls [`recv`](Self::recv).
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn next(&self, lane: u16) -> Result<Option<EagerContent>, WorkerError> {
        self.channel.next(lane).map_err(|error| self.lost(lane, error))
    }

    /// Whether tasks may poll the connection.
    pub fn polls(&self) -> bool {
        self.connection.queue_pair.polls()
    }

    /// Polls the connection once and does the work that it finds. Returns whether it found any.
    pub fn poll_once(&self) -> bool {
        self.connection.queue_pair.poll_once()
    }

    fn poll_recv(
        &self,
        lane: u16,
        context: &Context<'_>,
        may_look: bool,
    ) -> Poll<Result<EagerContent, WorkerError>> {
        // What is left after the end is bounded.
        if !self.connection.is_over() && self.other_tasks_are_due() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.channel.poll_next(lane, context, may_look).map_err(|error| self.lost(lane, error))
    }

    fn note(&self, lane: u16, parts: &[&[u8]]) -> Result<Note, WorkerError> {
        self.channel.note(lane, parts).ok_or_else(|| {
            let value = parts.iter().map(|part| part.len()).sum::<usize>().to_string();
            let remedy = format!("a note has 1 to {NOTE_BYTES_MAX} bytes: send longer values in a step");
            WorkerError::Config { field: "note", value, remedy }
        })
    }

    fn lost(&self, lane: u16, error: ChannelError) -> WorkerError {
        let key = format!("note in lane {lane} of channel {}", self.number);
        let transfer = Transfer { peer: self.peer.name(), key: &key, step: None };
        self.connection.lost_error(transfer.name(), error.0)
    }
}

/// A note that was [put](Notes::put). The peer may sleep until this is dropped.
#[derive(Debug)]
#[must_use = "the peer may sleep until it is dropped"]
pub struct PutNote<'notes> {
    put: tensorwire_protocol::PutNote<'notes, FabricChannel>,
    connection: &'notes DataConnection,
}

impl PutNote<'_> {
    /// Whether the peer's next note has come without a message, too.
    pub fn has_next(&self) -> bool {
        self.put.has_next()
    }

    /// Whether the peer seems to sleep. Then nothing comes before this is dropped.
    pub fn seems_asleep(&self) -> bool {
        self.put.seems_asleep()
    }

    /// Polls for a few microseconds, if that pays off now, until `found` is true. Returns whether it is.
    pub fn look_for(&self, found: impl FnMut() -> bool) -> bool {
        self.connection.queue_pair.look_for(found)
    }
}

//! [`Notes`]: short messages to and from one peer that nobody asks for.

#[cfg(test)]
mod tests;

use std::{
    fmt,
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use tensorwire_protocol::{
    ChannelError, EagerContent, Message, Note,
    limits::{NOTE_BYTES_MAX, NOTE_EVERY_LANE, NOTE_LANES_MAX},
};

pub use crate::connection::fast_boxes::BoxedNote;
use crate::{
    connection::{
        DataConnection,
        fast_boxes::{self, ChannelBoxes, Exchange},
    },
    error::{Transfer, WorkerError},
    worker::peer::Peer,
};

/// A channel of short messages between this worker and one peer, over the connection that they have when it is opened. A note takes
/// one message, where a value of a step takes a request and an answer. Between two workers of one host, notes of up to 112 bytes in
/// the first 16 lanes take none: the receiver finds them in shared memory. That holds for seven channels of a connection at a time,
/// and not for a channel that was open before.
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
    /// Where short notes travel between workers of one host.
    boxes: Option<ChannelBoxes>,
    /// Of each lane that has boxes.
    wakes: Arc<[WakesInLine; fast_boxes::LANES]>,
}

/// Wake-ups of a lane that have no room yet: one task sends a message for all of them. So a peer that takes no messages, and says
/// that it sleeps, costs no more than that.
#[derive(Debug, Default)]
struct WakesInLine(AtomicU64);

impl WakesInLine {
    /// Whether the caller must see to it that they are sent.
    fn add(&self) -> bool {
        self.0.fetch_add(1, Ordering::AcqRel) == 0
    }

    /// How many the next message is for.
    fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// A message was sent for `count` of them. Whether others came meanwhile, which it may have been too early for.
    fn are_left_after(&self, count: u64) -> bool {
        self.0.fetch_sub(count, Ordering::AcqRel) > count
    }
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
        let connection = self.worker.node.connected(&self.known).await?;
        if !connection.protocol.open_notes(channel, lanes) {
            let remedy =
                "the channel is open with this peer already: take another number, or drop its `Notes`";
            return Err(refused("channel", channel.to_string(), remedy.to_owned()));
        }
        let boxes = connection.fast_boxes.as_ref().and_then(|boxes| boxes.open(channel, lanes));
        Ok(Notes { peer: self.clone(), connection, channel, boxes, wakes: Arc::default() })
    }
}

impl Notes {
    /// Longest note, in bytes.
    pub const BYTES_MAX: usize = NOTE_BYTES_MAX;
    /// Most lanes of a channel.
    pub const LANES_MAX: u16 = NOTE_LANES_MAX;
    /// A note that is sent in this lane comes in every lane.
    pub const EVERY_LANE: u16 = NOTE_EVERY_LANE;
    /// Most notes of a lane that have come by message and that its receiver has not taken.
    pub const UNTAKEN_MAX: usize = tensorwire_protocol::limits::NOTES_UNTAKEN_MAX;

    /// Sends a note of all `parts`, one behind the other, in `lane`. Ready at once, but for a connection that has no room for a
    /// message.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if it has no bytes, or more than [`BYTES_MAX`](Self::BYTES_MAX); [`WorkerError::PeerLost`] once the
    /// connection is over. That a note was sent does not mean that the peer has it.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is ready, the note may have been sent: a message that waits for room is posted by whoever finds
    /// it.
    pub async fn send(&self, lane: u16, parts: &[&[u8]]) -> Result<(), WorkerError> {
        Self::check_is_some(parts)?;
        if let Some(mut note) = BoxedNote::of(parts)
            && let Some(mut exchange) = self.exchange(lane)
        {
            exchange.put(&mut note);
            return Ok(());
        }
        let note = self.message(lane, parts)?;
        let in_line = self.boxes.as_ref().and_then(|boxes| boxes.begin_message(lane));
        self.send_message(note).await.map_err(|error| self.lost(lane, error))?;
        if let Some(in_line) = in_line {
            in_line.sent();
        }
        Ok(())
    }

    /// Begins an exchange of one short note each way, without a message: each lies where the other side looks. `None` if a note
    /// cannot lie there now, so that it must be [sent](Self::send), or if the connection is over.
    pub fn exchange(&self, lane: u16) -> Option<NoteExchange<'_>> {
        let exchange = self.boxes.as_ref().filter(|_| !self.connection.is_over())?.exchange(lane)?;
        Some(NoteExchange { notes: self, lane, exchange: Some(exchange) })
    }

    /// Whether the runtime's other tasks should have a turn before the next exchange, because many notes were found without a wait
    /// since this was last true. The caller gives them one: this is false when it is asked again.
    pub fn is_others_turn(&self) -> bool {
        self.connection.queue_pair.is_others_turn()
    }

    fn wake(&self, lane: u16) {
        let Ok(wake_up) = self.message(lane, &[]) else { return };
        if self.connection.protocol.send_note_now(&wake_up).is_some() {
            return;
        }
        if !self.wakes.get(usize::from(lane)).is_some_and(WakesInLine::add) {
            return;
        }
        let (connection, wakes) = (self.connection.clone(), self.wakes.clone());
        let woken = async move {
            let Some(wakes) = wakes.get(usize::from(lane)) else { return };
            let mut count = wakes.count();
            // After an error the connection is over, and wakes whoever waits.
            while connection.protocol.send_note(wake_up.clone()).await.is_ok() && wakes.are_left_after(count)
            {
                count = wakes.count();
            }
        };
        self.peer.worker.runtime().spawn("wake the receiver of a note", Box::pin(woken));
    }

    async fn send_message(&self, note: Message) -> Result<(), ChannelError> {
        let protocol = &self.connection.protocol;
        match protocol.send_note_now(&note) {
            Some(sent) => sent,
            None => protocol.send_note(note).await,
        }
    }

    fn check_is_some(parts: &[&[u8]]) -> Result<(), WorkerError> {
        if !parts.iter().all(|part| part.is_empty()) {
            return Ok(());
        }
        let remedy =
            "a note of no bytes wakes its receiver for one that lies in a fast box: send at least one";
        Err(WorkerError::Config { field: "note", value: "0".to_owned(), remedy: remedy.to_owned() })
    }

    fn message(&self, lane: u16, parts: &[&[u8]]) -> Result<Message, WorkerError> {
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

    /// As [`recv`](Self::recv), for a task that awaits something else, too: polling it never looks for the note, which would hold up
    /// the rest.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv).
    pub async fn recv_beside(&self, lane: u16) -> Result<EagerContent, WorkerError> {
        poll_fn(|context| self.poll_next(lane, context, false)).await
    }

    /// As [`recv`](Self::recv), for futures that are written by hand.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn poll_recv(&self, lane: u16, context: &Context<'_>) -> Poll<Result<EagerContent, WorkerError>> {
        self.poll_next(lane, context, true)
    }

    fn poll_next(
        &self,
        lane: u16,
        context: &Context<'_>,
        may_look: bool,
    ) -> Poll<Result<EagerContent, WorkerError>> {
        let protocol = &self.connection.protocol;
        let polled = match &self.boxes {
            Some(boxes) => self.poll_boxes(boxes, lane, context, may_look),
            None if may_look => protocol.poll_note(self.channel, lane, context),
            None => protocol
                .poll_untaken(self.channel, lane, Some(context), || false)
                .map_ok(Option::unwrap_or_default),
        };
        polled.map_err(|error| self.lost(lane, error))
    }

    /// The next note, in a box or by message.
    fn poll_boxes(
        &self,
        boxes: &ChannelBoxes,
        lane: u16,
        context: &Context<'_>,
        may_look: bool,
    ) -> Poll<Result<EagerContent, ChannelError>> {
        let queue_pair = &self.connection.queue_pair;
        // What is left after the end is bounded.
        if !self.connection.is_over() && queue_pair.is_others_turn() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        // Again if something else was found.
        let mut may_find = true;
        while may_find {
            let taken = self.take(boxes, lane, None);
            if taken.is_ready() {
                return taken;
            }
            may_find = may_look && queue_pair.may_help() && queue_pair.look_for_both(|| boxes.peek(lane));
        }
        boxes.fall_asleep(lane);
        self.take(boxes, lane, Some(context))
    }

    /// The next note, if it has come. Without one, the task of `waits`, if there is one, is woken by the next.
    fn take(
        &self,
        boxes: &ChannelBoxes,
        lane: u16,
        waits: Option<&Context<'_>>,
    ) -> Poll<Result<EagerContent, ChannelError>> {
        let DataConnection { protocol, queue_pair, .. } = &*self.connection;
        let boxed = || {
            let note = boxes.take(lane, self.connection.is_over())?;
            queue_pair.found_on_board();
            Some(EagerContent::from(note))
        };
        let mut note = boxed();
        if let Some(note) = note {
            return Poll::Ready(Ok(note));
        }
        let has_earlier = || {
            note = boxed();
            note.is_some()
        };
        match protocol.poll_untaken(self.channel, lane, waits, has_earlier) {
            Poll::Ready(Ok(Some(message))) => {
                boxes.took_message(lane);
                Poll::Ready(Ok(message))
            }
            Poll::Ready(Ok(None)) => Poll::Ready(Ok(note.unwrap_or_default())),
            // What was put before the connection's end comes before it.
            Poll::Ready(Err(error)) => Poll::Ready(boxed().ok_or(error)),
            Poll::Pending => Poll::Pending,
        }
    }

    fn lost(&self, lane: u16, error: ChannelError) -> WorkerError {
        let key = format!("note in lane {lane} of channel {}", self.channel);
        let transfer = Transfer { peer: self.peer.name(), key: &key, step: None };
        self.connection.lost_error(transfer.name(), error.0)
    }
}

/// A note that lies where the peer looks, and the one that the peer leaves in the same lane. The peer may sleep until this is dropped.
/// A thread that sends or receives in the lane, or sends in every lane, is blocked until this is dropped; the thread that has it would
/// wait for ever. So keep it for some microseconds, and make no other call of these notes meanwhile.
#[must_use = "the peer may sleep until it is dropped"]
pub struct NoteExchange<'notes> {
    notes: &'notes Notes,
    lane: u16,
    /// Until it is dropped.
    exchange: Option<Exchange<'notes>>,
}

impl fmt::Debug for NoteExchange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NoteExchange").field("lane", &self.lane).finish_non_exhaustive()
    }
}

impl NoteExchange<'_> {
    /// Puts this side's note, after writing its number into it. Does nothing the second time.
    pub fn put(&mut self, note: &mut BoxedNote) {
        if let Some(exchange) = &mut self.exchange {
            exchange.put(note);
        }
    }

    /// Copies the peer's next note into `note`, if it has come in the same way. It stays the next until it is
    /// [taken](Self::take).
    pub fn peek(&self, note: &mut BoxedNote) -> bool {
        self.exchange.as_ref().is_some_and(|exchange| exchange.peek(note))
    }

    /// Looks for a few microseconds, if that pays off now, until `found` is true. Returns whether it is.
    pub fn look_for(&self, found: impl FnMut() -> bool) -> bool {
        self.notes.connection.queue_pair.look_for(found)
    }

    /// Whether the peer seems to sleep: then nothing comes before this is dropped.
    pub fn seems_asleep(&self) -> bool {
        self.exchange.as_ref().is_some_and(Exchange::seems_asleep)
    }

    /// Takes the note that [`peek`](Self::peek) gives; false if there is none.
    pub fn take(&mut self) -> bool {
        let is_taken = self.exchange.as_mut().is_some_and(Exchange::take);
        if is_taken {
            self.notes.connection.queue_pair.found_on_board();
        }
        is_taken
    }
}

impl Drop for NoteExchange<'_> {
    fn drop(&mut self) {
        if self.exchange.take().is_some_and(Exchange::settle) {
            self.notes.wake(self.lane);
        }
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        self.connection.protocol.close_notes(self.channel);
    }
}

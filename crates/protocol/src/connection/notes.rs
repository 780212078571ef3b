//! Notes: short messages that no request asks for, for two sides each of which knows what the other sends next, as the ranks of a group
//! do.
//!
//! A note takes one message, where a value of a step takes a request and an answer. Between two workers of one host a note usually takes
//! no message: it travels in the connection's [`Mailbox`].
//!
//! **Order.** Each note in the mailbox carries how many notes its sender had sent by message before it, and its receiver takes it after as
//! many. All that was put before a message is in the mailbox when the message arrives, so the receiver empties the mailbox before it
//! takes the message. So all notes of a connection have one order.
//!
//! **Sleep.** A task that waits for a note parks the lane and looks into the mailbox once more. A sender looks whether the lane is parked
//! after it has put a note. At least one of the two sees what the other did. The sender wakes a parked lane by a note of no bytes.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use super::{Connection, State, send};
use crate::{
    Channel, ChannelError, EagerContent, Mailbox, Message, Note, PeerMisbehaved,
    after::After,
    limits::{NOTE_BYTES_MAX, NOTE_LANES_MAX},
    notes::Place,
};

/// Most notes that are taken out of the mailbox at a time, from a peer that puts more meanwhile. A mailbox has room for fewer.
const TAKEN_AT_A_TIME: usize = 256;

impl<C: Channel> State<C> {
    /// Puts a note into the mailbox, unless messages wait that are before it. Returns how many notes of the peer have come by message.
    fn put_note(&self, place: Place, parts: &[&[u8]]) -> Option<u64> {
        let mailbox = self.line.channel().mailbox()?;
        let counters = &self.line.counters;
        let may_put = self.failure().is_ok() && self.line.has_no_message();
        (may_put && mailbox.put(place, parts, counters.sent.note)).then_some(counters.received.note)
    }

    /// A note has arrived by message.
    pub(super) fn on_note(&mut self, note: Note, after: &mut After<C::Lent>) -> Result<(), PeerMisbehaved> {
        let messages = self.line.counters.received.note;
        self.take_mail(messages.wrapping_sub(1), None, after)?;
        let (lane, is_wake_up) = (note.lane, note.bytes.is_empty());
        if !is_wake_up {
            let tasks = self.notes.arrived(note)?;
            self.concern(tasks, after);
        }
        // A task may sleep although its note is in the mailbox: the note follows this message.
        self.take_mail(messages, None, after)?;
        // The peer wakes a lane once for each time that it is parked.
        if is_wake_up && self.notes.is_lane_awaited(lane) && self.park(lane) {
            self.take_mail(messages, None, after)?;
        }
        Ok(())
    }

    /// The next note of a lane, if it has come.
    fn next_note(
        &mut self,
        place: Place,
        after: &mut After<C::Lent>,
    ) -> Result<Option<EagerContent>, ChannelError> {
        if let Some(note) = self.notes.take(place) {
            return Ok(Some(note));
        }
        // The end of the connection has emptied the mailbox.
        self.failure()?;
        let found = self.take_mail(self.line.counters.received.note, Some(place), after);
        found.map_err(|unfit| ChannelError(unfit.to_string()))
    }

    /// As [`next_note`](Self::next_note). Without one, the next wakes the task of `waker`.
    fn await_note(
        &mut self,
        place: Place,
        waker: &Waker,
        after: &mut After<C::Lent>,
    ) -> Result<Option<EagerContent>, ChannelError> {
        let is_parked = self.notes.is_awaited(place);
        after.drop(self.notes.wait(place, waker));
        if is_parked || !self.park(place.1) { Ok(None) } else { self.next_note(place, after) }
    }

    /// False without a mailbox.
    fn park(&self, lane: u16) -> bool {
        self.line.channel().mailbox().map(|mailbox| mailbox.park(lane)).is_some()
    }

    /// Takes the notes that follow `messages` notes by message out of the mailbox, until one is for the `wanted` lane.
    fn take_mail(
        &mut self,
        messages: u64,
        wanted: Option<Place>,
        after: &mut After<C::Lent>,
    ) -> Result<Option<EagerContent>, PeerMisbehaved> {
        let Self { line, notes, .. } = self;
        let Some(mailbox) = line.channel().mailbox() else { return Ok(None) };
        let mut ignored = 0;
        let mut found = None;
        for note in (0..TAKEN_AT_A_TIME).map_while(|_| mailbox.take(messages)) {
            if wanted == Some((note.channel, note.lane)) {
                line.channel().found_note();
                found = Some(note.bytes);
                break;
            }
            let tasks = notes.arrived(note)?;
            ignored += u64::from(tasks.is_none());
            after.wake(tasks.into_iter().flatten());
        }
        line.counters.ignored += ignored;
        Ok(found)
    }

    /// The connection is over: what the peer has put comes before its end.
    pub(super) fn take_last_mail(&mut self, after: &mut After<C::Lent>) {
        // A peer that broke a rule with it has ended the connection too late.
        let _unfit = self.take_mail(self.line.counters.received.note, None, after);
    }

    /// Sends a wake-up, if one is owed. Returns `false` if it must wait.
    pub(super) fn post_wake_up(&mut self) -> Result<bool, ChannelError> {
        let Some(lane) = self.notes.owed_wake_up() else { return Ok(true) };
        let wake_up = Note { channel: 0, lane, bytes: EagerContent::new() };
        let is_posted = self.post(&Message::Note(wake_up))?;
        if is_posted {
            self.notes.woken(lane);
        }
        Ok(is_posted)
    }
}

impl<C: Channel> Connection<C> {
    /// Opens a channel of notes, of `lanes` lanes, at most [`NOTE_LANES_MAX`]: earlier notes of the peer's were ignored. `None` if it is
    /// open already.
    pub fn open_notes(self: &Arc<Self>, channel: u64, lanes: u16) -> Option<NoteChannel<C>> {
        let is_opened = self.change(|state, after| {
            after.leave_queues();
            if state.failure().is_ok()
                && let Err(unfit) = state.take_mail(state.line.counters.received.note, None, after)
            {
                state.fail(&unfit.to_string(), after);
            }
            state.notes.open(channel, lanes.min(NOTE_LANES_MAX))
        });
        is_opened.then(|| NoteChannel { connection: self.clone(), number: channel })
    }
}

/// An open channel of notes. Dropping it closes the channel: further notes of the peer's are ignored, and those that were not taken are
/// dropped.
pub struct NoteChannel<C: Channel> {
    connection: Arc<Connection<C>>,
    number: u64,
}

impl<C: Channel> fmt::Debug for NoteChannel<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NoteChannel").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<C: Channel> NoteChannel<C> {
    /// A note of `parts`, one behind the other. `None` if it has no bytes, or more than [`NOTE_BYTES_MAX`].
    pub fn note(&self, lane: u16, parts: &[&[u8]]) -> Option<Note> {
        Note::of(self.number, lane, parts)
    }

    /// Sends a note: by the mailbox, or by message when it is its turn.
    ///
    /// # Errors
    /// The connection is over.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is ready, the note may have been sent: any task may post a message that waits for room.
    pub async fn send(&self, note: Note) -> Result<(), ChannelError> {
        match self.put(note.lane, &[&note.bytes]) {
            Some(_wakes) => Ok(()),
            None => send(&self.connection, Message::Note(note)).await,
        }
    }

    /// Puts a note of `parts`, one behind the other, into the mailbox. `None` if it was not put: there is no mailbox, the note has no room
    /// there, or a message waits.
    pub fn put(&self, lane: u16, parts: &[&[u8]]) -> Option<PutNote<'_, C>> {
        self.connection.channel().mailbox()?;
        let messages = self.connection.lock().put_note((self.number, lane), parts)?;
        Some(PutNote { notes: self, lane, messages })
    }

    /// The peer's next note in a lane, after those that were taken. One task at a time awaits a lane. If it `may_look`, the poll may look
    /// for arrivals for some microseconds.
    ///
    /// # Errors
    /// The connection is over, and all notes were taken.
    pub fn poll_next(
        &self,
        lane: u16,
        context: &Context<'_>,
        may_look: bool,
    ) -> Poll<Result<EagerContent, ChannelError>> {
        let (place, channel) = ((self.number, lane), self.connection.channel());
        let mut may_look = may_look && channel.may_help();
        loop {
            let mut messages = 0;
            let found = self.connection.try_change(|state, after| {
                after.leave_queues();
                messages = state.line.counters.received.note;
                let found = state.next_note(place, after)?;
                if found.is_some() || may_look {
                    return Ok(found);
                }
                state.await_note(place, context.waker(), after)
            });
            match found.transpose() {
                Some(found) => return Poll::Ready(found),
                None if !may_look => return Poll::Pending,
                None => may_look = channel.help_beside_mailbox(messages) && channel.may_help(),
            }
        }
    }

    /// The peer's next note in a lane, if it has come. Does not park the lane, so the next note wakes no task.
    ///
    /// # Errors
    /// The connection is over, and all notes were taken.
    pub fn next(&self, lane: u16) -> Result<Option<EagerContent>, ChannelError> {
        self.connection.try_change(|state, after| {
            after.leave_queues();
            state.next_note((self.number, lane), after)
        })
    }

    /// Wakes the peer for what was put in the lane, if it has parked that.
    fn wake(&self, lane: u16) {
        let Some(mailbox) = self.connection.channel().mailbox() else { return };
        if !mailbox.must_wake(lane) {
            return;
        }
        // After an error the connection is over, and wakes every task.
        let _over = self.connection.try_change(|state, after| {
            state.notes.owe_wake_up(lane);
            // Without room the housekeeping task sends it, which each arrival wakes for that.
            state.post_now(after, State::post_wake_up).map(drop)
        });
    }
}

impl<C: Channel> Drop for NoteChannel<C> {
    fn drop(&mut self) {
        let untaken = self.connection.lock().notes.close(self.number);
        drop(untaken);
    }
}

/// A note that was [put](NoteChannel::put). The peer may sleep until this is dropped.
#[must_use = "the peer may sleep until it is dropped"]
pub struct PutNote<'notes, C: Channel> {
    notes: &'notes NoteChannel<C>,
    lane: u16,
    /// How many notes of the peer had come by message.
    messages: u64,
}

impl<C: Channel> fmt::Debug for PutNote<'_, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PutNote").field("lane", &self.lane).finish_non_exhaustive()
    }
}

impl<C: Channel> PutNote<'_, C> {
    /// Whether the peer's next note is in the mailbox. May miss it if notes come by message, too.
    pub fn has_next(&self) -> bool {
        self.mailbox().is_some_and(|mailbox| mailbox.has_next(self.messages))
    }

    /// Whether the peer seems to sleep. Then nothing comes before this is dropped.
    pub fn seems_asleep(&self) -> bool {
        self.mailbox().is_some_and(|mailbox| mailbox.is_parked(self.lane))
    }

    fn mailbox(&self) -> Option<&dyn Mailbox> {
        self.notes.connection.channel().mailbox()
    }
}

impl<C: Channel> Drop for PutNote<'_, C> {
    fn drop(&mut self) {
        self.notes.wake(self.lane);
    }
}

impl Note {
    /// A note of `parts`, one behind the other. `None` if it has no bytes, or more than [`NOTE_BYTES_MAX`].
    pub fn of(channel: u64, lane: u16, parts: &[&[u8]]) -> Option<Self> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if !(1..=NOTE_BYTES_MAX).contains(&length) {
            return None;
        }
        let mut bytes = EagerContent::with_capacity(length);
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        Some(Self { channel, lane, bytes })
    }
}

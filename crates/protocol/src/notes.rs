//! Notes that have come and were not taken.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    task::Waker,
};

use smallvec::SmallVec;

use crate::{
    EagerContent, Note, PeerMisbehaved,
    limits::{NOTE_EVERY_LANE, NOTES_UNTAKEN_MAX},
};

/// The channels that this side has open, by number. A peer cannot open one, so what it may cost is bounded by what this side has
/// opened.
#[derive(Debug, Default)]
pub(crate) struct NoteChannels(BTreeMap<u64, Box<[Lane]>>);

#[derive(Debug, Default)]
struct Lane {
    untaken: VecDeque<EagerContent>,
    /// The task that waits for the next.
    waker: Option<Waker>,
    /// A note of no bytes has come.
    is_woken: bool,
}

/// The wakers of tasks that can continue. Usually there is one.
pub(crate) type Woken = SmallVec<[Waker; 1]>;

impl Lane {
    /// Whether there is room for a note. One of no bytes takes none.
    fn fits(&self, bytes: &EagerContent) -> bool {
        bytes.is_empty() || self.untaken.len() < NOTES_UNTAKEN_MAX
    }

    /// Takes a note in. Returns the waker of the task that waits for it.
    fn take_in(&mut self, bytes: EagerContent) -> Option<Waker> {
        if bytes.is_empty() {
            self.is_woken = true;
        } else {
            self.untaken.push_back(bytes);
        }
        self.waker.take()
    }
}

impl NoteChannels {
    /// Opens a channel. Returns false if it is open already.
    pub(crate) fn open(&mut self, channel: u64, lanes: u16) -> bool {
        let is_new = !self.0.contains_key(&channel);
        if is_new {
            self.0.insert(channel, (0..lanes).map(|_| Lane::default()).collect());
        }
        is_new
    }

    /// Closes a channel. Returns the notes that were not taken, to be dropped without the lock.
    pub(crate) fn close(&mut self, channel: u64) -> impl Sized + use<> {
        self.0.remove(&channel)
    }

    /// A note has come. A note of no bytes wakes the task that waits in its lane, and is never taken; it may come late, to a
    /// channel that has fewer lanes now. Returns the wakers of the tasks that wait for the note, and `None` if the channel is not
    /// open.
    pub(crate) fn arrived(&mut self, note: Note) -> Result<Option<Woken>, PeerMisbehaved> {
        let Some(lanes) = self.0.get_mut(&note.channel) else { return Ok(None) };
        if note.lane == NOTE_EVERY_LANE {
            // If a lane has no room for the note, no lane takes it in, and no waker is taken out.
            if !lanes.iter().all(|lane| lane.fits(&note.bytes)) {
                return Err(PeerMisbehaved::NoteUnfit);
            }
            let woken = lanes.iter_mut().filter_map(|lane| lane.take_in(note.bytes.clone()));
            return Ok(Some(woken.collect()));
        }
        match lanes.get_mut(usize::from(note.lane)) {
            Some(lane) if lane.fits(&note.bytes) => Ok(Some(lane.take_in(note.bytes).into_iter().collect())),
            None if note.bytes.is_empty() => Ok(None),
            _ => Err(PeerMisbehaved::NoteUnfit),
        }
    }

    /// Whether the lane has a note, or a note of no bytes has come since the last call.
    pub(crate) fn has_news(&mut self, channel: u64, lane: u16) -> bool {
        self.lane(channel, lane).is_some_and(|lane| mem::take(&mut lane.is_woken) || !lane.untaken.is_empty())
    }

    pub(crate) fn take(&mut self, channel: u64, lane: u16) -> Option<EagerContent> {
        self.lane(channel, lane)?.untaken.pop_front()
    }

    /// Stores the waker of the task that waits for the next note of a lane. Returns the waker that is replaced.
    pub(crate) fn wait(&mut self, channel: u64, lane: u16, waker: &Waker) -> Option<Waker> {
        let lane = self.lane(channel, lane)?;
        match &lane.waker {
            Some(known) if known.will_wake(waker) => None,
            _ => lane.waker.replace(waker.clone()),
        }
    }

    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        self.0.values_mut().flatten().filter_map(|lane| lane.waker.take())
    }

    fn lane(&mut self, channel: u64, lane: u16) -> Option<&mut Lane> {
        self.0.get_mut(&channel)?.get_mut(usize::from(lane))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(lane: u16, byte: u8) -> Note {
        Note { channel: 7, lane, bytes: EagerContent::from_slice(&[byte]) }
    }

    #[test]
    fn notes_of_a_lane_are_taken_in_order_and_lanes_are_apart() {
        let mut notes = NoteChannels::default();
        assert!(notes.open(7, 2) && !notes.open(7, 1), "a channel is open once");
        for (lane, byte) in [(1, 1), (0, 2), (1, 3)] {
            assert!(notes.arrived(note(lane, byte)).unwrap().is_some());
        }
        let mut taken = |lane| notes.take(7, lane).map(|bytes| bytes[0]);
        assert_eq!([taken(1), taken(0), taken(1), taken(1)], [Some(1), Some(2), Some(3), None]);
    }

    #[test]
    fn notes_of_a_channel_that_is_not_open_are_ignored_and_of_no_lane_refused() {
        let mut notes = NoteChannels::default();
        assert!(notes.arrived(note(0, 1)).unwrap().is_none());
        notes.open(7, 1);
        assert_eq!(notes.arrived(note(1, 1)).unwrap_err(), PeerMisbehaved::NoteUnfit);
        drop(notes.close(7));
        assert!(notes.arrived(note(1, 1)).unwrap().is_none());
        assert!(notes.take(7, 0).is_none());
    }

    #[test]
    fn a_lane_holds_a_bounded_number_of_notes() {
        let mut notes = NoteChannels::default();
        notes.open(7, 2);
        for _ in 0..NOTES_UNTAKEN_MAX {
            notes.arrived(note(0, 1)).unwrap();
        }
        assert_eq!(notes.arrived(note(0, 1)).unwrap_err(), PeerMisbehaved::NoteUnfit);
        assert!(notes.arrived(note(1, 1)).is_ok(), "the other lane has room");
    }

    #[test]
    fn a_note_for_every_lane_comes_behind_those_of_each() {
        let mut notes = NoteChannels::default();
        notes.open(7, 3);
        notes.arrived(note(1, 1)).unwrap();
        assert!(notes.wait(7, 0, Waker::noop()).is_none() && notes.wait(7, 2, Waker::noop()).is_none());
        let woken = notes.arrived(note(NOTE_EVERY_LANE, 2)).unwrap();
        assert_eq!(woken.map(|woken| woken.len()), Some(2));
        let mut taken = |lane| notes.take(7, lane).map(|bytes| bytes[0]);
        assert_eq!([taken(0), taken(1), taken(1), taken(2)], [Some(2), Some(1), Some(2), Some(2)]);
        for _ in 0..NOTES_UNTAKEN_MAX {
            notes.arrived(note(2, 1)).unwrap();
        }
        notes.wait(7, 1, Waker::noop());
        assert_eq!(notes.arrived(note(NOTE_EVERY_LANE, 1)).unwrap_err(), PeerMisbehaved::NoteUnfit);
        assert_eq!(
            notes.wakers().count(),
            1,
            "who waits is still known, to be woken by the connection's end"
        );
    }

    #[test]
    fn a_task_that_waits_is_woken_by_the_next_note_once() {
        let mut notes = NoteChannels::default();
        notes.open(7, 1);
        assert!(notes.wait(7, 0, Waker::noop()).is_none());
        assert_eq!(notes.arrived(note(0, 1)).unwrap().map(|woken| woken.len()), Some(1));
        assert_eq!(notes.arrived(note(0, 2)).unwrap().map(|woken| woken.len()), Some(0));
        notes.wait(7, 0, Waker::noop());
        assert_eq!(notes.wakers().count(), 1);
    }

    #[test]
    fn a_note_of_no_bytes_wakes_and_is_not_taken_however_many_come() {
        let mut notes = NoteChannels::default();
        notes.open(7, 2);
        notes.wait(7, 0, Waker::noop());
        let empty = |lane| Note { channel: 7, lane, bytes: EagerContent::default() };
        assert_eq!(notes.arrived(empty(0)).unwrap().map(|woken| woken.len()), Some(1));
        assert!(notes.has_news(7, 0) && !notes.has_news(7, 0) && !notes.has_news(7, 1));
        for _ in 0..NOTES_UNTAKEN_MAX {
            notes.arrived(note(0, 1)).unwrap();
        }
        assert!(notes.arrived(empty(0)).is_ok() && notes.arrived(empty(NOTE_EVERY_LANE)).is_ok());
        for _ in 0..NOTES_UNTAKEN_MAX {
            assert!(notes.has_news(7, 0) && notes.take(7, 0).is_some());
        }
        assert!(notes.take(7, 0).is_none() && !notes.has_news(7, 0) && notes.has_news(7, 1));
        assert!(
            notes.arrived(empty(2)).unwrap().is_none(),
            "the channel had this lane when it was open before"
        );
    }
}

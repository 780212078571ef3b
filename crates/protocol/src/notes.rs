//! Notes that have come and were not taken, the tasks that wait for them, and the wake-ups that are owed to the peer.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
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
pub(crate) struct NoteChannels {
    open: BTreeMap<u64, Box<[Lane]>>,
    /// The parked lanes of the peer that are to be woken, one bit for each.
    owed: u64,
}

#[derive(Debug, Default)]
struct Lane {
    untaken: VecDeque<EagerContent>,
    /// The task that waits for the next. While there is one, the lane is parked, or the peer has sent a wake-up.
    waker: Option<Waker>,
}

/// The wakers of tasks that can continue. Usually there is one.
pub(crate) type Woken = SmallVec<[Waker; 1]>;

/// A channel, and one of its lanes.
pub(crate) type Place = (u64, u16);

impl Lane {
    fn fits(&self) -> bool {
        self.untaken.len() < NOTES_UNTAKEN_MAX
    }

    /// Takes a note in. Returns the waker of the task that waits for it.
    fn take_in(&mut self, bytes: EagerContent) -> Option<Waker> {
        self.untaken.push_back(bytes);
        self.waker.take()
    }
}

impl NoteChannels {
    /// Opens a channel. Returns false if it is open already.
    pub(crate) fn open(&mut self, channel: u64, lanes: u16) -> bool {
        let is_new = !self.open.contains_key(&channel);
        if is_new {
            self.open.insert(channel, (0..lanes).map(|_| Lane::default()).collect());
        }
        is_new
    }

    /// Whether no channel is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Closes a channel. Returns the notes that were not taken, to be dropped without the lock.
    pub(crate) fn close(&mut self, channel: u64) -> impl Sized + use<> {
        self.open.remove(&channel)
    }

    /// A note has come. Returns the wakers of the tasks that wait for it, and `None` if its channel is not open.
    pub(crate) fn arrived(&mut self, note: Note) -> Result<Option<Woken>, PeerMisbehaved> {
        let Some(lanes) = self.open.get_mut(&note.channel) else { return Ok(None) };
        if note.lane == NOTE_EVERY_LANE {
            // If a lane has no room for the note, no lane takes it in, and no waker is taken out.
            if !lanes.iter().all(Lane::fits) {
                return Err(PeerMisbehaved::NoteUnfit);
            }
            let woken = lanes.iter_mut().filter_map(|lane| lane.take_in(note.bytes.clone()));
            return Ok(Some(woken.collect()));
        }
        let lane = lanes.get_mut(usize::from(note.lane)).filter(|lane| lane.fits());
        let lane = lane.ok_or(PeerMisbehaved::NoteUnfit)?;
        Ok(Some(lane.take_in(note.bytes).into_iter().collect()))
    }

    /// The next note of a lane.
    pub(crate) fn take(&mut self, place: Place) -> Option<EagerContent> {
        self.lane(place)?.untaken.pop_front()
    }

    /// Stores the waker of the task that waits for the next note of a lane. Returns the waker that is replaced.
    pub(crate) fn wait(&mut self, place: Place, waker: &Waker) -> Option<Waker> {
        let lane = self.lane(place)?;
        match &lane.waker {
            Some(known) if known.will_wake(waker) => None,
            _ => lane.waker.replace(waker.clone()),
        }
    }

    /// The tasks that wait for a note. None waits from now on.
    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        self.open.values_mut().flatten().filter_map(|lane| lane.waker.take())
    }

    /// Whether a task waits for the next note of a lane.
    pub(crate) fn is_awaited(&self, (channel, lane): Place) -> bool {
        let lane = self.open.get(&channel).and_then(|lanes| lanes.get(usize::from(lane)));
        lane.is_some_and(|lane| lane.waker.is_some())
    }

    /// Whether a task waits in this lane of any channel.
    pub(crate) fn is_lane_awaited(&self, lane: u16) -> bool {
        self.open.keys().any(|channel| self.is_awaited((*channel, lane)))
    }

    /// The peer's lane is to be woken. At most once, however often that is said before it is.
    pub(crate) fn owe_wake_up(&mut self, lane: u16) {
        self.owed |= 1 << (lane % 64);
    }

    /// The next lane that is to be woken.
    pub(crate) fn owed_wake_up(&self) -> Option<u16> {
        (self.owed != 0).then(|| self.owed.trailing_zeros() as u16)
    }

    /// The wake-up of the lane was sent.
    pub(crate) fn woken(&mut self, lane: u16) {
        self.owed &= !(1 << (lane % 64));
    }

    fn lane(&mut self, (channel, lane): Place) -> Option<&mut Lane> {
        self.open.get_mut(&channel)?.get_mut(usize::from(lane))
    }
}

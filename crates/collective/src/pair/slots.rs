//! Which slots are in use on this rank.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::oneshot;

use crate::error::GroupError;

/// The other rank, and the number of the slot.
pub(super) type Place = (usize, u64);

/// The slots in use.
#[derive(Debug, Default)]
pub(super) struct Slots {
    sending: BTreeSet<Place>,
    receiving: BTreeMap<Place, Receiving>,
    /// For each rank, how many tasks take its messages in. None without any.
    tasks: BTreeMap<usize, usize>,
    /// How many receive buffers there were.
    buffers: u64,
    /// Ranks of which no more messages to buffers come, and why. It is not known which of their send buffers have ended, so the next
    /// receive buffer of a slot could take messages of an earlier one.
    lost: BTreeMap<usize, GroupError>,
}

/// The latest receive buffer of a slot.
#[derive(Debug)]
struct Receiving {
    buffer: u64,
    /// The user has the buffer.
    is_held: bool,
    /// Completes when its task ends; `None` if that has ended, or the next one awaits it.
    ended: Option<oneshot::Receiver<()>>,
}

/// The place of a new receive buffer.
#[derive(Debug)]
pub(super) struct Opened {
    /// Its number among all receive buffers.
    pub(super) buffer: u64,
    /// Dropped when its task ends.
    pub(super) running: oneshot::Sender<()>,
    /// Completes when the task of the slot's earlier buffer has ended.
    pub(super) before: Option<oneshot::Receiver<()>>,
}

impl Slots {
    /// Takes the slot for a send buffer.
    pub(super) fn open_sending(&mut self, place: Place) -> Result<(), GroupError> {
        if self.sending.insert(place) { Ok(()) } else { Err(in_use(place)) }
    }

    pub(super) fn close_sending(&mut self, place: Place) {
        self.sending.remove(&place);
    }

    /// Takes the slot for a receive buffer.
    pub(super) fn open_receiving(&mut self, place: Place, most: usize) -> Result<Opened, GroupError> {
        if let Some(lost) = self.lost.get(&place.0) {
            return Err(lost.clone());
        }
        let tasks = self.tasks.get(&place.0).copied().unwrap_or_default();
        if tasks >= most {
            return Err(GroupError::Argument {
                field: "slot",
                value: place.1.to_string(),
                remedy: format!(
                    "{tasks} receive buffers await rank {}, the maximum is {most}: drop some on both sides",
                    place.0
                ),
            });
        }
        let before = match self.receiving.get_mut(&place) {
            Some(Receiving { is_held: true, .. }) => return Err(in_use(place)),
            Some(earlier) => earlier.ended.take(),
            None => None,
        };
        let (running, ended) = oneshot::channel();
        self.buffers += 1;
        let buffer = self.buffers;
        self.receiving.insert(place, Receiving { buffer, is_held: true, ended: Some(ended) });
        *self.tasks.entry(place.0).or_default() += 1;
        Ok(Opened { buffer, running, before })
    }

    /// No more messages to buffers come from a rank.
    pub(super) fn lose(&mut self, rank: usize, why: &GroupError) {
        self.lost.entry(rank).or_insert_with(|| why.clone());
    }

    /// The user has dropped a receive buffer.
    pub(super) fn close_receiving(&mut self, place: Place, buffer: u64) {
        self.change(place, buffer, |receiving| receiving.is_held = false);
    }

    /// The task of a receive buffer has ended.
    pub(super) fn task_ended(&mut self, place: Place, buffer: u64) {
        self.change(place, buffer, |receiving| receiving.ended = None);
        if let Some(tasks) = self.tasks.get_mut(&place.0) {
            *tasks -= 1;
            if *tasks == 0 {
                self.tasks.remove(&place.0);
            }
        }
    }

    /// Changes the latest receive buffer of a slot, if it is `buffer`. One that nobody holds and without a task is forgotten.
    fn change(&mut self, place: Place, buffer: u64, change: impl FnOnce(&mut Receiving)) {
        let Some(receiving) = self.receiving.get_mut(&place).filter(|latest| latest.buffer == buffer) else {
            return;
        };
        change(receiving);
        if !receiving.is_held && receiving.ended.is_none() {
            self.receiving.remove(&place);
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.sending.is_empty() && self.receiving.is_empty() && self.tasks.is_empty()
    }
}

fn in_use((rank, slot): Place) -> GroupError {
    GroupError::Argument {
        field: "slot",
        value: slot.to_string(),
        remedy: format!(
            "a buffer of this direction uses it with rank {rank}: drop that first, or take another slot"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = (1, 7);

    #[test]
    fn a_slot_is_free_again_once_buffer_and_task_have_ended() {
        for task_ends_first in [false, true] {
            let mut slots = Slots::default();
            let Opened { buffer, running, before } = slots.open_receiving(PLACE, 2).unwrap();
            assert!(before.is_none() && slots.open_receiving(PLACE, 2).is_err());
            if task_ends_first {
                slots.task_ended(PLACE, buffer);
                drop(running);
                assert!(slots.open_receiving(PLACE, 2).is_err());
                slots.close_receiving(PLACE, buffer);
            } else {
                slots.close_receiving(PLACE, buffer);
                let next = slots.open_receiving(PLACE, 2).unwrap();
                assert!(slots.open_receiving((1, 8), 2).is_err(), "two tasks are the maximum");
                let mut before = next.before.unwrap();
                assert!(before.try_recv() == Err(oneshot::error::TryRecvError::Empty));
                slots.task_ended(PLACE, buffer);
                drop(running);
                assert!(before.try_recv() == Err(oneshot::error::TryRecvError::Closed));
                slots.close_receiving(PLACE, next.buffer);
                slots.task_ended(PLACE, next.buffer);
            }
            assert!(slots.is_empty(), "{slots:?}");
        }
    }

    #[test]
    fn a_rank_that_is_lost_has_no_more_receive_buffers() {
        let mut slots = Slots::default();
        slots.lose(PLACE.0, &in_use(PLACE));
        assert!(slots.open_receiving((PLACE.0, 99), 2).is_err() && slots.is_empty());
        slots.open_receiving((PLACE.0 + 1, PLACE.1), 2).unwrap();
    }

    #[test]
    fn a_slot_has_one_send_buffer_at_a_time() {
        let mut slots = Slots::default();
        slots.open_sending(PLACE).unwrap();
        let error = slots.open_sending(PLACE).unwrap_err().to_string();
        assert!(error.starts_with("slot = `7`: ") && error.contains("rank 1"), "{error}");
        slots.close_sending(PLACE);
        slots.open_sending(PLACE).unwrap();
    }
}
